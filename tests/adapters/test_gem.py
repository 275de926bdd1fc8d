"""The adapter of GEM, against the installed games."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gem.envs.registration", reason="needs the package gem-llm")

from gem.core import Env
from gem.envs.registration import ENV_REGISTRY, register

from atroposlib.adapters.gem import GemAdapter
from atroposlib.adapters.registry import make_adapter
from atroposlib.envs.conversation import Turn
from atroposlib.errors import ConfigError, EpisodeError
from tests.adapters.playing import adapter_env, roll_out

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
GUESS = "gem:game:GuessTheNumber-v0-hard"


def guess(prompt: str) -> str:
    """Halve the interval that the hints leave."""
    low, high = 1, 50
    for hint, guessed in re.findall(r"target number is (lower|higher) than (\d+)", prompt):
        low, high = (low, int(guessed) - 1) if hint == "lower" else (int(guessed) + 1, high)
    return f"\\boxed{{{(low + high) // 2}}}"


async def opened(name: str, **args: Any) -> GemAdapter:
    adapter = make_adapter(f"gem:{name}", args, seed=3)
    await adapter.open()
    assert isinstance(adapter, GemAdapter)
    return adapter


async def play(adapter: GemAdapter, item: Any, answers: list[str]) -> list[Any]:
    episode = adapter.start(item)
    seen: list[Any] = [await episode.begin()]
    for index, answer in enumerate(answers):
        seen.append(await episode.reply(Turn(answer, index, ())))
        if seen[-1].is_done:
            break
    await episode.close()
    return seen


async def test_game_is_won_with_exact_tokens(make_env: Callable[..., Any]) -> None:
    make_env()  # puts the character tokenizer in place

    async with adapter_env(GUESS, {}, guess) as env:
        rollouts, group = await roll_out(env)

    assert group["scores"] == [1.0, 1.0]
    assert rollouts[0].metrics["solved"] == 1.0


@pytest.mark.parametrize("game", ["Game2048", "Minesweeper", "Sokoban", "FifteenPuzzle", "Sudoku"])
async def test_games_at_the_same_time_go_alike(game: str) -> None:
    adapter = await opened(f"game:{game}-v0-easy")
    item = await adapter.item(0)
    answers = ["\\boxed{up}", "\\boxed{reveal 1 1}", "\\boxed{left}", "\\boxed{down}"]

    games = await asyncio.gather(*(play(adapter, item, answers) for _ in range(6)))

    assert all(each == games[0] for each in games)


async def test_global_generator_and_root_logger_are_left_alone() -> None:
    handlers = list(logging.getLogger().handlers)
    adapter = await opened("game:Game2048-v0-easy")
    random.seed(7)
    expected = random.Random(7).random()

    await play(adapter, await adapter.item(0), ["\\boxed{up}"])

    assert random.random() == expected
    assert logging.getLogger().handlers == handlers


async def test_turn_limit_of_the_game_is_a_truncation() -> None:
    adapter = await opened("game:GuessTheNumber-v0-easy", env_kwargs={"max_turns": 1})
    episode = adapter.start({"seed": 1})
    await episode.begin()

    reply = await episode.reply(Turn("\\boxed{11}", 0, ()))
    await episode.close()

    assert reply.is_done
    assert episode.metrics["truncated"] == 1.0


class BrokenEnv(Env):  # type: ignore[misc]  # an untyped base
    def reset(self, seed: int | None = None) -> Any:
        return "break", {}

    def step(self, action: str) -> Any:
        if action == "raise":
            raise KeyError("a defect of the game")
        return "", float("nan") if action == "nan" else 1.0, True, False, {}


@pytest.fixture
def broken_game() -> Iterator[str]:
    register("test:Broken", BrokenEnv)
    yield "gem:test:Broken"
    del ENV_REGISTRY["test:Broken"]


@pytest.mark.parametrize(
    ("answer", "error"), [("raise", "EpisodeFailedError"), ("nan", "EpisodeRewardError")]
)
async def test_broken_game_fails_its_rollout_and_no_other(
    make_env: Callable[..., Any], broken_game: str, answer: str, error: str
) -> None:
    make_env()
    replies = iter(["ok", answer, "win"])

    async with adapter_env(broken_game, {}, lambda _: next(replies), episode_retries=0) as env:
        item = await env.get_next_item()
        with pytest.raises(EpisodeError) as caught:
            await env.collect_trajectory(item)
        rollout, _ = await env.collect_trajectory(item)

    assert type(caught.value).__name__ == error
    assert rollout.rewards == [1.0]


class SlowStart(Env):  # type: ignore[misc]  # an untyped base
    """Takes a while to start."""

    def reset(self, seed: int | None = None) -> Any:
        time.sleep(0.2)
        return "started", {}

    def step(self, action: str) -> Any:
        raise NotImplementedError


async def test_episodes_that_start_slowly_wait_for_each_other() -> None:
    register("own:SlowStart", SlowStart)
    adapter = make_adapter("gem:own:SlowStart", {}, seed=0, step_timeout_s=0.1)
    await adapter.open()
    item = await adapter.item(0)
    episodes = [adapter.start(item) for _ in range(3)]

    begun = await asyncio.gather(*(episode.begin() for episode in episodes))
    for episode in episodes:
        await episode.close()

    assert [messages[0]["content"] for messages in begun] == ["started"] * 3
    assert adapter.begin_timeout_s is not None
    assert adapter.begin_timeout_s > adapter.step_timeout_s


class WithoutData(Env):  # type: ignore[misc]  # an untyped base
    """Reads its data at the start of an episode."""

    def reset(self, seed: int | None = None) -> Any:
        raise LookupError("Resource words not found")

    def step(self, action: str) -> Any:
        raise NotImplementedError


async def test_environment_without_its_data_is_named_before_the_first_rollout() -> None:
    register("own:WithoutData", WithoutData)

    with pytest.raises(ConfigError, match="own:WithoutData cannot start: LookupError"):
        await make_adapter("gem:own:WithoutData", {}, seed=0).open()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("game:Sudoku-v0-eas", "did you mean game:Sudoku-v0-easy"),
        ("rg:chain_sum", "use reasoning-gym:NAME"),
        ("code:CodeContest", "runs answers as code outside a sandbox"),
        ("math:GSM8K", "use dataset:NAME"),
    ],
)
async def test_refused_environment_is_named_before_the_first_rollout(
    name: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        await opened(name)


def test_check_command_is_green(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "atroposlib.cli.env", GUESS, "check"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
    )

    assert done.returncode == 0, done.stdout + done.stderr


async def test_misspelt_argument_of_a_game_is_named() -> None:
    with pytest.raises(ConfigError, match="no argument 'max_turn'; did you mean max_turns"):
        await opened("game:GuessTheNumber-v0-easy", env_kwargs={"max_turn": 3})
