"""Manage the inference servers of an environment: discovery, routing, splitting, sessions.

    configs, or a baseline ─► find_configs (list, Slurm job, local ports) ─► make_server ─► servers

    new request       ─► least_loaded
    chat with replies ─► ConversationMemory ─► the server that holds its prefix in cache
    tracked session   ─► SessionServer      ─► the same server while it is up and not overloaded

    request ─► wait for a healthy server with a free slot ─► its pipeline
                    └◄────── the server went down ──────────────┘

A request for more than `max_n_completions` completions is split, and the answers are merged.
Tracked sessions are opened at one of the servers, or at a managed-server proxy. A conversation is
recognized by its prefix: the messages of an earlier request and the reply to it.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import subprocess
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from atroposlib.envs.server_handling.chat_rendering import as_mapping
from atroposlib.envs.server_handling.config import LOCAL_API_KEY, ServerManagerConfig
from atroposlib.envs.server_handling.managed_server import (
    DummyManagedServer,
    ManagedServer,
    SessionServer,
    present_server,
)
from atroposlib.envs.server_handling.openai_compatible import append_choices
from atroposlib.envs.server_handling.openai_server import OpenAIServer
from atroposlib.envs.server_handling.proxy_client import ProxyManagedServer, create_proxy_session
from atroposlib.envs.server_handling.retry import ServerDownError, describe
from atroposlib.envs.server_handling.server_baseline import (
    ROUTE_COST_S,
    SEND_COST_S,
    APIServer,
    APIServerConfig,
    AsyncSemWithAdaptiveWeight,
    OpenaiConfig,
    ReasoningConfig,
    ServerBaseline,
    TokensAndLogprobs,
    failing_over,
    join_answers,
    note_sampled,
    oldest_of_runs,
    runs_of_spans,
    spans_in,
)
from atroposlib.envs.server_handling.server_harness import ServerHarness
from atroposlib.envs.server_handling.sglang_server import SGLangServer
from atroposlib.envs.server_handling.trl_vllm_server import TrlVllmServer
from atroposlib.envs.server_handling.vllm_server import VLLMServer
from atroposlib.errors import ConfigError, EngineSetupError, NoTokenIdsError
from atroposlib.utils.aio import LoopTurns, all_results, refuse_cancelled
from atroposlib.utils.text import without_secrets

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion
    from openai.types.completion import Completion

__all__ = [
    "APIServer",
    "APIServerConfig",
    "DummyManagedServer",
    "EngineWatch",
    "ManagedServer",
    "OpenAIServer",
    "OpenaiConfig",
    "ReasoningConfig",
    "SGLangServer",
    "ServerBaseline",
    "ServerHarness",
    "ServerManager",
    "ServerManagerConfig",
    "TrlVllmServer",
    "VLLMServer",
]

logger = logging.getLogger(__name__)

OVERLOAD_RATIO = 2.0
OVERLOAD_MARGIN = 16
"""A server is overloaded if it has more requests in flight than `OVERLOAD_RATIO` times those of
the least loaded server plus this margin. Below that, prefilling the conversation on another server
costs more than waiting."""

MAX_CONVERSATIONS = 32_768


class HasSlots(Protocol):
    """Attributes of a server that routing reads.

    Of a semaphore it reads only the published names `_value`, `max_val` and `min_val()`, and
    `least_loaded` only `_value`: tests and proxies may pass servers with semaphores of their own.
    """

    server_healthy: bool
    sem: AsyncSemWithAdaptiveWeight
    eval_sem: AsyncSemWithAdaptiveWeight


AnyServer = TypeVar("AnyServer", bound=HasSlots)


def free_slots(server: HasSlots, *, is_training: bool) -> float:
    """Return how many requests of a split may start at a healthy server now.

    While evaluation runs, training reserves the slots that evaluation could still use.
    """
    eval_sem, sem = server.eval_sem, server.sem
    eval_free = max(0.0, eval_sem._value - eval_sem.min_val())
    if not is_training:
        return eval_free
    reserved = eval_free if eval_sem._value != eval_sem.max_val else 0.0
    return max(0.0, sem._value - sem.min_val() - reserved)


def least_loaded(
    servers: Sequence[AnyServer],
    *,
    is_training: bool = True,
    open_sessions: Mapping[int, int] | None = None,
) -> AnyServer:
    """Return the healthy server with most unused slots of a split; the first if none is healthy.

    Args:
        servers: At least one.
        is_training: Whether training slots count, rather than evaluation slots.
        open_sessions: Sessions per `id(server)`, which break ties between equally loaded servers:
            sessions that are opened together are distributed before their first request.
    """
    sessions = open_sessions or {}
    healthy = [server for server in servers if server.server_healthy]
    if not healthy:
        return servers[0]
    return max(
        healthy,
        key=lambda server: (
            (server.sem if is_training else server.eval_sem)._value,
            -sessions.get(id(server), 0),
        ),
    )


def parts_of(n: int, *, largest: int) -> list[int]:
    """Split `n` completions into requests of at most `largest`: 20 by 8 gives [8, 8, 4]."""
    full, rest = divmod(n, largest)
    return [largest] * full + ([rest] if rest else [])


def is_overloaded(
    server: HasSlots, servers: Sequence[HasSlots], *, is_training: bool = True
) -> bool:
    """Whether a conversation should leave `server` for a less loaded one of `servers`."""

    def in_flight(one: HasSlots) -> int:
        sem = one.sem if is_training else one.eval_sem
        return sem.max_val - sem._value

    least = min((in_flight(other) for other in servers if other.server_healthy), default=0)
    return in_flight(server) > OVERLOAD_RATIO * least + OVERLOAD_MARGIN


class ConversationMemory:
    """Remembers which server answered the most recent conversations, by server index.

    A request without an assistant message is a new conversation: the rollouts of one item start
    with the same messages and should spread over the servers.
    """

    def __init__(self, max_conversations: int = MAX_CONVERSATIONS) -> None:
        self._max = max_conversations
        self._server_of: OrderedDict[int, int] = OrderedDict()

    def find(self, messages: Sequence[Mapping[str, Any]]) -> int | None:
        """Return the server that answered the longest known beginning of a chat."""
        keys = _prefix_keys(messages)
        for i in range(len(messages) - 1, 0, -1):
            if messages[i].get("role") != "assistant":
                continue
            for key in (keys[i], keys[i - 1]):  # the second, since callers may change the reply
                if key in self._server_of:
                    return self._server_of[key]
        return None

    def remember(
        self, messages: Sequence[Mapping[str, Any]], replies: Sequence[str | None], server: int
    ) -> None:
        beginning = _prefix_keys(messages)[-1] if messages else 0
        ends = [_key(beginning, {"role": "assistant", "content": reply}) for reply in replies]
        for key in (beginning, *ends):
            self._server_of[key] = server
            self._server_of.move_to_end(key)
        while len(self._server_of) > self._max:
            self._server_of.popitem(last=False)


def _prefix_keys(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return [M] one key per message, for the messages up to and including it."""
    keys, key = [], 0
    for message in messages:
        key = _key(key, message)
        keys.append(key)
    return keys


