"""Classify failed requests to inference servers: retry, wait, or raise a typed error.

error ─┬─ is_retryable ─────────► backoff_s, retry_after_s ─► next attempt, or RetriesExhaustedError
       ├─ as_context_overflow ──► ContextOverflowError      the prompt is too long
       ├─ as_setup_error ───────► EngineSetupError          wrong address, model or key
       └─ as_missing_completions ► NoTextCompletionsError    the server offers chats only
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import aiohttp
from tenacity import Future, RetryError

from atroposlib.errors import (
    ConfigError,
    ContextOverflowError,
    EngineSetupError,
    InferenceError,
    NoTextCompletionsError,
)
from atroposlib.utils import io
from atroposlib.utils.text import (
    hide_secrets,
    inert_line,
    without_lone_surrogates,
    without_secrets,
)

Answer = TypeVar("Answer")

MAX_ATTEMPTS = 3
"""Maximum number of attempts of one request at a server that is up."""

MAX_OUTAGES = 20
"""Maximum number of outages during one request; more suggest that the request causes them."""

LONGEST_RETRY_AFTER_S = 60.0

_COMPLETION_MARGIN_S = 1.0
"""Seconds after its timeout in which the OpenAI client may report it itself."""

_MIN_KEY_CHARACTERS = 8
"""Shorter keys are placeholders such as `x` or `EMPTY`, which also occur in texts."""

_TRANSIENT_4XX = frozenset({408, 409, 429})

_PROGRAMMING_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    NotImplementedError,
    TypeError,
    ValueError,
)

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

_NO_IMAGES_TEXT = re.compile(
    r"not a multi-?modal model|image input is not supported|image_url is only supported"
    r"|only text is supported",
    re.IGNORECASE,
)

MAX_QUOTED_CHARACTERS = 500

_KEY_TEXT = re.compile(r"\b(?:sk|hf|gsk|key)-?_?[A-Za-z0-9_\-*]{8,}")
"""Text that resembles an API key, complete or masked by a provider."""


class EngineStatusError(InferenceError):
    """An engine answered a native request with an error status.

    Attributes:
        status: HTTP status.
        wait_s: Seconds in its Retry-After header; None without one.
    """

    def __init__(self, message: str, *, status: int, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.wait_s = wait_s

    @property
    def is_route_missing(self) -> bool:
        """Whether the server lacks the route, rather than refusing the request."""
        return self.status in _NOT_OFFERED


class ServerDownError(InferenceError):
    """A server is down and the caller asked for an error instead of waiting."""


class RetriesExhaustedError(InferenceError, RetryError):
    """Every attempt of a request failed; also a tenacity `RetryError`, as in earlier versions.

    Attributes:
        last_attempt: tenacity future holding the last error.
    """

    def __init__(self, message: str, last_error: BaseException, *, num_attempts: int) -> None:
        last_attempt = Future(num_attempts)
        last_attempt.set_exception(last_error)
        RetryError.__init__(self, last_attempt)
        self.args = (message,)

    def __str__(self) -> str:
        return str(self.args[0])


def with_choices(
    create: Callable[..., Awaitable[Answer]],
    *,
    server_name: str,
    timeout_s: Any = None,
    api_key: str | None = None,
) -> Callable[..., Awaitable[Answer]]:
    """Return a method of the OpenAI client that refuses answers without complete choices.

    The client does not validate answers. Some providers report an error with status 200; its text
    is in the `InferenceError`. Others cut a text within a character: half of a surrogate pair,
    which no tokenizer and no file accepts, becomes U+FFFD.

    Args:
        create: method of the client.
        server_name: for messages.
        timeout_s: limit on the time until an answer is complete, since the client limits only the
            pauses in between; values other than numbers set none.
        api_key: removed from the text of refusals, even if the server repeats it.
    """
    has_limit = isinstance(timeout_s, int | float)
    limit_s = timeout_s + _COMPLETION_MARGIN_S if has_limit else None

    async def ask(**kwargs: Any) -> Answer:
        import openai

        try:
            answer = await asyncio.wait_for(create(**kwargs), limit_s)
        except asyncio.TimeoutError:
            if limit_s is None:
                raise
            text = f"the answer is not complete after {timeout_s:g} s (timeout)"
            raise asyncio.TimeoutError(text) from None
        except openai.APIStatusError as error:
            error.message = without_key(error.message, api_key)
            error.args = (error.message,)
            raise
        except openai.APIConnectionError as error:
            if isinstance(error.__cause__, InferenceError):  # of the transport
                raise error.__cause__ from None
            raise
        choices = getattr(answer, "choices", None)
        is_complete = isinstance(choices, list | tuple) and all(
            getattr(choice, "message", choice) is not None for choice in choices
        )
        if is_complete:
            for choice in choices or ():
                _make_encodable(choice)
            return answer
        reported = getattr(answer, "error", None)
        text = "" if reported is None else f"; its error is {_shown(str(reported), api_key)}"
        raise InferenceError(f"inference server {server_name} answered without choices{text}")

    return ask


_TEXTS = ("content", "reasoning_content", "reasoning", "refusal")


def _make_encodable(choice: Any) -> None:
    """Replace lone surrogates in the texts of a choice."""
    message = getattr(choice, "message", None)
    calls = getattr(message, "tool_calls", None) or ()
    functions = [getattr(call, "function", None) for call in calls]
    places = [(choice, "text"), *((message, name) for name in _TEXTS)]
    places += [(function, name) for function in functions for name in ("name", "arguments")]
    for place, name in places:
        text = getattr(place, name, None)
        if isinstance(text, str) and (encodable := without_lone_surrogates(text)) != text:
            setattr(place, name, encodable)


def http_status(error: BaseException) -> int | None:
    """Return the HTTP status an error reports, None when no answer was received."""
    import openai

    if isinstance(error, openai.APIStatusError):
        return error.status_code
    if isinstance(error, (EngineStatusError, aiohttp.ClientResponseError)):
        return error.status
    return None


def is_retryable(error: BaseException) -> bool:
    """Whether the same request may succeed later.

    Refusals (4xx other than 408, 409, 429) and programming errors are final. Broken connections,
    timeouts, 5xx and unusable answers are not.
    """
    status = http_status(error)
    if status is not None:
        return status in _TRANSIENT_4XX or status >= 500
    if isinstance(error, (ContextOverflowError, ConfigError)):
        return False
    if isinstance(error, (InferenceError, json.JSONDecodeError)):
        return True
    return not isinstance(error, _PROGRAMMING_ERRORS)


def is_outage_suspect(error: BaseException) -> bool:
    """Whether an error may mean that the server is down, so that it should be probed."""
    status = http_status(error)
    if status is not None:
        return status >= 500
    return not isinstance(error, (InferenceError, json.JSONDecodeError))


def retry_after_s(error: BaseException) -> float | None:
    """Return the wait that the server requested, in seconds and limited; None without one."""
    import openai

    wanted: float | None = None
    if isinstance(error, EngineStatusError):
        wanted = error.wait_s
    elif isinstance(error, openai.APIStatusError):
        wanted = io.retry_after_s(error.response.headers)
    return None if wanted is None else min(wanted, LONGEST_RETRY_AFTER_S)


def backoff_s(attempt: int, *, longest_s: float, draw: float) -> float:
    """Return a random exponential wait after `attempt` attempts, in seconds.

    `draw` is a uniform random number in [0, 1).
    """
    return float(draw * min(longest_s, 2.0 ** (attempt - 1)))


def describe(error: BaseException) -> str:
    """Return the type and text of an error, for messages."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def describe_connection(error: BaseException) -> str:
    """Return the innermost cause of a connection error, for messages."""
    innermost = error
    while innermost.__cause__ is not None:
        innermost = innermost.__cause__
    return describe(innermost)


