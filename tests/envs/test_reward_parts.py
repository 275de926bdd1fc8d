"""Rewards with named parts, from `score` and `reply` to groups, metrics and evaluations."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.conversation import Reply
from atroposlib.envs.multi_turn_env import MultiTurnEnv, MultiTurnEnvConfig, group_of_rollouts
from atroposlib.envs.reporting import check_weight_names, complete_parts, part_means, weigh
from atroposlib.envs.single_turn_env import SingleTurnEnv, SingleTurnEnvConfig
from atroposlib.errors import ConfigError
from tests.envs.conversations import ScriptedConversation, play_on
from tests.fakes import ScriptedEngine

PROBED = "ok"
"""First reply of a list: it answers the client's look for a route that gives token ids."""


class PartsEnv(SingleTurnEnv):
    """Worth 1 for the word, and 0.5 for a capital letter."""

    name = "parts"

    async def setup(self) -> None:
        return

    async def get_next_item(self) -> str:
        return "One"

    def prompt(self, item: str) -> Sequence[Mapping[str, Any]]:
        return [{"role": "user", "content": f"Say {item}."}]

    async def score(self, item: str, answer: str) -> Any:
        if answer == "text":
            return {"word": "right"}
        if answer == "number":
            return 0.25
        return {"word": float(answer == item), "capital": 0.5 * answer[:1].isupper()}

    def eval_items(self) -> Sequence[str]:
        return ["One", "Two"]


@pytest.fixture
def make_parts(make_env: Callable[..., Any]) -> Callable[..., PartsEnv]:
    make_env()  # puts the character tokenizer in place

    def make(engine: ScriptedEngine, **settings: Any) -> PartsEnv:
        chosen = {"use_wandb": False, "tokenizer_name": "characters", "group_size": 3, **settings}
        server = APIServerConfig(
            model_name="m", base_url=engine.base_url, server_type="vllm", health_check=False
        )
        return PartsEnv(SingleTurnEnvConfig(**chosen), server)

    return make


