from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.base import BaseEnv
from atroposlib.envs.check import check_environment
from atroposlib.scored_data import check_group
from atroposlib.tasks.tool_dialogues import TurnCheck, shortened_scores
from environments.tool_use_multiturn_server import (
    SAMPLE,
    MultiTurnToolCallingEnv,
    score,
    score_refusal,
)
from environments.tool_use_turnlevel_advantage_server import (
    BaseMTGRPOEnv,
    MultiTurnToolUseTurnLevelAdvantageEnv,
    mtgrpo_advantages,
)
from tests.environments.offline import make_env
from tests.fakes import ScriptedEngine

pytestmark = pytest.mark.slow

RIGHT = TurnCheck(True, True, True)
RIGHT_TEXT = TurnCheck(False, True, True)
WRONG_TEXT = TurnCheck(False, False, False)
WRONG = TurnCheck(True, True, False)


@pytest.mark.parametrize(
    ("checks", "num_expected", "min_right_calls", "expected"),
    [
        ([RIGHT, RIGHT], 2, 2, 1.5),  # 2/2 + 0.5
        ([RIGHT, RIGHT, WRONG], 3, 2, 2 / 3 - 0.2),
        ([RIGHT, RIGHT], 3, 2, 2 / 3 - 0.2),  # the third was cut
        ([RIGHT, WRONG], 2, 2, -1.0),  # one right of several requests
        ([RIGHT, RIGHT_TEXT, WRONG], 4, 2, -1.0),  # texts are no calls
        ([RIGHT], 1, 1, 1.5),
        ([RIGHT, WRONG], 2, 0, 1 / 2 - 0.2),
        ([WRONG], 1, 0, -1.0),  # 0 - 0.2 is not above 0
        ([], 2, 0, -1.0),
    ],
)
def test_score_of_a_dialogue(
    checks: list[TurnCheck], num_expected: int, min_right_calls: int, expected: float
) -> None:
    found = score(
        checks,
        num_expected=num_expected,
        wrong_call_penalty=-0.2,
        min_right_calls=min_right_calls,
    )

    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answer", "is_right", "expected"),
    [
        ("I am sorry, I cannot. Which town do you mean?", True, 1.2),
        ("Unfortunately that is impossible.", True, 1.1),
        ("I cannot paint.", True, 1.0),
        ("<tool_call>", False, -0.2),
    ],
)
def test_score_of_a_refusal(answer: str, is_right: bool, expected: float) -> None:
    check = TurnCheck(False, is_right, is_right)

    assert score_refusal(answer, check, wrong_call_penalty=-0.2) == pytest.approx(expected)
    assert score_refusal("", None, wrong_call_penalty=-0.2) == -0.2


def test_group_of_full_scores_loses_by_length() -> None:
    # free up to 50 of 100; 75 is half way from there to the limit
    assert shortened_scores([1.5, 1.5], [50, 75], max_tokens=100) == [1.5, 1.0]
    assert shortened_scores([1.5, 0.3], [50, 75], max_tokens=100) == [1.5, 0.3]


def test_advantages_are_those_of_the_turn_and_of_the_outcome() -> None:
    # turn 0: equal, 0. turn 1, reached by two: mean 0.5, deviation 0.5. outcomes 1, 0, 0: mean 1/3,
    # deviation sqrt(2)/3, so sqrt(2) and -1/sqrt(2)
    root = math.sqrt(2)

    found = mtgrpo_advantages([[1, 1], [1, 0], [1]], [1, 0, 0], outcome_weight=0.5)

    assert found[0] == pytest.approx([root / 2, 1 + root / 2])
    assert found[1] == pytest.approx([-root / 4, -1 - root / 4])
    assert found[2] == pytest.approx([-root / 4])


def test_equal_rewards_have_no_advantage() -> None:
    assert mtgrpo_advantages([[1, 2], [1, 2]], [1, 1], outcome_weight=1) == [[0, 0], [0, 0]]


class Playing:
    """Plays the first dialogue of the data; each rollout has a player of the list."""

    def __init__(self, players: list[str]) -> None:
        self.players = players
        self.env: Any = None
        self.item: Any = None
        self.started = 0

    def __call__(self, prompt: str) -> str:
        if self.item is None or self.item.messages[-1]["content"] not in prompt:
            return "ok"  # the look for a route that gives token ids
        gold = self.env.check_gold_answer(self.item)
        num_turns = prompt.count("#player ")
        if num_turns == 0:
            self.started += 1
            return self.turn(self.players[self.started - 1], 0, gold)
        player = prompt.split("#player ")[1].split("#")[0]
        return self.turn(player, num_turns, gold)

    def turn(self, player: str, index: int, gold: list[str]) -> str:
        thought, _, answer = gold[index].partition("</think>")
        thought = f"{thought} #player {player}#"
        if player == "perfect" or (player == "late" and index == 0):
            return f"{thought}</think>{answer}"
        wrong = {
            "late": '<tool_call>{"name": "nothing", "arguments": {}}</tool_call>',
            "lazy": "That is done.",
            "broken": "<tool_call>{oops</tool_call>",
            "thinker": "",
        }[player]
        return f"{thought}{answer if player == 'thinker' else ''}</think>{wrong}"


