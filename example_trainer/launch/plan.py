"""A run written down: which environments, model and flags, and where everything goes.

Nothing here starts anything. `atropos-train` and `atropos-demo` each make a `RunPlan`; `stack`
turns it into commands and `loop` runs them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from example_trainer.reporting.writing import REPORT_NAME

__all__ = [
    "EnvironmentPlan",
    "RunPaths",
    "RunPlan",
    "batch_sequences",
    "batch_shares",
    "shown_path",
]


@dataclass(frozen=True)
class EnvironmentPlan:
    """One environment process of a run."""

    script: Path
    """The environment's file, absolute or relative to `RunPlan.working_folder`."""

    folder: Path
    """Where its settings, groups, metrics and evaluations go."""

    name: str = "environment"
    """What tables call it; differs between the environments of a run."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Section `env` of its YAML file, over what every environment of a run gets."""

    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Further settings by section of the YAML file; they win over `settings`."""

    flags: tuple[str, ...] = ()
    """Flags for its command line, such as `--env.group_size=8`; they win over the YAML file."""

    num_servers: int = 1
    """Inference servers its own defaults name; each becomes the engine of the run."""

    is_evaluated: bool = False
    """Whether its `evaluate` measures something."""

    @property
    def process_name(self) -> str:
        """What messages and logs call its process."""
        return "environment" if self.name == "environment" else f"environment {self.name}"

    @property
    def config(self) -> Path:
        """YAML file the environment is started with."""
        return self.folder / "environment.yaml"

    @property
    def groups(self) -> Path:
        """JSONL file of the groups it has scored."""
        return self.folder / "groups.jsonl"

    @property
    def metrics(self) -> Path:
        """JSONL file of its metrics."""
        return self.folder / "environment_metrics.jsonl"

    def evaluation(self, when: str) -> Path:
        """Folder of the evaluation `before` or `after` training."""
        return self.folder / f"evaluation_{when}"


@dataclass(frozen=True)
class RunPlan:
    """Everything the processes of a run are started with."""

    model: str
    """Hub name or folder of the model: the trainer's, and the name the engine serves it under."""

    environments: tuple[EnvironmentPlan, ...]
    """At least one; names differ."""

    steps: int
    """Optimizer steps of the whole run."""

    sequences_per_step: int
    """Trajectories in one optimizer step."""

    context_tokens: int
    """Longest prompt and completion together, in tokens."""

    work: str = ""
    """What one step consists of, for the progress lines: `16 problems x 8 tries`."""

    expected: str = "as long as the model needs"
    """How long training should take, in words."""

    seed: int = 0
    """Seed of the engine and of the trainer."""

    on_gpu: bool = False
    """Whether engine and trainer run on a GPU."""

    engine_model: Path | None = None
    """Folder the engine loads where that is not `model`."""

    engine_url: str | None = None
    """Address, without `/v1`, of an engine that runs already; None launches one."""

    engine_flags: tuple[str, ...] = ()
    """Further arguments of vLLM."""

    engine_variables: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables of vLLM."""

    trainer_flags: tuple[str, ...] = ()
    """Further flags of `atropos-grpo`; they come last and win."""

    trainer_variables: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables of the trainer."""

    variables: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables of every process."""

    import_folder: Path | None = None
    """Put first on the module search path of every process."""

    working_folder: Path = field(default_factory=Path.cwd)
    """Working directory of the environments."""

    is_resumed: bool = False
    """Whether the trainer goes on from its checkpoints."""

    stall_limit_s: float = 1800.0
    """Seconds without a trainer step after which the run counts as stuck."""

    start_limit_s: float = 600.0
    """Seconds each process may take to answer for the first time."""


@dataclass(frozen=True)
class RunPaths:
    """Where one run writes; every path lies under `output`."""

    output: Path
    """Folder of the run, absolute."""

    @property
    def logs(self) -> Path:
        """Folder with one log per process."""
        return self.output / "logs"

    @property
    def service_data(self) -> Path:
        """Folder of the trajectory service's run."""
        return self.output / "service"

    @property
    def trainer_metrics(self) -> Path:
        """JSONL file of the trainer's metrics, one line per step."""
        return self.output / "trainer_metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Folder where the trainer saves."""
        return self.output / "trainer"

    @property
    def final_model(self) -> Path:
        """Folder of the trained model."""
        return self.checkpoints / "final_model"

    @property
    def curve(self) -> Path:
        """Picture of the reward over the steps."""
        return self.output / "reward_curve.png"

    @property
    def report(self) -> Path:
        """Page of the training's curves and settings."""
        return self.output / REPORT_NAME

    @property
    def rollouts(self) -> Path:
        """Page of rollouts from the first and the last steps."""
        return self.output / "rollouts.html"

    @property
    def summary(self) -> Path:
        """JSON file with the results of the run."""
        return self.output / "summary.json"


def shown_path(path: Path) -> str:
    """Return an absolute path as a person would type it in the working directory."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def batch_sequences(group_sizes: Sequence[int], groups: int) -> int:
    """Return a batch size that whole groups of every size add up to.

    Args:
        group_sizes: Trajectories per group of each environment.
        groups: Groups wanted in one batch.

    Returns:
        About `groups` groups of mean size, rounded up to a multiple of every size's common multiple
        and at least one group of each environment.
    """
    common = math.lcm(*group_sizes)
    wanted = max(sum(group_sizes), round(groups * sum(group_sizes) / len(group_sizes)))
    return -(-wanted // common) * common


def batch_shares(
    weights: Sequence[float], group_sizes: Sequence[int], sequences: int
) -> list[float]:
    """Return the part of each batch that is reserved for each environment.

    Every share is a whole number of groups, less half a sequence, so that rounding never asks for
    one group more than there is room for; what is left goes to the first group that comes.

    Args:
        weights: Positive.
        group_sizes: Trajectories per group, in the same order.
        sequences: Trajectories in a batch.
    """
    total = sum(weights)
    shares = []
    for weight, size in zip(weights, group_sizes, strict=True):
        groups = max(1, int(sequences * weight / total / size + 1e-9))
        shares.append((groups * size - 0.5) / sequences)
    return shares
