"""Which fields of a request reach the engine; pure.

Fields are passed on by name, never wholesale: one that changed the prompt or the shape of the
engine's answer would break the tokens recorded for the session.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from atroposlib.envs.server_handling.proxy.refusals import bad_request
from atroposlib.envs.server_handling.proxy.request_models import (
    ChatCompletionProxyRequest,
    CompletionProxyRequest,
    SamplingRequest,
)

__all__ = ["chat_kwargs", "check_num_choices", "ignored_fields", "not_honoured", "text_kwargs"]

_ROLES = ("system", "developer", "user", "assistant", "tool")

_NAMED_OPTIONS = (
    "temperature",
    "top_p",
    "n",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
)
_ENGINE_OPTIONS = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "ignore_eos",
        "include_stop_str_in_output",
        "min_p",
        "min_tokens",
        "priority",
        "repetition_penalty",
        "response_format",
        "stop_token_ids",
        "structured_outputs",
        "top_k",
    }
)
"""Sampling options of engines beyond OpenAI's; they change which token is drawn, no more."""

_REFUSED = {
    "audio": "only text can be tracked",
    "best_of": "discarded completions could not be tracked",
    "chat_template": "the session's own template renders every prompt",
    "chat_template_kwargs": "the session's own template renders every prompt",
    "continue_final_message": "the session's own template renders every prompt",
    "function_call": "use tools and tool_choice",
    "functions": "use tools and tool_choice",
    "input_ids": "prompts are tokenised by the session",
    "prompt_logprobs": "only sampled tokens have logprobs here",
    "use_beam_search": "beams are not samples of the policy",
    "web_search_options": "no search is available",
}
_WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "user",
    }
)
"""Fields for the bookkeeping of a provider, which ask nothing of an answer."""

_ASK_NOTHING: dict[str, tuple[Any, ...]] = {
    "service_tier": ("auto", "default"),
    "store": (False,),
    "truncation": ("disabled",),
}
"""Values of fields that are not honoured with which nothing is asked for."""


def chat_kwargs(request: ChatCompletionProxyRequest, *, max_choices: int) -> dict[str, Any]:
    """Return the arguments of `ManagedServer.chat_completion`.

    Raises:
        ProxyRefusal: 400 for a field that cannot be honoured, no messages, an unknown role, or
            too large an `n`.
    """
    if not request.messages:
        raise bad_request("messages is empty; give at least one", param="messages")
    for i, message in enumerate(request.messages):
        if message.role not in _ROLES:
            raise bad_request(
                f"messages[{i}].role: expected one of {', '.join(_ROLES)}; got {message.role!r}",
                param=f"messages[{i}].role",
            )
    _check(request, num_choices=request.n, max_choices=max_choices)
    if request.top_logprobs:
        raise bad_request("only the sampled token's logprob is known", param="top_logprobs")
    limit = request.max_completion_tokens
    kwargs: dict[str, Any] = {
        **_options(request),
        "messages": [message.as_dict() for message in request.messages],
        "max_tokens": request.max_tokens if limit is None else limit,
    }
    if request.tools:
        kwargs["tools"] = request.tools
        if request.tool_choice is not None:
            kwargs["tool_choice"] = request.tool_choice
    return kwargs


def text_kwargs(request: CompletionProxyRequest, *, max_choices: int) -> list[dict[str, Any]]:
    """Return the arguments of `ManagedServer.completion`, one call per prompt.

    Raises:
        ProxyRefusal: 400 for a field that cannot be honoured, no prompt, or too many choices.
    """
    prompts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    if not prompts or not all(prompts):
        raise bad_request("prompt is empty", param="prompt")
    _check(request, num_choices=request.n * len(prompts), max_choices=max_choices)
    for name in ("echo", "suffix"):
        if getattr(request, name):
            raise bad_request(f"{name} is not supported", code="unsupported_field", param=name)
    if request.logprobs is not None and request.logprobs > 1:
        raise bad_request(
            "only the sampled token's logprob is known; give 0 or 1", param="logprobs"
        )
    shared = {**_options(request), "max_tokens": request.max_tokens}
    return [{**shared, "prompt": prompt} for prompt in prompts]


def check_num_choices(num_choices: int, max_choices: int) -> None:
    """Raise the 400 for more choices than one request may ask for."""
    if num_choices > max_choices:
        raise bad_request(
            f"{num_choices} choices are asked for, at most {max_choices} are allowed", param="n"
        )


def ignored_fields(body: Mapping[str, Any], model: type[SamplingRequest]) -> list[str]:
    """Return the names of a body's fields that are not honoured, sorted."""
    known = model.model_fields.keys() | _ENGINE_OPTIONS | _REFUSED.keys() | {"modalities"}
    return not_honoured(body, known)


def not_honoured(body: Mapping[str, Any], known: Iterable[str]) -> list[str]:
    """Return the names of a body's fields that change nothing although they ask for something.

    Args:
        body: As the client sent it.
        known: Fields that are honoured, or refused.
    """
    others = set(body) - set(known) - _WITHOUT_EFFECT
    return sorted(
        name
        for name in others
        if body[name] is not None and body[name] not in _ASK_NOTHING.get(name, ())
    )


def _check(request: SamplingRequest, *, num_choices: int, max_choices: int) -> None:
    check_num_choices(num_choices, max_choices)
    for name, reason in _REFUSED.items():
        if (request.model_extra or {}).get(name) not in (None, [], {}, False):
            raise bad_request(
                f"{name} is not supported: {reason}", code="unsupported_field", param=name
            )
    modalities = (request.model_extra or {}).get("modalities")
    if modalities not in (None, ["text"]):
        raise bad_request("only text can be tracked", code="unsupported_field", param="modalities")


def _options(request: SamplingRequest) -> dict[str, Any]:
    """Return the sampling options that are set; those of engines alone in `extra_body`."""
    named = {name: getattr(request, name) for name in _NAMED_OPTIONS}
    options = {name: value for name, value in named.items() if value is not None}
    extra = {
        name: value
        for name, value in (request.model_extra or {}).items()
        if name in _ENGINE_OPTIONS and value is not None
    }
    return {**options, "extra_body": extra} if extra else options
