"""Resource servers of NeMo Gym over HTTP, with tasks from a JSONL file.

    tasks file, /openapi.json ─► open ─► row of an item
    verify style      /seed_session ─► turn ─► /TOOL, /TOOL, … ─► turn without a call ─► /verify
    gymnasium style   /reset ─► turn ─► /step ─► turn ─► /step ─► … ─► terminated

A row has the prompt and the tools in `responses_create_params`, and what the server scores with in
its other fields. The server gets the turns as items of the Responses API. A cookie identifies the
session; the protocol has no route that ends one.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import quote, urlsplit

from pydantic import Field

from atroposlib.adapters.interface import Adapter, Episode, Item, finite_reward
from atroposlib.adapters.remote import (
    OPEN_REQUEST_S,
    HttpAnswer,
    HttpSession,
    RemoteArgs,
    TaskOrder,
    is_refusing,
    numbers_of,
    read_pairs,
    repeat_until_connected,
    server_address,
    shown_value,
)
from atroposlib.adapters.tool_episode import ForeignTool, ToolEpisode, ToolOutcome, ToolQuestion
from atroposlib.envs.conversation import ChatMessage, Reply, Turn
from atroposlib.envs.reporting import Reward
from atroposlib.envs.tools import ToolCall, parse_tool_calls, response_block
from atroposlib.errors import (
    ConfigError,
    EpisodeConnectionError,
    EpisodeFailedError,
)

__all__ = ["NemoGymAdapter", "NemoGymArgs", "NemoStepEpisode", "NemoVerifyEpisode"]

PARAMS = "responses_create_params"
RESERVED = frozenset({"seed_session", "verify", "aggregate_metrics", "mcp", "reset", "step"})
"""Routes of the servers, which no tool may be named after."""
MAX_FILE_BYTES = 4 * 1024**3
ROWS_CHECKED = 10_000
"""Rows of a file that are read before training."""
WATCH_S = 1.0
"""Interval of looking whether the server is still there."""
INVALID_PARAMS = -32602
"""Code of JSON-RPC for arguments that a server refuses."""
_TOOL_CALL = re.compile(r"<tool_call>.*?(?:</tool_call>|\Z)", re.DOTALL)


class NemoGymArgs(RemoteArgs):
    """The tasks, and how they are used."""

    tasks: Path = Field(description="JSONL file of tasks, each with responses_create_params.")
    eval_tasks: Path | None = Field(
        None, description="JSONL file of tasks of evaluations; None: those of training."
    )
    headers_file: Path | None = Field(
        None, description="YAML file with HTTP headers, such as Authorization."
    )


class Tasks:
    """The rows of a JSONL file, read one at a time.

    Args:
        path: the file; it must not change while it is used.

    Raises:
        ConfigError: the file cannot be read, or has no rows.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts: list[int] = []
        try:
            with path.open("rb") as file:
                start = 0
                for line in file:
                    if line.strip():
                        self._starts.append(start)
                    start += len(line)
                    if start > MAX_FILE_BYTES:
                        raise ConfigError(f"tasks {path}: larger than {MAX_FILE_BYTES} bytes")
        except OSError as error:
            raise ConfigError(f"tasks {path}: cannot be read: {error.strerror}") from error
        if not self._starts:
            raise ConfigError(f"tasks {path}: has no rows")

    def __len__(self) -> int:
        return len(self._starts)

    def check(self) -> None:
        """Read the first rows; raises as `row`."""
        for number in range(min(len(self), ROWS_CHECKED)):
            self.row(number)

    def row(self, number: int) -> dict[str, Any]:
        """Return row `number`, counted from 0.

        Raises:
            ConfigError: it is not a task.
        """
        with self._path.open("rb") as file:
            file.seek(self._starts[number])
            line = file.readline()
        where = f"tasks {self._path}, row {number + 1}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: not JSON: {error}") from error
        if not isinstance(row, dict) or not isinstance(row.get(PARAMS), dict):
            raise ConfigError(f"{where}: expected a JSON object with {PARAMS}")
        opening_messages(row[PARAMS], where)
        listed_tools(row[PARAMS], where)
        return row