async def play_group(
    env_cls: type[BaseEnv], players: list[str], monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> tuple[dict[str, Any], Any]:
    """One group in which each rollout is a player; returns it and its environment."""
    playing = Playing(players)
    async with ScriptedEngine(playing) as engine:
        env = make_env(
            env_cls,
            engine,
            monkeypatch,
            dataset_path=str(SAMPLE),
            group_size=len(players),
            max_token_length=12000,
            include_messages=True,
            use_parallel_requests=False,
            **settings,
        )
        await env.setup()
        playing.env, playing.item = env, await env.get_next_item()
        trajectories, _ = await env.collect_trajectories(playing.item)
        group = await env.postprocess_histories(trajectories)
        await env.close()
        await env.server.close()
    return group, env


def player_of(chat: list[dict[str, str]]) -> str:
    text = next(m["content"] for m in chat if m["role"] == "assistant")
    return text.split("#player ")[1].split("#")[0]


async def test_players_of_a_dialogue_score_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    players = ["perfect", "late", "lazy", "broken", "thinker"]

    group, env = await play_group(MultiTurnToolCallingEnv, players, monkeypatch)

    check_group(group)
    scores = {player_of(c): s for c, s in zip(group["messages"], group["scores"], strict=True)}
    # of two calls, "late" has one right: too few of several requests
    assert scores == {"perfect": 1.5, "late": -1, "lazy": -1, "broken": -1, "thinker": -1}
    assert "advantages" not in group
    metrics = env.metrics_of(env.rollouts_since_log, "train")
    assert metrics["train/avg_reward"] == pytest.approx((1.5 - 4) / 5)
    assert metrics["train/percent_correct"] == pytest.approx(1 / 5)


async def test_all_turns_of_the_policy_are_trained_and_none_of_the_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group, _ = await play_group(MultiTurnToolCallingEnv, ["perfect", "lazy"], monkeypatch)

    for ids, masks, chat in zip(group["tokens"], group["masks"], group["messages"], strict=True):
        trained = "".join(chr(i) for i, m in zip(ids, masks, strict=True) if m != -100)
        assert "<tool_response>" not in trained
        assert trained.count("#player") == (2 if player_of(chat) == "perfect" else 1)


async def test_turns_have_advantages_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"scenario_category": "multistep", "min_tool_call_turns": 2}

    group, env = await play_group(
        MultiTurnToolUseTurnLevelAdvantageEnv, ["perfect", "late", "lazy"], monkeypatch, **settings
    )

    check_group(group)
    rewards = {r.messages and player_of(r.messages): r.rewards for r in env.rollouts_since_log}
    # calls 0.5 + 0.5, text 1; well-formed but wrong 0.5 - 0.2; no calls -0.2
    assert rewards["perfect"] == pytest.approx([1, 1, 1])
    assert rewards["late"] == pytest.approx([1, 0.3])
    assert rewards["lazy"] == pytest.approx([-0.2])
    scores = {player_of(c): s for c, s in zip(group["messages"], group["scores"], strict=True)}
    # mean turn reward + outcome; "lazy" has no right turn
    assert scores == pytest.approx({"perfect": 2.0, "late": 0.65, "lazy": -1.0})
    expected = mtgrpo_advantages(list(rewards.values()), [1, 0, 0], outcome_weight=1.0)
    for row, masks, own in zip(group["advantages"], group["masks"], expected, strict=True):
        values = [round(a, 6) for a, m in zip(row, masks, strict=True) if m != -100]
        assert list(dict.fromkeys(values)) == [round(value, 6) for value in own]
        assert {a for a, m in zip(row, masks, strict=True) if m == -100} == {0.0}


async def test_dialogue_cut_to_one_call_turn_can_be_right(monkeypatch: pytest.MonkeyPatch) -> None:
    group, _ = await play_group(
        MultiTurnToolCallingEnv, ["perfect", "lazy"], monkeypatch, max_tool_call_turns_cap=1
    )

    assert sorted(group["scores"]) == [-1, 1.5]


async def test_refusals_of_equal_worth_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    players = ["perfect", "perfect"]
    refusals, env = await play_group(
        MultiTurnToolCallingEnv, players, monkeypatch, scenario_category="relevance"
    )
    calls, other = await play_group(MultiTurnToolCallingEnv, players, monkeypatch)

    assert len(set(refusals["scores"])) == len(set(calls["scores"])) == 1
    assert not env.config.ensure_scores_are_not_same
    assert other.config.ensure_scores_are_not_same


