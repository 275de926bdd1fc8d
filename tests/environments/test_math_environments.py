from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from atroposlib.envs.check import check_environment
from atroposlib.scored_data import check_group
from atroposlib.tasks.math_problems import MathItem
from environments import math_server, math_server_zero
from environments.math_server import SAMPLE
from tests.environments.offline import PROBED, make_env
from tests.fakes import ScriptedEngine

pytestmark = pytest.mark.slow

ITEM = MathItem("What is 6 * 7?", "\\boxed{42}")
RIGHT, WRONG = "<think>a</think>It is \\boxed{42}.", "<think>b</think>Surely \\boxed{41}."
RIGHT_TOO = "<think>c</think>Six sevens are seven sixes, and these make \\boxed{42}"
TRUE, FALSE = "<think>d</think>\\boxed{True}", "<think>e</think>\\boxed{False}"


@asynccontextmanager
async def opened(
    env_cls: Any, replies: Any, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> AsyncIterator[Any]:
    async with ScriptedEngine(replies) as engine:
        chosen = {
            "dataset_path": str(SAMPLE),
            "group_size": 2,
            "include_messages": True,
            "percent_to_judge": 1.0,
            "percent_length_penalty": 1.0,
            **settings,
        }
        env = make_env(env_cls, engine, monkeypatch, **chosen)
        await env.setup()
        try:
            yield env
        finally:
            await env.close()
            env.score_pool.close()


def solver(*, retry: str = RIGHT, verdict: str = FALSE) -> Callable[[str], str]:
    """A judge with one verdict, that solves every second time wrong at first."""
    asked = []

    def reply(prompt: str) -> str:
        if "Somebody went through" in prompt:
            asked.append(prompt)
            return retry if len(asked) % 2 else WRONG
        return verdict

    return reply


async def test_mixed_group_is_scored_and_both_solutions_go_to_the_judge(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with opened(math_server.MathEnv, [PROBED, RIGHT, WRONG], monkeypatch) as env:
        group, later = await env.collect_trajectories(ITEM)

        assert sorted(group["scores"]) == [-1.0, 1.0]
        check_group(group)
        assert [(item.kind, item.is_right) for item in later] == [("judge", True), ("judge", False)]
        assert {item.solutions for item in later} == {
            ("It is \\boxed{42}.",),
            ("Surely \\boxed{41}.",),
        }
        metrics: dict[str, Any] = {}
        await env.wandb_log(metrics)
        assert metrics["train/percent_correct"] == 0.5
        assert metrics["train/pass_at_groupsize"] == 1.0
        assert len(metrics["train/normal_rollouts"]["rows"]) == 1


async def test_all_wrong_group_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(math_server.MathEnv, [PROBED, WRONG, WRONG], monkeypatch) as env:
        assert await env.collect_trajectories(ITEM) == (None, [])


async def test_all_right_group_is_ranked_by_length_and_its_pair_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with opened(math_server.MathEnv, [PROBED, RIGHT, RIGHT_TOO], monkeypatch) as env:
        group, [later] = await env.collect_trajectories(ITEM)

        by_length = sorted(zip(map(len, group["tokens"]), group["scores"], strict=True))
        assert [value for _, value in by_length] == pytest.approx([1.0, -1.0])
        assert (later.kind, len(later.solutions)) == ("rlaif", 2)


async def test_votes_make_a_group_of_two_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def reply(prompt: str) -> str:
        if "<solution 1 " not in prompt:
            answers.append(prompt)
            return RIGHT if len(answers) % 2 else RIGHT_TOO
        return "\\boxed{1}" if prompt.index("It is") < prompt.index("Six sevens") else "\\boxed{2}"

    answers: list[str] = []
    async with opened(math_server.MathEnv, reply, monkeypatch, percent_length_penalty=0) as env:
        none, [later] = await env.collect_trajectories(ITEM)
        group, _ = await env.collect_trajectories(later)

        assert none is None
        winner = group["scores"].index(1.0)
        assert "It is" in group["messages"][winner][-1]["content"]
        assert group["group_overrides"] == {"group_size": 2}
        check_group(group)
        assert await env.collect_trajectories(later) == (None, [])


async def test_vote_for_whatever_stands_first_is_a_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    replies = [PROBED, RIGHT, RIGHT_TOO, *["\\boxed{1}"] * 60]
    async with opened(math_server.MathEnv, replies, monkeypatch) as env:
        _, [later] = await env.collect_trajectories(ITEM)

        assert await env.collect_trajectories(later) == (None, [])


async def test_verdict_on_a_right_solution_is_one_or_minus_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    item = ITEM._replace(kind="judge", solutions=("It is \\boxed{42}.",), is_right=True)
    async with opened(math_server.MathEnv, [PROBED, TRUE, FALSE], monkeypatch) as env:
        group, later = await env.collect_trajectories(item)

        assert sorted(group["scores"]) == [-1.0, 1.0]
        assert later == []


async def test_verdict_on_a_wrong_solution_earns_the_share_of_right_retries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    item = ITEM._replace(kind="judge", solutions=("Surely \\boxed{41}.",), is_right=False)
    async with opened(math_server.MathEnv, solver(), monkeypatch) as env:
        group, later = await env.collect_trajectories(item)
        retries, _ = await env.collect_trajectories(later[0])

        assert group is None  # both verdicts are right and help half of the time
        assert [found.kind for found in later] == ["selfcorrect"] * 2
        assert sorted(retries["scores"]) == [-1.0, 1.0]
        check_group(retries)
        metrics: dict[str, Any] = {}
        await env.wandb_log(metrics)
        assert metrics["judge_train/judge_success_rate"] == 0.5
        assert metrics["judge_train/percent_judge_correct"] == 1.0


async def test_no_right_verdict_gives_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    item = ITEM._replace(kind="judge", solutions=("Surely \\boxed{41}.",), is_right=False)
    async with opened(math_server.MathEnv, solver(verdict=TRUE), monkeypatch) as env:
        assert await env.collect_trajectories(item) == (None, [])


@pytest.mark.parametrize("is_masked", [True, False])
@pytest.mark.parametrize(
    ("env_cls", "right"),
    [
        (math_server.MathEnv, RIGHT),
        (math_server_zero.MathEnv, " s </think> <answer> \\boxed{42} </answer>"),
    ],
)
async def test_cut_solution_is_wrong_and_muted_only_where_that_is_set(
    env_cls: Any, right: str, is_masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    replies = [PROBED, right, right + "x" * 5000]
    settings = {"mask_too_long_completions": is_masked}
    async with opened(env_cls, replies, monkeypatch, **settings) as env:
        group, _ = await env.collect_trajectories(ITEM)

    check_group(group)
    assert sorted(group["scores"]) == [-1.0, 1.0]
    muted = {"set_advantage_to_zero": True} if is_masked else {}
    assert group["overrides"][group["scores"].index(-1.0)] == muted
    assert group["overrides"][group["scores"].index(1.0)] == {}


async def test_unreadable_gold_answer_drops_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(math_server.MathEnv, [PROBED, RIGHT, WRONG], monkeypatch) as env:
        assert await env.collect_trajectories(ITEM._replace(answer="\\boxed{}")) == (None, [])


async def test_base_model_is_scored_on_its_continuation_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right, hidden = " s </think> <answer> \\boxed{42} ", " \\boxed{42} </think> <answer> hm "
    async with opened(math_server_zero.MathEnv, [PROBED, right, hidden], monkeypatch) as env:
        group, later = await env.collect_trajectories(ITEM)

        by_text = {
            chat[-1]["content"]: group["scores"][i] for i, chat in enumerate(group["messages"])
        }
        assert by_text == {f"<think>{right}": 1.0, f"<think>{hidden}": -1.0}
        assert later == []
        check_group(group)


@pytest.mark.parametrize("env_cls", [math_server.MathEnv, math_server_zero.MathEnv])
@pytest.mark.long
def test_environment_passes_its_check(env_cls: Any) -> None:
    report = check_environment(env_cls, num_score_workers=1)

    assert report.passed, report.text
