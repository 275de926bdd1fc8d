"""`ToolEpisode`: an episode whose tools run in another program.

    open_session ─► question, tools ─► turn with calls ─► call_tool x N ─► results ─► …
                                       turn without a call ─► finish ─► reward

The policy sees tools and results as in `atroposlib.envs.tools`: definitions in the system message,
calls in `<tool_call>` blocks, results in `<tool_response>` blocks.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from atroposlib.adapters.interface import Episode
from atroposlib.envs.conversation import ChatMessage, Reply, Turn
from atroposlib.envs.reporting import Reward
from atroposlib.envs.tools import INSTRUCTIONS, ToolCall, parse_tool_calls, response_block
from atroposlib.errors import ConfigError
from atroposlib.utils.text import near_name

__all__ = [
    "ForeignTool",
    "ToolEpisode",
    "ToolOutcome",
    "ToolQuestion",
    "answer_argument",
    "why_not_sent",
]

MAX_CALLS = 16
"""Calls of one turn that are run; further ones get an error as their result."""
MAX_NAMES = 32
"""Tools that the error of a call of an unknown tool lists."""
MAX_DEPTH = 64
"""Lists and objects within each other; clients of other libraries fail at more."""


@dataclass(frozen=True)
class ForeignTool:
    """The description of a tool that another program runs."""

    name: str
    description: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """JSON schema of the arguments, an object."""

    def definition(self) -> dict[str, Any]:
        """Return the description in the format of the chat APIs."""
        schema = {"type": "object", "properties": {}, **self.parameters}
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": schema,
            },
        }


@dataclass(frozen=True)
class ToolQuestion:
    """The start of an episode."""

    messages: Sequence[ChatMessage]
    """The question; a system message may be its first."""
    tools: Sequence[ForeignTool]

    def opening(self) -> list[ChatMessage]:
        """Return the messages with the instructions for the tools in the system message."""
        messages = list(self.messages)
        if not self.tools:
            return messages
        definitions = "\n".join(
            json.dumps(tool.definition(), ensure_ascii=False) for tool in self.tools
        )
        instructions = INSTRUCTIONS.format(definitions=definitions)
        if messages and messages[0]["role"] == "system":
            instructions = f"{messages[0]['content']}\n\n{instructions}"
            messages = messages[1:]
        return [{"role": "system", "content": instructions}, *messages]


@dataclass(frozen=True)
class ToolOutcome:
    """The result of one call."""

    text: str
    """Result for the policy."""
    is_error: bool = False
    reward: Reward = 0.0
    """Reward of the call, added to that of its turn."""
    is_done: bool = False
    """Whether the call ended the episode."""


class ToolEpisode(Episode):
    """Runs the calls of each turn in another program, in the order in which they were written.

    Attributes:
        num_calls: calls so far.
        num_failed_calls: those that were malformed, named no tool, or ended with an error.
        call_key: idempotency key of the call that `call_tool` runs; empty if its turn has none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0
        self.num_failed_calls = 0
        self.call_key = ""
        self._tools: dict[str, ForeignTool] = {}

    @abstractmethod
    async def open_session(self) -> ToolQuestion:
        """Start a session and return its question and tools."""

    @abstractmethod
    async def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolOutcome:
        """Run one call of a tool that exists."""

    @abstractmethod
    async def finish(self, turn: Turn) -> Reply:
        """Answer the first turn without a call; usually its reward, with `is_done`."""

    def note_call(self, call: ToolCall, outcome: ToolOutcome) -> None:
        """Note a call and its outcome, also of a call that was not run; for transcripts."""
        return

    async def begin(self) -> Sequence[ChatMessage]:
        question = await self.open_session()
        self._tools = {tool.name: tool for tool in question.tools}
        return question.opening()

    async def reply(self, turn: Turn) -> Reply:
        calls = parse_tool_calls(turn.answer) if self._tools else []
        if not calls:
            return await self.finish(turn)
        outcomes = []
        for position, call in enumerate(calls):
            self.call_key = f"{turn.key}-{position}" if turn.key else ""
            outcomes.append(await self._outcome_of(call, position))
            self.note_call(call, outcomes[-1])
            if outcomes[-1].is_done:
                break
        self.metrics.update(tool_calls=self.num_calls, failed_tool_calls=self.num_failed_calls)
        blocks = [_block(call.name, o) for call, o in zip(calls, outcomes, strict=False)]
        return Reply(
            "\n".join(blocks),
            reward=_sum_of([outcome.reward for outcome in outcomes]),
            is_done=outcomes[-1].is_done,
        )

    async def _outcome_of(self, call: ToolCall, position: int) -> ToolOutcome:
        self.num_calls += 1
        problem = call.error
        if problem is None and position >= MAX_CALLS:
            problem = f"at most {MAX_CALLS} calls of one turn are run"
        if problem is None and call.name not in self._tools:
            names = list(self._tools)
            known = ", ".join(names[:MAX_NAMES]) + (", ..." if len(names) > MAX_NAMES else "")
            hint = near_name(call.name, names) if len(names) > MAX_NAMES else ""
            problem = f"there is no tool {call.name!r}{hint}; there are {known}"
        arguments = {} if call.arguments is None else call.arguments
        if problem is None and not isinstance(arguments, dict):
            problem = "arguments: expected a JSON object"
        if problem is None:
            problem = why_not_sent(arguments)
        if problem is None:
            outcome = await self.call_tool(call.name, arguments)
        else:
            outcome = ToolOutcome(problem, is_error=True)
        self.num_failed_calls += outcome.is_error
        return outcome


