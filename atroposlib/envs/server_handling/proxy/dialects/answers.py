"""What of a chat completion a client is shown: thinking, text and calls apart; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atroposlib.envs.server_handling.proxy.dialects.turns import ChatMessage, GivenTurn
from atroposlib.envs.server_handling.proxy.thinking import Thought, split_thinking

__all__ = ["ShownAnswer", "ShownCall", "pieces", "shown_answer"]

_DELTA_CHARACTERS = 48


@dataclass(frozen=True)
class ShownCall:
    """One tool call of an answer."""

    call_id: str
    """Names the call in its result."""
    name: str
    """The tool."""
    arguments: str
    """JSON text as the model's format gave it."""


@dataclass(frozen=True)
class ShownAnswer:
    """One answer in the parts that dialects give names of their own."""

    message: ChatMessage
    """The chat message behind it."""
    thinking: str | None
    """What the model thought first; None where it did not, or nobody asked to see it apart."""
    text: str
    """What it says besides, without the stop sequence that ended it."""
    calls: tuple[ShownCall, ...]
    """The tools it calls."""
    finish_reason: str
    """`stop`, `length`, `tool_calls` or `content_filter`."""
    stop_sequence: str | None
    """Which of the request's stop sequences ended it."""
    num_prompt_tokens: int
    """Tokens the model read."""
    num_completion_tokens: int
    """Tokens it wrote."""

    @property
    def num_thinking_tokens(self) -> int:
        """Tokens of the thinking, about: its share of the completion's characters."""
        content = self.message.get("content") or ""
        calls = sum(len(call.name) + len(call.arguments) for call in self.calls)
        share = len(self.thinking or "") / max(1, len(content) + calls)
        return min(self.num_completion_tokens, round(self.num_completion_tokens * share))

    @property
    def as_turn(self) -> GivenTurn:
        """What a session keeps of it."""
        return GivenTurn(self.message, self.text)


def shown_answer(
    completion: Mapping[str, Any],
    *,
    splits_thinking: bool,
    stops: Sequence[str] = (),
    was_thinking: bool = False,
) -> ShownAnswer:
    """Take an OpenAI chat completion of one choice apart.

    Args:
        completion: The completion as JSON.
        splits_thinking: Whether the client wants thinking apart from the text.
        stops: Stop sequences of the request; the text ends before the first one in it.
        was_thinking: Whether the prompt ended inside of the model's thinking.
    """
    choice = completion["choices"][0]
    message = choice["message"]
    content = message.get("content") or ""
    thought = split_thinking(content) if splits_thinking else Thought(None, content)
    if splits_thinking and was_thinking and thought.thinking is None:
        thought = Thought(content.strip(), "")
    text, stop = _cut(thought.text, stops)
    usage = completion.get("usage") or {}
    return ShownAnswer(
        message=message,
        thinking=thought.thinking or None,
        text=text,
        calls=tuple(_shown_call(call) for call in message.get("tool_calls") or ()),
        finish_reason=choice.get("finish_reason") or "stop",
        stop_sequence=stop,
        num_prompt_tokens=usage.get("prompt_tokens") or 0,
        num_completion_tokens=usage.get("completion_tokens") or 0,
    )


def pieces(text: str) -> Iterable[str]:
    """Yield a text in the pieces that a stream sends."""
    for start in range(0, len(text), _DELTA_CHARACTERS):
        yield text[start : start + _DELTA_CHARACTERS]


def _shown_call(call: Mapping[str, Any]) -> ShownCall:
    function = call["function"]
    return ShownCall(str(call["id"]), function["name"], function["arguments"])


def _cut(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Return the text before the first stop sequence in it, and that sequence.

    Engines leave the sequence in the tokens they report, so the text made of them has it too.
    """
    found = [(text.index(stop), stop) for stop in stops if stop and stop in text]
    if not found:
        return text, None
    start, stop = min(found, key=lambda place: place[0])
    return text[:start], stop
