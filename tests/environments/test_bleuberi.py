"""BLEUBERI: BLEU by hand, references and selection of instructions, the shipped ones."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from atroposlib.errors import ConfigError
from environments.community.bleuberi.bleuberi_env import (
    BLEUBERIEnv,
    bleu,
    instruction_of,
    words_of,
)
from tests.environments.offline import PROBED, make_env, ready_env
from tests.fakes import ScriptedEngine

TWO = ["The cat is on the mat.", "There is a cat on the mat."]


def test_words_of_a_text() -> None:
    assert words_of("It's 5,5 - so what?") == [
        *("it", "'", "s", "5", ",", "5", "-", "so", "what", "?")
    ]
    assert len(words_of("a " * 9_000)) == 4_000


@pytest.mark.parametrize(
    ("candidate", "references", "score"),
    [
        (TWO[0], TWO, 1.0),
        ("a b", ["a b"], 1.0),  # two orders
        ("a", ["a"], 1.0),
        ("a b c d", ["a b c d", "x"], 1.0),  # one order; also the closest length
        # 4/5 3/4 2/3 1/2, in full length
        ("a b c d x", ["a b c d e"], (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25),
        # 2/2 1/1, none of the others, half as long as the reference
        ("a b", ["a b c d"], math.exp(1 - 2) * (0.5 * 0.5) ** 0.25),
        # "the" counts twice, as in the reference with the most; no pair of words
        (
            "the the the the the the the",
            ["The cat is on the mat", "There is a cat on the mat"],
            (2 / 7 * 0.5 / 6 * 0.5 / 5 * 0.5 / 4) ** 0.25,
        ),
        ("x y", ["a b"], 0.0),
        ("", ["a b"], 0.0),
        ("a", [""], 0.0),
    ],
)
def test_bleu(candidate: str, references: list[str], score: float) -> None:
    assert bleu(words_of(candidate), list(map(words_of, references))) == pytest.approx(score)


USER, REPLY = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there"}


@pytest.mark.parametrize(
    ("messages", "references", "names"),
    [
        ([USER, REPLY], None, ["gold"]),
        ([USER, REPLY, USER, REPLY], {"other": "Good day"}, ["other", "gold"]),
        ([REPLY], None, None),
        ([USER], None, None),
        ([USER, REPLY, USER], None, None),
        (None, None, None),
    ],
)
def test_instruction_of_a_row(messages: Any, references: Any, names: list[str] | None) -> None:
    found = instruction_of({"messages": messages, "references": references})

    assert (list(found["references"]) if found else None) == names
    assert found is None or found["messages"] == messages[:-1]


async def test_shipped_instructions_and_constant_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    env = await ready_env(BLEUBERIEnv, monkeypatch, **BLEUBERIEnv.check_settings)
    items = [*env.train, *env.test]
    golds = [item["references"]["gold"] for item in items]

    def mean(text: str) -> float:
        return statistics.fmean(bleu(words_of(text), [words_of(gold)]) for gold in golds)

    assert len(items) == 20
    for item in items:
        assert await env.score(item, env.check_gold_answer(item)) == pytest.approx(1.0)
        assert await env.score(item, item["references"]["gold"]) == 0.0  # no tags
    assert max(map(mean, [*golds, "the", "the . ,", "is the of and ."])) < 0.12


@pytest.mark.parametrize(("mode", "lengths"), [("easy", [1, 2]), ("medium", [2, 3])])
async def test_selection_of_training_instructions(
    mode: str, lengths: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = [
        {"messages": [USER, {"role": "assistant", "content": "x" * n}]} for n in (4, 1, 3, 2, 5)
    ]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {"dataset_path": str(tmp_path), "max_train_examples": 2, "max_test_examples": 1}

    env = await ready_env(BLEUBERIEnv, monkeypatch, selection_mode=mode, **settings)

    assert sorted(len(item["references"]["gold"]) for item in env.train) == lengths
    assert len(env.test) == 1
    with pytest.raises(ConfigError, match="the references other"):
        await ready_env(BLEUBERIEnv, monkeypatch, ref_models=["other"], **settings)


@pytest.mark.parametrize(("reasoning", "is_asked"), [(True, True), (False, False)])
async def test_prompt_keeps_the_system_message_of_the_data(
    reasoning: bool, is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = await ready_env(
        BLEUBERIEnv, monkeypatch, reasoning=reasoning, **BLEUBERIEnv.check_settings
    )

    system, user = env.prompt({"messages": [{"role": "system", "content": "Be brief."}, USER]})

    assert system["content"].startswith("Be brief.\n\n")
    assert ("<think>" in system["content"]) == is_asked
    assert user == USER


async def test_group_has_the_scores_of_its_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    replies = iter(["<think>?</think><answer>a b c d</answer>", "<answer>x</answer>", "a b c d"])

    def play(prompt: str) -> str:
        return next(replies) if "Say the letters" in prompt else PROBED

    messages = [{"role": "user", "content": "Say the letters."}]
    async with ScriptedEngine(play) as engine:
        env = make_env(BLEUBERIEnv, engine, monkeypatch, group_size=3)
        item = {"messages": messages, "references": {"gold": "a b c d"}}
        group, _ = await env.collect_trajectories(item)
        await env.server.close()
        await env.close()

    assert group["scores"] == [pytest.approx(1.0), 0.0, 0.0]
