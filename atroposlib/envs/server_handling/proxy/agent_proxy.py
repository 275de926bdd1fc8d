"""Run the proxy inside an environment: a URL and a key per rollout, and groups of exact tokens.

AgentProxy.session ─► AgentSession (URL, key) ─► agent ─► recorded nodes
AgentSession.trajectory(score) ─► AgentTrajectory ─► group_of_agents ─► ScoredDataGroup
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple

from atroposlib.envs.server_handling.turn_matching import SequenceNode
from atroposlib.envs.server_handling.proxy.app import app_of_state, serving
from atroposlib.envs.server_handling.proxy.requests import SessionCreateRequest
from atroposlib.envs.server_handling.proxy.sessions import (
    HasServers,
    ProxySettings,
    ProxyState,
    SessionState,
)
from atroposlib.envs.server_handling.server_baseline import FROM_TEXT, note_node
from atroposlib.scored_data import ScoredDataGroup

__all__ = [
    "AgentProxy",
    "AgentSession",
    "AgentTrajectory",
    "group_of_agents",
]


class AgentTrajectory(NamedTuple):
    """The sequences and the score of one agent's rollout."""

    nodes: list[SequenceNode]
    """Its sequences: one per conversation; sub-agents and rewritten histories add more."""
    score: float
    """The score of each of its sequences."""


def group_of_agents(trajectories: Sequence[AgentTrajectory]) -> ScoredDataGroup | None:
    """Combine the agents of one item into a group: a row per sequence, with its agent's score.

    `group_overrides` holds the number of rows if it differs from the number of agents. If any
    sequence was encoded from text, the group is marked and has no logprobs.

    Args:
        trajectories: [G] one per agent.

    Returns:
        The group, or None if an agent sampled nothing.
    """
    if not trajectories or not all(trajectory.nodes for trajectory in trajectories):
        return None
    rows = [(node, score) for nodes, score in trajectories for node in nodes]
    group: ScoredDataGroup = {
        "tokens": [node.tokens for node, _ in rows],
        "masks": [node.masked_tokens for node, _ in rows],
        "scores": [score for _, score in rows],
        "inference_logprobs": [node.logprobs for node, _ in rows],
    }
    if any((node.metadata or {}).get(FROM_TEXT) for node, _ in rows):
        group["inference_logprobs"] = None
        group["tokenized_from_text"] = True
    if len(rows) != len(trajectories):
        group["group_overrides"] = {"group_size": len(rows)}
    return group


class AgentSession:
    """Connection settings for one agent, and the sequences it sampled.

    Attributes:
        base_url: Base URL for OpenAI clients, ends in `/v1`.
        anthropic_base_url: Base URL for Anthropic clients, which add `/v1` themselves.
        api_key: Key for both; identifies the session.
        model: Model name for agents; requests with other names are answered too.
    """

    def __init__(self, root_url: str, session: SessionState) -> None:
        self._session = session
        self.base_url = f"{root_url}/v1"
        self.anthropic_base_url = root_url
        self.api_key = session.api_key
        self.model = session.model_name

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that configure the clients of a subprocess."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.anthropic_base_url,
            "ANTHROPIC_API_KEY": self.api_key,
        }

    @property
    def session_ids(self) -> list[str]:
        """The values of `X-Session-ID` that requests with this key named, oldest first."""
        return list(self._session.parts)

    def nodes(self, session_id: str | None = None) -> list[SequenceNode]:
        """Return the sequences recorded so far; empty once the session has ended.

        The policy versions of the sequences are credited to the calling rollout, since agents
        sample outside its task.

        Args:
            session_id: Return only sequences of requests with this `X-Session-ID`; None for all.
        """
        parts = self._session.parts
        session = self._session if session_id is None else parts.get(session_id)
        nodes = [] if session is None else session.nodes
        for node in nodes:
            note_node(node.tokens, node.metadata)
        return nodes

    def trajectory(self, score: float, session_id: str | None = None) -> AgentTrajectory:
        """Return the sequences recorded so far with the score of the rollout."""
        return AgentTrajectory(self.nodes(session_id), score)


class AgentProxy:
    """A proxy on a local port, for any number of rollouts; `start` and `close`, or `async with`.

    Every route requires a key: agents have that of their session; the administrator key is random
    and never disclosed.

    Args:
        server_manager: The environment's `self.server`.
        tokenizer: The environment's `self.tokenizer`; None uses the servers' own.
        model_name: Model name in answers.
        host: Address to bind; agents in containers may need a non-local one.
        port: Port to bind; 0 selects a free one.
        settings: Limits; keys are always required, whatever it says.
        clock: Seconds since the epoch, for the expiry of sessions.
    """

    def __init__(
        self,
        server_manager: HasServers,
        tokenizer: Any = None,
        *,
        model_name: str = "policy",
        host: str = "127.0.0.1",
        port: int = 0,
        settings: ProxySettings | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        keys = {"require_keys": True, "admin_key": secrets.token_urlsafe(32)}
        locked = (settings or ProxySettings()).model_copy(update=keys)
        self._state = ProxyState(server_manager, tokenizer, model_name, locked, clock)
        self._host = host
        self._port = port
        self._stack = contextlib.AsyncExitStack()
        self._root_url: str | None = None

    @property
    def root_url(self) -> str:
        """URL of the proxy; raises RuntimeError while it is not running."""
        if self._root_url is None:
            raise RuntimeError("the proxy is not running; call `start` first")
        return self._root_url

    @property
    def base_url(self) -> str:
        """Base URL for OpenAI clients; the key identifies the session."""
        return f"{self.root_url}/v1"

    async def start(self) -> None:
        """Start listening; OSError when the address cannot be bound."""
        app = app_of_state(self._state)
        port = await self._stack.enter_async_context(serving(app, host=self._host, port=self._port))
        host = f"[{self._host}]" if ":" in self._host else self._host
        self._root_url = f"http://{host}:{port}"

    async def close(self) -> None:
        """End every session and close the port; does nothing if the proxy is not running."""
        self._root_url = None
        self._state.sessions.close()
        await self._stack.aclose()

    async def __aenter__(self) -> AgentProxy:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @contextlib.asynccontextmanager
    async def session(
        self,
        *,
        tool_parser: str = "hermes",
        track_tree: bool = False,
        base_url: str | None = None,
    ) -> AsyncIterator[AgentSession]:
        """Yield a session for one rollout, and delete it at the end.

        Args:
            tool_parser: Tool-call format of the model.
            track_tree: Keep every sequence instead of replacing the one that is continued.
            base_url: Inference server to use; None chooses the least loaded one.

        Raises:
            ProxyRefusal: too many sessions are open, or the server is unknown.
        """
        wanted = SessionCreateRequest(
            tool_parser=tool_parser, track_tree=track_tree, base_url=base_url
        )
        session = self._state.open_session(wanted)
        try:
            yield AgentSession(self.root_url, session)
        finally:
            self._state.sessions.delete(session)
