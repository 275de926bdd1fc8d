"""`atropos-trainer-check URL`: check a trainer against a live service, rule by rule.

    environment side (this command) ─► service at URL ◄── relay (this command) ◄── the trainer

The service was started empty (`run-api`). The trainer is started with the address of the relay, by
its author or with `--command`. The environment side posts groups of known content. The relay passes
requests on, records what the trainer does, and now and then answers as a service in trouble does:
busy, restarted, or out of reach. Each rule is then ok, broken or not exercised.

Rows of `--rows FILE` are compared with what was posted. The trainer writes one JSON object per line
and trajectory it trained on: `{"tokens": [...], "trained": [0, 1, ...], "advantages": [...]}`, with
one entry per token.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from atroposlib.api.client import TrajectoryApiClient
from atroposlib.api.trainers.conformance import (
    FAULTS,
    OPTIONAL_CONTENT,
    RULE_NAMES,
    SLOTS,
    Checklist,
    Content,
    check_rows,
    report_text,
)
from atroposlib.errors import ConfigError, TrajectoryApiError
from atroposlib.utils.command_parser import (
    CommandParser,
    end_command,
    integer_between,
    prepare_command,
    reader_may_leave,
)
from atroposlib.utils.text import without_secrets
from atroposlib.wire import MEDIA_TYPES, decode_batch, encode_group

__all__ = ["main"]

_COMMAND = "atropos-trainer-check"
_INTERRUPTED = 130


_RETRY_AFTER_S = 1
_FIRST_FAULT_AFTER = 2
"""Batches that the trainer has before the first fault; after the first batch it has to wait."""
_OUTAGE_S = 2.0
_HOLD_S = 1.5
_MOST_NULLS = 30
_MOST_SEQUENCES = 1024
_MOST_STEPS = 100
_MOST_REFUSALS = 10
_MAX_BODY_BYTES = 64 * 2**20
_UPSTREAM_S = 400.0
_OF_ACK = ("busy_ack", "lost_lease")
_NOT_PASSED_ON = frozenset(
    {"host", "connection", "transfer-encoding", "content-length", "keep-alive", "date", "server"}
)


@dataclass
class Taken:
    """A batch that the trainer has received."""

    slot: int
    batch_id: str | None
    """None without a lease."""
    outcome: str = ""
    """Its end: `trained`, `skipped`, `returned`, `lost`; empty while it is held."""


class Relay:
    """Stands between trainer and service; records requests and plays a service in trouble.

    Attributes:
        checklist: receives the results.
        last_request_at: time of the last request of the trainer.
        registration: body of its `POST /register`; None before it.
        taken: batches that it has received, in their order.
        content: what the environment side posts; None before it starts.
        held_until: time until which no further batch is posted.
        progress: set when the trainer has received a batch.
    """

    def __init__(self, url: str, checklist: Checklist) -> None:
        self.checklist = checklist
        self.last_request_at = time.monotonic()
        self.registration: dict[str, Any] | None = None
        self.taken: list[Taken] = []
        self.content: Content | None = None
        self.held_until = 0.0
        self.progress = asyncio.Event()
        self._url = url
        self._session: aiohttp.ClientSession | None = None
        self._faults = list(FAULTS)
        self._pending: str | None = None
        """Fault whose recovery has not been seen yet."""
        self._pending_since = 0.0
        self._pending_batch = ""
        self._outage_until = 0.0
        self._num_nulls = self._num_refusals = self._num_restart_answers = 0
        self._versions = [-1]

    @property
    def pending(self) -> str | None:
        """The fault from which the trainer has not recovered yet."""
        return self._pending

    @property
    def is_ignored(self) -> bool:
        """Whether the trainer keeps asking for batches without registering again."""
        return self._num_restart_answers >= _MOST_REFUSALS

    async def serve(self, port: int) -> tuple[web.AppRunner, int]:
        """Listen on loopback; return the server and its port."""
        self._session = aiohttp.ClientSession(
            auto_decompress=False, timeout=aiohttp.ClientTimeout(total=_UPSTREAM_S)
        )
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", self._answer)
        # Bodies are passed on as they are, compressed or not.
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, auto_decompress=False)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        return runner, int(runner.addresses[0][1])

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        now = time.monotonic()
        self.last_request_at = now
        if now < self._outage_until:
            return _cut(request)
        if request.path == "/batch" and request.method == "GET":
            return await self._batch(request)
        parts = request.path.strip("/").split("/")
        if len(parts) == 3 and parts[0] == "batch" and request.method == "POST":
            return await self._settlement(request, parts[1], parts[2])
        reply = await self._pass_on(request)
        if request.path == "/register" and request.method == "POST":
            await self._note_registration(request, reply)
        elif request.path == "/policy" and request.method == "POST":
            await self._note_version(request, reply)
        return reply

    async def _batch(self, request: web.Request) -> web.StreamResponse:
        fault = self._due(is_ack=False)
        if fault == "outage":
            self._start(fault)
            self._outage_until = time.monotonic() + _OUTAGE_S
            return _cut(request)
        if fault == "busy":
            self._start(fault)
            return _busy()
        if fault == "restart" or self._pending == "restart":
            if fault:
                self._start(fault)
            self._num_restart_answers += 1
            return web.json_response(_UNREGISTERED)
        self._note_retry("busy")
        if time.monotonic() < self.held_until:
            self.checklist.saw("waits")
        path = _with_lease(request) if fault == "lost_batch" else None
        reply = await self._pass_on(request, path)
        answer = _decoded(reply)
        if answer.get("status") == "error":
            self._num_refusals += 1
            if self._num_refusals >= _MOST_REFUSALS:
                self.checklist.broke(
                    "registers",
                    f"asked for a batch {self._num_refusals} times and did not register",
                )
            return reply
        groups = answer.get("batch")
        if not groups:
            self._note_null()
            return reply
        batch_id = answer.get("batch_id")
        if fault == "lost_batch" and batch_id is not None:
            self._start(fault)
            await self._send(request, "POST", f"/batch/{batch_id}/nack")
            return await _cut_off(request, reply)
        self._recovered("busy", "lost_batch", "outage", "lost_lease", "restart")
        self._note_batch(groups, None if batch_id is None else str(batch_id))
        return reply

    async def _settlement(self, request: web.Request, batch_id: str, verb: str) -> web.Response:
        fault = self._due(is_ack=True) if verb == "ack" else None
        if fault == "busy_ack":
            self._start(fault)
            self._pending_batch = batch_id
            return _busy()
        if fault == "lost_lease":
            self._start(fault)
            await self._send(request, "POST", f"/batch/{batch_id}/nack")
            self._settle(batch_id, "lost")
            return web.json_response({"detail": "the lease of this batch has ended"}, status=409)
        if self._pending == "busy_ack" and batch_id == self._pending_batch:
            self._note_retry("busy_ack")
            self._recovered("busy_ack")
        reply = await self._pass_on(request)
        if reply.status in (404, 409) and not self._is_settled(batch_id):
            self.checklist.broke(
                "acknowledges",
                f"{verb} of batch {batch_id} got {reply.status}: {_text(reply)[:200]}",
            )
        elif reply.status == 200:
            is_skipped = request.query.get("steps_done") == "0"
            outcome = "returned" if verb == "nack" else "skipped" if is_skipped else "trained"
            self._settle(batch_id, outcome)
            self.checklist.saw("acknowledges")
        return reply

    async def _note_registration(self, request: web.Request, reply: web.Response) -> None:
        if reply.status != 200:
            self.checklist.broke(
                "registers", f"POST /register got {reply.status}: {_text(reply)[:300]}"
            )
            return
        self.checklist.saw("registers")
        if self.registration is None:
            self.registration = await _sent_json(request)
        if self._pending == "restart":
            self._recovered("restart")

    async def _note_version(self, request: web.Request, reply: web.Response) -> None:
        self.checklist.saw("versions")
        if reply.status != 200:
            self.checklist.broke("versions", f"POST /policy got {reply.status}")
            return
        version = int((await _sent_json(request))["version"])
        if version < self._versions[-1]:
            self.checklist.broke("versions", f"version {version} after {self._versions[-1]}")
        self._versions.append(version)

    def _note_null(self) -> None:
        if time.monotonic() >= self.held_until:
            return
        self._num_nulls += 1
        if self._num_nulls > _MOST_NULLS:
            self.checklist.broke(
                "waits", f"more than {_MOST_NULLS} requests within {_HOLD_S:g} s without a batch"
            )

    def _note_batch(self, groups: Sequence[Mapping[str, Any]], batch_id: str | None) -> None:
        if self.content is None:
            return
        posted = self.content.posted.get(tuple(groups[0]["tokens"][0]))
        if posted is None:
            return
        if batch_id is None:  # without a lease, it counts as trained once it was sent
            self.taken.append(Taken(posted.slot, None, "trained"))
        else:
            self.taken.append(Taken(posted.slot, batch_id))
        if len(self.taken) == 1:
            self.held_until = time.monotonic() + _HOLD_S
        self.progress.set()

    def _due(self, *, is_ack: bool) -> str | None:
        """Return the fault to play now: the first one that is left, after its batch."""
        if self._pending is not None or not self._faults:
            return None
        number = FAULTS.index(self._faults[0]) + _FIRST_FAULT_AFTER
        if self._faults[0] in _OF_ACK and not any(one.batch_id for one in self.taken):
            # Without leases there is nothing to acknowledge.
            self._faults = [fault for fault in self._faults if fault not in _OF_ACK]
            return self._due(is_ack=is_ack)
        if len({one.slot for one in self.taken}) < number:
            return None
        return self._faults[0] if (self._faults[0] in _OF_ACK) == is_ack else None

    def _start(self, fault: str) -> None:
        self._faults.remove(fault)
        self.checklist.saw(fault)
        self._pending, self._pending_since = fault, time.monotonic()

    def _note_retry(self, fault: str) -> None:
        """Note that a request with a 503 was sent again."""
        waited_s = time.monotonic() - self._pending_since
        if self._pending == fault and waited_s < 0.9 * _RETRY_AFTER_S:
            self.checklist.broke(
                fault, f"sent again after {waited_s:.2f} s, Retry-After was {_RETRY_AFTER_S} s"
            )

    def _recovered(self, *faults: str) -> None:
        if self._pending in faults:
            self._pending = None

    def _settle(self, batch_id: str, outcome: str) -> None:
        for one in self.taken:
            if one.batch_id == batch_id and not one.outcome:
                one.outcome = outcome

    def _is_settled(self, batch_id: str) -> bool:
        return any(one.batch_id == batch_id and one.outcome for one in self.taken)

    async def _pass_on(self, request: web.Request, path: str | None = None) -> web.Response:
        body = await request.read()
        return await self._send(request, request.method, path or request.path_qs, body)

    async def _send(
        self, request: web.Request, method: str, path: str, body: bytes = b""
    ) -> web.Response:
        """Send a request with the headers of the trainer's; return the response as it is."""
        assert self._session is not None
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _NOT_PASSED_ON}
        try:
            async with self._session.request(
                method, self._url + path, headers=headers, data=body or None
            ) as reply:
                content = await reply.read()
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            return web.Response(status=502, text=f"the service does not respond: {error!r}")
        kept = {k: v for k, v in reply.headers.items() if k.lower() not in _NOT_PASSED_ON}
        return web.Response(status=reply.status, body=content, headers=kept)


