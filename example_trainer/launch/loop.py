"""The processes of a run, started in order, waited for, and watched while they train.

start_servers ──► wait_for_servers ──► start_trainer ──► reinforce ──► the trainer has ended
                                    └─► evaluate ◄────────────────────────────────────┘

Noticing what is wrong with a run although every process of it is alive.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx

from example_trainer.doors import require_extra
from example_trainer.engine import EngineControl
from example_trainer.launch import report
from example_trainer.launch.options import EnvironmentPlan, RunPaths, RunPlan
from example_trainer.launch.report import RunProgress
from example_trainer.launch.stack import Stack, Supervisor, evaluation_process
from example_trainer.processes import ManagedProcess, ProcessFailedError

__all__ = [
    "EngineWatch",
    "StallWatch",
    "TrainingLoop",
]

_LIMIT_WITHOUT_ENVIRONMENT_S = 60.0
_TITLE = "VLLM::"


class EngineWatch:
    """The named processes of an engine that is ready.

    vLLM's server can outlive its workers for minutes: while it waits for an answer that will not
    come, for instance in the middle of a weight update, it neither ends nor reports it.

    Args:
        engine: Started and ready; the processes it has started by now are those it needs.
    """

    def __init__(self, engine: ManagedProcess) -> None:
        with require_extra("trainer"):
            import psutil

        self._engine = engine
        # Only those that carry the engine's title: other children come and go.
        self._parts = {
            child: title
            for child in psutil.Process(engine.pid).children(recursive=True)
            if (title := " ".join(child.cmdline())).startswith(_TITLE)
        }

    def check(self) -> None:
        """Raise `ProcessFailedError` when one of them is gone."""
        import psutil

        for part, title in self._parts.items():
            try:
                is_gone = part.status() == psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                is_gone = True
            if is_gone:
                raise ProcessFailedError(self._engine, f"lost its process {title.strip()}")


class StallWatch:
    """Raises once the trainer has made no step for too long.

    Args:
        limit_s: Seconds without a step; when an environment has ended, one minute is enough.
        clock: Monotonic seconds.
    """

    def __init__(self, limit_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._num_steps = 0
        self._since = clock()

    def check(
        self,
        num_steps: int,
        *,
        trainer: ManagedProcess,
        environments: Sequence[ManagedProcess],
    ) -> None:
        """Raise `ProcessFailedError` when nothing has happened for too long.

        Args:
            num_steps: Steps the trainer has logged.
            trainer: Named when it is stuck with all environments at work.
            environments: The first that has ended while the trainer still waits is named.
        """
        now = self._clock()
        if num_steps != self._num_steps:
            self._num_steps, self._since = num_steps, now
        stalled_s = now - self._since
        ended = next((each for each in environments if each.returncode is not None), None)
        if ended is not None and stalled_s >= min(_LIMIT_WITHOUT_ENVIRONMENT_S, self._limit_s):
            raise ProcessFailedError(ended, "ended, but the trainer has steps left to do")
        if stalled_s >= self._limit_s:
            raise ProcessFailedError(trainer, f"has made no step for {stalled_s:.0f} s")


_POLL_S = 0.5
_HEALTH_TIMEOUT_S = 5.0
_USAGE_ERROR = 2


class TrainingLoop:
    """The processes of one run; `supervisor` ends them.

    Args:
        stack: The processes; none has been started.
        plan: What the stack was made from.
        paths: Where the run writes.
        progress: Where the phases are shown.
        supervisor: Owns the processes.
        reward: Metric of the first environment that is shown; None finds one.
    """

    def __init__(
        self,
        stack: Stack,
        plan: RunPlan,
        paths: RunPaths,
        *,
        progress: RunProgress,
        supervisor: Supervisor,
        reward: report.RewardMetric | None = report.SHARE_RIGHT,
    ) -> None:
        self.stack = stack
        self._plan = plan
        self._paths = paths
        self._progress = progress
        self._supervisor = supervisor
        self._reward = reward
        self._engine_watch: EngineWatch | None = None

    def start_servers(self) -> None:
        """Start the engine and the service, and return before they answer."""
        if self.stack.engine is not None:
            self._supervisor.start(self.stack.engine)
        self._supervisor.start(self.stack.service)

    def wait_for_servers(self, *, reload_from: Path | None) -> None:
        """Wait until both answer.

        Args:
            reload_from: Folder whose weights the engine then loads, because they have changed
                since it was started.

        Raises:
            ProcessFailedError: One of them ended or was not ready in time.
        """
        stack = self.stack
        self._progress.begin(
            "start", "Waiting for the engine and the service", expected="up to a minute"
        )
        self._wait_until_healthy(stack.service, f"{stack.service_url}/info")
        if stack.engine is not None:
            self._wait_until_healthy(stack.engine, f"{stack.engine_url}/health")
            self._engine_watch = EngineWatch(stack.engine)
        if reload_from is not None:
            control = EngineControl(stack.engine_url)
            try:
                control.reload_weights(reload_from, pause_mode="keep")
            finally:
                control.close()

    def start_trainer(self) -> None:
        """Start the trainer, which loads and then waits for a batch."""
        self._supervisor.start(self.stack.trainer, may_finish=True)

    def check(self) -> None:
        """Raise when a process of the run, or one that the engine runs on, has ended."""
        self._supervisor.check()
        if self._engine_watch is not None:
            self._engine_watch.check()

    def reinforce(self) -> None:
        """Start the environments and wait until the trainer has done all its steps.

        Raises:
            ProcessFailedError: A process ended that should not have, or nothing happens.
        """
        plan, stack = self._plan, self.stack
        self._progress.begin(
            "reinforce",
            f"Reinforcement learning: {plan.steps} steps of {plan.work}",
            expected=plan.expected,
        )
        for environment in stack.environments:
            self._supervisor.start(environment, may_finish=True)
        watch = StallWatch(plan.stall_limit_s)
        while stack.trainer.is_alive():
            self.check()
            steps = report.count_steps(self._paths.trainer_metrics)
            watch.check(steps, trainer=stack.trainer, environments=stack.environments)
            self._progress.update(steps, plan.steps, self._state(steps))
            time.sleep(_POLL_S)
        self.check()

    def evaluate(self, environment: EnvironmentPlan, when: str) -> dict[str, float]:
        """Run the `evaluate` command of an environment against the engine.

        Args:
            environment: One of the plan's.
            when: `before` or `after` training.

        Returns:
            The metrics it reports; empty where it measured nothing, or failed on its own account.

        Raises:
            ProcessFailedError: Its settings are wrong, or a part of the run ended.
        """
        process = evaluation_process(
            self._plan, environment, self._paths, when, inherited=os.environ
        )
        started = time.monotonic()
        # Not supervised: training goes on without an evaluation, as it does while serving.
        with process:
            while process.is_alive():
                self.check()
                waited_s = time.monotonic() - started
                self._progress.update(waited_s, None, f"evaluating for {waited_s:.0f} s")
                time.sleep(_POLL_S)
            self.check()
        if process.returncode == _USAGE_ERROR:
            raise ProcessFailedError(process, process.describe_exit())
        metrics = report.read_evaluation(environment.evaluation(when))
        if process.returncode != 0:
            self._progress.note(f"the {process.name} failed; see {process.log_path}")
        elif not metrics:
            self._progress.note(f"{environment.name}: no result; see {process.log_path}")
        return metrics if process.returncode == 0 else {}

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
            timeout_s=self._plan.start_limit_s,
            on_wait=lambda waited_s: self._progress.update(
                waited_s, None, f"the {process.name} has been starting for {waited_s:.0f} s"
            ),
        )

    def _state(self, steps: int) -> str:
        """Say in a few words how far the training is."""
        metrics = [environment.metrics for environment in self._plan.environments]
        if self._reward is None:
            shown, points = report.find_rewards(metrics, self._paths.trainer_metrics)
        else:
            shown, points = self._reward, report.read_rewards(metrics[0], self._reward)
        if not steps:
            logs = ", ".join(str(process.log_path) for process in self.stack.environments)
            return (
                "waiting for the first batch; groups whose scores are all equal are not sent "
                f"(see {logs})"
            )
        if not points:
            return f"step {steps} of {self._plan.steps}"
        reward = report.rolling_mean([point.reward for point in points], 10)[-1]
        return f"step {steps} of {self._plan.steps}, {shown.summary.format(reward)}"
