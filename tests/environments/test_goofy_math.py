"""Goofy math: comparisons around a circle, scores of right answers, verdicts that are missing."""

from __future__ import annotations

from typing import Any

import pytest

from atroposlib.tasks.judge_model import NoVerdictError
from environments.community.goofy_math.goofy_math_env import (
    GoofyMathEnv,
    circle_pairs,
    goofy_scores,
)
from tests.environments.offline import PROBED, make_env
from tests.fakes import ScriptedEngine

ITEM = {"question": "48 - 5?", "answer": "#### 43"}


@pytest.mark.parametrize(
    ("members", "num_opponents", "pairs"),
    [
        ([3, 5], 2, [(3, 5)]),
        ([0, 1, 2], 1, [(0, 1), (1, 2), (0, 2)]),
        ([0, 1, 2, 3], 2, [(0, 1), (1, 2), (2, 3), (0, 3), (0, 2), (1, 3)]),
        ([0, 1, 2, 3, 4], 1, [(0, 1), (1, 2), (2, 3), (3, 4), (0, 4)]),
    ],
)
def test_pairs_around_a_circle(
    members: list[int], num_opponents: int, pairs: list[tuple[int, int]]
) -> None:
    assert circle_pairs(members, num_opponents=num_opponents) == pairs


@pytest.mark.parametrize(
    ("is_right", "wins", "scores"),
    [
        ([True, True], {(0, 1): 2}, [1.5, 1.0]),
        ([True, True], {(0, 1): 1}, [1.25, 1.25]),
        ([True, False, True], {(0, 2): 0}, [1.0, -1.0, 1.5]),
        # 2 + 1 of 4 wins, 0 + 2 of 4, 1 + 0 of 4
        ([True] * 3, {(0, 1): 2, (0, 2): 1, (1, 2): 2}, [1.375, 1.25, 1.125]),
        ([True] * 3, {(0, 1): 2, (1, 2): 2}, [1.5, 1.25, 1.0]),  # one comparison is dropped
        ([True] * 3, {(0, 1): 2}, None),
        ([True, True], {}, None),
    ],
)
def test_scores(
    is_right: list[bool], wins: dict[tuple[int, int], int], scores: list[float] | None
) -> None:
    assert goofy_scores(is_right, wins) == scores


def verdict(prompt: str) -> str:
    a = prompt.partition("<answer A ")[2].partition("</answer A")[0]
    return "\\boxed{A}" if "penguin" in a else "\\boxed{B}"


async def group_of(
    answers: list[str], monkeypatch: pytest.MonkeyPatch, *, judge: Any = verdict
) -> Any:
    """The group of some answers."""
    written = iter(answers)

    def play(prompt: str) -> str:
        if "Criterion: " in prompt:
            return judge(prompt)
        return next(written) if "48 - 5?" in prompt else PROBED

    async with ScriptedEngine(play) as engine:
        env = make_env(GoofyMathEnv, engine, monkeypatch, group_size=len(answers))
        try:
            group, _ = await env.collect_trajectories(ITEM)
        finally:
            await env.server.close()
    return group


async def test_goofier_right_answer_earns_more(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = ["It is \\boxed{43}.", "A penguin says \\boxed{43}.", "A penguin says \\boxed{44}."]

    group = await group_of(answers, monkeypatch)

    assert group["scores"] == [1.0, 1.5, -1.0]


async def test_thinking_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = ["<think>penguin</think> \\boxed{43}", "A penguin says \\boxed{43}."]

    assert (await group_of(answers, monkeypatch))["scores"] == [1.0, 1.5]


async def test_group_with_one_right_answer_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await group_of(["\\boxed{43}", "A penguin.", ""], monkeypatch) is None


@pytest.mark.parametrize("reply", ["Both are funny.", "\\boxed{C}", "\\boxed{A} or \\boxed{B} ?"])
async def test_judge_of_one_order_or_none_decides_nothing(
    reply: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judge(prompt: str) -> str:
        return reply if prompt.index("penguin") < prompt.index("<answer B") else "no verdict"

    with pytest.raises(NoVerdictError):
        await group_of(
            ["A penguin says \\boxed{43}.", "It is \\boxed{43}."], monkeypatch, judge=judge
        )
