"""One turn of a dialect: restored messages in, the answer in parts out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from atroposlib.envs.server_handling.proxy.dialect import Exchange
from atroposlib.envs.server_handling.proxy.dialects.answers import ShownAnswer, shown_answer
from atroposlib.envs.server_handling.proxy.dialects.turns import (
    ChatMessage,
    leading_systems_joined,
)
from atroposlib.envs.server_handling.proxy.refusals import ProxyRefusal, bad_request

__all__ = ["answer_turn", "chat_request"]

_THINKING_OPEN = "<think>"


def chat_request(
    options: Mapping[str, Any], messages: Sequence[ChatMessage], *, param: str
) -> dict[str, Any]:
    """Return the chat request of a conversation whose next turn is the assistant's.

    Raises:
        ProxyRefusal: the last turn is the assistant's already; `param` names the field.
    """
    if messages and messages[-1]["role"] == "assistant":
        raise bad_request(
            f"{param}: the last turn is the assistant's; a turn can be answered, not continued",
            param=param,
        )
    return {**options, "messages": leading_systems_joined(messages)}


async def answer_turn(
    exchange: Exchange, request: Mapping[str, Any], *, splits_thinking: bool
) -> ShownAnswer:
    """Let the session answer a chat request and return the answer in parts.

    Args:
        exchange: The agent's request.
        request: The chat request made of it.
        splits_thinking: Whether the agent wants thinking apart from the text.
    """
    completion = await exchange.complete_chat(request)
    return shown_answer(
        completion,
        splits_thinking=splits_thinking,
        stops=_stops_of(request),
        was_thinking=splits_thinking and _was_cut_while_thinking(exchange, request, completion),
    )


def _stops_of(request: Mapping[str, Any]) -> Sequence[str]:
    stop = request.get("stop") or ()
    return (stop,) if isinstance(stop, str) else stop


def _was_cut_while_thinking(
    exchange: Exchange, request: Mapping[str, Any], completion: Mapping[str, Any]
) -> bool:
    """Whether a completion without any tag is thinking that the prompt opened."""
    choice = completion["choices"][0]
    content = choice["message"].get("content") or ""
    if choice["finish_reason"] != "length" or "think>" in content:
        return False
    try:
        prompt = exchange.render(request).text
    except ProxyRefusal:  # the session's server renders prompts itself
        return False
    return prompt.rstrip().endswith(_THINKING_OPEN)