_UNREGISTERED = {
    "status": "error",
    "message": "Trainer not registered. Call /register first.",
    "batch": [],
}


def _with_lease(request: web.Request) -> str:
    """Return the path of a batch request with a lease, so that the batch can be returned."""
    if "lease" in request.query:
        return request.path_qs
    return f"{request.path_qs}{'&' if request.query else '?'}lease=60"


def _busy() -> web.Response:
    return web.json_response(
        {"detail": "the service is busy"},
        status=503,
        headers={"Retry-After": str(_RETRY_AFTER_S)},
    )


def _cut(request: web.Request) -> web.StreamResponse:
    """Close the connection without a response."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


async def _cut_off(request: web.Request, reply: web.Response) -> web.StreamResponse:
    """Send half of a response and close the connection."""
    body = _body(reply)
    half = web.StreamResponse(status=reply.status, headers=reply.headers)
    half.content_length = len(body)
    await half.prepare(request)
    await half.write(body[: len(body) // 2])
    return _cut(request)


async def _sent_json(request: web.Request) -> dict[str, Any]:
    """Return the body of a request that the service has accepted."""
    body = await request.read()
    if "gzip" in request.headers.get("Content-Encoding", "").lower():
        body = gzip.decompress(body)
    return dict(json.loads(body))


def _body(reply: web.Response) -> bytes:
    return reply.body if isinstance(reply.body, bytes) else b""


def _text(reply: web.Response) -> str:
    return _body(reply).decode(errors="replace")


def _decoded(reply: web.Response) -> Mapping[str, Any]:
    """Return the body of a response of `GET /batch`; empty if it cannot be read."""
    content = _body(reply)
    try:
        if reply.headers.get("Content-Encoding", "") == "gzip":
            content = gzip.decompress(content)
        if MEDIA_TYPES["msgpack"] in reply.headers.get("Content-Type", ""):
            return dict(decode_batch(content, "msgpack"))
        return dict(json.loads(content))
    except (ValueError, TypeError, OSError, EOFError):
        return {}


class EnvironmentSide:
    """Registers as an environment and posts one batch ahead of the trainer."""

    def __init__(self, client: TrajectoryApiClient, url: str, relay: Relay) -> None:
        self._client = client
        self._url = url
        self._relay = relay
        self.num_posted = 0
        self.num_steps = 0

    async def run(self, content: Content) -> None:
        """Register once the trainer asks for batches, and post until cancelled."""
        self._relay.content = content
        while not await self._register():  # noqa: ASYNC110 - the service has no route to wait for it
            await asyncio.sleep(_POLL_S)
        async with aiohttp.ClientSession(headers=_token_headers()) as session:
            while self.num_posted < self.num_steps:
                await self._post(session, content, self.num_posted)
                self.num_posted += 1
                await self._wait_until_taken(self.num_posted)

    async def _register(self) -> bool:
        answer = await self._client.register_env(
            max_token_length=1024, desired_name=_COMMAND, weight=1.0, group_size=1
        )
        if answer.get("status") != "success":
            return False
        self.num_steps = int(answer["num_steps"]) - int(answer["starting_step"])
        return True

    async def _wait_until_taken(self, num_slots: int) -> None:
        """Wait until the trainer has every batch, and after the first one, let it wait too."""
        while len({one.slot for one in self._relay.taken}) < num_slots:
            await self._relay.progress.wait()
            self._relay.progress.clear()
        if num_slots == 1:
            await asyncio.sleep(self._relay.held_until - time.monotonic())

    async def _post(self, session: aiohttp.ClientSession, content: Content, slot: int) -> None:
        _, wire_format = content.kind_of(slot)
        for group in content.groups(slot):
            # Without an id the service queues groups of any size at once.
            body = encode_group(group, wire_format)
            headers = {"Content-Type": MEDIA_TYPES[wire_format]}
            async with session.post(
                f"{self._url}/scored_data", data=body, headers=headers
            ) as reply:
                if reply.status != 200:
                    raise TrajectoryApiError(
                        f"POST /scored_data answered {reply.status}: {(await reply.text())[:300]}",
                        status=reply.status,
                    )


_POLL_S = 0.2
_GRACE_S = 5.0
_END_S = 10.0


def _token_headers() -> dict[str, str]:
    token = os.environ.get("ATROPOS_API_TOKEN", "").strip()
    return {"Authorization": f"Bearer {token}"} if token else {}


class TrainerProcess:
    """The trainer started by `--command`; ends it, and nothing else."""

    def __init__(self, command: str, url: str) -> None:
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise ConfigError(f"--command: expected a command, got {command!r}: {error}") from error
        if not words:
            raise ConfigError("--command: expected a command, got an empty text")
        self._words = [word.replace("{url}", url) for word in words]
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it in a process group of its own, with its output on standard error."""
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._words, stdout=sys.stderr, start_new_session=True
            )
        except OSError as error:
            raise ConfigError(f"--command: {self._words[0]!r} cannot be started: {error}") from None

    @property
    def exit_code(self) -> int | None:
        """Its exit code, None while it runs."""
        return None if self._process is None else self._process.returncode

    async def end(self) -> None:
        """End it with what it has started, if it still runs."""
        if self._process is None or self._process.returncode is not None:
            return
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, sign)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._process.wait(), _END_S)
                return


