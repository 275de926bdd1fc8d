"""The routes of Anthropic's Messages protocol.

POST /messages               answer, whole or as events
POST /messages/count_tokens  count what a request's prompt takes
"""

from __future__ import annotations

from typing import Any, NamedTuple

from starlette.responses import JSONResponse, Response

from atroposlib.envs.server_handling.proxy.dialect import Dialect, Exchange, Route
from atroposlib.envs.server_handling.proxy.dialects.answers import ShownAnswer
from atroposlib.envs.server_handling.proxy.dialects.anthropic.content_blocks import read_messages
from atroposlib.envs.server_handling.proxy.dialects.anthropic.events import message_events
from atroposlib.envs.server_handling.proxy.dialects.anthropic.objects import (
    content_blocks,
    error_body,
    message_object,
)
from atroposlib.envs.server_handling.proxy.dialects.anthropic.requests import (
    CountFields,
    chat_options,
    ignored_fields,
    read_count,
    read_request,
)
from atroposlib.envs.server_handling.proxy.dialects.anthropic.threads import (
    HeldConversation,
    MessagesState,
)
from atroposlib.envs.server_handling.proxy.dialects.conversing import answer_turn, chat_request
from atroposlib.envs.server_handling.proxy.dialects.reading import refuse
from atroposlib.envs.server_handling.proxy.dialects.turns import ChatMessage, whole_turn
from atroposlib.envs.server_handling.proxy.sse import Event, stream_events
from atroposlib.errors import ContextOverflowError

__all__ = ["ANTHROPIC"]

_NAME = "anthropic"


async def create_message(exchange: Exchange) -> Response:
    """Answer a request with a Message, or with its events when `stream` is set."""
    state = _state_of(exchange)
    fields = read_request(exchange.body)
    prompt = _prompt(fields, exchange)
    exchange.ignored.update(ignored_fields(fields, exchange.body))
    answer, fills_context = await _answer(fields, prompt.request, exchange)
    if "parallel_tool_calls" in exchange.ignored:
        exchange.ignored.remove("parallel_tool_calls")
        exchange.ignored.add("tool_choice.disable_parallel_tool_use")
    content = content_blocks(answer, omits_thinking=fields.omits_thinking)
    signatures = [block["signature"] for block in content if block["type"] == "thinking"]
    turn, before = whole_turn(answer.as_turn, prompt.conversation)
    state.turns.remember(turn, ids=signatures, conversation=before)
    model = exchange.session.model_name
    message = message_object(answer, content, model=model, fills_context=fills_context)
    if fields.thread is not None:
        messages = [*before, turn.message]
        state.hold(message["id"], HeldConversation(messages, prompt.tools))
    if not fields.stream:
        return JSONResponse(message)
    events = message_events(message, answer)
    return stream_events(Event(event, event["type"]) for event in events)


async def count_tokens(exchange: Exchange) -> Response:
    """Return how many tokens the prompt of a request takes."""
    fields = read_count(exchange.body)
    prompt = _prompt(fields, exchange)
    exchange.ignored.update(ignored_fields(fields, exchange.body))
    return JSONResponse({"input_tokens": len(exchange.render(prompt.request).token_ids)})


ANTHROPIC = Dialect(
    name=_NAME,
    routes=(
        Route("/messages", create_message),
        Route("/messages/count_tokens", count_tokens),
    ),
    error_body=error_body,
    version_header="anthropic-version",
)


class _Prompt(NamedTuple):
    """What a request asks the session."""

    request: dict[str, Any]
    """The chat request."""
    conversation: list[ChatMessage]
    """Its messages, before any are joined."""
    tools: list[dict[str, Any]] | None
    """Tools as the client defined them, now or when it began."""


def _state_of(exchange: Exchange) -> MessagesState:
    state: MessagesState = exchange.session.dialect_state.setdefault(_NAME, MessagesState())
    return state


async def _answer(
    fields: CountFields, request: dict[str, Any], exchange: Exchange
) -> tuple[ShownAnswer, bool]:
    """Answer a request; also tell whether only the context limited the answer.

    Clients must give a limit and often give a large one. One that does not fit behind the prompt
    is lifted, as Anthropic does it; a prompt that does not fit itself is refused.
    """
    splits = fields.splits_thinking
    try:
        return await answer_turn(exchange, request, splits_thinking=splits), False
    except ContextOverflowError:
        unlimited = {**request, "max_tokens": None}
        return await answer_turn(exchange, unlimited, splits_thinking=splits), True


def _prompt(fields: CountFields, exchange: Exchange) -> _Prompt:
    state = _state_of(exchange)
    held = state.continued(fields)
    tools = held.tools if fields.tools is None else fields.tools
    entries = read_messages(fields.messages, fields.system)
    conversation = state.turns.restore(entries, held.messages)
    options = chat_options(fields.model_copy(update={"tools": tools}), exchange.body)
    request = chat_request(
        options, conversation, param="messages", continues_turns=not fields.splits_thinking
    )
    begun = conversation[-1] if conversation else {}
    if begun.get("role") == "assistant" and _ends_with_space(begun.get("content")):
        refuse("messages", "final assistant content cannot end with trailing whitespace")
    return _Prompt(request, conversation, tools)


def _ends_with_space(text: Any) -> bool:
    return isinstance(text, str) and text != text.rstrip()
