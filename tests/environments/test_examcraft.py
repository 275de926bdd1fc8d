"""ExamCraft: the form of questions, rewards by fit, what a student learns, saved lessons."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.conversation import Turn
from atroposlib.errors import ConfigError
from environments.community.examcraft.examcraft_env import (
    ExamCraftConfig,
    ExamCraftEnv,
    ExamQuestion,
    Lesson,
    read_profile,
    read_question,
)
from tests.environments.offline import make_env
from tests.fakes import ScriptedEngine

CONTENT: dict[str, Any] = {
    "topic": "logic",
    "difficulty": "easy",
    "question": "Which rule allows this step here?",
    "options": {"A": "one", "B": "two", "C": "three", "D": "four"},
    "answer": "B",
}


def question(**changes: Any) -> str:
    return json.dumps(CONTENT | changes)


def lesson(known: float = 0.15, **settings: Any) -> Lesson:
    return Lesson(3, ExamCraftConfig(**settings), {"logic": known, "optics": 0.9})


@pytest.mark.parametrize(
    "answer",
    [
        "",
        f"Here it is: {question()}",
        question(difficulty="simple"),
        question(answer="E"),
        question(answer=["B"]),
        question(question="Which which which which rule?"),
        question(question="a b c d e " * 150),
        question(options={"A": "one", "B": "One ", "C": "three", "D": "four"}),
        question(options={"A": "one", "B": "two", "C": "three", "D": " "}),
        question(options={"A": "one", "B": "two", "C": "three"}),
        question(options={"A": "1", "B": "2", "C": "3", "D": "4", "E": "5"}),
        question(reward=1),
        question(topic=3),
        "[" * 3000,
    ],
)
def test_answer_that_is_no_question(answer: str) -> None:
    assert isinstance(read_question(answer), str)


def test_question_in_a_fence() -> None:
    assert read_question(f"```json\n{question()}\n```") == ExamQuestion(**CONTENT)


@pytest.mark.parametrize(
    ("known", "difficulty", "fit"),
    [
        (0.15, "easy", 0.85),
        (0.4, "medium", 0.6),
        (0.0, "easy", 4 * math.exp(1.8) / (1 + math.exp(1.8)) ** 2),
        (0.15, "expert", 4 * math.exp(9) / (1 + math.exp(9)) ** 2 * 0.85),
        (1.0, "expert", 0.0),
    ],
)
async def test_reward_is_the_fit_of_the_question(known: float, difficulty: str, fit: float) -> None:
    game = lesson(known, student_learning_rate=0.1)

    reply = await game.reply(Turn(question(difficulty=difficulty), 0, ()))

    assert reply.reward == pytest.approx(fit / 8)
    assert game.proficiency == pytest.approx({"logic": known + 0.1 * fit, "optics": 0.9})


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (question(topic="knitting"), "the topics are logic, optics"),
        (question(question="Which rule allows this step now here?"), "repeats another"),
        ("<think>hm", "expected one JSON object"),
    ],
)
async def test_question_that_is_not_asked(second: str, reason: str) -> None:
    game = lesson()
    await game.reply(Turn(question(), 0, ()))
    learned = dict(game.proficiency)

    reply = await game.reply(Turn(second, 1, ()))

    assert reply.reward == -0.1
    assert reason in str(reply.messages)
    assert (game.proficiency, game.num_invalid) == (learned, 1)


def test_student_answers_as_well_as_it_knows() -> None:
    def share_right(known: float, difficulty: str) -> float:
        game = lesson(known, student_learning_rate=1e-9)
        asked = ExamQuestion(**CONTENT | {"difficulty": difficulty})
        notes = [game.ask(asked, index)[1] for index in range(2000)]
        return sum(note.endswith("right.") for note in notes) / len(notes)

    assert share_right(0.9, "easy") > 0.99
    assert share_right(0.4, "medium") == pytest.approx(0.5 + 0.5 / 4, abs=0.04)
    assert share_right(0.0, "expert") == pytest.approx(0.25, abs=0.04)


async def test_saved_lesson_continues() -> None:
    original, restored = lesson(), lesson()
    for index, answer in enumerate([question(), "garbage"]):
        await original.reply(Turn(answer, index, ()))
    restored.restore(json.loads(json.dumps(original.state())))

    turn = Turn(question(topic="optics", question="How does light bend in a lens?"), 2, ())

    assert await restored.reply(turn) == await original.reply(turn)
    assert restored.state() == original.state()


async def test_lesson_has_all_of_its_questions_and_gold_ones_teach_most(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "student.json"
    path.write_text('{"topics": [{"name": "logic", "proficiency": 0.15}]}')
    settings = {"max_questions_per_episode": 3, "profile_path": str(path)}
    async with ScriptedEngine(["no question"] * 20) as engine:
        env = make_env(ExamCraftEnv, engine, monkeypatch, max_token_length=20_000, **settings)
        rollout, _ = await env.collect_trajectory({"seed": 0})
        metrics = env.metrics_of([rollout], "train")
        gold = env.check_gold_answer({"seed": 0})
        game = env.start_conversation({"seed": 0})
        rewards = [(await game.reply(Turn(text, i, ()))).reward for i, text in enumerate(gold)]
        await env.server.close()

    assert (rollout.rewards, rollout.outcome) == ([-0.1] * 3, "done")
    assert metrics["train/invalid_questions"] == 3
    assert metrics["train/final_proficiency"] == 0.15
    assert sum(rewards) == pytest.approx(0.8, abs=0.05)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[]", "the file"),
        ('{"topics": []}', "topics: List should have at least 1 item"),
        ('{"topics": [{"name": "logic", "proficiency": 2}]}', r"topics\.0\.proficiency"),
        ('{"topics": [{"name": "logic", "proficiency": NaN}]}', r"topics\.0\.proficiency|file"),
        ('{"topics": [{"name": "a", "proficiency": 0}, {"name": "a", "proficiency": 1}]}', "twice"),
        (None, "cannot be read"),
    ],
)
def test_profile_that_is_refused(content: str | None, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "student.json"
    if content is not None:
        path.write_text(content)

    with pytest.raises(ConfigError, match=reason):
        read_profile(path)