@dataclass(frozen=True)
class CheckSettings:
    """The flags."""

    url: str
    command: str | None
    port: int
    rows: Path | None
    vocabulary: int
    without: tuple[str, ...]
    idle_s: float
    limit_s: float


async def check(settings: CheckSettings) -> tuple[Checklist, list[str]]:
    """Run a check; return the results, and notes for the reader.

    Raises:
        ConfigError: the service is not empty, or the trainer cannot be started.
        TrajectoryApiError: the service is out of reach, or rejects the environment side.
    """
    checklist = Checklist()
    relay = Relay(settings.url, checklist)
    token = os.environ.get("ATROPOS_API_TOKEN")
    async with TrajectoryApiClient(settings.url, token=token) as client:
        if int((await client.info())["batch_size"]) >= 0:
            raise ConfigError(
                f"a trainer is registered at {without_secrets(settings.url)}; start an empty "
                "service: run-api --store memory"
            )
        runner, port = await relay.serve(settings.port)
        side = EnvironmentSide(client, settings.url, relay)
        trainer: TrainerProcess | None = None
        try:
            address = f"http://127.0.0.1:{port}"
            if settings.command is not None:
                trainer = TrainerProcess(settings.command, address)
                await trainer.start()
            else:
                with reader_may_leave():
                    print(f"start the trainer with the service at {address}")
            notes = await _watch(settings, relay, side, client, trainer)
        finally:
            if trainer is not None:
                await trainer.end()
            await runner.cleanup()
            await relay.close()
    _judge_rows(settings, relay, checklist)
    return checklist, notes


