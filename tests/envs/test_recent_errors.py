"""Errors that repeat are told once with their traceback and counted after that."""

from __future__ import annotations

import logging

import pytest

from atroposlib.envs.run_snapshot import MAX_TEXTS, RepeatedErrors

logger = logging.getLogger("repeated")


def raised(text: str) -> Exception:
    try:
        raise ValueError(text)
    except ValueError as error:
        return error


def test_error_that_repeats_has_one_traceback_and_is_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    errors = RepeatedErrors(logger)

    for number in range(100):
        errors.log("a rollout failed", raised(f"item {number} is broken"))

    assert caplog.text.count("Traceback") == 1
    assert [record.getMessage() for record in caplog.records] == [
        "a rollout failed: item 0 is broken",
        "a rollout failed, 10 times so far with ValueError: item 9 is broken",
        "a rollout failed, 100 times so far with ValueError: item 99 is broken",
    ]


def test_other_messages_of_an_error_are_told_in_a_line_each_up_to_a_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    errors = RepeatedErrors(logger)

    for number in range(26):
        errors.log("a rollout failed", raised(chr(ord("a") + number)))

    assert caplog.text.count("Traceback") == 1
    assert len(caplog.records) == MAX_TEXTS


def test_errors_of_different_types_have_a_traceback_each(caplog: pytest.LogCaptureFixture) -> None:
    errors = RepeatedErrors(logger)

    errors.log("a rollout failed", raised("x"))
    errors.log("a rollout failed", KeyError("x"))

    assert [record.exc_info is not None for record in caplog.records] == [True, True]