def opening_messages(params: Mapping[str, Any], where: str) -> list[ChatMessage]:
    """Return the prompt of a task as chat messages.

    Args:
        params: `responses_create_params` of a row.
        where: start of error messages.

    Raises:
        ConfigError: it has no prompt, or something other than text.
    """
    messages: list[ChatMessage] = []
    if params.get("instructions"):
        messages.append({"role": "system", "content": str(params["instructions"])})
    given = params.get("input")
    entries = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(entries, list) or not entries:
        raise ConfigError(
            f"{where}: {PARAMS}.input is {given!r:.100}; expected a text or a list of messages "
            "(`gym dataset render` fills in prompt templates)"
        )
    for entry in entries:
        message = _opening_message(entry, where)
        role, earlier = message["role"], messages[-1] if messages else {}
        # Chat templates allow one system message; calls and results of one turn are one message.
        between = {"system": "\n\n"}.get(role, "\n" if _is_of_call(entry) else None)
        if earlier.get("role") == role and between is not None:
            messages.pop()
            message = {"role": role, "content": earlier["content"] + between + message["content"]}
        messages.append(message)
    return messages


def _is_of_call(entry: Mapping[str, Any]) -> bool:
    return entry.get("type") in ("function_call", "function_call_output")


def _opening_message(entry: Any, where: str) -> ChatMessage:
    kind = entry.get("type", "message") if isinstance(entry, Mapping) else None
    if kind == "function_call":
        call = {"name": entry.get("name"), "arguments": _parsed(entry.get("arguments"))}
        content = f"<tool_call>\n{shown_value(call)}\n</tool_call>"
        return {"role": "assistant", "content": content}
    if kind == "function_call_output":
        content = f"<tool_response>\n{shown_value(entry.get('output'))}\n</tool_response>"
        return {"role": "user", "content": content}
    if kind != "message" or "role" not in entry:
        raise ConfigError(f"{where}: {PARAMS}.input has {entry!r:.100}; expected a message")
    content = entry.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    found = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    texts = [text for text in found if isinstance(text, str)]
    if len(texts) != len(parts):
        raise ConfigError(f"{where}: a message of {PARAMS}.input has content other than text")
    role = "system" if entry["role"] == "developer" else entry["role"]
    return {"role": role, "content": "".join(texts)}


def _parsed(arguments: Any) -> Any:
    try:
        return json.loads(arguments)
    except (TypeError, ValueError, RecursionError):
        return arguments


def listed_tools(params: Mapping[str, Any], where: str) -> list[ForeignTool]:
    """Return the tools of a task.

    Raises:
        ConfigError: one is not a function, or has the name of a route.
    """
    tools = []
    for tool in params.get("tools") or ():
        name = tool.get("name") if isinstance(tool, Mapping) else None
        if not isinstance(name, str) or tool.get("type") != "function" or name in RESERVED:
            raise ConfigError(
                f"{where}: {PARAMS}.tools has {tool!r:.100}; expected functions whose names are "
                f"not {', '.join(sorted(RESERVED))}"
            )
        tools.append(ForeignTool(name, tool.get("description") or "", tool.get("parameters") or {}))
    return tools


