"""OpenAI's protocol: chat completions, text completions, their streams, and the model list.

As in OpenAI's API, a stop sequence is sampled but not part of the returned text:

    completion `…Observation:` ─► agent receives `…` ─► sends `…` back
               └── stored ─────────────────────────────► restored as `…Observation:`

So the tokens of the stop sequence stay in the recorded conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from starlette.responses import JSONResponse, Response

from atroposlib.envs.server_handling.proxy.exchange import (
    Dialect,
    Event,
    Exchange,
    Route,
    stream_events,
)
from atroposlib.envs.server_handling.proxy.history import (
    GivenTurn,
    GivenTurns,
    SentTurn,
    cut_at_stop,
    pieces,
    thought_of,
    whole_turn,
)
from atroposlib.envs.server_handling.proxy.refusals import openai_error_body
from atroposlib.envs.server_handling.proxy.requests import (
    ChatCompletionProxyRequest,
    ChatMessage,
    CompletionProxyRequest,
    RenderResponse,
    SamplingRequest,
    ignored_fields,
    read_body,
)
from atroposlib.envs.server_handling.proxy.sessions import SessionState

_STATE_NAME = "openai"

AnyRequest = TypeVar("AnyRequest", bound=SamplingRequest)


def as_sampled(
    session: SessionState, request: ChatCompletionProxyRequest
) -> ChatCompletionProxyRequest:
    """Return a chat request with the stop sequences of earlier replies restored.

    The last message is unchanged: a partial reply is continued from the text that was sent.
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
    """Cut the texts of a chat answer before the first stop sequence; modifies `answer`.

    The session keeps the texts as they were sampled.
    """
    stops = _stops_of(request)
    for choice in answer["choices"] if stops else ():
        sampled = dict(choice["message"])
        shown, _ = cut_at_stop(sampled["content"] or "", stops)
        if "tool_calls" in sampled or shown == sampled["content"]:
            continue
        choice["message"]["content"] = shown
        turns: GivenTurns = session.dialect_state.setdefault(_STATE_NAME, GivenTurns())
        conversation = [message.as_dict() for message in request.messages]
        turn, before = whole_turn(GivenTurn(sampled, shown), conversation)
        turns.remember(turn, ids=(), conversation=before)


def _as_entry(message: dict[str, Any]) -> dict[str, Any] | SentTurn:
    if message["role"] == "assistant" and message.keys() == {"role", "content"}:
        return SentTurn(message["content"])
    return message


def _stops_of(request: SamplingRequest) -> str | list[str] | None:
    """Return the stop sequences to hide; None if the request includes them in the text."""
    includes = (request.model_extra or {}).get("include_stop_str_in_output")
    return None if includes else request.stop


def stream_of(
    request: SamplingRequest,
    answer: Mapping[str, Any],
    changes_of: Callable[[Mapping[str, Any]], Iterator[dict[str, Any]]],
    *,
    kind: str,
) -> Response:
    """Return a completion as chunks: those of each choice, the usage if requested, `[DONE]`.

    `changes_of` yields the deltas of a choice; `kind` is the `object` of each chunk.
    """
    head = {"object": kind, **{name: answer[name] for name in ("id", "created", "model")}}
    includes_usage = bool((request.stream_options or {}).get("include_usage"))
    if includes_usage:
        head["usage"] = None

    def events() -> Iterator[Event]:
        for choice in answer["choices"]:
            for change in changes_of(choice):
                full = {"index": choice["index"], "finish_reason": None, "logprobs": None, **change}
                yield Event({**head, "choices": [full]})
        if includes_usage:
            yield Event({**head, "choices": [], "usage": answer["usage"]})
        yield Event("[DONE]")

    return stream_events(events())


