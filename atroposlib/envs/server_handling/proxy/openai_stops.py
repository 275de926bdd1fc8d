"""Stop sequences as OpenAI has them: sampled, yet no part of the text an agent is shown.

    chat answered with `…Observation:` ─► agent is shown `…` ─► sends `…` back
                  └── remembered ──────────────────────────────► read as `…Observation:` again

So the tokens of the stop sequence stay in the recorded conversation that goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from atroposlib.envs.server_handling.proxy.dialects.turns import (
    GivenTurn,
    GivenTurns,
    SentTurn,
    whole_turn,
)
from atroposlib.envs.server_handling.proxy.request_models import (
    ChatCompletionProxyRequest,
    ChatMessage,
    SamplingRequest,
)
from atroposlib.envs.server_handling.proxy.session import SessionState

__all__ = ["as_sampled", "cut_chat", "cut_text"]

_STATE_NAME = "openai"


def as_sampled(
    session: SessionState, request: ChatCompletionProxyRequest
) -> ChatCompletionProxyRequest:
    """Return a chat request whose replies that were shown cut hold their stop sequence again.

    The last message stays as it is: a reply that shall go on goes on from what was sent.
    """
    turns = session.dialect_state.get(_STATE_NAME)
    if turns is None:
        return request
    entries = [_as_entry(message.as_dict()) for message in request.messages[:-1]]
    messages = [ChatMessage.model_validate(message) for message in turns.restore(entries)]
    return request.model_copy(update={"messages": [*messages, *request.messages[-1:]]})


def cut_chat(
    session: SessionState, request: ChatCompletionProxyRequest, answer: Mapping[str, Any]
) -> None:
    """Shorten the texts of a chat's answer to what stands before a stop sequence.

    Args:
        session: Remembers the texts as they were sampled.
        request: As `as_sampled` returned it.
        answer: As `complete_chat` returns it; changed.
    """
    stops = _stops_of(request)
    for choice in answer["choices"] if stops else ():
        sampled = dict(choice["message"])
        shown = _before(sampled["content"] or "", stops)
        if "tool_calls" in sampled or shown == sampled["content"]:
            continue
        choice["message"]["content"] = shown
        turns: GivenTurns = session.dialect_state.setdefault(_STATE_NAME, GivenTurns())
        conversation = [message.as_dict() for message in request.messages]
        turn, before = whole_turn(GivenTurn(sampled, shown), conversation)
        turns.remember(turn, ids=(), conversation=before)


def cut_text(request: SamplingRequest, answer: Mapping[str, Any]) -> None:
    """Shorten the texts of a text answer likewise; nothing is remembered.

    An agent writes the stop sequence behind its next prompt's text itself, or goes on without it.
    """
    stops = _stops_of(request)
    for choice in answer["choices"]:
        choice["text"] = _before(choice["text"], stops)


def _as_entry(message: dict[str, Any]) -> dict[str, Any] | SentTurn:
    if message["role"] == "assistant" and message.keys() == {"role", "content"}:
        return SentTurn(message["content"])
    return message


def _stops_of(request: SamplingRequest) -> Sequence[str]:
    """Return the stop sequences to hide; none when they are asked for in the text."""
    if (request.model_extra or {}).get("include_stop_str_in_output") or not request.stop:
        return ()
    return [request.stop] if isinstance(request.stop, str) else request.stop


def _before(text: str, stops: Sequence[str]) -> str:
    starts = [text.index(stop) for stop in stops if stop and stop in text]
    return text[: min(starts)] if starts else text
