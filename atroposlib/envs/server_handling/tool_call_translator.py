"""Read the tool calls of completions, and write them back into conversations.

    completion ─► parse_model_output ─► content, tool calls ─► the caller
    messages   ─► convert_messages_for_template ─► messages whose calls are text

A completion that called tools is inserted into the next prompt exactly as it was sampled, so that
the next turn continues the same tokens. It is found by the ids of its calls; spacing and key order
of their arguments do not matter. Calls that the caller changed are rendered as given.
"""

from __future__ import annotations

import logging
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from atroposlib.envs.server_handling.chat_rendering import (
    THINKING_END,
    as_mapping,
    calls_of,
    normal_form,
    reply_forms,
    spoken_text,
)
from atroposlib.envs.server_handling.tool_calls import (
    FoundCall,
    FunctionCall,
    ToolCall,
    ToolCallFormat,
    to_json,
)
from atroposlib.envs.server_handling.tool_formats import HermesFormat, registry
from atroposlib.envs.server_handling.vllm_tool_format import open_vllm_format
from atroposlib.utils.text import near_name

__all__ = ["VLLM_AVAILABLE", "FunctionCall", "ToolCall", "ToolCallTranslator", "ToolParser"]

logger = logging.getLogger(__name__)

VLLM_AVAILABLE = True

# Names imported by users of earlier versions; those without an equivalent are None.
ToolParser = ToolCallFormat
ToolParserManager = None
ChatCompletionRequest = None
ExtractedToolCallInformation = None

# Mistral's chat templates accept only ids of this length.
_ID_LENGTH = 9


