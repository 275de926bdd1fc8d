"""Our environments as servers of OpenEnv, with its own application.

    websocket /ws   reset(seed, split, index) ─► observation ─► step(action) ─► observation, reward
    POST /mcp       openenv/session/create, tools/list, tools/call: tools of the same episode
    GET /health /metadata /schema, POST /{name}/num_tasks, …

A websocket has a session of its own; its episode is closed when the client disconnects. An action
is a message of the policy, or a call of a tool; an observation has the next messages for the
policy. In environments with tools, the tools are MCP tools, which are also listed and called by
the actions `list_tools` and `call_tool`.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import fastmcp
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from fastmcp.tools import Tool as McpTool
from fastmcp.tools import ToolResult as McpResult
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import (
    CallToolObservation,
    ListToolsObservation,
)
from openenv.core.env_server.mcp_types import Tool as ToolDescription
from openenv.core.env_server.types import (
    Action,
    ConcurrencyConfig,
    EnvironmentMetadata,
    Observation,
    ServerMode,
    State,
)
from pydantic import Field, PrivateAttr

from atroposlib.envs.tools import Tool
from atroposlib.errors import ConfigError
from atroposlib.serving.sessions import (
    CLOSE_S,
    TRAIN,
    EpisodeHost,
    PlayedTurn,
    RefusedRequestError,
    ServedEpisode,
    explain_invalid_requests,
    text_of_messages,
)

__all__ = ["create_openenv_app"]

MAX_LISTED_TASKS = 10_000
"""Tasks of one answer."""
TEXT_RESULT = {
    "type": "object",
    "properties": {"result": {"type": "string"}},
    "required": ["result"],
    "x-fastmcp-wrap-result": True,
}
"""Schema of a result that is a text."""


class MessageAction(Action):  # type: ignore[misc]  # the package is untyped
    """A turn of the policy."""

    message: str = Field(description="Completion of the policy, including its thinking.")
    is_truncated: bool = Field(
        False, description="Whether a token limit ended the completion; the episode then ends."
    )


class ToolAction(Action):  # type: ignore[misc]  # the package is untyped
    """A turn of the policy: a message, or a call of one tool."""

    type: Literal["message", "call_tool", "list_tools"] = Field(
        "message", description="Kind of the action; list_tools changes nothing."
    )
    message: str = Field("", description="Completion of the policy, for a message.")
    is_truncated: bool = Field(
        False, description="Whether a token limit ended the completion; the episode then ends."
    )
    tool_name: str = Field("", description="Name of the tool, for a call.")
    arguments: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the call, by name."
    )


class EpisodeObservation(Observation):  # type: ignore[misc]  # the package is untyped
    """Next messages for the policy; `metadata` has the parts of the reward and the item."""

    messages: list[dict[str, Any]] = Field(
        default_factory=list, description="Next messages of the chat, with role and content."
    )
    text: str = Field("", description="Texts of the messages.")
    history: list[dict[str, Any]] | None = Field(
        None, description="Chat that replaces the one so far, before the messages."
    )
    outcome: str | None = Field(
        None, description="End of the episode: done, truncated or out_of_turns."
    )


class EpisodeState(State):  # type: ignore[misc]  # the package is untyped
    """Progress of an episode."""

    split: str | None = Field(None, description="Split of the item.")
    index: int | None = Field(None, description="Index of the item.")
    total_reward: float = Field(0.0, description="Sum of the rewards so far.")


class EpisodeTool(McpTool):  # type: ignore[misc]  # the package is untyped
    """An MCP tool that plays a turn with one call."""

    _call: Callable[[str, Mapping[str, Any]], Any] = PrivateAttr()

    @classmethod
    def of(cls, tool: Tool, call: Callable[[str, Mapping[str, Any]], Any]) -> EpisodeTool:
        made = cls(
            name=tool.name,
            description=tool.description,
            parameters=tool.definition()["function"]["parameters"],
            output_schema=TEXT_RESULT,
        )
        made._call = call
        return made

    async def run(self, arguments: dict[str, Any]) -> Any:
        played = await self._call(self.name, arguments)
        return McpResult(
            content=_result_text(played), structured_content={"result": _result_text(played)}
        )


def _result_text(played: PlayedTurn) -> str:
    if played.tool_result is None:
        return text_of_messages(played.messages)
    return played.tool_result.content


class _Session:
    """The episode of one session of OpenEnv's server, which makes an environment for each."""

    def __init__(self, host: EpisodeHost, loop: asyncio.AbstractEventLoop) -> None:
        self.host = host
        self.episode: ServedEpisode | None = None
        self._loop = loop
        self._is_closed = False

    async def reset(self, *, seed: int | None, split: str, index: int | None) -> EpisodeObservation:
        if self._is_closed:
            raise RefusedRequestError(
                "the session was idle and is closed; connect again", status=409
            )
        await self.end()
        self.episode = episode = await self.host.start(split, index, seed)
        messages = [dict(message) for message in episode.messages]
        return EpisodeObservation(
            messages=messages,
            text=text_of_messages(messages),
            reward=None,
            done=False,
            metadata={"split": split, "index": episode.index, "max_turns": self.host.max_turns},
        )

    def current(self) -> ServedEpisode:
        if self.episode is None:
            raise RefusedRequestError(
                "there is no episode; call reset first, on a websocket", status=409
            )
        return self.episode

    async def write(self, message: str, *, is_truncated: bool) -> EpisodeObservation:
        played = await self.current().write(message, is_truncated=is_truncated)
        return EpisodeObservation(
            messages=[dict(m) for m in played.messages],
            text=text_of_messages(played.messages),
            history=None if played.history is None else [dict(m) for m in played.history],
            outcome=played.outcome,
            **self._common(played),
        )

    async def call(self, name: str, arguments: Mapping[str, Any]) -> PlayedTurn:
        return await self.current().call(name, arguments)

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> CallToolObservation:
        played = await self.call(name, arguments)
        return CallToolObservation(
            tool_name=name, result=_result_text(played), error=None, **self._common(played)
        )

    def _common(self, played: PlayedTurn) -> dict[str, Any]:
        episode = self.current()
        metadata: dict[str, Any] = {"total_reward": episode.total_reward}
        if played.reward_parts:
            metadata["reward_parts"] = played.reward_parts
        if played.outcome is not None:
            metadata["outcome"] = played.outcome
        if played.tool_result is not None:
            metadata["is_error"] = played.tool_result.is_error
        return {"reward": played.reward, "done": played.is_done, "metadata": metadata}

    def state(self) -> EpisodeState:
        episode = self.episode
        if episode is None:
            return EpisodeState(episode_id=None, step_count=0)
        return EpisodeState(
            episode_id=episode.id,
            step_count=len(episode.rewards),
            split=episode.split,
            index=episode.index,
            total_reward=episode.total_reward,
        )

    async def end(self) -> None:
        episode, self.episode = self.episode, None
        if episode is not None:
            await episode.close()

    def close(self) -> None:
        """Close the episode; called in the event loop, or in a thread that may wait."""
        self._is_closed = True
        if self.episode is None:
            return
        try:
            is_loop = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            is_loop = False
        ending = asyncio.run_coroutine_threadsafe(self.end(), self._loop)
        if not is_loop:
            ending.result(CLOSE_S)


