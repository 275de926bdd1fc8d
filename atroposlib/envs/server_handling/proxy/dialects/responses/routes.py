"""The routes of the Responses protocol.

POST /responses                  answer, whole or as events
POST /responses/input_tokens     count what a request's prompt takes
GET, DELETE /responses/{id}      a stored response
GET /responses/{id}/input_items  what it was asked with
POST /responses/{id}/cancel      refused: every response is answered on its own connection
"""

from __future__ import annotations

import time

from starlette.responses import JSONResponse, Response

from atroposlib.envs.server_handling.proxy.dialect import Dialect, Exchange, Route
from atroposlib.envs.server_handling.proxy.dialects.conversing import answer_turn, chat_request
from atroposlib.envs.server_handling.proxy.dialects.responses.events import response_events
from atroposlib.envs.server_handling.proxy.dialects.responses.input_items import read_input
from atroposlib.envs.server_handling.proxy.dialects.responses.objects import (
    ResponseHead,
    finished,
    in_progress,
    listed_items,
    new_id,
    output_items,
    page_of,
)
from atroposlib.envs.server_handling.proxy.dialects.responses.requests import (
    ENCRYPTED_REASONING,
    ResponsesFields,
    chat_options,
    ignored_fields,
    namespaces_of,
    read_request,
)
from atroposlib.envs.server_handling.proxy.dialects.responses.store import (
    ResponsesState,
    StoredResponse,
)
from atroposlib.envs.server_handling.proxy.dialects.turns import ChatMessage
from atroposlib.envs.server_handling.proxy.refusals import bad_request, openai_error_body
from atroposlib.envs.server_handling.proxy.sse import Event, stream_events

__all__ = ["RESPONSES"]

_NAME = "responses"


async def create_response(exchange: Exchange) -> Response:
    """Answer a request with a Response object, or with its events when `stream` is set."""
    state = _state_of(exchange)
    fields = read_request(exchange.body)
    conversation = _conversation(fields, state)
    request = chat_request(
        chat_options(fields, exchange.body), _with_instructions(fields, conversation), param="input"
    )
    exchange.ignored.update(ignored_fields(fields, exchange.body))
    model = exchange.session.model_name
    head = ResponseHead(new_id("resp"), time.time(), model, fields)
    answer = await answer_turn(exchange, request, splits_thinking=_wants_reasoning(fields))
    output = output_items(answer, include=fields.include or (), namespaces=namespaces_of(fields))
    response = finished(head, answer, output, now=time.time())
    handles = [item.get("encrypted_content") for item in output]
    ids = [*(item["id"] for item in output), *filter(None, handles)]
    state.turns.remember(answer.as_turn, ids=ids, conversation=conversation)
    if fields.store is not False:
        items = listed_items(fields.input)
        state.keep(StoredResponse(response, [*conversation, answer.message], items))
    if not fields.stream:
        return JSONResponse(response)
    events = response_events(in_progress(head), response)
    return stream_events(Event(event, event["type"]) for event in events)


async def count_input_tokens(exchange: Exchange) -> Response:
    """Return how many tokens the prompt of a request takes."""
    fields = read_request(exchange.body)
    exchange.ignored.update(ignored_fields(fields, exchange.body))
    messages = _with_instructions(fields, _conversation(fields, _state_of(exchange)))
    prompt = exchange.render(
        chat_request(chat_options(fields, exchange.body), messages, param="input")
    )
    num_tokens = len(prompt.token_ids)
    return JSONResponse({"object": "response.input_tokens", "input_tokens": num_tokens})


async def get_response(exchange: Exchange) -> Response:
    """Return a stored Response object; its events were sent when it was made."""
    if exchange.query.get("stream") == "true":
        raise bad_request("only a response in the background can be streamed again", param="stream")
    stored = _state_of(exchange).get(exchange.path_params["response_id"])
    return JSONResponse(stored.response)


async def delete_response(exchange: Exchange) -> Response:
    """Delete a stored response; what was recorded of its tokens stays."""
    response_id = exchange.path_params["response_id"]
    _state_of(exchange).forget(response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


async def list_input_items(exchange: Exchange) -> Response:
    """Return a page of the items that a stored response was asked with, the latest first."""
    stored = _state_of(exchange).get(exchange.path_params["response_id"])
    return JSONResponse(page_of(stored.input_items, exchange.query))


async def cancel_response(exchange: Exchange) -> Response:
    """Refuse: only a response in the background could be cancelled, and there are none."""
    _state_of(exchange).get(exchange.path_params["response_id"])
    raise bad_request("Cannot cancel a synchronous response.", code="invalid_request_error")


RESPONSES = Dialect(
    name=_NAME,
    routes=(
        Route("/responses", create_response),
        Route("/responses/input_tokens", count_input_tokens),
        Route("/responses/{response_id}", get_response, "GET"),
        Route("/responses/{response_id}", delete_response, "DELETE"),
        Route("/responses/{response_id}/input_items", list_input_items, "GET"),
        Route("/responses/{response_id}/cancel", cancel_response),
    ),
    error_body=openai_error_body,
)


def _state_of(exchange: Exchange) -> ResponsesState:
    state: ResponsesState = exchange.session.dialect_state.setdefault(_NAME, ResponsesState())
    return state


def _conversation(fields: ResponsesFields, state: ResponsesState) -> list[ChatMessage]:
    """Return the chat messages of a request without its instructions, which do not carry over."""
    before = (
        state.previous(fields.previous_response_id).messages if fields.previous_response_id else ()
    )
    return state.turns.restore(read_input(fields.input, state.find_item), before)


def _with_instructions(
    fields: ResponsesFields, conversation: list[ChatMessage]
) -> list[ChatMessage]:
    if not fields.instructions:
        return conversation
    return [{"role": "system", "content": fields.instructions}, *conversation]


def _wants_reasoning(fields: ResponsesFields) -> bool:
    return fields.reasoning is not None or ENCRYPTED_REASONING in (fields.include or ())
