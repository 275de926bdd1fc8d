r"""InternBootcamp: tasks of classes with the interface of the package `internbootcamp`.

    case_generator() -> prompt_func(identity) -> completion -> verify_score(text, identity, ...)

`--env.task_name` selects the class: `Coinsbootcamp` of this page, any other one by `MODULE:CLASS`,
the name of a class of the package, or `RandomTask` for a random one of the package per item. The
package is not on PyPI; install it from its repository.

    python environments/intern_bootcamp/intern_bootcamp_env.py process \
        --env.task_name Coinsbootcamp --env.total_steps 4
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import random
import re
import statistics
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from pydantic import Field

from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.single_turn_env import SingleTurnEnv, SingleTurnEnvConfig, Trajectory
from atroposlib.errors import AtroposError, ConfigError
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.single_turn_parts import DEEP_THINKING, deep_hermes_settings
from atroposlib.utils.aio import all_results

__all__ = [
    "Bootcamp",
    "BootcampCase",
    "Coinsbootcamp",
    "InternBootcampEnv",
    "InternBootcampEnvConfig",
    "UnsafeVerifierError",
    "bootcamp_reward",
    "load_bootcamp",
    "make_case",
    "verify_answer",
]

logger = logging.getLogger(__name__)

CARD = EnvironmentCard(
    task="cases of a bootcamp class: a generator, a prompt and a verifier",
    turns="1",
    reward="+1 right, else -0.5, plus 0.2 if well-formed",
    data="made on the spot",
    needs="core install for `Coinsbootcamp`; other classes by `MODULE:CLASS`",
    command="process --env.task_name Coinsbootcamp --env.total_steps 4",
)

PACKAGE = "internbootcamp"
RANDOM_TASK = "RandomTask"


class UnsafeVerifierError(AtroposError, RuntimeError):
    """A verifier tried to run text of the answer as code, or to start a program."""


class Bootcamp(Protocol):
    """A task: generates cases, writes their prompts, verifies answers."""

    def case_generator(self) -> Any:
        """Return a new case."""

    def prompt_func(self, identity: Any) -> str:
        """Return the prompt of a case."""

    def verify_score(
        self,
        model_output: str,
        identity: Any,
        format_score: float = 0,
        short_penalty: bool = True,
        short_threshold: int = 100,
    ) -> float:
        """Return 1 for a right answer, `format_score` for a well-formed one, else 0."""


@runtime_checkable
class HasSolution(Protocol):
    """A bootcamp that knows an answer of each case."""

    def solution(self, identity: Any) -> str:
        """Return the text of a right answer."""


METHODS = ("case_generator", "prompt_func", "verify_score")

ANSWER = re.compile(r"\[answer\]([\d\s,]{1,400})\[/answer\]")


class Coinsbootcamp:
    """Pay an amount with a given number of coins; any payment that fits is right.

    Args:
        coins: values of the coins.
        max_coins: maximum number of coins of a payment.
    """

    def __init__(self, coins: Sequence[int] = (1, 5, 10, 25, 50), max_coins: int = 8) -> None:
        if not coins or min(coins) < 1 or not 1 <= max_coins <= 50:
            raise ConfigError(
                f"coins {list(coins)}, max_coins {max_coins}: expected positive values, and at "
                "most 50 coins"
            )
        self.coins = sorted(coins)
        self.max_coins = max_coins

    def case_generator(self) -> dict[str, Any]:
        paid = random.choices(self.coins, k=random.randint(min(2, self.max_coins), self.max_coins))
        return {"coins": self.coins, "amount": sum(paid), "number": len(paid), "paid": paid}

    def prompt_func(self, identity: Mapping[str, Any]) -> str:
        return (
            f"There are coins of {', '.join(map(str, identity['coins']))} cents, any number of "
            f"each. Pay {identity['amount']} cents with exactly {identity['number']} coins. End "
            "with the values of the coins, separated by spaces, between [answer] and [/answer]."
        )

    def verify_score(
        self,
        model_output: str,
        identity: Mapping[str, Any],
        format_score: float = 0,
        short_penalty: bool = True,
        short_threshold: int = 100,
    ) -> float:
        found = ANSWER.findall(model_output.rpartition("</think>")[2])
        if not found:
            return 0.0
        paid = [int(word) for word in re.findall(r"\d{1,9}", found[-1])]
        is_right = (
            len(paid) == identity["number"]
            and sum(paid) == identity["amount"]
            and set(paid) <= set(identity["coins"])
        )
        score = 1.0 if is_right else float(format_score)
        if short_penalty and len(model_output) < short_threshold:
            score *= len(model_output) / short_threshold
        return score

    def solution(self, identity: Mapping[str, Any]) -> str:
        return f"[answer]{' '.join(map(str, identity['paid']))}[/answer]"


OWN = {"Coinsbootcamp": Coinsbootcamp}


def load_bootcamp(task: str, params: Mapping[str, Any]) -> Bootcamp:
    """Return an instance of a bootcamp class.

    Args:
        task: a class of this page, `MODULE:CLASS`, or a class of the package.
        params: arguments of the class.

    Raises:
        ConfigError: there is no such class, it lacks a method, or it rejects the arguments.
    """
    module, colon, name = task.rpartition(":")
    found: Any
    if not colon and name in OWN:
        found = OWN[name]
    else:
        found = getattr(_import(module or PACKAGE), name, None)
    missing = [method for method in METHODS if not callable(getattr(found, method, None))]
    if missing:
        raise ConfigError(
            f"{task} is not a bootcamp: it has no {', '.join(missing)}; expected a class with "
            f"{', '.join(METHODS)}, as MODULE:CLASS, a class of {PACKAGE}, or {', '.join(OWN)}"
        )
    try:
        made: Bootcamp = found(**params)
    except TypeError as error:
        raise ConfigError(f"{task} does not accept --env.task_params: {error}") from error
    return made


def package_tasks() -> list[str]:
    """Return the names of the bootcamp classes of the package, sorted.

    Raises:
        ConfigError: the package is missing, or has none.
    """
    package = _import(PACKAGE)
    names = [
        name
        for name, found in vars(package).items()
        if isinstance(found, type)
        and name.lower().endswith("bootcamp")
        and name.lower() != "basebootcamp"
        and all(callable(getattr(found, method, None)) for method in METHODS)
    ]
    if not names:
        raise ConfigError(f"the package {PACKAGE} has no classes named *bootcamp")
    return sorted(names)


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        hint = (
            "it is not on PyPI, install it from its repository, or select "
            f"--env.task_name {', '.join(OWN)}"
            if module == PACKAGE
            else "expected MODULE:CLASS of a module that Python finds"
        )
        raise ConfigError(f"the module {module!r} cannot be imported ({error}); {hint}") from error


class BootcampCase(NamedTuple):
    """One item."""

    task: str
    params: dict[str, Any]
    identity: Any
    prompt: str
    solution: str | None
    """A right answer, if the class knows one."""


@lru_cache(maxsize=256)
def _ready_bootcamp(task: str, params: str) -> Bootcamp:
    """Return the bootcamp for JSON text of its arguments, with its lazy imports done.

    Modules imported on first use may build classes from text, which the guard would refuse.
    """
    bootcamp = load_bootcamp(task, json.loads(params))
    bootcamp.verify_score("", bootcamp.case_generator(), 0.0, False, 1)
    return bootcamp


def make_case(task: str, params: Mapping[str, Any], seed: str) -> BootcampCase:
    """Return a case, the same one for a seed if the class draws from `random` only."""
    bootcamp = _ready_bootcamp(task, json.dumps(params, sort_keys=True))
    state = random.getstate()
    random.seed(seed)
    try:
        identity = bootcamp.case_generator()
    finally:
        random.setstate(state)
    solution = bootcamp.solution(identity) if isinstance(bootcamp, HasSolution) else None
    return BootcampCase(task, dict(params), identity, bootcamp.prompt_func(identity), solution)


def verify_answer(
    case: BootcampCase,
    completion: str,
    *,
    format_score: float,
    short_penalty: bool,
    short_threshold: int,
) -> float:
    """Return the score of the verifier.

    Raises:
        UnsafeVerifierError: the verifier runs text as code, or starts a program.
        ValueError: it returned no number from 0 to 1.
    """
    bootcamp = _ready_bootcamp(case.task, json.dumps(case.params, sort_keys=True))
    with _no_code_from_text():
        score = float(
            bootcamp.verify_score(
                completion, case.identity, format_score, short_penalty, short_threshold
            )
        )
    if not 0.0 <= score <= 1.0:
        raise ValueError(f"{case.task}.verify_score returned {score}; expected 0 to 1")
    return score


def bootcamp_reward(base: float, *, correct: float, incorrect: float) -> float:
    """Return the reward of a verifier's score; a partial one is added to `incorrect`."""
    if base >= 1.0:
        return correct
    return incorrect + base if base > 0.0 else incorrect


FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class")
"""Audit events that a verifier must not raise."""


class _Guard(threading.local):
    """Whether this thread may run code from text, and the event that was refused."""

    is_on: bool = False
    refused: str | None = None


_guard = _Guard()


@lru_cache(maxsize=1)
def _install_guard() -> None:
    sys.addaudithook(_refuse)


def _refuse(event: str, args: tuple[Any, ...]) -> None:
    if not _guard.is_on or (event != "exec" and event not in FORBIDDEN):
        return
    source = getattr(args[0], "co_filename", "") if event == "exec" else "<text>"
    if source.startswith("<") and not source.startswith("<frozen"):
        _guard.refused = event
        raise UnsafeVerifierError(_refusal(event))


def _refusal(event: str) -> str:
    return (
        f"the verifier was stopped at {event!r}: it runs the answer as code or starts a program; "
        "select another task, or let the verifier parse the answer"
    )


@contextmanager
def _no_code_from_text() -> Iterator[None]:
    """Refuse code compiled from text in this thread; a safety net, and no substitute for a sandbox.

    A verifier that suppresses the refusal fails at the end of the block.
    """
    _install_guard()
    _guard.is_on, _guard.refused = True, None
    try:
        yield
    finally:
        _guard.is_on = False
    if _guard.refused is not None:
        raise UnsafeVerifierError(_refusal(_guard.refused))


