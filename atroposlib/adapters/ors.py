"""Environments that a server of the Open Reward Standard serves, one session per rollout.

    open      /list_environments, /version, splits ─► number of tasks
    episode   create ─► messages, tools ─► turn ─► call ─► reward, finished ─► … ─► delete

A session is kept alive with pings and deleted however its rollout ends. If this process is killed,
its guard deletes them. The server itself removes those that had no ping for 15 minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import aiohttp
from packaging.version import InvalidVersion, Version
from pydantic import Field

from atroposlib.adapters.interface import Adapter, Item, finite_reward
from atroposlib.adapters.remote import (
    OPEN_REQUEST_S,
    HttpSession,
    RemoteArgs,
    TaskOrder,
    choose,
    numbers_of,
    read_pairs,
    repeat_until_connected,
    server_address,
    shown_value,
    split_names,
)
from atroposlib.adapters.session_guard import EndRequest, SessionGuard
from atroposlib.adapters.tool_episode import (
    ForeignTool,
    ToolEpisode,
    ToolOutcome,
    ToolQuestion,
    answer_argument,
)
from atroposlib.envs.conversation import ChatMessage, Reply, Turn
from atroposlib.errors import (
    ConfigError,
    EpisodeConnectionError,
    EpisodeFailedError,
    EpisodeRewardError,
    EpisodeTimeoutError,
)

__all__ = ["OrsAdapter", "OrsArgs", "OrsEpisode"]

SUPPORTED = (0, 1)
"""Major and minor version of the servers of the SDK that are supported."""
PING_S = 10.0
"""Interval of the messages that keep a session alive."""
DELETE_ROUTES = ("/delete", "/delete_session")
"""Routes that delete the environment of a session, and the session."""
CUT = "truncated"
CREATING_S = 8.0
"""Time limit of a session's creation that goes on after its rollout has ended."""

Result = TypeVar("Result")


class OrsArgs(RemoteArgs):
    """The choice of tasks."""

    split: str | None = Field(None, description="Split of tasks; None: train, or the first.")
    eval_split: str | None = Field(
        None, description="Split of tasks of evaluations; None: test, or the first other one."
    )
    answer_tool: str | None = Field(
        None,
        description="Tool that gets the first turn without a call as its only argument; None: the "
        "terminal tool of the environment, if it has one.",
    )
    api_key_file: Path | None = Field(
        None, description="YAML file with the line `api_key: KEY`, for hosted servers."
    )
    secrets_file: Path | None = Field(
        None, description="YAML file with secrets that the environment asks for, by name."
    )


class OrsEpisode(ToolEpisode):
    """One session of the server."""

    def __init__(self, adapter: OrsAdapter, item: Item) -> None:
        super().__init__()
        self._adapter = adapter
        self._item = item
        self._session: Any = None
        self._entering: asyncio.Future[Any] | None = None
        self._answer_tool: ForeignTool | None = None
        self._has_reward = False

    async def open_session(self) -> ToolQuestion:
        limit_s = min(self._adapter.args.reconnect_s, 0.8 * self._adapter.step_timeout_s)
        await repeat_until_connected(self._enter, limit_s=limit_s, where=self._adapter.url)
        messages = await self._ask(self._session.get_messages())
        listed = [_foreign(tool) for tool in await self._ask(self._session.list_tools())]
        terminal = await self._ask(self._session.terminal_tool())
        self._answer_tool = _answer_tool(self._adapter.args.answer_tool, listed, terminal)
        return ToolQuestion([_chat_message(message) for message in messages], listed)

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolOutcome:
        from openreward.api.errors import ToolCallError

        limit_s = self._adapter.step_timeout_s
        try:
            calling = self._ask(self._session.call_tool(name, arguments))
            output = await asyncio.wait_for(calling, limit_s)
        except (TimeoutError, asyncio.TimeoutError) as error:
            text = f"{self._adapter.url}: {name} gave no answer within {limit_s:g} s"
            raise EpisodeTimeoutError(text) from error
        except ToolCallError as error:
            is_over = error.reason == "episode_finished"
            return ToolOutcome(error.detail, is_error=True, is_done=is_over)
        # Tools name so the truncation of their output, metrics that of the episode.
        self.metrics.update({k: v for k, v in numbers_of(output.metadata).items() if k != CUT})
        is_done = output.finished is True
        return ToolOutcome(_text_of(output.blocks), reward=self._reward(output), is_done=is_done)

    async def finish(self, turn: Turn) -> Reply:
        tool = self._answer_tool
        if tool is None:
            return Reply(is_done=True)
        arguments = answer_argument(tool, turn.answer) if tool.parameters else {}
        outcome = await self.call_tool(tool.name, arguments)
        self.metrics["failed_answer"] = float(outcome.is_error)
        return Reply(reward=outcome.reward, is_done=True)

    async def close(self) -> None:
        if self._entering is None:
            return
        # The server goes on creating a session whose request was cancelled, and a session can be
        # deleted only once it exists.
        await asyncio.wait({self._entering}, timeout=CREATING_S)
        self._entering.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await self._entering
        await self._session.__aexit__(None, None, None)

    async def _enter(self) -> None:
        if self._session is not None:
            await self.close()  # a failed attempt may have created a session
        self._session = self._adapter.session(self._item)
        self._entering = asyncio.ensure_future(self._session.__aenter__())
        await self._ask(asyncio.shield(self._entering))

    def _reward(self, output: Any) -> float:
        if output.reward is not None:
            self._has_reward = True
            return finite_reward(output.reward, f"a call of {self._adapter.url}")
        if output.finished and not self._has_reward:
            raise EpisodeRewardError(f"{self._adapter.url} finished an episode without a reward")
        return 0.0

    async def _ask(self, call: Awaitable[Result]) -> Result:
        """Await a call of the client, with its errors named by their cause."""
        from openreward.api.errors import SessionTerminatedError, ToolFailed, TransportError

        url = self._adapter.url
        try:
            return await call
        except aiohttp.ClientResponseError as error:
            text = f"{url}: status {error.status}: {error.message}"
            if error.status in (404, 410, 502, 503, 504):  # a new server knows no old session
                raise EpisodeConnectionError(text) from error
            raise EpisodeFailedError(text) from error
        except ToolFailed as error:
            raise EpisodeFailedError(f"{url}: {error}") from error
        except (SessionTerminatedError, TransportError, aiohttp.ClientError, OSError) as error:
            text = f"{url}: {type(error).__name__}: {error}"
            raise EpisodeConnectionError(text) from error


