"""State of the proxy: its settings, its sessions, and the inference server of each session.

ProxyState --> SessionStore --> SessionState --> ManagedServer
ManagedServer --> SampledServer --> the session's server --down--> another healthy one, or wait
                      |
                      +-- Sample of the running request

Invariants:

- The number of open sessions, including parts, never exceeds `max_sessions`; agents, who open the
  parts, leave an eighth of it to new sessions.
- The bodies that the requests of a session hold at a time have a limit together.
- A session idle for `session_idle_s` can no longer be found; requests in flight count as use.
- A closed session holds no sequences, and its requests in flight are cancelled.
- Sessions are looked up by a digest of their key; keys are never logged.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
import uuid
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import AfterValidator, BaseModel, Field

from atroposlib.envs.server_handling.config import APIServerConfig
from atroposlib.envs.server_handling.managed_server import (
    DummyManagedServer,
    ManagedServer,
    SequenceNode,
    SessionServer,
)
from atroposlib.envs.server_handling.openai_compatible import load_tokenizer
from atroposlib.envs.server_handling.proxy.refusals import (
    ProxyRefusal,
    bad_request,
    session_not_found,
    upstream_unavailable,
)
from atroposlib.envs.server_handling.proxy.requests import (
    ServerEntry,
    SessionCreateRequest,
    SetupRequest,
)
from atroposlib.envs.server_handling.retry import ServerDownError
from atroposlib.envs.server_handling.server_baseline import APIServer
from atroposlib.envs.server_handling.server_manager import (
    least_loaded,
    make_server,
    open_session,
)
from atroposlib.errors import NoTokenIdsError
from atroposlib.utils.text import without_secrets
from atroposlib.utils.tracing import NO_SPAN, TraceSpan, continued_span
from atroposlib.utils.web_pages import check_allowed_host

logger = logging.getLogger(__name__)

_POLL_S = 0.1

T = TypeVar("T")

SESSION_HEADER = "X-Session-ID"
"""Header that names the part of a session for a request, for agents that share one key."""

_RETRY_S = 30
_BODIES_RETRY_S = 1
_SHARE_WITHOUT_PARTS = 8
"""Parts leave `max_sessions` divided by this number free, so that no agent can take them all."""
_BODIES_PER_SESSION = 8
"""Bodies of the maximum size that the requests of a session may hold at a time."""
_LONGEST_PART_ID = 256
KEY_PREFIX = "sk-atropos-"
"""Prefix of keys; some agents accept only keys that begin like OpenAI's."""


@dataclass(frozen=True)
class Sample:
    """Prompt and completions of one engine request, as tokens."""

    prompt_ids: list[int]
    """[P] ids the engine read."""
    completion_ids: list[list[int]]
    """[n][C] ids it sampled."""
    completion_logprobs: list[list[float]]
    """[n][C] their logprobs."""


@dataclass
class AgentTurn:
    """One completion of an agent's session: when it was asked for, and where its tokens are."""

    asked_at: float
    """Seconds since the epoch."""
    answered_at: float
    messages: Sequence[Mapping[str, Any]]
    """The chat of the request; empty once a later request has continued it."""
    added: Sequence[Mapping[str, Any]]
    """Its messages after the last one of the assistant: results of tools, or the first prompt."""
    is_continuation: bool
    """Whether the chat has a turn of the assistant."""
    reply: Mapping[str, Any]
    """The message of the answer, with `content` and maybe `tool_calls`."""
    num_tokens: int
    """Number of sampled tokens."""
    end: int
    """Position after the last of them in the sequence."""
    digest: bytes
    """Digest of the sequence up to there."""
    row: int | None = None
    """Index of the sequence among those of the session, 0 if the server reports no ids; None if it
    is not there."""


