"""The running loop: its four processes started in order, waited for, and watched while they train.

start_servers ──► wait_for_servers ──► start_trainer ──► reinforce ──► the trainer has ended
"""

from __future__ import annotations

import time
from pathlib import Path

import httpx

from example_trainer.demo import report
from example_trainer.demo.engine_watch import EngineWatch
from example_trainer.demo.progress import DemoProgress
from example_trainer.demo.settings import DemoPaths, DemoSettings
from example_trainer.demo.stack import Stack
from example_trainer.demo.stall_watch import StallWatch
from example_trainer.demo.supervisor import Supervisor
from example_trainer.engine_control import EngineControl
from example_trainer.processes import ManagedProcess

__all__ = ["TrainingLoop"]

_POLL_S = 0.5
_HEALTH_TIMEOUT_S = 5.0


class TrainingLoop:
    """The processes of one run; `supervisor` ends them.

    Args:
        stack: What is started; nothing of it runs yet.
        settings: What the run does.
        paths: Where it writes.
        progress: Whom it tells.
        supervisor: Owns the processes.
        reward: What the environment logs of its tries.
    """

    def __init__(
        self,
        stack: Stack,
        settings: DemoSettings,
        paths: DemoPaths,
        *,
        progress: DemoProgress,
        supervisor: Supervisor,
        reward: report.RewardMetric = report.SHARE_RIGHT,
    ) -> None:
        self.stack = stack
        self._settings = settings
        self._paths = paths
        self._progress = progress
        self._supervisor = supervisor
        self._reward = reward
        self._engine_watch: EngineWatch | None = None

    def start_servers(self) -> None:
        """Start the engine and the service, and return before they answer."""
        self._supervisor.start(self.stack.engine)
        self._supervisor.start(self.stack.service)

    def wait_for_servers(self, *, reload_from: Path | None) -> None:
        """Wait until both answer.

        Args:
            reload_from: Folder whose weights the engine then takes, because they have changed
                since it was started.

        Raises:
            ProcessFailedError: One of them ended or was not ready in time.
        """
        stack = self.stack
        self._progress.begin(
            "start", "Waiting for the engine and the service", expected="up to a minute"
        )
        for process, url in (
            (stack.service, f"{stack.service_url}/info"),
            (stack.engine, f"{stack.engine_url}/health"),
        ):
            self._wait_until_healthy(process, url)
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
        """Raise when a part, or a process the engine runs on, has ended."""
        self._supervisor.check()
        if self._engine_watch is not None:
            self._engine_watch.check()

    def reinforce(self) -> None:
        """Start the environment and wait until the trainer has done all its steps.

        Raises:
            ProcessFailedError: A process ended that should not have, or nothing happens.
        """
        settings, stack = self._settings, self.stack
        self._progress.begin(
            "reinforce",
            f"Reinforcement learning: {settings.steps} steps of {settings.groups_per_step} "
            f"problems x {settings.group_size} tries",
            expected="a few minutes" if settings.uses_tiny_model else "as long as the model needs",
        )
        self._supervisor.start(stack.environment, may_finish=True)
        watch = StallWatch(settings.stall_limit_s)
        while stack.trainer.is_alive():
            self.check()
            steps = report.count_steps(self._paths.trainer_metrics)
            watch.check(steps, trainer=stack.trainer, environment=stack.environment)
            self._progress.update(steps, settings.steps, self._state(steps))
            time.sleep(_POLL_S)
        self.check()

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
            timeout_s=self._settings.start_limit_s,
            on_wait=lambda waited_s: self._progress.update(
                waited_s, None, f"the {process.name} has been starting for {waited_s:.0f} s"
            ),
        )

    def _state(self, steps: int) -> str:
        """Say in a few words how far the training is."""
        points = report.read_rewards(self._paths.environment_metrics, self._reward)
        if not steps or not points:
            return "waiting for the first batch"
        reward = report.rolling_mean([point.reward for point in points], 10)[-1]
        return f"step {steps} of {self._settings.steps}, {self._reward.summary.format(reward)}"
