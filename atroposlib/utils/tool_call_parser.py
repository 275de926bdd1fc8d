"""Reading one tool call from a completion; pure."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["ParsedToolCall", "extract_tool_call", "parse_tool_call"]

logger = logging.getLogger(__name__)

_NO_TOOL = "-ERROR-"


class ParsedToolCall(NamedTuple):
    """The call in a completion; unpacks as `(name, arguments, is_error)`."""

    name: str
    """Name of the tool; `-ERROR-` without a valid call."""
    arguments: Any
    """Usually an object; any JSON value is possible."""
    is_error: bool


def extract_tool_call(text: str, preferred_tags: Sequence[str] | None = None) -> str | None:
    """Return the stripped content of the first pair of tags; None without one.

    Args:
        text: the completion.
        preferred_tags: names of tags, tried in this order; None is `tool_call`.
    """
    for tag in preferred_tags or ("tool_call",):
        _, opening, rest = text.partition(f"<{tag}>")
        content, closing, _ = rest.partition(f"</{tag}>")
        if opening and closing:
            return content.strip()
    return None


def parse_tool_call(
    response: str | None,
    available_tools: Sequence[Mapping[str, Any]] | None = None,
    preferred_tags: Sequence[str] | None = None,
) -> ParsedToolCall:
    """Read the first tool call of a completion.

    If its JSON is invalid, single quotes are replaced by double quotes, as some models need.

    Args:
        response: the completion; None, the content of some messages, has no call.
        available_tools: descriptions with `name` or `function.name`; a call of another tool is an
            error. None accepts every name.
        preferred_tags: see `extract_tool_call`.
    """
    text = extract_tool_call(response or "", preferred_tags)
    call = _read(text) if text else None
    if not isinstance(call, dict):
        return ParsedToolCall(_NO_TOOL, {}, True)
    name, arguments = call.get("name", ""), call.get("arguments", {})
    if available_tools is not None and name not in [_name_of(t) for t in available_tools]:
        logger.debug("completion calls %r, which is not among the tools", name)
        return ParsedToolCall(_NO_TOOL, arguments, True)
    return ParsedToolCall(name, arguments, False)


def _read(text: str) -> Any:
    for candidate in (text, text.replace("'", '"')):
        try:
            # Not strict: models put line breaks into strings.
            return json.loads(candidate, strict=False)
        except (ValueError, RecursionError):  # ValueError also for a number with too many digits
            continue
    return None


def _name_of(tool: Mapping[str, Any]) -> Any:
    return tool.get("name") or (tool.get("function") or {}).get("name")