class HeldBodies:
    """Size of the bodies that the requests of a session and its parts hold at a time.

    Args:
        max_bytes: limit on their sum.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0

    @contextmanager
    def request(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that adds to the size of one request's body, held until the end.

        The function raises 429 if the session would hold too much.
        """
        own = 0

        def add(num_bytes: int) -> None:
            nonlocal own
            if self._num_bytes + num_bytes > self._max_bytes:
                raise ProxyRefusal(
                    f"the bodies of the session's requests have more than {self._max_bytes} bytes "
                    "together; send fewer at a time",
                    status=429,
                    kind="rate_limit_error",
                    code="too_many_bodies",
                    retry_after_s=_BODIES_RETRY_S,
                )
            own += num_bytes
            self._num_bytes += num_bytes

        try:
            yield add
        finally:
            self._num_bytes -= own


class TurnLog:
    """The turns of a session and its parts, in the order of their answers."""

    def __init__(self) -> None:
        self.turns: list[AgentTurn] = []

    def add(
        self,
        sample: Sample,
        messages: Sequence[Mapping[str, Any]],
        replies: Sequence[Mapping[str, Any]],
        *,
        asked_at: float,
        answered_at: float,
    ) -> None:
        """Record the completions of one prompt."""
        prompt = _id_bytes(sample.prompt_ids)
        for turn in self.turns:
            is_continued = turn.messages and turn.end <= len(sample.prompt_ids)
            if is_continued and _id_digest(prompt[: turn.end * _ID_BYTES]) == turn.digest:
                turn.messages = ()
        num_known = _num_known(messages)
        for ids, reply in zip(sample.completion_ids, replies, strict=False):
            self.turns.append(
                AgentTurn(
                    asked_at=asked_at,
                    answered_at=answered_at,
                    messages=messages,
                    added=messages[num_known:],
                    is_continuation=num_known > 0,
                    reply=reply,
                    num_tokens=len(ids),
                    end=len(sample.prompt_ids) + len(ids),
                    digest=_id_digest(prompt + _id_bytes(ids)),
                )
            )

    def placed(self, sequences: Sequence[Sequence[int]]) -> list[AgentTurn]:
        """Return the turns, each with the first of the sequences that holds it."""
        rows: dict[tuple[int, bytes], int] = {}
        ends = sorted({turn.end for turn in self.turns})
        for row, tokens in enumerate(sequences):
            known, start, data = hashlib.blake2b(digest_size=16), 0, _id_bytes(tokens)
            for end in ends:
                if end > len(tokens):
                    break
                known.update(data[start * _ID_BYTES : end * _ID_BYTES])
                start = end
                rows.setdefault((end, known.digest()), row)
        return [replace(turn, row=rows.get((turn.end, turn.digest))) for turn in self.turns]


_ID_BYTES = 8


def _id_bytes(ids: Sequence[int]) -> bytes:
    return array("q", ids).tobytes()


