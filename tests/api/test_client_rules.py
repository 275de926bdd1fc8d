"""When a request is repeated, and what an error says; no network."""

from __future__ import annotations

import gzip
import random

import pytest

from atroposlib.api.client_rules import (
    NotReachedError,
    RetryRule,
    compressed,
    delivered_groups,
    read_answer,
)
from atroposlib.errors import TrajectoryApiError

LOST = TrajectoryApiError("no answer")
NOT_REACHED = NotReachedError("no connection")


def refused(status: int, retry_after_s: float | None = None) -> TrajectoryApiError:
    return TrajectoryApiError("refused", status=status, retry_after_s=retry_after_s)


@pytest.mark.parametrize(
    ("error", "attempt", "is_repeatable", "delay_s"),
    [
        # A request that never arrived may always be repeated; pauses grow fourfold.
        (NOT_REACHED, 1, False, 0.5),
        (NOT_REACHED, 2, False, 2.0),
        (NOT_REACHED, 3, False, 5.0),
        (NOT_REACHED, 4, False, None),
        # One that may have arrived, only when doing it twice is the same as once.
        (LOST, 1, True, 0.5),
        (LOST, 1, False, None),
        (refused(500), 1, True, 0.5),
        (refused(500), 1, False, None),
        # A busy service says when to come back, and has done nothing.
        (refused(503, 1.5), 1, False, 1.5),
        (refused(503, 600.0), 1, False, 5.0),
        (refused(503), 1, False, None),
        # The caller's own faults stay faults.
        (refused(404), 1, True, None),
        (refused(422), 1, True, None),
    ],
)
def test_retry_rule_repeats_only_what_is_safe(error, attempt, is_repeatable, delay_s):
    rule = RetryRule(attempts=4, first_delay_s=0.5, max_delay_s=5.0)

    assert rule.delay_s(error, attempt=attempt, is_repeatable=is_repeatable) == delay_s


@pytest.mark.parametrize(("size", "is_compressed"), [(1023, False), (1024, True)])
def test_compressed_wraps_bodies_from_1024_bytes(size, is_compressed):
    body = compressed(b"1" * size)

    assert body.is_compressed is is_compressed
    content = gzip.decompress(body.content) if is_compressed else body.content
    assert content == b"1" * size


def test_compressed_leaves_alone_what_does_not_shrink():
    body = compressed(random.Random(0).randbytes(5000))

    assert body.is_compressed is False


def answer(status: int, content: bytes, **headers: str) -> object:
    url = "http://h/x"
    return read_answer("GET", url, status=status, headers=headers, content=content)


def test_read_answer_returns_decoded_json():
    assert answer(200, b'{"a": [1.5]}') == {"a": [1.5]}
    assert answer(200, b"null") is None


@pytest.mark.parametrize(
    ("status", "content", "says"),
    [
        (422, b'{"detail": [{"msg": "masks[0]: short"}, {"msg": "b"}]}', "masks[0]: short; b; the"),
        (409, b'{"detail": "other settings"}', "409 (attempt 1): other settings; use the settings"),
        (413, b"too large", "413 (attempt 1): too large; post fewer groups"),
        (500, b"Internal Server Error", "500 (attempt 1): Internal Server Error"),
        (200, b"<html>", "200 (attempt 1): <html>"),
    ],
)
def test_read_answer_says_what_was_tried_and_the_remedy(status, content, says):
    with pytest.raises(TrajectoryApiError) as caught:
        answer(status, content)

    assert str(caught.value).startswith("GET http://h/x answered ")
    assert says in str(caught.value)
    assert caught.value.status == status


@pytest.mark.parametrize(
    ("header", "seconds"), [("2", 2.0), ("-1", 0.0), ("Wed, 21 Oct 2026 07:28:00 GMT", None)]
)
def test_read_answer_keeps_the_pause_the_service_asks_for(header, seconds):
    with pytest.raises(TrajectoryApiError) as caught:
        answer(503, b"{}", **{"Retry-After": header})

    assert caught.value.retry_after_s == seconds


def test_delivered_groups_distinguishes_none_from_not_registered():
    assert delivered_groups({"batch": None}, "http://h") is None
    assert delivered_groups({"batch": [{"tokens": []}]}, "http://h") == [{"tokens": []}]
    with pytest.raises(TrajectoryApiError, match="register the trainer again"):
        delivered_groups({"status": "error", "message": "no", "batch": []}, "http://h")
