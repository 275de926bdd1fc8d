"""Letter counting: how often letters occur in a word or a string, in ten levels.

    level -> text and letters -> [system, user] -> G completions -> <answer> -> right? -> 1 or 0
      '------- one up or down by the mean of the last groups <---------------------------'

Levels 1 to 4 are words, levels 5 to 10 random strings of up to 500 characters with up to 50
letters to count. Needs no data:

    python environments/letter_counting_environment/letter_counting_environment.py process \
        --env.total_steps 4
"""

from __future__ import annotations

import asyncio
import json
import logging
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from random import Random
from string import ascii_letters, ascii_lowercase
from typing import Any, NamedTuple

from pydantic import Field, model_validator

from atroposlib.envs.base import APIServerConfig, Item, ScoredDataGroup
from atroposlib.envs.dataset_items import hub_rows
from atroposlib.envs.single_turn_env import Trajectory
from atroposlib.errors import ConfigError
from atroposlib.tasks.answers import only_tagged
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.games import words_at
from atroposlib.tasks.single_turn_parts import (
    DEEP_THINKING,
    RolloutDump,
    SavedRolloutsConfig,
    ThinkingEnv,
    answer_after_thinking,
    default_configs,
)
from atroposlib.utils.local_records import read_records

__all__ = [
    "LEVELS",
    "CountingItem",
    "DifficultyWindow",
    "LetterCountingConfig",
    "LetterCountingEnv",
    "make_item",
    "read_eval_row",
    "score_count",
]

logger = logging.getLogger("environments.letter_counting")

CARD = EnvironmentCard(
    task="count letters in words and in long strings, in ten levels",
    turns="1",
    reward="1 when all counts are right, else 0",
    data="793 words shipped, and random strings made on the spot",
    command="process --env.total_steps 4",
)

MODEL = "Qwen/Qwen3-8B"
HUB_EVAL_COLUMNS = ("Prompt", "Answer", "DifficultyLevel")
FORMAT_ONE = "Write the number, as digits, between <answer> and </answer>, exactly once."
FORMAT_MANY = (
    "Write the counts as one JSON object between <answer> and </answer>, exactly once, with each "
    "of the letters as a key, such as {example}."
)


class Level(NamedTuple):
    """The range of texts and letters of one level."""

    min_length: int
    max_length: int
    max_letters: int
    multi_letter_probability: float
    """Probability of more than one letter to count."""
    alphabet: str
    """Letters of random strings; empty for words."""


LEVELS = {
    1: Level(3, 4, 1, 0.0, ""),
    2: Level(4, 5, 2, 0.1, ""),
    3: Level(5, 7, 3, 0.25, ""),
    4: Level(6, 10, 4, 0.4, ""),
    5: Level(10, 20, 5, 0.5, ascii_lowercase),
    6: Level(20, 40, 8, 0.6, ascii_lowercase),
    7: Level(40, 80, 12, 0.7, ascii_lowercase),
    8: Level(80, 150, 18, 0.8, ascii_lowercase),
    9: Level(150, 300, 30, 0.9, ascii_letters),
    10: Level(400, 500, 50, 1.0, ascii_letters),
}
MAX_LEVEL = max(LEVELS)
PRESENT_PROBABILITY = 0.8
"""Probability that a letter to count is drawn from the text, not from the alphabet."""

Counts = Mapping[str, int]


class CountingItem(NamedTuple):
    """One question."""

    question: str
    counts: int | Counts
    """The answer: a number, or the number of each letter."""
    level: int