async def test_turn_that_should_be_a_text_earns_nothing_when_it_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with ScriptedEngine(["ok"]) as engine:
        env = make_env(BaseMTGRPOEnv, engine, monkeypatch, dataset_path=str(SAMPLE))

    rewards = [env.compute_turn_reward(check) for check in (RIGHT_TEXT, WRONG_TEXT, WRONG)]

    assert rewards == pytest.approx([1.0, 0.0, 0.5 - 0.2])


async def test_evaluation_samples_have_the_score_of_the_dialogue(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    playing = Playing(["perfect"])
    async with ScriptedEngine(playing) as engine:
        env = make_env(
            MultiTurnToolUseTurnLevelAdvantageEnv,
            engine,
            monkeypatch,
            dataset_path=str(SAMPLE),
            data_dir_to_save_evals=str(tmp_path),
            min_successful_turns=0,
            max_token_length=12000,
        )
        await env.setup()
        playing.env, playing.item = env, env.test[0]
        too_long = env.test[0].messages[0] | {"content": "x" * 20_000}
        unplayable = env.test[0]._replace(messages=(too_long, *env.test[0].messages[1:]))
        env.test = [env.test[0], unplayable]
        await env.evaluate()
        await env.close()
        await env.server.close()

    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    report = json.loads((tmp_path / "metrics.json").read_text())["results"]["all"]
    # a mean turn reward of 1 and the outcome; no turn at all
    assert [sample["score"] for sample in samples] == [2.0, -1.0]
    assert report["eval/avg_reward"] == 0.5


async def test_group_without_a_score_above_zero_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    group, _ = await play_group(
        MultiTurnToolUseTurnLevelAdvantageEnv, ["lazy", "broken"], monkeypatch
    )

    assert group is None


async def test_example_is_never_the_dialogue_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedEngine(["ok"]) as engine:
        env = make_env(MultiTurnToolCallingEnv, engine, monkeypatch, dataset_path=str(SAMPLE))
        await env.setup()

    for item in [*env.train, *env.test]:
        system = env.start_conversation(item).opening()[0]["content"]
        assert "An example" in system
        assert item.messages[-1]["content"] not in system
    await env.close()


async def test_completed_dialogues_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = (SAMPLE / "train.jsonl").read_text().splitlines()
    done = tmp_path / "done.jsonl"
    done.write_text("\n".join(rows[:3]))
    async with ScriptedEngine(["ok"]) as engine:
        env = make_env(
            MultiTurnToolCallingEnv,
            engine,
            monkeypatch,
            dataset_path=str(SAMPLE),
            completed_dataset_id=str(done),
        )
        await env.setup()
    first = json.loads(rows[0])["conversations"][1]["value"]

    assert len(env.train) == 3  # six of the scenario, the first three are done
    assert first not in {item.messages[1]["content"] for item in env.train}
    await env.close()


def test_config_init_gives_the_published_settings() -> None:
    whole, _ = MultiTurnToolCallingEnv.config_init()
    by_turn, _ = MultiTurnToolUseTurnLevelAdvantageEnv.config_init()

    expected: dict[str, tuple[Any, Any]] = {
        "max_tool_call_turns_cap": (2, 3),
        "validate_think_blocks": (False, True),
        "generate_all_gpt_turns": (False, True),
        "max_gen_per_turn": (1024, 2048),
        "wrong_call_penalty": (-0.2, -0.2),
        "skip_completed": (True, True),
        "completed_dataset_id": (None, None),
        "scenario_category": ("multiturn", "all"),
        "add_dynamic_few_shot": (True, True),
        "group_size": (8, 16),
        "max_token_length": (65536, 65536),
        "steps_per_eval": (10**12, 20),
    }
    assert {name: (getattr(whole, name), getattr(by_turn, name)) for name in expected} == expected
    assert (by_turn.min_tool_call_turns, by_turn.use_parallel_requests) == (2, False)
    assert (by_turn.tool_execution_reward, by_turn.summary_reward) == (0.5, 1.0)
    assert BaseMTGRPOEnv.name == "base_mtgrpo"


@pytest.mark.parametrize(
    ("env_cls", "settings"),
    [
        (MultiTurnToolCallingEnv, {}),
        (MultiTurnToolCallingEnv, {"scenario_category": "relevance"}),
        (MultiTurnToolUseTurnLevelAdvantageEnv, {}),
    ],
)
def test_environment_passes_the_check(env_cls: type[BaseEnv], settings: dict[str, Any]) -> None:
    report = check_environment(env_cls, **settings)

    assert report.passed, report.text
