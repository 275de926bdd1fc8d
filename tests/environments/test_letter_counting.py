from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pydantic import ValidationError

from atroposlib.envs.check import check_environment
from atroposlib.errors import ConfigError
from environments.letter_counting_environment.letter_counting_environment import (
    LEVELS,
    CountingItem,
    DifficultyWindow,
    LetterCountingConfig,
    LetterCountingEnv,
    make_item,
    read_eval_row,
    score_count,
)
from tests.environments.offline import PROBED, evaluate, make_env, read_groups
from tests.fakes import ScriptedEngine

WORDS = ["ant", "bee", "moss", "otter", "willow", "granite", "marmalade"]


@pytest.mark.parametrize(
    ("answer", "counts", "score"),
    [
        ("<answer>3</answer>", 3, 1.0),
        ("So: <answer> 3 </answer>.", 3, 1.0),
        ("<answer>2</answer>", 3, 0.0),
        ("<answer>three</answer>", 3, 0.0),
        ("<answer>\u0663</answer>", 3, 0.0),  # another script's digit
        ("<answer>" + "9" * 100_000 + "</answer>", 3, 0.0),
        ("3", 3, 0.0),
        ("<answer>3</answer><answer>3</answer>", 3, 0.0),
        ('<answer>{"a": 1, "b": 0}</answer>', {"b": 0, "a": 1}, 1.0),
        ('<answer>{"a": 1}</answer>', {"a": 1, "b": 0}, 0.0),
        ('<answer>{"a": 1, "b": 0, "c": 0}</answer>', {"a": 1, "b": 0}, 0.0),
        ('<answer>{"a": true, "b": 0}</answer>', {"a": 1, "b": 0}, 0.0),
        ('<answer>{"a": 1.0, "b": 0}</answer>', {"a": 1, "b": 0}, 0.0),
        ('<answer>{"A": 1}</answer>', {"a": 1}, 0.0),
        ("<answer>1</answer>", {"a": 1}, 0.0),
        ("<answer>" + "[" * 100_000 + "</answer>", {"a": 1}, 0.0),
        ("", 3, 0.0),
    ],
)
def test_answer_is_right_only_with_exactly_these_counts(
    answer: str, counts: Any, score: float
) -> None:
    assert score_count(f"<think>a</think>{answer}", counts) == score
    assert score_count(answer, counts) == 0.0
    assert score_count(f"<think>{answer}</think>", counts) == 0.0


@pytest.mark.parametrize("level", LEVELS)
def test_question_of_a_level_has_its_size_and_its_counts(level: int) -> None:
    rules, kinds = LEVELS[level], set()
    for i in range(60):
        item = make_item(level, WORDS, Random(f"{level} {i}"))
        [text] = re.findall(r"in the (?:word|string) (\w+)\?", item.question)
        counts = item.counts
        if isinstance(counts, int):
            [letter] = re.findall(r"the letter (\w) occur", item.question)
            counts = {letter: counts}
        assert rules.min_length <= len(text) <= rules.max_length
        assert 1 <= len(counts) <= rules.max_letters
        assert counts == {letter: text.count(letter) for letter in counts}
        kinds.add(type(item.counts))

    many = rules.multi_letter_probability
    assert kinds == ({int} if many == 0 else {dict} if many == 1 else {int, dict})


def test_levels_grow_up_to_five_hundred_characters_and_fifty_letters() -> None:
    lengths = [rules.max_length for rules in LEVELS.values()]

    assert lengths == sorted(lengths)
    assert (len(LEVELS), lengths[-1], LEVELS[10].max_letters) == (10, 500, 50)


def test_questions_depend_on_their_seed_only() -> None:
    assert make_item(7, WORDS, Random("1")) == make_item(7, WORDS, Random("1"))
    assert make_item(7, WORDS, Random("1")) != make_item(7, WORDS, Random("2"))


def window(level: int, **settings: Any) -> DifficultyWindow:
    defaults = {"lowest": 1, "highest": 5, "size": 3, "low": 0.25, "high": 0.75}
    return DifficultyWindow(level=level, **{**defaults, **settings})


@pytest.mark.parametrize(
    ("level", "means", "moved"),
    [
        (3, [1.0, 1.0], 3),  # the window is not full
        (3, [1.0, 1.0, 1.0], 4),
        (3, [1.0, 1.0, 1.0, 1.0, 1.0], 4),  # emptied by the move
        (3, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0], 5),
        (3, [0.75, 0.75, 0.75], 3),
        (3, [0.0, 1.0, 1.0, 1.0], 4),  # the oldest mean has left
        (3, [0.0, 0.1, 0.2], 2),
        (3, [0.25, 0.25, 0.25], 3),
        (5, [1.0, 1.0, 1.0], 5),
        (1, [0.0, 0.0, 0.0], 1),
    ],
)
def test_level_moves_by_the_mean_of_a_full_window(
    level: int, means: list[float], moved: int
) -> None:
    difficulty = window(level)
    for mean in means:
        difficulty.record(mean)

    assert difficulty.level == moved


@pytest.mark.parametrize(
    ("row", "counts"),
    [
        ({"Prompt": "?", "Answer": 4, "DifficultyLevel": "2"}, 4),
        ({"Prompt": "?", "Answer": "4", "DifficultyLevel": 2}, 4),
        ({"Prompt": "?", "Answer": '{"a": 1}', "DifficultyLevel": 2}, {"a": 1}),
    ],
)
def test_evaluation_row_is_read(row: dict[str, Any], counts: Any) -> None:
    assert read_eval_row(row) == CountingItem("?", counts, 2)