class LetterCountingConfig(SavedRolloutsConfig):
    """Settings of the levels, the words and sampling."""

    temperature: float | None = Field(  # type: ignore[assignment]
        None,
        ge=0,
        description="Sampling temperature of rollouts; None takes generation_temperature.",
    )
    generation_temperature: float = Field(
        1.0, ge=0, description="Sampling temperature of rollouts, unless temperature is given."
    )
    eval_temperature: float = Field(0.6, ge=0, description="Sampling temperature of evaluations.")
    max_generation_tokens: int = Field(15360, ge=1, description="Maximum tokens of a completion.")
    difficulty_window_size: int = Field(
        150, ge=1, description="Number of latest groups whose mean decides about the level."
    )
    difficulty_increase_threshold: float = Field(
        0.8,
        ge=0,
        le=1,
        description="Mean above which the level rises; a group with a higher mean is dropped.",
    )
    difficulty_decrease_threshold: float = Field(
        0.2,
        ge=0,
        le=1,
        description="Mean below which the level falls; a group with a lower mean is dropped.",
    )
    min_difficulty_level: int = Field(1, ge=1, le=MAX_LEVEL, description="Lowest level.")
    max_difficulty_level: int = Field(10, ge=1, le=MAX_LEVEL, description="Highest level.")
    starting_difficulty_level: int = Field(3, ge=1, le=MAX_LEVEL, description="First level.")
    debug_logging: bool = Field(True, description="Whether every scored group is logged.")
    dump_batch_size: int = Field(
        100, ge=1, description="Number of saved groups that are written together."
    )
    words_path: str | None = Field(
        None, description="Word list with a word, a tab and a clue per line; None is the shipped."
    )
    seed: int = Field(42, description="Seed of the questions and of the choice of test words.")
    eval_dataset: str | None = Field(
        None,
        description="Questions for evaluations with the columns Prompt, Answer, DifficultyLevel: "
        "a local file, or a data set of the hub such as NousResearch/Letter-Counting-Eval. None "
        "makes questions from words that are not trained on.",
    )
    num_eval_items_per_level: int = Field(
        10, ge=1, description="Number of made evaluation questions of each level."
    )

    @model_validator(mode="after")
    def _levels_are_in_order(self) -> LetterCountingConfig:
        low, high = self.min_difficulty_level, self.max_difficulty_level
        if not low <= self.starting_difficulty_level <= high:
            raise ValueError(
                "expected min_difficulty_level <= starting_difficulty_level <= "
                f"max_difficulty_level, got {low}, {self.starting_difficulty_level} and {high}"
            )
        if self.difficulty_decrease_threshold >= self.difficulty_increase_threshold:
            raise ValueError(
                "difficulty_decrease_threshold must be below difficulty_increase_threshold"
            )
        return self


def make_item(level: int, words: Sequence[str], source: Random) -> CountingItem:
    """Return a question of a level; `words` are for levels without an alphabet."""
    rules = LEVELS[level]
    text = _text_of(rules, words, source)
    alphabet = rules.alphabet or ascii_lowercase
    num_letters = 1
    if rules.max_letters > 1 and source.random() < rules.multi_letter_probability:
        num_letters = source.randint(2, rules.max_letters)
    present = sorted(set(text))
    letters: list[str] = []
    while len(letters) < num_letters:
        pool = present if source.random() < PRESENT_PROBABILITY else alphabet
        rest = [letter for letter in pool if letter not in letters]
        letters.append(source.choice(rest or [a for a in alphabet if a not in letters]))
    counts = {letter: text.count(letter) for letter in letters}
    case = " Capital and small letters are different." if rules.alphabet == ascii_letters else ""
    what = "word" if not rules.alphabet else "string"
    if num_letters == 1:
        question = f"How many times does the letter {letters[0]} occur in the {what} {text}?{case}"
        return CountingItem(f"{question} {FORMAT_ONE}", counts[letters[0]], level)
    example = json.dumps(dict.fromkeys(letters[:2], 0))
    question = (
        f"How many times does each of the letters {', '.join(letters)} occur in the {what} "
        f"{text}?{case} {FORMAT_MANY.format(example=example)}"
    )
    return CountingItem(question, counts, level)


def _text_of(rules: Level, words: Sequence[str], source: Random) -> str:
    if rules.alphabet:
        length = source.randint(rules.min_length, rules.max_length)
        return "".join(source.choices(rules.alphabet, k=length))
    fitting = [word for word in words if rules.min_length <= len(word) <= rules.max_length]
    return source.choice(fitting or list(words))


def read_eval_row(row: Mapping[str, Any]) -> CountingItem:
    """Return the question of a row with the columns Prompt, Answer and DifficultyLevel.

    Raises:
        ConfigError: the answer is neither a number nor a JSON object of numbers, or the level is
            not a number.
    """
    counts = _parsed_counts(str(row["Answer"]))
    try:
        level = int(row["DifficultyLevel"])
    except (TypeError, ValueError):
        level = -1
    if counts is None or level < 0:
        raise ConfigError(
            f"question {row['Prompt']!r:.80}: expected Answer to be a number or a JSON object of "
            f"numbers and DifficultyLevel to be an integer, got {row['Answer']!r:.80} and "
            f"{row['DifficultyLevel']!r:.80}"
        )
    return CountingItem(str(row["Prompt"]), counts, level)