def _id_digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _num_known(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of messages up to the last one of the assistant."""
    own = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    return own[-1] + 1 if own else 0


@dataclass(frozen=True)
class FixedSampling:
    """Sampling of a session that its agent does not choose; None leaves a value to the agent."""

    temperature: float | None = None
    """Replaces that of requests, whose filters (`top_p`, `top_k`, `min_p`) and penalties are then
    left out: the trainer's logprobs know none of them."""
    max_tokens: int | None = None
    """Upper limit of a completion."""

    def apply(self, kwargs: dict[str, Any]) -> None:
        if self.temperature is not None:
            kwargs["temperature"] = self.temperature
            for name in _RESHAPING:
                kwargs.pop(name, None)
            extra = kwargs.pop("extra_body", None) or {}  # the prompts of a request share it
            if kept := {name: extra[name] for name in extra if name not in _RESHAPING}:
                kwargs["extra_body"] = kept
        if self.max_tokens is not None:
            kwargs["max_tokens"] = min(kwargs.get("max_tokens") or self.max_tokens, self.max_tokens)


_RESHAPING = (
    *("top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("logit_bias", "min_tokens"),
)


class SampledServer(SessionServer):
    """Inference server of one session, which appends a `Sample` to the argument `samples`.

    Requests stay at one server, whose cache has the conversation. If it is down, they move to
    another healthy one, or wait up to `wait_s` for any; then `ServerDownError` is raised. Without
    `others` the session stays at `server`.
    """

    def __init__(self, server: Any, others: Sequence[Any] = (), *, wait_s: float) -> None:
        super().__init__(server, self._choose_healthy)
        self._others = list(others)
        self._wait_s = wait_s

    async def _send(self, method: str, kwargs: dict[str, Any]) -> Any:
        samples: list[Sample] | None = kwargs.pop("samples", None)
        answer = await super()._send(method, kwargs)
        if method == "tokens_and_logprobs_completion" and samples is not None:
            samples.append(Sample(answer[0], answer[1], answer[2]))
        return answer

    async def _choose_healthy(self, current: Any, is_training: bool) -> Any:
        deadline = time.monotonic() + self._wait_s
        while not current.server_healthy:
            healthy = [other for other in self._others if other.server_healthy]
            if healthy:
                return least_loaded(healthy, is_training=is_training)
            if time.monotonic() >= deadline:
                raise ServerDownError(
                    f"every server of the session has been down for {self._wait_s:g} s"
                )
            await asyncio.sleep(_POLL_S)
        return current


@dataclass
class SessionState:
    """One agent's session: its key, recorded sequences and requests in flight.

    Several requests may run at the same time; each continues the recorded sequence with which its
    prompt starts, or starts a new one.
    """

    uuid: str
    """Name of the session in URLs."""
    api_key: str = field(repr=False)
    """Key that identifies the session; never logged."""
    managed_server: ManagedServer | DummyManagedServer
    model_name: str
    tool_parser: str
    base_url: str | None
    """Address of the inference server chosen at creation."""
    max_choices: int
    """Largest `n` of one request."""
    created_at: float
    """Seconds since the epoch."""
    last_accessed: float
    """Seconds since the epoch at which a request last started or ended."""
    clock: Callable[[], float] = field(repr=False)
    dialect_state: dict[str, Any] = field(default_factory=dict, repr=False)
    """State of each dialect for this session by the dialect's name, e.g. stored responses."""
    wanted: SessionCreateRequest = field(default_factory=SessionCreateRequest)
    max_sequence_tokens: int | None = None
    """Limit of prompt and completion together; None leaves it to the engine."""
    parts: dict[str, SessionState] = field(default_factory=dict, repr=False)
    """Separate sessions under the same key, by the id that their requests name."""
    bodies: HeldBodies = field(default_factory=lambda: HeldBodies(2**28), repr=False)
    """Bodies of its requests and of those of its parts."""
    log: TurnLog | None = field(default=None, repr=False)
    """The turns of the session and its parts; None if they are not recorded."""
    sampling: FixedSampling = field(default_factory=FixedSampling)
    span: TraceSpan = field(default=NO_SPAN, repr=False)
    """Span of the rollout in which the session was opened; that of its requests without one."""
    is_closed: bool = False
    _num_requests: int = 0
    _in_flight: set[asyncio.Future[Any]] = field(default_factory=set, repr=False)

    @property
    def nodes(self) -> list[SequenceNode]:
        """Recorded sequences, oldest first: those of the session, then those of each part."""
        state = self.managed_server.get_state()
        nodes = state["sequences"].values() if "sequences" in state else state["nodes"]
        return [*nodes, *(node for part in self.parts.values() for node in part.nodes)]

    @property
    def num_in_flight(self) -> int:
        """Number of requests that wait for the engine, including those of its parts."""
        return len(self._in_flight) + sum(part.num_in_flight for part in self.parts.values())

    @property
    def last_used(self) -> float:
        """Last use of the session or one of its parts, in seconds since the epoch."""
        return max([self.last_accessed, *(part.last_accessed for part in self.parts.values())])

    async def run(
        self,
        call: Callable[[Any, list[Sample]], Awaitable[T]],
        *,
        traceparent: str | None = None,
    ) -> tuple[T, list[Sample]]:
        """Send one request to the managed server; return its answer and its samples.

        `call` makes the request, with the list as its argument `samples`. Cancelling releases the
        engine's slot, and nothing is recorded. `traceparent` is the header of the agent's request.

        Raises:
            ProxyRefusal: the session was deleted before or during the request.
        """
        if self.is_closed:
            raise session_not_found()
        samples: list[Sample] = []
        turn = {"rl.turn.index": self._num_requests}
        self._num_requests += 1
        with continued_span(self.span, traceparent, "rl.turn", turn):
            return await self._run(call, samples), samples

    async def _run(
        self, call: Callable[[Any, list[Sample]], Awaitable[T]], samples: list[Sample]
    ) -> T:
        task = asyncio.ensure_future(call(self.managed_server, samples))
        self._in_flight.add(task)
        self.last_accessed = self.clock()
        try:
            return await task
        except asyncio.CancelledError:
            if self.is_closed:
                raise session_not_found() from None
            raise
        finally:
            self._in_flight.discard(task)
            self.last_accessed = self.clock()

    def close(self) -> None:
        self.is_closed = True
        for task in self._in_flight:
            task.cancel()
        self.managed_server.reset()
        self.dialect_state.clear()
        for part in self.parts.values():
            part.close()
        self.parts.clear()


class HasServers(Protocol):
    """The part of `ServerManager` that the proxy uses; `policy_version` is optional."""

    servers: list[Any]


def address_of(server: Any) -> str | None:
    """Return the configured URL of a server; None if it has none."""
    # Test servers may have a config with only a model name.
    return getattr(server.config, "base_url", None) or None


def choose_server(servers: list[Any], base_url: str | None, open_sessions: Counter[int]) -> Any:
    """Return the server with a URL, or the least loaded one.

    Raises:
        ProxyRefusal: no server is configured (503), or none has this URL (404).
    """
    if not servers:
        raise upstream_unavailable("no server is configured; add servers with POST /setup")
    if base_url is None:
        return least_loaded(servers, open_sessions=open_sessions)
    known = {(address_of(server) or "").rstrip("/"): server for server in servers}
    if base_url.rstrip("/") not in known:
        shown = ", ".join(sorted(without_secrets(address) for address in known if address))
        raise ProxyRefusal(
            f"no inference server has the address {without_secrets(base_url)!r}; there are: "
            f"{shown or 'none with an address'}",
            status=404,
            code="server_not_found",
            param="base_url",
        )
    return known[base_url.rstrip("/")]


class ProxySettings(BaseModel):
    """Limits of the proxy, and which requests require a key."""

    session_idle_s: float = Field(
        default=3600.0,
        gt=0,
        description="Idle time after which a session is deleted, in seconds. A request in flight "
        "counts as use.",
    )
    max_sessions: int = Field(
        default=4096,
        ge=1,
        description="Maximum number of open sessions; more are refused with status 429.",
    )
    max_body_bytes: int = Field(
        default=32 * 1024 * 1024, ge=1, description="Maximum size of a request body, in bytes."
    )
    max_choices: int = Field(
        default=128, ge=1, description="Maximum n of one request, multiplied by its prompts."
    )
    max_sequence_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Maximum number of tokens of a chat, prompt and completion together: a "
        "completion is limited to what remains, and a longer prompt is refused as an engine "
        "refuses one beyond its context. None leaves it to the engine.",
    )
    upstream_wait_s: float = Field(
        default=120.0,
        ge=0,
        description="Maximum wait of a request for an inference server that is down, in seconds; "
        "then status 503 is returned.",
    )
    allowed_hosts: tuple[Annotated[str, AfterValidator(check_allowed_host)], ...] = Field(
        default=(),
        description="Host names other than this machine's own under which agents reach the proxy, "
        "for example through a reverse proxy or a tunnel; with `require_keys` and `admin_key` any "
        "name is accepted.",
    )
    require_keys: bool = Field(
        default=False,
        description="Whether every route of a session requires its key. Otherwise the session's "
        "URL is sufficient, unless the request has the key of another session.",
    )
    admin_key: str | None = Field(
        default=None,
        min_length=1,
        repr=False,
        description="Key required to create, list and delete sessions and to change the servers; "
        "None requires no key.",
    )


class SessionStore:
    """Sessions by name and by key digest; idle ones are deleted when looked up, and by `expire`."""

    def __init__(
        self,
        settings: ProxySettings,
        clock: Callable[[], float],
        open_backend: Callable[[SessionCreateRequest], ManagedServer | DummyManagedServer],
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._open_backend = open_backend
        self._by_uuid: dict[str, SessionState] = {}
        self._by_digest: dict[bytes, SessionState] = {}

    def __len__(self) -> int:
        return len(self._by_uuid)

    def __iter__(self) -> Iterator[SessionState]:
        self.expire()
        return iter(list(self._by_uuid.values()))

    @property
    def sessions_per_server(self) -> Counter[int]:
        """Open sessions per `id` of the server they use now."""
        opened = [p for s in self._by_uuid.values() for p in (s, *s.parts.values())]
        servers: list[Any] = [session.managed_server.server for session in opened]
        return Counter(id(server.current) for server in servers)

    def _check_room(self, *, is_part: bool) -> None:
        self.expire()
        num_parts = sum(len(session.parts) for session in self._by_uuid.values())
        num_open = len(self._by_uuid) + num_parts
        most = self._settings.max_sessions
        if num_open >= most or (is_part and num_parts >= most - most // _SHARE_WITHOUT_PARTS):
            raise ProxyRefusal(
                f"{num_open} sessions are open, which is the maximum; delete some, "
                "or wait until idle ones expire",
                status=429,
                kind="rate_limit_error",
                code="too_many_sessions",
                retry_after_s=_RETRY_S,
            )

    def add(self, request: SessionCreateRequest, *, model_name: str) -> SessionState:
        """Open a session under a new name and key; raises 429 if too many are open."""
        session = self._new(request, model_name=model_name)
        self._by_uuid[session.uuid] = session
        self._by_digest[_digest(session.api_key)] = session
        return session

    def part(self, session: SessionState, part_id: str, *, opens: bool) -> SessionState:
        """Return a part of a session by its id, and update its last use.

        A part records its own sequences. With `opens`, an unknown part is opened; it ends with the
        session. The id of the session itself returns the session.

        Raises:
            ProxyRefusal: 404 for an unknown part, 429 if too many sessions are open, 400 for an id
                that is too long.
        """
        if part_id == session.uuid:
            return session
        part = session.parts.get(part_id)
        if part is None:
            if len(part_id) > _LONGEST_PART_ID:
                raise bad_request(
                    f"{SESSION_HEADER} has {len(part_id)} characters, at most "
                    f"{_LONGEST_PART_ID} are allowed"
                )
            if not opens:
                raise session_not_found()
            part = self._new(session.wanted, model_name=session.model_name, is_part=True)
            part.log, part.sampling, part.span = session.log, session.sampling, session.span
            part.bodies = session.bodies
            session.parts[part_id] = part
        part.last_accessed = self._clock()
        return part

    def delete_part(self, session: SessionState, part_id: str) -> None:
        """Delete a part of a session and cancel its requests; raises 404 for an unknown one."""
        self.part(session, part_id, opens=False)
        session.parts.pop(part_id).close()

    def _new(
        self, request: SessionCreateRequest, *, model_name: str, is_part: bool = False
    ) -> SessionState:
        self._check_room(is_part=is_part)
        managed_server = self._open_backend(request)
        now = self._clock()
        return SessionState(
            uuid=str(uuid.uuid4()),
            api_key=KEY_PREFIX + secrets.token_urlsafe(32),
            managed_server=managed_server,
            model_name=model_name,
            tool_parser=request.tool_parser,
            base_url=address_of(managed_server.server),
            max_choices=self._settings.max_choices,
            max_sequence_tokens=self._settings.max_sequence_tokens,
            created_at=now,
            last_accessed=now,
            clock=self._clock,
            wanted=request,
            bodies=HeldBodies(_BODIES_PER_SESSION * self._settings.max_body_bytes),
        )

    def find(self, name: str) -> SessionState:
        """Return the session of a name and update its last use; raises 404 if it is not open."""
        session = self._by_uuid.get(name)
        if session is None or self._end_if_idle(session):
            raise session_not_found()
        session.last_accessed = self._clock()
        return session

    def of_key(self, key: str) -> SessionState | None:
        """Return the open session of a key and update its last use; None if unknown."""
        session = self._by_digest.get(_digest(key))
        if session is None or self._end_if_idle(session):
            return None
        session.last_accessed = self._clock()
        return session

    def delete(self, session: SessionState) -> None:
        self._by_uuid.pop(session.uuid, None)
        self._by_digest.pop(_digest(session.api_key), None)
        session.close()

    def expire(self) -> int:
        return sum(self._end_if_idle(session) for session in list(self._by_uuid.values()))

    def close(self) -> None:
        for session in list(self._by_uuid.values()):
            self.delete(session)

    def _end_if_idle(self, session: SessionState) -> bool:
        idle_s = self._clock() - session.last_used
        if session.num_in_flight or idle_s < self._settings.session_idle_s:
            return False
        self.delete(session)
        return True


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def config_of(entry: ServerEntry, *, model_name: str, tokenizer_name: str) -> APIServerConfig:
    """Return the config of a server in a setup request."""
    return APIServerConfig(
        **entry.model_dump(), model_name=model_name, tokenizer_name=tokenizer_name
    )


class ProxyState:
    """State shared by the routes: inference servers, their model, and the sessions."""

    def __init__(
        self,
        server_manager: HasServers,
        tokenizer: Any,
        model_name: str,
        settings: ProxySettings,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._server_manager = server_manager
        self._tokenizer = tokenizer
        self._replaced: list[Any] = []
        self.model_name = model_name
        self.settings = settings
        self.sessions = SessionStore(settings, clock, self._open_backend)

    @property
    def servers(self) -> list[Any]:
        return self._server_manager.servers

    def open_session(self, request: SessionCreateRequest) -> SessionState:
        """Open a session at the requested server, or at the least loaded one.

        Raises:
            ProxyRefusal: 429 if too many are open, 404 for an unknown URL, 503 without servers.
        """
        return self.sessions.add(request, model_name=self.model_name)

    def _open_backend(self, request: SessionCreateRequest) -> ManagedServer | DummyManagedServer:
        """Return a managed server for a new session.

        Without token ids and a tokenizer, or if ATROPOS_ALLOW_DUMMY_MANAGED_SERVER is set, the
        session has placeholder tokens. A session that requested a server stays there; others move
        to a server of the same class and model if theirs is down.
        """
        server = choose_server(self.servers, request.base_url, self.sessions.sessions_per_server)
        others = [
            other
            for other in self.servers
            if request.base_url is None
            and type(other) is type(server)
            and other.config.model_name == server.config.model_name
        ]
        sampled = SampledServer(server, others, wait_s=self.settings.upstream_wait_s)
        try:
            return open_session(
                sampled,
                self._tokenizer,
                tool_parser=request.tool_parser,
                # Read at every request; the manager of a standalone proxy lacks the attribute.
                policy_version=lambda: getattr(self._server_manager, "policy_version", None),
                track_tree=request.track_tree,
            )
        except NoTokenIdsError:
            return DummyManagedServer(sampled, track_tree=request.track_tree)

    async def set_up(self, request: SetupRequest) -> None:
        """Replace the servers, and the model and tokenizer if they are given.

        Open sessions keep their servers, which are closed with the proxy.

        Raises:
            ProxyRefusal: 400 when the tokenizer cannot be loaded, 422 for a wrong server.
        """
        model_name = request.model_name or self.model_name
        name = request.tokenizer_name or "none"
        configs = [
            config_of(entry, model_name=model_name, tokenizer_name=name)
            for entry in request.servers
        ]
        if request.tokenizer_name or (request.model_name not in (None, self.model_name)):
            self._tokenizer = await _load(model_name, name)
        self.model_name = model_name
        if configs:
            self._replaced += self.servers
            self._server_manager.servers = [
                make_server(config, APIServer, None)  # type: ignore[type-abstract]  # by type
                for config in configs
            ]

    async def close(self) -> None:
        """End every session, and the servers that were replaced."""
        self.sessions.close()
        for server in self._replaced:
            await server.close()
        self._replaced.clear()


async def _load(model_name: str, tokenizer_name: str) -> Any:
    config = APIServerConfig(model_name=model_name, tokenizer_name=tokenizer_name)
    try:
        return await asyncio.to_thread(load_tokenizer, config)
    except (OSError, ValueError) as error:
        raise bad_request(
            f"the tokenizer cannot be loaded: {error}", param="tokenizer_name"
        ) from error
