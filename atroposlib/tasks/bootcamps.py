"""Bootcamps: classes that generate cases, write their prompts and verify answers.

    case_generator() ─► prompt_func(identity) ─► completion ─► verify_score(text, identity, ...)

The interface is that of the package `internbootcamp`. Classes may come from anywhere, and many
verifiers were written for answers that a person trusts: while one runs, code compiled from text is
refused, as are other programs.
"""

from __future__ import annotations

import importlib
import json
import random
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, runtime_checkable

from atroposlib.errors import AtroposError, ConfigError

__all__ = [
    "Bootcamp",
    "BootcampCase",
    "Coinsbootcamp",
    "UnsafeVerifierError",
    "bootcamp_reward",
    "load_bootcamp",
    "make_case",
    "package_tasks",
    "verify_answer",
]

PACKAGE = "internbootcamp"


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
        task: a class of this module, `MODULE:CLASS`, or a class of the package.
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
    """Install the audit hook, which stays for as long as the process runs: a scoring worker.

    Before Python 3.12, threads that start at the same time under a debugger or coverage.py may
    fail in a process with a hook.
    """
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
