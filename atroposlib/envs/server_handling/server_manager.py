"""Many inference servers behind one face: routing, splitting of large `n`, tracked sessions.

request -> wait for a healthy server with a free slot -> least loaded -> its pipeline
                    ^                                                      |
                    +------------- the server went down: again ------------+
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from atroposlib.envs.server_handling.config import ServerManagerConfig
from atroposlib.envs.server_handling.engines import find_configs, make_server
from atroposlib.envs.server_handling.loop_turns import SEND_COST_S, LoopTurns
from atroposlib.envs.server_handling.managed_server import DummyManagedServer, ManagedServer
from atroposlib.envs.server_handling.openai_compatible import append_choices
from atroposlib.envs.server_handling.openai_server import OpenAIServer
from atroposlib.envs.server_handling.proxy_client import ProxyManagedServer, create_proxy_session
from atroposlib.envs.server_handling.retry import ServerDownError
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
from atroposlib.envs.server_handling.sglang_server import SGLangServer
from atroposlib.envs.server_handling.trl_vllm_server import TrlVllmServer
from atroposlib.envs.server_handling.vllm_server import VLLMServer
from atroposlib.errors import ConfigError

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

T = TypeVar("T")

_DUMMY_SWITCH = "ATROPOS_ALLOW_DUMMY_MANAGED_SERVER"
_PROXY_KEY = "ATROPOS_PROXY_KEY"  # pragma: allowlist secret


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
    """

    # Class-level defaults: some users build managers without `__init__` and assign `servers`.
    slot_poll_s = 0.1
    max_n_completions = 8
    proxy_url: str | None = None
    use_proxy = False
    tool_parser: str | None = None
    reasoning_config: ReasoningConfig | None = None
    _turns: LoopTurns | None = None

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
        """Return the answer of the least loaded server to a chat; see `APIServer`."""
        parts: list[ChatCompletion] = await self._split(lambda s: s.chat_completion, kwargs)
        return append_choices(parts[0], parts[1:]) if len(parts) > 1 else parts[0]

    async def completion(self, **kwargs: Any) -> Completion:
        """Return the least loaded server's continuation of a `prompt`."""
        parts: list[Completion] = await self._split(lambda s: s.completion, kwargs)
        return append_choices(parts[0], parts[1:]) if len(parts) > 1 else parts[0]

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> TokensAndLogprobs:
        """Return ids and logprobs from the least loaded server; see `APIServer`."""
        parts: list[TokensAndLogprobs] = await self._split(
            lambda s: s.tokens_and_logprobs_completion, kwargs
        )
        return (
            parts[0][0],
            [ids for part in parts for ids in part[1]],
            [logprobs for part in parts for logprobs in part[2]],
            [reason for part in parts for reason in part[3]],
        )

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        """Return prompt logprobs from the least loaded server."""
        rows: dict[str, Any] = await self._route(lambda s: s.get_logprobs, kwargs)
        return rows

    async def update_weight(self, weight: float) -> None:
        """Set the share of every server's slots that may be used."""
        for server in self.servers:
            await server.update_weight(weight)

    async def close(self) -> None:
        """Close the connections of every server."""
        for server in self.servers:
            await server.close()

    async def wait_for_sem(self, is_training: bool) -> None:
        """Wait until a healthy server has a free slot of the split; cancelling is safe."""
        while not self._servers_with_slots(is_training):  # noqa: ASYNC110 - slots have no event
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
            NotImplementedError: the server gives no token ids, and dummy tokens are not allowed
                by the environment variable ATROPOS_ALLOW_DUMMY_MANAGED_SERVER.
        """
        if self.use_proxy:
            async with await self._open_proxy_session(base_url) as remote_session:
                yield remote_session
            return
        if self._turns is not None:
            await self._turns.turn(SEND_COST_S)
        open_sessions: Counter[int] = self.__dict__.setdefault("_open_sessions", Counter())
        server = self._session_server(base_url, open_sessions)
        session = self._open_session(server, tokenizer, preserve_think_blocks)
        open_sessions[id(server)] += 1
        try:
            yield session
        finally:
            open_sessions[id(server)] -= 1
            session.reset()

    async def _open_proxy_session(self, base_url: str | None) -> ProxyManagedServer:
        if self.proxy_url is None:
            raise ConfigError(
                "use_proxy is set but no proxy is known; set proxy_url or ATROPOS_PROXY_URL"
            )
        return await create_proxy_session(
            self.proxy_url,
            base_url,
            tool_parser=self.tool_parser or "hermes",
            model_name=self.servers[0].config.model_name if self.servers else "unknown",
            admin_key=os.environ.get(_PROXY_KEY),
        )

    def _session_server(self, base_url: str | None, open_sessions: Counter[int]) -> Any:
        if base_url is None:
            return least_loaded(self.servers, open_sessions=open_sessions)
        known = {(server.config.base_url or "").rstrip("/"): server for server in self.servers}
        if base_url.rstrip("/") not in known:
            raise ConfigError(f"no server at {base_url}; there are: {', '.join(known)}")
        return known[base_url.rstrip("/")]

    def _open_session(
        self, server: Any, tokenizer: Any, preserve_think_blocks: bool
    ) -> ManagedServer | DummyManagedServer:
        if not isinstance(server, OpenAIServer):
            return ManagedServer(
                server,
                tokenizer,
                tool_parser=self.tool_parser,
                preserve_think_blocks=preserve_think_blocks,
            )
        if os.environ.get(_DUMMY_SWITCH, "").lower() not in ("1", "true", "yes"):
            raise NotImplementedError(
                "a server of type openai gives no token ids, so nothing can be trained on; use "
                f"server_type vllm, or set {_DUMMY_SWITCH}=1 to get placeholder tokens"
            )
        logger.warning("server_type openai: tracked sequences hold placeholder tokens")
        return DummyManagedServer(server, tokenizer)

    def _get_server_base_url(self, server_idx: int = 0) -> str | None:
        if server_idx >= len(self.servers):
            return None
        url: str | None = self.servers[server_idx].config.base_url
        return url

    async def _split(
        self, method_of: Callable[[Any], Callable[..., Any]], kwargs: dict[str, Any]
    ) -> list[Any]:
        """Route a request in parts of at most `max_n_completions` completions."""
        n = kwargs.get("n") or 1
        if n <= self.max_n_completions:
            return [await self._route(method_of, kwargs)]
        sizes = parts_of(n, largest=self.max_n_completions)
        return list(
            await asyncio.gather(*(self._route(method_of, {**kwargs, "n": k}) for k in sizes))
        )

    async def _route(
        self, method_of: Callable[[Any], Callable[..., Any]], kwargs: dict[str, Any]
    ) -> Any:
        """Send a request to the least loaded server, and to another when that one goes down."""
        is_training = kwargs.get("split", "train") == "train"
        while True:
            await self.wait_for_sem(is_training)
            free = self._servers_with_slots(is_training)
            server = least_loaded(free, is_training=is_training)
            token = RAISE_WHEN_DOWN.set(len(self.servers) > 1)
            try:
                return await method_of(server)(**kwargs)
            except ServerDownError as error:
                logger.warning("%s; sending the request to another server", error)
            finally:
                RAISE_WHEN_DOWN.reset(token)
