"""What an engine's refusal means for its caller: a prompt too long, or a wrong setup."""

from __future__ import annotations

import re
from collections.abc import Sequence

from atroposlib.envs.server_handling.retry import http_status
from atroposlib.errors import ContextOverflowError, EngineSetupError, NoTextCompletionsError
from atroposlib.utils.inert_text import inert_line
from atroposlib.utils.secret_masking import hide_secrets, without_secrets

__all__ = ["as_context_overflow", "as_missing_completions", "as_setup_error"]

_OVERFLOW_TEXT = re.compile(
    r"maximum context length|max_model_len|maximum model length|context_length_exceeded"
    r"|longer than the model's context",
    re.IGNORECASE,
)


_PROMPT_LENGTH_TEXTS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"prompt contains (?:at least )?(\d+) (?:input )?tokens",
        r"\((\d+) in the messages",
        r"messages resulted in (\d+) tokens",
        r"(\d+) tokens from the input",
        r"input \((\d+) tokens\)",
        r"prompt \(?(?:length|of|has)?\s*(\d+)",
    )
)

_CONTEXT_LENGTH_TEXTS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"maximum context length (?:is|of) (\d+)",
        r"context length \((\d+) tokens\)",
        r"max(?:imum)?[_ ]model[_ ]len(?:gth)?\D{0,12}(\d+)",
    )
)

_NOT_OFFERED = frozenset({404, 405, 501})

_CHAT_ONLY_TEXT = re.compile(
    r"chat model|chat[/ .]completions|not support\w* (?:text |the )?completions?", re.IGNORECASE
)

MAX_QUOTED_CHARACTERS = 500

_KEY_TEXT = re.compile(r"\b(?:sk|hf|gsk|key)-?_?[A-Za-z0-9_\-*]{8,}")
"""What looks like a key, whole or masked by a provider."""


def as_context_overflow(error: BaseException) -> ContextOverflowError | None:
    """Return the typed error when an engine refused a request as too long, else None."""
    said = str(error)
    if http_status(error) not in (400, 413, 422) or not _OVERFLOW_TEXT.search(said):
        return None
    prompt_tokens = _first_number(_PROMPT_LENGTH_TEXTS, said)
    context_tokens = _first_number(_CONTEXT_LENGTH_TEXTS, said)
    return ContextOverflowError(
        f"the prompt of {_amount(prompt_tokens)} and its completion do not fit the engine's "
        f"context of {_amount(context_tokens)}; shorten the prompt or lower max_tokens. "
        f"The engine said: {error}",
        prompt_tokens=prompt_tokens,
        context_tokens=context_tokens,
    )


def _first_number(patterns: Sequence[re.Pattern[str]], text: str) -> int | None:
    found = (pattern.search(text) for pattern in patterns)
    return next((int(match.group(1)) for match in found if match), None)


def _amount(num_tokens: int | None) -> str:
    return "unknown length" if num_tokens is None else f"{num_tokens} tokens"


def as_setup_error(
    error: BaseException, *, url: str, model: str, api_key: str | None
) -> EngineSetupError | None:
    """Return the typed error when a refusal means that address, model or key are wrong, else None.

    Args:
        error: What a request failed with.
        url: Where it was sent.
        model: Which model it asked for.
        api_key: Never shown, also where the server repeats it.
    """
    status = http_status(error)
    said, shown_url = _without_key(str(error), api_key), without_secrets(url)
    if status in (401, 403):
        key = "the api_key that is set" if api_key else "a request without an api_key"
        return EngineSetupError(
            f"inference server {shown_url} refuses {key} ({status}); set api_key of this server, "
            f"or OPENAI_API_KEY for the official endpoint. The server said: {said}"
        )
    if status == 404:
        return EngineSetupError(
            f"inference server {shown_url} does not know what was asked of it for model {model!r} "
            "(404); check model_name, server_type and base_url, which usually ends in /v1. "
            f"The server said: {said}"
        )
    return None


def as_missing_completions(
    error: BaseException, *, url: str, model: str, api_key: str | None
) -> NoTextCompletionsError | None:
    """Return the typed error when a server refused a text completion that it does not offer.

    A model that the server does not know is refused alike; a chat then fails with the same reason.

    Args:
        error: What the request for a completion failed with.
        url: Where it was sent.
        model: Which model it asked for.
        api_key: Never shown, also where the server repeats it.
    """
    status = http_status(error)
    said = str(error)
    if status not in _NOT_OFFERED and not (status == 400 and _CHAT_ONLY_TEXT.search(said)):
        return None
    shown_url = without_secrets(url)
    return NoTextCompletionsError(
        f"inference server {shown_url} gives no text completions of model {model!r} ({status}); "
        "ask it with chat_completion, or check model_name, server_type and base_url, which usually "
        f"ends in /v1. The server said: {_without_key(said, api_key)}"
    )


def _without_key(text: str, api_key: str | None) -> str:
    shown = text.replace(api_key, "***") if api_key else text
    hidden = hide_secrets(_KEY_TEXT.sub("***", shown))
    return inert_line(hidden, max_characters=MAX_QUOTED_CHARACTERS)
