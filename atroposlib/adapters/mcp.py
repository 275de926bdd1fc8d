"""MCP servers as the tools of a task file.

    rows ─► question ─► turn with calls ─► tools/call ─► results ─► … ─► answer ─► reward
                             │                 ▲
    servers ─ tools/list ────┴─────────────────┘   stdio: a child process; HTTP: a session

NAME is the task file. Each rollout has sessions of its own with all servers, which end with it
however it ends; `sessions: shared` uses one session per server for all rollouts. If this process is
killed, its child processes end, and its guard ends the HTTP sessions. A result that reports an
error is a result: the policy reads it. A server that is lost fails the rollouts that use it, and
the next rollout connects again, with a back-off.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import re
import shlex
import shutil
import sys
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TextIO

import tenacity
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from atroposlib.adapters.dataset import DatasetArgs, TaskRows, given
from atroposlib.adapters.interface import Adapter, Item
from atroposlib.adapters.session_guard import EndRequest, SessionGuard
from atroposlib.adapters.tool_episode import (
    ForeignTool,
    ToolEpisode,
    ToolOutcome,
    ToolQuestion,
)
from atroposlib.envs.conversation import Reply, Turn
from atroposlib.errors import (
    AtroposError,
    ConfigError,
    EpisodeConnectionError,
    EpisodeFailedError,
)
from atroposlib.tasks.tool_calls import num_matching
from atroposlib.utils.text import is_milestone, near_name

__all__ = ["McpAdapter", "McpArgs", "McpEpisode", "McpServerSpec", "McpSession", "calls_reward"]

logger = logging.getLogger(__name__)

MAX_TOOLS = 512
MAX_PAGES, MAX_LISTED_TOOLS = 64, 10_000
"""Of the tools of one server, some of which may be selected."""
LEAST_LIST_S = 60.0
"""Least time limit of listing the tools of a server."""
MAX_EXPECTED_CALLS = 256
STDERR_BYTES = 2000
"""Last bytes of a child's stderr that are kept for error messages."""
CLOSE_S = 10.0
SESSION_HEADER = "mcp-session-id"
KEY_OF_CALL = "idempotency-key"
"""Name in `_meta` of the key by which a server recognizes a repeated call."""
END_HEADERS = frozenset({"authorization", "cookie", "mcp-protocol-version"})
"""Headers of a request that ends a session, in addition to its id and those of the user."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 5.0
NUM_STARTERS = max(2, os.cpu_count() or 1)
"""Programs that start at the same time; more would slow each other down, up to the time limit."""
VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
SYSTEM_PROMPT = (
    "Use the tools to answer the question. When you are done, end with your final answer as "
    "<answer>ANSWER</answer>."
)

WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; it stays set after exec
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent process has ended")
os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Program of a child that ends when its parent does, and becomes the server."""


class McpServerSpec(BaseModel):
    """Where one server is: a command, or a URL.

    `${NAME}` in `env` and `headers` stands for an environment variable, so that keys are in no
    file.
    """

    model_config = ConfigDict(extra="forbid")

    command: str | None = Field(None, description="Program that speaks MCP on stdin and stdout.")
    args: list[str] = Field(default_factory=list, description="Arguments of the program.")
    env: dict[str, str] = Field(
        default_factory=dict, description="Further environment variables of the program."
    )
    cwd: str | None = Field(None, description="Working directory of the program.")
    url: str | None = Field(None, description="URL of a streamable HTTP server.")
    headers: dict[str, str] = Field(
        default_factory=dict,
        description="Headers of each request, such as Authorization.",
        repr=False,
    )

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if value.startswith(("http://", "https://")):
            return {"url": value}
        words = shlex.split(value)
        return {"command": words[0] if words else None, "args": words[1:]}

    @model_validator(mode="after")
    def _has_one_transport(self) -> McpServerSpec:
        if (self.command is None) == (self.url is None):
            raise ValueError("expected a command or a url, and not both")
        return self