def _key(before: int, message: Mapping[str, Any]) -> int:
    # A collision only costs time: the conversation is sent to a server without its prefix.
    content = message.get("content")
    text = content if isinstance(content, str) else repr(content)
    return hash((before, message.get("role"), text))


LOCAL_URLS = tuple(f"http://localhost:{port}/v1" for port in range(9004, 9008))
"""URLs that a baseline uses outside a cluster job."""

FIRST_SLURM_PORT = 9000
GPUS_PER_NODE = 8

HostLister = Callable[[str], Sequence[str]]

_ENGINES: Mapping[str, type[APIServer]] = {
    "openai": OpenAIServer,
    "vllm": VLLMServer,
    "sglang": SGLangServer,
    "trl": TrlVllmServer,
}

_DUMMY_SWITCH = "ATROPOS_ALLOW_DUMMY_MANAGED_SERVER"
_PROXY_KEY = "ATROPOS_PROXY_KEY"  # pragma: allowlist secret


def slurm_hosts(nodelist: str) -> list[str]:
    """Return the host names of a Slurm node list, asking `scontrol`."""
    command = ["scontrol", "show", "hostnames", nodelist]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ConfigError(
            f"SLURM_JOB_NODELIST is {nodelist!r} but its hosts cannot be listed: {error}"
        ) from error
    return [line.strip() for line in listing.stdout.splitlines() if line.strip()]


