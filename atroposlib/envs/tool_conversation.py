"""`ToolConversation`: a question the policy may answer with the help of tools.

    question ─► turn with calls ─► results ─► turn with calls ─► … ─► turn without ─► score

Tools are described in the system message, calls read from `<tool_call>` blocks and results given
in `<tool_response>` blocks, as the Hermes and Qwen models were trained on; it works with every
chat template, since tools and results are plain text to it.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from atroposlib.envs.conversation import ChatMessage, Conversation, Reply, Turn
from atroposlib.envs.env_hooks import settle
from atroposlib.envs.reward_parts import Reward, weigh
from atroposlib.envs.tools import Tool, ToolCall, ToolResult, parse_tool_calls, run_tool_calls

__all__ = ["ToolConversation", "tool_instructions"]

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
    """Return the text that tells the policy which tools there are and how to call them."""
    definitions = "\n".join(_as_json(tool.definition()) for tool in tools)
    return INSTRUCTIONS.format(definitions=definitions)


class ToolConversation(Conversation):
    """Tool calls are run and answered until a turn has none; `score` then rates that turn.

    Args:
        messages: the question; a system message at its start is kept, the tools follow it.
        tools: functions, described by their annotations and docstrings, or `Tool`s.

    Attributes:
        tool_timeout_s: seconds one call may take.
        results: all results so far, for `score`.
    """

    tool_timeout_s: float = 30.0

    def __init__(
        self, messages: Sequence[ChatMessage], tools: Sequence[Callable[..., Any] | Tool]
    ) -> None:
        self.messages = list(messages)
        self.tools = [tool if isinstance(tool, Tool) else Tool.of(tool) for tool in tools]
        self.results: list[ToolResult] = []

    @abstractmethod
    async def score(self, turn: Turn) -> Reward:
        """Return the reward of the turn that answers, the first without a call."""

    def find_calls(self, answer: str) -> list[ToolCall]:
        """Return the calls of a turn; override it for models that write them another way."""
        return parse_tool_calls(answer)

    def reward_of_calls(self, results: Sequence[ToolResult]) -> Reward:
        """Return the reward of a turn that called tools; 0 unless overridden."""
        return 0.0

    def opening(self) -> list[ChatMessage]:
        """Return the question under a system message that describes the tools."""
        instructions = tool_instructions(self.tools)
        if self.messages and self.messages[0]["role"] == "system":
            instructions = f"{self.messages[0]['content']}\n\n{instructions}"
            return [{"role": "system", "content": instructions}, *self.messages[1:]]
        return [{"role": "system", "content": instructions}, *self.messages]

    async def reply(self, turn: Turn) -> Reply:
        """Run the calls of a turn, outside its thinking; without calls it is the answer."""
        calls = self.find_calls(turn.answer)
        if not calls:
            score = await settle(self.score(turn))
            weigh(score, {}, f"{type(self).__name__}.score returned")  # raises under its own name
            return Reply(reward=score, is_done=True)
        results = await run_tool_calls(calls, self.tools, timeout_s=self.tool_timeout_s)
        self.results += results
        blocks = [
            f"<tool_response>\n{_as_json(_shown(result))}\n</tool_response>" for result in results
        ]
        return Reply("\n".join(blocks), reward=self.reward_of_calls(results))


def _shown(result: ToolResult) -> dict[str, str]:
    key = "error" if result.is_error else "content"
    return {"name": result.name, key: result.content}


def _as_json(value: Mapping[str, Any]) -> str:
    """Return JSON with every letter as it is: escapes cost tokens, and nobody copies them right."""
    text = json.dumps(value, ensure_ascii=False)
    return text.encode("utf-8", "replace").decode()  # a lone surrogate is in no vocabulary
