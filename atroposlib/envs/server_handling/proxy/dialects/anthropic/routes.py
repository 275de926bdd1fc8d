"""The routes of Anthropic's Messages protocol.

POST /messages               answer, whole or as events
POST /messages/count_tokens  count what a request's prompt takes
"""

from __future__ import annotations

from starlette.responses import JSONResponse, Response

from atroposlib.envs.server_handling.proxy.dialect import Dialect, Exchange, Route
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
    read_count,
    read_request,
)
from atroposlib.envs.server_handling.proxy.dialects.conversing import answer_turn, chat_request
from atroposlib.envs.server_handling.proxy.dialects.turns import ChatMessage, GivenTurns
from atroposlib.envs.server_handling.proxy.sse import Event, stream_events

__all__ = ["ANTHROPIC"]

_NAME = "anthropic"


async def create_message(exchange: Exchange) -> Response:
    """Answer a request with a Message, or with its events when `stream` is set."""
    fields = read_request(exchange.body)
    conversation = _conversation(fields, exchange)
    options = chat_options(fields, exchange.body)
    request = chat_request(options, conversation, param="messages")
    answer = await answer_turn(exchange, request, splits_thinking=fields.splits_thinking)
    content = content_blocks(answer, omits_thinking=fields.omits_thinking)
    signatures = [block["signature"] for block in content if block["type"] == "thinking"]
    _turns_of(exchange).remember(answer.as_turn, ids=signatures, conversation=conversation)
    message = message_object(answer, content, model=exchange.session.model_name)
    if not fields.stream:
        return JSONResponse(message)
    events = message_events(message, answer)
    return stream_events(Event(event, event["type"]) for event in events)


async def count_tokens(exchange: Exchange) -> Response:
    """Return how many tokens the prompt of a request takes."""
    fields = read_count(exchange.body)
    options = chat_options(fields, exchange.body)
    request = chat_request(options, _conversation(fields, exchange), param="messages")
    return JSONResponse({"input_tokens": len(exchange.render(request).token_ids)})


ANTHROPIC = Dialect(
    name=_NAME,
    routes=(
        Route("/messages", create_message),
        Route("/messages/count_tokens", count_tokens),
    ),
    error_body=error_body,
)


def _turns_of(exchange: Exchange) -> GivenTurns:
    turns: GivenTurns = exchange.session.dialect_state.setdefault(_NAME, GivenTurns())
    return turns


def _conversation(fields: CountFields, exchange: Exchange) -> list[ChatMessage]:
    """Return the chat messages of a request."""
    entries = read_messages(fields.messages, fields.system)
    return _turns_of(exchange).restore(entries)
