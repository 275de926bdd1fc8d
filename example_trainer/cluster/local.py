"""A run as processes of this machine.

    atropos-up ─(--detach: in a new session)─► RunSupervisor ─► guardians ─► parts

State, logs and settings are in the output folder:

    up/record.json   state of the parts and identity of the supervisor, for `status` and `down`
    up/lock          held while a supervisor runs
    settings/        settings files of the environments
    logs/            one log per part
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path

from atroposlib.errors import AtroposError, ConfigError, InferenceError
from atroposlib.utils.writable import lock_file, write_file
from example_trainer.cli import create_full_parser, require_extra
from example_trainer.cluster.parts import (
    DESCRIBING_MODULE,
    TOKEN_VARIABLE,
    Addresses,
    Part,
    engine_names,
    flag_words,
    is_file,
    is_task_set,
    part_names,
    plan_parts,
    service_names,
    shell_command,
)
from example_trainer.cluster.placement import RunStatus
from example_trainer.cluster.progress import LogLines, StepLines
from example_trainer.cluster.restarts import INVALID_SETTINGS
from example_trainer.cluster.run_file import RunFile
from example_trainer.cluster.run_secrets import hide_values
from example_trainer.cluster.supervision import RunSupervisor, tail_of
from example_trainer.engine import EngineControl
from example_trainer.launch.options import RunPaths, visible_gpus
from example_trainer.processes import (
    ManagedProcess,
    find_free_ports,
    is_same_process,
    process_identity,
)
from example_trainer.weight_sync import DISK_TRANSPORT, STEP_FILE

_CHECK_LIMIT_S = 120.0
_DETACH_LIMIT_S = 60.0 + _CHECK_LIMIT_S
_DOWN_LIMIT_S = 120.0
_POLL_S = 0.1


class SupervisorRecord:
    """The state of a run in its output folder, written by its supervisor and read by others."""

    def __init__(self, output: Path) -> None:
        self.folder = output / "up"
        self._path = self.folder / "record.json"

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Context of the only supervisor of the run on this machine.

        Raises:
            ConfigError: Another one holds it, or the folder cannot be written.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = (self.folder / "lock").open("w")
        except OSError as error:
            raise ConfigError(f"output: {self.folder} cannot be written: {error}") from error
        with lock:
            lock_file(
                lock.fileno(),
                self.folder,
                refusal=f"a supervisor of the run in {self.folder.parent} is running; see "
                "`atropos-up status`, or end it with `atropos-up down`",
            )
            yield

    def write(self, status: RunStatus) -> None:
        """Replace the record, with this process as the supervisor."""
        content = {"supervisor": process_identity(os.getpid()), "status": status.as_json()}
        write_file(self._path, f"{json.dumps(content, indent=1)}\n".encode())

    def read(self) -> RunStatus:
        """Return the last status that was written; state `none` without one."""
        content = self._content()
        return RunStatus("none") if content is None else content[0]

    def supervisor(self) -> int | None:
        """Return the process id of the supervisor if it is running on this machine."""
        content = self._content()
        if content is None:
            return None
        _, pid, created = content
        return pid if pid > 0 and is_same_process((pid, created)) else None

    def check_owner(self) -> None:
        """Raise `ConfigError` if another user wrote the record: its process may be any one."""
        if self._path.stat().st_uid != os.getuid():
            raise ConfigError(f"{self._path} is of another user, who has to end this run")

    def _content(self) -> tuple[RunStatus, int, float] | None:
        """Return the status, and process id and start time of the supervisor."""
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
            pid, created = content["supervisor"]
            return RunStatus.from_json(content["status"]), int(pid), float(created)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
            raise ConfigError(
                f"{self._path} cannot be read: {type(error).__name__}: {error}; delete it"
            ) from error


class LocalRun:
    """One run on this machine; a placement.

    Args:
        run: The run file's content.
        file: The run file, for the supervisor in the background.
    """

    def __init__(self, run: RunFile, file: Path) -> None:
        self._run = run
        self._file = file
        self._record = SupervisorRecord(run.output)

    def render(self) -> Mapping[str, str]:
        parts = plan_parts(self._run, _addresses(self._run))
        commands = [f"# {part.name}\n{shell_command(part)}\n" for part in parts]
        texts = {"commands.sh": "\n".join(commands)}
        for part in parts:
            texts |= {f"settings/{name}": text for name, text in part.files.items()}
        return texts

    def supervise(self, on_event: Callable[[str], None]) -> RunStatus:
        """Run every part as a child of this process until the run ends; return the last status.

        Raises:
            ConfigError: The run needs what this machine lacks, or runs already.
        """
        run = self._run
        with require_extra("trainer"):
            import psutil  # noqa: F401 - parts that have started need it
        with self._record.held():
            parts = plan_parts(run, _addresses(run))
            # Before any part starts: engines may take minutes.
            for part in parts:
                find_secrets(part)
            variables = _machine_variables(parts)
            write_settings(parts, run.output)
            check_settings(parts, run)
            hide = hider(run)
            return RunSupervisor(
                parts,
                lambda part: local_process(part, run, part.command, variables[part.name]),
                start_limit_s=run.start_limit_s,
                on_event=lambda text: on_event(hide(text)),
                on_change=lambda status: self._record.write(status.masked(hide)),
                on_return=lambda part: restore_weights(part, run),
                progress=progress_lines(run),
            ).run()

    def submit(self) -> str:
        if (pid := self._record.supervisor()) is not None:
            raise ConfigError(f"{self._run.name} is running (supervisor {pid}); see status")
        log = self._record.folder / "supervisor.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        program = [sys.executable, "-m", "example_trainer.cluster.cli"]
        with log.open("ab") as output:
            supervisor = subprocess.Popen(
                [*program, str(self._file), "--on", "local"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + _DETACH_LIMIT_S
        while self._record.supervisor() != supervisor.pid:
            if supervisor.poll() is not None or time.monotonic() >= deadline:
                supervisor.terminate()  # it would start the run after this error
                with contextlib.suppress(subprocess.TimeoutExpired):
                    supervisor.wait(_DOWN_LIMIT_S)
                said = "\n".join(tail_of(log, lines=5))
                kind = ConfigError if supervisor.returncode == 2 else AtroposError
                raise kind(f"the supervisor did not start; its log ({log}) ends with:\n{said}")
            time.sleep(_POLL_S)
        return f"{self._run.name} runs in the background, supervisor {supervisor.pid}, log {log}"

    def status(self) -> RunStatus:
        status = self._record.read()
        if status.state == "running" and self._record.supervisor() is None:
            parts = tuple(part._replace(state="stopped", detail="") for part in status.parts)
            return RunStatus("lost", parts, "the supervisor was killed; its parts ended with it")
        return status

    def logs(self, part: str, *, lines: int) -> list[str]:
        return part_log(self._run, part, lines=lines)

    def down(self) -> str:
        pid = self._record.supervisor()
        if pid is None:
            return f"{self._run.name} is not running"
        self._record.check_owner()
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + _DOWN_LIMIT_S
        while self._record.supervisor() == pid:
            if time.monotonic() >= deadline:
                raise AtroposError(f"supervisor {pid} did not end in {_DOWN_LIMIT_S:g} s")
            time.sleep(_POLL_S)
        return f"{self._run.name} was stopped; the same command continues it"


def check_programs(run: RunFile) -> None:
    """Raise `ConfigError` if the program of an environment or trainer is missing here."""
    programs = {
        f"environments[{position}]": section.program
        for position, section in enumerate(run.environments)
        if not is_task_set(section.program)
    }
    own = run.trainer.program
    if own is not None and is_file(own):
        programs["trainer"] = own
    elif own is not None:
        package = own.partition(".")[0]
        given = {**run.variables, **run.trainer.variables}.get("PYTHONPATH", "")
        folders = [str(run.folder), *given.split(os.pathsep), *sys.path]
        if PathFinder.find_spec(package, folders) is None:
            raise ConfigError(
                f"trainer.program: there is no module {package} in {run.folder} or among the "
                "installed packages; a file ends with .py"
            )
    for place, program in programs.items():
        file = run.folder / program
        if not file.is_file():
            raise ConfigError(
                f"{place}.program: there is no file {file}; it is relative to `folder`, which is "
                "relative to the run file"
            )


def check_trainer_flags(run: RunFile) -> None:
    """Parse the flags of the example trainer; an unknown one exits with 2 and a line about it.

    Settings that contradict each other are left to `check_settings`, which imports torch.
    """
    if run.trainer.program is None:
        parser = create_full_parser()
        parser.prog = "atropos-grpo"
        parser.set_defaults(device="cpu")  # its default imports torch, which a login node may lack
        words = flag_words(run.trainer.flags, booleans="switches")
        parser.parse_args([f"--model={run.trainer.model}", *words])


def write_settings(parts: tuple[Part, ...], output: Path) -> None:
    """Write the settings files of the parts, readable by the owner only."""
    folder = output / "settings"
    folder.mkdir(parents=True, exist_ok=True)
    for part in parts:
        for name, text in part.files.items():
            (folder / name).touch(mode=0o600)
            (folder / name).write_text(text, encoding="utf-8")


def check_settings(parts: Sequence[Part], run: RunFile) -> None:
    """Raise `ConfigError` for settings that an environment or the trainer would reject.

    Both start after the engines, which may take minutes.
    """
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for part, reason in zip(parts, pool.map(partial(_refusal, run=run), parts), strict=True):
            if reason is not None:
                raise ConfigError(f"{part.name}: {reason}")


def _refusal(part: Part, *, run: RunFile) -> str | None:
    """Return why the settings of a part can never work; None if they can, or it is not known."""
    if not part.check:
        return None
    if DESCRIBING_MODULE in part.check:
        program = part.check[part.check.index(DESCRIBING_MODULE) + 1]
        # A program that is not an environment of the library would run instead of being described.
        if is_file(program) and b".cli()" not in (run.folder / program).read_bytes():
            return None
    try:
        done = subprocess.run(
            [part.command[0], *part.check],
            cwd=run.folder,
            env={**os.environ, **part.variables, **find_secrets(part)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_CHECK_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines and done.returncode == INVALID_SETTINGS else None


def local_process(
    part: Part, run: RunFile, command: Sequence[str], variables: Mapping[str, str]
) -> ManagedProcess:
    """Return the process of a part as a child of this one, with its secrets, not started yet."""
    return ManagedProcess(
        part.name,
        command,
        log_path=RunPaths(run.output).logs / f"{part.name}.log",
        env={**os.environ, **part.variables, **variables, **find_secrets(part)},
        cwd=run.folder,
    )


def restore_weights(part: Part, run: RunFile) -> str | None:
    """Load the newest published weights into an engine that was started again.

    Without them it would serve the first weights until the next update. Returns a line for the log;
    None if there are no weights, or if the part has none.
    """
    if part.role != "engine" or part.ready_url is None:
        return None
    return restore_engine(part.ready_url.removesuffix("/health"), run.output, name=part.name)


def restore_engine(url: str, output: Path, *, name: str = "the engine") -> str | None:
    """Load the newest weights that the trainer of an output folder has published; as above."""
    paths = RunPaths(output)
    weights = paths.checkpoints / DISK_TRANSPORT
    try:
        step = int((weights / STEP_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # such as a network file system that is away
        return f"{name} serves the first weights until the next update: {error}"
    control = EngineControl(url)
    try:
        control.reload_weights(weights, pause_mode="keep", version=step)
    except InferenceError as error:
        return f"{name} serves the first weights until the next update: {error}"
    finally:
        control.close()
    return f"{name} has the weights of step {step} again"


def find_secrets(part: Part) -> dict[str, str]:
    """Return the secrets of a part from the variables of this process."""
    for variable, name in part.secrets.items():
        if not os.environ.get(name):
            where = "service.tokens" if variable == TOKEN_VARIABLE else f"{part.name}: ${{{name}}}"
            raise ConfigError(f"{where}: the variable {name} is not set; export it")
    return {variable: os.environ[name] for variable, name in part.secrets.items()}


def hider(run: RunFile) -> Callable[[str], str]:
    """Return a function that masks the secrets of a run which this process knows in a text."""
    values = [os.environ[name] for name in run.secret_names if os.environ.get(name)]
    return partial(hide_values, values=values)


def part_log(run: RunFile, part: str, *, lines: int) -> list[str]:
    """Return the end of a part's log in the output folder."""
    known = part_names(run)
    if part not in known:
        raise ConfigError(f"there is no part {part!r}; expected one of {', '.join(known)}")
    return tail_of(RunPaths(run.output).logs / f"{part}.log", lines=lines)


