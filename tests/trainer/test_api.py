"""The trainer's client of the service: registration, waits for batches, outages."""

from __future__ import annotations

import httpx
import pytest

from atroposlib.api.client import LeasedBatch
from atroposlib.errors import TrajectoryApiError
from example_trainer.api import (
    TrajectoryFeed,
    check_atropos_api,
    get_batch,
    open_client,
    register_trainer,
    registration_of,
)
from example_trainer.processes import find_free_port
from tests.trainer.tiny import tiny_config

BATCH = LeasedBatch([{"tokens": [[1]]}], "7-1")
UNREGISTERED = TrajectoryApiError("GET /batch: Trainer not registered", status=200)
AWAY = TrajectoryApiError("connection refused")


class FakeClock:
    def __init__(self):
        self.now_s = 0.0
        self.pauses = []

    def __call__(self):
        return self.now_s

    def sleep(self, seconds):
        self.pauses.append(seconds)
        self.now_s += seconds


class ScriptedClient:
    """Answers `batch` from a list; the last answer repeats.

    `policy_error` is raised by `set_policy_version`, if set; `on_wait` receives the seconds that an
    answer may take.
    """

    def __init__(self, *answers, on_wait=lambda wait_s: None):
        self._answers = list(answers)
        self._on_wait = on_wait
        self.registrations = []
        self.policy_versions = []
        self.policy_error = None
        self.leases_s = []
        self.keys = []
        self.acknowledged = []
        self.ack_errors = []
        self.service_step = 0
        self.stalls = []

    def status(self):
        stalls = {"stalls": self.stalls} if self.stalls else {}
        return {"current_step": self.service_step, "queue_size": 0, **stalls}

    def ack(self, batch_id, *, steps_done=None):
        self.acknowledged.append((batch_id, steps_done))
        if self.ack_errors:
            raise self.ack_errors.pop(0)

    def register(self, **registration):
        self.registrations.append(registration)
        return 1

    def set_policy_version(self, version):
        if self.policy_error is not None:
            raise self.policy_error
        self.policy_versions.append(version)
        return True

    def batch(self, *, lease_s, wait_s, key=None):
        self.leases_s.append(lease_s)
        self.keys.append(key)
        self._on_wait(wait_s)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def make_feed(client, tmp_path, **settings):
    clock = FakeClock()
    config = tiny_config(tmp_path, **settings)
    return TrajectoryFeed(client, config, sleep=clock.sleep, clock=clock), clock


def test_registration_sends_the_eight_fields_without_nulls(tmp_path):
    config = tiny_config(
        tmp_path, batch_size=3, gradient_accumulation_steps=4, training_steps=9, seq_len=77
    )

    assert registration_of(config, starting_step=5) == {
        "wandb_group": "",
        "wandb_project": "",
        "batch_size": 12,
        "max_token_len": 77,
        "checkpoint_dir": config.save_path,
        "save_checkpoint_interval": 9,
        "starting_step": 5,
        "num_steps": 9,
    }


def test_first_registration_replaces_the_run_where_asked_and_later_ones_do_not(tmp_path):
    client = ScriptedClient(UNREGISTERED, BATCH)
    client._answers = [UNREGISTERED, BATCH]
    feed, _ = make_feed(client, tmp_path, replace_run=True)
    plain, _ = make_feed(ScriptedClient(BATCH), tmp_path)

    feed.register(0)
    feed.next_batch(0)
    plain.register(0)

    assert [body.get("replace") for body in client.registrations] == [True, None]
    assert "replace" not in plain._client.registrations[0]


def test_registration_accepts_batches_of_fewer_sequences(tmp_path):
    feed, _ = make_feed(ScriptedClient(BATCH), tmp_path)

    feed.register(0)

    assert feed._client.registrations[0]["short_batches"] is True


def test_feed_polls_with_growing_pauses_until_a_batch_is_there(tmp_path):
    feed, clock = make_feed(ScriptedClient(*[None] * 7, BATCH), tmp_path)

    assert feed.next_batch(0) == BATCH
    assert clock.pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_feed_asks_for_the_batch_of_a_step_with_one_key_in_every_process_of_a_run(tmp_path):
    client = ScriptedClient(None, BATCH)
    for _ in range(2):
        feed = TrajectoryFeed(client, tiny_config(tmp_path), run_id="run", sleep=FakeClock().sleep)
        feed.next_batch(0)
    feed.next_batch(1)

    assert client.keys == ["run-1", "run-1", "run-1", "run-2"]


def test_feed_asks_again_at_once_where_the_service_waits(tmp_path):
    clock = FakeClock()

    def wait(seconds):
        clock.now_s += seconds

    client = ScriptedClient(*[None] * 3, BATCH, on_wait=wait)
    feed = TrajectoryFeed(client, tiny_config(tmp_path), sleep=clock.sleep, clock=clock)

    assert feed.next_batch(0) == BATCH
    assert clock.pauses == []


def test_feed_leases_for_the_time_the_settings_name(tmp_path):
    client = ScriptedClient(BATCH)
    feed, _ = make_feed(client, tmp_path, lease_s=33.0)

    feed.next_batch(0)

    assert client.leases_s == [33.0]


@pytest.mark.parametrize("status", [404, 409])
def test_feed_goes_on_when_the_service_has_let_the_batch_go(tmp_path, caplog, status):
    client = ScriptedClient(BATCH)
    feed, _ = make_feed(client, tmp_path)
    client.ack_errors = [TrajectoryApiError("moved on", status=status)]

    feed.acknowledge("7-1", steps_done=1)

    assert "batch 7-1 was acknowledged after its lease ended" in caplog.text


