from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import aiohttp
import httpx
import openai
import pytest
from tenacity import RetryError

from atroposlib.envs.server_handling.retry import (
    EngineStatusError,
    RetriesExhaustedError,
    as_context_overflow,
    backoff_s,
    is_outage_suspect,
    is_retryable,
    retry_after_s,
)
from atroposlib.errors import ContextOverflowError, InferenceError


def engine_error(status: int, message: str = "no", wait_s: float | None = None) -> Exception:
    return EngineStatusError(message, status=status, wait_s=wait_s)


def client_error(status: int, headers: dict[str, str] | None = None) -> openai.APIStatusError:
    # Which HTTP library the client builds on differs between its versions.
    response: Any = SimpleNamespace(
        status_code=status, headers=httpx.Headers(headers), request=None
    )
    return openai.APIStatusError("no", response=response, body=None)


@pytest.mark.parametrize("status", [400, 401, 404, 422, 408, 409, 429, 500, 502, 503])
def test_status_decides_whether_to_retry(status: int) -> None:
    expected = status in (408, 409, 429) or status >= 500

    assert is_retryable(engine_error(status)) is expected
    assert is_retryable(client_error(status)) is expected
    assert is_outage_suspect(client_error(status)) is (status >= 500)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (asyncio.TimeoutError(), True),
        (ConnectionResetError(), True),
        (aiohttp.ServerDisconnectedError(), True),
        (json.JSONDecodeError("bad", "", 0), True),
        (InferenceError("no choices"), True),
        (RuntimeError("odd"), True),
        (ContextOverflowError("long"), False),
        (AssertionError(), False),
        (NotImplementedError(), False),
        (TypeError(), False),
        (ValueError(), False),
        (KeyError("x"), False),
    ],
)
def test_errors_without_status_are_judged_by_type(error: Exception, expected: bool) -> None:
    assert is_retryable(error) is expected


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (engine_error(429, wait_s=2.5), 2.5),
        (engine_error(429, wait_s=9999.0), 60.0),
        (engine_error(429), None),
        (client_error(429, {"retry-after": "3"}), 3.0),
        (client_error(429, {"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}), None),
        (ConnectionError(), None),
    ],
)
def test_retry_after_is_read_and_capped(error: Exception, expected: float | None) -> None:
    assert retry_after_s(error) == expected


def test_backoff_grows_up_to_its_bound() -> None:
    waits = [backoff_s(attempt, longest_s=10.0, draw=0.5) for attempt in range(1, 7)]

    assert waits == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]


def test_overflow_is_recognised_and_quotes_the_engine() -> None:
    text = "This model's maximum context length is 256 tokens. However, you requested 300"

    overflow = as_context_overflow(engine_error(400, text))

    assert isinstance(overflow, ContextOverflowError)
    assert "256" in str(overflow)
    assert "300" in str(overflow)
    assert as_context_overflow(engine_error(400, "temperature must be positive")) is None
    assert as_context_overflow(engine_error(500, text)) is None


def test_exhausted_retries_are_both_error_kinds_and_keep_the_last_one() -> None:
    last = ConnectionError("refused")

    error = RetriesExhaustedError("3 attempts failed", last, num_attempts=3)

    assert isinstance(error, InferenceError)
    assert isinstance(error, RetryError)
    assert str(error) == "3 attempts failed"
    assert error.last_attempt.exception() is last


@pytest.mark.parametrize(
    ("said", "prompt_tokens", "context_tokens"),
    [
        (
            "This model's maximum context length is 256 tokens. However, you requested 9 output "
            "tokens and your prompt contains 250 input tokens, for a total of 259 tokens.",
            250,
            256,
        ),
        (
            "This model's maximum context length is 256 tokens. However, you requested 9 output "
            "tokens and your prompt contains at least 250 input tokens.",
            250,
            256,
        ),
        (
            "This model's maximum context length is 4097 tokens. However, you requested 5000 "
            "tokens (4500 in the messages, 500 in the completion).",
            4500,
            4097,
        ),
        (
            "The input (300 tokens) is longer than the model's context length (256 tokens).",
            300,
            256,
        ),
        (
            "Requested token count exceeds the model's maximum context length of 256 tokens. You "
            "requested a total of 310 tokens: 10 tokens from the input messages and 300 tokens "
            "for the completion.",
            10,
            256,
        ),
        ("context_length_exceeded", None, None),
    ],
)
def test_context_overflow_names_prompt_length_and_limit(
    said: str, prompt_tokens: int | None, context_tokens: int | None
) -> None:
    overflow = as_context_overflow(engine_error(400, said))

    assert overflow is not None
    assert (overflow.prompt_tokens, overflow.context_tokens) == (prompt_tokens, context_tokens)
    for number in filter(None, (prompt_tokens, context_tokens)):
        assert f"of {number} tokens" in str(overflow)
