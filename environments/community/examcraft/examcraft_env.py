"""ExamCraft: a teacher writes questions that fit what a simulated student knows.

    topics of a student -> [JSON question -> right or wrong] x N -> how much was learned

How well the student knows a topic is hidden, and shows only in its answers. It learns most from a
question that it answers by its own knowledge about half of the time, and more in topics that it
knows less. Students are made from seeds, and are the same for all rollouts of a group. Needs no
data:

    python environments/community/examcraft/examcraft_env.py process --env.total_steps 4
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from atroposlib.envs.conversation import ChatMessage, Conversation, Reply, Turn
from atroposlib.envs.multi_turn_env import Rollout
from atroposlib.errors import ConfigError
from atroposlib.tasks.answers import is_repetition, only_json_object, words_of
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.games import GameEnvConfig, SeededEnv
from atroposlib.utils.text import inert_line

__all__ = [
    "ExamCraftConfig",
    "ExamCraftEnv",
    "ExamQuestion",
    "Lesson",
    "read_profile",
    "read_question",
]

CARD = EnvironmentCard(
    task="teach a simulated student by questions of the right topic and difficulty",
    turns="8",
    reward="per question, how well it fits the student, at most 1 over all; -0.1 an invalid one",
    data="students made on the spot, or `--env.profile_path`",
    command="process --env.total_steps 4",
)

Difficulty = Literal["easy", "medium", "hard", "expert"]
LEVELS: dict[str, float] = {"easy": 0.15, "medium": 0.4, "hard": 0.65, "expert": 0.9}
"""Proficiency with which a student answers half of the questions without guessing."""
SHARPNESS = 12.0
"""Slope of the student's curve: 0.2 above a level, it knows 92 of 100 answers."""
LETTERS = ("A", "B", "C", "D")
INVALID = -0.1
MAX_ANSWER_CHARACTERS = 4_000
MIN_WORDS = 5
NUM_TOPICS = 4
TOPICS = (
    *("algebra", "astronomy", "botany", "chemistry", "economics", "electricity", "ethics"),
    *("genetics", "geography", "geometry", "grammar", "history", "logic", "mechanics"),
    *("music theory", "optics", "probability", "programming", "statistics", "thermodynamics"),
)
SYSTEM_PROMPT = (
    "You teach one student by {num_questions} questions of multiple choice. How well the student "
    "knows each topic is hidden: find out from the answers. A question that is too easy or too "
    "hard for the student teaches nothing; one that it can just about answer teaches most, and "
    "more so in a topic that it knows little about. Each turn, write one JSON object and nothing "
    "else:\n"
    '{{"topic": "TOPIC", "difficulty": "easy", "question": "TEXT", '
    '"options": {{"A": "TEXT", "B": "TEXT", "C": "TEXT", "D": "TEXT"}}, "answer": "B"}}\n\n'
    f"The difficulty is {', '.join(get_args(Difficulty)[:-1])} or {get_args(Difficulty)[-1]}. A "
    "question has at least five different words and is not one that you asked before; the four "
    "options differ. You may think first between <think> and </think>."
)


class ExamCraftConfig(GameEnvConfig):
    """Settings of the student and of the lesson."""

    profile_path: str | None = Field(
        None,
        description="JSON file of one student, asked in every lesson; "
        "None: students made from seeds.",
    )
    max_questions_per_episode: int = Field(
        8, ge=1, le=100, description="Questions of one lesson; it replaces max_turns."
    )
    student_learning_rate: float = Field(
        0.03,
        gt=0,
        le=1,
        description="Proficiency gained by the best question in a topic that is not known at all.",
    )


class _ExamModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ExamTopic(_ExamModel):
    """A topic and how well the student knows it, 0 to 1."""

    name: str = Field(min_length=1, max_length=80)
    proficiency: float = Field(ge=0, le=1)


class StudentProfile(_ExamModel):
    """The file at `profile_path`."""

    topics: list[ExamTopic] = Field(min_length=1, max_length=50)


class ExamQuestion(_ExamModel):
    """One question of the teacher."""

    topic: str
    difficulty: Difficulty
    question: str = Field(max_length=1_000)
    options: dict[Literal["A", "B", "C", "D"], str] = Field(min_length=4)
    answer: Literal["A", "B", "C", "D"]


def read_profile(path: Path) -> dict[str, float]:
    """Return the proficiency of each topic of a file.

    Raises:
        ConfigError: the file cannot be read, is not a profile, or has a topic twice.
    """
    try:
        profile = StudentProfile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"the profile {path} cannot be read: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(
            f'{path}: {place}: {first["msg"]}; expected {{"topics": [{{"name": "algebra", '
            '"proficiency": 0.4}]}'
        ) from error
    topics = {topic.name: topic.proficiency for topic in profile.topics}
    if len(topics) < len(profile.topics):
        raise ConfigError(f"{path}: a topic occurs twice")
    return topics


def read_question(answer: str) -> ExamQuestion | str:
    """Return the question of a turn, or why there is none.

    Args:
        answer: the completion without its thinking.
    """
    found = only_json_object(answer, max_characters=MAX_ANSWER_CHARACTERS)
    if found is None:
        return "expected one JSON object and nothing else"
    try:
        question = ExamQuestion.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    if len(words_of(question.question)) < MIN_WORDS:
        return f"a question has at least {MIN_WORDS} different words"
    options = {" ".join(option.casefold().split()) for option in question.options.values()}
    if len(options - {""}) < len(LETTERS):
        return "the four options must differ"
    return question