def test_feed_passes_on_a_refused_acknowledgement(tmp_path):
    client = ScriptedClient(BATCH)
    feed, _ = make_feed(client, tmp_path)
    client.ack_errors = [TrajectoryApiError("for trainers only", status=403)]

    with pytest.raises(TrajectoryApiError, match="for trainers only"):
        feed.acknowledge("7-1", steps_done=1)


@pytest.mark.parametrize(
    ("service_step", "expected"),
    [
        (3, "step 4: no full batch yet; are environments running?"),
        (4, "the service counts 4 steps, this trainer has done 3: environments may have ended"),
    ],
)
def test_feed_that_waits_for_long_says_when_the_service_counts_more_steps(
    tmp_path, caplog, service_step, expected
):
    client = ScriptedClient(*[None] * 60, BATCH)
    client.service_step = service_step
    feed, _ = make_feed(client, tmp_path)

    with caplog.at_level("INFO"):
        feed.next_batch(3)

    assert caplog.text.count("no full batch yet") == 1
    assert expected in caplog.text


def test_feed_that_waits_for_long_repeats_why_the_service_forms_no_batch(tmp_path, caplog):
    client = ScriptedClient(*[None] * 60, BATCH)
    message = "groups of 4 do not add up to a batch of 6"
    client.stalls = [{"reason": "queue/unpackable", "num_sequences": 8, "message": message}]
    feed, _ = make_feed(client, tmp_path)

    with caplog.at_level("INFO"):
        feed.next_batch(0)

    assert f"step 1: no full batch yet; {message}" in caplog.text


def test_feed_reports_the_policy_once(tmp_path):
    client = ScriptedClient(BATCH)
    feed, _ = make_feed(client, tmp_path)

    feed.report_policy(4)
    feed.next_batch(4)

    assert client.policy_versions == [4]


def test_feed_reports_the_policy_again_to_a_service_that_forgot_the_run(tmp_path):
    client = ScriptedClient(UNREGISTERED, BATCH)
    feed, _ = make_feed(client, tmp_path)

    feed.report_policy(3)
    feed.next_batch(3)

    assert client.policy_versions == [3, 3]


def test_feed_passes_on_that_the_policy_was_refused(tmp_path):
    client = ScriptedClient(BATCH)
    client.policy_error = TrajectoryApiError("for trainers only", status=403)
    feed, _ = make_feed(client, tmp_path)

    with pytest.raises(TrajectoryApiError, match="for trainers only"):
        feed.report_policy(1)


def test_open_client_shows_the_token_of_the_environment_variable(monkeypatch):
    monkeypatch.setenv("ATROPOS_API_TOKEN", "s3cret")

    with open_client("http://127.0.0.1:1") as client:
        request = client._client.build_request("GET", client.base_url)

    assert request.headers["Authorization"] == "Bearer s3cret"


def patient_client(answers, *, patience_s=60.0):
    """Return a client whose answers come from a list, and its clock; the last repeats."""
    clock = FakeClock()
    client = open_client("http://127.0.0.1:1", patience_s=patience_s)
    client._sleep, client._clock = clock.sleep, clock

    def answer(*args, **kwargs):
        given = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(given, Exception):
            raise given
        return given

    client._attempt = answer
    return client, clock


STATUS_ANSWER = httpx.Response(200, json={"current_step": 4, "queue_size": 0})


def test_client_with_patience_outlasts_an_outage_and_says_so(caplog):
    client, clock = patient_client([AWAY, AWAY, AWAY, AWAY, STATUS_ANSWER])

    with caplog.at_level("INFO"):
        assert client.status()["current_step"] == 4

    assert len(clock.pauses) == 4
    assert "connection refused" in caplog.text
    assert "has answered; going on" in caplog.text


@pytest.mark.parametrize(
    "request_of",
    [
        lambda client: client.batch(lease_s=600.0, wait_s=20.0),
        lambda client: client.ack("7-1", steps_done=1),
        lambda client: client.set_policy_version(1),
        lambda client: client.register(batch_size=1),
        lambda client: client.status(),
    ],
)
def test_client_gives_up_after_its_patience_whatever_it_asks(request_of):
    client, clock = patient_client([AWAY])

    with pytest.raises(TrajectoryApiError, match="connection refused"):
        request_of(client)

    assert 45.0 <= clock.now_s <= 60.0


def test_client_waits_as_long_as_a_busy_service_asks():
    busy = TrajectoryApiError("busy", status=503, retry_after_s=7.0)
    client, clock = patient_client([busy, STATUS_ANSWER])

    client.status()

    assert clock.pauses == [7.0]


def test_feed_registers_again_with_a_service_that_forgot_the_run(tmp_path):
    client = ScriptedClient(UNREGISTERED, BATCH)
    feed, _ = make_feed(client, tmp_path)

    assert feed.next_batch(3) == BATCH
    assert [r["starting_step"] for r in client.registrations] == [3]


def test_feed_passes_a_refusal_on(tmp_path):
    refusal = TrajectoryApiError("unprocessable", status=422)
    feed, _ = make_feed(ScriptedClient(refusal), tmp_path)

    with pytest.raises(TrajectoryApiError, match="unprocessable"):
        feed.next_batch(0)


def test_contract_doors_reach_a_real_service(tmp_path, service):
    config = tiny_config(tmp_path, atropos_url=service.url)

    assert check_atropos_api(service.url, timeout=5)
    assert register_trainer(config) > 0
    assert get_batch(service.url) == {"batch": None}
    assert not check_atropos_api(f"http://127.0.0.1:{find_free_port()}", timeout=0)
