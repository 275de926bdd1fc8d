"""The actors of a run on a Ray cluster: a supervisor, and a host for the program of each part.

    RaySupervisor ──Launch──► PartHost ──► the program of a part
          ▲                      │
          └──────HostReport──────┘

Both are named, detached actors, which Ray restarts on any node with the resources.

- The supervisor sends each host, again and again, what it should run; the host compares it with
  what it runs. A lost call, a restarted supervisor and a restarted host need no further rule.
- Ray restarts an actor at once. The program in it starts after a back-off, as often as the run
  file allows.
- A program ends with its host. A host that was restarted first ends what its predecessor on the
  same node left, so that no part runs twice.
- Servers are reached where their hosts were placed. When one moves to another node, the parts that
  use its address are started again with the new one, without counting as failures.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import httpx

from atroposlib.errors import ConfigError
from atroposlib.utils.listening import CannotListenError, require_free_port
from example_trainer.checkpointing import write_file
from example_trainer.cluster.local import find_secrets, restore_weights, write_settings
from example_trainer.cluster.parts import (
    Addresses,
    Part,
    Resources,
    engine_names,
    plan_parts,
    service_names,
)
from example_trainer.cluster.placement import PartState, PartStatus, RunState, RunStatus
from example_trainer.cluster.run_file import RunFile
from example_trainer.cluster.supervision import INVALID_SETTINGS, Attempts, tail_of
from example_trainer.launch.options import RunPaths
from example_trainer.processes import (
    ManagedProcess,
    ProcessFailedError,
    find_free_port,
    is_same_process,
    process_identity,
)

logger = logging.getLogger(__name__)

SUPERVISOR = "supervisor"
STATE_FILE = Path("up") / "ray.json"
GRACE_S = 10.0
"""Seconds between SIGTERM and SIGKILL of a program."""
ENDING_S = 60.0
"""Maximum seconds for the end of all programs of a run."""
_BIND = "0.0.0.0"
_PYTHON = "python"
_CHECK_S = 5.0
_POLL_S = 0.5
_CALLS_PER_S = 400
"""Limit on the calls of the supervisor: the hosts of a large run are called less often."""
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
            port = previous.port if previous is not None and is_same else find_free_port(_BIND)
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
        return replace(report, state="ended", exit_code=process.poll(), cause=self._cause)

    def log(self, lines: int) -> list[str]:
        """Return the last lines that the program wrote on this node."""
        return tail_of(self._log, lines=lines)

    def _key(self) -> str:
        return "" if self._launch is None else self._launch.key

    def _is_ready(self) -> bool:
        launch = self._launch
        url = None if launch is None else launch.part.ready_url
        if launch is None or url is None or time.monotonic() - self._answered < _CHECK_S:
            return True
        try:
            is_ready = httpx.get(url, timeout=_CHECK_S, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False
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
            [sys.executable if program == _PYTHON else program, *words],
            log_path=self._log,
            env={**_inherited(), **part.variables, **secrets},
            cwd=self._run.folder,
        )
        with contextlib.suppress(ProcessFailedError):  # reported as an end with a code
            self._process.start()
            self._write_record()

    def _write_record(self) -> None:
        """Record the guardian of the program, which ends after all of its processes."""
        assert self._process is not None
        assert self._address is not None
        guardian = process_identity(self._process.guardian_pid)
        _write_json(self._record, {"node": self._address.host, "guardian": guardian})

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
                time.sleep(_POLL_S / 10)


def _node_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _is_free(port: int) -> bool:
    try:
        require_free_port(_BIND, port)
    except CannotListenError:
        return False
    return True


def _inherited() -> dict[str, str]:
    """Return the variables of this process; a program uses Ray, if at all, on the same cluster."""
    import ray

    own = {name: text for name, text in os.environ.items() if name not in _WORKER_VARIABLES}
    return {**own, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps(content, indent=1).encode())


def read_json(path: Path) -> dict[str, Any]:
    """Return the content; empty if there is none or it is damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


@dataclass
class _HostCalls:
    """One host of a part; a part has several if it asks for several nodes."""

    unit: str
    handle: Any
    address: HostAddress | None = None
    """The last address, also of a lost host."""
    call: Any = None
    """Reference of the one call that was not answered yet."""
    report: HostReport | None = None
    """None until the host is placed, and after it was lost."""
    trouble: str = ""
    """Error of the last call."""
    wanted: Launch | None = None

    def answers_wanted(self) -> bool:
        return (
            self.report is not None
            and self.wanted is not None
            and self.report.key == self.wanted.key
        )


