"""The processes of a run: with which command, variables and settings each is started.

    environments --completions--> inference engine <--new weights-- trainer
        |                                                             ^
        +---------scored groups--> trajectory service --batches-------+

Everything here is a function of the plan; nothing is started.

Several child processes as one whole: when one fails, all end, and the failure is named.
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
from typing import Any, NoReturn
from urllib.parse import urlsplit

import yaml

from example_trainer.feed import JOURNAL_DIRECTORY
from example_trainer.launch.options import EnvironmentPlan, RunPaths, RunPlan
from example_trainer.processes import ManagedProcess, ProcessFailedError, wait_until_ready

__all__ = [
    "Stack",
    "Supervisor",
    "build_stack",
    "common_variables",
    "ending_signals",
    "engine_arguments",
    "engine_variables",
    "environment_sections",
    "evaluation_process",
    "trainer_arguments",
    "write_yaml",
]

_RUN_NAME = "run"
_CPU_ENGINE_GIB = 1


@dataclass(frozen=True)
class Stack:
    """The processes of one run, not started yet, and where they answer."""

    engine: ManagedProcess | None
    """None where an engine runs already."""
    service: ManagedProcess
    environments: tuple[ManagedProcess, ...]
    trainer: ManagedProcess
    engine_url: str
    service_url: str


def build_stack(
    plan: RunPlan, paths: RunPaths, *, ports: tuple[int, int], inherited: Mapping[str, str]
) -> Stack:
    """Describe the processes; writes the YAML file of each environment.

    Args:
        plan: What is run.
        paths: Where it writes.
        ports: Free ports for the engine and for the service.
        inherited: Environment variables of this process.
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
        command = [str(environment.script), "serve", "--config", str(environment.config)]
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
    """Describe the `evaluate` command of an environment; writes its YAML file.

    Args:
        plan: What is run; its stack has been built.
        environment: What is evaluated.
        paths: Where the run writes.
        when: `before` or `after`, for the names of its files.
        inherited: Environment variables of this process.
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
        [str(environment.script), "evaluate", "--config", str(config), *environment.flags],
        paths,
        common_variables(plan, inherited),
        plan.working_folder,
    )


def write_yaml(content: Mapping[str, Any], path: Path) -> None:
    """Write the settings of an environment to the file it is started with, for its owner only.

    They may hold keys, and passwords in addresses.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump(dict(content), sort_keys=False), encoding="utf-8")


def common_variables(plan: RunPlan, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables every process gets."""
    variables = {
        **inherited,
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",  # a log is read while it is written
        **plan.variables,
    }
    if plan.import_folder is not None:
        search_path = [str(plan.import_folder), inherited.get("PYTHONPATH", "")]
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, search_path))
    return variables


def engine_variables(plan: RunPlan, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of vLLM: in-place weight updates, no usage report, CPU settings."""
    variables = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if not plan.on_gpu:
        own = {
            "VLLM_CPU_KVCACHE_SPACE": str(_CPU_ENGINE_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        variables |= {name: inherited.get(name, value) for name, value in own.items()}
    return {**variables, **plan.engine_variables}


def engine_arguments(plan: RunPlan, *, port: int) -> list[str]:
    """Return the arguments of a stock vLLM server on the loopback address."""
    arguments = ["-m", "vllm.entrypoints.openai.api_server"]
    arguments += ["--model", str(plan.engine_model or plan.model)]
    arguments += ["--served-model-name", plan.model]
    # Never to be bound elsewhere: in-place updates let anyone who reaches the port load files.
    arguments += ["--host", "127.0.0.1", "--port", str(port)]
    arguments += ["--max-model-len", str(plan.context_tokens), "--seed", str(plan.seed)]
    # The trainer divides its logits by the temperature where the engine has done so.
    arguments += ["--logprobs-mode", "processed_logprobs"]
    arguments += ["--disable-uvicorn-access-log"]  # thousands of short requests a minute
    return [*arguments, *plan.engine_flags]


def trainer_arguments(
    plan: RunPlan, paths: RunPaths, *, engine_url: str, service_url: str
) -> list[str]:
    """Return the arguments of the GRPO trainer, which updates the running engine in place."""
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
    if plan.engine_url:
        flags["engine-urls"] = engine_url
    else:
        flags["vllm-port"] = urlsplit(engine_url).port
    arguments = ["-m", "example_trainer.grpo"]
    arguments += [f"--{name}={value}" for name, value in flags.items()]
    if plan.is_resumed:
        # The service may know the run with fewer steps.
        arguments.append("--replace-run")
        # A trainer that ended before it had begun its run has nothing to go on with.
        if (paths.checkpoints / JOURNAL_DIRECTORY / "run.json").is_file():
            arguments.append("--resume")
    return [*arguments, *plan.trainer_flags]


def environment_sections(
    plan: RunPlan, environment: EnvironmentPlan, *, engine_url: str, service_url: str
) -> dict[str, Any]:
    """Return the content of the YAML file an environment is started with.

    What is set here is what the run needs; everything else is the environment's own default.
    """
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
            "tokenizer_name": plan.model,
            "rollout_server_url": service_url,
            "rollout_grace_s": 0.0,  # nothing takes the groups of a run that is stopped
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
        # An environment with several servers takes a list of them alone.
        sections["openai"] = [sections["openai"]] * environment.num_servers
    return sections


def _process(
    name: str,
    arguments: Sequence[str],
    paths: RunPaths,
    variables: Mapping[str, str],
    folder: Path,
) -> ManagedProcess:
    return ManagedProcess(
        name,
        [sys.executable, *arguments],
        log_path=paths.logs / f"{name.replace(' ', '_')}.log",
        env=variables,
        cwd=folder,
    )


_SETTLE_S = 3.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def ending_signals() -> Iterator[None]:
    """Let the first SIGINT or SIGTERM unwind the program once, and ignore those after it.

    SIGINT raises `KeyboardInterrupt`, SIGTERM `SystemExit` with 143.
    """
    previous = {number: signal.signal(number, _interrupt) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _interrupt(number: int, _frame: FrameType | None) -> NoReturn:
    # One interruption is enough: a second one must not break off the ending of the processes.
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


class Supervisor:
    """Owns processes: starts them, notices when one ends, stops all of them together.

    A process that ends by itself is a failure unless it was started with `may_finish` and ends
    with code 0. Used as a context manager, it stops every process on exit.
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
        """Start a process and watch it from now on.

        Args:
            process: Not started before.
            may_finish: Whether ending with code 0 is what it should do at some time.
        """
        # Known before it runs: an interruption during the start must not leave it behind.
        self._processes.append(process)
        if may_finish:
            self._may_finish.add(process.name)
        process.start()

    def check(self) -> None:
        """Raise `ProcessFailedError` when one of the processes has ended but should not have.

        Processes fail because those they depend on failed: the first one in the order of starting
        is named, after a moment in which it may still be seen to end.
        """
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
        """Wait for one process while watching all; see `processes.wait_until_ready`."""

        def watch(waited_s: float) -> None:
            self.check()
            if on_wait is not None:
                on_wait(waited_s)

        return wait_until_ready(process, is_ready, timeout_s=timeout_s, on_wait=watch)

    def stop(self, *, grace_s: float = 8.0) -> None:
        """End every process and wait until all are gone; those started last are asked first."""
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
