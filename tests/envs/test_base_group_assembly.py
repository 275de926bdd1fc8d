from __future__ import annotations

import asyncio
from typing import Any

import pytest

from atroposlib.envs.rollouts import as_pair, assemble_group, gather_rollouts
from atroposlib.errors import GroupError


def trajectory(score: float = 0.0, **fields: Any) -> dict[str, Any]:
    return {"tokens": [1, 2], "masks": [-100, 2], "scores": score, **fields}


async def test_gather_rollouts_returns_results_and_backlog_in_order() -> None:
    counter = iter(range(3))

    async def collect(item: str) -> tuple[Any, list[str]]:
        number = next(counter)
        return number, [f"{item}{number}"]

    results, backlog = await gather_rollouts(collect, "a", group_size=3)

    assert results == [0, 1, 2]
    assert backlog == ["a0", "a1", "a2"]


async def test_gather_rollouts_one_raising_lets_siblings_finish() -> None:
    finished = []

    async def collect(item: list[int]) -> Any:
        number = item.pop()
        if number == 0:
            raise KeyError("answer")
        await asyncio.sleep(0.005)
        finished.append(number)

    with pytest.raises(KeyError, match="answer"):
        await gather_rollouts(collect, [1, 2, 0], group_size=3)

    assert sorted(finished) == [1, 2]


async def test_gather_rollouts_a_cancelled_rollout_fails_but_does_not_cancel_the_group() -> None:
    async def collect(_: Any) -> Any:
        raise asyncio.CancelledError

    with pytest.raises(RuntimeError, match="cancelled by its own environment"):
        await gather_rollouts(collect, None, group_size=2)


@pytest.mark.parametrize(
    ("outcome", "pair"),
    [
        ((1, [2]), (1, [2])),
        ((1, None), (1, [])),
        (None, (None, [])),
        ({"tokens": []}, ({"tokens": []}, [])),
        ([1, 2], ([1, 2], [])),
    ],
)
def test_as_pair_table(outcome: Any, pair: tuple[Any, list[Any]]) -> None:
    assert as_pair(outcome) == pair


def test_assemble_group_keeps_every_field() -> None:
    first = trajectory(1.0, inference_logprobs=[1.0, -0.5], messages=["a"])
    second = trajectory(0.0, inference_logprobs=[1.0, -0.7], messages=["b"])

    group = assemble_group([first, second], is_scored_later=False)

    assert group["scores"] == [1.0, 0.0]
    assert group["inference_logprobs"] == [[1.0, -0.5], [1.0, -0.7]]
    assert group["messages"] == [["a"], ["b"]]
    assert group["advantages"] is None


def test_assemble_group_partial_field_is_dropped_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    group = assemble_group([trajectory(images="x"), trajectory()], is_scored_later=False)

    assert group["images"] is None
    assert "images" in caplog.text


def test_assemble_group_none_gives_no_group() -> None:
    assert assemble_group([trajectory(), None], is_scored_later=False) is None
    assert assemble_group([None, None], is_scored_later=False) is None


def test_assemble_group_scored_later_hands_on_what_there_is() -> None:
    results = [("text", 1), None, ("other", 2)]

    assert assemble_group(results, is_scored_later=True) == [("text", 1), ("other", 2)]


def test_assemble_group_other_results_raise_with_the_remedy() -> None:
    with pytest.raises(GroupError, match="result 0 of collect_trajectory is a str; return"):
        assemble_group(["text", "text"], is_scored_later=False)
    with pytest.raises(GroupError, match="result 1 of collect_trajectory has no scores"):
        assemble_group([trajectory(), {"tokens": [1], "masks": [1]}], is_scored_later=False)


def test_assemble_group_score_that_is_none_is_named_by_its_position() -> None:
    unscored = {"tokens": [1], "masks": [1], "scores": None}

    with pytest.raises(GroupError, match=r"^scores\[1\] is None; expected a number"):
        assemble_group([None, unscored], is_scored_later=False)