class OrsAdapter(Adapter):
    """One environment of a server; an item is a task of a split."""

    args_cls = OrsArgs
    default_settings: ClassVar[Mapping[str, Any]] = {"max_turns": 16, "max_token_length": 8192}
    limits_replies = True
    args: OrsArgs

    def __init__(self, name: str, args: OrsArgs, **settings: Any) -> None:
        super().__init__(name, args, **settings)
        self.url, self._wanted = server_address(name, "ors")
        self.max_concurrent = args.max_concurrent
        self._secrets: Mapping[str, str] = {}
        self._guard = SessionGuard()
        self._api: Any = None
        self._session_class: Any = None
        self._environment: Any = None
        self._train: tuple[str, TaskOrder] | None = None
        self._eval: tuple[str, TaskOrder] | None = None

    async def open(self) -> None:
        api_class, self._session_class = await asyncio.to_thread(_client_classes)
        self._secrets = read_pairs(self.args.secrets_file, "secrets_file")
        api_key = read_pairs(self.args.api_key_file, "api_key_file").get("api_key", "")
        http = HttpSession(
            self.url,
            headers={"X-API-Key": api_key} if api_key else {},
            timeout_s=max(self.step_timeout_s, OPEN_REQUEST_S),
        )
        try:
            name = await repeat_until_connected(
                lambda: self._read_server(http), limit_s=self.args.reconnect_s, where=self.url
            )
            await self._read_splits(http, name)
        finally:
            await http.close()
        self._api = api_class(base_url=self.url, api_key=api_key)
        self._environment = self._api.get(name, variant=name)

    async def close(self) -> None:
        if self._api is not None:
            await self._api.aclose()
        await self._guard.close()

    async def item(self, index: int) -> Item:
        return self._item(self._train, index)

    async def eval_items(self, limit: int) -> Sequence[Item]:
        count = 0 if self._eval is None else min(limit, self._eval[1].num_tasks)
        return [self._item(self._eval, index) for index in range(count)]

    def start(self, item: Item) -> OrsEpisode:
        return OrsEpisode(self, item)

    def session(self, item: Item) -> Any:
        """Return a new session of the client; it is created on entering."""
        return self._session_class(
            self._guard,
            self._environment,
            secrets=dict(self._secrets) or None,
            api_key=self._environment.api_key,
            split=item["split"],
            index=item["index"],
        )

    def _item(self, source: tuple[str, TaskOrder] | None, index: int) -> Item:
        assert source is not None  # set by `open`
        split, order = source
        return {"split": split, "index": order.at(index)}

    async def _read_server(self, http: HttpSession) -> str:
        """Check the protocol; return the name of the environment."""
        listed = await http.get("/list_environments")
        if listed.status in (401, 403):
            raise ConfigError(f"{self.url} refuses the key; set api_key_file")
        version = await http.get("/version")
        if version.is_ok:
            _check_version(version.json(), self.url)
        try:
            names = listed.json()
        except EpisodeFailedError:
            names = None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ConfigError(
                f"{self.url} is not a server of the Open Reward Standard: GET /list_environments "
                f"returned status {listed.status} without a list of names"
            )
        wanted = self._wanted if self._wanted in names else (self._wanted or "").lower() or None
        return choose(wanted, names, "", "environment")

    async def _read_splits(self, http: HttpSession, name: str) -> None:
        known = split_names(await http.get(f"/{name}/splits"))
        train = choose(self.args.split, known, "train", "split")
        others = [split for split in known if split != train] or known
        evaluation = choose(
            self.args.eval_split, known if self.args.eval_split else others, "test", "eval_split"
        )
        self._train = train, await self._order_of(http, name, train)
        self._eval = evaluation, await self._order_of(http, name, evaluation)

    async def _order_of(self, http: HttpSession, name: str, split: str) -> TaskOrder:
        count = (await http.post(f"/{name}/num_tasks", {"split": split})).json().get("num_tasks")
        if not isinstance(count, int) or count < 1:
            raise ConfigError(f"split {split!r} of {self.url}#{name} has {count!r} tasks")
        return TaskOrder(count, self.seed)


