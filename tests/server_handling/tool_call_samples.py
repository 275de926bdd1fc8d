"""Calls, tools and texts that the tests of tool calls share."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

SEARCH: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    },
}
HERMES_CALL = '<tool_call>{"name": "search", "arguments": {"query": "cats"}}</tool_call>'

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    # What formats and thinking are marked with, inside of arguments.
    | st.sampled_from(["</tool_call>", "<tool_call>{", "</think>", "[TOOL_CALLS]", "; {", "]}"])
    | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,20}", fullmatch=True)
CALLS = st.lists(
    st.tuples(NAMES, st.dictionaries(TEXTS, VALUES, max_size=4)), min_size=1, max_size=4
)


def as_tool_calls(calls: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return calls in the form of the chat APIs, with ids no translator gave."""
    return [
        {
            "id": f"own{i}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for i, (name, arguments) in enumerate(calls)
    ]
