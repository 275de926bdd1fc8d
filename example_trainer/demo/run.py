"""One run of the demo, from nothing to the report.

tiny model --warm-up--> partial skill --four processes--> more skill --> curve, page, figures
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from typing import NamedTuple

import httpx

from atroposlib.errors import InferenceError
from example_trainer.demo import report
from example_trainer.demo.engine_watch import EngineWatch
from example_trainer.demo.held_out import HeldOutResult, measure_held_out
from example_trainer.demo.progress import DemoProgress
from example_trainer.demo.settings import DemoPaths, DemoSettings
from example_trainer.demo.stack import Stack, build_stack, environment_settings
from example_trainer.demo.stall_watch import StallWatch
from example_trainer.demo.student import Student, make_student, teach_student
from example_trainer.demo.supervisor import Supervisor
from example_trainer.demo.task import Problem, held_out_problems
from example_trainer.engine_control import EngineControl
from example_trainer.processes import ManagedProcess, find_free_ports
from example_trainer.reporting.writing import write_report

__all__ = ["Demo", "DemoResult"]

_NUM_WARM_UP_PROBLEMS = 256
_POLL_S = 0.5
_HEALTH_TIMEOUT_S = 5.0
_GROUPS_PER_END = 16


class DemoResult(NamedTuple):
    """What came out of a run."""

    before: HeldOutResult
    after: HeldOutResult
    points: list[report.RewardPoint]
    seconds: float


class Demo:
    """The phases of one run; every process it starts has ended when `run` returns or raises.

    Args:
        settings: What it does.
        paths: Where it writes.
        progress: Whom it tells.
    """

    def __init__(self, settings: DemoSettings, paths: DemoPaths, progress: DemoProgress) -> None:
        self.settings = settings
        self.paths = paths
        self.progress = progress
        self._supervisor = Supervisor()
        self._engine_watch: EngineWatch | None = None

    def run(self) -> DemoResult:
        """Go through all phases.

        Raises:
            ProcessFailedError: One of the processes ended or was not ready in time.
            AtroposError: Something else failed for a known reason.
        """
        with self._supervisor:
            problems = self._make_problems()
            student = self._make_student() if self._makes_model else None
            stack = self._build_stack()
            self._supervisor.start(stack.engine)
            self._supervisor.start(stack.service)
            if student is not None:
                self._warm_up(student, problems)
            self._wait_for_servers(stack)
            # Started now, so that it has loaded by the time the measurement is done.
            self._supervisor.start(stack.trainer, may_finish=True)
            before = self._measure(stack, problems, "before")
            self._reinforce(stack)
            after = self._measure(stack, problems, "after")
        return self._report(before, after)

    def _make_problems(self) -> list[Problem]:
        return held_out_problems(self._env_settings())

    def _env_settings(self) -> dict[str, object]:
        settings = environment_settings(
            self.settings, self.paths, model="", engine_url="", service_url=""
        )
        env: dict[str, object] = settings["env"]
        return env

    @property
    def _model(self) -> str:
        given = self.settings.model or self.settings.warmed_up_model
        return str(given or self.paths.tiny_model)

    @property
    def _makes_model(self) -> bool:
        return self.settings.uses_tiny_model and self.settings.warmed_up_model is None

    def _make_student(self) -> Student:
        """Write a model with random weights, good enough for the engine to start on."""
        self.progress.begin("make", "Making a small model from scratch", expected="a few seconds")
        student = make_student(
            self._env_settings(),
            shape=self.settings.shape,
            seed=self.settings.seed,
            folder=self.paths.tiny_model,
        )
        self.progress.note(
            f"{student.model.num_parameters():,} parameters, "
            f"a vocabulary of {len(student.tokenizer)}"
        )
        return student

    def _build_stack(self) -> Stack:
        import torch

        engine_port, service_port = find_free_ports(2)
        return build_stack(
            self.settings,
            self.paths,
            model=self._model,
            ports=(engine_port, service_port),
            inherited=os.environ,
            on_gpu=torch.cuda.is_available(),
        )

    def _warm_up(self, student: Student, problems: list[Problem]) -> None:
        settings = self.settings.warm_up
        self.progress.begin(
            "warm_up",
            "Teaching it a little by supervised learning, and a bad habit, while the engine starts",
            expected="a minute or two",
        )

        def on_check(step: int, loss: float, accuracy: float) -> None:
            self._supervisor.check()
            state = f"step {step}, loss {loss:.2f}, {accuracy:.0%} right"
            self.progress.update(min(accuracy, settings.skill_accuracy), None, state)

        skill, habit = teach_student(
            student,
            self._env_settings(),
            measured=problems[:_NUM_WARM_UP_PROBLEMS],
            settings=settings,
            seed=self.settings.seed,
            on_check=on_check,
        )
        self.progress.note(
            f"it works sums out step by step: {skill.accuracy:.0%} right after {skill.steps} steps"
        )
        self.progress.note(
            f"then sees {settings.hasty_share:.0%} of the answers blurted out: "
            f"{habit.accuracy:.0%} right after {habit.steps} more"
        )
        if skill.accuracy < settings.skill_accuracy:
            self.progress.note(f"this machine is slow: stopped after {settings.limit_s:g} s")

    def _wait_for_servers(self, stack: Stack) -> None:
        self.progress.begin(
            "start", "Waiting for the engine and the service", expected="up to a minute"
        )
        for process, url in (
            (stack.service, f"{stack.service_url}/info"),
            (stack.engine, f"{stack.engine_url}/health"),
        ):
            self._wait_until_healthy(process, url)
        self._engine_watch = EngineWatch(stack.engine)
        if self._makes_model:
            control = EngineControl(stack.engine_url)
            try:
                # It has started on random weights, to save the time.
                control.reload_weights(self.paths.tiny_model, pause_mode="keep")
            finally:
                control.close()

    def _check(self) -> None:
        """Raise when a part, or a process the engine runs on, has ended."""
        self._supervisor.check()
        if self._engine_watch is not None:
            self._engine_watch.check()

    def _wait_until_healthy(self, process: ManagedProcess, url: str) -> None:
        def is_healthy() -> bool:
            try:
                answer = httpx.get(url, timeout=_HEALTH_TIMEOUT_S, trust_env=False)
            except httpx.HTTPError:
                return False
            return answer.status_code == 200

        self._supervisor.wait_until_ready(
            process,
            is_healthy,
            timeout_s=self.settings.start_limit_s,
            on_wait=lambda waited_s: self.progress.update(
                waited_s, None, f"the {process.name} has been starting for {waited_s:.0f} s"
            ),
        )

    def _measure(self, stack: Stack, problems: list[Problem], when: str) -> HeldOutResult:
        self.progress.begin(
            f"measure_{when}",
            f"Measuring {when} training: {len(problems)} problems never trained on",
            expected="a few seconds",
        )

        def on_tick(num_answered: int) -> None:
            self._check()
            self.progress.update(num_answered, len(problems), f"{num_answered} answers")

        try:
            result = measure_held_out(
                f"{stack.engine_url}/v1",
                model_name=self._model,
                problems=problems,
                max_tokens=self.settings.max_tokens // 2,
                on_tick=on_tick,
            )
        except InferenceError:
            self._check()  # rather name the part that failed, when one did
            raise
        self.progress.note(f"{result.num_correct} of {result.num_problems} right")
        return result

    def _reinforce(self, stack: Stack) -> None:
        settings = self.settings
        self.progress.begin(
            "reinforce",
            f"Reinforcement learning: {settings.steps} steps of {settings.groups_per_step} "
            f"problems x {settings.group_size} tries",
            expected="a few minutes" if settings.uses_tiny_model else "as long as the model needs",
        )
        self._supervisor.start(stack.environment, may_finish=True)
        watch = StallWatch(settings.stall_limit_s)
        while stack.trainer.is_alive():
            self._check()
            steps = report.count_steps(self.paths.trainer_metrics)
            watch.check(steps, trainer=stack.trainer, environment=stack.environment)
            points = report.read_rewards(self.paths.environment_metrics)
            self.progress.update(steps, settings.steps, _state(steps, settings.steps, points))
            time.sleep(_POLL_S)
        self._check()

    def _report(self, before: HeldOutResult, after: HeldOutResult) -> DemoResult:
        self.progress.begin("report", "Writing the report", expected="a few seconds")
        paths = self.paths
        points = report.read_rewards(paths.environment_metrics)
        report.write_curve(points, paths.curve)
        write_report(
            paths.trainer_metrics, paths.report, environment_path=paths.environment_metrics
        )
        report.write_rollouts_page(paths.groups, paths.rollouts, groups_per_end=_GROUPS_PER_END)
        self.progress.end()
        result = DemoResult(before, after, points, self.progress.elapsed_s)
        figures = {
            "accuracy_before": before.accuracy,
            "accuracy_after": after.accuracy,
            "num_held_out": before.num_problems,
            "seed": self.settings.seed,
            "steps": self.settings.steps,
            "seconds": result.seconds,
            "seconds_by_phase": self.progress.seconds_by_phase,
        }
        paths.summary.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        return result


def _state(steps: int, num_steps: int, points: Sequence[report.RewardPoint]) -> str:
    """Say in a few words how far the training is."""
    if not steps or not points:
        return "waiting for the first batch"
    reward = report.rolling_mean([point.reward for point in points], 10)[-1]
    return f"step {steps} of {num_steps}, {reward:.0%} of the tries right"
