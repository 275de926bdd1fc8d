from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from atroposlib.envs.evaluation_runner import EvaluationRunner


class Owner:
    def __init__(self) -> None:
        self.num_ended = 0
        self.failures: Counter[str] = Counter()
        self.runner = EvaluationRunner(
            on_end=self.note_end, count_failure=lambda name: self.failures.update([name])
        )

    def note_end(self) -> None:
        self.num_ended += 1


async def test_start_while_one_runs_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    owner = Owner()
    over = asyncio.Event()

    first, second = owner.runner.start(over.wait), owner.runner.start(over.wait)

    assert (first, second) == (True, False)
    assert "still running" in caplog.text
    over.set()
    await owner.runner.finish()
    assert not owner.runner.is_running
    assert owner.runner.start(over.wait)
    await owner.runner.finish()
    assert owner.num_ended == 2


async def test_failing_evaluation_is_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    owner = Owner()

    async def evaluate() -> None:
        raise LookupError("no test set")

    owner.runner.start(evaluate)
    await owner.runner.finish()

    assert owner.failures == {"LookupError": 1}
    assert "no test set" in caplog.text
    assert owner.num_ended == 1


async def test_shut_down_cancels() -> None:
    owner = Owner()
    await owner.runner.shut_down(grace_s=1)  # nothing to end
    owner.runner.start(asyncio.Event().wait)

    await owner.runner.shut_down(grace_s=1)

    assert owner.runner.task is not None
    assert owner.runner.task.cancelled()
    assert owner.failures == {}
