"""What the metrics say about a run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from atroposlib.api import records
from atroposlib.api.metrics import FIGURES, ServiceMetrics
from tests.api.fake_run import FakeRun

pytestmark = pytest.mark.slow


@pytest.fixture
def run() -> FakeRun:
    return FakeRun()


def read(metrics: ServiceMetrics) -> dict[str, float]:
    """Return every sample as the text format has it, by its name and labels."""
    text = metrics.render()[0].decode()
    return {
        sample.name + "".join(f" {value}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_of_a_fresh_run_are_zero(run: FakeRun) -> None:
    found = read(ServiceMetrics(run))

    plain = [figure.name for figure in FIGURES if figure.label is None]
    assert {name: found[name] for name in plain} == dict.fromkeys(plain, 0.0)
    assert found["process_resident_memory_bytes"] > 0


def test_metrics_tell_what_waits(run: FakeRun) -> None:
    run.start()
    run.add_env("maths", group_size=4)
    run.add_env("maths")
    run.admit(4, 2, env_id=0)
    run.admit(2, env_id=1, age_s=120, version=0)
    run.state.apply(records.PolicyVersionSet(0, 7))

    found = read(ServiceMetrics(run))

    assert found["atropos_queue_groups"] == 2
    assert found["atropos_queue_sequences"] == 6
    assert found["atropos_queue_tokens"] == 60
    assert found["atropos_queue_bytes"] == 600
    assert found["atropos_environment_queue_sequences maths"] == 6
    assert found["atropos_buffered_sequences"] == 2
    assert found["atropos_queue_oldest_staleness_steps"] == 7
    assert found["atropos_policy_version"] == 7
    assert found["atropos_environments connected"] == 2


def test_metrics_tell_the_age_of_the_next_group(run: FakeRun) -> None:
    run.admit(2, age_s=120)
    run.admit(2, age_s=1)

    age_s = read(ServiceMetrics(run))["atropos_queue_oldest_age_seconds"]
    assert 120 <= age_s < 180


def test_metrics_tell_what_became_of_batches(run: FakeRun) -> None:
    run.start(batch_size=4)
    run.admit(4, 4, 4)
    metrics = ServiceMetrics(run)
    run.acknowledge(run.form())
    run.form(lease_until=run.now + 60)
    lost = run.form()
    run.state.apply(records.BatchesReturned([(lost.batch_id, 1)], "lost", run.now))

    found = read(metrics)

    states = ("sending", "leased", "returned")
    assert [found[f"atropos_batches_pending {state}"] for state in states] == [0, 1, 1]
    assert found["atropos_batches_pending_sequences"] == 8
    assert found["atropos_batches_returned_total lost"] == 1
    assert found["atropos_step"] == 1
    for unit, expected in {"batches": 1, "groups": 1, "sequences": 4}.items():
        assert found[f"atropos_{unit}_delivered_total"] == expected


def test_metrics_tell_how_old_groups_were_when_they_left(run: FakeRun) -> None:
    run.start(batch_size=4)
    run.admit(2, age_s=10, version=0)
    run.admit(2, age_s=100, version=3)
    run.state.apply(records.PolicyVersionSet(0, 4))
    metrics = ServiceMetrics(run)
    batch = run.form()

    metrics.observe_delivery(batch)

    found = read(metrics)
    ages = [found[f"atropos_handed_out_age_seconds_bucket {le}"] for le in ("5.0", "15.0", "300.0")]
    assert ages == [0, 1, 2]
    assert found["atropos_handed_out_age_seconds_sum"] == pytest.approx(110)
    staleness = "atropos_handed_out_staleness_steps_bucket"
    assert [found[f"{staleness} {le}"] for le in ("0.0", "1.0", "3.0", "4.0")] == [0, 1, 1, 2]


def test_batch_that_leaves_again_is_not_observed_twice(run: FakeRun) -> None:
    run.start(batch_size=4)
    run.admit(4)
    metrics = ServiceMetrics(run)
    first = run.form()
    run.state.apply(records.BatchesReturned([(first.batch_id, 1)], "expired", run.now))
    run.state.apply(records.BatchHandedOut(first.batch_id, 2, "", run.now))

    metrics.observe_delivery(first)
    metrics.observe_delivery(run.state.delivery.in_flight[first.batch_id])

    assert read(metrics)["atropos_handed_out_age_seconds_count"] == 1


def test_environments_beyond_a_hundred_names_share_a_label(run: FakeRun) -> None:
    run.start()
    for number in range(150):
        run.add_env(f"env-{number}")
        run.admit(1, env_id=number)
    run.admit(3)

    found = read(ServiceMetrics(run))

    name = "atropos_environment_queue_sequences"
    assert sum(key.startswith(name) for key in found) == 102
    assert (found[f"{name} env-99"], found[f"{name} other"]) == (1, 50)
    assert found[f"{name} unregistered"] == 3


def test_metrics_name_refusals_stalls_and_expired_environments(run: FakeRun) -> None:
    run.start(batch_size=4)
    run.add_env()
    run.counters["groups/refused_queue_full"] += 2
    run.counters["something/else"] += 1
    run.state.apply(records.EnvDisconnected(0, True, run.now))
    run.admit(3, 4)

    found = read(ServiceMetrics(run))

    assert found["atropos_requests_refused_total queue_full"] == 2
    assert found["atropos_stalled_sequences queue/unpackable"] == 3
    assert found["atropos_environments expired"] == 1


def test_metrics_are_rendered_as_the_scraper_asks(run: FakeRun) -> None:
    metrics = ServiceMetrics(run)

    text, text_type = metrics.render("text/plain")
    open_metrics, open_type = metrics.render("application/openmetrics-text; version=1.0.0")

    assert text_type.startswith("text/plain")
    assert open_type.startswith("application/openmetrics-text")
    assert open_metrics.endswith(b"# EOF\n")
    assert not text.endswith(b"# EOF\n")


def test_two_services_in_one_process_do_not_share_metrics() -> None:
    first, second = FakeRun(), FakeRun()
    one, other = ServiceMetrics(first), ServiceMetrics(second)
    first.admit(2)

    assert read(one)["atropos_queue_groups"] == 1
    assert read(other)["atropos_queue_groups"] == 0


def test_every_metric_has_one_name_and_a_help_text(run: FakeRun) -> None:
    names = [metric.name for metric in ServiceMetrics(run).registry.collect()]

    assert len(names) == len(set(names))
    for metric in ServiceMetrics(run).registry.collect():
        assert metric.documentation.endswith(".")
        assert metric.name.startswith(("atropos_", "process_"))


def test_rendering_does_not_depend_on_what_is_queued(run: FakeRun) -> None:
    run.start()
    for number in range(1000):
        run.add_env(f"env-{number}")
    run.admit(*[4] * 100_000, env_id=3)
    metrics = ServiceMetrics(run)
    metrics.render()

    assert _num_lines_run(metrics.render) < 50_000  # some for each environment, none for a group


def _num_lines_run(work: Callable[[], object]) -> int:
    """Count the lines of Python that a call runs, loops included; time depends on the machine."""
    num_lines = 0

    def count(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        nonlocal num_lines
        num_lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        work()
    finally:
        sys.settrace(before)
    return num_lines