@pytest.mark.parametrize(("answer", "level"), [("four", 1), ("[1]", 1), ("-1", 1), (3, "hard")])
def test_malformed_evaluation_row_is_an_error(answer: Any, level: Any) -> None:
    with pytest.raises(ConfigError, match="expected Answer to be a number"):
        read_eval_row({"Prompt": "?", "Answer": answer, "DifficultyLevel": level})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_difficulty_level": 4}, "expected min_difficulty_level <="),
        ({"starting_difficulty_level": 9, "max_difficulty_level": 8}, "got 1, 9 and 8"),
        ({"max_difficulty_level": 11}, "less than or equal to 10"),
        ({"difficulty_decrease_threshold": 0.9}, "must be below"),
    ],
)
def test_settings_that_contradict_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LetterCountingConfig(**settings)


def test_settings_are_the_published_ones() -> None:
    config, server = LetterCountingEnv.config_init()

    assert (config.group_size, config.max_token_length, config.steps_per_eval) == (8, 8192, 5)
    assert (config.starting_difficulty_level, config.worker_timeout) == (4, 3600)
    assert (server.base_url, server.model_name) == ("http://localhost:8001/v1", "Qwen/Qwen3-8B")
    defaults = LetterCountingConfig()
    assert (defaults.difficulty_window_size, defaults.starting_difficulty_level) == (150, 3)
    assert (defaults.generation_temperature, defaults.max_generation_tokens) == (1.0, 15360)
    assert (defaults.debug_logging, defaults.dump_batch_size) == (True, 100)


async def test_level_rises_is_saved_and_restored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = {"group_size": 2, "difficulty_window_size": 2, "starting_difficulty_level": 2}
    settings |= {"dump_rollouts": True, "dump_dir": str(tmp_path), "dump_batch_size": 2}
    answers: list[str] = [PROBED]
    async with ScriptedEngine(lambda _: answers.pop(0)) as engine:
        env = make_env(LetterCountingEnv, engine, monkeypatch, **settings)
        await env.setup()
        groups = []
        for rounds, right in enumerate((2, 2, 1)):
            item = await env.get_next_item()
            gold = env.check_gold_answer(item)
            answers += [gold] * right + ["<think>I do not know it.</think>"] * (2 - right)
            groups.append((await env.collect_trajectories(item))[0])
            assert env.window.level == (2 if rounds == 0 else 3)
        env.checkpoint_dir, env.wandb_prepend = str(tmp_path), "lc"
        env.save_checkpoint(8)
        logged: dict[str, Any] = {}
        await env.wandb_log(logged)
        other = make_env(LetterCountingEnv, engine, monkeypatch, **settings)
        await other.setup()
        other.checkpoint_dir, other.wandb_prepend, other.curr_step = str(tmp_path), "lc", 8
        other.load_checkpoint()
        following = [await each.get_next_item() for each in (env, other)]
        for each in (env, other):
            await each.close()
            await each.server.close()

    assert groups[:2] == [None, None]  # a mean of 1 is too easy
    assert groups[2]["scores"] == [1.0, 0.0]
    assert following[0] == following[1]
    assert (other.window.level, list(other.window.means)) == (3, [0.5])
    assert logged["train/difficulty_level"] == 3
    assert logged["train/percent_correct"] == pytest.approx(5 / 6)
    saved = read_groups(tmp_path / "letter_counting_rollouts.jsonl")
    assert [row["scores"] for row in saved] == [[1.0, 1.0], [1.0, 1.0], [1.0]]


async def test_group_that_is_too_hard_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedEngine([PROBED]) as engine:
        env = make_env(LetterCountingEnv, engine, monkeypatch, group_size=2, temperature=0.5)
        await env.setup()
        group, _ = await env.collect_trajectories(await env.get_next_item())
        body = engine.requests[-1].body
        await env.close()
        await env.server.close()

    assert group is None
    assert body["temperature"] == 0.5
    assert "stop" not in body


async def test_evaluation_reports_each_level(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "questions.jsonl"
    rows = [("first?", 2, 1), ("second?", 3, 1), ("third?", '{"a": 2}', 7)]
    path.write_text(
        "".join(
            json.dumps({"Prompt": prompt, "Answer": answer, "DifficultyLevel": level}) + "\n"
            for prompt, answer, level in rows
        )
    )
    engine = ScriptedEngine(["<think>a</think><answer>2</answer>"])
    async with engine:
        settings = {"eval_dataset": str(path)}
        report = await evaluate(LetterCountingEnv, engine, monkeypatch, tmp_path, **settings)

    metrics = report["results"]["all"]
    assert metrics["eval/percent_correct"] == pytest.approx(1 / 3)
    assert (metrics["eval/percent_correct_L1"], metrics["eval/percent_correct_L7"]) == (0.5, 0.0)
    assert (metrics["eval/num_items_L1"], metrics["eval/num_items_L7"]) == (2, 1)


async def test_evaluation_words_are_not_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedEngine([PROBED]) as engine:
        env = make_env(LetterCountingEnv, engine, monkeypatch)
        await env.setup()
        await env.server.close()
    words = {
        word for item in env.test for word in re.findall(r"in the word (\w+)\?", item.question)
    }

    assert words
    assert not words & set(env.words)
    assert {item.level for item in env.test} == set(range(1, 11))


def test_environment_passes_the_check() -> None:
    report = check_environment(LetterCountingEnv)

    assert report.passed, report.text