def slurm_urls(hosts: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the URL of every inference server of a job.

    The first NUM_TRAINING_NODES hosts train; each other host runs one server per INFER_TP of its
    GPUS_PER_NODE GPUs.

    Raises:
        ConfigError: a variable is missing or not a number in its range, or no server is left.
    """
    num_training_nodes = _integer(environ, "NUM_TRAINING_NODES", default=None)
    tensor_parallel = _integer(environ, "INFER_TP", default=1)
    gpus = _integer(environ, "GPUS_PER_NODE", default=GPUS_PER_NODE)
    for name, number in (("INFER_TP", tensor_parallel), ("GPUS_PER_NODE", gpus)):
        if number < 1:
            raise ConfigError(f"{name} is {number}; expected at least 1")
    if not 0 <= num_training_nodes < len(hosts):
        raise ConfigError(
            f"NUM_TRAINING_NODES is {num_training_nodes} of {len(hosts)} nodes; expected 0 to "
            f"{len(hosts) - 1}, so that a node is left for inference"
        )
    if tensor_parallel > gpus:
        raise ConfigError(
            f"INFER_TP is {tensor_parallel}, more than the {gpus} GPUs of a node (GPUS_PER_NODE)"
        )
    ports = range(FIRST_SLURM_PORT, FIRST_SLURM_PORT + gpus // tensor_parallel)
    return [f"http://{host}:{port}/v1" for host in hosts[num_training_nodes:] for port in ports]


def configs_from_baseline(
    baseline: ServerBaseline,
    environ: Mapping[str, str],
    list_hosts: HostLister = slurm_hosts,
) -> list[APIServerConfig]:
    """Return one config per discovered server, with the baseline's settings.

    Uses the servers of a Slurm job with two or more nodes, otherwise `LOCAL_URLS`.
    """
    nodelist = environ.get("SLURM_JOB_NODELIST")
    hosts = list_hosts(nodelist) if nodelist else []
    urls = slurm_urls(hosts, environ) if len(hosts) >= 2 else LOCAL_URLS
    settings = {name: getattr(baseline, name) for name in ServerBaseline.model_fields}
    return [APIServerConfig(**settings, api_key=LOCAL_API_KEY, base_url=url) for url in urls]


def configs_on_slurm(
    configs: Sequence[APIServerConfig],
    environ: Mapping[str, str],
    list_hosts: HostLister = slurm_hosts,
) -> list[APIServerConfig]:
    """Return one copy of the first config per server of the Slurm job.

    Outside a job, or on one node, the configs are used unchanged.
    """
    nodelist = environ.get("SLURM_JOB_NODELIST")
    if not nodelist:
        logger.warning("slurm is on but SLURM_JOB_NODELIST is not set; using servers as configured")
        return list(configs)
    hosts = list_hosts(nodelist)
    if len(hosts) < 2:
        logger.info("the Slurm job has one node; using servers as configured")
        return list(configs)
    return [
        configs[0].model_copy(update={"base_url": url}, deep=True)
        for url in slurm_urls(hosts, environ)
    ]


def _integer(environ: Mapping[str, str], name: str, *, default: int | None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        raise ConfigError(f"{name} is not set; a Slurm job needs it to find its inference nodes")
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"{name} is {text!r}; expected an integer") from error


def find_configs(
    configs: ServerBaseline | Sequence[APIServerConfig], *, slurm: bool
) -> list[APIServerConfig]:
    """Return one config per server, as listed or as discovered in the cluster job."""
    if isinstance(configs, APIServerConfig):
        configs = [configs]
    if isinstance(configs, ServerBaseline):
        return configs_from_baseline(configs, os.environ)
    if not configs:
        raise ConfigError("no inference server is configured; give at least one server config")
    return configs_on_slurm(configs, os.environ) if slurm else list(configs)


def make_server(
    config: APIServerConfig,
    server_class: type[APIServer],
    reasoning_config: ReasoningConfig | None,
) -> APIServer:
    """Build the server of one config; if the class is abstract, `server_type` selects it."""
    if inspect.isabstract(server_class):
        if config.server_type not in _ENGINES:
            raise ConfigError(
                f"server_type {config.server_type!r} is not supported by this version; "
                f"expected one of {', '.join(_ENGINES)}"
            )
        server_class = _ENGINES[config.server_type]
    return server_class(config, reasoning_config=reasoning_config)


def open_session(
    server: Any,
    tokenizer: Any,
    *,
    tool_parser: str | None,
    policy_version: Callable[[], int | None],
    track_tree: bool = False,
) -> ManagedServer | DummyManagedServer:
    """Return a session that records the tokens of its requests, exactly if the server allows.

    Raises:
        NoTokenIdsError: the server gives no token ids, and there is no tokenizer for its texts.
    """
    has_no_ids = isinstance(present_server(server), OpenAIServer)
    if has_no_ids and os.environ.get(_DUMMY_SWITCH, "").lower() in ("1", "true", "yes"):
        logger.warning(
            "server_type openai with %s: tracked sequences hold placeholder tokens, which exports "
            "and trainers refuse; without the variable texts are tokenized",
            _DUMMY_SWITCH,
        )
        return DummyManagedServer(server, tokenizer, track_tree)
    session = ManagedServer(
        server,
        tokenizer,
        track_tree,
        tool_parser,
        policy_version=policy_version,
    )
    if has_no_ids and session.tokenizer is None:
        raise NoTokenIdsError(
            "a server of type openai gives no token ids, and no tokenizer is known to encode its "
            "texts; pass one to managed_server (--env.tokenizer_name), use a vLLM engine with "
            f"server_type vllm, or set {_DUMMY_SWITCH}=1 to get placeholder tokens"
        )
    return session


class Answered(NamedTuple):
    """An answer and its server."""

    server: Any
    answer: Any


def merge_choices(parts: Sequence[Answered]) -> Any:
    """Return one chat or completion with the choices of all parts, numbered from 0."""
    if len(parts) == 1:
        return parts[0].answer
    return append_choices(parts[0].answer, [part.answer for part in parts[1:]])


class ServerManager:
    """The inference servers of one environment.

    Args:
        configs: One config per server, a single config, or a bare `ServerBaseline` to discover
            servers (see `configs_from_baseline`).
        server_class: Class of every server; if abstract, each config's `server_type` selects it.
            A bool is interpreted as `slurm`, as in version 0.1.
        slurm: Whether to use the servers on the nodes of the Slurm job instead of the listed ones.
        testing: Whether to use one `ServerHarness` instead of servers.
        max_n_completions: Larger `n` is split into several requests.
        reasoning_config: Reasoning options added to every chat.
        proxy_url: URL of a managed-server proxy; default: ATROPOS_PROXY_URL.
        use_proxy: Whether tracked sessions are opened at the proxy; always with a known URL.
        tool_parser: Name of the tool-call format of tracked sessions.

    Attributes:
        servers: The servers, in the order of `configs`.
        slot_poll_s: Seconds between checks for a free slot.
        policy_version: Policy version the service last reported, or None; used for engines that
            do not name their weights.
    """

    # Defaults in the class: some users create managers without `__init__` and assign `servers`.
    slot_poll_s = 0.1
    max_n_completions = 8
    proxy_url: str | None = None
    use_proxy = False
    tool_parser: str | None = None
    reasoning_config: ReasoningConfig | None = None
    policy_version: int | None = None
    _setup_error: EngineSetupError | None = None

    def __init__(
        self,
        configs: ServerBaseline | Sequence[APIServerConfig],
        server_class: type[APIServer] | bool = APIServer,
        slurm: bool = False,
        testing: bool = False,
        max_n_completions: int = 8,
        reasoning_config: ReasoningConfig | None = None,
        proxy_url: str | None = None,
        use_proxy: bool = False,
        tool_parser: str | None = None,
    ) -> None:
        if isinstance(server_class, bool):
            # The arguments of 0.1.0: configs, slurm, testing.
            slurm, testing = server_class, testing or slurm
            server_class = APIServer
        self.max_n_completions = max_n_completions
        self.reasoning_config = reasoning_config
        self.proxy_url = proxy_url or os.environ.get("ATROPOS_PROXY_URL") or None
        self.use_proxy = use_proxy or self.proxy_url is not None
        self.tool_parser = tool_parser
        self.servers: list[Any] = (
            [ServerHarness()]
            if testing
            else [
                make_server(config, server_class, reasoning_config)
                for config in find_configs(configs, slurm=slurm)
            ]
        )
        for server in self.servers:
            if isinstance(server, APIServer):
                server.share_turns(self._turns)

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        """Return the answer to a chat; see `APIServer`.

        A continued conversation returns to the server that answered it before, unless that server
        is down or overloaded; any other goes to the least loaded server.
        """
        servers = self.servers  # users may assign other servers while the request runs
        memory = self._conversations if len(servers) > 1 else None
        known = None
        if memory is not None:
            messages = [as_mapping(message) for message in kwargs.get("messages") or ()]
            known = memory.find(messages)
        parts: list[Answered] = await self._split(
            lambda s: s.chat_completion,
            kwargs,
            preferred=None if known is None or known >= len(servers) else servers[known],
        )
        if memory is not None:
            for part in parts:
                replies = [choice.message.content for choice in part.answer.choices]
                if part.server in servers:
                    memory.remember(messages, replies, servers.index(part.server))
        return merge_choices(parts)  # type: ignore[no-any-return]

    async def completion(self, **kwargs: Any) -> Completion:
        parts = await self._split(lambda s: s.completion, kwargs)
        return merge_choices(parts)  # type: ignore[no-any-return]

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> TokensAndLogprobs:
        reported = self.policy_version
        parts = await self._split(lambda s: s.tokens_and_logprobs_completion, kwargs)
        answer = join_answers([part.answer for part in parts])
        for spans in spans_in(answer):
            note_sampled(oldest_of_runs(runs_of_spans(spans, reported), reported))
        return answer

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        rows: dict[str, Any] = (await self._route(lambda s: s.get_logprobs, kwargs)).answer
        return rows

    def expect_tokenizer(self, tokenizer: Any, *, name: str, is_for_all: bool = False) -> None:
        """Compare every engine's ids with a tokenizer's at the first request; see `APIServer`.

        If the servers run different models, only token requests are checked.
        """
        servers = [server for server in self.servers if isinstance(server, APIServer)]
        is_one_model = len({server.config.model_name for server in servers}) == 1
        for server in servers:
            server.expect_tokenizer(tokenizer, name=name, is_for_all=is_for_all and is_one_model)

    @property
    def num_answered(self) -> int:
        return sum(s.num_answered for s in self.servers if isinstance(s, APIServer))

    def failures_text(self) -> str:
        """Return the number of failed requests and the latest error; empty without failures."""
        servers = [server for server in self.servers if isinstance(server, APIServer)]
        count = sum(server.num_failed for server in servers)
        if not count:
            return ""
        latest = next(s.last_failure for s in servers if s.last_failure is not None)
        return f"{count} were made and failed, the latest with: {describe(latest)}"

    @property
    def setup_error(self) -> EngineSetupError | None:
        """Setup error that has prevented every answer so far, or None."""
        if self.num_answered:
            return None
        errors = [s.setup_error for s in self.servers if isinstance(s, APIServer)]
        return self._setup_error or next((error for error in errors if error is not None), None)

    async def update_weight(self, weight: float) -> None:
        for server in self.servers:
            await server.update_weight(weight)

    async def close(self) -> None:
        for server in self.servers:
            await server.close()

    async def wait_for_sem(self, is_training: bool) -> None:
        """Wait until a healthy server has a free slot of the split; cancelling is safe.

        Raises:
            EngineSetupError: no server answered within its startup timeout.
        """
        started = time.monotonic()
        while not self._servers_with_slots(is_training):
            waited_s = time.monotonic() - started
            if all(_is_timed_out(server, waited_s=waited_s) for server in self.servers):
                addresses = ", ".join(server.health.name for server in self.servers)
                self._setup_error = EngineSetupError(
                    f"none of the inference servers has answered within {waited_s:.0f} seconds: "
                    f"{addresses}; start them, or set base_url of each to its address "
                    "(--openai.base_url); servers that take longer to start need a larger "
                    "startup_timeout (--openai.startup_timeout)"
                )
                raise self._setup_error
            await asyncio.sleep(self.slot_poll_s)

    def _servers_with_slots(self, is_training: bool) -> list[Any]:
        return [
            server
            for server in self.servers
            if server.server_healthy and free_slots(server, is_training=is_training) > 0
        ]

    @asynccontextmanager
    async def dedicated_server(self) -> AsyncIterator[Any]:
        """Yield the least loaded server while holding one of its slots.

        Requests on the yielded server use the held slot first, so the caller cannot deadlock.
        """
        server = least_loaded(self.servers)
        async with server.sem:
            yield server.with_own_slot() if isinstance(server, APIServer) else server

    @asynccontextmanager
    async def managed_server(
        self,
        tokenizer: Any = None,
        base_url: str | None = None,
        preserve_think_blocks: bool = False,
    ) -> AsyncIterator[ManagedServer | DummyManagedServer | ProxyManagedServer]:
        """Yield a session at one server that records the exact tokens of its requests.

        Args:
            tokenizer: Renders chats and decodes completions; default: the server's own.
            base_url: Use the server with this URL instead of the least loaded one.
            preserve_think_blocks: Ignored; thinking is always preserved.

        Raises:
            RuntimeError: the configured managed-server proxy refused the session.
            NoTokenIdsError: the server gives no token ids, and dummy tokens are not allowed
                by the environment variable ATROPOS_ALLOW_DUMMY_MANAGED_SERVER.
        """
        if self.use_proxy:
            if self.proxy_url is None:
                raise ConfigError(
                    "use_proxy is set but no proxy is known; set proxy_url or ATROPOS_PROXY_URL"
                )
            async with await create_proxy_session(
                self.proxy_url,
                base_url,
                tool_parser=self.tool_parser or "hermes",
                model_name=self.servers[0].config.model_name if self.servers else "unknown",
                admin_key=os.environ.get(_PROXY_KEY),
            ) as remote_session:
                yield remote_session
            return
        await self._turns.turn(SEND_COST_S)
        if base_url is not None:
            server = self._server_at(base_url)
        else:
            server = least_loaded(self.servers, open_sessions=self._num_sessions)
            if len(self.servers) > 1:
                server = SessionServer(server, self._choose_for_session, self._count_move)
        session = open_session(
            server,
            tokenizer,
            tool_parser=self.tool_parser,
            policy_version=lambda: self.policy_version,
        )
        self._num_sessions[id(present_server(server))] += 1
        try:
            yield session
        finally:
            self._num_sessions[id(present_server(server))] -= 1
            session.reset()

    def _server_at(self, base_url: str) -> Any:
        known = {(server.config.base_url or "").rstrip("/"): server for server in self.servers}
        if base_url.rstrip("/") not in known:
            raise ConfigError(
                f"no server at {without_secrets(base_url)}; there are: "
                f"{', '.join(map(without_secrets, known))}"
            )
        return known[base_url.rstrip("/")]

    def _get_server_base_url(self, server_idx: int = 0) -> str | None:
        if server_idx >= len(self.servers):
            return None
        url: str | None = self.servers[server_idx].config.base_url
        return url

    async def _split(
        self,
        method_of: Callable[[Any], Callable[..., Any]],
        kwargs: dict[str, Any],
        *,
        preferred: Any = None,
    ) -> list[Answered]:
        """Route a request, split into parts of at most `max_n_completions` completions."""
        n = kwargs.get("n") or 1
        if n <= self.max_n_completions:
            return [await self._route(method_of, kwargs, preferred=preferred)]
        requests = [{**kwargs, "n": k} for k in parts_of(n, largest=self.max_n_completions)]
        if kwargs.get("seed") is not None:
            # Engines sample completion i of a request with seed + i: one seed would repeat them.
            for i, request in enumerate(requests):
                request["seed"] += i * self.max_n_completions
        parts = (self._route(method_of, request, preferred=preferred) for request in requests)
        return await all_results(parts)

    async def _route(
        self,
        method_of: Callable[[Any], Callable[..., Any]],
        kwargs: dict[str, Any],
        *,
        preferred: Any = None,
    ) -> Answered:
        """Send a request to a server, and to another one if that server goes down."""
        is_training = kwargs.get("split", "train") == "train"
        await self._turns.turn(ROUTE_COST_S)
        while True:
            await self.wait_for_sem(is_training)
            server = self._pick(preferred, is_training)
            request = failing_over(server, kwargs) if len(self.servers) > 1 else kwargs
            try:
                return Answered(server, await method_of(server)(**request))
            except ServerDownError as error:
                logger.debug("%s; sending the request to another server", error)

    def _pick(self, preferred: Any, is_training: bool) -> Any:
        """Return the preferred server if it has a free slot and is not overloaded."""
        free = self._servers_with_slots(is_training)
        if preferred in free and not is_overloaded(preferred, free, is_training=is_training):
            return preferred
        return least_loaded(free, is_training=is_training)

    async def _choose_for_session(self, current: Any, is_training: bool) -> Any:
        """Return the server of a session's next request."""
        is_kept = current.server_healthy and not is_overloaded(
            current, self.servers, is_training=is_training
        )
        if is_kept:
            return current
        await self.wait_for_sem(is_training)
        free = self._servers_with_slots(is_training)
        return least_loaded(free, is_training=is_training, open_sessions=self._num_sessions)

    def _count_move(self, old: Any, new: Any) -> None:
        self._num_sessions[id(old)] -= 1
        self._num_sessions[id(new)] += 1

    @cached_property
    def _turns(self) -> LoopTurns:
        return LoopTurns()

    @cached_property
    def _num_sessions(self) -> Counter[int]:
        # Counts sessions without requests in flight yet, to distribute those opened together.
        return Counter()

    @cached_property
    def _conversations(self) -> ConversationMemory:
        return ConversationMemory()


def _is_timed_out(server: Any, *, waited_s: float) -> bool:
    """Whether a server has not answered within its startup timeout."""
    if not isinstance(server, APIServer) or server.server_healthy or server.health.has_answered:
        return False
    return waited_s > server.config.startup_timeout


_LONGEST_LOOK_PAUSE_S = 15.0


class EngineWatch:
    """Measures for how long no inference server has been up: since the last answer or probe.

    A server that is down holds its requests until it is back; the watch ends the wait for an engine
    that does not return.

    Args:
        servers: Servers of a `ServerManager`.
        now: Clock, monotonic seconds.

    Attributes:
        away_s: Seconds without an available server, as of the last look. 0 if that is unknown,
            because no server has answered yet or one is not probed.
    """

    def __init__(
        self, servers: Sequence[Any], *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.away_s = 0.0
        self._servers = servers
        self._now = now
        self._last_seen: float | None = None
        self._num_answered = 0

    @classmethod
    def of(cls, server: Any) -> EngineWatch:
        """Watch the servers of a `ServerManager`; any other object counts as up."""
        return cls(server.servers if isinstance(server, ServerManager) else [])

    @property
    def names(self) -> str:
        return ", ".join(server.health.name for server in self._servers)

    async def look(self) -> None:
        """Update `away_s`; probe the servers if none has answered since the last look."""
        asked_at = self._now()
        if await self._is_one_up():
            self._last_seen = asked_at
            self.away_s = 0.0
        elif self._last_seen is not None:
            self.away_s = self._now() - self._last_seen

    async def _is_one_up(self) -> bool:
        servers = [server for server in self._servers if isinstance(server, APIServer)]
        if len(servers) < len(self._servers) or not all(s.is_probed for s in servers):
            return True
        num_answered = sum(server.num_answered for server in servers)
        has_answered_since = num_answered > self._num_answered
        self._num_answered = num_answered
        if has_answered_since:
            return True
        known = [server for server in servers if server.num_answered or server.health.has_answered]
        for server in known:
            if await server.probe():
                return True
        return False

    async def wait_until_away(self, limit_s: float) -> None:
        """Wait until no server has been up for `limit_s` seconds; 0 waits without limit."""
        pause_s = limit_s / 20 if limit_s else _LONGEST_LOOK_PAUSE_S
        while True:
            await self.look()
            if 0 < limit_s <= self.away_s:
                return
            await asyncio.sleep(min(_LONGEST_LOOK_PAUSE_S, pause_s))

    async def guard(self, work: Coroutine[Any, Any, None], *, limit_s: float) -> bool:
        """Await `work`, which needs a server; cancel it once none was up for `limit_s` seconds.

        Returns:
            Whether `work` ended by itself; its exceptions are raised.

        Raises:
            RuntimeError: a cancellation inside `work` ended it, such as that of a task it awaited.
        """
        working = asyncio.create_task(work)
        watching = asyncio.create_task(self.wait_until_away(limit_s))
        try:
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                refuse_cancelled(working)
            return working.done()
        finally:
            working.cancel()
            watching.cancel()
            await asyncio.wait({working, watching})
            for task in (working, watching):
                if not task.cancelled():
                    task.result()