class _Tasks:
    """Tasks by split and index, as OpenEnv lists them; a mixin of both environments."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    _session: _Session

    def list_splits(self) -> list[dict[str, str]]:
        return [{"name": name, "type": name} for name in self._session.host.splits()]

    def num_tasks(self, split: str) -> int:
        return self._session.host.num_tasks(split)

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        return {"split": split, "index": self._session.host.index_of(split, index, None)}

    def get_task_range(
        self, split: str, start: int | None = None, stop: int | None = None
    ) -> list[dict[str, Any]]:
        indices = range(self.num_tasks(split))[start:stop][:MAX_LISTED_TASKS]
        return [{"split": split, "index": index} for index in indices]

    def list_tasks(self, split: str) -> list[dict[str, Any]]:
        return self.get_task_range(split)

    @property
    def state(self) -> EpisodeState:
        return self._session.state()

    def get_metadata(self) -> EnvironmentMetadata:
        host = self._session.host
        return EnvironmentMetadata(name=host.name, description=host.description, version=None)

    async def reset_async(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        split: str = TRAIN,
        index: int | None = None,
    ) -> EpisodeObservation:
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise RefusedRequestError("seed: expected an integer", status=422)
        if index is not None and (isinstance(index, bool) or not isinstance(index, int)):
            raise RefusedRequestError("index: expected an integer", status=422)
        if not isinstance(split, str):
            raise RefusedRequestError("split: expected a text", status=422)
        return await self._session.reset(seed=seed, split=split, index=index)

    def reset(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("the server calls reset_async")


class ServedTextEnvironment(_Tasks, Environment):  # type: ignore[misc]  # the package is untyped
    """One session of an environment without tools."""

    def __init__(self, host: EpisodeHost, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._session = _Session(host, loop)

    async def step_async(
        self, action: MessageAction, timeout_s: float | None = None
    ) -> EpisodeObservation:
        return await self._session.write(action.message, is_truncated=action.is_truncated)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("the server calls step_async")

    def close(self) -> None:
        self._session.close()


class ServedToolEnvironment(_Tasks, MCPEnvironment):  # type: ignore[misc]  # the package is untyped
    """One session of an environment whose tools are MCP tools."""

    def __init__(self, host: EpisodeHost, loop: asyncio.AbstractEventLoop) -> None:
        self._session = _Session(host, loop)
        server = fastmcp.FastMCP(host.name)
        for tool in host.tools:
            server.add_tool(EpisodeTool.of(tool, self._session.call))
        super().__init__(server)

    @property
    def supports_code_mode(self) -> bool:
        return False  # the code of a policy does not run in the server

    def execute_code(self, code: str) -> Any:
        raise NotImplementedError("code is not run here")

    async def step_async(self, action: ToolAction, timeout_s: float | None = None) -> Any:
        if action.type == "list_tools":
            tools = [
                ToolDescription(
                    name=tool.name,
                    description=tool.description,
                    input_schema=tool.definition()["function"]["parameters"],
                )
                for tool in self._session.host.tools
            ]
            return ListToolsObservation(tools=tools)
        if action.type == "call_tool":
            return await self._session.call_tool(action.tool_name, action.arguments)
        return await self._session.write(action.message, is_truncated=action.is_truncated)

    def _step_impl(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("the server calls step_async")

    def close(self) -> None:
        self._session.close()
        super().close()


def create_openenv_app(host: EpisodeHost) -> FastAPI:
    """Return OpenEnv's application for an environment; call it in the event loop that serves it.

    Raises:
        ConfigError: OpenEnv reserves the name of a tool.
    """
    made: Any = ServedToolEnvironment if host.tools else ServedTextEnvironment
    factory = functools.partial(made, host, asyncio.get_running_loop())
    try:
        factory().close()
    except ValueError as error:
        raise ConfigError(f"{host.name}: {error}") from error
    app: FastAPI = create_fastapi_app(
        factory,
        ToolAction if host.tools else MessageAction,
        EpisodeObservation,
        concurrency_config=ConcurrencyConfig(
            max_concurrent_envs=host.max_sessions, session_timeout=host.settings.idle_timeout_s
        ),
        env_name=host.name,
        state_cls=EpisodeState,
        mode=ServerMode.SIMULATION,  # not a variable of the shell
    )

    explain_invalid_requests(app)

    @app.exception_handler(RefusedRequestError)
    async def refuse(request: Request, error: RefusedRequestError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, error.status)

    return app
