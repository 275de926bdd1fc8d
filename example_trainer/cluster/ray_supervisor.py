"""The supervisor of a run on a Ray cluster, an actor that creates the hosts of all parts.

    RunLives (`restarts`: what to do) ◄── RaySupervisor ──► PartHost per part (`ray_hosts`)

Both kinds of actors are named and detached, and Ray restarts them on any node with the resources.

- The supervisor sends each host, again and again, what it should run; the host compares it with
  what it runs. A lost call, a restarted supervisor and a restarted host need no further rule.
- Ray restarts an actor at once. The program in it starts after a back-off, as often as the run
  file allows.
- Servers are reached where their hosts were placed. When one moves to another node, the parts that
  use its address are started again with the new one, without counting as failures.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atroposlib.errors import ConfigError
from example_trainer.cluster.parts import (
    Addresses,
    Part,
    Resources,
    engine_names,
    plan_parts,
    service_names,
)
from example_trainer.cluster.placement import ENDED, RunState, RunStatus
from example_trainer.cluster.ray_hosts import (
    BIND,
    PYTHON,
    HostAddress,
    HostReport,
    Launch,
    PartHost,
    answers,
    read_json,
    write_json,
)
from example_trainer.cluster.restarts import PartLife, RunLives, may_finish
from example_trainer.cluster.run_file import RunFile

logger = logging.getLogger(__name__)

SUPERVISOR = "supervisor"
STATE_FILE = Path("up") / "ray.json"
ENDING_S = 60.0
"""Maximum seconds for the end of all programs of a run."""
_POLL_S = 0.5
_CALLS_PER_S = 400
"""Limit on the calls of the supervisor: the hosts of a large run are called less often."""


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
    """The hosts of a part."""

    life: PartLife
    members: list[_HostCalls] = field(default_factory=list)
    start: int = 0
    """Number of the last start."""

    def is_placed(self) -> bool:
        return all(member.report is not None for member in self.members)

    def running_keys(self) -> set[str]:
        reports = [member.report for member in self.members if member.report is not None]
        return {report.key for report in reports if report.state == "running"}

    def want_nothing(self) -> None:
        for member in self.members:
            member.wanted = None

    def where(self) -> str:
        return ", ".join(member.address.host for member in self.members if member.address)


class RaySupervisor:
    """Actor that keeps the parts of a run going until its trainer has finished or a part failed.

    `submission` differs between submissions of the same run, so that none continues the state of
    an earlier one.
    """

    def __init__(self, run_json: str, submission: str) -> None:
        self._run = RunFile.model_validate_json(run_json)
        self._submission = submission
        self._servers = [*service_names(self._run), *engine_names(self._run)]
        self._lives = RunLives(placeless_parts(self._run), start_limit_s=self._run.start_limit_s)
        self._digests: dict[str, str] = {}
        self._addresses: Addresses | None = None
        self._ends_at: float | None = None
        self._is_over = False
        self._saved: Mapping[str, Any] = {}
        self._hosted: dict[str, _HostedPart] = {}
        saved = read_json(self._run.output / STATE_FILE)
        if saved.get("submission") != self._submission:
            saved = {}
        self._ended = _ended_status(saved)
        """The state of a run that had ended when Ray restarted this actor; None otherwise."""
        if self._ended is not None:
            return
        self._hosted = self._create_hosts(saved)
        threading.Thread(target=self._work, daemon=True).start()

    def status(self) -> RunStatus:
        """Return the state of the run; it has not ended before its programs have."""
        if self._ended is not None:
            return self._ended
        status = self._lives.status()
        if self._is_over:
            return status
        return status._replace(state="waiting" if self._addresses is None else "running")

    def stop(self) -> None:
        """Request the end of all parts; `status` shows it."""
        self._end("stopped")

    def _create_hosts(self, saved: Mapping[str, Any]) -> dict[str, _HostedPart]:
        known = saved.get("hosted", {})
        found = {}
        for name, life in self._lives.lives.items():
            hosted = _HostedPart(life)
            part, old = life.part, known.get(name, {})
            hosted.start, life.attempts.total = old.get("start", 0), old.get("restarts", 0)
            addresses = old.get("addresses", [None] * part.resources.nodes)
            for unit, address in zip(unit_names(part), addresses, strict=True):
                place = HostAddress(*address) if address else None
                hosted.members.append(_HostCalls(unit, self._create_host(unit, part), place))
            found[name] = hosted
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
        if self._lives.state != "running":
            self._proceed_to_end(now)
        elif self._plan():
            for hosted in self._hosted.values():
                self._advance(hosted, now)
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
        if self._addresses is None and self._lives.state == "running":
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
            if self._lives.state == "running":  # it was killed for good: make another
                part = self._hosted[name].life.part
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
            for part in plan_parts(self._run, addresses):
                self._hosted[part.name].life.part = part
                self._digests[part.name] = _digest(part)
            self._addresses = addresses
        return True

    def _advance(self, hosted: _HostedPart, now: float) -> None:
        """Take the step that the state of one part and the time allow."""
        life = hosted.life
        if life.state in ("finished", "failed"):
            return
        if not hosted.is_placed():
            trouble = next((each.trouble for each in hosted.members if each.trouble), "")
            if life.is_live:
                self._fail(hosted, now, trouble or "its actor or its node was lost")
            life.detail = trouble or life.detail
            return
        if life.is_due(now):
            self._start(hosted, now)
        elif life.is_live and self._is_outdated(hosted):
            hosted.want_nothing()
            life.state, life.detail = "waiting", "another part has moved"
        if life.is_live:
            self._judge(hosted, now)

    def _key(self, hosted: _HostedPart) -> str:
        return f"{hosted.start}-{self._digests[hosted.life.part.name]}"

    def _is_outdated(self, hosted: _HostedPart) -> bool:
        key = self._key(hosted)
        return any(member.wanted is None or member.wanted.key != key for member in hosted.members)

    def _start(self, hosted: _HostedPart, now: float) -> None:
        life, keys = hosted.life, hosted.running_keys()
        digest = self._digests[life.part.name]
        if keys and all(key.endswith(digest) for key in keys):
            # A former supervisor started it.
            hosted.start = max(int(key.partition("-")[0]) for key in keys)
        elif not keys and self._lives.has_its_needs(life):
            hosted.start += 1
        else:
            return  # a program with earlier addresses is still ending, or others are not ready
        life.begin(now)
        life.detail = hosted.where()
        for member in hosted.members:
            assert member.report is not None
            is_return = hosted.start > 1
            member.wanted = Launch(
                member.report.instance, self._key(hosted), life.part, is_return=is_return
            )

    def _judge(self, hosted: _HostedPart, now: float) -> None:
        """Compare the reports of the hosts with what they should run."""
        life = hosted.life
        reports = [
            member.report for member in hosted.members if member.report and member.answers_wanted()
        ]
        ended = [report for report in reports if report.state == "ended"]
        failed = [each for each in ended if each.exit_code != 0 or not may_finish(life.part)]
        if failed:
            is_final = self._lives.is_final(life, failed[0].exit_code, answers)
            self._fail(hosted, now, failed[0].cause, is_final=is_final)
        elif len(ended) == len(hosted.members):
            self._lives.finish(life)
            self._set_limit()
        elif len(reports) == len(hosted.members) and all(each.is_ready for each in reports):
            life.answer(now)
        elif (reason := self._lives.silence(life, now)) is not None:
            self._fail(hosted, now, reason)

    def _fail(
        self, hosted: _HostedPart, now: float, reason: str, *, is_final: bool = False
    ) -> None:
        """Restart a part later, or end the run."""
        hosted.want_nothing()
        self._lives.fail(hosted.life, now, reason, is_final=is_final)
        self._set_limit()
        logger.warning("%s %s; it is %s", hosted.life.part.name, reason, hosted.life.state)

    def _end(self, outcome: RunState, reason: str = "") -> None:
        self._lives.end(outcome, reason)
        self._set_limit()

    def _set_limit(self) -> None:
        """Limit the end of all programs, once the run has an outcome."""
        if self._lives.state != "running" and self._ends_at is None:
            self._ends_at = time.monotonic() + ENDING_S

    def _proceed_to_end(self, now: float) -> None:
        """Stop environments and trainer, then the servers, then remove the hosts."""
        import ray

        clients = [name for name in self._hosted if name not in self._servers]
        for names in (clients, self._servers):
            for name in names:
                self._hosted[name].want_nothing()
            is_running = any(self._hosted[name].running_keys() for name in names)
            if is_running and self._ends_at is not None and now < self._ends_at:
                return
        self._lives.stop()
        for hosted in self._hosted.values():
            for member in hosted.members:
                ray.kill(member.handle, no_restart=True)
        self._is_over = True

    def _save(self) -> None:
        hosted = {
            name: {
                "start": each.start,
                "restarts": each.life.attempts.total,
                "addresses": [member.address for member in each.members],
            }
            for name, each in self._hosted.items()
        }
        status = self.status().as_json()
        content = {"submission": self._submission, "status": status, "hosted": hosted}
        if content != self._saved:
            write_json(self._run.output / STATE_FILE, content)
            self._saved = content


def _ended_status(saved: Mapping[str, Any]) -> RunStatus | None:
    """Return the saved state of a run if it has ended."""
    status = RunStatus.from_json(saved["status"]) if saved else None
    return status if status is not None and status.state in ENDED else None


def _digest(part: Part) -> str:
    content = [part.command, dict(part.variables), dict(part.files), dict(part.secrets)]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def _addresses(run: RunFile, found: Mapping[str, HostAddress]) -> Addresses:
    return Addresses(
        hosts={name: address.host for name, address in found.items()},
        ports={name: address.port for name, address in found.items()},
        output=run.output,
        settings=run.output / "settings",
        bind=BIND,
        python=PYTHON,
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
