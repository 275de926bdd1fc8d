from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from atroposlib.envs.scheduler import EvaluationRunner


class Owner:
    def __init__(self) -> None:
        self.num_ended = 0
        self.failures: Counter[str] = Counter()
        self.runner = EvaluationRunner(
            on_end=self.note_end, count_failure=lambda name: self.failures.update([name])
        )

    def note_end(self) -> None:
        self.num_ended += 1


async def test_start_while_one_runs_waits_for_it(caplog: pytest.LogCaptureFixture) -> None:
    owner = Owner()
    over = asyncio.Event()
    steps: list[int] = []

    def evaluation(step: int) -> Callable[[], Awaitable[None]]:
        async def evaluate() -> None:
            steps.append(step)
            await over.wait()

        return evaluate

    for step in (2, 4, 6):
        owner.runner.start(evaluation(step))

    assert "still running" in caplog.text
    over.set()
    await owner.runner.finish()
    assert not owner.runner.is_running
    assert steps == [2, 6]  # what became due twice meanwhile measures the same policy
    assert owner.num_ended == 1
    owner.runner.start(evaluation(8))
    await owner.runner.finish()
    assert steps == [2, 6, 8]
    assert owner.num_ended == 2


async def test_shut_down_forgets_what_waits() -> None:
    owner = Owner()
    steps: list[str] = []

    async def evaluate() -> None:
        steps.append("begun")
        await asyncio.Event().wait()

    owner.runner.start(evaluate)
    owner.runner.start(evaluate)
    await asyncio.sleep(0)

    await owner.runner.shut_down(grace_s=1)

    assert steps == ["begun"]
    assert not owner.runner.is_running


async def test_failing_evaluation_is_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    owner = Owner()

    async def evaluate() -> None:
        raise LookupError("no test set")

    owner.runner.start(evaluate)
    await owner.runner.finish()

    assert owner.failures == {"LookupError": 1}
    assert "no test set" in caplog.text
    assert owner.num_ended == 1


async def test_evaluation_that_cancels_itself_is_counted_and_the_next_runs() -> None:
    owner = Owner()
    steps: list[str] = []

    async def cancel_itself() -> None:
        inner = asyncio.ensure_future(asyncio.Event().wait())
        inner.cancel()
        await inner

    async def evaluate() -> None:
        steps.append("next")

    owner.runner.start(cancel_itself)
    owner.runner.start(evaluate)
    await owner.runner.finish()

    assert owner.failures == {"CancelledError": 1}
    assert steps == ["next"]
    assert owner.runner.num_ended == 2


async def test_shut_down_cancels() -> None:
    owner = Owner()
    await owner.runner.shut_down(grace_s=1)  # nothing to end
    owner.runner.start(asyncio.Event().wait)

    await owner.runner.shut_down(grace_s=1)

    assert owner.runner.task is not None
    assert owner.runner.task.cancelled()
    assert owner.failures == {}
