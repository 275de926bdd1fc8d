"""OpenAI's protocol: chat completions, text completions, their streams, and the model list.

As in OpenAI's API, a stop sequence is sampled but not part of the returned text:

    completion `…Observation:` ─► agent receives `…` ─► sends `…` back
               └── stored ─────────────────────────────► restored as `…Observation:`

So the tokens of the stop sequence stay in the recorded conversation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse, Response

from atroposlib.envs.server_handling.proxy.exchange import (
    Dialect,
    Event,
    Exchange,
    Route,
    complete_text,
    stream_events,
)
from atroposlib.envs.server_handling.proxy.history import (
    GivenTurn,
    GivenTurns,
    SentTurn,
    was_cut_while_thinking,
    whole_turn,
)
from atroposlib.envs.server_handling.proxy.refusals import openai_error_body
from atroposlib.envs.server_handling.proxy.requests import (
    ChatCompletionProxyRequest,
    ChatMessage,
    CompletionProxyRequest,
    SamplingRequest,
    Thought,
    ignored_fields,
    read_body,
    split_thinking,
)
from atroposlib.envs.server_handling.proxy.sessions import SessionState

__all__ = [
    "OPENAI",
    "as_sampled",
    "chat_events",
    "cut_chat",
    "cut_text",
    "model_card",
    "model_list",
    "text_events",
]

_STATE_NAME = "openai"

_PIECE_CHARS = 64


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
    """Cut the texts of a chat answer before the first stop sequence.

    Args:
        session: Stores the texts as they were sampled.
        request: Result of `as_sampled`.
        answer: Result of `complete_chat`; modified.
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
    """Cut the texts of a text answer before the first stop sequence; nothing is stored.

    The agent decides whether its next prompt contains the stop sequence.
    """
    stops = _stops_of(request)
    for choice in answer["choices"]:
        choice["text"] = _before(choice["text"], stops)


def _as_entry(message: dict[str, Any]) -> dict[str, Any] | SentTurn:
    if message["role"] == "assistant" and message.keys() == {"role", "content"}:
        return SentTurn(message["content"])
    return message


def _stops_of(request: SamplingRequest) -> Sequence[str]:
    """Return the stop sequences to hide; empty if the request includes them in the text."""
    if (request.model_extra or {}).get("include_stop_str_in_output") or not request.stop:
        return ()
    return [request.stop] if isinstance(request.stop, str) else request.stop


def _before(text: str, stops: Sequence[str]) -> str:
    starts = [text.index(stop) for stop in stops if stop and stop in text]
    return text[: min(starts)] if starts else text


def chat_events(answer: Mapping[str, Any], *, include_usage: bool) -> Iterator[Event]:
    """Yield a chat completion as chunks: role, content, calls and end of each choice, `[DONE]`.

    Args:
        answer: Result of `complete_chat`.
        include_usage: Add a last chunk with the usage and without choices.
    """
    head = {
        "id": answer["id"],
        "object": "chat.completion.chunk",
        "created": answer["created"],
        "model": answer["model"],
        **({"usage": None} if include_usage else {}),
    }
    for choice in answer["choices"]:
        for change in _chat_changes(choice):
            full = {"index": choice["index"], "finish_reason": None, "logprobs": None, **change}
            yield Event({**head, "choices": [full]})
    if include_usage:
        yield Event({**head, "choices": [], "usage": answer["usage"]})
    yield Event("[DONE]")


def text_events(answer: Mapping[str, Any], *, include_usage: bool) -> Iterator[Event]:
    """Yield a text completion as chunks; arguments as in `chat_events`."""
    head = {name: answer[name] for name in ("id", "object", "created", "model")}
    if include_usage:
        head["usage"] = None
    for choice in answer["choices"]:
        logprobs = choice["logprobs"]
        for piece in _pieces(choice["text"]):
            part = {"index": choice["index"], "text": piece, "logprobs": logprobs}
            yield Event({**head, "choices": [{**part, "finish_reason": None}]})
            logprobs = None
        end = {"index": choice["index"], "text": "", "logprobs": logprobs}
        yield Event({**head, "choices": [{**end, "finish_reason": choice["finish_reason"]}]})
    if include_usage:
        yield Event({**head, "choices": [], "usage": answer["usage"]})
    yield Event("[DONE]")