def _text_changes(choice: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the pieces and the end of a text; all its logprobs are sent with the first one."""
    logprobs = choice["logprobs"]
    for piece in pieces(choice["text"]):
        yield {"text": piece, "logprobs": logprobs}
        logprobs = None
    yield {"text": "", "logprobs": logprobs, "finish_reason": choice["finish_reason"]}


def _chat_changes(choice: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield role, content, calls and end of a choice; logprobs as in `_text_changes`."""
    message = choice["message"]
    yield {"delta": {"role": "assistant", "content": None if message["content"] is None else ""}}
    for piece in pieces(message.get("reasoning_content") or ""):
        yield {"delta": {"reasoning_content": piece}}
    logprobs = choice["logprobs"]
    for piece in pieces(message["content"] or ""):
        yield {"delta": {"content": piece}, "logprobs": logprobs}
        logprobs = None
    for i, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        opened = {**call, "index": i, "function": {"name": function["name"], "arguments": ""}}
        yield {"delta": {"tool_calls": [opened]}}
        for piece in pieces(function["arguments"]):
            delta = {"index": i, "function": {"arguments": piece}}
            yield {"delta": {"tool_calls": [delta]}}
    yield {"delta": {}, "logprobs": logprobs, "finish_reason": choice["finish_reason"]}


def model_list(model_name: str, created: float) -> dict[str, Any]:
    """Return OpenAI's model list with the single model."""
    return {"object": "list", "data": [model_card(model_name, created)]}


def model_card(model_name: str, created: float) -> dict[str, Any]:
    """Return OpenAI's description of a model; `created` in seconds since the epoch."""
    return {"id": model_name, "object": "model", "created": int(created), "owned_by": "atropos"}


async def create_chat_completion(exchange: Exchange) -> Response:
    """Answer `POST /chat/completions`, as a stream if requested."""
    request = as_sampled(exchange.session, _read(exchange, ChatCompletionProxyRequest))
    answer = await exchange.complete_chat(request)
    cut_chat(exchange.session, request, answer)
    if request.include_reasoning or request.separate_reasoning:
        _split_reasoning(exchange, request, answer)
    if request.stream:
        return stream_of(request, answer, _chat_changes, kind="chat.completion.chunk")
    return JSONResponse(answer)


async def create_completion(exchange: Exchange) -> Response:
    """Answer `POST /completions`, as a stream if requested."""
    request = _read(exchange, CompletionProxyRequest)
    answer = await exchange.complete_text(request)
    for choice in answer["choices"]:
        # Nothing is stored, since the agent decides whether its next prompt has the stop sequence.
        choice["text"], _ = cut_at_stop(choice["text"], _stops_of(request))
    if request.stream:
        return stream_of(request, answer, _text_changes, kind=answer["object"])
    return JSONResponse(answer)


async def render_chat(exchange: Exchange) -> Response:
    """Answer `POST /chat/completions/render`: the prompt, without generating.

    The ids are those of the text alone, as existing clients expect: without a bos that only the
    tokenizer adds, and not those recorded in earlier turns.
    """
    request = as_sampled(exchange.session, _read(exchange, ChatCompletionProxyRequest))
    text = exchange.render(request).text
    tokenizer = exchange.session.managed_server.tokenizer
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    prompt = RenderResponse(prompt_text=text, token_ids=ids, num_tokens=len(ids))
    return JSONResponse(prompt.model_dump())


def _read(exchange: Exchange, model: type[AnyRequest]) -> AnyRequest:
    request = read_body(model, exchange.body)
    exchange.ignored.update(ignored_fields(exchange.body, model))
    return request


def _split_reasoning(
    exchange: Exchange, request: ChatCompletionProxyRequest, answer: dict[str, Any]
) -> None:
    """Move the thinking of each choice into `reasoning_content`; modifies `answer`."""
    for choice in answer["choices"]:
        message = choice["message"]
        thought = thought_of(exchange, request, choice)
        message["reasoning_content"] = thought.thinking or None
        message["content"] = thought.text or (None if "tool_calls" in message else "")


OPENAI = Dialect(
    "openai",
    (
        # 422 is the status of the earlier proxy, whose clients use these two.
        Route("/chat/completions", create_chat_completion, invalid_status=422),
        Route("/chat/completions/render", render_chat, invalid_status=422),
        Route("/completions", create_completion),
    ),
    openai_error_body,
)
