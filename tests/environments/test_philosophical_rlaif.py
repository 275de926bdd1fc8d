"""Philosophical RLAIF: results of pairs, truncated answers, missing verdicts, evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atroposlib.tasks.judge_model import NoVerdictError
from environments.community.philosophical_rlaif_env import (
    SAMPLE,
    PhilosophicalRLAIFEnv,
    first_exchange,
    pair_scores,
)
from tests.environments.offline import PROBED, evaluate, make_env
from tests.fakes import ScriptedEngine

USER, REPLY = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}
ITEM = {"question": "Why?", "reply": "Because."}


@pytest.mark.parametrize(
    ("conversation", "exchange"),
    [
        ([USER, REPLY, USER], ITEM),
        ([{"role": "system", "content": "Be brief."}, USER, REPLY], ITEM),
        ([USER], {"question": "Why?", "reply": ""}),
        ([USER, USER], {"question": "Why?", "reply": ""}),
        ([REPLY], None),
        ([{"role": "user", "content": None}], None),
        (None, None),
    ],
)
def test_first_exchange(conversation: Any, exchange: dict[str, str] | None) -> None:
    assert first_exchange(conversation) == exchange


@pytest.mark.parametrize(
    ("is_lost", "wins", "scores"),
    [
        ([False, False], {(0, 1): 2}, [1.0, -1.0]),
        ([False, False], {(0, 1): 0}, [-1.0, 1.0]),
        ([False, False], {(0, 1): 1}, [0.0, 0.0]),
        ([False, False], {}, None),  # no verdict
        ([False, True], {}, [1.0, -1.0]),
        ([True, True], {}, [-1.0, -1.0]),
        # 1 and 1 against the lost one; -1 and 1; lost
        ([False, False, True], {(0, 1): 2}, [1.0, 0.0, -1.0]),
        ([False] * 3, {(0, 1): 2, (1, 2): 1}, [1.0, -0.5, 0.0]),  # (0, 2) is dropped
    ],
)
def test_scores(
    is_lost: list[bool], wins: dict[tuple[int, int], int], scores: list[float] | None
) -> None:
    assert pair_scores(is_lost, wins) == scores


def reader(prompt: str) -> str:
    a = prompt.partition("<answer A ")[2].partition("</answer A")[0]
    return "\\boxed{A}" if "objection" in a else "\\boxed{B}"


async def group_of(
    answers: list[str], monkeypatch: pytest.MonkeyPatch, *, judge: Any = reader
) -> Any:
    """The group of some answers, and the token limits of all requests."""
    written = iter(answers)

    def play(prompt: str) -> str:
        if "Criterion: " in prompt:
            assert "<think>" not in prompt
            return judge(prompt)
        return next(written) if "Why?" in prompt else PROBED

    async with ScriptedEngine(play) as engine:
        env = make_env(PhilosophicalRLAIFEnv, engine, monkeypatch, group_size=len(answers))
        try:
            group, _ = await env.collect_trajectories(ITEM)
        finally:
            await env.server.close()
        limits = {request.body.get("max_tokens", 0) for request in engine.requests}
    return group, limits


async def test_winner_of_both_orders_earns_one(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = ["It just is.", "<think>An objection?</think>One objection is this.", ""]

    group, limits = await group_of(answers, monkeypatch)

    assert group["scores"] == [0.0, 1.0, -1.0]
    assert {1024, 2048} <= limits <= {*range(9), 1024, 2048}  # of the generator, and of the judge


async def test_judge_of_a_place_makes_a_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    group, _ = await group_of(["x", "y"], monkeypatch, judge=lambda _: "\\boxed{A}")

    assert group["scores"] == [0.0, 0.0]


async def test_judge_without_a_verdict_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoVerdictError):
        await group_of(["x", "y"], monkeypatch, judge=lambda _: "Both are deep.")


@pytest.mark.parametrize(
    ("verdict", "metrics"),
    [
        ("\\boxed{B}", {"eval/mean_score": 0.0, "eval/fraction_judged": 1.0}),
        ("I cannot say.", {"eval/fraction_judged": 0.0}),
    ],
)
async def test_evaluation_compares_with_the_replies_of_the_data(
    verdict: str, metrics: dict[str, float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def play(prompt: str) -> str:
        return verdict if "Criterion: " in prompt else "An answer."

    async with ScriptedEngine(play) as engine:
        settings = {"dataset_path": str(SAMPLE), "judge_temperature": 0.0}
        report = await evaluate(PhilosophicalRLAIFEnv, engine, monkeypatch, tmp_path, **settings)

    assert metrics.items() <= report["results"]["all"].items()


async def test_model_of_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedEngine() as engine:
        env = make_env(PhilosophicalRLAIFEnv, engine, monkeypatch, generator_model_name="mine")
        assert [server.model_name for server in env.server_configs] == ["mine"]
