from __future__ import annotations

import asyncio

from atroposlib.envs.server_handling.engine_http import answer_cost_s
from atroposlib.utils.aio import SHARE_S, LoopTurns


async def passes_until_done(turns: LoopTurns, costs_s: list[float]) -> list[int]:
    """Let everyone come at once; return in which pass of the loop each had its turn."""
    current_pass = 0
    turns_taken: list[int] = []

    async def come(cost_s: float) -> None:
        await turns.turn(cost_s)
        turns_taken.append(current_pass)

    tasks = [asyncio.create_task(come(cost_s)) for cost_s in costs_s]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        current_pass += 1
    return turns_taken


async def test_what_fits_the_share_goes_on_at_once() -> None:
    assert await passes_until_done(LoopTurns(), [SHARE_S / 4] * 4) == [0, 0, 0, 0]


async def test_what_does_not_fit_waits_for_later_passes_in_order() -> None:
    taken = await passes_until_done(LoopTurns(), [SHARE_S / 2] * 6)

    assert taken == sorted(taken)
    assert max(taken.count(number) for number in set(taken)) == 2


async def test_work_larger_than_the_share_has_a_pass_to_itself() -> None:
    taken = await passes_until_done(LoopTurns(), [SHARE_S * 9, SHARE_S * 9, SHARE_S / 9])

    assert len(set(taken)) == 3


async def test_cancelled_waiter_holds_nobody_up() -> None:
    turns = LoopTurns()
    _, _, given_up, patient = [asyncio.create_task(turns.turn(SHARE_S)) for _ in range(4)]
    await asyncio.sleep(0)

    given_up.cancel()
    await asyncio.wait_for(patient, timeout=60)

    assert given_up.cancelled()


def test_turns_survive_the_end_of_their_loop() -> None:
    turns = LoopTurns()

    for _ in range(3):
        asyncio.run(asyncio.wait_for(turns.turn(SHARE_S), timeout=60))


def test_longer_answers_are_expected_to_take_longer() -> None:
    assert 0 < answer_cost_s(1_000) < answer_cost_s(1_000_000)
