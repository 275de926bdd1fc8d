"""Which failed requests are worth repeating, after how long, and what a final failure says."""

from __future__ import annotations

import json

import aiohttp
from tenacity import Future, RetryError

from atroposlib.errors import (
    ConfigError,
    ContextOverflowError,
    InferenceError,
)
from atroposlib.utils import io

__all__ = [
    "MAX_ATTEMPTS",
    "MAX_OUTAGES",
    "EngineStatusError",
    "RetriesExhaustedError",
    "ServerDownError",
    "backoff_s",
    "describe",
    "describe_connection",
    "http_status",
    "is_outage_suspect",
    "is_retryable",
    "retry_after_s",
]

MAX_ATTEMPTS = 3
"""Attempts of one request at a server that is up."""

MAX_OUTAGES = 20
"""Times one request survives its server going down; more means the request itself kills it."""

LONGEST_RETRY_AFTER_S = 60.0

_ROUTE_IS_MISSING = frozenset({404, 405, 501})

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


class EngineStatusError(InferenceError):
    """An engine answered a native request with an error status.

    Attributes:
        status: HTTP status.
        wait_s: Seconds of its Retry-After header, None without one.
    """

    def __init__(self, message: str, *, status: int, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.wait_s = wait_s

    @property
    def is_route_missing(self) -> bool:
        """Whether the server does not offer what was asked of it, rather than refused it."""
        return self.status in _ROUTE_IS_MISSING


class ServerDownError(InferenceError):
    """A server is down and the caller asked to be told rather than to wait."""


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
    time-outs, 5xx and answers that cannot be used are not.
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
    """Whether an error can mean that the server is down, so that a probe is worth its while."""
    status = http_status(error)
    if status is not None:
        return status >= 500
    return not isinstance(error, (InferenceError, json.JSONDecodeError))


def retry_after_s(error: BaseException) -> float | None:
    """Return how long the server asked to wait, in seconds, capped; None when it did not say."""
    import openai

    wanted: float | None = None
    if isinstance(error, EngineStatusError):
        wanted = error.wait_s
    elif isinstance(error, openai.APIStatusError):
        wanted = io.retry_after_s(error.response.headers)
    return None if wanted is None else min(wanted, LONGEST_RETRY_AFTER_S)


def backoff_s(attempt: int, *, longest_s: float, draw: float) -> float:
    """Return a random exponential wait before the next attempt, in seconds.

    Args:
        attempt: Attempts made so far, from 1.
        longest_s: Upper bound.
        draw: Uniform random number in [0, 1).
    """
    return float(draw * min(longest_s, 2.0 ** (attempt - 1)))


def describe(error: BaseException) -> str:
    """Return the type and text of an error, for messages."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def describe_connection(error: BaseException) -> str:
    """Return why a server could not be reached; the OpenAI client says it in the cause only."""
    innermost = error
    while innermost.__cause__ is not None:
        innermost = innermost.__cause__
    return describe(innermost)
