"""The host of one part of a run on a Ray cluster: an actor that runs the part's own program.

    supervisor ──Launch──► PartHost ──► the program of a part
        ▲                      │
        └──────HostReport──────┘

- The program ends with its host. A host that was restarted first ends what its predecessor on the
  same node left, so that no part runs twice.
- The host runs what the last `Launch` says; a call that was lost, or repeated, changes nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import httpx

from atroposlib.errors import ConfigError
from atroposlib.utils.listening import CannotListenError, require_free_port
from atroposlib.utils.writable import write_file
from example_trainer.cluster.local import find_secrets, hider, restore_weights, write_settings
from example_trainer.cluster.parts import Part
from example_trainer.cluster.restarts import INVALID_SETTINGS
from example_trainer.cluster.run_file import RunFile
from example_trainer.cluster.supervision import tail_of
from example_trainer.launch.options import RunPaths
from example_trainer.processes import (
    ManagedProcess,
    ProcessFailedError,
    find_free_port,
    is_same_process,
    process_identity,
)

logger = logging.getLogger(__name__)

BIND = "0.0.0.0"
"""Address that services and engines listen on."""
PYTHON = "python"
"""Stands for the interpreter of the node's Ray in commands."""
GRACE_S = 10.0
"""Seconds between SIGTERM and SIGKILL of a program."""
_CHECK_S = 5.0
_POLL_S = 0.05
_WORKER_VARIABLES = ("RAY_JOB_ID", "RAY_RAYLET_PID", "RAY_CLIENT_MODE")
"""Variables of a Ray worker that would confuse a program that uses Ray itself."""


class HostAddress(NamedTuple):
    """Where a part can be reached."""

    host: str
    port: int


@dataclass(frozen=True)
class Launch:
    """An order to a host: the program to run."""

    instance: str
    """The actor it was meant for; a restarted one has another address."""
    key: str
    """Number of the start, and a digest of what is started."""
    part: Part
    is_return: bool = False
    """Whether the part was started before."""


@dataclass(frozen=True)
class HostReport:
    """State of a host and its program."""

    instance: str
    """Changes when Ray restarts the actor."""
    address: HostAddress | None
    state: Literal["idle", "running", "ended"]
    key: str = ""
    """That of the last `Launch` it started."""
    is_ready: bool = False
    exit_code: int | None = None
    cause: str = ""
    """Why the program ended, from its log."""


