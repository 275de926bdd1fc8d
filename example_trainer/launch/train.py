"""One run of `atropos-train`, from the checked options to the report.

engine, service ──► evaluate ──► environments + trainer ──► evaluate ──► curve, pages, summary
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from atroposlib.errors import ConfigError
from atroposlib.utils.text import without_secrets
from example_trainer.launch import report
from example_trainer.launch.loop import TrainingLoop
from example_trainer.launch.options import RunPaths, RunPlan, TrainOptions
from example_trainer.launch.preflight import RUN_FILE, ModelFacts
from example_trainer.launch.report import RunProgress
from example_trainer.launch.stack import Supervisor, build_stack
from example_trainer.processes import find_free_ports
from example_trainer.reporting.page import HeldOut
from example_trainer.reporting.writing import write_report

__all__ = ["TrainResult", "TrainRun", "needs_untying", "phases", "read_options", "write_options"]

_GROUPS_PER_END = 16
_STEPS_PER_END = 10

Evaluations = Mapping[str, Mapping[str, float]]
"""Environment to metric to value."""


class TrainResult(NamedTuple):
    """What came out of a run."""

    before: Evaluations
    after: Evaluations
    metric: report.RewardMetric
    points: list[report.RewardPoint]
    """Reward around each trainer step."""
    has_rollouts: bool
    """Whether there is a page of rollouts."""
    seconds: float

    @property
    def ends(self) -> tuple[float, float] | None:
        """Mean reward of the first and of the last steps, None without any."""
        rewards = [point.reward for point in self.points]
        size = max(1, min(_STEPS_PER_END, len(rewards) // 2))
        return (sum(rewards[:size]) / size, sum(rewards[-size:]) / size) if rewards else None


def write_options(options: TrainOptions, paths: RunPaths) -> None:
    """Keep the command line of a run in its folder, readable by its owner only.

    Flags may hold keys of providers, which a resumed run needs again.
    """
    text = json.dumps(options.as_json(), indent=2)
    path = paths.output / RUN_FILE
    unfinished = path.with_suffix(".new")
    unfinished.touch(mode=0o600)
    unfinished.write_text(text + "\n", encoding="utf-8")
    unfinished.replace(path)


def read_options(folder: Path) -> TrainOptions:
    """Read the command line of the run in a folder.

    Raises:
        ConfigError: There is no run of `atropos-train`.
    """
    path = folder / RUN_FILE
    try:
        return TrainOptions.from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise ConfigError(
            f"--resume {folder}: there is no run to resume; expected a folder that atropos-train "
            f"has written, with {RUN_FILE}"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--resume {folder}: {path} cannot be read: {error}") from error


def phases(plan: RunPlan, *, unties: bool) -> list[str]:
    """Return the titles of the phases of a run, in their order."""
    evaluated = [each.name for each in plan.environments if each.is_evaluated]
    titles = ["Copy the model for the engine"] if unties else []
    titles.append(
        f"Start the trajectory service and use the engine at {without_secrets(plan.engine_url)}"
        if plan.engine_url
        else "Start the trajectory service and the inference engine"
    )
    if evaluated:
        titles.append(f"Measure before training: evaluate of {', '.join(evaluated)}")
    titles.append(f"Train for {plan.steps} steps of {plan.work}")
    if evaluated:
        titles.append("Measure after training")
    return [*titles, "Write the report"]


class TrainRun:
    """The phases of one run; every process it starts has ended when `run` returns or raises.

    Args:
        plan: What is run.
        paths: Where it writes.
        progress: Where the phases are shown.
        model: Facts about the model.
    """

    def __init__(
        self, plan: RunPlan, paths: RunPaths, progress: RunProgress, *, model: ModelFacts
    ) -> None:
        self._plan = plan
        self._paths = paths
        self._progress = progress
        self._unties = needs_untying(plan, model)
        self._supervisor = Supervisor()

    def run(self) -> TrainResult:
        """Go through all phases.

        Raises:
            ProcessFailedError: One of the processes ended or was not ready in time.
            AtroposError: Something else failed for a known reason.
        """
        with self._supervisor:
            if self._unties:
                self._plan = replace(self._plan, engine_model=self._untie())
            loop = self._build_loop()
            loop.start_servers()
            loop.wait_for_servers(reload_from=None)
            before = self._evaluate(loop, "before")
            loop.start_trainer()
            loop.reinforce()
            after = self._evaluate(loop, "after")
        return self._report(before, after)

    def _untie(self) -> Path:
        """Write the model with an output layer of its own, which vLLM on a CPU can replace."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from example_trainer.weight_sync import export_for_engine

        self._progress.begin("copy", "Copying the model for the engine", expected="a minute")
        folder = self._paths.output / "engine_model"
        if not folder.is_dir():
            model = AutoModelForCausalLM.from_pretrained(self._plan.model)
            tokenizer = AutoTokenizer.from_pretrained(self._plan.model)
            export_for_engine(model, folder, tokenizer=tokenizer)
        return folder

    def _build_loop(self) -> TrainingLoop:
        engine_port, service_port = find_free_ports(2)
        stack = build_stack(
            self._plan, self._paths, ports=(engine_port, service_port), inherited=os.environ
        )
        return TrainingLoop(
            stack,
            self._plan,
            self._paths,
            progress=self._progress,
            supervisor=self._supervisor,
            reward=None,
        )

    def _evaluate(self, loop: TrainingLoop, when: str) -> Evaluations:
        results: dict[str, Mapping[str, float]] = {}
        for environment in self._plan.environments:
            if not environment.is_evaluated:
                continue
            known = report.read_evaluation(environment.evaluation(when))
            if known and when == "before":  # measured before the run was interrupted
                results[environment.name] = known
                continue
            self._progress.begin(
                f"evaluate_{when}_{environment.name}",
                f"Measuring {when} training: evaluate of {environment.name}",
                expected="as long as its questions take",
            )
            metrics = loop.evaluate(environment, when)
            if metrics:
                results[environment.name] = metrics
                shown = ", ".join(
                    f"{key} {report.plain_number(value)}" for key, value in metrics.items()
                )
                self._progress.note(shown)
        return results

    def _report(self, before: Evaluations, after: Evaluations) -> TrainResult:
        self._progress.begin("report", "Writing the report", expected="a few seconds")
        paths, environments = self._paths, self._plan.environments
        metrics = [environment.metrics for environment in environments]
        metric, points = report.find_rewards(metrics, paths.trainer_metrics)
        if points:
            report.write_curve(points, paths.curve, metric=metric)
        one = metrics[0] if len(metrics) == 1 and metrics[0].is_file() else None
        held_out = [
            HeldOut(f"{name}: {key}", before.get(name, {}).get(key), value)
            for name, results in after.items()
            for key, value in results.items()
        ]
        write_report(paths.trainer_metrics, paths.report, environment_path=one, held_out=held_out)
        num_groups = report.write_rollouts_page(
            [report.groups_files(environment.groups) for environment in environments],
            paths.rollouts,
            groups_per_end=_GROUPS_PER_END,
        )
        self._progress.end()
        result = TrainResult(
            before, after, metric, points, num_groups > 0, self._progress.elapsed_s
        )
        self._write_summary(result)
        return result

    def _write_summary(self, result: TrainResult) -> None:
        summary = {
            "model": self._plan.model,
            "environments": [environment.name for environment in self._plan.environments],
            "steps": self._plan.steps,
            "seed": self._plan.seed,
            "evaluations_before": result.before,
            "evaluations_after": result.after,
            "reward_metric": result.metric.key,
            "reward_first_and_last_steps": result.ends,
            "seconds": result.seconds,
            "seconds_by_phase": self._progress.seconds_by_phase,
        }
        self._paths.summary.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def needs_untying(plan: RunPlan, model: ModelFacts) -> bool:
    """Whether the engine needs a copy of the model whose output layer is not its embedding.

    vLLM on a CPU keeps a packed copy of a tied output layer, which in-place updates do not reach.
    """
    return model.is_tied and not plan.on_gpu and plan.engine_url is None