async def _watch(
    settings: CheckSettings,
    relay: Relay,
    side: EnvironmentSide,
    client: TrajectoryApiClient,
    trainer: TrainerProcess | None,
) -> list[str]:
    """Wait for the end of the run, of the trainer or of the time; return notes."""
    checklist = relay.checklist
    started = time.monotonic()
    posting: asyncio.Task[None] | None = None
    done_at: float | None = None
    reason = ""
    try:
        while not reason:
            await asyncio.sleep(_POLL_S)
            now = time.monotonic()
            if posting is None and relay.registration is not None:
                content = _content_for(relay.registration, settings)
                posting = asyncio.create_task(side.run(content))
            if posting is not None and posting.done():
                posting.result()
            status = await client.status()
            if done_at is None and side.num_steps and _is_over(status, relay):
                done_at = now
            idle_s = now - relay.last_request_at
            if trainer is not None and trainer.exit_code is not None:
                reason = f"the trainer ended with exit code {trainer.exit_code}"
            elif done_at is not None and now - done_at > _GRACE_S and trainer is None:
                reason = "the run is over"
            elif idle_s > settings.idle_s:
                reason = f"the trainer sent no request for {settings.idle_s:g} s"
            elif now - started > settings.limit_s:
                reason = f"{settings.limit_s:g} s have passed"
            elif relay.is_ignored:
                reason = "the trainer asked for batches and did not register again"
            elif "registers" in checklist.broken:
                reason = "the trainer did not register"
    finally:
        if posting is not None:
            posting.cancel()
            with suppress(asyncio.CancelledError, TrajectoryApiError):
                await posting
    exit_code = None if trainer is None else trainer.exit_code
    status = await client.status()  # again, since the trainer may have returned a batch
    is_over = relay.registration is not None and _is_over(status, relay)
    _judge_end(relay, status, reason, is_over=is_over, exit_code=exit_code)
    notes = [f"stopped: {reason}; the trainer took {len(relay.taken)} batches"]
    wanted = max(len(SLOTS), len(FAULTS) + _FIRST_FAULT_AFTER)
    if side.num_steps and side.num_steps < wanted:
        notes.append(
            f"num_steps is {side.num_steps}; with {wanted} or more, every rule can be seen"
        )
    if relay.taken and not any(one.batch_id for one in relay.taken):
        notes.append("it takes batches without a lease: if it is killed, its last batch is lost")
    return notes