def as_context_overflow(error: BaseException) -> ContextOverflowError | None:
    """Return the typed error if an engine refused a request as too long, else None."""
    text = str(error)
    if http_status(error) not in (400, 413, 422) or not _OVERFLOW_TEXT.search(text):
        return None
    prompt_tokens = _first_number(_PROMPT_LENGTH_TEXTS, text)
    context_tokens = _first_number(_CONTEXT_LENGTH_TEXTS, text)
    return ContextOverflowError(
        f"the prompt of {_amount(prompt_tokens)} and its completion do not fit the engine's "
        f"context of {_amount(context_tokens)}; shorten the prompt or lower max_tokens "
        "(env.max_token_length). "
        f"Response of the engine: {error}",
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
    """Return the typed error if a refusal means a wrong address, model or key, else None.

    A model of text that gets images is a wrong model.

    The `api_key` is removed from the message, even if the server repeats it.
    """
    status = http_status(error)
    text, shown_url = _shown(str(error), api_key), without_secrets(url)
    if status in (401, 403):
        key = "the api_key that is set" if api_key else "a request without an api_key"
        return EngineSetupError(
            f"inference server {shown_url} refuses {key} ({status}); set api_key of this server, "
            f"or OPENAI_API_KEY for the official endpoint. Response of the server: {text}"
        )
    if status == 404:
        return EngineSetupError(
            f"inference server {shown_url} returned 404 for model {model!r}: unknown route or "
            "model; check model_name, server_type and base_url, which usually ends in /v1. "
            f"Response of the server: {text}"
        )
    if status is not None and status >= 400 and _NO_IMAGES_TEXT.search(text):
        return EngineSetupError(
            f"the model {model!r} of inference server {shown_url} reads no images ({status}), but "
            f"the prompt has some; serve a multimodal model. Response of the server: {text}"
        )
    return None


def describe_refusal(error: Exception) -> str | None:
    """Return the message of a request that an inference server refused, None for other errors."""
    import openai

    if not isinstance(error, (openai.APIStatusError, EngineStatusError)):
        return None
    return f"an inference server refused a request: {_shown(str(error), None)}"


def as_missing_completions(
    error: BaseException, *, url: str, model: str, api_key: str | None
) -> NoTextCompletionsError | None:
    """Return the typed error if a server does not offer text completions, else None.

    An unknown model is refused with the same status; a chat request then fails for the same reason.
    The `api_key` is removed from the message.
    """
    status = http_status(error)
    text = str(error)
    if status not in _NOT_OFFERED and not (status == 400 and _CHAT_ONLY_TEXT.search(text)):
        return None
    shown_url = without_secrets(url)
    return NoTextCompletionsError(
        f"inference server {shown_url} offers no text completions for model {model!r} ({status}); "
        "use chat_completion, or check model_name, server_type and base_url, which usually ends in "
        f"/v1. Response of the server: {_shown(text, api_key)}"
    )


def without_key(text: str, api_key: str | None) -> str:
    """Return a text with an API key masked, unless it is a short placeholder."""
    is_secret = api_key is not None and len(api_key) >= _MIN_KEY_CHARACTERS
    return text.replace(api_key, "***") if api_key and is_secret else text


def _shown(text: str, api_key: str | None) -> str:
    hidden = hide_secrets(_KEY_TEXT.sub("***", without_key(text, api_key)))
    return inert_line(hidden, max_characters=MAX_QUOTED_CHARACTERS)
