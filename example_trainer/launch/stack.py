"""The processes of a run: their commands, the order of their start, and their supervision.

    environments --completions--> inference engine <--new weights-- trainer
        |                                                             ^
        +---------scored groups--> trajectory service --batches-------+

    start_servers ──► wait_for_servers ──► start_trainer ──► reinforce ──► the trainer has ended
                                        └─► evaluate ◄────────────────────────────────────┘
    start_together ───────────────────────────────────► reinforce

`build_stack` creates the processes from the plan, `TrainingLoop` starts them and waits, and
`Supervisor` reports the first one that fails and ends all others.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import yaml

from example_trainer.api import JOURNAL_DIRECTORY
from example_trainer.cli import require_extra
from example_trainer.engine import EngineControl
from example_trainer.launch import report
from example_trainer.launch.options import EnvironmentPlan, RunPaths, RunPlan, shown_path
from example_trainer.launch.report import RunProgress
from example_trainer.processes import ManagedProcess, ProcessFailedError, wait_until_ready
from example_trainer.reporting.page import rolling_mean

_RUN_NAME = "run"
_CPU_ENGINE_GIB = 1


@dataclass(frozen=True)
class Stack:
    """The processes of one run, not started yet, and their addresses."""

    engine: ManagedProcess | None
    """None if a running engine is used."""
    service: ManagedProcess
    environments: tuple[ManagedProcess, ...]
    trainer: ManagedProcess
    engine_url: str
    service_url: str


def build_stack(
    plan: RunPlan, paths: RunPaths, *, ports: tuple[int, int], inherited: Mapping[str, str]
) -> Stack:
    """Create the processes, and write the YAML file of each environment.

    `ports`: free ports for the engine and the service; `inherited`: environment variables.
    """
    engine_port, service_port = ports
    engine_url = plan.engine_url or f"http://127.0.0.1:{engine_port}"
    service_url = f"http://127.0.0.1:{service_port}"
    variables = common_variables(plan, inherited)

    def part(
        name: str,
        arguments: Sequence[str],
        own: Mapping[str, str] | None = None,
        folder: Path = paths.output,
    ) -> ManagedProcess:
        return _process(name, arguments, paths, {**variables, **(own or {})}, folder)

    environments = []
    for environment in plan.environments:
        sections = environment_sections(
            plan, environment, engine_url=engine_url, service_url=service_url
        )
        write_yaml(sections, environment.config)
        command = [*environment.program, "serve", "--config", str(environment.config)]
        environments.append(
            part(
                environment.process_name, [*command, *environment.flags], folder=plan.working_folder
            )
        )
    return Stack(
        engine=None
        if plan.engine_url
        else part(
            "inference engine",
            engine_arguments(plan, port=engine_port),
            engine_variables(plan, inherited),
        ),
        service=part(
            "trajectory service",
            [
                *("-m", "atroposlib.cli.run_api", "--port", str(service_port)),
                *("--data-dir", str(paths.service_data), "--run", _RUN_NAME),
            ],
        ),
        environments=tuple(environments),
        trainer=part(
            "trainer",
            trainer_arguments(plan, paths, engine_url=engine_url, service_url=service_url),
            plan.trainer_variables,
        ),
        engine_url=engine_url,
        service_url=service_url,
    )


def evaluation_process(
    plan: RunPlan,
    environment: EnvironmentPlan,
    paths: RunPaths,
    when: str,
    *,
    inherited: Mapping[str, str],
) -> ManagedProcess:
    """Create the process of an environment's `evaluate` command, and write its YAML file.

    `build_stack` must have been called; `when` is `before` or `after`.
    """
    folder = environment.evaluation(when)
    sections = yaml.safe_load(environment.config.read_text(encoding="utf-8"))
    sections["env"] |= {
        "data_dir_to_save_evals": str(folder),
        "data_path_to_save_groups": None,
        "metrics_path": str(folder / "evaluation_metrics.jsonl"),
    }
    config = folder / "environment.yaml"
    write_yaml(sections, config)
    return _process(
        f"evaluation {when} of {environment.name}",
        [*environment.program, "evaluate", "--config", str(config), *environment.flags],
        paths,
        common_variables(plan, inherited),
        plan.working_folder,
    )


def write_yaml(content: Mapping[str, Any], path: Path) -> None:
    """Write the settings of an environment, which may contain keys, readable by the owner only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump(dict(content), sort_keys=False), encoding="utf-8")


