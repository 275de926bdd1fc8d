"""Python functions as tools of a model: description, calls and errors.

    def add(a: int, b: int) -> int   ─► {"name": "add", "description": "Add two numbers.",
    docstring: Add two numbers.           "parameters": {"type": "object", "properties": {
               Args:                         "a": {"type": "integer", "description": "first"},
                   a: first                  "b": {"type": "integer"}},
                                             "required": ["a", "b"]}}

    completion ─► parse_tool_calls ─► run_tool_calls ─► results for the model

An error of a call is also a result: the model reads it and may correct the call.

A parameter annotated as `IdempotencyKey` is not shown to the model: it receives a key of the call,
by which a service recognizes a call that is repeated after its environment was killed.

`ToolConversation`: a question that the policy may answer with the help of tools.

    question ─► turn with calls ─► results ─► turn with calls ─► … ─► turn without ─► score

The system message describes the tools, calls are read from `<tool_call>` blocks, and results are
returned in `<tool_response>` blocks: the format of the Hermes and Qwen models. It works with every
chat template, for which tools and results are plain text.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from atroposlib.envs.conversation import ChatMessage, Conversation, Reply, Turn
from atroposlib.envs.reporting import Reward, weigh
from atroposlib.errors import ConfigError
from atroposlib.utils.aio import end_task, settle
from atroposlib.utils.tool_call_parser import parse_tool_call
from atroposlib.utils.tracing import child_span, tool_span

__all__ = [
    "IdempotencyKey",
    "Tool",
    "ToolCall",
    "ToolConversation",
    "ToolResult",
    "parse_tool_calls",
    "response_block",
    "run_tool_calls",
    "tool_instructions",
]

logger = logging.getLogger(__name__)

_KEY_MARK = "idempotency key"
IdempotencyKey = Annotated[str, _KEY_MARK]
"""Type of a parameter of a tool that receives the key of the call: rollout, turn and number.

Example:
    async def book(seat: str, key: IdempotencyKey) -> str:
        answer = await client.post("/book", json={"seat": seat}, headers={"Idempotency-Key": key})
