"""What one run of the demo does and where it writes: chosen values, folders, addresses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from example_trainer.demo.repository import ENVIRONMENT_DOOR
from example_trainer.demo.tiny_model import TinyModelShape
from example_trainer.launch.plan import RunPaths

__all__ = ["DemoPaths", "DemoSettings", "TaskSettings", "WarmUpSettings", "settings_for"]

Profile = Literal["full", "quick"]


@dataclass(frozen=True)
class TaskSettings:
    """The reasoning-gym task the model learns."""

    name: str = "chain_sum"
    """Name of the task in the reasoning-gym package."""

    num_terms: int = 3
    """Numbers in one sum; with one digit each, three make 4,000 different problems."""

    num_digits: int = 1
    """Digits of each number."""

    system_prompt: str | None = "Give the answer in <answer> tags."
    """What the model is told first; None leaves the environment's own prompt."""

    @property
    def params(self) -> dict[str, int]:
        """Parameters of the task as reasoning-gym names them."""
        return {
            "min_terms": self.num_terms,
            "max_terms": self.num_terms,
            "min_digits": self.num_digits,
            "max_digits": self.num_digits,
        }


@dataclass(frozen=True)
class WarmUpSettings:
    """Supervised learning in two parts: a skill, then a bad habit that leaves it partial.

    The first part shows worked solutions. In the second some solutions answer at once, as in data
    made by people in a hurry, and the model, no good at that, gets those wrong. Both parts end on
    measured accuracy, so that every seed starts alike.
    """

    skill_accuracy: float = 0.6
    """The first part ends once this share of held-out problems is answered correctly."""

    start_accuracy: tuple[float, float] = (0.33, 0.5)
    """The second part ends once the share answered correctly lies between these."""

    hasty_share: float = 0.4
    """Share of the solutions of the second part that answer at once."""

    limit_s: float = 240.0
    """Seconds after which each part ends in any case."""

    lr: float = 2e-3
    """Learning rate of the first part."""

    habit_lr: float = 1e-3
    """Learning rate of the second part; gentle enough to keep what the first has taught."""

    batch_size: int = 64
    """Conversations per step."""

    num_conversations: int = 20_000
    """Conversations drawn for it, held-out problems left out."""

    steps_per_check: int = 20
    """Steps between two measurements; the habit needs as many to settle."""


@dataclass(frozen=True)
class DemoSettings:
    """Everything one run of the demo can be told."""

    model: str | None = None
    """Hub name or folder of a model; None makes a tiny one and warms it up."""

    seed: int = 0
    """Seed of the weights, the problems, the sampling and the trainer."""

    steps: int = 60
    """Optimiser steps of the reinforcement learning."""

    groups_per_step: int = 16
    """Problems in one optimiser step."""

    group_size: int = 8
    """Completions sampled for each problem."""

    lr: float = 2e-4
    """Learning rate of the reinforcement learning."""

    max_tokens: int = 64
    """Longest prompt and completion together, in tokens."""

    num_held_out: int = 512
    """Problems accuracy is measured on; none of them is ever trained on."""

    task: TaskSettings | None = TaskSettings()
    """What is learned; None where `environment_sections` say it, of any environment."""

    warm_up: WarmUpSettings = WarmUpSettings()
    """How the tiny model gets its partial skill; unused with `model`."""

    warmed_up_model: Path | None = None
    """Folder of a tiny model to start from; None makes one and warms it up."""

    trainer_flags: tuple[str, ...] = ()
    """Further flags of the trainer, such as `--algorithm=gspo`; they come last and win."""

    environment_door: Path = ENVIRONMENT_DOOR
    """Script of the environment, relative to the repository."""

    environment_sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Further settings of the environment, by section of its YAML file; they win."""

    shape: TinyModelShape = field(default_factory=TinyModelShape)
    """Sizes of the tiny model; unused with `model`."""

    stall_limit_s: float = 300.0
    """Seconds without a trainer step after which the run counts as stuck."""

    start_limit_s: float = 600.0
    """Seconds each part may take to answer for the first time."""

    @property
    def uses_tiny_model(self) -> bool:
        """Whether the model is made here."""
        return self.model is None

    @property
    def sequences_per_step(self) -> int:
        """Trajectories in one optimiser step."""
        return self.groups_per_step * self.group_size

    @property
    def sequences_per_pass(self) -> int:
        """Trajectories in one forward pass of the trainer; divides `sequences_per_step`."""
        return self.sequences_per_step if self.uses_tiny_model else 2

    @property
    def eval_seed(self) -> int:
        """Seed of the held-out problems."""
        return 1_000_003 + self.seed


def settings_for(
    profile: Profile,
    *,
    model: str | None = None,
    seed: int = 0,
    steps: int | None = None,
    lr: float | None = None,
    max_tokens: int | None = None,
    algorithm: str | None = None,
) -> DemoSettings:
    """Return the settings of a profile with the given values in place of its own.

    Args:
        profile: `full` learns visibly; `quick` only passes once through every part.
        model: A real model in place of the tiny one; changes the defaults that depend on size.
        seed: See `DemoSettings`.
        steps: None takes the profile's.
        lr: None takes 2e-4 for the tiny model, 1e-6 for a given one.
        max_tokens: None takes 64 for the tiny model, 1024 for a given one.
        algorithm: policy loss of the trainer; None takes the trainer's default.
    """
    task = TaskSettings()
    settings = DemoSettings(model=model, seed=seed)
    if algorithm is not None:
        settings = replace(settings, trainer_flags=(f"--algorithm={algorithm}",))
    if model is not None:
        # A real model follows the environment's own instructions and thinks in more tokens.
        task = replace(task, num_terms=6, num_digits=3, system_prompt=None)
        settings = replace(settings, lr=1e-6, max_tokens=1024, stall_limit_s=1800.0, task=task)
    if profile == "quick":
        # Just enough skill that the tries at one problem differ: equal scores teach nothing.
        settings = replace(
            settings,
            steps=3,
            groups_per_step=4,
            num_held_out=32,
            task=replace(task, num_terms=2),
            shape=replace(settings.shape, num_layers=2),
            warm_up=replace(settings.warm_up, skill_accuracy=0.2, start_accuracy=(0.0, 1.0)),
        )
    return replace(
        settings,
        steps=settings.steps if steps is None else steps,
        lr=settings.lr if lr is None else lr,
        max_tokens=settings.max_tokens if max_tokens is None else max_tokens,
    )


@dataclass(frozen=True)
class DemoPaths(RunPaths):
    """Where one run of the demo writes; the environment's files lie in `output` itself."""

    @property
    def tiny_model(self) -> Path:
        """Folder of the model after its warm-up."""
        return self.output / "model"

    @property
    def environment_config(self) -> Path:
        """YAML file the environment is started with."""
        return self.output / "environment.yaml"

    @property
    def groups(self) -> Path:
        """JSONL file of the groups the environment scored."""
        return self.output / "groups.jsonl"

    @property
    def environment_metrics(self) -> Path:
        """JSONL file of the environment's metrics."""
        return self.output / "environment_metrics.jsonl"