class Lesson(Conversation):
    """The questions to one student.

    Args:
        seed: seed of the student, and of its answers.
        config: settings of the lesson.
        known: proficiency of each topic; None: made from the seed.

    Attributes:
        proficiency: how well the student knows each topic by now, 0 to 1.
        num_invalid: number of turns without a valid question.
    """

    def __init__(
        self, seed: int, config: ExamCraftConfig, known: Mapping[str, float] | None = None
    ) -> None:
        source = random.Random(seed)
        if known is None:
            names = source.sample(TOPICS, NUM_TOPICS)
            known = {name: round(source.uniform(0.05, 0.95), 3) for name in names}
        self.proficiency = dict(known)
        self.num_invalid = 0
        self.unfinished_reward = INVALID
        self._asked: list[str] = []
        self._seed = seed
        self._config = config

    def opening(self) -> list[ChatMessage]:
        num_questions = self._config.max_questions_per_episode
        return [
            {"role": "system", "content": SYSTEM_PROMPT.format(num_questions=num_questions)},
            {"role": "user", "content": f"Topics: {', '.join(self.proficiency)}."},
        ]

    async def reply(self, turn: Turn) -> Reply:
        question = read_question(turn.answer)
        if isinstance(question, ExamQuestion):
            question = self._refusal(question) or question
        if isinstance(question, str):
            self.num_invalid += 1
            reward, note = INVALID, f"Not asked: {inert_line(question, max_characters=200)}."
        else:
            reward, note = self.ask(question, turn.index)
        left = self._config.max_questions_per_episode - turn.index - 1
        if left <= 0:
            return Reply(reward=reward, is_done=True)
        return Reply(f"{note} Questions left: {left}.", reward=reward)

    def _refusal(self, question: ExamQuestion) -> str | None:
        if question.topic not in self.proficiency:
            return f"the topics are {', '.join(self.proficiency)}"
        if is_repetition(question.question, self._asked):
            return "the question repeats another"
        return None

    def ask(self, question: ExamQuestion, index: int) -> tuple[float, str]:
        """Ask a valid question; return its reward and the student's answer."""
        source = random.Random(f"{self._seed} answer {index}")
        is_known = source.random() < self._share_known(question.topic, question.difficulty)
        chosen = question.answer if is_known else source.choice(LETTERS)
        reward = self.fit(question.topic, question.difficulty)
        self.proficiency[question.topic] += self._config.student_learning_rate * reward
        self._asked.append(question.question)
        verdict = "right" if chosen == question.answer else "wrong"
        return (
            reward / self._config.max_questions_per_episode,
            f"The student answers {chosen}, which is {verdict}.",
        )

    def fit(self, topic: str, difficulty: str) -> float:
        """Return how well a question suits the student, 0 to 1."""
        share = self._share_known(topic, difficulty)
        return 4 * share * (1 - share) * (1 - self.proficiency[topic])

    def _share_known(self, topic: str, difficulty: str) -> float:
        distance = self.proficiency[topic] - LEVELS[difficulty]
        return 1 / (1 + math.exp(-SHARPNESS * distance))

    def state(self) -> dict[str, Any]:
        return {
            "proficiency": self.proficiency,
            "asked": self._asked,
            "num_invalid": self.num_invalid,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.proficiency = dict(state["proficiency"])
        self._asked = list(state["asked"])
        self.num_invalid = state["num_invalid"]


class ExamCraftEnv(SeededEnv):
    """Lessons from seeds; an item has the `seed`."""

    name = "examcraft"
    env_config_cls = ExamCraftConfig
    config: ExamCraftConfig
    default_model = "Qwen/Qwen3-1.7B"
    default_settings: ClassVar[dict[str, Any]] = {
        "group_size": 8,
        "max_token_length": 8192,
        "max_turn_tokens": 768,
        "wandb_name": "examcraft",
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.config.max_turns = self.config.max_questions_per_episode
        path = self.config.profile_path
        self._known = None if path is None else read_profile(Path(path))

    def start_conversation(self, item: Mapping[str, int]) -> Lesson:
        return Lesson(item["seed"], self.config, self._known)

    def metrics_of(self, rollouts: Sequence[Rollout], area: str) -> dict[str, float]:
        metrics = super().metrics_of(rollouts, area)
        lessons = [r.conversation for r in rollouts if isinstance(r.conversation, Lesson)]
        if lessons:
            metrics[f"{area}/invalid_questions"] = statistics.fmean(x.num_invalid for x in lessons)
            metrics[f"{area}/final_proficiency"] = statistics.fmean(
                statistics.fmean(lesson.proficiency.values()) for lesson in lessons
            )
        return metrics

    def check_gold_answer(self, item: Mapping[str, int]) -> list[str]:
        lesson = self.start_conversation(item)
        turns = []
        for index in range(self.config.max_questions_per_episode):
            topic, difficulty = max(
                ((topic, level) for topic in lesson.proficiency for level in LEVELS),
                key=lambda pair: lesson.fit(*pair),
            )
            words = " ".join(f"{word}{index}" for word in ("which", "law", "rule", "case"))
            content = {
                "topic": topic,
                "difficulty": difficulty,
                "question": f"{words} of {topic}?",
                "options": {letter: f"choice {letter}" for letter in LETTERS},
                "answer": LETTERS[index % len(LETTERS)],
            }
            turns.append(json.dumps(content))
            lesson.ask(ExamQuestion.model_validate(content), index)
        return turns


if __name__ == "__main__":
    ExamCraftEnv.cli()