def progress_lines(run: RunFile) -> Callable[[], str | None]:
    """Return the progress of a run whose output folder is on this machine, or shared with it."""
    paths = RunPaths(run.output)
    log_path = paths.logs / "trainer.log"
    if run.trainer.program is not None:
        return LogLines(log_path).next_line
    lines = StepLines(paths.trainer_metrics, log_path, num_steps=run.trainer.steps)
    return lines.next_line


def _addresses(run: RunFile) -> Addresses:
    servers = [*service_names(run), *engine_names(run)]
    ports = dict(zip(servers, find_free_ports(len(servers)), strict=True))
    if run.service.port is not None:
        ports |= {name: run.service.port + i for i, name in enumerate(service_names(run))}
    return Addresses(
        hosts=dict.fromkeys([*servers, "trainer"], "127.0.0.1"),
        ports=ports,
        output=run.output,
        settings=run.output / "settings",
        python=sys.executable,
    )


def _machine_variables(parts: tuple[Part, ...]) -> dict[str, dict[str, str]]:
    """Return the variables that give each part its own GPUs.

    Raises:
        ConfigError: The parts need more GPUs, or hosts, than there are.
    """
    for part in parts:
        if part.resources.nodes > 1:
            raise ConfigError(f"{part.name} needs {part.resources.nodes} nodes; give --on slurm")
    num_needed = sum(part.resources.gpus for part in parts)
    gpus = list(_gpus() if num_needed else ())
    if num_needed > len(gpus):
        raise ConfigError(
            f"the parts need {num_needed} GPUs, this machine has {len(gpus)}; lower gpus or count"
        )
    variables = {}
    for part in parts:
        own, gpus = gpus[: part.resources.gpus], gpus[part.resources.gpus :]
        variables[part.name] = {"CUDA_VISIBLE_DEVICES": ",".join(own)}
    return variables


def _gpus() -> tuple[str, ...]:
    with require_extra("trainer"):
        import torch

    return visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES", ""), torch.cuda.device_count())
