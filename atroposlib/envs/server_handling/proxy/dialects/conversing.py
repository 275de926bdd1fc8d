"""One turn of a dialect: restored messages in, the answer in parts out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from atroposlib.envs.server_handling.proxy.dialect import Exchange
from atroposlib.envs.server_handling.proxy.dialects.answers import ShownAnswer, shown_answer
from atroposlib.envs.server_handling.proxy.dialects.reading import refuse
from atroposlib.envs.server_handling.proxy.dialects.turns import (
    ChatMessage,
    leading_systems_joined,
)
from atroposlib.envs.server_handling.proxy.refusals import ProxyRefusal, bad_request
from atroposlib.envs.server_handling.proxy.request_models import ChatCompletionProxyRequest
from atroposlib.envs.server_handling.turn_matching import THINKING_START

__all__ = ["answer_turn", "chat_request", "was_cut_while_thinking"]


def chat_request(
    options: Mapping[str, Any],
    messages: Sequence[ChatMessage],
    *,
    param: str,
    continues_turns: bool = False,
) -> dict[str, Any]:
    """Return the chat request of a conversation whose next turn is the assistant's.

    Args:
        options: The request but for its messages.
        messages: The conversation.
        param: Names the field that holds it.
        continues_turns: Whether a text of the assistant at the end is to be continued.

    Raises:
        ProxyRefusal: the last turn is the assistant's already and cannot be continued.
    """
    if not messages:
        refuse(param, "nothing to answer; give at least one message")
    last = messages[-1]
    can_continue = continues_turns and not last.get("tool_calls")
    if last.get("role") == "assistant" and not can_continue:
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
        was_thinking=splits_thinking
        and was_cut_while_thinking(exchange, request, completion["choices"][0]),
    )


def _stops_of(request: Mapping[str, Any]) -> Sequence[str]:
    stop = request.get("stop") or ()
    return (stop,) if isinstance(stop, str) else stop


def was_cut_while_thinking(
    exchange: Exchange,
    request: Mapping[str, Any] | ChatCompletionProxyRequest,
    choice: Mapping[str, Any],
) -> bool:
    """Whether an answer without any tag is thinking that the prompt opened."""
    content = choice["message"].get("content") or ""
    if choice["finish_reason"] != "length" or "think>" in content:
        return False
    try:
        prompt = exchange.render(request).text
    except ProxyRefusal:  # the session's server renders prompts itself
        return False
    return prompt.rstrip().endswith(THINKING_START)