def _parsed_counts(text: str) -> int | dict[str, int] | None:
    """Return a count, or the counts of a JSON object; None for anything else."""
    if text.isascii() and text.isdigit() and len(text) <= 9:
        return int(text)
    try:
        counts = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_object = isinstance(counts, dict) and all(type(count) is int for count in counts.values())
    return counts if is_object else None


def score_count(completion: str, counts: int | Counts) -> float:
    """Return 1.0 if the tagged answer after one block of thinking has exactly these counts."""
    answer = answer_after_thinking(completion)
    tagged = None if answer is None else only_tagged(answer, "answer")
    return float(tagged is not None and _parsed_counts(tagged) == counts)


class DifficultyWindow:
    """The level, which moves by one when the mean of a full window leaves a range.

    The window is emptied with each move.

    Args:
        level: first level.
        lowest: lowest level.
        highest: highest level.
        size: number of group means in the window.
        low: mean below which the level falls.
        high: mean above which it rises.
        means: restored contents of the window.
    """

    def __init__(
        self,
        *,
        level: int,
        lowest: int,
        highest: int,
        size: int,
        low: float,
        high: float,
        means: Iterable[float] = (),
    ) -> None:
        self.level = min(highest, max(lowest, level))
        self.means = deque(means, maxlen=size)
        self._lowest, self._highest = lowest, highest
        self._low, self._high = low, high

    def record(self, mean: float) -> None:
        """Add the mean score of a group, and adjust the level."""
        self.means.append(mean)
        if len(self.means) < (self.means.maxlen or 0):
            return
        average = statistics.fmean(self.means)
        wanted = self.level + (average > self._high) - (average < self._low)
        moved = min(self._highest, max(self._lowest, wanted))
        if moved != self.level:
            self.level = moved
            self.means.clear()

    def metrics(self) -> dict[str, float]:
        metrics: dict[str, float] = {
            "train/difficulty_level": self.level,
            "train/difficulty_window_count": len(self.means),
        }
        if self.means:
            metrics["train/difficulty_window_mean"] = statistics.fmean(self.means)
        return metrics


