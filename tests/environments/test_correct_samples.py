"""Samples of an evaluation that are correct for pass@k, where a wrong one may earn a score."""

from __future__ import annotations

from typing import Any

import pytest

from atroposlib.envs.multi_turn_env import Rollout
from atroposlib.tasks.tool_dialogues import TurnCheck
from environments.deep_research.deep_research_environment import DeepResearchEnv, Verdict
from environments.game_environments.crosswords.crosswords_env import CrosswordsEnv
from environments.infinimath.infinimath_env import InfiniteMathEnv
from environments.intern_bootcamp.intern_bootcamp_env import InternBootcampEnv
from environments.tool_use_multiturn_server import SAMPLE, MultiTurnToolCallingEnv
from environments.tool_use_turnlevel_advantage_server import BaseMTGRPOEnv
from tests.environments.offline import ready_env

pytestmark = pytest.mark.slow

RIGHT, WRONG = TurnCheck(True, True, True), TurnCheck(True, True, False)


@pytest.mark.parametrize("env_cls", [MultiTurnToolCallingEnv, BaseMTGRPOEnv])
async def test_dialogue_is_correct_when_all_its_turns_are(
    env_cls: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    env = await ready_env(env_cls, monkeypatch, dataset_path=str(SAMPLE))
    dialogue = next(d for d in env.train if len(d.expected_calls_by_turn) == 2)
    conversation = env.start_conversation(dialogue)
    rollout = Rollout(rewards=[0.0, 0.3], conversation=conversation)

    conversation.checks = [RIGHT, WRONG]
    assert env.score_of(rollout) > 0
    assert not env.is_correct(rollout)
    conversation.checks = [RIGHT, RIGHT]
    assert env.is_correct(rollout)


async def test_game_is_correct_when_it_is_won(monkeypatch: pytest.MonkeyPatch) -> None:
    env = await ready_env(CrosswordsEnv, monkeypatch)
    game = env.start_conversation({"seed": 1})
    rollout = Rollout(rewards=[0.9, -0.5], conversation=game)

    assert env.score_of(rollout) > 0
    assert not env.is_correct(rollout)
    game.is_won = True
    assert env.is_correct(rollout)


async def test_research_is_correct_when_its_answer_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bm25s")
    env = await ready_env(DeepResearchEnv, monkeypatch)
    conversation = env.start_conversation(env.train[0])
    rollout = Rollout(rewards=[0.0], conversation=conversation)

    assert not env.is_correct(rollout)
    conversation.verdict = Verdict(0.0, is_right=True, num_fakes=2)
    assert env.is_correct(rollout)
    await env.close()


async def test_exercise_is_correct_above_a_wrong_one_with_bonuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {"incorrect_reward": 0.0, "apply_length_penalty": False}
    env = await ready_env(InfiniteMathEnv, monkeypatch, generator="builtin", **settings)

    assert not env.is_correct({"score": 0.4})  # wrong, with both bonuses
    assert env.is_correct({"score": 1.0})


async def test_bootcamp_case_is_correct_with_the_reward_of_a_right_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {"task_name": "Coinsbootcamp", "incorrect_reward": 0.0, "num_eval_cases": 1}
    env = await ready_env(InternBootcampEnv, monkeypatch, **settings)

    assert not env.is_correct({"score": 0.2})  # wrong, but well-formed
    assert env.is_correct({"score": 1.0})