def common_variables(plan: RunPlan, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of every process."""
    variables = {
        **inherited,
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",  # logs are read while they are written
        **plan.variables,
    }
    if plan.import_folder is not None:
        search_path = [str(plan.import_folder), inherited.get("PYTHONPATH", "")]
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, search_path))
    return variables


def engine_variables(plan: RunPlan, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the engine; for vLLM in-place updates, no reports, CPU settings."""
    if plan.engine == "torch":
        return dict(plan.engine_variables)
    variables = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if not plan.on_gpu:
        own = {
            "VLLM_CPU_KVCACHE_SPACE": str(_CPU_ENGINE_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        variables |= {name: inherited.get(name, value) for name, value in own.items()}
    return {**variables, **plan.engine_variables}


def engine_arguments(plan: RunPlan, *, port: int, host: str = "127.0.0.1") -> list[str]:
    """Return the arguments of the engine, a stock vLLM or torch.

    Clients of its routes for in-place updates can load files: another `host` than the loopback
    address needs a private network.
    """
    is_torch = plan.engine == "torch"
    module = "example_trainer.torch_engine" if is_torch else "vllm.entrypoints.openai.api_server"
    arguments = ["-m", module]
    arguments += ["--model", str(plan.engine_model or plan.model)]
    arguments += ["--served-model-name", plan.model]
    arguments += ["--host", host, "--port", str(port)]
    arguments += ["--max-model-len", str(plan.context_tokens), "--seed", str(plan.seed)]
    # After temperature scaling, as the trainer's.
    arguments += ["--logprobs-mode", "processed_logprobs"]
    if is_torch:
        arguments += [] if plan.is_resumed else ["--weight-version", "0"]
    else:
        arguments += ["--disable-uvicorn-access-log"]  # thousands of short requests a minute
    return [*arguments, *plan.engine_flags]


def trainer_arguments(
    plan: RunPlan, paths: RunPaths, *, engine_url: str, service_url: str
) -> list[str]:
    """Return the arguments of the GRPO trainer, which updates the running engine in place."""
    flags = trainer_flags(plan, paths, service_url=service_url)
    if plan.engine_url:
        flags["engine-urls"] = engine_url
    else:
        flags["vllm-port"] = urlsplit(engine_url).port
    if plan.starts_together:
        flags["engine-wait-s"] = plan.start_limit_s
    arguments = ["-m", "example_trainer.grpo"]
    arguments += [f"--{name}={value}" for name, value in flags.items()]
    if plan.is_resumed:
        # The service may have registered the run with fewer steps.
        arguments.append("--replace-run")
        # A trainer that ended before it created its journal cannot resume.
        if (paths.checkpoints / JOURNAL_DIRECTORY / "run.json").is_file():
            arguments.append("--resume")
    return [*arguments, *plan.trainer_flags]


def trainer_flags(plan: RunPlan, paths: RunPaths, *, service_url: str) -> dict[str, Any]:
    """Return the flags of the trainer that do not depend on where the engines are."""
    flags: dict[str, Any] = {
        "model": plan.model,
        "training-steps": plan.steps,
        "batch-size": plan.sequences_per_step,
        "gradient-accumulation-steps": 1,
        "seq-len": plan.context_tokens,
        "seed": plan.seed,
        "weight-bridge-mode": "in_place",
        "vllm-restart-interval": 1,
        "save-path": paths.checkpoints,
        "metrics-path": paths.trainer_metrics,
        "atropos-url": service_url,
    }
    if plan.engine == "torch":
        flags["engine"] = plan.engine
    return flags


def environment_sections(
    plan: RunPlan, environment: EnvironmentPlan, *, engine_url: str, service_url: str
) -> dict[str, Any]:
    """Return the content of an environment's YAML file: the settings that the run determines."""
    engine = {
        "server_type": "vllm",
        "base_url": f"{engine_url}/v1",
        "model_name": plan.model,
        "tokenizer_name": plan.model,
        "api_key": "none",  # pragma: allowlist secret
    }
    sections: dict[str, Any] = {
        "env": {
            "batch_size": plan.sequences_per_step,
            "total_steps": plan.steps,
            # A continued run may have more steps than the service remembers of its trainer.
            "end_with_trainer": False,
            "tokenizer_name": plan.model,
            "rollout_server_url": service_url,
            "rollout_grace_s": 0.0,  # groups of a stopped run are not used
            "use_wandb": False,
            "include_messages": True,
            "data_path_to_save_groups": str(environment.groups),
            "metrics_path": str(environment.metrics),
            **environment.settings,
        },
        "openai": engine,
        "slurm": False,
        "testing": False,
    }
    for name, given in environment.sections.items():
        sections[name] = {**sections.get(name, {}), **given}
    if environment.num_servers > 1:
        # An environment with several servers accepts a list only.
        sections["openai"] = [sections["openai"]] * environment.num_servers
    return sections


def _process(
    name: str, arguments: Sequence[str], paths: RunPaths, variables: Mapping[str, str], folder: Path
) -> ManagedProcess:
    return ManagedProcess(
        name,
        [sys.executable, *arguments],
        log_path=paths.logs / f"{name.replace(' ', '_')}.log",
        env=variables,
        cwd=folder,
    )


_SETTLE_S = 3.0
_DROP_LINES = 200
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
"""Two that end a run, and the one by which `_interrupt` tries again after an import."""
_AGAIN_S = 0.1
_LONGEST_IMPORT_S = 10.0
_LONGEST_END_S = 10.0
"""Longer than `Supervisor.stop` takes; a signal after it ends this process at once."""
_IMPORT_FRAMES = "<frozen importlib._bootstrap>"


class _Received(NamedTuple):
    """A signal, and when it came, in seconds of a monotonic clock."""

    number: int
    time: float


_received: _Received | None = None


@contextlib.contextmanager
def ending_signals() -> Iterator[None]:
    """Raise `KeyboardInterrupt` on SIGINT and `SystemExit(143)` on SIGTERM, once.

    An import that takes a few seconds is finished first: extension modules abort the process, or
    raise another exception, if one is raised while they are loaded. Python drops an exception that
    is raised in a destructor; `check_signals` raises it again.

    Further signals are ignored for some seconds. One after that ends this process at once, and the
    guardians end the others: an exception raised at an unlucky place can leave a lock held, for
    which this process would wait forever.
    """
    global _received
    previous = {number: signal.signal(number, _interrupt) for number in _SIGNALS}
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in previous.items():
            signal.signal(number, handler)
        _received = None


def check_signals() -> None:
    """Raise the exception of a signal that was received within `ending_signals`."""
    if _received is None:
        return
    # A second signal must not interrupt the end of the processes.
    for number in _SIGNALS:
        signal.signal(number, _end_at_once)
    if _received.number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + _received.number)


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _received
    _received = _received or _Received(number, time.monotonic())
    if _is_importing(frame) and time.monotonic() - _received.time < _LONGEST_IMPORT_S:
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
    else:
        check_signals()


def _end_at_once(number: int, _frame: FrameType | None) -> None:
    is_late = _received is not None and time.monotonic() - _received.time >= _LONGEST_END_S
    if is_late and number != signal.SIGALRM:
        os.write(2, b"\nended at once; the other processes are ended as well\n")
        os._exit(128 + number)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != _IMPORT_FRAMES:
        frame = frame.f_back
    return frame is not None


class Supervisor:
    """Starts processes, detects that one has failed, and stops all of them.

    A process that ends by itself has failed, unless it was started with `may_finish` and its exit
    code is 0. As a context manager, it stops every process on exit.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._processes: list[ManagedProcess] = []
        self._may_finish: set[str] = set()

    def start(self, process: ManagedProcess, *, may_finish: bool = False) -> None:
        """Start a process and supervise it."""
        # Added first, so that it is stopped after an interruption of `start`.
        self._processes.append(process)
        if may_finish:
            self._may_finish.add(process.name)
        process.start()

    def forget(self, process: ManagedProcess) -> None:
        """Supervise an ended process no longer, which another may replace."""
        self._processes.remove(process)

    def check(self) -> None:
        """Raise `ProcessFailedError` if a process has failed, and see `check_signals`.

        Processes often fail because one that they depend on has failed. The error names the first
        in the order of their start, after a short time for its end to be detected.
        """
        check_signals()
        if self._first_failed() is None:
            return
        deadline = self._clock() + _SETTLE_S
        while self._processes[0].is_alive() and self._clock() < deadline:
            self._sleep(0.1)
        failed = self._first_failed()
        assert failed is not None
        raise ProcessFailedError(failed, failed.describe_exit())

    def wait_until_ready(
        self,
        process: ManagedProcess,
        is_ready: Callable[[], bool],
        *,
        timeout_s: float,
        on_wait: Callable[[float], None] | None = None,
    ) -> float:
        """Wait for one process while supervising all; see `processes.wait_until_ready`."""

        def check_and_report(waited_s: float) -> None:
            self.check()
            if on_wait is not None:
                on_wait(waited_s)

        return wait_until_ready(process, is_ready, timeout_s=timeout_s, on_wait=check_and_report)

    def stop(self, *, grace_s: float = 8.0) -> None:
        """End every process, in the reverse order of their start, and wait until all have ended."""
        for process in reversed(self._processes):
            process.request_stop(grace_s=grace_s)
        for process in reversed(self._processes):
            process.stop(grace_s=grace_s)
        self._processes.clear()

    def _first_failed(self) -> ManagedProcess | None:
        for process in self._processes:
            code = process.poll()
            if code is not None and not (code == 0 and process.name in self._may_finish):
                return process
        return None

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *failure: object) -> None:
        self.stop()


_LIMIT_WITHOUT_ENVIRONMENT_S = 60.0
_TITLE = "VLLM::"


class EngineWorkerWatch:
    """Detects that a worker process of a running engine has died.

    vLLM's server can outlive its workers for minutes, for instance while it waits for them in a
    weight update.
    """

    def __init__(self, engine: ManagedProcess) -> None:
        with require_extra("trainer"):
            import psutil

        self._engine = engine
        self._workers: dict[psutil.Process, str] = {}
        # If the engine has just ended, the supervisor of its process says so.
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(engine.pid).children(recursive=True):
                # Only those with the engine's title: others are temporary, and may end meanwhile.
                with contextlib.suppress(psutil.NoSuchProcess):
                    title = " ".join(child.cmdline())
                    if title.startswith(_TITLE):
                        self._workers[child] = title

    def check(self) -> None:
        """Raise `ProcessFailedError` if a worker has died."""
        import psutil

        for worker, title in self._workers.items():
            try:
                has_ended = worker.status() == psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                has_ended = True
            if has_ended:
                raise ProcessFailedError(self._engine, f"lost its process {title.strip()}")


class TrainerStallWatch:
    """Detects that the trainer has made no step for `limit_s` seconds.

    If an environment has ended, one minute is enough.

    Attributes:
        stalled_s: Seconds without a step, at the last check.
    """

    def __init__(self, limit_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._num_steps = 0
        self._since = clock()
        self.stalled_s = 0.0

    def check(
        self, num_steps: int, *, trainer: ManagedProcess, environments: Sequence[ManagedProcess]
    ) -> None:
        """Raise `ProcessFailedError` of an ended environment, else of the trainer."""
        now = self._clock()
        if num_steps != self._num_steps:
            self._num_steps, self._since = num_steps, now
        self.stalled_s = now - self._since
        ended = next((each for each in environments if each.returncode is not None), None)
        if ended is not None and self.stalled_s >= min(_LIMIT_WITHOUT_ENVIRONMENT_S, self._limit_s):
            raise ProcessFailedError(ended, "ended, but the trainer has steps left to do")
        if self.stalled_s >= self._limit_s:
            raise ProcessFailedError(trainer, f"has made no step for {self.stalled_s:.0f} s")


_POLL_S = 0.5
_NOTED_STALL_S = 60.0
"""Time without a step after which the progress names the groups that environments drop."""
_HEALTH_TIMEOUT_S = 5.0
_USAGE_ERROR = 2


class TrainingLoop:
    """Starts the processes of one run in order and waits for them; `supervisor` ends them.

    `reward` is the displayed metric of the first environment; None: find one.
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
        self._engine_watch: EngineWorkerWatch | None = None
        self._has_environments = False

    def start_servers(self) -> None:
        """Start the engine and the service, without waiting for them."""
        if self.stack.engine is not None:
            self._supervisor.start(self.stack.engine)
        self._supervisor.start(self.stack.service)

    def wait_for_servers(self, *, reload_from: Path | None) -> None:
        """Wait until both are healthy, then load the weights in `reload_from` into the engine.

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
            self._engine_watch = EngineWorkerWatch(stack.engine)
        if reload_from is not None:
            control = EngineControl(stack.engine_url)
            try:
                control.reload_weights(reload_from, pause_mode="keep")
            finally:
                control.close()

    def start_trainer(self) -> None:
        self._supervisor.start(self.stack.trainer, may_finish=True)

    def start_together(self) -> None:
        """Start all processes of a plan that `starts_together`, and wait for the servers.

        The trainer waits for both servers, the environments wait for the trainer. Those of a
        resumed run start later: see `reinforce`.
        """
        self.start_servers()
        self.start_trainer()
        if not self._plan.is_resumed:
            self._start_environments()
        self.wait_for_servers(reload_from=None)

    def _start_environments(self) -> None:
        if not self._has_environments:
            self._has_environments = True
            for environment in self.stack.environments:
                self._supervisor.start(environment, may_finish=True)

    def check(self) -> None:
        """Raise `ProcessFailedError` if a process of the run or a worker of the engine has died."""
        self._supervisor.check()
        if self._engine_watch is not None:
            self._engine_watch.check()

    def reinforce(self) -> None:
        """Start the environments, if they are not running, and wait until the trainer has ended.

        Raises:
            ProcessFailedError: A process failed, or the trainer makes no steps.
        """
        plan, stack = self._plan, self.stack
        self._progress.begin(
            "reinforce",
            f"Reinforcement learning: {plan.steps} steps of {plan.work}",
            expected=plan.expected,
        )
        if plan.is_resumed:
            self._progress.note(
                "first, the trainer repeats the steps after its last checkpoint (same batches)"
            )
        self._start_environments()
        watch = TrainerStallWatch(plan.stall_limit_s)
        while stack.trainer.is_alive():
            self.check()
            steps = report.count_steps(self._paths.trainer_metrics)
            watch.check(steps, trainer=stack.trainer, environments=stack.environments)
            self._progress.update(steps, plan.steps, self._state(steps, stalled_s=watch.stalled_s))
            time.sleep(_POLL_S)
        self.check()
        # A short run ends before the first line of progress.
        self._progress.note(self._state(report.count_steps(self._paths.trainer_metrics)))

    def evaluate(self, environment: EnvironmentPlan, when: str) -> dict[str, float]:
        """Run `evaluate` of an environment, `before` or `after` training, and return its metrics.

        The metrics are empty if it measured nothing or failed.

        Raises:
            ProcessFailedError: Its settings are invalid, or a process of the run failed.
        """
        process = evaluation_process(
            self._plan, environment, self._paths, when, inherited=os.environ
        )
        started = time.monotonic()
        # Not supervised, since training can continue without an evaluation.
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

    def _state(self, steps: int, *, stalled_s: float = 0.0) -> str:
        """Return the last step with its reward, and why no other one follows, if that is known."""
        causes = self._causes() if not steps or stalled_s >= _NOTED_STALL_S else ()
        start = self._last_step(steps) if steps else "waiting for the first batch"
        return "; ".join([start, *causes])

    def _causes(self) -> Iterator[str]:
        """Yield why there is no batch or no group, from the logs of trainer and environments."""
        trainer = self.stack.trainer
        if reason := report.find_unfilled(trainer.log_tail(lines=_DROP_LINES)):
            yield f"the trainer waits: {reason} ({shown_path(trainer.log_path)})"
        for plan, process in zip(self._plan.environments, self.stack.environments, strict=True):
            log, place = process.log_tail(lines=_DROP_LINES), shown_path(process.log_path)
            if reason := report.find_drop(log):
                yield f"{plan.name} drops groups: {reason} ({place})"
            elif reason := report.find_lack(log):
                yield f"{plan.name} logged: {reason} ({place})"

    def _last_step(self, steps: int) -> str:
        metrics = [environment.metrics for environment in self._plan.environments]
        if self._reward is None:
            shown, points = report.find_rewards(metrics, self._paths.trainer_metrics)
        else:
            shown, points = self._reward, report.read_rewards(metrics[0], self._reward)
        if not points:
            return f"step {steps} of {self._plan.steps}"
        reward = rolling_mean([point.reward for point in points], 10)[-1]
        return f"step {steps} of {self._plan.steps}, {shown.summary.format(reward)}"