@dataclass
class _HostedPart:
    """The state of a part and its hosts."""

    attempts: Attempts
    members: list[_HostCalls] = field(default_factory=list)
    state: PartState = "waiting"
    start: int = 0
    """Number of the last start."""
    since: float = 0.0
    """Time of the last start."""
    answered: float = 0.0
    """Time at which all hosts were last ready."""
    retry_at: float = float("-inf")
    detail: str = ""

    def is_placed(self) -> bool:
        return all(member.report is not None for member in self.members)

    def running_keys(self) -> set[str]:
        reports = [member.report for member in self.members if member.report is not None]
        return {report.key for report in reports if report.state == "running"}

    def want_nothing(self) -> None:
        for member in self.members:
            member.wanted = None

    def begin(self, now: float, *, start: int) -> None:
        self.state, self.start, self.since, self.answered = "starting", start, now, now

    def where(self) -> str:
        return ", ".join(member.address.host for member in self.members if member.address)


class RaySupervisor:
    """Actor that keeps the parts of a run going until its trainer has finished or a part failed.

    The rules are those of `supervision`. `submission` differs between submissions of the same run,
    so that none continues the state of an earlier one.
    """

    def __init__(self, run_json: str, submission: str) -> None:
        self._run = RunFile.model_validate_json(run_json)
        self._submission = submission
        self._servers = [*service_names(self._run), *engine_names(self._run)]
        self._parts: dict[str, Part] = {}
        self._digests: dict[str, str] = {}
        self._addresses: Addresses | None = None
        self._outcome: RunState = "running"
        self._reason = ""
        self._ends_at = 0.0
        self._is_over = False
        self._saved: Mapping[str, Any] = {}
        self._hosted = self._create_hosts(read_json(self._run.output / STATE_FILE))
        threading.Thread(target=self._work, daemon=True).start()

    def status(self) -> RunStatus:
        """Return the state of the run; it has not ended before its programs have."""
        parts = tuple(
            PartStatus(name, hosted.state, hosted.attempts.total, hosted.detail)
            for name, hosted in self._hosted.items()
        )
        state: RunState = self._outcome if self._is_over else "running"
        is_waiting = state == "running" and self._addresses is None
        return RunStatus("waiting" if is_waiting else state, parts, self._reason)

    def stop(self) -> None:
        """Request the end of all parts; `status` shows it."""
        self._end("stopped", "")

    def _create_hosts(self, saved: Mapping[str, Any]) -> dict[str, _HostedPart]:
        known = saved["hosted"] if saved.get("submission") == self._submission else {}
        found = {}
        for part in placeless_parts(self._run):
            hosted = _HostedPart(Attempts(part.restarts))
            old = known.get(part.name, {})
            hosted.start, hosted.attempts.total = old.get("start", 0), old.get("restarts", 0)
            addresses = old.get("addresses", [None] * part.resources.nodes)
            for unit, address in zip(unit_names(part), addresses, strict=True):
                place = HostAddress(*address) if address else None
                hosted.members.append(_HostCalls(unit, self._create_host(unit, part), place))
            found[part.name] = hosted
        return found

    def _create_host(self, unit: str, part: Part) -> Any:
        """Create the actor of a host, or return the one that exists."""
        import ray

        run = self._run
        options = actor_options(run, unit, part.resources)
        port = _service_ports(run).get(part.name)
        actor = ray.remote(PartHost).options(**options, get_if_exists=True)
        return actor.remote(unit, run.model_dump_json(), port)

    def _work(self) -> None:
        count = sum(len(hosted.members) for hosted in self._hosted.values())
        pause_s = max(_POLL_S, count / _CALLS_PER_S)
        while not self._is_over:
            started = time.monotonic()
            try:
                self._tick(started)
            except ConfigError as error:
                self._end("failed", str(error))
            except Exception:
                logger.exception("a round of run %s failed; the next follows", self._run.name)
            time.sleep(max(0.0, pause_s - (time.monotonic() - started)))

    def _tick(self, now: float) -> None:
        self._exchange()
        if self._outcome != "running":
            self._proceed_to_end(now)
        elif self._plan():
            for name, part in self._parts.items():
                self._advance(part, self._hosted[name], now)
        self._save()

    def _exchange(self) -> None:
        """Call every host that has answered its last call, and read the answers."""
        import ray

        members = [(name, member) for name, each in self._hosted.items() for member in each.members]
        for _, member in members:
            member.call = member.call or self._call(member)
        calls = [member.call for _, member in members]
        answered = set(ray.wait(calls, num_returns=len(calls), timeout=_POLL_S)[0])
        for name, member in members:
            if member.call in answered:
                reference, member.call = member.call, None
                self._read(name, member, reference)

    def _call(self, member: _HostCalls) -> Any:
        if member.report is None:
            return member.handle.place.remote(member.address)
        if not self._parts and self._outcome == "running":
            return member.handle.report.remote()  # what should run is not known yet
        return member.handle.keep.remote(member.wanted)

    def _read(self, name: str, member: _HostCalls, reference: Any) -> None:
        import ray

        before, member.report, member.trouble = member.report, None, ""
        try:
            report: HostReport = ray.get(reference)
        except ray.exceptions.ActorUnavailableError:
            return
        except ray.exceptions.RayTaskError as error:
            member.trouble = f"its host failed: {error.cause}"
            return
        except ray.exceptions.RayActorError:
            if self._outcome == "running":  # it was killed for good: make another
                part = next(each for each in placeless_parts(self._run) if each.name == name)
                member.handle = self._create_host(member.unit, part)
            return
        is_restarted = before is not None and before.instance != report.instance
        if report.address is not None and not is_restarted:
            member.report, member.address = report, report.address

    def _plan(self) -> bool:
        """Plan the parts for the present addresses; return whether all servers have one."""
        names = [*self._servers, *(["trainer"] if self._run.trainer.nodes > 1 else [])]
        known = {name: self._hosted[name].members[0].address for name in names}
        found = {name: address for name, address in known.items() if address is not None}
        if len(found) < len(known):
            return False
        addresses = _addresses(self._run, found)
        if addresses != self._addresses:
            parts = plan_parts(self._run, addresses)
            self._parts = {part.name: part for part in parts}
            self._digests = {part.name: _digest(part) for part in parts}
            self._addresses = addresses
        return True

    def _advance(self, part: Part, hosted: _HostedPart, now: float) -> None:
        """Take the step that the state of one part and the time allow."""
        if hosted.state in ("finished", "failed"):
            return
        if not hosted.is_placed():
            trouble = next((each.trouble for each in hosted.members if each.trouble), "")
            if hosted.state in ("starting", "running"):
                self._fail(part, hosted, now, trouble or "its actor or its node was lost")
            hosted.detail = trouble or hosted.detail
            return
        if hosted.state == "restarting" and now >= hosted.retry_at:
            hosted.state = "waiting"
        if hosted.state == "waiting":
            self._start(part, hosted, now)
        elif hosted.state in ("starting", "running") and self._is_outdated(part, hosted):
            hosted.want_nothing()
            hosted.state, hosted.detail = "waiting", "another part has moved"
        if hosted.state in ("starting", "running"):
            self._judge(part, hosted, now)

    def _is_outdated(self, part: Part, hosted: _HostedPart) -> bool:
        key = f"{hosted.start}-{self._digests[part.name]}"
        return any(member.wanted is None or member.wanted.key != key for member in hosted.members)

    def _start(self, part: Part, hosted: _HostedPart, now: float) -> None:
        digest = self._digests[part.name]
        keys = hosted.running_keys()
        if keys and all(key.endswith(digest) for key in keys):
            # A former supervisor started it.
            hosted.begin(now, start=max(int(key.partition("-")[0]) for key in keys))
        elif keys:
            return  # the program with earlier addresses is still ending
        elif all(self._hosted[name].state == "running" for name in part.after):
            hosted.begin(now, start=hosted.start + 1)
        else:
            return
        hosted.detail = hosted.where()
        for member in hosted.members:
            assert member.report is not None
            key = f"{hosted.start}-{digest}"
            member.wanted = Launch(member.report.instance, key, part, hosted.start > 1)

    def _judge(self, part: Part, hosted: _HostedPart, now: float) -> None:
        """Compare the reports of the hosts with what they should run."""
        reports = [
            member.report for member in hosted.members if member.report and member.answers_wanted()
        ]
        ended = [report for report in reports if report.state == "ended"]
        may_finish = part.role in ("environment", "trainer")
        failed = [report for report in ended if report.exit_code != 0 or not may_finish]
        if failed:
            is_invalid = failed[0].exit_code == INVALID_SETTINGS
            is_final = is_invalid and not self._is_excused(part, hosted)
            self._fail(part, hosted, now, failed[0].cause, is_final=is_final)
        elif len(ended) == len(hosted.members):
            hosted.state, hosted.detail = "finished", ""
            if part.role == "trainer":
                self._end("finished", "")
        elif len(reports) == len(hosted.members) and all(each.is_ready for each in reports):
            hosted.state, hosted.answered = "running", now
        else:
            self._check_limit(part, hosted, now)

    def _check_limit(self, part: Part, hosted: _HostedPart, now: float) -> None:
        is_starting = hosted.state == "starting"
        limit_s = self._run.start_limit_s if is_starting else part.restarts.unresponsive_s
        if now - hosted.answered >= limit_s:
            what = "was not ready" if is_starting else "did not answer"
            self._fail(part, hosted, now, f"{what} for {limit_s:g} s")

    def _is_excused(self, part: Part, hosted: _HostedPart) -> bool:
        """Whether a part that it needs does not answer, or was started again during its life."""
        needed = [self._hosted[name] for name in part.after]
        return any(each.state != "running" or each.since > hosted.since for each in needed)

    def _fail(
        self, part: Part, hosted: _HostedPart, now: float, reason: str, *, is_final: bool = False
    ) -> None:
        """Restart a part later, or end the run."""
        hosted.want_nothing()
        hosted.detail = reason
        retry_at = None if is_final else hosted.attempts.after_failure(now)
        if retry_at is None:
            hosted.state = "failed"
            self._end("failed", f"{part.name}: {reason}")
        else:
            hosted.state, hosted.retry_at = "restarting", retry_at
        logger.warning("%s %s; it is %s", part.name, reason, hosted.state)

    def _end(self, outcome: RunState, reason: str) -> None:
        if self._outcome == "running":
            self._reason, self._ends_at = reason, time.monotonic() + ENDING_S
            self._outcome = outcome

    def _proceed_to_end(self, now: float) -> None:
        """Stop environments and trainer, then the servers, then remove the hosts."""
        import ray

        clients = [name for name in self._hosted if name not in self._servers]
        for names in (clients, self._servers):
            for name in names:
                self._hosted[name].want_nothing()
            if now < self._ends_at and any(self._hosted[name].running_keys() for name in names):
                return
        for hosted in self._hosted.values():
            if hosted.state not in ("finished", "failed"):
                hosted.state, hosted.detail = "stopped", ""
            for member in hosted.members:
                ray.kill(member.handle, no_restart=True)
        self._is_over = True

    def _save(self) -> None:
        hosted = {
            name: {
                "start": each.start,
                "restarts": each.attempts.total,
                "addresses": [member.address for member in each.members],
            }
            for name, each in self._hosted.items()
        }
        status = self.status().as_json()
        content = {"submission": self._submission, "status": status, "hosted": hosted}
        if content != self._saved:
            _write_json(self._run.output / STATE_FILE, content)
            self._saved = content


