"""Poker: actions that are read, their two rewards, the shipped hands."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.reward_fns import CombinedReward, registry
from atroposlib.errors import ConfigError
from environments.community.poker_holdem.poker_holdem_env import (
    REWARDS,
    PokerAction,
    PokerEnv,
    action_match,
    bet_sizing,
    gold_of,
    read_action,
)
from tests.environments.offline import ready_env


@pytest.mark.parametrize(
    ("text", "kind", "amount"),
    [
        ("fold", "fold", None),
        ("Check.", "check", None),
        ("calls 12", "call", None),
        ("bet 4.5", "bet", 4.5),
        ("Bets $1,200", "bet", 1200.0),
        ("raise  to 12 bb", "raise", 12.0),
        ("raise", "raise", None),
        ("raise 0", "raise", None),
        ("all-in", "all-in", None),
        ("All in 200", "all-in", None),
    ],
)
def test_action_is_read(text: str, kind: str, amount: float | None) -> None:
    assert read_action(text) == PokerAction(kind, amount)


@pytest.mark.parametrize(
    "text", ["", "post blind", "call or fold", "raise 5 raise 6", "raise -5", "raised", "raise 1e9",
             "raise " + "9" * 400, "fold " * 1000]
)  # fmt: skip
def test_other_texts_are_no_actions(text: str) -> None:
    assert read_action(text) is None


@pytest.mark.parametrize(
    ("action", "gold", "match", "sizing"),
    [
        ("raise 12", "raise 12", 1.0, 1.0),
        ("raise 15", "raise 12", 0.7, 0.5),  # 25 % off
        ("raise 9", "raise 12", 0.7, 0.5),
        ("raise 18", "raise 12", 0.7, 0.0),  # 50 % off
        ("raise 60", "raise 12", 0.7, 0.0),
        ("raise", "raise 12", 0.7, 0.0),
        ("bet 12", "raise 12", 0.5, 1.0),
        ("all-in", "raise 12", 0.5, 0.0),
        ("call", "raise 12", 0.0, 0.0),
        ("fold", "fold", 1.0, 1.0),
        ("check", "fold", 0.0, 0.0),
        ("check", "call", 0.5, 0.0),
        ("call 8", "call", 1.0, 1.0),
        ("raise 12", "all-in", 0.5, 0.0),
        ("raise 12", "raise", 0.7, 1.0),
    ],
)
def test_rewards(action: str, gold: str, match: float, sizing: float) -> None:
    pair = read_action(action), read_action(gold)
    assert pair[0] is not None
    assert pair[1] is not None

    assert action_match(*pair) == match
    assert bet_sizing(*pair) == pytest.approx(sizing)

    # the registered rewards, weighted and in sum
    completion = f"I have a draw. <answer>{action}</answer>"
    assert registry.create("action_match")([completion], solution=gold) == [match]
    assert registry.create("bet_sizing_reward")([completion], solution=gold) == [
        pytest.approx(sizing)
    ]
    total = 0.6 * match + 0.4 * sizing
    assert CombinedReward(REWARDS)([completion], solution=gold) == [pytest.approx(total)]


@pytest.mark.parametrize(
    "completion", ["", "fold", "<answer></answer>", "<answer>fold</answer> <answer>fold</answer>"]
)
def test_completion_without_one_tagged_action_earns_nothing(completion: str) -> None:
    assert CombinedReward(REWARDS)([completion], solution="fold") == [0.0]


@pytest.mark.parametrize(
    ("formatted", "plain", "gold"),
    [
        ("raise 12", "raise", "raise 12"),
        (None, "call", "call"),
        ("r12", "raise", "raise"),
        ("r12", "post blind", ""),
    ],
)
def test_gold_action_is_the_first_readable_one(
    formatted: str | None, plain: str, gold: str
) -> None:
    assert gold_of({"formatted_winning_action": formatted, "winning_action": plain}) == gold


async def test_parts_of_the_score_have_names(monkeypatch: pytest.MonkeyPatch) -> None:
    env = await ready_env(PokerEnv, monkeypatch, **PokerEnv.check_settings)
    item = {"formatted_winning_action": "raise 12", "winning_action": "raise"}

    parts = await env.score(item, "<answer>raise 15</answer>")

    assert parts == {"action_match": pytest.approx(0.42), "bet_sizing": pytest.approx(0.2)}


async def test_one_action_for_all_shipped_hands_earns_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = await ready_env(PokerEnv, monkeypatch, **PokerEnv.check_settings)
    hands = [*env.train, *env.test]
    reward = CombinedReward(REWARDS)

    def mean(action: str) -> float:
        answer = f"<answer>{action}</answer>"
        return statistics.fmean(reward([answer], solution=gold_of(row))[0] for row in hands)

    assert len(hands) == 32
    assert max(map(mean, {gold_of(row) for row in hands} | {"raise", "bet"})) < 0.4
    assert all(
        reward([env.check_gold_answer(row)], solution=gold_of(row)) == [1.0] for row in hands
    )


async def test_hands_without_a_readable_action_are_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows: list[dict[str, Any]] = [
        {"pokergpt_prompt": "?", "winning_action": action} for action in ("post blind", "call")
    ]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))

    env = await ready_env(PokerEnv, monkeypatch, dataset_path=str(tmp_path))

    assert [gold_of(row) for row in env.train] == ["call"]
    (tmp_path / "train.jsonl").write_text(json.dumps(rows[0]))
    with pytest.raises(ConfigError, match="readable action"):
        await env.setup()
