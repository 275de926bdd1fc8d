"""OpenAI's own protocol: chat completions, text completions, and the model list of a session."""

from __future__ import annotations

import re
from typing import Any

from starlette.responses import JSONResponse, Response

from atroposlib.envs.server_handling.proxy.dialect import Dialect, Exchange, Route
from atroposlib.envs.server_handling.proxy.exchange import complete_chat, complete_text, render
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

__all__ = ["IGNORED_HEADER", "OPENAI", "model_list"]

IGNORED_HEADER = "X-Atropos-Ignored"
"""Names fields of the request that nobody here knows and that changed nothing."""

_SAFE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MOST_NAMES = 16


def model_list(model_name: str, created: float) -> dict[str, Any]:
    """Return OpenAI's list of models, with the one there is."""
    card = {
        "id": model_name,
        "object": "model",
        "created": int(created),
        "owned_by": "atropos",
    }
    return {"object": "list", "data": [card]}


async def create_chat_completion(exchange: Exchange) -> Response:
    """Answer `POST /chat/completions`, streamed when asked."""
    sent = read_body(ChatCompletionProxyRequest, exchange.body)
    request = as_sampled(exchange.session, sent)
    answer = await complete_chat(exchange.session, request)
    cut_chat(exchange.session, request, answer)
    response: Response = JSONResponse(answer)
    if request.stream:
        response = stream_events(chat_events(answer, include_usage=_wants_usage(request)))
    return _with_ignored(response, exchange, ChatCompletionProxyRequest)


async def create_completion(exchange: Exchange) -> Response:
    """Answer `POST /completions`, streamed when asked."""
    request = read_body(CompletionProxyRequest, exchange.body)
    answer = await complete_text(exchange.session, request)
    cut_text(request, answer)
    response: Response = JSONResponse(answer)
    if request.stream:
        response = stream_events(text_events(answer, include_usage=_wants_usage(request)))
    return _with_ignored(response, exchange, CompletionProxyRequest)


async def render_chat(exchange: Exchange) -> Response:
    """Answer `POST /chat/completions/render`: the prompt, without generating."""
    sent = read_body(ChatCompletionProxyRequest, exchange.body)
    prompt = render(exchange.session, as_sampled(exchange.session, sent))
    body = {
        "prompt_text": prompt.text,
        "token_ids": prompt.token_ids,
        "num_tokens": len(prompt.token_ids),
    }
    return JSONResponse(body)


def _wants_usage(request: SamplingRequest) -> bool:
    return bool((request.stream_options or {}).get("include_usage"))


def _with_ignored(response: Response, exchange: Exchange, model: type[SamplingRequest]) -> Response:
    names = [n for n in ignored_fields(exchange.body, model) if _SAFE_NAME.fullmatch(n)]
    if names:
        response.headers[IGNORED_HEADER] = ", ".join(names[:_MOST_NAMES])
    return response


OPENAI = Dialect(
    "openai",
    (
        Route("/chat/completions", create_chat_completion),
        Route("/chat/completions/render", render_chat),
        Route("/completions", create_completion),
    ),
    openai_error_body,
)