class PartHost:
    """Actor that runs the program of one part on the node where Ray placed it."""

    def __init__(self, name: str, run_json: str, port: int | None) -> None:
        self._name = name
        self._run = RunFile.model_validate_json(run_json)
        self._log = RunPaths(self._run.output).logs / f"{name}.log"
        self._record = self._run.output / "up" / f"{name}.json"
        self._port = port
        self._instance = uuid.uuid4().hex
        self._address: HostAddress | None = None
        self._process: ManagedProcess | None = None
        self._launch: Launch | None = None
        self._is_stopping = False
        self._answered = float("-inf")
        self._cause = ""
        self._refusal = ""

    def place(self, previous: HostAddress | None) -> HostReport:
        """Choose the address, `previous` if that is possible; later calls change nothing."""
        if self._address is None:
            node = _node_address()
            self._end_predecessor(node)
            is_same = previous is not None and previous.host == node and _is_free(previous.port)
            port = previous.port if previous is not None and is_same else find_free_port(BIND)
            self._address = HostAddress(node, self._port or port)
        return self.report()

    def keep(self, launch: Launch | None) -> HostReport:
        """Start or stop the program so that `launch` runs; return without waiting for it."""
        if launch is not None and launch.instance != self._instance:
            return self.report()
        key = "" if launch is None else launch.key
        if self._process is not None and self._process.is_alive():
            if self._key() != key and not self._is_stopping:
                self._is_stopping = True
                self._process.request_stop(grace_s=GRACE_S)
        elif launch is not None and self._key() != key:
            self._start(launch)
        return self.report()

    def report(self) -> HostReport:
        """Return what runs."""
        report = HostReport(self._instance, self._address, "idle", self._key())
        if self._refusal:
            code = INVALID_SETTINGS
            return replace(report, state="ended", exit_code=code, cause=self._refusal)
        process = self._process
        if process is None:
            return report
        if process.is_alive():
            return replace(report, state="running", is_ready=self._is_ready())
        self._cause = self._cause or process.log_cause() or process.describe_exit()
        cause = hider(self._run)(self._cause)
        return replace(report, state="ended", exit_code=process.poll(), cause=cause)

    def log(self, lines: int) -> list[str]:
        """Return the last lines that the program wrote on this node, without secrets."""
        hide = hider(self._run)
        return [hide(line) for line in tail_of(self._log, lines=lines)]

    def _key(self) -> str:
        return "" if self._launch is None else self._launch.key

    def _is_ready(self) -> bool:
        launch = self._launch
        url = None if launch is None else launch.part.ready_url
        if launch is None or url is None or time.monotonic() - self._answered < _CHECK_S:
            return True
        is_ready = answers(url)
        if is_ready and launch.is_return and self._answered < 0:
            logger.info("restored weights: %s", restore_weights(launch.part, self._run))
        self._answered = time.monotonic() if is_ready else self._answered
        return is_ready

    def _start(self, launch: Launch) -> None:
        if self._process is not None:
            self._process.stop()
        part = launch.part
        if part.port is not None and self._port is None and not _is_free(part.port):
            self._process, self._address = None, None  # to be placed again, with another port
            return
        self._process, self._launch, self._is_stopping = None, launch, False
        self._answered, self._cause = float("-inf"), ""
        try:
            secrets, self._refusal = find_secrets(part), ""
        except ConfigError as error:
            self._refusal = f"{error} where `ray start` runs on {_node_address()}"
            return
        write_settings((part,), self._run.output)
        program, *words = part.command
        self._process = ManagedProcess(
            self._name,
            [sys.executable if program == PYTHON else program, *words],
            log_path=self._log,
            env={**_inherited(), **self._torchrun_variables(part), **part.variables, **secrets},
            cwd=self._run.folder,
        )
        with contextlib.suppress(ProcessFailedError):  # reported as an end with a code
            self._process.start()
            self._write_record()

    def _torchrun_variables(self, part: Part) -> dict[str, str]:
        """Return which node of several has the rendezvous of torchrun: the first.

        torchrun would compare addresses, and find none where the node's name is a loopback address.
        """
        is_first = self._name == part.name
        return {"PET_RDZV_CONF": f"is_host={int(is_first)}"} if part.resources.nodes > 1 else {}

    def _write_record(self) -> None:
        """Record the guardian of the program, which ends after all of its processes."""
        assert self._process is not None
        assert self._address is not None
        guardian = process_identity(self._process.guardian_pid)
        write_json(self._record, {"node": self._address.host, "guardian": guardian})

    def _end_predecessor(self, node: str) -> None:
        """End the program of an earlier actor on this node, and wait until it has ended."""
        record = read_json(self._record)
        if record.get("node") != node or not is_same_process(record["guardian"]):
            return
        pid = int(record["guardian"][0])
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
            deadline = time.monotonic() + GRACE_S
            while is_same_process(record["guardian"]):
                if time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
                    return
                time.sleep(_POLL_S)


def _node_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _is_free(port: int) -> bool:
    try:
        require_free_port(BIND, port)
    except CannotListenError:
        return False
    return True


def _inherited() -> dict[str, str]:
    """Return the variables of this process; a program uses Ray, if at all, on the same cluster."""
    import ray

    own = {name: text for name, text in os.environ.items() if name not in _WORKER_VARIABLES}
    return {**own, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}


def answers(url: str) -> bool:
    """Whether a server is healthy."""
    try:
        return httpx.get(url, timeout=_CHECK_S, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a file and, if needed, make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps(content, indent=1).encode())


def read_json(path: Path) -> dict[str, Any]:
    """Return the content; empty if there is none or it is damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
