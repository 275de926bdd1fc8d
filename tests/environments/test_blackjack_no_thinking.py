from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.check import check_environment
from atroposlib.envs.conversation import ChatMessage
from atroposlib.tasks.blackjack import Table, best_action
from environments.game_environments.gymnasium.blackjack.blackjack_env_no_thinking import (
    BlackjackEnvNoThinking,
    BlackjackGame,
    read_action,
)
from tests.environments.game_players import play_game
from tests.environments.offline import make_env, read_groups
from tests.fakes import ScriptedEngine


@pytest.mark.parametrize(
    ("answer", "action"),
    [
        ("hit", "hit"),
        (" Stick.\n", "stick"),
        ("**HIT**", "hit"),
        ("hit or stick", None),
        ("hit hit", None),
        ("I hit", None),
        ("h\u0131t", None),  # a dotless i
        ("\u00e9hit", None),
        ("\uff48\uff49\uff54", None),  # full-width letters
        ("", None),
        ("1", None),
    ],
)
def test_action_is_a_single_word(answer: str, action: str | None) -> None:
    assert read_action(answer) == action


async def test_best_player_earns_most_and_garbage_least() -> None:
    totals = {"best": 0.0, "always sticks": 0.0, "garbage": 0.0}
    for seed in range(60):
        for player in totals:
            table = Table("Blackjack-v1", seed=seed)

            def answer(_: Any, table: Table = table, player: str = player) -> str:
                best = best_action(table.hand, table.rules)
                return {"best": best, "always sticks": "stick", "garbage": "qxz"}[player]

            totals[player] += sum(await play_game(BlackjackGame(table), answer))

    assert totals["best"] > totals["always sticks"] > totals["garbage"] == -60


@pytest.mark.parametrize("text", ["<think>hit</think>", "<think>stick", "<think>hit", "stick?!x"])
async def test_turn_without_an_action_ends_the_game_as_lost(text: str) -> None:
    game = BlackjackGame(Table("Blackjack-v1", seed=3))

    assert await play_game(game, lambda _: text) == [-1.0]
    assert not game.is_won


async def test_hands_after_a_hit_are_told() -> None:
    seed = next(s for s in range(99) if Table("Blackjack-v1", seed=s).hand.total < 8)
    seen: list[str] = []

    def player(chat: list[ChatMessage]) -> str:
        seen.append(str(chat[-1]["content"]))
        return "hit" if len(seen) == 1 else "stick"

    rewards = await play_game(BlackjackGame(Table("Blackjack-v1", seed=seed)), player)  # type: ignore[arg-type]

    assert len(rewards) == 2
    assert rewards[0] == 0.0
    assert seen[0] != seen[1]
    assert all(text.startswith("Your hand counts") for text in seen)


async def test_evaluation_logs_under_the_name_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with ScriptedEngine(["stick"]) as engine:
        env = make_env(
            BlackjackEnvNoThinking,
            engine,
            monkeypatch,
            eval_episodes=6,
            data_dir_to_save_evals="evals",
        )
        await env.setup()
        await env.evaluate()
        limit = env.limits().max_turns
        await env.close()

    results = json.loads((tmp_path / "evals" / "metrics.json").read_text())["results"]["all"]
    samples = read_groups(tmp_path / "evals" / "samples.jsonl")
    prefix = "blackjack_no_thinking_eval"
    wins = sum(sample["score"] > 0 for sample in samples)
    assert limit == 10
    assert results[f"{prefix}/num_episodes"] == 6
    assert results[f"{prefix}/win_rate"] == pytest.approx(wins / 6)
    assert sum(results[f"{prefix}/{n}_rate"] for n in ("win", "loss", "draw")) == pytest.approx(1)


def test_environment_passes_the_check() -> None:
    report = check_environment(BlackjackEnvNoThinking)

    assert report.passed, report.text