class ToolCallTranslator:
    """Reads the tool calls of completions and writes them back into conversations.

    Args:
        tokenizer: Decodes completions.
        parser_name: Name of a format in `tool_formats.registry`, or of a parser of vLLM if vLLM is
            installed. For an unknown name a warning is logged, completions stay text and calls are
            rendered in the Hermes format.

    Attributes:
        parser: The format; None if its name is unknown.
        call_id_to_raw_text: The completion of each call, by the id of the call; limited to the
            `max_remembered_calls` most recently used.
    """

    max_remembered_calls = 4096

    def __init__(self, tokenizer: Any, parser_name: str = "hermes") -> None:
        self.tokenizer = tokenizer
        self.parser_name = parser_name
        self.parser: ToolCallFormat | None = registry.find(parser_name) or open_vllm_format(
            parser_name, tokenizer
        )
        self.call_id_to_raw_text: OrderedDict[str, str] = OrderedDict()
        self._answers: dict[str, _ToolAnswer] = {}
        if self.parser is None:
            logger.warning(
                "no tool-call format %r, so tool calls stay text%s; known formats: %s; others of "
                "vLLM need vllm in this process",
                parser_name,
                near_name(parser_name.lower(), registry.names()),
                ", ".join(registry.names()),
            )

    def parse_model_output(
        self, raw_text: str, tool_choice: str | None = None, tools: Sequence[Any] | None = None
    ) -> tuple[str | None, list[ToolCall] | None, str]:
        """Return content, tool calls and finish reason of a completion; never raises on its text.

        If calls are found: the text before them or None, the calls, `tool_calls`. Otherwise, and if
        one of several calls is malformed: the unchanged completion, None, `stop`. Calls inside the
        thinking are ignored. Without `tools`, or with the choice `none`, nothing is parsed.
        """
        if self.parser is None or not tools or tool_choice == "none":
            return raw_text, None, "stop"
        found = _calls_after_thinking(self.parser, raw_text, tools)
        if not found:
            return raw_text, None, "stop"
        text = raw_text[: found[0].start]
        content = text if text.strip() else None
        calls = [self._remember(call, raw_text) for call in found]
        self._remember_meaning([call.id for call in calls], content, calls)
        return content, calls, "tool_calls"

    def remember_answer(
        self, raw_text: str, content: str | None, tool_calls: Sequence[Mapping[str, Any]]
    ) -> None:
        """Store structured calls that a server returned, with the text that represents them."""
        ids = [str(call.get("id")) for call in tool_calls]
        for call_id in ids:
            self._keep(call_id, raw_text)
        self._remember_meaning(ids, content, tool_calls)

    def render_calls(self, calls: Sequence[FunctionCall]) -> str:
        """Return calls as text in this format, or in the Hermes format if it is unknown."""
        return (self.parser or HermesFormat()).render(calls)

    def reconstruct_raw_text_from_tool_calls(self, tool_calls: Sequence[Any]) -> str:
        """Return the completion that made these calls, or their rendering if it is unknown."""
        calls = [as_mapping(call) for call in tool_calls]
        known = self._recall(calls)
        if known is not None or not calls:
            return known or ""
        return self._render(calls)

    def convert_messages_for_template(
        self, messages: Sequence[Any], *, compares_content: bool = False
    ) -> list[Any]:
        """Return the messages with every assistant message that calls tools as plain text.

        The text is the completion itself if it is known; else the message's content and the
        rendered calls, on separate lines. All other messages are the same objects. With
        `compares_content`, a completion counts as unknown if the message's content differs from it.
        """
        return [self._as_text(message, compares_content) for message in messages]

    def decode_with_tool_awareness(self, token_ids: Sequence[int], has_tools: bool = False) -> str:
        """Return the text of ids; special tokens stay when they may mark tool calls."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=not has_tools))

    def _as_text(self, message: Any, compares_content: bool) -> Any:
        if not isinstance(message, Mapping) or message.get("role") != "assistant":
            return message
        tool_calls = message.get("tool_calls")
        if not tool_calls:
            return message
        calls = [as_mapping(call) for call in tool_calls]
        content = spoken_text(message.get("content"))
        text = self._recall(calls, content if compares_content else "")
        if text is None:
            rendered = self._render(calls)
            text = f"{content}\n{rendered}" if content else rendered
        return {"role": "assistant", "content": text}

    def _render(self, calls: Sequence[Mapping[str, Any]]) -> str:
        return self.render_calls([_function_of(call) for call in calls])

    def _remember_meaning(
        self, call_ids: Sequence[str], content: str | None, calls: Sequence[Any]
    ) -> None:
        answer = _ToolAnswer(content, _meaning(calls))
        self._answers |= dict.fromkeys(call_ids, answer)
        for call_id in self._answers.keys() - self.call_id_to_raw_text.keys():
            del self._answers[call_id]

    def _keep(self, call_id: str, raw_text: str) -> None:
        self.call_id_to_raw_text[call_id] = raw_text
        while len(self.call_id_to_raw_text) > self.max_remembered_calls:
            self.call_id_to_raw_text.popitem(last=False)

    def _remember(self, found: FoundCall, raw_text: str) -> ToolCall:
        call_id = found.call_id
        while call_id is None or call_id in self.call_id_to_raw_text:
            call_id = secrets.token_hex(_ID_LENGTH)[:_ID_LENGTH]
        self._keep(call_id, raw_text)
        function = FunctionCall(name=found.name, arguments=found.arguments)
        return ToolCall(id=call_id, function=function)

    def _recall(self, calls: Sequence[Mapping[str, Any]], content: str = "") -> str | None:
        """Return the completion that made these calls; None if it is unknown or differs from them.

        Marks its calls as recently used.
        """
        remembered = self.call_id_to_raw_text
        ids = [str(call.get("id")) for call in calls]
        if not ids or ids[0] not in remembered:
            return None
        answer = self._answers.get(ids[0])
        if answer is not None and not answer.is_repeated_by(calls, content):
            return None
        for call_id in ids:
            if call_id in remembered:
                remembered.move_to_end(call_id)
        return remembered[ids[0]]


class _ToolAnswer(NamedTuple):
    """Answer for one completion that calls tools."""

    content: str | None
    meaning: list[tuple[str, str]]
    """Name and canonical arguments of each call."""

    def is_repeated_by(self, calls: Sequence[Mapping[str, Any]], content: str) -> bool:
        """Whether a message repeats this answer, possibly without its text or its thinking."""
        forms = reply_forms(self.content or "", has_calls=True)
        return _meaning(calls) == self.meaning and normal_form(content) in forms


def _meaning(calls: Sequence[Any]) -> list[tuple[str, str]]:
    return [(name, arguments) for _, name, arguments in calls_of(calls)]


def _calls_after_thinking(
    parser: ToolCallFormat, text: str, tools: Sequence[Any]
) -> list[FoundCall]:
    """Return the calls of a completion after the `</think>` that ends its thinking.

    The prompt may have opened the thinking, so only its end is searched. A tag inside a call, such
    as in the text of an argument, is ignored.
    """
    starts = [0]
    if THINKING_END in text:
        # Only the first and the last end: a search after each would take quadratic time.
        ends = (text.index(THINKING_END), text.rindex(THINKING_END))
        starts += [end + len(THINKING_END) for end in ends]
    calls: list[FoundCall] = []
    for start in starts:
        calls = parser.find_calls(text, start, tools)
        thinking_end = text.find(THINKING_END, start)
        is_inside_call = any(call.start <= thinking_end < call.end for call in calls)
        if thinking_end < 0 or is_inside_call or (calls and calls[0].start > thinking_end):
            break
    return calls


def _function_of(call: Mapping[str, Any]) -> FunctionCall:
    function = as_mapping(call.get("function"))
    arguments = function.get("arguments", "")
    if not isinstance(arguments, str):
        arguments = to_json(arguments) or ""
    return FunctionCall(name=str(function.get("name", "")), arguments=arguments)
