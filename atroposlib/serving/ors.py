"""Our environments as servers of the Open Reward Standard, with the openreward package.

    POST /create ─► session ─► GET prompt or messages, tools ─► POST call ─► text, reward, finished
         split, index          session header                   a tool     ─► … ─► POST /delete

Every action of this protocol is a call of a tool. A tool of the environment is called by its name;
`submit` has the answer, and in environments of several turns without tools `message` has the next
turn. A session without requests, such as the pings of its client, is deleted after a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from fastapi import HTTPException
from openreward.environments import Environment, Server
from openreward.environments import tool as mark_tool
from openreward.environments.types import ImageBlock, Message, Split, TextBlock, ToolOutput
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from atroposlib.envs.conversation import ChatMessage
from atroposlib.envs.tools import Tool
from atroposlib.errors import ConfigError
from atroposlib.serving.sessions import (
    EpisodeHost,
    PlayedTurn,
    RefusedRequestError,
    ServedEpisode,
    explain_invalid_requests,
    text_of_messages,
)

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["create_ors_app"]

MAX_LISTED_TASKS = 10_000
"""Tasks of one answer."""
MAX_ID_CHARS = 200
ROLES = ("system", "user", "assistant")

_session_id: ContextVar[str] = ContextVar("session of the request", default="")


class SubmittedText(BaseModel):
    """A turn of the model."""

    text: str = Field(description="The whole completion of the model.")
    is_truncated: bool = Field(
        False, description="Whether a token limit ended the completion; the episode then ends."
    )


class CallArguments(BaseModel):
    """Arguments of a tool of ours, which checks them itself."""

    model_config = ConfigDict(extra="allow")


class OrsTask(Environment):  # type: ignore[misc]  # the package is untyped
    """One session; `create_ors_app` makes a subclass with the tools of an environment."""

    host: EpisodeHost
    gate: OrsSessions

    def __init__(
        self, task_spec: Mapping[str, Any] | None = None, secrets: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(task_spec or {}, {})
        self.episode: ServedEpisode | None = None
        self.gate.tasks[_session_id.get()] = self

    @classmethod
    def name(cls) -> str:
        return cls.host.name

    @classmethod
    def list_splits(cls) -> list[Split]:
        return [Split(name=name, type=name) for name in cls.host.splits()]

    @classmethod
    def list_tasks(cls, split: str) -> list[dict[str, Any]]:
        return _tasks(cls.host, split, None, None)

    @classmethod
    async def num_tasks(cls, split: str) -> int:
        return cls.host.num_tasks(split)

    @classmethod
    async def get_task(cls, split: str, index: int) -> dict[str, Any]:
        try:
            return {"split": split, "index": cls.host.index_of(split, index, None)}
        except RefusedRequestError as error:
            raise IndexError(index) from error

    @classmethod
    async def get_task_range(
        cls, split: str, start: int | None = None, stop: int | None = None
    ) -> list[dict[str, Any]]:
        return _tasks(cls.host, split, start, stop)

    async def setup(self) -> None:
        split, index = self.task_spec.get("split"), self.task_spec.get("index")
        if not isinstance(split, str) or not isinstance(index, int) or isinstance(index, bool):
            raise HTTPException(422, 'the task must be {"split": TEXT, "index": INTEGER}')
        try:
            self.episode = await self.host.start(split, index)
        except RefusedRequestError as error:
            raise HTTPException(error.status, str(error)) from error

    async def teardown(self) -> None:
        episode, self.episode = self.episode, None
        if episode is not None:
            await episode.close()

    def get_messages(self) -> Sequence[Message]:
        return [_message(message) for message in self._current().messages]

    async def write(self, args: SubmittedText) -> ToolOutput:
        played = await self._current().write(args.text, is_truncated=args.is_truncated)
        return self._output(played)

    async def call_ours(self, name: str, args: CallArguments) -> ToolOutput:
        return self._output(await self._current().call(name, args.model_extra or {}))

    def _current(self) -> ServedEpisode:
        if self.episode is None:
            raise RefusedRequestError("the session has no episode", status=409)
        return self.episode

    def _output(self, played: PlayedTurn) -> ToolOutput:
        if played.tool_result is None:
            blocks = _blocks(played.messages)
        else:
            blocks = [TextBlock(text=played.tool_result.content)]
        metadata: dict[str, Any] = {}
        if played.reward_parts:
            metadata["reward_parts"] = played.reward_parts
        if played.outcome is not None:
            metadata["outcome"] = played.outcome
        if played.tool_result is not None:
            metadata["is_error"] = played.tool_result.is_error
        if played.history is not None:
            metadata["history"] = json.loads(json.dumps(played.history, default=str))
        return ToolOutput(
            blocks=blocks, reward=played.reward, finished=played.is_done, metadata=metadata
        )


def _tasks(
    host: EpisodeHost, split: str, start: int | None, stop: int | None
) -> list[dict[str, Any]]:
    indices = range(host.num_tasks(split))[start:stop][:MAX_LISTED_TASKS]
    return [{"split": split, "index": index} for index in indices]


def _message(message: ChatMessage) -> Message:
    role = message["role"] if message["role"] in ROLES else "user"
    return Message(role=role, blocks=_blocks([message]))


def _blocks(messages: Sequence[ChatMessage]) -> list[TextBlock | ImageBlock]:
    """Return the texts of messages and the images that their data URLs contain."""
    blocks: list[TextBlock | ImageBlock] = []
    for message in messages:
        text = text_of_messages([message])
        if text:
            blocks.append(TextBlock(text=text))
        content = message.get("content")
        for part in content if isinstance(content, list | tuple) else ():
            url = str((part.get("image_url") or {}).get("url", ""))
            header, comma, data = url.partition(";base64,")
            if comma and header.startswith("data:"):
                blocks.append(ImageBlock(data=data, mimeType=header.removeprefix("data:")))
    return blocks


def _our_tool(tool: Tool) -> Callable[..., Any]:
    """Return the method that calls a tool of the environment."""
    schema = tool.definition()["function"]["parameters"]
    arguments = type(
        f"{tool.name}_arguments",
        (CallArguments,),
        {"model_json_schema": classmethod(lambda cls, *args, **options: schema)},
    )

    async def call(self: OrsTask, args: Any) -> ToolOutput:
        return await self.call_ours(tool.name, args)

    call.__annotations__ = {"args": arguments, "return": ToolOutput}
    call.__doc__ = tool.description
    return mark_tool(call)  # type: ignore[no-any-return]


def _text_tool(description: str) -> Callable[..., Any]:
    """Return the method that plays a turn with a text."""

    async def write(self: OrsTask, args: Any) -> ToolOutput:
        return await self.write(args)

    write.__annotations__ = {"args": SubmittedText, "return": ToolOutput}
    write.__doc__ = description
    return mark_tool(exclusive=True)(write)  # type: ignore[no-any-return]


def _methods(host: EpisodeHost) -> dict[str, Any]:
    reserved = [tool.name for tool in host.tools if hasattr(OrsTask, tool.name)]
    if reserved:
        raise ConfigError(
            f"{host.name}: the openreward package reserves the tool name {reserved[0]}"
        )
    methods: dict[str, Any] = {tool.name: _our_tool(tool) for tool in host.tools}
    if host.tools or host.max_turns == 1:
        name = "submit" if "submit" not in methods else "submit_answer"
        methods[name] = _text_tool("Submit the final answer, which is scored.")
    else:
        methods["message"] = _text_tool("Send the next message and read the answer.")
    return methods


def create_ors_app(host: EpisodeHost) -> ASGIApp:
    """Return the application of an environment; call it after `host.open`.

    Raises:
        ConfigError: the package reserves the name of a tool.
    """
    gate = OrsSessions(host)
    made = type("ServedOrsTask", (OrsTask,), {"host": host, "gate": gate, **_methods(host)})
    app = Server([made], return_errors="none").app
    explain_invalid_requests(app)
    gate.app = app
    host.sweeps.append(gate.delete_idle)
    return gate


class OrsSessions:
    """Limits the sessions of the server, and deletes those without requests.

    Attributes:
        app: the server.
        tasks: task of each session, by its id.
    """

    app: ASGIApp

    def __init__(self, host: EpisodeHost) -> None:
        self.tasks: dict[str, OrsTask] = {}
        self._host = host
        self._last_used: dict[str, float] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        session = Headers(scope=scope).get("x-session-id", "").strip()  # as the server reads it
        path = scope["path"].rstrip("/")
        if len(session) > MAX_ID_CHARS:
            await JSONResponse({"detail": "X-Session-ID is too long"}, 400)(scope, receive, send)
            return
        is_new = path == "/create" and session not in self._last_used
        if is_new and len(self._last_used) >= self._host.max_sessions:
            text = f"{len(self._last_used)} sessions are open, which is the limit; try later"
            await JSONResponse({"detail": text}, 503)(scope, receive, send)
            return
        if is_new:
            body = await _body_of(receive)
            if _names_toolset(body):
                text = "toolsets of the openreward package are not served; leave toolset_name out"
                await JSONResponse({"detail": text}, 400)(scope, receive, send)
                return
            receive = _replay(body, receive)
        if is_new or session in self._last_used:
            self._touch(session)
        status = 0

        async def watched(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        token = _session_id.set(session)
        try:
            await self.app(scope, receive, watched)
        finally:
            _session_id.reset(token)
            if path == "/delete" or (is_new and status != 200):
                self._last_used.pop(session, None)
                self.tasks.pop(session, None)

    def _touch(self, session: str) -> None:
        self._last_used[session] = self._host.clock()
        task = self.tasks.get(session)
        if task is not None and task.episode is not None:
            task.episode.last_used = self._host.clock()

    async def delete_idle(self) -> None:
        """Delete the sessions without a request for `idle_timeout_s`."""
        import httpx

        oldest = self._host.clock() - self._host.settings.idle_timeout_s
        idle = [session for session, used in self._last_used.items() if used < oldest]
        if not idle:
            return
        transport = httpx.ASGITransport(self)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            for session in idle:
                await client.post("/delete", headers={"X-Session-ID": session})


async def _body_of(receive: Receive) -> bytes:
    body, has_more = b"", True
    while has_more:
        message = await receive()
        body += message.get("body", b"")
        has_more = message.get("more_body", False)
    return body


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives a body again, and then what follows it."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Any:
        return waiting.pop() if waiting else await receive()

    return receive_again


def _names_toolset(body: bytes) -> bool:
    """Whether a session is to have tools of the package; some of them reach other machines."""
    try:
        created = json.loads(body)
    except (ValueError, RecursionError):
        return False  # the server refuses it
    return isinstance(created, dict) and created.get("toolset_name") is not None