def why_not_sent(value: Any) -> str | None:
    """Return why a client could fail to send a JSON value of the policy; None if it can be sent.

    Python's parser accepts lone surrogates and deep values. Some clients lose their connection when
    they encode them, which would fail the rollout, and others that share the connection.
    """
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        texts = [each for each in level if isinstance(each, str)]
        texts += [str(key) for each in level if isinstance(each, dict) for key in each]
        if any("\ud800" <= character <= "\udfff" for text in texts for character in text):
            return "arguments: a text has half of a surrogate pair; expected Unicode characters"
        inner = [e.values() if isinstance(e, dict) else e for e in level if not isinstance(e, str)]
        level = [each for values in inner if isinstance(values, Iterable) for each in values]
        if not level:
            return None
    return f"arguments: expected up to {MAX_DEPTH} lists and objects within each other"


def answer_argument(tool: ForeignTool, answer: str) -> dict[str, Any]:
    """Return the arguments of a call that passes an answer to a tool.

    Raises:
        ConfigError: it is not clear which argument takes the answer.
    """
    names = list(tool.parameters.get("properties") or {})
    required = [name for name in tool.parameters.get("required") or () if name in names]
    fitting = names if len(names) == 1 else required
    if len(fitting) != 1:
        raise ConfigError(
            f"answer_tool: {tool.name!r} takes the arguments {names}; expected a tool with one "
            "argument, or one required argument"
        )
    return {fitting[0]: answer}


def _sum_of(rewards: Sequence[Reward]) -> Reward:
    """Return the sum of rewards; parts with the same name are added."""
    numbers = [reward for reward in rewards if not isinstance(reward, Mapping)]
    if len(numbers) == len(rewards):
        return sum(numbers)
    parts: dict[str, float] = {}
    for reward in rewards:
        named = reward if isinstance(reward, Mapping) else {"reward": reward}
        for name, value in named.items():
            parts[name] = parts.get(name, 0.0) + value
    return parts


def _block(name: str, outcome: ToolOutcome) -> str:
    shown = {"name": name, "error" if outcome.is_error else "content": outcome.text}
    text = json.dumps(shown, ensure_ascii=False).encode("utf-8", "replace").decode()
    return response_block(text)