def _chat_changes(choice: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the deltas of one choice; all its logprobs are sent with the first piece of text."""
    message = choice["message"]
    yield {"delta": {"role": "assistant", "content": None if message["content"] is None else ""}}
    for piece in _pieces(message.get("reasoning_content") or ""):
        yield {"delta": {"reasoning_content": piece}}
    logprobs = choice["logprobs"]
    for piece in _pieces(message["content"] or ""):
        yield {"delta": {"content": piece}, "logprobs": logprobs}
        logprobs = None
    for i, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        opened = {**call, "index": i, "function": {"name": function["name"], "arguments": ""}}
        yield {"delta": {"tool_calls": [opened]}}
        for piece in _pieces(function["arguments"]):
            delta = {"index": i, "function": {"arguments": piece}}
            yield {"delta": {"tool_calls": [delta]}}
    yield {"delta": {}, "logprobs": logprobs, "finish_reason": choice["finish_reason"]}


def _pieces(text: str) -> Iterator[str]:
    for start in range(0, len(text), _PIECE_CHARS):
        yield text[start : start + _PIECE_CHARS]


def model_list(model_name: str, created: float) -> dict[str, Any]:
    """Return OpenAI's model list with the single model."""
    return {"object": "list", "data": [model_card(model_name, created)]}


def model_card(model_name: str, created: float) -> dict[str, Any]:
    """Return OpenAI's description of a model; `created` in seconds since the epoch."""
    return {"id": model_name, "object": "model", "created": int(created), "owned_by": "atropos"}


async def create_chat_completion(exchange: Exchange) -> Response:
    """Answer `POST /chat/completions`, as a stream if requested."""
    sent = read_body(ChatCompletionProxyRequest, exchange.body)
    exchange.ignored.update(ignored_fields(exchange.body, ChatCompletionProxyRequest))
    request = as_sampled(exchange.session, sent)
    answer = await exchange.complete_chat(request)
    cut_chat(exchange.session, request, answer)
    if request.include_reasoning or request.separate_reasoning:
        _split_reasoning(exchange, request, answer)
    if request.stream:
        return stream_events(chat_events(answer, include_usage=_wants_usage(request)))
    return JSONResponse(answer)


async def create_completion(exchange: Exchange) -> Response:
    """Answer `POST /completions`, as a stream if requested."""
    request = read_body(CompletionProxyRequest, exchange.body)
    exchange.ignored.update(ignored_fields(exchange.body, CompletionProxyRequest))
    answer = await complete_text(exchange.session, request)
    cut_text(request, answer)
    if request.stream:
        return stream_events(text_events(answer, include_usage=_wants_usage(request)))
    return JSONResponse(answer)


async def render_chat(exchange: Exchange) -> Response:
    """Answer `POST /chat/completions/render`: the prompt, without generating."""
    sent = read_body(ChatCompletionProxyRequest, exchange.body)
    exchange.ignored.update(ignored_fields(exchange.body, ChatCompletionProxyRequest))
    prompt = exchange.render(as_sampled(exchange.session, sent))
    body = {
        "prompt_text": prompt.text,
        "token_ids": prompt.token_ids,
        "num_tokens": len(prompt.token_ids),
    }
    return JSONResponse(body)


def _wants_usage(request: SamplingRequest) -> bool:
    return bool((request.stream_options or {}).get("include_usage"))


def _split_reasoning(
    exchange: Exchange, request: ChatCompletionProxyRequest, answer: dict[str, Any]
) -> None:
    """Move the thinking of each choice into `reasoning_content`; modifies `answer`."""
    for choice in answer["choices"]:
        message = choice["message"]
        content = message["content"] or ""
        thought = split_thinking(content)
        if was_cut_while_thinking(exchange, request, choice):
            thought = Thought(content.strip(), "")
        message["reasoning_content"] = thought.thinking or None
        message["content"] = thought.text or (None if "tool_calls" in message else "")


OPENAI = Dialect(
    "openai",
    (
        Route("/chat/completions", create_chat_completion),
        Route("/chat/completions/render", render_chat),
        Route("/completions", create_completion),
    ),
    openai_error_body,
)