class NemoSession:
    """A session of the server, and the output of the policy as items of the Responses API.

    Attributes:
        params: `responses_create_params` of the task.
        output: items so far.
        is_incomplete: whether a limit ended the output.
    """

    def __init__(self, adapter: NemoGymAdapter, row: Mapping[str, Any]) -> None:
        self._adapter = adapter
        self._row = row
        self.params: Mapping[str, Any] = row[PARAMS]
        self.output: list[dict[str, Any]] = []
        self.is_incomplete = False
        self._http: HttpSession | None = None
        self._outages = 0

    async def start(self, route: str) -> Mapping[str, Any]:
        """Start the session; tried again while the server is unreachable."""
        self._http = http = self._adapter.http()
        limit_s = min(self._adapter.args.reconnect_s, 0.8 * self._adapter.step_timeout_s)
        answer = await repeat_until_connected(
            lambda: http.post(route, self._row), limit_s=limit_s, where=self._adapter.url
        )
        self._outages = self._adapter.num_outages
        return _mapping(answer)

    async def post(
        self, route: str, body: Any, headers: Mapping[str, str] | None = None
    ) -> HttpAnswer:
        """Send a request of the session.

        Raises:
            EpisodeConnectionError: the server is or was away, so the session is lost.
        """
        assert self._http is not None  # `start` comes first
        answer = await self._http.post(route, body, headers)
        if self._outages != self._adapter.num_outages:
            raise EpisodeConnectionError(
                f"{self._adapter.url} was away during the episode; a restarted server has lost "
                "the state of the session"
            )
        return answer

    async def send_response(self, route: str) -> Mapping[str, Any]:
        """Send the task with the output so far."""
        return _mapping(await self.post(route, {**self._row, "response": self._response()}))

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    def note_turn(self, turn: Turn) -> None:
        """Add the thinking and the text of a turn; text includes calls that are not JSON."""
        thinking = turn.text[: len(turn.text) - len(turn.answer)]
        thinking = thinking.replace("<think>", "").replace("</think>", "").strip()
        if thinking:
            summary = [{"text": thinking, "type": "summary_text"}]
            self.output.append({"id": _new_id("rs"), "type": "reasoning", "summary": summary})
        calls = iter(parse_tool_calls(turn.answer))
        text = _TOOL_CALL.sub(lambda block: block[0] if next(calls).error else "", turn.answer)
        if text.strip():
            content = [{"type": "output_text", "text": text.strip(), "annotations": []}]
            message = {"id": _new_id("msg"), "type": "message", "role": "assistant"}
            self.output.append({**message, "status": "completed", "content": content})

    def note_call(self, call: ToolCall) -> str:
        """Add a call; return the id that its result refers to."""
        arguments = {} if call.arguments is None else call.arguments
        call_id = _new_id("call")
        self.output.append(
            {
                "id": _new_id("fc"),
                "type": "function_call",
                "call_id": call_id,
                "name": _encodable(call.name),
                "arguments": _encodable(json.dumps(arguments, ensure_ascii=False)),
                "status": "completed",
            }
        )
        return call_id

    def _response(self) -> dict[str, Any]:
        reason = {"incomplete_details": {"reason": "max_output_tokens"}, "status": "incomplete"}
        return {
            "id": _new_id("resp"),
            "object": "response",
            "created_at": time.time(),
            "model": "policy",
            "output": self.output,
            "parallel_tool_calls": self.params.get("parallel_tool_calls", True),
            "tool_choice": self.params.get("tool_choice", "auto"),
            "tools": self.params.get("tools") or [],
            **(reason if self.is_incomplete else {"status": "completed"}),
        }


class InvalidArgumentsError(EpisodeFailedError):
    """A server refused the arguments of a call, which the policy wrote."""


class NemoStepEpisode(Episode):
    """A session in the style of Gymnasium: the server answers every turn, and runs its calls."""

    def __init__(self, adapter: NemoGymAdapter, row: Mapping[str, Any]) -> None:
        super().__init__()
        self._adapter = adapter
        self._session = NemoSession(adapter, row)

    async def begin(self) -> Sequence[ChatMessage]:
        params = self._session.params
        observation = (await self._session.start("/reset")).get("observation")
        messages = opening_messages(params, "task")
        if observation:
            messages.append({"role": "user", "content": shown_value(observation)})
        return ToolQuestion(messages, listed_tools(params, "task")).opening()

    async def reply(self, turn: Turn) -> Reply:
        self._session.output = []  # a step gets the items of its turn only
        self._session.note_turn(turn)
        calls = [call for call in parse_tool_calls(turn.answer) if call.error is None]
        names = {self._session.note_call(call): call.name for call in calls}
        answer = await self._session.send_response("/step")
        info = answer["info"] if isinstance(answer.get("info"), Mapping) else {}
        is_truncated = answer.get("truncated") is True
        self.metrics.update(numbers_of(info), truncated=float(is_truncated))
        self.metrics["steps"] = self.metrics.get("steps", 0.0) + 1
        blocks = [_response_block(output, names) for output in info.get("tool_outputs") or ()]
        if answer.get("observation"):
            blocks.append(shown_value(answer["observation"]))
        return Reply(
            "\n".join(blocks),
            reward=finite_reward(answer.get("reward"), f"/step of {self._adapter.url}"),
            is_done=answer.get("terminated") is True or is_truncated,
        )

    async def close(self) -> None:
        await self._session.close()


