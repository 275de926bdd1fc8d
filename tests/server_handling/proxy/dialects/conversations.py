"""Random conversations with tools, for the round trips of the dialects."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from tests.server_handling.proxy.dialects.scripted_session import chat_completion, tool_call

__all__ = ["Turn", "conversations"]

# Whatever JSON and UTF-8 can carry.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
words = st.text("abcxyz <>/\n", max_size=12)
thoughts = st.sampled_from(["", "<think>\nhm\n</think>\n\n", "<think>a", "so</think> ", "\n\n"])
values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-9, 9) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=5,
)
spacings = st.sampled_from([(", ", ": "), (",", ":"), (" ,\n", " :  ")])


@dataclass
class Turn:
    """What the model writes, and what its agent does about it."""

    content: str | None
    calls: list[dict[str, Any]] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    follow_up: str | None = None
    finish_reason: str = "stop"
    streams: bool = False

    @property
    def completion(self) -> dict[str, Any]:
        return chat_completion(self.content, calls=self.calls, finish_reason=self.finish_reason)

    @property
    def given(self) -> dict[str, Any]:
        """The chat message behind it."""
        message: dict[str, Any] = self.completion["choices"][0]["message"]
        return message

    @property
    def chat(self) -> list[dict[str, Any]]:
        """The chat messages the turn adds to the conversation."""
        messages = [self.given]
        for call_id, result in zip(self.call_ids, self.results, strict=True):
            messages.append({"role": "tool", "tool_call_id": call_id, "content": result})
        if self.follow_up is not None:
            messages.append({"role": "user", "content": self.follow_up})
        return messages

    @property
    def call_ids(self) -> list[str]:
        return [call["id"] for call in self.calls]


@st.composite
def _arguments(draw: st.DrawFn) -> str:
    """JSON text of an object, spaced and escaped as a model may have written it."""
    value = draw(st.dictionaries(words, values, max_size=3))
    item, key = draw(spacings)
    return json.dumps(value, separators=(item, key), ensure_ascii=draw(st.booleans()))


@st.composite
def _turns(draw: st.DrawFn, number: int) -> Turn:
    content = draw(thoughts) + draw(texts | words)
    streams = draw(st.booleans())
    if draw(st.booleans()):
        names = draw(st.lists(st.sampled_from(["add", "search"]), min_size=1, max_size=3))
        calls = [
            tool_call(f"call{number}x{i}", name, draw(_arguments())) for i, name in enumerate(names)
        ]
        results = [draw(texts) for _ in calls]
        follow_up = draw(st.none() | texts)
        return Turn(content or None, calls, results, follow_up, "tool_calls", streams)
    finish_reason = draw(st.sampled_from(["stop", "length"]))
    return Turn(content, [], [], draw(texts), finish_reason, streams)


@st.composite
def conversations(draw: st.DrawFn) -> list[Turn]:
    """Draw a conversation of up to five turns."""
    return [draw(_turns(i)) for i in range(draw(st.integers(1, 5)))]
