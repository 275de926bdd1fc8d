"""OpenAI's own protocol: chat completions, text completions, and the model list of a session."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse, Response

from atroposlib.envs.server_handling.proxy.dialect import Dialect, Exchange, Route
from atroposlib.envs.server_handling.proxy.dialects.conversing import was_cut_while_thinking
from atroposlib.envs.server_handling.proxy.exchange import complete_text
from atroposlib.envs.server_handling.proxy.openai_stops import as_sampled, cut_chat, cut_text
from atroposlib.envs.server_handling.proxy.openai_stream import chat_events, text_events
from atroposlib.envs.server_handling.proxy.refusals import openai_error_body
from atroposlib.envs.server_handling.proxy.request_models import (
    ChatCompletionProxyRequest,
    CompletionProxyRequest,
    SamplingRequest,
    read_body,
)
from atroposlib.envs.server_handling.proxy.sampling import ignored_fields
from atroposlib.envs.server_handling.proxy.sse import stream_events
from atroposlib.envs.server_handling.proxy.thinking import Thought, split_thinking

__all__ = ["OPENAI", "model_card", "model_list"]


def model_list(model_name: str, created: float) -> dict[str, Any]:
    """Return OpenAI's list of models, with the one there is."""
    return {"object": "list", "data": [model_card(model_name, created)]}


def model_card(model_name: str, created: float) -> dict[str, Any]:
    """Return OpenAI's description of a model; `created` in seconds since the epoch."""
    return {"id": model_name, "object": "model", "created": int(created), "owned_by": "atropos"}


async def create_chat_completion(exchange: Exchange) -> Response:
    """Answer `POST /chat/completions`, streamed when asked."""
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
    """Answer `POST /completions`, streamed when asked."""
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
    """Move the thinking of each choice into `reasoning_content`; `answer` is changed."""
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