class InternBootcampEnvConfig(SingleTurnEnvConfig):
    """Settings of the task and of its rewards."""

    task_name: str = Field(
        RANDOM_TASK,
        description="Class of the task: Coinsbootcamp, MODULE:CLASS, a class of the package "
        "internbootcamp, or RandomTask for a random one of the package per item.",
    )
    task_params: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the class, as JSON."
    )
    correct_reward: float = Field(1.0, description="Reward of a right answer.")
    incorrect_reward: float = Field(-0.5, description="Reward of a wrong answer.")
    format_bonus: float = Field(
        0.2, ge=0, lt=1, description="Score of the verifier for a wrong but well-formed answer."
    )
    require_reasoning: bool = Field(
        True,
        description="Whether the prompt asks for reasoning, and the verifier lowers the score of "
        "completions shorter than min_reasoning_length.",
    )
    min_reasoning_length: int = Field(
        50, ge=1, description="Length in characters below which a completion is short."
    )
    temperature: float = Field(0.7, ge=0, description="Sampling temperature of rollouts.")
    top_p: float = Field(0.9, gt=0, le=1, description="Nucleus of rollouts.")
    seed: int = Field(0, description="Seed of the cases.")
    num_eval_cases: int = Field(20, ge=0, le=10_000, description="Number of evaluation cases.")
    case_timeout_s: float = Field(
        30.0, gt=0, description="Time limit of the generator and of the verifier in seconds."
    )


