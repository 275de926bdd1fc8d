"""Formats of tool calls that only vLLM knows, read by vLLM's own parsers.

    tool_parser="minimax_m2" ─► not in `tool_formats.registry` ─► open_vllm_format ─► ToolCallFormat

Needs vllm in the environment's process. Its import blocks the process for about 20 seconds, once.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from atroposlib.envs.server_handling.tool_calls import (
    FoundCall,
    FunctionCall,
    ToolCallFormat,
    call_of,
)
from atroposlib.envs.server_handling.tool_formats import HermesFormat

__all__ = ["VllmFormat", "open_vllm_format"]

logger = logging.getLogger(__name__)

_opened: WeakKeyDictionary[Any, dict[Any, VllmFormat | None]] = WeakKeyDictionary()
"""Formats by tokenizer and class of the parser, since each session asks for one."""


class VllmFormat(ToolCallFormat):
    """Calls that a parser of vLLM finds. Calls of other origin are written in the Hermes format.

    Args:
        parser_class: Subclass of vLLM's `ToolParser`.
        tokenizer: Must have the tokens that the parser looks for.
    """

    def __init__(self, parser_class: Any, tokenizer: Any) -> None:
        self._parser_class, self._tokenizer = parser_class, copy.copy(tokenizer)
        # Parsers ask for it each time, and it takes long for a large vocabulary.
        vocabulary = tokenizer.get_vocab()
        self._tokenizer.get_vocab = lambda: vocabulary
        # Raises now rather than at the first completion: some parsers need tokens, or token ids.
        self._extracted("", [])

    def find_calls(self, text: str, start: int, tools: Sequence[Any]) -> list[FoundCall]:
        try:
            found = self._extracted(text[start:], tools)
        except Exception:  # noqa: BLE001 - parsers fail in many ways on unusual text
            return []
        if not found.tools_called:
            return []
        calls = [
            call_of({"name": each.function.name, "arguments": each.function.arguments})
            for each in found.tool_calls
        ]
        known = [call for call in calls if call is not None]
        if len(known) < len(calls):
            return []
        # The text before the calls, which some parsers strip.
        content = found.content or ""
        place = text.find(content, start)
        end = place + len(content)
        first = end if place >= 0 and end < len(text) else start
        return [FoundCall(call.name, call.arguments, first, len(text)) for call in known]

    def _extracted(self, text: str, tools: Sequence[Any]) -> Any:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        known = [tool for tool in tools if isinstance(tool, Mapping) and "function" in tool]
        request = ChatCompletionRequest(
            messages=[{"role": "user", "content": ""}], model="", tools=known or None
        )
        # A parser of its own for each completion, since some keep state.
        return self._parser_class(self._tokenizer, request.tools).extract_tool_calls(text, request)

    def render(self, calls: Sequence[FunctionCall]) -> str:
        return HermesFormat().render(calls)


def open_vllm_format(name: str, tokenizer: Any) -> VllmFormat | None:
    """Return the format of a name of vLLM's `--tool-call-parser`.

    None without vLLM, for a name that it does not know, and for a tokenizer that lacks tokens of
    the format; the latter is logged.
    """
    parser_class = None if tokenizer is None else _parser_class(name)
    if parser_class is None:
        return None
    try:
        known = _opened.setdefault(tokenizer, {})
    except TypeError:  # a tokenizer that cannot be hashed
        known = {}
    if parser_class not in known:
        known[parser_class] = _open(parser_class, tokenizer, name=name)
    return known[parser_class]


def _parser_class(name: str) -> Any:
    if importlib.util.find_spec("vllm") is None:
        return None
    if "vllm" not in sys.modules:
        logger.info("importing vllm, which may know the tool parser %r", name)
    try:
        from vllm.tool_parsers import ToolParserManager

        return ToolParserManager.get_tool_parser(name)
    except (ImportError, KeyError):
        return None


def _open(parser_class: Any, tokenizer: Any, *, name: str) -> VllmFormat | None:
    try:
        return VllmFormat(parser_class, tokenizer)
    except Exception as error:  # noqa: BLE001 - parsers raise errors of many kinds
        logger.warning("vLLM's tool parser %r cannot be used: %s", name, error)
        return None