class NemoVerifyEpisode(ToolEpisode):
    """A session whose tools are routes, and whose whole output is scored at its end."""

    def __init__(self, adapter: NemoGymAdapter, row: Mapping[str, Any]) -> None:
        super().__init__()
        self._adapter = adapter
        self._row = row
        self._session = NemoSession(adapter, row)
        self._mcp: Mapping[str, Any] = {}
        self._mcp_names: set[str] = set()

    async def open_session(self) -> ToolQuestion:
        answer = await self._session.start("/seed_session")
        tools = listed_tools(self._session.params, "task")
        if isinstance(answer.get("mcp"), Mapping):
            self._mcp = answer["mcp"]
            listed = (await self._ask_mcp("tools/list", {})).get("tools") or ()
            self._mcp_names = {tool["name"] for tool in listed} - {tool.name for tool in tools}
            tools += [
                ForeignTool(t["name"], t.get("description") or "", t.get("inputSchema") or {})
                for t in listed
                if t["name"] in self._mcp_names
            ]
        return ToolQuestion(opening_messages(self._session.params, "task"), tools)

    async def reply(self, turn: Turn) -> Reply:
        self._session.note_turn(turn)
        return await super().reply(turn)

    def note_call(self, call: ToolCall, outcome: ToolOutcome) -> None:
        output = self._session.output
        if call.error is not None:  # it is in the text of the turn
            output.append({"type": "message", "role": "user", "content": outcome.text})
            return
        call_id = self._session.note_call(call)
        output.append({"type": "function_call_output", "call_id": call_id, "output": outcome.text})

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolOutcome:
        if name in self._mcp_names:
            meta = {"_meta": {"idempotency-key": self.call_key}} if self.call_key else {}
            params = {"name": name, "arguments": arguments, **meta}
            try:
                result = await self._ask_mcp("tools/call", params)
            except InvalidArgumentsError as error:
                return ToolOutcome(shown_value(str(error)), is_error=True)
            texts = [part.get("text") for part in result.get("content") or ()]
            text = "\n".join(text for text in texts if isinstance(text, str))
            return ToolOutcome(shown_value(text), is_error=result.get("isError") is True)
        headers = {"Idempotency-Key": self.call_key} if self.call_key else None
        answer = await self._session.post(f"/{quote(name, safe='')}", arguments, headers)
        # An error of a tool is for the policy, as in the agents of NeMo Gym.
        return ToolOutcome(shown_value(answer.text), is_error=not answer.is_ok)

    async def finish(self, turn: Turn) -> Reply:
        return Reply(reward=await self._verify(), is_done=True)

    async def truncated(self) -> Reward:
        self._session.is_incomplete = True
        return await self._verify()

    async def close(self) -> None:
        await self._session.close()

    async def _verify(self) -> Reward:
        answer = await self._session.send_response("/verify")
        reward = finite_reward(answer.get("reward"), f"/verify of {self._adapter.url}")
        known = {*self._row, "reward", "response"}
        self.metrics.update(numbers_of({k: v for k, v in answer.items() if k not in known}))
        parts = numbers_of(answer.get("reward_components"))
        if parts and math.isclose(sum(parts.values()), reward, abs_tol=1e-6):
            return parts
        return reward

    async def _ask_mcp(self, method: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a request to the server's MCP route, which keeps no connection."""
        path = f"/{str(self._mcp.get('url_path') or '/mcp').lstrip('/')}"
        given = self._mcp.get("headers") or {}
        headers = {str(name): str(value) for name, value in given.items()}
        headers["Accept"] = "application/json, text/event-stream"
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        answer = _mapping(await self._session.post(path, body, headers))
        error = answer.get("error")
        if isinstance(error, Mapping) and error.get("code") == INVALID_PARAMS:
            raise InvalidArgumentsError(str(error.get("message") or "invalid arguments"))
        if not isinstance(answer.get("result"), Mapping):
            raise EpisodeFailedError(f"{method} of {self._adapter.url}{path}: {answer!r:.300}")
        result: Mapping[str, Any] = answer["result"]
        return result


def _mapping(answer: HttpAnswer) -> Mapping[str, Any]:
    content = answer.json()
    if not isinstance(content, Mapping):
        raise EpisodeFailedError(f"{answer.where}: expected a JSON object, got {content!r:.100}")
    return content


def _response_block(output: Any, names: Mapping[str, str]) -> str:
    shown = {
        "name": names.get(str(output.get("call_id")), ""),
        "content": str(output.get("output", "")),
    }
    return response_block(shown_value(shown))


def _encodable(text: str) -> str:
    """Return a text with lone surrogates as JSON escapes; servers reject the characters."""
    return text.encode("utf-8", "backslashreplace").decode()


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


class NemoGymAdapter(Adapter):
    """One resource server and a file of tasks; an item is a row.

    Attributes:
        num_outages: number of times that the server was found to be away.
    """

    args_cls = NemoGymArgs
    default_settings: ClassVar[Mapping[str, Any]] = {"max_turns": 16, "max_token_length": 8192}
    limits_replies = True
    args: NemoGymArgs

    def __init__(self, name: str, args: NemoGymArgs, **settings: Any) -> None:
        super().__init__(name, args, **settings)
        self.url = server_address(name, "nemo-gym").url
        self.max_concurrent = args.max_concurrent
        self.num_outages = 0
        self._headers: Mapping[str, str] = {}
        self._style: Literal["verify", "gymnasium"] = "verify"
        self._tasks: Tasks | None = None
        self._eval_tasks: Tasks | None = None
        self._order: TaskOrder | None = None
        self._watch: asyncio.Task[None] | None = None

    async def open(self) -> None:
        self._headers = read_pairs(self.args.headers_file, "headers_file")
        self._tasks = await asyncio.to_thread(Tasks, self.args.tasks)
        self._order = TaskOrder(len(self._tasks), self.seed)
        path = self.args.eval_tasks
        self._eval_tasks = await asyncio.to_thread(Tasks, path) if path else self._tasks
        await asyncio.to_thread(self._tasks.check)
        http = self.http(max(self.step_timeout_s, OPEN_REQUEST_S))
        try:
            api = await repeat_until_connected(
                lambda: http.get("/openapi.json"), limit_s=self.args.reconnect_s, where=self.url
            )
        finally:
            await http.close()
        self._style = _check_routes(api, self.url, self._tasks.row(0))
        self._watch = asyncio.create_task(self._watch_server())

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait({self._watch})

    async def item(self, index: int) -> Item:
        assert self._tasks is not None  # set by `open`, as the others
        assert self._order is not None
        try:
            return await asyncio.to_thread(self._tasks.row, self._order.at(index))
        except ConfigError as error:  # after the rows that were checked; others are left
            raise EpisodeFailedError(str(error)) from error

    async def eval_items(self, limit: int) -> Sequence[Item]:
        assert self._eval_tasks is not None
        count = min(limit, len(self._eval_tasks))
        return [self._eval_tasks.row(number) for number in range(count)]

    def start(self, item: Item) -> NemoStepEpisode | NemoVerifyEpisode:
        is_verify = self._style == "verify"
        return NemoVerifyEpisode(self, item) if is_verify else NemoStepEpisode(self, item)

    def http(self, timeout_s: float | None = None) -> HttpSession:
        """Return requests with cookies of their own."""
        limit_s = self.step_timeout_s if timeout_s is None else timeout_s
        return HttpSession(self.url, headers=self._headers, timeout_s=limit_s)

    async def _watch_server(self) -> None:
        """Count outages: a server that was restarted accepts old cookies, but has no old state."""
        parts = urlsplit(self.url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        is_away = False
        while True:
            is_refusing_now = await is_refusing(str(parts.hostname), port, timeout_s=WATCH_S)
            if is_refusing_now is not None:
                self.num_outages += is_refusing_now and not is_away
                is_away = is_refusing_now
            await asyncio.sleep(WATCH_S)


def _check_routes(
    api: HttpAnswer, url: str, row: Mapping[str, Any]
) -> Literal["verify", "gymnasium"]:
    """Return the style of a server.

    Raises:
        ConfigError: it is not a resource server, or requires fields that the first task lacks.
    """
    try:
        described = api.json()
        routes = described["paths"]
    except (EpisodeFailedError, KeyError, TypeError):
        described, routes = {}, {}
    needed: Sequence[str] = ("/reset", "/step")
    style: Literal["verify", "gymnasium"] = "gymnasium"
    if "/verify" in routes and "/seed_session" in routes:
        needed, style = ("/seed_session", "/verify"), "verify"
    missing = [route for route in needed if route not in routes]
    if missing:
        raise ConfigError(
            f"{url} is not a resource server of NeMo Gym: GET /openapi.json returned status "
            f"{api.status} without the routes /seed_session and /verify, or /reset and /step"
        )
    for route in needed:
        absent = [f for f in _required_fields(described, route) if f not in row and f != "response"]
        if absent:
            raise ConfigError(
                f"tasks: the first row has no field {absent[0]!r}, which {url}{route} requires; "
                f"it has {', '.join(row)}"
            )
    return style


def _required_fields(described: Mapping[str, Any], route: str) -> list[str]:
    try:
        body = described["paths"][route]["post"]["requestBody"]["content"]["application/json"]
        schema = body["schema"]
        if "$ref" in schema:
            schema = described["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        return [str(field) for field in schema.get("required") or ()]
    except (KeyError, TypeError, AttributeError):
        return []
