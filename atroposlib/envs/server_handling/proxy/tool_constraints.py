"""Convert a request's demands on tool calls to a structural tag that constrains sampling; pure.

tool_choice, parallel_tool_calls ─► ToolDemand ─► structural tag ─► the engine's structured outputs

The engine then samples only allowed tokens, and its logprobs are normalized over them. Arguments
are constrained to an object, and to their schema if the tool is `strict`. A `strict` tool alone
adds no constraint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from atroposlib.envs.server_handling.proxy.refusals import bad_request
from atroposlib.envs.server_handling.tool_formats import ToolCallFormat

__all__ = ["ToolDemand", "demand_of", "strict_fields", "structural_tag"]

_MODES = ("none", "auto", "required")
_BETWEEN = "\n\n"
"""Text between thinking and the first call."""

Form = dict[str, Any]


class ToolDemand(NamedTuple):
    """Constraints on the tool calls of a reply."""

    names: tuple[str, ...]
    """Tools that may be called."""
    is_required: bool
    """Whether the reply must contain a call."""
    is_single: bool
    """Whether the reply may contain at most one call."""
    fields: tuple[str, ...]
    """Fields of the request that set the constraints."""


def demand_of(
    tool_choice: Any, parallel_tool_calls: bool | None, tools: Sequence[Any] | None
) -> ToolDemand | None:
    """Return the constraints of a chat request on its calls; None without any.

    Args:
        tool_choice: `none`, `auto`, `required`, a function, or `allowed_tools`.
        parallel_tool_calls: False for one call at most.
        tools: Definitions in the format of the chat APIs.

    Raises:
        ProxyRefusal: 400 for a malformed choice, an unknown tool, or a required call without tools.
    """
    known = [name for name in map(_name_of, tools or ()) if name is not None]
    names, is_required = list(known), False
    if isinstance(tool_choice, Mapping):
        names, is_required = _chosen(tool_choice)
        unknown = [name for name in names if name not in known]
        if unknown:
            raise bad_request(
                f"tool_choice: no tool of the request is named {unknown[0]!r}; there are: "
                f"{', '.join(known) or 'none'}",
                param="tool_choice",
            )
    elif tool_choice is not None:
        if tool_choice not in _MODES:
            raise bad_request(
                f"tool_choice: expected one of {', '.join(_MODES)}, or a function; "
                f"got {tool_choice!r}",
                param="tool_choice",
            )
        is_required = tool_choice == "required"
    if is_required and not known:
        raise bad_request(
            "tool_choice is only allowed when tools are specified", param="tool_choice"
        )
    is_single = parallel_tool_calls is False and bool(known) and tool_choice != "none"
    is_limited = is_required or names != known
    fields = [("tool_choice", is_limited), ("parallel_tool_calls", is_single)]
    if not is_limited and not is_single:
        return None
    demanding = tuple(name for name, is_set in fields if is_set)
    return ToolDemand(tuple(names), is_required, is_single, demanding)


def strict_fields(tool_choice: Any, tools: Sequence[Any] | None) -> tuple[str, ...]:
    """Return the field name `tools.strict` if a tool sets it, else nothing.

    Without other constraints the field is ignored: clients set it for every tool by default, and a
    structural tag changes the logprobs of the whole reply.
    """
    is_strict = any(_function_of(tool).get("strict") is True for tool in tools or ())
    return ("tools.strict",) if is_strict and tool_choice != "none" else ()


def structural_tag(
    demand: ToolDemand,
    tools: Sequence[Any],
    tool_format: ToolCallFormat,
    *,
    is_thinking: bool,
) -> str | None:
    """Return the structural tag of a reply that meets a demand, as JSON text for xgrammar.

    A reply may start with thinking. A required call follows immediately.

    Args:
        demand: Constraints on the reply.
        tools: Definitions in the format of the chat APIs.
        tool_format: Syntax in which the model writes calls.
        is_thinking: Whether the prompt ends within the model's thinking.

    Returns:
        The text; None if the calls of this format cannot be described.
    """
    tags = []
    for function in map(_function_of, tools):
        name = function.get("name")
        frame = tool_format.frame_of(name) if name in demand.names else None
        if frame is not None:
            schema = function.get("parameters") if function.get("strict") else None
            content = {"type": "json_schema", "json_schema": schema or {"type": "object"}}
            tags.append({"type": "tag", "begin": frame[0], "content": content, "end": frame[1]})
    if len(tags) != len(set(demand.names)):
        return None
    if demand.is_required:
        calls: Form = {
            "type": "tags_with_separator",
            "tags": tags,
            "separator": tool_format.separator,
            "at_least_one": True,
            "stop_after_first": demand.is_single,
        }
    elif tool_format.trigger is None:
        return None
    else:
        calls = {
            "type": "triggered_tags",
            "triggers": [tool_format.trigger],
            "tags": tags,
            "at_least_one": False,
            "stop_after_first": demand.is_single,
        }
    between = {"type": "const_string", "value": _BETWEEN}
    thinking = _tag_of_thinking("" if is_thinking else "<think>")
    parts = [thinking, between, calls] if demand.is_required else [thinking, calls]
    form: Form = {"type": "sequence", "elements": parts}
    if not is_thinking:
        form = {"type": "or", "elements": [calls, form]}
    return json.dumps({"type": "structural_tag", "format": form})


def _tag_of_thinking(begin: str) -> Form:
    return {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": "</think>"}


def _chosen(choice: Mapping[str, Any]) -> tuple[list[str], bool]:
    """Return the tools that a choice names, and whether one of them must be called."""
    kind = choice.get("type")
    if kind == "function" and isinstance(_name_of(choice), str):
        return [str(_name_of(choice))], True
    allowed = choice.get("allowed_tools", choice)
    if kind == "allowed_tools" and isinstance(allowed, Mapping):
        names = [_name_of(tool) for tool in allowed.get("tools") or ()]
        mode = allowed.get("mode", "auto")
        if names and all(isinstance(name, str) for name in names) and mode in _MODES[1:]:
            return [str(name) for name in names], mode == "required"
    raise bad_request(
        f"tool_choice: expected {', '.join(_MODES)}, a function with its name, or allowed_tools "
        f"with mode and tools; got type {kind!r}",
        param="tool_choice",
    )


def _function_of(tool: Any) -> Mapping[str, Any]:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
    return function if isinstance(function, Mapping) else {}


def _name_of(tool: Any) -> str | None:
    name = _function_of(tool).get("name")
    return name if isinstance(name, str) else None
