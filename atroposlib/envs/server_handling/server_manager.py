"""Many inference servers behind one face: routing, splitting of large `n`, tracked sessions.

request -> wait for a healthy server with a free slot -> least loaded -> its pipeline
                    ^                                                      |
                    +------------- the server went down: again ------------+
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from atroposlib.envs.server_handling.config import ServerManagerConfig
from atroposlib.envs.server_handling.engines import find_configs, make_server
from atroposlib.envs.server_handling.loop_turns import ROUTE_COST_S, SEND_COST_S, LoopTurns
from atroposlib.envs.server_handling.managed_server import DummyManagedServer, ManagedServer
from atroposlib.envs.server_handling.merged_answers import (
    Answered,
    merge_choices,
    merge_tokens,
)
from atroposlib.envs.server_handling.openai_server import OpenAIServer
from atroposlib.envs.server_handling.proxy_client import ProxyManagedServer
from atroposlib.envs.server_handling.retry import ServerDownError, describe
from atroposlib.envs.server_handling.routing import free_slots, least_loaded, parts_of
from atroposlib.envs.server_handling.server_baseline import (
    RAISE_WHEN_DOWN,
    APIServer,
    APIServerConfig,
    OpenaiConfig,
    ReasoningConfig,
    ServerBaseline,
    TokensAndLogprobs,
)
from atroposlib.envs.server_handling.server_harness import ServerHarness
from atroposlib.envs.server_handling.session_opening import open_proxy_session, open_session
from atroposlib.envs.server_handling.session_server import OpenSessions, SessionServer
from atroposlib.envs.server_handling.sglang_server import SGLangServer
from atroposlib.envs.server_handling.stickiness import ConversationMemory, is_overloaded
from atroposlib.envs.server_handling.trl_vllm_server import TrlVllmServer
from atroposlib.envs.server_handling.vllm_server import VLLMServer
from atroposlib.errors import ConfigError, EngineSetupError
from atroposlib.utils.secret_masking import without_secrets

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion
    from openai.types.completion import Completion

__all__ = [
    "APIServer",
    "APIServerConfig",
    "DummyManagedServer",
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


class ServerManager:
    """The inference servers of one environment.

    Args:
        configs: One config per server, a single config, or a bare `ServerBaseline` to look for
            servers (see `discovery`).
        server_class: Class of every server; abstract: each config's `server_type` decides.
            A bool here is taken as `slurm`, as version 0.1 had it.
        slurm: Replace the listed servers by those on the nodes of the Slurm job.
        testing: Use one `ServerHarness` instead of servers.
        max_n_completions: Larger `n` is split into several requests.
        reasoning_config: Reasoning asked for in every chat.
        proxy_url: Address of a managed-server proxy, also from ATROPOS_PROXY_URL.
        use_proxy: Open tracked sessions at the proxy; on by itself when an address is known.
        tool_parser: Name of the tool-call format of tracked sessions.

    Attributes:
        servers: The servers, in the order of `configs`.
        slot_poll_s: Pause between looks for a free slot.
        policy_version: What the service last called the policy, None if it does not say; for
            engines that do not name their weights.
    """

    # Class-level defaults: some users build managers without `__init__` and assign `servers`.
    slot_poll_s = 0.1
    max_n_completions = 8
    proxy_url: str | None = None
    use_proxy = False
    tool_parser: str | None = None
    reasoning_config: ReasoningConfig | None = None
    policy_version: int | None = None
    _turns: LoopTurns | None = None
    _conversations: ConversationMemory | None = None
    _sessions: OpenSessions | None = None
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
            slurm = server_class
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
        self._turns = LoopTurns()
        for server in self.servers:
            if isinstance(server, APIServer):
                server.share_turns(self._turns)

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        """Return the answer to a chat; see `APIServer`.

        A conversation that goes on returns to the server that answered it before, unless that
        is down or overloaded; any other goes to the least loaded server.
        """
        messages = kwargs.get("messages") or ()
        memory = self._conversation_memory() if len(self.servers) > 1 else None
        known = memory.find(messages) if memory is not None else None
        parts: list[Answered] = await self._split(
            lambda s: s.chat_completion,
            kwargs,
            preferred=None if known is None else self.servers[known],
        )
        if memory is not None:
            for part in parts:
                replies = [choice.message.content for choice in part.answer.choices]
                memory.remember(messages, replies, self.servers.index(part.server))
        return merge_choices(parts)  # type: ignore[no-any-return]

    async def completion(self, **kwargs: Any) -> Completion:
        """Return the least loaded server's continuation of a `prompt`."""
        return merge_choices(await self._split(lambda s: s.completion, kwargs))  # type: ignore[no-any-return]

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> TokensAndLogprobs:
        """Return ids and logprobs from the least loaded server; see `APIServer`."""
        reported = self.policy_version
        parts = await self._split(lambda s: s.tokens_and_logprobs_completion, kwargs)
        return merge_tokens(parts, reported=reported)

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        """Return prompt logprobs from the least loaded server."""
        rows: dict[str, Any] = (await self._route(lambda s: s.get_logprobs, kwargs)).answer
        return rows

    def expect_tokenizer(self, tokenizer: Any, *, name: str, is_for_all: bool = False) -> None:
        """Compare every engine's ids with a tokenizer's at the first request; see `APIServer`.

        Where the servers are of different models, only requests for ids are looked at.
        """
        servers = [server for server in self.servers if isinstance(server, APIServer)]
        is_one_model = len({server.config.model_name for server in servers}) == 1
        for server in servers:
            server.expect_tokenizer(tokenizer, name=name, is_for_all=is_for_all and is_one_model)

    @property
    def num_answered(self) -> int:
        """Requests that had an answer."""
        return sum(s.num_answered for s in self.servers if isinstance(s, APIServer))

    def failures_text(self) -> str:
        """Say how many requests were given up, and why the latest was; empty without any."""
        servers = [server for server in self.servers if isinstance(server, APIServer)]
        count = sum(server.num_failed for server in servers)
        if not count:
            return ""
        latest = next(s.last_failure for s in servers if s.last_failure is not None)
        return f"{count} were made and failed, the latest with: {describe(latest)}"

    @property
    def setup_error(self) -> EngineSetupError | None:
        """Why no request has had an answer so far, where the settings are wrong; else None."""
        if self.num_answered:
            return None
        errors = [s.setup_error for s in self.servers if isinstance(s, APIServer)]
        return self._setup_error or next((error for error in errors if error is not None), None)

    async def update_weight(self, weight: float) -> None:
        """Set the share of every server's slots that may be used."""
        for server in self.servers:
            await server.update_weight(weight)

    async def close(self) -> None:
        """Close the connections of every server."""
        for server in self.servers:
            await server.close()

    async def wait_for_sem(self, is_training: bool) -> None:
        """Wait until a healthy server has a free slot of the split; cancelling is safe.

        Raises:
            EngineSetupError: no server has ever answered, for as long as each may take to start.
        """
        started = time.monotonic()
        while not self._servers_with_slots(is_training):
            waited_s = time.monotonic() - started
            if all(_is_hopeless(server, waited_s=waited_s) for server in self.servers):
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

        Requests on the yielded server use the held slot first, so one never waits for itself.
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
            base_url: Use the server with this address instead of the least loaded one.
            preserve_think_blocks: Kept for callers; thinking is preserved either way.

        Raises:
            RuntimeError: the managed-server proxy that is configured refused the session.
            NoTokenIdsError: the server gives no token ids, and dummy tokens are not allowed
                by the environment variable ATROPOS_ALLOW_DUMMY_MANAGED_SERVER.
        """
        if self.use_proxy:
            model_name = self.servers[0].config.model_name if self.servers else "unknown"
            async with await open_proxy_session(
                self.proxy_url, base_url, tool_parser=self.tool_parser, model_name=model_name
            ) as remote_session:
                yield remote_session
            return
        if self._turns is not None:
            await self._turns.turn(SEND_COST_S)
        sessions = self._open_sessions()
        if base_url is not None:
            server = self._server_at(base_url)
        else:
            server = sessions.least_busy(self.servers)
            if len(self.servers) > 1:
                server = SessionServer(server, self._choose_for_session)
        session = open_session(
            server,
            tokenizer,
            tool_parser=self.tool_parser,
            preserve_think_blocks=preserve_think_blocks,
            policy_version=lambda: self.policy_version,
        )
        with sessions.counted(server):
            try:
                yield session
            finally:
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
        """Route a request in parts of at most `max_n_completions` completions."""
        n = kwargs.get("n") or 1
        if n <= self.max_n_completions:
            return [await self._route(method_of, kwargs, preferred=preferred)]
        sizes = parts_of(n, largest=self.max_n_completions)
        parts = (self._route(method_of, {**kwargs, "n": k}, preferred=preferred) for k in sizes)
        return list(await asyncio.gather(*parts))

    async def _route(
        self,
        method_of: Callable[[Any], Callable[..., Any]],
        kwargs: dict[str, Any],
        *,
        preferred: Any = None,
    ) -> Answered:
        """Send a request to a server, and to another when that one goes down."""
        is_training = kwargs.get("split", "train") == "train"
        if self._turns is not None:
            await self._turns.turn(ROUTE_COST_S)
        while True:
            await self.wait_for_sem(is_training)
            server = self._pick(preferred, is_training)
            token = RAISE_WHEN_DOWN.set(len(self.servers) > 1)
            try:
                return Answered(server, await method_of(server)(**kwargs))
            except ServerDownError as error:
                logger.debug("%s; sending the request to another server", error)
            finally:
                RAISE_WHEN_DOWN.reset(token)

    def _pick(self, preferred: Any, is_training: bool) -> Any:
        """Return the preferred server if it has a free slot and is not overloaded."""
        free = self._servers_with_slots(is_training)
        if preferred in free and not is_overloaded(preferred, free, is_training=is_training):
            return preferred
        return least_loaded(free, is_training=is_training)

    async def _choose_for_session(self, current: Any, is_training: bool) -> Any:
        """Return the server of a session's next request, and count the session there."""
        is_kept = current.server_healthy and not is_overloaded(
            current, self.servers, is_training=is_training
        )
        if is_kept:
            return current
        await self.wait_for_sem(is_training)
        sessions = self._open_sessions()
        free = self._servers_with_slots(is_training)
        chosen = sessions.least_busy(free, is_training=is_training)
        sessions.move(current, chosen)
        return chosen

    def _open_sessions(self) -> OpenSessions:
        if self._sessions is None:
            self._sessions = OpenSessions()
        return self._sessions

    def _conversation_memory(self) -> ConversationMemory:
        if self._conversations is None:
            self._conversations = ConversationMemory()
        return self._conversations


def _is_hopeless(server: Any, *, waited_s: float) -> bool:
    """Whether a server that never answered has been down for longer than it may take to start."""
    if not isinstance(server, APIServer) or server.server_healthy or server.health.has_answered:
        return False
    return waited_s > server.config.startup_timeout
