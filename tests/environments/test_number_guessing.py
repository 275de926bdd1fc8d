from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from atroposlib.envs.check import check_environment
from atroposlib.envs.conversation import Turn
from atroposlib.scored_data import check_group
from environments.number_guessing import (
    NOT_FOUND,
    TURN_COST,
    UNREADABLE,
    GuessingGame,
    NumberGuessingEnv,
)
from tests.environments.offline import make_env, read_groups, run_process
from tests.fakes import ScriptedEngine

pytestmark = pytest.mark.slow


def turn(text: str) -> Turn:
    return Turn(text, 0, ())


def guess(number: int) -> Turn:
    return turn(f"<think>hm</think>I say <guess>{number}</guess>")


async def test_halving_the_range_earns_the_share_of_what_there_is_to_know() -> None:
    game = GuessingGame(2, highest=8, max_turns=10)

    # 1..8 to 1..4 is one bit of three; 1..4 to 1..2 another; finding it the last
    first = await game.reply(guess(5))
    second = await game.reply(guess(3))
    third = await game.reply(guess(2))

    assert [first.messages, second.messages, third.is_done] == ["lower", "lower", True]
    assert first.reward == pytest.approx(1 / 3 - TURN_COST)
    assert second.reward == pytest.approx(1 / 3 - TURN_COST)
    assert third.reward == pytest.approx(1 / 3 - TURN_COST + 1.0)


@pytest.mark.parametrize("guesses", [[7], [4, 6, 7], [1, 2, 3, 4, 5, 6, 7], [9, 2, 2, 7]])
async def test_won_game_pays_only_for_few_turns(guesses: list[int]) -> None:
    game = GuessingGame(7, highest=10, max_turns=10)

    replies = [await game.reply(guess(number)) for number in guesses]

    assert sum(reply.reward for reply in replies) == pytest.approx(2 - TURN_COST * len(guesses))
    assert replies[-1].is_done


async def test_guess_known_to_be_wrong_tells_nothing() -> None:
    game = GuessingGame(7, highest=10, max_turns=10)
    await game.reply(guess(5))

    assert (await game.reply(guess(3))).reward == -TURN_COST
    assert (await game.reply(guess(900))).messages == "lower"


@pytest.mark.parametrize(
    "text", ["", "7", "<guess>seven</guess>", "<guess>7", "<think><guess>7</guess>", "<guess>-7"]
)
async def test_what_is_no_guess_is_asked_for_again(text: str) -> None:
    reply = await GuessingGame(7, highest=10, max_turns=10).reply(turn(text))

    assert (reply.is_done, reply.reward) == (False, UNREADABLE)
    assert "<guess>NUMBER</guess>" in reply.chat_messages()[0]["content"]


async def test_game_that_a_limit_ends_is_worth_no_more_than_turns_of_nonsense() -> None:
    game = GuessingGame(7, highest=10, max_turns=3)
    worth = [game.unfinished_reward]

    for index in range(3):
        reply = await game.reply(Turn("what?", index, ()))
        worth.append((index + 1) * reply.reward + game.unfinished_reward)

    assert worth == pytest.approx([NOT_FOUND + 3 * UNREADABLE] * 4)


class Player:
    """Halves the range, as far as the answers tell; every second game it only counts up."""

    def __init__(self) -> None:
        self.num_games = 0
        self.counts_up: dict[str, bool] = {}

    def __call__(self, prompt: str) -> str:
        if "1 to 16" not in prompt:
            return "ok"  # the look for a route that gives token ids
        low, high = 1, 16
        for number, answer in re.findall(r"<guess>(\d+)</guess>\n?\[user\](\w+)", prompt):
            low = int(number) + 1 if answer == "higher" else low
            high = int(number) - 1 if answer == "lower" else high
        self.num_games += "[user]higher" not in prompt and "[user]lower" not in prompt
        return f"<guess>{(low + high) // 2 if self.num_games % 2 else low}</guess>"


async def test_process_writes_one_sequence_per_game_with_advantages_per_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "groups.jsonl"
    settings = {"highest": 16, "data_path_to_save_groups": str(out), "include_messages": True}
    async with ScriptedEngine(Player()) as engine:
        env = make_env(NumberGuessingEnv, engine, monkeypatch, **settings)
        await run_process(env, num_groups=2, group_size=4)

    groups = read_groups(out)
    assert len(groups) == 2
    for group in groups:
        check_group(group)
        rows = zip(group["advantages"], group["masks"], group["messages"], strict=True)
        for advantages, masks, chat in rows:
            values = [a for a, m in zip(advantages, masks, strict=True) if m != -100]
            assert {a for a, m in zip(advantages, masks, strict=True) if m == -100} <= {0.0}
            num_turns = sum(message["role"] == "assistant" for message in chat)
            assert 1 <= len(set(values)) <= num_turns
            assert all(map(math.isfinite, values))


async def test_evaluate_plays_every_number_and_writes_the_games(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with ScriptedEngine(Player()) as engine:
        env = make_env(
            NumberGuessingEnv, engine, monkeypatch, highest=16, data_dir_to_save_evals="evals"
        )
        await env.setup()
        await env.evaluate()
        await env.close()

    samples = read_groups(tmp_path / "evals" / "samples.jsonl")
    report = json.loads((tmp_path / "evals" / "metrics.json").read_text())
    assert len(samples) == 16
    assert report["results"]["all"]["eval/mean_return"] == pytest.approx(
        sum(sample["score"] for sample in samples) / 16
    )


def test_eval_items_cover_the_range_once() -> None:
    env = NumberGuessingEnv.__new__(NumberGuessingEnv)
    env.config, _ = NumberGuessingEnv.config_init()

    items = env.eval_items()

    assert len(set(items)) == len(items) == 32
    assert (min(items), max(items)) == (1, 97)


async def test_numbers_go_on_where_a_checkpoint_left_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ScriptedEngine(["ok"]) as engine:
        env = make_env(NumberGuessingEnv, engine, monkeypatch, highest=10**6)
        again = make_env(NumberGuessingEnv, engine, monkeypatch, highest=10**6)
    for one in (env, again):
        one.checkpoint_dir, one.wandb_prepend, one.curr_step = str(tmp_path), "numbers_0", 1

    numbers = [await env.get_next_item() for _ in range(3)]
    env.save_checkpoint(1)
    again.load_checkpoint()

    assert len(set(numbers)) == 3
    assert await again.get_next_item() == await env.get_next_item() not in numbers


def test_environment_passes_the_check() -> None:
    report = check_environment(NumberGuessingEnv)

    assert report.passed, report.text
