"""Starts, failures and the end of a run by the rules of all supervisors; nothing is started."""

from __future__ import annotations

from dataclasses import replace

import pytest

from example_trainer.cluster.parts import Part, Resources, RestartPolicy, Role
from example_trainer.cluster.restarts import Attempts, PartLife, RunLives

POLICY = RestartPolicy(attempts=1, first_backoff_s=1, longest_backoff_s=60, healthy_s=600)
URL = "http://engine/health"


def part(name: str, role: Role, after: tuple[str, ...] = (), ready_url: str | None = None) -> Part:
    return Part(
        name=name,
        role=role,
        command=(name,),
        variables={},
        resources=Resources(),
        ready_url=ready_url,
        after=after,
        restarts=POLICY,
    )


def lives_at(now: float) -> tuple[RunLives, PartLife, PartLife]:
    """A run whose engine and trainer run since `now`."""
    parts = [part("engine", "engine", ready_url=URL), part("trainer", "trainer", ("engine",))]
    run = RunLives(parts, start_limit_s=30)
    engine, trainer = run.lives.values()
    for life in (engine, trainer):
        life.begin(now)
        life.answer(now)
    return run, engine, trainer


def test_attempts_wait_twice_as_long_each_time_and_come_back_after_health():
    attempts = Attempts(replace(POLICY, attempts=3, longest_backoff_s=3))

    assert attempts.after_failure(0) == 1
    assert attempts.after_failure(10) == 12
    assert attempts.after_failure(20) == 23  # 4 s, cut to 3
    assert attempts.after_failure(30) is None
    assert attempts.after_failure(700) == 701  # 670 s without a failure
    assert attempts.total == 4


def test_part_starts_after_its_back_off_and_with_the_parts_that_it_needs():
    run, engine, trainer = lives_at(0)
    assert run.fail(trainer, 10, "ended with exit code 1") == 11

    assert [trainer.is_due(now) for now in (10.9, 11)] == [False, True]
    assert run.has_its_needs(trainer)
    engine.begin(12)
    assert not run.has_its_needs(trainer)


def test_run_fails_with_the_last_attempt_of_a_part():
    run, engine, _ = lives_at(0)

    run.fail(engine, 1, "was killed")
    assert run.fail(engine, 2, "was killed", cause="engine was killed: out of memory") is None
    run.stop()

    status = run.status()
    assert (status.state, status.detail) == ("failed", "engine was killed: out of memory")
    assert [(each.state, each.restarts) for each in status.parts] == [("failed", 1), ("stopped", 0)]


def test_run_finishes_with_its_trainer_only():
    run, engine, trainer = lives_at(0)

    run.finish(engine)
    assert run.state == "running"
    run.finish(trainer)
    run.fail(engine, 1, "was killed", is_final=True)

    assert (run.state, run.reason) == ("finished", "")


@pytest.mark.parametrize(
    ("code", "change", "answers", "expected"),
    [
        (1, {}, True, False),
        (2, {}, True, True),
        (2, {}, False, False),
        (2, {"state": "restarting"}, True, False),
        (2, {"since": 5.0}, True, False),  # started again after the trainer
    ],
)
def test_invalid_settings_are_final_unless_a_needed_part_was_down(code, change, answers, expected):
    run, engine, trainer = lives_at(0)
    for name, value in change.items():
        setattr(engine, name, value)

    assert run.is_final(trainer, code, lambda url: answers) == expected


def test_silence_is_judged_by_the_limit_of_the_start_until_the_first_answer():
    run, engine, _ = lives_at(0)
    engine.begin(0)

    assert run.silence(engine, 29) is None
    assert run.silence(engine, 30) == "was not ready for 30 s"
    engine.answer(30)
    assert run.silence(engine, 149) is None
    assert run.silence(engine, 150) == "did not answer for 120 s"