def _client_classes() -> tuple[type[Any], type[Any]]:
    """Import the classes of the client, which takes seconds."""
    from openreward.api.environments.client import AsyncEnvironmentsAPI, AsyncSession

    class LoopSession(AsyncSession):  # type: ignore[misc]
        """A session known to the guard, whose pings end with it.

        The pings of the client are sent by a lasting thread.
        """

        def __init__(self, guard: SessionGuard, *args: Any, **kwargs: Any) -> None:
            self._guard = guard
            self._guard_key = uuid.uuid4().hex
            self._created_id: str | None = None
            super().__init__(*args, **kwargs)

        @property
        def _pending_task_id(self) -> str | None:
            """The id of a session that the server begins to create, set by the client."""
            return self._created_id

        @_pending_task_id.setter
        def _pending_task_id(self, sid: str | None) -> None:
            self._created_id = sid
            if sid is not None:
                self._note_opened(sid, repeat_s=CREATING_S)

        async def _post_create(self) -> None:
            self._note_opened(self.sid, repeat_s=CREATING_S)
            await super()._post_create()
            self._note_opened(self.sid)

        async def __aexit__(self, *error: Any) -> None:
            await super().__aexit__(*error)
            self._guard.ended(self._guard_key)

        def _note_opened(self, sid: str, *, repeat_s: float = 0.0) -> None:
            url, headers = str(self.base_url).rstrip("/"), self._session_headers(sid)
            ends = [EndRequest("POST", url + path, headers) for path in DELETE_ROUTES]
            self._guard.opened(self._guard_key, ends, repeat_s=repeat_s)

        def _session_headers(self, sid: str) -> dict[str, str]:
            headers = {"X-Session-ID": sid}
            if self.deployment:
                headers["X-Deployment"] = self.deployment
            if self.api_key:
                headers["X-API-Key"] = self.api_key
            return headers

        async def _run_ping(self, url: str, sid: str, *_: Any, **__: Any) -> None:
            headers = self._session_headers(sid)
            while True:
                await asyncio.sleep(PING_S)
                with contextlib.suppress(aiohttp.ClientError, OSError):  # calls report lost servers
                    async with self.client.post("/ping", headers=headers):
                        pass

    return AsyncEnvironmentsAPI, LoopSession


def _check_version(answer: Any, url: str) -> None:
    version = str(answer.get("version")) if isinstance(answer, Mapping) else ""
    try:
        found = Version(version)
    except InvalidVersion:
        return  # a server that is not made with the SDK
    if (found.major, found.minor) != SUPPORTED:
        raise ConfigError(
            f"{url} runs openreward {version}; this adapter supports openreward "
            f"{SUPPORTED[0]}.{SUPPORTED[1]}.x"
        )


def _foreign(tool: Any) -> ForeignTool:
    return ForeignTool(tool.name, tool.description or "", tool.input_schema or {})


def _answer_tool(
    name: str | None, listed: Sequence[ForeignTool], terminal: Any
) -> ForeignTool | None:
    if name is not None:
        names = [tool.name for tool in listed]
        tool = listed[names.index(choose(name, names, "", "answer_tool"))]
        answer_argument(tool, "")
        return tool
    if terminal is None:
        return None
    parameters = {"properties": {terminal.arg: {"type": "string"}}} if terminal.arg else {}
    return ForeignTool(terminal.name, terminal.description, parameters)


def _chat_message(message: Any) -> ChatMessage:
    return {"role": message.role, "content": _text_of(message.blocks)}


def _text_of(blocks: Sequence[Any]) -> str:
    """Return the text of blocks; what is not text is named."""
    texts = []
    for block in blocks:
        if block.type in ("text", "reasoning"):
            texts.append(shown_value(block.text))
        elif block.type == "tool_call":
            call = shown_value({"name": block.name, "arguments": block.input})
            texts.append(f"<tool_call>\n{call}\n</tool_call>")
        elif block.type == "tool_result":
            texts.append(f"<tool_response>\n{_text_of(block.blocks)}\n</tool_response>")
        else:
            texts.append(f"({block.type} not shown)")
    return "\n".join(texts)