"""

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_ARGUMENT = re.compile(r"(\w+)(?: \([^)]*\))?: *(.*)")


class ToolCall(BaseModel):
    """One tool call of a completion."""

    name: str = ""
    """Name of the tool."""
    arguments: Any = None
    """JSON value of the completion, usually an object."""
    error: str | None = None
    """Description of a syntax error; None for a valid call."""


class ToolResult(BaseModel):
    """The result of a call."""

    name: str
    """Name of the tool."""
    content: str
    """Text for the model."""
    is_error: bool = False
    """Whether `content` describes an error."""


@dataclass(frozen=True)
class Tool:
    """A function that a model may call; created by `Tool.of`."""

    name: str
    """Name of the function."""
    description: str
    """The docstring up to its sections."""
    function: Callable[..., Any]
    """Function of keyword arguments; one that is not a coroutine function runs in a thread."""
    arguments_cls: type[BaseModel]
    """Model that validates the arguments."""
    key_parameters: tuple[str, ...] = ()
    """Names of the parameters that receive the key of the call."""

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Tool:
        """Describe a function by its signature, annotations and docstring.

        Args:
            function: function or coroutine function with annotated parameters. The `Args:` section
                of its docstring describes the arguments.

        Raises:
            ConfigError: a parameter cannot be given by name or has no annotation.
        """
        text = inspect.getdoc(function) or ""
        hints = get_type_hints(function, include_extras=True)
        described = _described_arguments(text)
        fields: dict[str, Any] = {}
        keys = tuple(name for name, hint in hints.items() if hint == IdempotencyKey)
        for name, parameter in inspect.signature(function).parameters.items():
            _check_parameter(function, parameter, hints)
            if name in keys:
                continue
            is_required = parameter.default is parameter.empty
            default = Field(
                ... if is_required else parameter.default, description=described.get(name)
            )
            fields[name] = (hints[name], default)
        name = function.__name__
        model = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        summary = re.split(r"\n\s*\n?\w+:\n", text)[0].strip()
        return cls(name, summary, function, model, keys)

    def definition(self) -> dict[str, Any]:
        """Return the description in the format of the chat APIs."""
        schema = _without_titles(self.arguments_cls.model_json_schema())
        schema.setdefault("properties", {})
        described = {"name": self.name, "description": self.description, "parameters": schema}
        return {"type": "function", "function": described}

    async def run(self, arguments: Any, *, timeout_s: float, key: str = "") -> ToolResult:
        """Run a call; an error becomes a result for the model.

        After a timeout, a function that is not a coroutine function continues in its thread; run
        slow functions in a score pool or another process.

        Args:
            arguments: JSON value of the completion.
            timeout_s: time limit in seconds.
            key: idempotency key of the call, for parameters annotated as `IdempotencyKey`.
        """
        with tool_span(self.name) as span:
            result = await self._run(arguments, timeout_s, key)
            span.set({"rl.tool.is_error": result.is_error})
            return result

    async def _run(self, arguments: Any, timeout_s: float, key: str) -> ToolResult:
        try:
            checked = self.arguments_cls.model_validate({} if arguments is None else arguments)
        except ValidationError as error:
            return ToolResult(name=self.name, content=_argument_error(error), is_error=True)
        values = {name: getattr(checked, name) for name in type(checked).model_fields}
        values |= dict.fromkeys(self.key_parameters, key)
        # Not `wait_for`, which raises the function's own cancellation like one of the rollout.
        answering = asyncio.ensure_future(self._answer(values))
        try:
            await asyncio.wait({answering}, timeout=timeout_s)
            is_late = not answering.done()
        finally:
            if not answering.done():
                await end_task(answering)
        if is_late:
            content = f"{self.name} gave no answer within {timeout_s:g} s"
            return ToolResult(name=self.name, content=content, is_error=True)
        try:
            return ToolResult(name=self.name, content=_text_of(answering.result()))
        except (Exception, asyncio.CancelledError) as error:  # of the author's function: a result
            logger.debug("tool %s raised", self.name, exc_info=True)
            content = f"{type(error).__name__}: {error}"
            return ToolResult(name=self.name, content=content, is_error=True)

    async def _answer(self, values: Mapping[str, Any]) -> Any:
        if inspect.iscoroutinefunction(self.function):
            return await self.function(**values)
        return await asyncio.to_thread(self.function, **values)


def _text_of(answer: Any) -> str:
    return (
        answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, default=str)
    )


def parse_tool_calls(text: str) -> list[ToolCall]:
    """Parse the `<tool_call>` blocks of a completion; calls that are not JSON have an error."""
    calls = []
    for content in _CALL.findall(text):
        name, arguments, is_error = parse_tool_call(f"<tool_call>{content}</tool_call>")
        if is_error or not isinstance(name, str) or not name:
            expected = '{"name": ..., "arguments": {...}}'
            calls.append(ToolCall(error=f"a tool call must be a JSON object as {expected}"))
        else:
            calls.append(ToolCall(name=name, arguments=arguments))
    return calls


async def run_tool_calls(
    calls: Sequence[ToolCall], tools: Sequence[Tool], *, timeout_s: float, key: str = ""
) -> list[ToolResult]:
    """Run calls concurrently and return their results in the same order.

    `key` is that of the turn; the key of a call ends in its number.
    """
    by_name = {tool.name: tool for tool in tools}

    async def answer(number: int, call: ToolCall) -> ToolResult:
        tool = by_name.get(call.name)
        if call.error is None and tool is not None:
            call_key = f"{key}-{number}" if key else ""
            return await tool.run(call.arguments, timeout_s=timeout_s, key=call_key)
        unknown = f"there is no tool {call.name!r}; there are {', '.join(by_name)}"
        return ToolResult(name=call.name, content=call.error or unknown, is_error=True)

    return list(await asyncio.gather(*(answer(*numbered) for numbered in enumerate(calls))))


def _check_parameter(
    function: Callable[..., Any], parameter: inspect.Parameter, hints: Mapping[str, Any]
) -> None:
    where = f"tool {function.__name__}: parameter {parameter.name!r}"
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise ConfigError(f"{where} cannot be given by name; write each parameter out")
    if parameter.name not in hints:
        raise ConfigError(f"{where} has no annotation, from which the model learns its type")


def _described_arguments(docstring: str) -> dict[str, str]:
    """Return the descriptions of the arguments in a Google-style docstring."""
    found = re.search(r"^(?:Args|Arguments):\n((?:[ \t]+.*(?:\n|\Z)|\n)+)", docstring, re.MULTILINE)
    if not found:
        return {}
    lines = [line for line in found[1].splitlines() if line.strip()]
    indent = min(len(line) - len(line.lstrip()) for line in lines)
    described: dict[str, str] = {}
    latest = ""
    for line in lines:
        entry = _ARGUMENT.fullmatch(line[indent:])
        if entry:
            latest = entry[1]
            described[latest] = entry[2]
        elif latest:
            described[latest] = f"{described[latest]} {line.strip()}"
    return described


def _without_titles(schema: Any) -> Any:
    """Remove pydantic's titles from a schema, but not an argument called `title`."""
    if isinstance(schema, list):
        return [_without_titles(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _without_titles(value)
        for key, value in schema.items()
        if key != "title" or not isinstance(value, str)
    }


def _argument_error(error: ValidationError) -> str:
    reasons = [
        f"{'.'.join(str(part) for part in detail['loc']) or 'arguments'}: {detail['msg']}"
        for detail in error.errors(include_url=False)
    ]
    return "wrong arguments: " + "; ".join(reasons)


INSTRUCTIONS = """# Tools

You may call one or more of the functions described within <tools></tools>:
<tools>
{definitions}
</tools>

For each call, write a JSON object with the function's name and arguments within
<tool_call></tool_call> tags:
<tool_call>
{{"name": "function-name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


def tool_instructions(tools: Sequence[Tool]) -> str:
    """Return the instructions for the policy: the tools and the format of a call."""
    definitions = "\n".join(_as_json(tool.definition()) for tool in tools)
    return INSTRUCTIONS.format(definitions=definitions)


class ToolConversation(Conversation):
    """Runs the tool calls of each turn; the first turn without a call is scored.

    Args:
        messages: the question; the tools are appended to a system message at its start.
        tools: functions with annotations and docstrings, or `Tool`s.

    Attributes:
        tool_timeout_s: time limit of one call, in seconds.
        max_calls: maximum number of calls in a turn; the others are not run, and have one error.
        results: all results so far.
    """

    tool_timeout_s: float = 30.0
    max_calls: int = 32

    def __init__(
        self, messages: Sequence[ChatMessage], tools: Sequence[Callable[..., Any] | Tool]
    ) -> None:
        self.messages = list(messages)
        self.tools = [tool if isinstance(tool, Tool) else Tool.of(tool) for tool in tools]
        self.results: list[ToolResult] = []

    @abstractmethod
    async def score(self, turn: Turn) -> Reward:
        """Return the reward of the answer, which is the first turn without a call."""

    def find_calls(self, answer: str) -> list[ToolCall]:
        """Return the calls of a turn; override it for models with another format."""
        return parse_tool_calls(answer)

    def reward_of_calls(self, results: Sequence[ToolResult]) -> Reward:
        """Return the reward of a turn with tool calls; 0 by default."""
        return 0.0

    def opening(self) -> list[ChatMessage]:
        instructions = tool_instructions(self.tools)
        if self.messages and self.messages[0]["role"] == "system":
            instructions = f"{self.messages[0]['content']}\n\n{instructions}"
            return [{"role": "system", "content": instructions}, *self.messages[1:]]
        return [{"role": "system", "content": instructions}, *self.messages]

    async def reply(self, turn: Turn) -> Reply:
        calls = self.find_calls(turn.answer)
        if not calls:
            with child_span("rl.score"):
                score = await settle(self.score(turn))
            weigh(score, {}, f"{type(self).__name__}.score returned")  # the error names `score`
            return Reply(reward=score, is_done=True)
        results = await run_tool_calls(
            calls[: self.max_calls], self.tools, timeout_s=self.tool_timeout_s, key=turn.key
        )
        if len(calls) > self.max_calls:
            excess = f"calls after the first {self.max_calls} of a turn are not run"
            results.append(ToolResult(name="", content=excess, is_error=True))
        self.results += results
        blocks = [response_block(_as_json(_shown(result))) for result in results]
        return Reply("\n".join(blocks), reward=self.reward_of_calls(results))


def response_block(text: str) -> str:
    """Return the block with the JSON text of a result, which cannot end the block."""
    inert = text.replace("</tool_response", "<\\/tool_response")  # the same text in JSON
    return f"<tool_response>\n{inert}\n</tool_response>"


def _shown(result: ToolResult) -> dict[str, str]:
    key = "error" if result.is_error else "content"
    return {"name": result.name, key: result.content}


def _as_json(value: Mapping[str, Any]) -> str:
    """Return JSON without escaped letters, which cost tokens and which models copy wrongly."""
    text = json.dumps(value, ensure_ascii=False)
    return text.encode("utf-8", "replace").decode()  # a lone surrogate is in no vocabulary