class LetterCountingEnv(ThinkingEnv):
    """Questions at the level of the window; an item is a `CountingItem`.

    Attributes:
        iter: questions made so far; kept in checkpoints, as are the next two.
        difficulty_level: restored level.
        difficulty_means: restored window.
    """

    name = "letter_counting"
    env_config_cls = LetterCountingConfig
    config: LetterCountingConfig
    logs_percent_correct = True

    def __init__(self, config: LetterCountingConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.iter = 0
        self.difficulty_level = config.starting_difficulty_level
        self.difficulty_means: list[float] = []
        self.window = self._make_window()
        self.words: list[str] = []
        self.test: list[CountingItem] = []
        self.rollout_dump = RolloutDump(
            config, "letter_counting", batch_size=config.dump_batch_size
        )

    @classmethod
    def config_init(cls) -> tuple[LetterCountingConfig, APIServerConfig]:
        return default_configs(
            LetterCountingConfig,
            MODEL,
            port=8001,
            group_size=8,
            batch_size=256,
            max_num_workers=24,
            total_steps=5000,
            steps_per_eval=5,
            max_token_length=8192,
            worker_timeout=3600,
            starting_difficulty_level=4,
            wandb_name="letter_counting",
        )

    async def setup(self) -> None:
        self.config.set_log_levels(logger)
        words = sorted(words_at(self.config.words_path))
        Random(self.config.seed).shuffle(words)
        num_test = max(1, len(words) // 20)
        self.words = words[num_test:] or words
        self.test = await asyncio.to_thread(self._eval_items, words[:num_test])

    def _eval_items(self, test_words: Sequence[str]) -> list[CountingItem]:
        name = self.config.eval_dataset
        if name is None:
            return [
                make_item(level, test_words, Random(f"evaluation {self.config.seed} {level} {i}"))
                for level in range(
                    self.config.min_difficulty_level, self.config.max_difficulty_level + 1
                )
                for i in range(self.config.num_eval_items_per_level)
            ]
        path = Path(name)
        if path.suffix or path.is_file():
            rows = read_records(path, HUB_EVAL_COLUMNS)
        else:
            rows = hub_rows(name, split="train")
        missing = [column for column in HUB_EVAL_COLUMNS if rows and column not in rows[0]]
        if missing:
            raise ConfigError(f"{name} has no column {', '.join(missing)}")
        return [read_eval_row(row) for row in rows]

    async def get_next_item(self) -> CountingItem:
        source = Random(f"{self.config.seed} {self.iter}")
        self.iter += 1
        return make_item(self.window.level, self.words, source)

    def eval_items(self) -> Sequence[CountingItem]:
        return self.test

    def prompt(self, item: CountingItem) -> list[dict[str, str]]:
        return [
            {"role": "system", "content": DEEP_THINKING},
            {"role": "user", "content": item.question},
        ]

    def sampling(self) -> dict[str, Any]:
        given = self.config.temperature
        return {"temperature": self.config.generation_temperature if given is None else given}

    async def score(self, item: CountingItem, answer: str) -> float:
        return score_count(self.opened_tag + answer, item.counts)

    async def collect_trajectories(
        self, item: CountingItem
    ) -> tuple[ScoredDataGroup | None, list[Item]]:
        """Sample and score a group; None if it is too easy or too hard."""
        group, backlog = await super().collect_trajectories(item)
        if group is None:
            return None, backlog
        mean = statistics.fmean(group["scores"])
        low = self.config.difficulty_decrease_threshold
        return (
            group if low <= mean <= self.config.difficulty_increase_threshold else None
        ), backlog

    def note_group(
        self, item: CountingItem, trajectories: Sequence[Trajectory], scores: Sequence[float]
    ) -> None:
        logger.debug("level %d: scores %s", item.level, scores)
        if item.level == self.window.level:  # else it was started before the last move
            self.window.record(statistics.fmean(scores))
        details = {"level": item.level, "gold_answer": item.counts}
        self.rollout_dump.save(details, self.prompt(item), trajectories, scores)

    async def evaluate_item(self, item: CountingItem) -> dict[str, Any]:
        record = await super().evaluate_item(item)
        return {**record, "level": item.level, "gold_answer": item.counts}

    def evaluation_metrics(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        metrics = super().evaluation_metrics(samples)
        for level in sorted({sample["level"] for sample in samples}):
            scores = [sample["score"] for sample in samples if sample["level"] == level]
            metrics[f"eval/percent_correct_L{level}"] = statistics.fmean(scores)
            metrics[f"eval/num_items_L{level}"] = len(scores)
        return metrics

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        metrics = {} if wandb_metrics is None else wandb_metrics
        metrics.update(self.window.metrics())
        await super().wandb_log(metrics)

    def save_checkpoint(self, step: int, data: Mapping[str, Any] | None = None) -> None:
        own = {
            "iter": self.iter,
            "difficulty_level": self.window.level,
            "difficulty_means": list(self.window.means),
        }
        super().save_checkpoint(step, {**(data or {}), **own})

    def load_checkpoint(self) -> None:
        super().load_checkpoint()
        self.window = self._make_window()

    async def close(self) -> None:
        self.rollout_dump.close()
        await super().close()

    def check_gold_answer(self, item: CountingItem) -> str:
        return f"<think>I count one by one.</think><answer>{json.dumps(item.counts)}</answer>"

    def _make_window(self) -> DifficultyWindow:
        return DifficultyWindow(
            level=self.difficulty_level,
            lowest=self.config.min_difficulty_level,
            highest=self.config.max_difficulty_level,
            size=self.config.difficulty_window_size,
            low=self.config.difficulty_decrease_threshold,
            high=self.config.difficulty_increase_threshold,
            means=self.difficulty_means,
        )

    def _budget(self, messages: Sequence[Mapping[str, Any]]) -> int:
        return min(self.config.max_generation_tokens, super()._budget(messages))


if __name__ == "__main__":
    LetterCountingEnv.cli()