class McpArgs(DatasetArgs):
    """The servers, and the columns and rewards of the tasks."""

    servers: dict[str, McpServerSpec] = Field(
        default_factory=dict,
        max_length=64,
        description="Servers by name: a command line, a URL, or {command, args, env, cwd} or "
        "{url, headers}; a list gets the names server_1, server_2, ...",
    )
    sessions: Literal["per_rollout", "shared"] = Field(
        "per_rollout", description="Whether each rollout has sessions of its own, or all share one."
    )
    max_sessions: int = Field(
        16, ge=1, le=4096, description="Rollouts that have sessions of their own at the same time."
    )
    tools: list[str] | None = Field(
        None, description="Names of the tools that are offered; null: all of all servers."
    )
    tool_timeout_s: float = Field(
        30.0, gt=0, le=3600, description="Time limit of one call; then its result is an error."
    )
    max_result_characters: int = Field(
        20_000, ge=100, le=1_000_000, description="Characters of a result that the policy reads."
    )
    connect_attempts: int = Field(
        5, ge=1, le=100, description="Attempts to connect to a server, with a back-off."
    )
    connect_timeout_s: float = Field(
        15.0, gt=0, le=600, description="Time limit of one attempt to connect."
    )
    expected_calls_field: str = Field(
        "expected_calls",
        description="Column of the calls that a right solution makes: {name, arguments} each.",
    )
    rewards_field: str = Field(
        "reward_functions",
        description="Column of the reward functions of a row, in place of reward_functions.",
    )
    penalize_extra_calls: bool = Field(
        True, description="Whether calls that are not expected lower the part `calls`."
    )
    system_prompt: str | None = Field(
        SYSTEM_PROMPT, description="System message, before the tools; null sends none."
    )
    reward_functions: list[str | dict[str, Any]] = Field(
        ["answer_text"],
        description="Names, or {type, weight, params}; for rows with an answer. Each is a named "
        "part of the reward, in addition to `calls` for rows with expected calls.",
    )

    @field_validator("servers", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        if isinstance(value, list):
            return {f"server_{number}": each for number, each in enumerate(value, start=1)}
        return value


def expand(text: str, variables: Mapping[str, str], where: str) -> str:
    """Replace `${NAME}` by the value of a variable.

    Raises:
        ConfigError: the variable is not set; the message has its name only.
    """

    def value_of(match: re.Match[str]) -> str:
        if match[1] not in variables:
            raise ConfigError(f"{where}: the environment variable {match[1]} is not set")
        return variables[match[1]]

    return VARIABLE.sub(value_of, text)


def longest_begin_s(args: McpArgs) -> float | None:
    """Return the seconds until all rollouts have sessions if every attempt takes its time limit.

    None if all servers have a URL: no rollout waits until others have started a program.
    """
    num_programs = sum(spec.url is None for spec in args.servers.values())
    if num_programs == 0:
        return None
    num_turns = math.ceil(num_programs * args.max_sessions / NUM_STARTERS)
    attempt_s = args.connect_timeout_s + LONGEST_WAIT_S
    return args.connect_attempts * attempt_s * num_turns


def calls_reward(
    expected: Sequence[dict[str, Any]],
    made: Sequence[dict[str, Any]],
    *,
    num_calls: int,
    penalizes_extra: bool,
) -> float:
    """Return the fraction of the expected calls that were made, in [0, 1].

    Args:
        expected: `name` and `arguments` of each call; a call may have further arguments.
        made: calls that succeeded.
        num_calls: calls that were written, including failed ones.
        penalizes_extra: Whether the denominator is `num_calls` if that is larger.
    """
    if not expected:
        return float(num_calls == 0 or not penalizes_extra)
    denominator = max(len(expected), num_calls) if penalizes_extra else len(expected)
    return num_matching(expected, made, coerce=True) / denominator


class MilestoneFilter(logging.Filter):
    """Passes the 1st, 10th, 100th, ... record: the SDK logs each line that is not a message."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def filter(self, record: logging.LogRecord) -> bool:
        self._count += 1
        return is_milestone(self._count)


class StderrTail(asyncio.Protocol):
    """Reads the stderr of a child and keeps its end, so that it fills neither memory nor a log."""

    def __init__(self) -> None:
        self._kept = bytearray()

    def data_received(self, data: bytes) -> None:
        self._kept += data
        del self._kept[:-STDERR_BYTES]

    def last_line(self) -> str:
        lines = self._kept.decode("utf-8", "replace").strip().splitlines()
        return lines[-1][:500] if lines else ""

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[TextIO]:
        """Yield a file whose other end is read by this object; the child gets it as stderr."""
        read_end, write_end = os.pipe()
        with os.fdopen(write_end, "w") as sink:
            source = os.fdopen(read_end, "rb", buffering=0)
            loop = asyncio.get_running_loop()
            transport, _ = await loop.connect_read_pipe(lambda: self, source)
            try:
                yield sink
            finally:
                transport.close()


class UnusableAnswerError(EpisodeFailedError):
    """A server answered a request in a form that the SDK refuses; its session goes on."""


class McpSession:
    """A connection to one server, held by a task of its own.

    The contexts of the SDK must be left by the task that entered them, while the calls of an
    episode come from several tasks.

    Args:
        name: name of the server.
        spec: where it is.
        mode: `legacy` begins with the handshake, which gives an HTTP session its state; `auto`
            speaks the newest protocol that both know.
        guard: ends an HTTP session if this process is killed.
    """

    def __init__(self, name: str, spec: McpServerSpec, *, mode: str, guard: SessionGuard) -> None:
        self.name = name
        self._spec = spec
        self._mode = mode
        self._guard = guard
        self._guard_key = uuid.uuid4().hex
        self._end_request: EndRequest | None = None
        self._is_ended = False
        self._refusal_status: int | None = None
        self._stderr = StderrTail()
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._client: Any = None

    @property
    def is_alive(self) -> bool:
        return self._client is not None and self._task is not None and not self._task.done()

    async def open(self) -> None:
        """Connect once.

        Raises:
            ConfigError: the command does not exist, or the protocol does not fit.
            EpisodeConnectionError: the server cannot be reached, or ended at once.
        """
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(ready), name=f"mcp {self.name}")
        try:
            self._client = await asyncio.shield(ready)
        except asyncio.CancelledError:
            await self._cancel()
            raise

    async def close(self) -> None:
        """End the session, and the child process; safe to call twice."""
        self._client = None
        self._stop.set()
        if self._task is None:
            return
        _, running = await asyncio.wait({self._task}, timeout=CLOSE_S)
        if running:
            logger.warning("MCP server %s has not ended its session in time", self.name)
            await self._cancel()

    async def _cancel(self) -> None:
        """Cancel the task, once: while it ends the child, it must not be cancelled again."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait({self._task}, timeout=CLOSE_S)

    async def list_tools(self) -> list[Any]:
        """Return the descriptions of all tools, page by page.

        Raises:
            ConfigError: the list has no end.
            EpisodeConnectionError: the server is lost.
            UnusableAnswerError: a description does not fit the protocol.
            mcp.MCPError: the server rejects the request.
        """
        tools: list[Any] = []
        cursor: str | None = None
        earlier: set[str] = set()
        while len(earlier) < MAX_PAGES and len(tools) <= MAX_LISTED_TOOLS:
            page = await self._ask(self._client.list_tools(cursor=cursor))
            tools += page.tools
            cursor = page.next_cursor
            if cursor is None:
                return tools
            if cursor in earlier:
                break
            earlier.add(cursor)
        raise ConfigError(
            f"servers: {self.name}: its list of tools has no end: after {len(tools)} tools it "
            f"continues at {cursor!r:.100}"
        )

    async def call_tool(self, tool: str, arguments: dict[str, Any], *, key: str = "") -> Any:
        """Call a tool and return the result of the SDK; its errors are results, too.

        Args:
            tool: its name on this server.
            arguments: its arguments.
            key: idempotency key of the call, sent as `KEY_OF_CALL` in `_meta`.

        Raises:
            EpisodeConnectionError: the server is lost.
            UnusableAnswerError: the result does not fit the protocol, or the tool's own schema.
            mcp.MCPError: the server rejects the call.
        """
        if not self.is_alive:
            raise self.lost("the session has ended")
        meta = {KEY_OF_CALL: key} if key else None
        return await self._ask(self._client.call_tool(tool, arguments, meta=meta))

    async def _ask(self, request: Any) -> Any:
        """Await a request; it does not outlive the session, whose loss it reports."""
        from mcp import MCPError

        assert self._task is not None
        asking = asyncio.ensure_future(request)
        try:
            await asyncio.wait({asking, self._task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not asking.done():
                asking.cancel()
                await asyncio.wait({asking}, timeout=CLOSE_S)
        if not asking.done() or asking.cancelled():
            raise self.lost("the session has ended")
        try:
            return asking.result()
        except MCPError as error:
            if self._is_lost(error):
                raise self.lost(error.message) from error
            raise
        except (OSError, RuntimeError, ValueError) as error:
            if isinstance(error, OSError) or self._task.done():
                raise self.lost(f"{type(error).__name__}: {error}") from error
            raise UnusableAnswerError(f"the answer cannot be used: {str(error)[:500]}") from error

    def _is_lost(self, error: Any) -> bool:
        return is_lost(error.code, error.message, is_program=self._spec.url is None)

    def lost(self, reason: str) -> EpisodeConnectionError:
        """Return the exception of a lost server, with the end of its stderr or its HTTP status."""
        self._client = None
        tail = self._stderr.last_line()
        shown = f"; its stderr ends: {tail}" if tail else ""
        if self._refusal_status is not None:
            shown += f"; its last answer had the HTTP status {self._refusal_status}"
        return EpisodeConnectionError(f"MCP server {self.name} is lost: {reason}{shown}")

    async def _hold(self, ready: asyncio.Future[Any]) -> None:
        try:
            async with contextlib.AsyncExitStack() as stack:
                client = await self._connect(stack)
                ready.set_result(client)
                await self._stop.wait()
        except asyncio.CancelledError:
            if not ready.done():
                ready.cancel()
            raise
        except BaseException as error:
            if ready.done():
                logger.debug("MCP server %s: the session ended", self.name, exc_info=True)
            else:
                ready.set_exception(self._refusal(error))

    async def _connect(self, stack: contextlib.AsyncExitStack) -> Any:
        import httpx2
        from mcp import Client, StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client

        where = f"servers: {self.name}"
        transport: Any
        if self._spec.url is not None:
            headers = {k: expand(v, os.environ, where) for k, v in self._spec.headers.items()}
            http = await stack.enter_async_context(
                httpx2.AsyncClient(
                    headers=headers,
                    timeout=httpx2.Timeout(30.0, read=300.0),
                    event_hooks={"response": [self._note_response]},
                )
            )
            transport = streamable_http_client(self._spec.url, http_client=http)
        else:
            env = {k: expand(v, os.environ, where) for k, v in self._spec.env.items()}
            command, *args = _command_of(self._spec, where)
            server = StdioServerParameters(command=command, args=args, env=env, cwd=self._spec.cwd)
            errlog = await stack.enter_async_context(self._stderr.reading())
            transport = stdio_client(server, errlog=errlog)
        return await stack.enter_async_context(Client(transport, mode=self._mode, cache=None))

    async def _note_response(self, response: Any) -> None:
        """Note a refusal, and inform the guard of the session; the SDK keeps both to itself."""
        request = response.request
        if request.method == "POST":
            is_refusal = response.status_code >= 400
            self._refusal_status = response.status_code if is_refusal else None
        session_id = response.headers.get(SESSION_HEADER) or request.headers.get(SESSION_HEADER)
        if session_id is None or self._is_ended:
            return
        if request.method == "DELETE":
            self._is_ended = True
            self._guard.ended(self._guard_key)
            return
        names = END_HEADERS | {name.lower() for name in self._spec.headers}
        headers = {name: value for name, value in request.headers.items() if name.lower() in names}
        headers[SESSION_HEADER] = session_id
        end = EndRequest("DELETE", str(request.url.copy_with(userinfo=b"")), headers)
        if end != self._end_request:
            self._end_request = end
            self._guard.opened(self._guard_key, [end])

    def _refusal(self, error: BaseException) -> AtroposError:
        """Return the exception of a connection that failed."""
        from mcp import MCPError

        while inner := getattr(error, "exceptions", ()):  # a group, which Python 3.10 lacks
            error = inner[0]
        if isinstance(error, AtroposError):
            return error
        text = f"{type(error).__name__}: {error}"
        is_version = isinstance(error, RuntimeError) and "protocol version" in str(error)
        if isinstance(error, MCPError) and not self._is_lost(error):
            is_version = True
        if is_version:
            return ConfigError(f"servers: {self.name}: the protocol does not fit: {text}")
        return self.lost(text)


def is_lost(code: int, message: str, *, is_program: bool) -> bool:
    """Whether an error of the protocol means that the server, or the session, is lost.

    Other errors are answers. A program that answers is there; over HTTP, an unknown session is
    reported with different codes, by servers and by the SDK.
    """
    from mcp_types import (
        CONNECTION_CLOSED,
        INTERNAL_ERROR,
        INVALID_REQUEST,
        METHOD_NOT_FOUND,
        PARSE_ERROR,
        REQUEST_TIMEOUT,
    )

    of_sdk = {
        (CONNECTION_CLOSED, "Connection closed"),
        (METHOD_NOT_FOUND, "Not Found"),  # an HTTP status of 404
        (INTERNAL_ERROR, "Server returned an error response"),  # of 500 and above
    }
    of_sessions = {CONNECTION_CLOSED, REQUEST_TIMEOUT, INVALID_REQUEST, PARSE_ERROR}
    return (code, message) in of_sdk or (not is_program and code in of_sessions)


def _command_of(spec: McpServerSpec, where: str) -> list[str]:
    """Return the command line of a server; on Linux, of a child that ends with this process."""
    command = str(spec.command)
    path = spec.env.get("PATH")
    is_local = os.sep in command and (Path(spec.cwd or ".") / command).is_file()
    if not is_local and shutil.which(command, path=path) is None:
        raise ConfigError(f"{where}: there is no program {command!r}")
    if sys.platform != "linux":
        return [command, *spec.args]
    return [sys.executable, "-I", "-S", "-c", WITH_PARENT, str(os.getpid()), command, *spec.args]


class McpEpisode(ToolEpisode):
    """One row: its question, calls on the servers, and the answer."""

    def __init__(self, adapter: McpAdapter, item: Item) -> None:
        super().__init__()
        self._adapter = adapter
        self._item = item
        self._sessions: dict[str, McpSession] = {}
        self._made: list[dict[str, Any]] = []

    async def open_session(self) -> ToolQuestion:
        self._sessions = await self._adapter.sessions_for_rollout()
        return ToolQuestion(self._item["messages"], self._adapter.tools)

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolOutcome:
        from mcp import MCPError

        args = self._adapter.args
        server, tool = self._adapter.places[name]
        try:
            call = self._sessions[server].call_tool(tool, arguments, key=self.call_key)
            result = await asyncio.wait_for(call, args.tool_timeout_s)
        except (TimeoutError, asyncio.TimeoutError):
            text = f"{name} gave no answer within {args.tool_timeout_s:g} s"
            return ToolOutcome(text, is_error=True)
        except (MCPError, UnusableAnswerError) as error:
            return ToolOutcome(str(error)[: args.max_result_characters], is_error=True)
        if not result.is_error:
            self._made.append({"name": name, "arguments": arguments})
        text = text_of(result, args.max_result_characters)
        return ToolOutcome(text, is_error=bool(result.is_error))

    async def finish(self, turn: Turn) -> Reply:
        parts: dict[str, float] = {}
        if is_answered(self._item):
            parts.update(await self._adapter.rows.parts_of(self._item, turn.text))
        expected = self._item["row"].get(self._adapter.args.expected_calls_field)
        if expected is not None:
            parts["calls"] = calls_reward(
                expected,
                self._made,
                num_calls=self.num_calls,
                penalizes_extra=self._adapter.args.penalize_extra_calls,
            )
        return Reply(reward=parts, is_done=True)

    async def close(self) -> None:
        sessions, self._sessions = self._sessions, {}
        await self._adapter.end_rollout(sessions)


def is_answered(item: Item) -> bool:
    """Whether the text of the last turn is rewarded."""
    return item.get("answer") is not None or item.get("reward_functions") is not None


def text_of(result: Any, max_characters: int) -> str:
    """Return the result of a call as text; content that is not text is named."""
    blocks = []
    for block in result.content:
        if block.type == "text":
            blocks.append(block.text)
        elif block.type == "resource" and getattr(block.resource, "text", None) is not None:
            blocks.append(block.resource.text)
        else:
            blocks.append(f"[{block.type}]")
    text = "\n".join(blocks)
    if not text and result.structured_content is not None:
        text = json.dumps(result.structured_content, ensure_ascii=False)
    if len(text) <= max_characters:
        return text
    return f"{text[:max_characters]}\n[{len(text) - max_characters} more characters]"


class McpAdapter(Adapter):
    """The tasks of a file, with the tools of MCP servers.

    Attributes:
        tools: what the policy is offered.
        places: server and name there of each tool.
        num_open: sessions that are open.
        num_started: sessions that were opened so far.
        num_lost: attempts to connect that failed.
    """

    args_cls = McpArgs
    default_settings: ClassVar[Mapping[str, Any]] = {"max_turns": 8, "max_token_length": 8192}
    limits_replies = True
    args: McpArgs

    def __init__(self, name: str, args: McpArgs, **settings: Any) -> None:
        super().__init__(name, args, **settings)
        if not args.servers:
            raise ConfigError("servers: expected at least one MCP server, by name")
        self.max_concurrent = args.max_sessions if args.sessions == "per_rollout" else None
        self.begin_timeout_s = longest_begin_s(args)
        self.rows = TaskRows(
            name,
            args,
            seed=self.seed,
            optional_fields=[args.expected_calls_field],
            rewards_field=args.rewards_field,
            needs_answer=False,
            check=self._checked,
        )
        self.tools: list[ForeignTool] = []
        self.places: dict[str, tuple[str, str]] = {}
        self.num_open = 0
        self.num_started = 0
        self.num_lost = 0
        self._shared: dict[str, McpSession] = {}
        self._guard = SessionGuard()
        self._modes = dict.fromkeys(
            args.servers, "legacy" if args.sessions == "per_rollout" else "auto"
        )
        self._connecting: dict[str, asyncio.Lock] = {}
        self._starters = asyncio.Semaphore(NUM_STARTERS)
        self._log_filter = MilestoneFilter()

    async def open(self) -> None:
        logging.getLogger("mcp.client.stdio").addFilter(self._log_filter)
        await self.rows.open()
        listed: dict[str, list[Any]] = {}
        for server in self.args.servers:
            session = await self._opened(server)
            try:
                listed[server] = await self._listed(session)
            finally:
                await self._end(session)
        self._offer(listed)

    async def _listed(self, session: McpSession) -> list[Any]:
        from mcp import MCPError

        limit_s = max(LEAST_LIST_S, self.args.connect_timeout_s)
        try:
            return await asyncio.wait_for(session.list_tools(), limit_s)
        except (TimeoutError, asyncio.TimeoutError) as error:
            raise session.lost(f"it did not list its tools within {limit_s:g} s") from error
        except (MCPError, UnusableAnswerError) as error:
            where = f"servers: {session.name}"
            raise ConfigError(f"{where}: its tools cannot be listed: {error}") from error

    async def close(self) -> None:
        shared, self._shared = self._shared, {}
        await asyncio.gather(*map(self._end, shared.values()))
        await self._guard.close()
        self.rows.close()
        logging.getLogger("mcp.client.stdio").removeFilter(self._log_filter)

    async def item(self, index: int) -> Item:
        return await self.rows.item(index)

    async def eval_items(self, limit: int) -> Sequence[Item]:
        return await self.rows.eval_items(limit)

    def start(self, item: Item) -> McpEpisode:
        return McpEpisode(self, item)

    def gold_answer(self, item: Item) -> Sequence[str] | None:
        expected = item["row"].get(self.args.expected_calls_field) or []
        calls = [f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in expected]
        answer = self.rows.gold_text(item)
        if answer is None and is_answered(item):
            return None
        return [*(["\n".join(calls)] if calls else []), answer or "Done."]

    def metrics(self) -> dict[str, float]:
        counts = {
            "sessions_open": self.num_open,
            "sessions_started": self.num_started,
            "failed_connections": self.num_lost,
        }
        return {**counts, **self.rows.metrics()}

    def state(self) -> dict[str, Any]:
        return {"num_rows": self.rows.num_rows}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.rows.num_rows = state.get("num_rows")

    async def sessions_for_rollout(self) -> dict[str, McpSession]:
        """Return a session with each server: new ones, or the shared ones if they are alive."""
        names = list(self.args.servers)
        opening = [asyncio.ensure_future(self._session_for_rollout(name)) for name in names]
        try:
            return dict(zip(names, await asyncio.gather(*opening), strict=True))
        except BaseException:
            for task in opening:
                task.cancel()
            results = await asyncio.gather(*opening, return_exceptions=True)
            if self.args.sessions == "per_rollout":
                ended = [self._end(each) for each in results if isinstance(each, McpSession)]
                await asyncio.shield(asyncio.gather(*ended))
            raise

    async def end_rollout(self, sessions: Mapping[str, McpSession]) -> None:
        if self.args.sessions == "per_rollout":
            await asyncio.gather(*map(self._end, sessions.values()))

    async def _session_for_rollout(self, name: str) -> McpSession:
        if self.args.sessions == "per_rollout":
            return await self._opened(name)
        async with self._connecting.setdefault(name, asyncio.Lock()):
            known = self._shared.get(name)
            if known is None or not known.is_alive:
                if known is not None:
                    await self._end(known)
                self._shared[name] = await self._opened(name)
            return self._shared[name]

    async def _opened(self, name: str) -> McpSession:
        """Return a new session; lost connections are tried again, with a back-off."""
        attempts = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self.args.connect_attempts),
            wait=tenacity.wait_random_exponential(FIRST_WAIT_S, max=LONGEST_WAIT_S),
            retry=tenacity.retry_if_exception_type(EpisodeConnectionError),
            reraise=True,
        )
        try:
            session: McpSession = await attempts(self._connect, name)
        except EpisodeConnectionError as error:
            raise EpisodeConnectionError(
                f"{error} ({self.args.connect_attempts} attempts to connect)"
            ) from error
        return session

    async def _connect(self, name: str) -> McpSession:
        try:
            session = await self._connected(name)
        except EpisodeConnectionError:
            self.num_lost += 1
            raise
        except ConfigError:
            if self._modes[name] == "auto":
                raise
            self._modes[name] = "auto"  # a server without the handshake
            session = await self._connected(name)
        self.num_open += 1
        self.num_started += 1
        return session

    async def _connected(self, name: str) -> McpSession:
        session = McpSession(
            name, self.args.servers[name], mode=self._modes[name], guard=self._guard
        )
        limit_s = self.args.connect_timeout_s
        is_program = self.args.servers[name].url is None
        try:
            async with self._starters if is_program else contextlib.nullcontext():
                await asyncio.wait_for(session.open(), limit_s)
        except (TimeoutError, asyncio.TimeoutError) as error:
            raise session.lost(f"it did not answer within {limit_s:g} s") from error
        return session

    async def _end(self, session: McpSession) -> None:
        self.num_open -= 1
        await session.close()

    def _offer(self, listed: Mapping[str, Sequence[Any]]) -> None:
        """Name the tools; names that several servers use get the server's name in front."""
        owners: dict[str, list[str]] = {}
        for server, tools in listed.items():
            for tool in tools:
                if server in owners.setdefault(tool.name, []):
                    raise ConfigError(f"servers: {server} lists the tool {tool.name!r} twice")
                owners[tool.name].append(server)
        for server, tools in listed.items():
            for tool in tools:
                name = tool.name if len(owners[tool.name]) == 1 else f"{server}_{tool.name}"
                if name in self.places:
                    raise ConfigError(f"servers: two tools have the name {name!r}; rename a server")
                self.places[name] = (server, tool.name)
                self.tools.append(ForeignTool(name, tool.description or "", tool.input_schema))
        if self.args.tools is not None:
            self._keep(self.args.tools)
        if not 0 < len(self.tools) <= MAX_TOOLS:
            raise ConfigError(
                f"the servers have {len(self.tools)} tools; expected 1 to {MAX_TOOLS}; --args "
                "tools=[...] selects some"
            )

    def _keep(self, wanted: Sequence[str]) -> None:
        for name in wanted:
            if name not in self.places:
                hint = near_name(name, self.places) or f"; there are {', '.join(self.places)}"
                raise ConfigError(f"tools: the servers have no tool {name!r}{hint}")
        self.tools = [tool for tool in self.tools if tool.name in wanted]

    def _checked(self, item: Item) -> Item:
        """Check that a row can be rewarded, and read its expected calls."""
        column = self.args.expected_calls_field
        expected = item["row"].get(column)
        if expected is None and not is_answered(item):
            raise ConfigError(
                f"{self.name}: a row has none of {self.args.answer_field!r}, {column!r} and "
                f"{self.args.rewards_field!r}; expected one of them"
            )
        if is_answered(item) and not self.rows.reward_of(item).reward_functions:
            raise ConfigError("reward_functions: expected one for rows with an answer")
        if expected is None:
            return item
        try:
            calls = json.loads(expected) if isinstance(expected, str) else expected
            read = [
                {"name": str(call["name"]), "arguments": given(dict(call.get("arguments") or {}))}
                for call in calls
            ]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"{self.name}: {column} is {expected!r:.200}; expected a list of "
                '{"name": ..., "arguments": {...}}'
            ) from error
        if len(read) > MAX_EXPECTED_CALLS:
            raise ConfigError(f"{self.name}: {column} has more than {MAX_EXPECTED_CALLS} calls")
        return {**item, "row": {**item["row"], column: read}}