class InternBootcampEnv(SingleTurnEnv):
    """Cases of a bootcamp class; an item is a `BootcampCase`.

    Attributes:
        iter: cases made so far; kept in checkpoints.
        bases: scores of verifiers since the last log, by task.
    """

    name = "intern_bootcamp"
    env_config_cls = InternBootcampEnvConfig
    config: InternBootcampEnvConfig
    scores_thinking = True  # verifiers take the whole completion
    check_settings: ClassVar[dict[str, Any]] = {"task_name": "Coinsbootcamp"}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.iter = 0
        self.tasks: list[str] = []
        self.eval_cases: list[BootcampCase] = []
        self.bases: dict[str, list[float]] = defaultdict(list)

    @classmethod
    def config_init(cls) -> tuple[InternBootcampEnvConfig, APIServerConfig]:
        return deep_hermes_settings(
            InternBootcampEnvConfig,
            group_size=8,
            max_num_workers_per_node=16,
            total_steps=10000,
            steps_per_eval=100,
            max_token_length=8192,
            min_batch_allocation=0.1,
            wandb_name="intern_bootcamp",
            data_path_to_save_groups="data/intern_bootcamp_random_tasks.jsonl",
        )

    async def setup(self) -> None:
        name = self.config.task_name
        # In a thread: packages of tasks import for seconds.
        if name == RANDOM_TASK:
            self.tasks = await asyncio.to_thread(package_tasks)
        else:
            await asyncio.to_thread(load_bootcamp, name, self.config.task_params)
            self.tasks = [name]
        numbers = range(self.config.num_eval_cases)
        self.eval_cases = await all_results(self._make(f"evaluation {i}") for i in numbers)
        logger.info("%d tasks, %d evaluation cases", len(self.tasks), len(self.eval_cases))

    async def get_next_item(self) -> BootcampCase:
        number, self.iter = self.iter, self.iter + 1
        return await self._make(f"training {number}")

    def eval_items(self) -> Sequence[BootcampCase]:
        return self.eval_cases

    def prompt(self, item: BootcampCase) -> list[dict[str, str]]:
        user = {"role": "user", "content": item.prompt}
        if not self.config.require_reasoning:
            return [user]
        return [{"role": "system", "content": DEEP_THINKING}, user]

    def sampling(self) -> dict[str, Any]:
        return {"temperature": self.config.temperature, "top_p": self.config.top_p}

    async def score(self, item: BootcampCase, answer: str) -> float:
        """Return the reward of an answer; a wrong one after a timeout of the verifier."""
        base = await self._verify(item, answer)
        return self._reward(base)

    def note_group(
        self, item: BootcampCase, trajectories: Sequence[Trajectory], scores: Sequence[float]
    ) -> None:
        self.bases[short_name(item.task)] += scores

    def train_metrics(self, scores: Sequence[float]) -> dict[str, float]:
        by_task, self.bases = self.bases, defaultdict(list)
        return self._rates("train", by_task)

    async def evaluate_item(self, item: BootcampCase) -> dict[str, Any]:
        return {**await super().evaluate_item(item), "task": short_name(item.task)}

    def evaluation_metrics(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        by_task: dict[str, list[float]] = defaultdict(list)
        for sample in samples:
            by_task[sample["task"]].append(sample["score"])
        is_right = [sample["score"] == self.config.correct_reward for sample in samples]
        overall = {"eval/overall_accuracy": statistics.fmean(is_right)}
        return {**self._rates("eval", by_task), **overall}

    def save_checkpoint(self, step: int, data: Mapping[str, Any] | None = None) -> None:
        super().save_checkpoint(step, {**(data or {}), "iter": self.iter})

    def check_gold_answer(self, item: BootcampCase) -> str | None:
        thought = "<think>This case was solved by trying one value after the other.</think>"
        return None if item.solution is None else f"{thought}\n{item.solution}"

    async def _make(self, seed: str) -> BootcampCase:
        seed = f"{seed} {self.config.seed}"
        task = random.Random(seed).choice(self.tasks)
        made: BootcampCase = await self.score_pool.run(
            make_case, task, self.config.task_params, seed, timeout=self.config.case_timeout_s
        )
        return made

    async def _verify(self, item: BootcampCase, answer: str) -> float:
        verify = partial(
            verify_answer,
            format_score=self.config.format_bonus,
            short_penalty=self.config.require_reasoning,
            short_threshold=self.config.min_reasoning_length,
        )
        timeout_s = self.config.case_timeout_s
        base: float = await self.score_pool.run(
            verify, item, answer, timeout=timeout_s, default=0.0
        )
        return base

    def _reward(self, base: float) -> float:
        correct, incorrect = self.config.correct_reward, self.config.incorrect_reward
        return bootcamp_reward(base, correct=correct, incorrect=incorrect)

    def _rates(self, area: str, by_task: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """Return the fractions of right and of well-formed answers of each task."""
        correct, incorrect = self.config.correct_reward, self.config.incorrect_reward
        rates = {}
        for task, scores in by_task.items():
            rates[f"{area}/{task}_accuracy"] = statistics.fmean(s == correct for s in scores)
            rates[f"{area}/{task}_format_rate"] = statistics.fmean(s != incorrect for s in scores)
        return rates


def short_name(task: str) -> str:
    """Return the name of the class of a task."""
    return task.rpartition(":")[2]


if __name__ == "__main__":
    InternBootcampEnv.cli()
