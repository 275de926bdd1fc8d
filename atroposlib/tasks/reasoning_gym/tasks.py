"""Items of the reasoning-gym package: making, splitting, prompting and scoring them.

    (seed, iteration) -> task -> complexity -> generator parameters -> item -> messages
    completion -> answer -> score in [0, 1]

Everything is a function of the settings and the arguments: the same call gives the same item.
Training items never repeat a question of the evaluation set.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from random import Random
from typing import Any

from atroposlib.errors import ConfigError
from atroposlib.tasks.reasoning_gym import package
from atroposlib.tasks.reasoning_gym.answers import extract_answer, is_safe_answer
from atroposlib.tasks.reasoning_gym.config import ReasoningGymEnvConfig
from atroposlib.tasks.reasoning_gym.curriculum import START
from atroposlib.tasks.reasoning_gym.strict_scores import (
    NOT_VALID,
    can_be_copied,
    concludes_anything,
    highest_score,
    partial_credit,
    repeats_a_premise,
    trivial_answers,
)

__all__ = [
    "DEFAULT_SYSTEM_PROMPT",
    "TaskItem",
    "eval_items",
    "extract_answer",
    "prompt_messages",
    "score_completion",
    "task_names",
    "train_item",
    "train_task_and_complexity",
]

logger = logging.getLogger(__name__)

DEFAULT_SYSTEM_PROMPT = (
    "You are an AI that thinks deeply and may reason for as long as a problem needs. Put all of "
    "your reasoning inside <think> </think> tags: work step by step, question each step, and "
    "check the result before you settle on it. After the closing tag give exactly one final "
    "answer inside <answer> </answer> tags, with nothing else in them and in the form the "
    "problem asks for."
)

MAX_ATTEMPTS = 200
"""Draws before giving up finding a training question outside the evaluation set."""

BARE_ANSWER_TASKS = frozenset(["propositional_logic", "quantum_lock"])
"""Tasks whose scorer reads variables and buttons in the tags."""

DRAWS_PER_ITEM, DIFFERENT_DRAWS_PER_ITEM = 100, 4
"""Draws for one evaluation item: all of them, and those that ask for something."""

EXACT_ANSWER_TASKS = frozenset(["game_of_life_halting"])
"""Tasks whose own scorer accepts any text; their answer is compared with the gold answer."""


@dataclass(frozen=True)
class TaskItem:
    """One question of one task; enough to build its scorer in another process."""

    task: str
    """Name in the reasoning-gym package."""
    params: dict[str, Any]
    """Generator parameters besides seed and size."""
    entry: dict[str, Any]
    """The package's entry: `question`, `answer` (None where many are right), `metadata`."""
    complexity: float | None = None
    """In [0, 1]; None means the package's default parameters."""

    @property
    def question(self) -> str:
        """The text shown to the policy."""
        return str(self.entry["question"])


def task_names(config: ReasoningGymEnvConfig) -> tuple[str, ...]:
    """Return the tasks to draw from, sorted.

    Raises:
        ConfigError: a name is unknown (the message suggests the nearest), or its parameters are
            refused by the package.
    """
    return package.buildable_tasks(tuple(config.task_names), package.as_key(config.task_params))


def eval_items(config: ReasoningGymEnvConfig) -> list[TaskItem]:
    """Return the evaluation set: distinct questions made from `eval_seed` at default complexity.

    At most `max_eval_tasks` tasks with `num_eval_samples_per_task` questions each; a task that
    has fewer different questions gives fewer.
    """
    return [item for task in _eval_task_names(config) for item in _eval_items(task, config)]


def train_task_and_complexity(
    config: ReasoningGymEnvConfig, iteration: int
) -> tuple[str, float | None]:
    """Return the task of one training item, and the complexity `complexity_mode` gives it.

    Under `curriculum` the complexity is the one a task begins with; the environment replaces it.
    """
    rng = Random(f"{config.seed}/{iteration}")
    task = rng.choice(task_names(config))
    if config.complexity_mode == "random":
        return task, rng.random()
    return task, START if config.complexity_mode == "curriculum" else None


def train_item(
    config: ReasoningGymEnvConfig, iteration: int, complexity: float | None = None
) -> TaskItem:
    """Return one training item, whose question is not in the evaluation set.

    Args:
        config: settings; `seed` and `iteration` decide the task and the question.
        iteration: number of the item, from 0.
        complexity: in [0, 1], overrides what `complexity_mode` gives.

    Raises:
        ConfigError: the evaluation set leaves no question to train on.
    """
    task, drawn = train_task_and_complexity(config, iteration)
    complexity = drawn if complexity is None else complexity
    held_out = _eval_questions(task, config)
    rng = Random(f"{config.seed}/{iteration}/{task}")
    for attempt in range(MAX_ATTEMPTS):
        # A complexity the generator cannot serve is lowered with the attempts.
        hardness = None if complexity is None else complexity * (1 - attempt / MAX_ATTEMPTS)
        params = _params(task, config, hardness)
        try:
            entry = package.make_dataset(task, params, seed=rng.randrange(2**32))[0]
        except (ValueError, AssertionError, IndexError, KeyError, RuntimeError) as error:
            logger.debug("%s could not make an item with %s: %s", task, params, error)
            continue
        if entry["question"] not in held_out and _asks_something(task, params, entry):
            return TaskItem(task, params, entry, hardness)
    raise ConfigError(
        f"no training question of {task!r} found outside the evaluation set in {MAX_ATTEMPTS} "
        "draws; lower num_eval_samples_per_task or widen task_params"
    )


