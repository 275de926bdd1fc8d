"""Between tool calls in the form of the chat APIs and the text a model reads and writes.

    completion ── parse_model_output ──► content, tool calls, finish reason
                        │ remembers id -> completion
    messages ◄── convert_messages_for_template ── messages with tool calls

A completion that called tools goes back into the prompt exactly as it was sampled, so that the
next turn continues the same tokens. The parsers are this package's own; `VLLM_AVAILABLE` says that
tool calls are parsed, as it does for users who know it from versions that needed vLLM for it.
"""

from __future__ import annotations

import logging
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from atroposlib.envs.server_handling.tool_formats import (
    FoundCall,
    FunctionCall,
    HermesFormat,
    ToolCall,
    ToolCallFormat,
    registry,
)
from atroposlib.envs.server_handling.tool_formats.json_calls import to_json

__all__ = ["VLLM_AVAILABLE", "FunctionCall", "ToolCall", "ToolCallTranslator", "ToolParser"]

logger = logging.getLogger(__name__)

VLLM_AVAILABLE = True

# Names that users of earlier versions import from here; those without a meaning here are None.
ToolParser = ToolCallFormat
ToolParserManager = None
ChatCompletionRequest = None
ExtractedToolCallInformation = None

_THINKING_END = "</think>"
# Mistral's chat templates refuse ids of any other length.
_ID_LENGTH = 9


class ToolCallTranslator:
    """Reads the tool calls of completions and writes them back into conversations.

    Args:
        tokenizer: Decodes completions.
        parser_name: Name of a format in `tool_formats.registry`. With an unknown one a warning
            is logged, completions stay text and calls are written as Hermes has them.

    Attributes:
        parser: The format, None if its name is unknown.
        call_id_to_raw_text: The completion each call came from, by the id of the call; the
            `max_remembered_calls` used last.
    """

    max_remembered_calls = 4096

    def __init__(self, tokenizer: Any, parser_name: str = "hermes") -> None:
        self.tokenizer = tokenizer
        self.parser_name = parser_name
        self.parser: ToolCallFormat | None = registry.find(parser_name)
        self.call_id_to_raw_text: OrderedDict[str, str] = OrderedDict()
        if self.parser is None:
            near = registry.nearest(parser_name)
            logger.warning(
                "no tool-call format %r, so tool calls stay text; %sthere are %s",
                parser_name,
                f"did you mean {near!r}? " if near else "",
                ", ".join(registry.names()),
            )

    def parse_model_output(
        self, raw_text: str, tool_choice: str | None = None, tools: Sequence[Any] | None = None
    ) -> tuple[str | None, list[ToolCall] | None, str]:
        """Return content, tool calls and finish reason of a completion; never raises on its text.

        Calls found: the text before them or None, the calls, `tool_calls`. Otherwise, also when
        one of several calls is broken: the completion as it is, None, `stop`. Calls a model
        mentions while thinking are not made.

        Args:
            raw_text: The completion.
            tool_choice: `none` leaves the completion as it is.
            tools: Definitions the model was given; without any the completion is left as it is.
        """
        if self.parser is None or not tools or tool_choice == "none":
            return raw_text, None, "stop"
        found = _calls_after_thinking(self.parser, raw_text, tools)
        if not found:
            return raw_text, None, "stop"
        calls = [self._remember(call, raw_text) for call in found]
        content = raw_text[: found[0].start]
        return (content if content.strip() else None), calls, "tool_calls"

    def reconstruct_raw_text_from_tool_calls(self, tool_calls: Sequence[Any]) -> str:
        """Return the completion that made these calls, or their rendering when it is unknown.

        Args:
            tool_calls: Calls of one assistant message, in the form of the chat APIs.
        """
        calls = [_as_mapping(call) for call in tool_calls]
        known = self._recall(calls)
        if known is not None or not calls:
            return known or ""
        return (self.parser or HermesFormat()).render([_function_of(call) for call in calls])

    def convert_messages_for_template(self, messages: Sequence[Any]) -> list[Any]:
        """Return the messages with every assistant message that calls tools as plain text.

        The completion itself where it is known; else the message's content and the rendered
        calls, on lines of their own. All other messages are the same objects.
        """
        return [self._as_text(message) for message in messages]

    def decode_with_tool_awareness(self, token_ids: Sequence[int], has_tools: bool = False) -> str:
        """Return the text of ids; special tokens stay when they may mark tool calls."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=not has_tools))

    def _as_text(self, message: Any) -> Any:
        if not isinstance(message, Mapping) or message.get("role") != "assistant":
            return message
        tool_calls = message.get("tool_calls")
        if not tool_calls:
            return message
        text = self.reconstruct_raw_text_from_tool_calls(tool_calls)
        content = message.get("content")
        if content and self._recall([_as_mapping(tool_calls[0])]) is None:
            text = f"{_text_of_parts(content)}\n{text}"
        return {"role": "assistant", "content": text}

    def _remember(self, found: FoundCall, raw_text: str) -> ToolCall:
        """Give a call an id that no other call has, and keep its completion under it."""
        call_id = found.call_id
        while call_id is None or call_id in self.call_id_to_raw_text:
            call_id = secrets.token_hex(_ID_LENGTH)[:_ID_LENGTH]
        self.call_id_to_raw_text[call_id] = raw_text
        while len(self.call_id_to_raw_text) > self.max_remembered_calls:
            self.call_id_to_raw_text.popitem(last=False)
        function = FunctionCall(name=found.name, arguments=found.arguments)
        return ToolCall(id=call_id, function=function)

    def _recall(self, calls: Sequence[Mapping[str, Any]]) -> str | None:
        """Return the completion of the first call and note that its calls are in use."""
        remembered = self.call_id_to_raw_text
        ids = [str(call.get("id")) for call in calls]
        for call_id in ids:
            if call_id in remembered:
                remembered.move_to_end(call_id)
        return remembered.get(ids[0]) if ids else None


def _calls_after_thinking(
    parser: ToolCallFormat, text: str, tools: Sequence[Any]
) -> list[FoundCall]:
    """Return the calls of a completion but those before the `</think>` that ends its thinking.

    The prompt may have opened the thinking, so only its end is looked for. Inside of a call,
    such as in the text of an argument, the tag means nothing.
    """
    starts = [0]
    if _THINKING_END in text:
        # Of many ends only the outer ones: a search behind each would cost their square.
        ends = (text.index(_THINKING_END), text.rindex(_THINKING_END))
        starts += [end + len(_THINKING_END) for end in ends]
    calls: list[FoundCall] = []
    for start in starts:
        calls = parser.find_calls(text, start, tools)
        thinking_end = text.find(_THINKING_END, start)
        is_inside_call = any(call.start <= thinking_end < call.end for call in calls)
        if thinking_end < 0 or is_inside_call or (calls and calls[0].start > thinking_end):
            break
    return calls


def _as_mapping(call: Any) -> Mapping[str, Any]:
    """Return a call as a mapping; agents also pass on the objects of their client."""
    if isinstance(call, Mapping):
        return call
    dump = getattr(call, "model_dump", None)
    dumped = dump() if callable(dump) else None
    return dumped if isinstance(dumped, Mapping) else {}


def _function_of(call: Mapping[str, Any]) -> FunctionCall:
    function = _as_mapping(call.get("function"))
    arguments = function.get("arguments", "")
    if not isinstance(arguments, str):
        arguments = to_json(arguments) or ""
    return FunctionCall(name=str(function.get("name", "")), arguments=arguments)


def _text_of_parts(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) else ()
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))