def _digest(part: Part) -> str:
    content = [part.command, dict(part.variables), dict(part.files), dict(part.secrets)]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def _addresses(run: RunFile, found: Mapping[str, HostAddress]) -> Addresses:
    return Addresses(
        hosts={name: address.host for name, address in found.items()},
        ports={name: address.port for name, address in found.items()},
        output=run.output,
        settings=run.output / "settings",
        bind=_BIND,
        python=_PYTHON,
    )


def _service_ports(run: RunFile) -> dict[str, int]:
    """Return the port of each service; empty if the run file has none."""
    first = run.service.port
    if first is None:
        return {}
    return {name: first + number for number, name in enumerate(service_names(run))}


def placeless_parts(run: RunFile) -> tuple[Part, ...]:
    """Return the parts before Ray has placed them: `node-of-PART` and port 0 for addresses."""
    ports = _service_ports(run)
    names = [*service_names(run), *engine_names(run), "trainer"]
    found = {name: HostAddress(f"node-of-{name}", ports.get(name, 0)) for name in names}
    return plan_parts(run, _addresses(run, found))


def unit_names(part: Part) -> list[str]:
    """Return the names of a part's hosts: one per node."""
    others = [f"{part.name}-node-{number}" for number in range(1, part.resources.nodes)]
    return [part.name, *others]


def actor_options(run: RunFile, unit: str, resources: Resources) -> dict[str, Any]:
    """Return the options of an actor as `ray.remote(...).options` takes them."""
    options: dict[str, Any] = {
        "name": f"{run.name}.{unit}",
        "namespace": run.ray.namespace,
        "lifetime": "detached",
        "max_restarts": -1,
        "num_cpus": resources.cpus or 0,
        "num_gpus": resources.gpus,
    }
    if resources.memory_gib is not None:
        options["memory"] = int(resources.memory_gib * 2**30)
    if run.ray.resources and unit != SUPERVISOR:
        options["resources"] = dict(run.ray.resources)
    if resources.nodes > 1:
        options["scheduling_strategy"] = "SPREAD"
    return options