def prompt_messages(item: TaskItem, config: ReasoningGymEnvConfig) -> list[dict[str, str]]:
    """Return the messages that pose an item: the system message, if any, and the question."""
    prompt = DEFAULT_SYSTEM_PROMPT if config.system_prompt is None else config.system_prompt
    system = [{"role": "system", "content": prompt}] if prompt else []
    return [*system, {"role": "user", "content": item.question}]


def score_completion(completion: str, item: TaskItem) -> float:
    """Score a completion with the task's own scorer.

    Args:
        completion: everything the policy wrote, thinking included.
        item: what was asked.

    Returns:
        In [0, 1]; 0 without exactly one answer outside the thinking, for an answer the scorer
        fails on, and for one that is not safe to hand to it. No more than `highest_score` allows;
        below 1, what is beyond the answers that solve nothing (`partial_credit`).
    """
    answer = extract_answer(completion)
    if answer is None:
        return 0.0
    task = str((item.entry.get("metadata") or {}).get("source_dataset") or item.task)
    if task in EXACT_ANSWER_TASKS:
        return float(answer.lower() == str(item.entry["answer"]).lower())
    gold = item.entry["answer"]
    if not is_safe_answer(answer, task, gold=None if gold is None else str(gold)):
        return 0.0
    highest = highest_score(task, answer, item.entry)
    if highest == 0.0:
        return 0.0
    dataset = package.scoring_dataset(item.task, package.as_key(item.params))
    scorer = partial(_score, dataset)
    # Some scorers look for the tags themselves; others take them for a part of the answer.
    texts = [answer] if task in BARE_ANSWER_TASKS else [answer, f"<answer>{answer}</answer>"]
    score = min(highest, max(scorer(text, item.entry) for text in texts))
    if task == "propositional_logic" and repeats_a_premise(answer, item.entry, scorer):
        return min(score, NOT_VALID)
    if not 0.0 < score < 1.0:
        return score
    trivial = [scorer(text, item.entry) for text in trivial_answers(task, item.entry)]
    contains_gold = gold is not None and str(gold) in answer
    return partial_credit(task, score, trivial, contains_gold=contains_gold)


def _score(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    try:
        score = float(dataset.score_answer(answer, entry))
    except Exception as error:  # noqa: BLE001 - the package's scorers raise on malformed answers
        logger.debug("an answer could not be scored: %r", error)
        return 0.0
    return min(1.0, max(0.0, score)) if score == score else 0.0


def _asks_something(task: str, params: Mapping[str, Any], entry: Mapping[str, Any]) -> bool:
    """Return whether an entry has an answer that must be found."""
    if task == "propositional_logic":
        dataset = package.scoring_dataset(task, package.as_key(params))
        return not concludes_anything(entry, partial(_score, dataset))
    return not can_be_copied(task, entry)


def _eval_task_names(config: ReasoningGymEnvConfig) -> tuple[str, ...]:
    names = task_names(config)
    if len(names) <= config.max_eval_tasks:
        return names
    return tuple(sorted(Random(config.eval_seed).sample(names, config.max_eval_tasks)))


def _eval_questions(task: str, config: ReasoningGymEnvConfig) -> frozenset[str]:
    if task not in _eval_task_names(config):
        return frozenset()
    return frozenset(item.question for item in _eval_items(task, config))


def _eval_items(task: str, config: ReasoningGymEnvConfig) -> tuple[TaskItem, ...]:
    params = package.as_key(_params(task, config, None))
    return _distinct_items(task, params, config.eval_seed, config.num_eval_samples_per_task)


@lru_cache(maxsize=256)
def _distinct_items(task: str, params_key: str, seed: int, num_items: int) -> tuple[TaskItem, ...]:
    params = json.loads(params_key)
    size = DRAWS_PER_ITEM * num_items
    dataset = package.make_dataset(task, params, seed=seed, size=size)
    items: dict[str, TaskItem] = {}
    num_drawn = 0
    for index in range(size):
        if len(items) == num_items or num_drawn == DIFFERENT_DRAWS_PER_ITEM * num_items:
            break
        item = TaskItem(task, params, dataset[index])
        if not _asks_something(task, params, item.entry):
            continue
        num_drawn += 1
        items.setdefault(item.question, item)
    return tuple(items.values())


def _params(task: str, config: ReasoningGymEnvConfig, complexity: float | None) -> dict[str, Any]:
    """Return generator parameters: those of the complexity, then those of the settings."""
    own = config.task_params.get(task, {})
    if complexity is None:
        return dict(own)
    return {**package.complexity_params(task, round(complexity, 2)), **own}
