"""`MultiTurnEnv`: groups, stragglers, evaluations and figures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.config import StragglerPolicyEnum
from atroposlib.envs.conversation import Conversation, Reply, Turn
from atroposlib.envs.multi_turn_env import MultiTurnEnv, MultiTurnEnvConfig
from atroposlib.envs.single_turn_env import MAX_PROMPTS_WITHOUT_ROOM
from atroposlib.errors import ConfigError
from atroposlib.scored_data import check_group
from tests.envs.conversations import OPENING
from tests.fakes import ScriptedEngine

PROBED = "ok"
"""First reply of a list: it answers the client's look for a route that gives token ids."""


class Countdown(Conversation):
    """Asks for another turn until the item is used up; each turn earns its own number."""

    def __init__(self, num_turns: int, *, wait_s: float) -> None:
        self.num_turns = num_turns
        self.wait_s = wait_s

    def opening(self) -> Sequence[Any]:
        return OPENING

    async def reply(self, turn: Turn) -> Reply:
        await asyncio.sleep(self.wait_s)
        if turn.text == "raise":
            raise KeyError(turn.text)
        is_last = turn.index + 1 == self.num_turns
        return Reply("" if is_last else "more", reward=float(turn.text), is_done=is_last)


class CountdownEnv(MultiTurnEnv):
    name = "countdown"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.waits_s: list[float] = []

    async def get_next_item(self) -> int:
        return 2

    def eval_items(self) -> Sequence[int]:
        return [1, 2]

    def start_conversation(self, item: int) -> Countdown:
        return Countdown(item, wait_s=self.waits_s.pop() if self.waits_s else 0.0)


@pytest.fixture
def make_countdown(make_env: Callable[..., Any]) -> Callable[..., CountdownEnv]:
    """Build the environment at an engine."""
    make_env()  # puts the character tokenizer in place

    def make(engine: ScriptedEngine, **settings: Any) -> CountdownEnv:
        chosen = {"use_wandb": False, "tokenizer_name": "characters", "group_size": 2, **settings}
        server = APIServerConfig(
            model_name="m", base_url=engine.base_url, server_type="vllm", health_check=False
        )
        return CountdownEnv(MultiTurnEnvConfig(**chosen), server)

    return make


async def roll_out(env: CountdownEnv, item: int) -> Any:
    rollouts, _ = await env.collect_trajectories(item)
    return await env.postprocess_histories(rollouts)


async def test_group_has_scores_and_advantages_by_turn(
    make_countdown: Callable[..., CountdownEnv],
) -> None:
    async with ScriptedEngine([PROBED, "1", "3"]) as engine:
        env = make_countdown(
            engine, reward_discount=0.5, advantage_normalization="none", include_messages=True
        )
        group = await roll_out(env, 1)

    check_group(group)
    assert sorted(group["scores"]) == [1.0, 3.0]
    for row, masks, score in zip(group["advantages"], group["masks"], group["scores"], strict=True):
        assert [a for a, m in zip(row, masks, strict=True) if m != -100] == [score] * 2
    assert group["messages"][0][:1] == OPENING
    assert "group_overrides" not in group


async def test_straggling_conversation_is_left_out_of_its_group(
    make_countdown: Callable[..., CountdownEnv],
) -> None:
    async with ScriptedEngine(["1", "2", "3"]) as engine:
        env = make_countdown(
            engine,
            group_size=4,
            straggler_policy=StragglerPolicyEnum.SHRINK,
            straggler_timeout_s=0.2,
            min_group_size=2,
        )
        await roll_out(env, 1)  # the first request also finds out what the engine can do
        env.waits_s = [0.0, 30.0, 0.0, 0.0]
        group = await roll_out(env, 1)

    check_group(group)
    assert len(group["tokens"]) == 2


async def test_item_without_room_gives_no_group(
    make_countdown: Callable[..., CountdownEnv],
) -> None:
    async with ScriptedEngine([PROBED]) as engine:
        env = make_countdown(engine, max_token_length=20)

        for _ in range(MAX_PROMPTS_WITHOUT_ROOM - 1):
            assert await roll_out(env, 1) is None
        with pytest.raises(ConfigError, match=r"no room in max_token_length \(20\)"):
            await roll_out(env, 1)
    assert env.rollouts_since_log == []


async def test_conversation_that_raises_fails_its_group(
    make_countdown: Callable[..., CountdownEnv],
) -> None:
    async with ScriptedEngine([PROBED, "1", "raise"]) as engine:
        env = make_countdown(engine)

        with pytest.raises(KeyError):
            await env.collect_trajectories(1)


async def test_figures_of_the_conversations_are_logged_once(
    make_countdown: Callable[..., CountdownEnv], tmp_path: Path
) -> None:
    async with ScriptedEngine(["1"]) as engine:
        env = make_countdown(engine, metrics_path="metrics.jsonl", max_turns=2)
        env._reporter.start_local_run()
        await roll_out(env, 1)
        await roll_out(env, 3)
        await env.wandb_log({})
        await env.wandb_log({})
        env._close_records()

    first, second = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines()[-2:])
    # two of one turn that end, two of two turns that run out
    assert first["train/mean_return"] == 1.5
    assert first["train/mean_turns"] == 1.5
    assert first["train/fraction_done"] == 0.5
    assert "train/mean_return" not in second


async def test_evaluate_asks_for_chats_only_and_writes_each_conversation(
    make_countdown: Callable[..., CountdownEnv], tmp_path: Path
) -> None:
    async with ScriptedEngine(["4"]) as engine:
        env = make_countdown(engine, data_dir_to_save_evals="evals")
        await env.evaluate()
        paths = {request.path for request in engine.requests}

    assert paths == {"/v1/chat/completions"}
    lines = (tmp_path / "evals" / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["rewards"] for line in lines] == [[4.0], [4.0, 4.0]]


async def test_conversation_stays_below_the_limit_of_the_trainer(
    make_countdown: Callable[..., CountdownEnv],
) -> None:
    async with ScriptedEngine(["1"]) as engine:
        env = make_countdown(engine, max_token_length=4000)
        assert env.limits().max_tokens == 4000
        env.max_token_len = 60
        rollout, _ = await env.collect_trajectory(9)

    assert rollout.outcome == "truncated"
    assert len(rollout.sequences[0].tokens) < 60