@pytest.mark.parametrize(
    ("reward", "weights", "total", "parts"),
    [
        (2, {}, 2.0, {}),
        ({"a": 1, "b": -0.5}, {}, 0.5, {"a": 1.0, "b": -0.5}),
        ({"a": 1.0, "b": 0.5}, {"b": 0.2}, 1.1, {"a": 1.0, "b": 0.5}),
        ({"a": True}, {"a": 0.0}, 0.0, {"a": 1.0}),
        (np.array([0.5]), {}, 0.5, {}),
        ({"a": np.array([[0.5]])}, {}, 0.5, {"a": 0.5}),
    ],
)
def test_weigh_sums_the_parts_by_their_weights(
    reward: Any, weights: dict[str, float], total: float, parts: dict[str, float]
) -> None:
    weighed = weigh(reward, weights, "score returned")

    assert weighed.total == pytest.approx(total)
    assert weighed.parts == parts


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"a": "much"}, r"^MyEnv.score returned as the part 'a' 'much'; expected a number$"),
        ({"a": None}, "as the part 'a' None; expected a number"),
        ({3: 1.0}, "a part named 3; expected a string"),
        ({}, "an empty mapping; expected a number, or numbers by name"),
        ("1.0", "returned '1.0'; expected a number"),
    ],
)
def test_part_that_is_not_a_number_is_refused_in_one_line(reward: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        weigh(reward, {}, "MyEnv.score returned")


def test_weight_without_a_part_is_refused_with_the_names_there_are() -> None:
    parts = [{"format": 1.0}, {"answer": 0.0}]

    check_weight_names({"format": 2.0, "answer": 1.0}, parts, "MyEnv.score")
    check_weight_names({}, [{}], "MyEnv.score")
    with pytest.raises(ConfigError, match=r"gave the parts answer, format; did you mean format\?$"):
        check_weight_names({"formats": 2.0}, parts, "MyEnv.score")
    with pytest.raises(ConfigError, match=r"'style', but MyEnv\.score gave numbers without parts"):
        check_weight_names({"style": 2.0}, [{}], "MyEnv.score")


def test_part_that_was_left_out_counts_as_zero() -> None:
    parts = [{"a": 1.0}, {"a": 0.5, "b": 1.0}]

    assert complete_parts(parts) == [{"a": 1.0, "b": 0.0}, {"a": 0.5, "b": 1.0}]
    assert part_means(parts, "eval") == {"eval/reward/a": 0.75, "eval/reward/b": 0.5}
    assert complete_parts([{}, {}]) is None


def test_weights_are_finite_numbers() -> None:
    with pytest.raises(ValidationError):
        SingleTurnEnvConfig(reward_weights={"a": float("nan")})
    with pytest.raises(ValidationError):
        MultiTurnEnvConfig(reward_weights={"a": "heavy"})


async def test_group_has_the_weighed_scores_and_the_parts(
    make_parts: Callable[..., Any], tmp_path: Path
) -> None:
    async with ScriptedEngine([PROBED, "One", "one", "Two"]) as engine:
        env = make_parts(engine, reward_weights={"capital": 0.2}, metrics_path="metrics.jsonl")
        group, _ = await env.collect_trajectories("One")
        await env.handle_send_to_api(group, do_send_to_api=False)
        await env.wandb_log({})
        await env.close()

    assert group["scores"] == pytest.approx([1.1, 0.0, 0.1])
    assert group["reward_parts"] == [
        {"word": 1.0, "capital": 0.5},
        {"word": 0.0, "capital": 0.0},
        {"word": 0.0, "capital": 0.5},
    ]
    [logged] = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    metrics = logged.get("metrics", logged)
    assert metrics["train/reward/word"] == pytest.approx(1 / 3)
    assert metrics["train/reward/capital"] == pytest.approx(1 / 3)
    assert metrics["train/mean_score"] == pytest.approx(0.4)


async def test_equal_scores_count_in_the_means_of_the_parts(
    make_parts: Callable[..., Any],
) -> None:
    async with ScriptedEngine([PROBED, "One", "One", "One"]) as engine:
        env = make_parts(engine)
        group, _ = await env.collect_trajectories("One")
        await env.handle_send_to_api(group, do_send_to_api=False)

    assert env.drop_counts["scores_equal"] == 1
    assert env.reward_parts_since_log.means("train") == {
        "train/reward/word": 1.0,
        "train/reward/capital": 0.5,
    }


@pytest.mark.parametrize(
    ("answer", "weights", "error", "message"),
    [
        ("text", {}, TypeError, "PartsEnv.score returned as the part 'word' 'right'"),
        ("One", {"words": 2.0}, ConfigError, "reward_weights names 'words'.*did you mean word?"),
        ("number", {"word": 2.0}, ConfigError, "PartsEnv.score gave numbers without parts"),
    ],
)
async def test_wrong_part_or_weight_fails_the_group(
    make_parts: Callable[..., Any], answer: str, weights: Any, error: type, message: str
) -> None:
    async with ScriptedEngine([PROBED, answer, answer, answer]) as engine:
        env = make_parts(engine, reward_weights=weights)
        with pytest.raises(error, match=message):
            await env.collect_trajectories("One")


async def test_evaluation_records_the_parts(make_parts: Callable[..., Any], tmp_path: Path) -> None:
    async with ScriptedEngine(["One"]) as engine:
        env = make_parts(
            engine, reward_weights={"capital": 2.0}, data_dir_to_save_evals=str(tmp_path / "evals")
        )
        await env.evaluate()
        await env.close()

    report = json.loads((tmp_path / "evals" / "metrics.json").read_text())
    metrics = report["results"]["all"]
    assert {name: value for name, value in metrics.items() if "_score_" not in name} == {
        "eval/reward/word": 0.5,
        "eval/reward/capital": 0.5,
        "eval/mean_score": 1.5,
    }
    samples = (tmp_path / "evals" / "samples.jsonl").read_text().splitlines()
    assert json.loads(samples[0])["reward_parts"] == {"word": 1.0, "capital": 0.5}


async def test_parts_of_replies_are_added_up_over_the_turns() -> None:
    replies = [
        Reply("on", reward={"valid": 1.0, "win": 0.0}),
        Reply(reward={"win": 1.0}, is_done=True),
    ]
    async with ScriptedEngine([PROBED, "first", "second", "other"]) as engine:
        played = await play_on(engine, ScriptedConversation(replies))
        plain = await play_on(engine, ScriptedConversation([Reply(reward=0.5, is_done=True)]))

    group = group_of_rollouts([played, plain])

    assert played.rewards == [1.0, 1.0]
    assert played.reward_parts == [{"valid": 1.0, "win": 0.0}, {"win": 1.0}]
    assert group["scores"] == [2.0, 0.5]
    assert group["reward_parts"] == [{"valid": 1.0, "win": 1.0}, {"valid": 0.0, "win": 0.0}]


async def test_unfinished_reward_may_have_parts() -> None:
    conversation = ScriptedConversation([Reply("on", reward={"valid": 1.0})])
    conversation.unfinished_reward = {"unfinished": -3.0, "valid": -1.0}
    async with ScriptedEngine([PROBED, "first"]) as engine:
        rollout = await play_on(engine, conversation, max_turns=1)

    assert rollout.rewards == [-3.0]
    assert rollout.reward_parts == [{"valid": 0.0, "unfinished": -3.0}]


def test_reply_with_a_part_that_is_no_number_is_named() -> None:
    with pytest.raises(TypeError, match="reply gave the reward as the part 'win' 'yes'"):
        weigh({"win": "yes"}, {}, "Chain.reply gave the reward")


async def test_game_weighs_the_parts_of_its_replies(make_env: Callable[..., Any]) -> None:
    make_env()
    conversation = ScriptedConversation([Reply(reward={"valid": 1.0, "win": 1.0}, is_done=True)])

    class Game(MultiTurnEnv):
        async def get_next_item(self) -> str:
            return "item"

        def start_conversation(self, item: str) -> ScriptedConversation:
            return conversation

    async with ScriptedEngine([PROBED, "move"]) as engine:
        server = APIServerConfig(
            model_name="m", base_url=engine.base_url, server_type="vllm", health_check=False
        )
        config = {"use_wandb": False, "tokenizer_name": "characters", "group_size": 1}
        game = Game(MultiTurnEnvConfig(**config, reward_weights={"win": 3.0}), server)
        rollout, _ = await game.collect_trajectory("item")
        group = await game.postprocess_histories([rollout])
        game.config.reward_weights = {"wins": 1.0}
        with pytest.raises(
            ConfigError, match=r"ScriptedConversation\.reply gave the parts valid, win"
        ):
            await game.postprocess_histories([rollout])
        await game.close()

    assert group["scores"] == [4.0]
    assert group["reward_parts"] == [{"valid": 1.0, "win": 1.0}]