def _content_for(registration: Mapping[str, Any], settings: CheckSettings) -> Content:
    for name, most in (("batch_size", _MOST_SEQUENCES), ("num_steps", _MOST_STEPS)):
        if int(registration[name]) > most:
            raise ConfigError(
                f"the trainer registered {name} {registration[name]}; the check supports up to "
                f"{most}"
            )
    return Content(int(registration["batch_size"]), settings.vocabulary, settings.without)


def _is_over(status: Mapping[str, Any], relay: Relay) -> bool:
    registration = relay.registration or {}
    return int(status["current_step"]) >= int(registration.get("num_steps", 1))


def _judge_end(
    relay: Relay, status: Mapping[str, Any], reason: str, *, is_over: bool, exit_code: int | None
) -> None:
    """Judge what is known only at the end."""
    checklist = relay.checklist
    if relay.registration is None:
        checklist.broke("registers", f"{reason}, and it has not registered")
        return
    contents = {relay.content.kind_of(one.slot) for one in relay.taken} if relay.content else set()
    for kind, wire_format in contents:
        checklist.saw("json" if wire_format == "json" else "binary")
        if kind in RULE_NAMES:
            checklist.saw(kind)
    if relay.pending is not None:
        checklist.broke(relay.pending, f"{reason} after it, and no batch was taken since")
    held = [one for one in relay.taken if one.batch_id and not one.outcome]
    leased = int(status.get("leased_batches", 0))
    if relay.taken and not is_over and relay.pending is None:
        last = relay.content.kind_of(relay.taken[-1].slot)[0] if relay.content else "plain"
        name = last if last in RULE_NAMES else "ends"
        checklist.broke(name, f"{reason} after a batch with the content `{last}`")
    if any(one.batch_id for one in relay.taken) and len(held) == len(relay.taken):
        checklist.broke("acknowledges", f"took {len(held)} batches and acknowledged none")
    if is_over:
        checklist.saw("ends")
        if leased:
            checklist.broke("ends", f"{leased} batches are still leased after the last step")
        if exit_code:
            checklist.broke("ends", f"the trainer ended with exit code {exit_code}")
        if exit_code is None and reason.endswith("have passed"):
            checklist.broke("ends", "the trainer went on after the last step")


