"""When a request is repeated, and what an error says; no network."""

from __future__ import annotations

import pytest

from atroposlib.api.client_transport import (
    LeasedBatch,
    NoServiceError,
    NotReachedError,
    RetryRule,
    WaitLog,
    auth_headers,
    batch_path,
    delivered_groups,
    leased_batch,
    read_answer,
    service_address,
)
from atroposlib.errors import ConfigError, TrajectoryApiError

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
        (refused(503, 30.0), 1, False, 30.0),
        (refused(429, 1.5), 1, False, 1.5),
        (refused(503), 1, False, None),
        # Whoever waits longer than the deadline had better be told.
        (refused(503, 600.0), 1, False, None),
        # The caller's own faults stay faults.
        (refused(404), 1, True, None),
        (refused(422), 1, True, None),
    ],
)
def test_retry_rule_repeats_only_what_is_safe(error, attempt, is_repeatable, delay_s):
    rule = RetryRule(attempts=4, first_delay_s=0.5, max_delay_s=5.0, deadline_s=60.0)

    assert rule.delay_s(error, attempt=attempt, is_repeatable=is_repeatable) == delay_s


def test_retry_rule_without_a_number_of_attempts_ends_at_its_deadline():
    rule = RetryRule(attempts=None, max_delay_s=10.0, deadline_s=600.0)

    def delay_s(passed_s: float) -> float | None:
        return rule.delay_s(NOT_REACHED, attempt=1000, is_repeatable=True, passed_s=passed_s)

    assert delay_s(0.0) == 10.0
    assert delay_s(590.0) == 10.0
    assert delay_s(591.0) is None


def test_retry_rule_jitter_only_lengthens_what_the_service_asked_for():
    rule = RetryRule()

    assert rule.delay_s(refused(503, 4.0), attempt=1, is_repeatable=True, jitter=1.0) == 5.0


@pytest.mark.parametrize("token", [None, "", "  \n"])
def test_auth_headers_without_a_token_are_empty(token):
    assert auth_headers(token) == {}


def test_auth_headers_hold_the_token_without_the_line_break_of_its_file():
    assert auth_headers("secret\n") == {"Authorization": "Bearer secret"}


@pytest.mark.parametrize("token", ["se cret", "se\r\ncret", "sécret"])
def test_auth_headers_refuse_what_no_header_holds_without_showing_it(token):
    with pytest.raises(ConfigError, match="one word") as caught:
        auth_headers(token)

    assert "cret" not in str(caught.value)


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
        (401, b'{"detail": "no token"}', "no token; the service requires a token: set ATROPOS_API"),
        (403, b'{"detail": "admins only"}', "admins only; use a token of the right role"),
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


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/register", "c; use the settings of the running run"),
        ("/batch/1-1/ack", "c; its groups may be trained on twice"),
        ("/batch/1-1/nack", "c"),
    ],
)
def test_read_answer_tells_conflicts_apart(path, says):
    with pytest.raises(TrajectoryApiError, match=says):
        read_answer("POST", f"http://h{path}", status=409, headers={}, content=b'{"detail": "c"}')


def test_read_answer_repeats_no_secret_of_the_request():
    with pytest.raises(TrajectoryApiError) as caught:
        read_answer(
            "GET",
            "http://h/x",
            status=401,
            headers={},
            content=b"unknown token s3cret in Bearer s3cret",
            secrets=auth_headers("s3cret"),
        )

    assert "s3cret" not in str(caught.value)
    assert "unknown token *** in ***" in str(caught.value)


@pytest.mark.parametrize("status", [404, 405, 501])
@pytest.mark.parametrize("path", ["/register", "/register-env", "/batch?lease=600&wait=5"])
def test_read_answer_tells_another_server_from_a_service_in_one_line(path, status):
    with pytest.raises(NoServiceError, match="is not a trajectory service") as e:
        read_answer("POST", f"http://h{path}", status=status, headers={}, content=b"<html>\n<p>")

    rule = RetryRule(attempts=None)
    place = f"http://h{path.partition('?')[0]}"
    assert str(e.value).startswith(f"POST {place} answered {status} (attempt 1): the server")
    assert "<" not in str(e.value)
    assert isinstance(e.value, ConfigError)
    assert rule.delay_s(e.value, attempt=1, is_repeatable=True) is None


@pytest.mark.parametrize("path", ["/status-env", "/batch/1-1/ack", "/groups/7"])
def test_read_answer_404_of_what_the_service_does_not_know_is_the_service_s(path):
    with pytest.raises(TrajectoryApiError, match="gone; the service was reset or repl") as caught:
        read_answer("GET", f"http://h{path}", status=404, headers={}, content=b"gone")

    assert not isinstance(caught.value, NoServiceError)


@pytest.mark.parametrize("address", ["http://h:1", "https://h/under/", "HTTP://[::1]:8000//"])
def test_service_address_is_without_slashes_at_its_end(address):
    assert service_address(address) == address.rstrip("/")


@pytest.mark.parametrize(
    "address",
    ["localhost:8000", "", " http://h", "ftp://h", "http://", "http://h:x", "http://[::1"],
)
def test_service_address_that_no_client_can_reach_is_refused(address):
    with pytest.raises(ConfigError, match="expected an address such as http://localhost") as caught:
        service_address(address)

    assert repr(address) in str(caught.value)


def test_wait_notes_come_at_first_after_half_a_minute_and_then_ever_more_rarely():
    now = 0.0
    notes = WaitLog(lambda: now)

    told = {}
    for second in range(601):
        now = float(second)
        if note := notes.due(LOST):
            told[second] = note

    assert told[0] == "no answer"
    assert told[30] == "no answer (for 30 s now)"
    assert list(told) == [0, 30, 60, 120, 240, 480]


def test_wait_notes_tell_each_kind_of_failure_and_begin_anew_after_an_answer():
    notes = WaitLog(lambda: 5.0)

    assert [notes.due(e) for e in (LOST, NOT_REACHED, LOST)] == [str(LOST), str(NOT_REACHED), None]
    assert notes.end()
    assert not notes.end()
    assert notes.due(LOST) == str(LOST)


def test_batch_path_names_only_what_is_asked_for():
    assert batch_path(lease_s=None, wait_s=None) == "/batch"
    assert batch_path(lease_s=600, wait_s=2.5) == "/batch?lease=600&wait=2.5"
    assert batch_path(lease_s=None, wait_s=0) == "/batch?wait=0"


def test_leased_batch_has_an_id_where_the_service_knows_leases():
    groups = [{"tokens": []}]

    assert leased_batch({"batch": None}, "http://h") is None
    assert leased_batch({"batch": groups, "batch_id": "3-1"}, "u") == LeasedBatch(groups, "3-1")
    assert leased_batch({"batch": groups}, "http://h") == LeasedBatch(groups, None)