def _judge_rows(settings: CheckSettings, relay: Relay, checklist: Checklist) -> None:
    if settings.rows is None or relay.content is None:
        return
    try:
        lines = settings.rows.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        checklist.broke("rows", f"{settings.rows} cannot be read: {error.strerror}")
        return
    trained = {one.slot for one in relay.taken if one.outcome == "trained"}
    deliveries = Counter(one.slot for one in relay.taken)
    check_rows(lines, relay.content, {slot: deliveries[slot] for slot in trained}, checklist)


def main() -> None:
    """Check a trainer and print the table.

    Exit codes: 0 no rule is broken, 1 at least one is, 2 nothing was checked, 130 interrupted.
    """
    prepare_command()
    args = _parser().parse_args()
    settings = CheckSettings(
        url=args.url.rstrip("/"),
        command=args.command,
        port=args.port,
        rows=args.rows,
        vocabulary=args.vocabulary,
        without=tuple(args.without),
        idle_s=args.idle_s,
        limit_s=args.limit_s,
    )
    try:
        checklist, notes = asyncio.run(check(settings))
    except (ConfigError, TrajectoryApiError, OSError) as error:
        end_command(_COMMAND, str(error), code=2)
    except KeyboardInterrupt:
        end_command(_COMMAND, "stopped", code=_INTERRUPTED)
    with reader_may_leave():
        print(report_text(checklist, notes))
    sys.exit(1 if checklist.broken else 0)


def _parser() -> CommandParser:
    parser = CommandParser(
        prog=_COMMAND,
        description="Check a trainer against a live, empty service: run-api --store memory.",
    )
    add = parser.add_argument
    add("url", help="address of the service, e.g. http://localhost:8000")
    add(
        "--command",
        help="starts the trainer; {url} is replaced by the address that it must use",
    )
    add(
        "--port",
        type=integer_between(0, 65535),
        default=0,
        help="port of that address; 0: any free one (%(default)s)",
    )
    add("--rows", type=Path, metavar="JSONL", help="rows that the trainer writes, to be compared")
    add(
        "--vocabulary",
        type=integer_between(8, 2**31 - 1),
        default=32,
        metavar="IDS",
        help="token ids from 1 to below this number are used (%(default)s)",
    )
    add(
        "--without",
        nargs="+",
        choices=OPTIONAL_CONTENT,
        default=[],
        help="content that the trainer does not support",
    )
    add(
        "--idle-s",
        type=integer_between(1, 3600),
        default=60,
        help="seconds without a request after which the check ends (%(default)s)",
    )
    add(
        "--limit-s",
        type=integer_between(1, 36000),
        default=600,
        help="seconds after which the check ends in any case (%(default)s)",
    )
    return parser


if __name__ == "__main__":
    main()
