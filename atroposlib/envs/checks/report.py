"""What a check found: one outcome per rule, as an object, as text and as JSON.

The rules an environment is checked against, in the order of the report.

Where in the author's own files something happened, as `file:line`.

Whether the author gave a setting in Python under a name that was meant to be another.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import io
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel

from atroposlib.envs.settings import ENV_PREFIX
from atroposlib.utils.text import near_name

__all__ = [
    "RULES",
    "CheckReport",
    "Findings",
    "Outcome",
    "Rule",
    "awaiting_site",
    "class_site",
    "code_site",
    "hook_site",
    "is_named_method",
    "mentioned_site",
    "method_name",
    "misspelt_setting",
    "pending_method",
    "stack_site",
    "traceback_site",
]


class Rule(NamedTuple):
    """One rule."""

    title: str
    """What is looked at, as the table shows it."""
    rule: str
    """What must hold."""
    remedy: str
    """What to do when it does not."""


RULES: dict[str, Rule] = {
    "config": Rule(
        "settings",
        "config_init gives settings that the environment can be built from",
        "correct config_init, or the arguments the constructor takes",
    ),
    "setup": Rule(
        "setup",
        "setup loads the data and ends without raising",
        "run setup on a small local data set: --dataset-path, or check_settings of the class",
    ),
    "network": Rule(
        "no network",
        "nothing but the inference servers is reached over the network",
        "load data and models from local files: --dataset-path here, and a setting for the path",
    ),
    "rollout": Rule(
        "rollouts",
        "an item becomes at least one group",
        "return (group, backlog) from collect_trajectories, or a trajectory from "
        "collect_trajectory",
    ),
    "shape": Rule(
        "group shape",
        "a group has group_size trajectories; tokens, masks, scores and logprobs line up",
        "give every trajectory one entry in each field, and one mask and logprob per token",
    ),
    "masks": Rule(
        "masks",
        "a mask is -100, or the token where the model wrote it",
        "take node.masked_tokens of managed_server, or masks of tokenize_for_trainer",
    ),
    "logprobs": Rule(
        "logprobs",
        "inference_logprobs[t] is what the engine reported for tokens[t]; 1.0 where masked",
        "take node.logprobs of managed_server as they are; the trainer shifts, not the environment",
    ),
    "context": Rule(
        "prefix continuity",
        "the tokens before each trained reply are those the model read when it wrote it",
        "keep one managed_server session per rollout and take its tokens; do not encode the "
        "conversation again",
    ),
    "finite": Rule(
        "finite numbers",
        "scores, advantages and logprobs are finite numbers",
        "find the division by zero or the log of zero, and give such trajectories a real score",
    ),
    "spread": Rule(
        "scores differ",
        "answers of different worth get different scores",
        "a group of equal scores trains nothing; look at what the scoring function compares",
    ),
    "wrong": Rule(
        "wrong answers",
        "an empty and a meaningless answer score less than the gold answer",
        "score the answer, not its form, and compare with the gold answer of this very item",
    ),
    "truncated": Rule(
        "truncated answers",
        "an answer that was cut before its end scores less than the gold answer, or is muted",
        'check finish_reason: "length" marks a cut answer; read answers only behind </think>',
    ),
    "determinism": Rule(
        "determinism",
        "two runs with the same seed and the same replies give the same prompts and scores, and "
        "the same answer scores the same under another seed",
        "draw from random.Random(seed) of your own, sort sets, leave clock and uuid out of prompts",
    ),
    "items": Rule(
        "items unchanged",
        "a rollout does not change its item",
        "copy what you change: messages = list(item['messages'])",
    ),
    "siblings": Rule(
        "failed rollouts",
        "when one rollout fails, the others of its group run to their end",
        "gather with return_exceptions=True, or write collect_trajectory and let the base class "
        "gather",
    ),
    "swallowed": Rule(
        "visible failures",
        "an exception inside a rollout is raised, logged or counted",
        "remove the except clause, or call logger.exception and self.count_failure in it",
    ),
    "cancel": Rule(
        "cancelled rollouts",
        "a cancelled rollout ends at once, and its item can be rolled out again",
        "do not catch CancelledError or BaseException without raising it again",
    ),
    "evaluation": Rule(
        "evaluation",
        "evaluate ends, and its results are written",
        "call self.evaluate_log(metrics, samples=...) or add the metrics in wandb_log",
    ),
    "blocking": Rule(
        "event loop",
        "no call holds the event loop for more than 100 ms",
        "await it in a thread (asyncio.to_thread) or in the score pool; await asyncio.sleep, never "
        "time.sleep",
    ),
    "leftovers": Rule(
        "nothing left running",
        "tasks, threads and processes end with close()",
        "keep what you start, and cancel, join or close it in close()",
    ),
}


WIDTH = 100

Status = Literal["passed", "failed", "skipped"]
MARKS: dict[Status, str] = {
    "passed": "[green]passed[/green]",
    "failed": "[bold red]FAILED[/bold red]",
    "skipped": "[yellow]skipped[/yellow]",
}

NOT_REACHED = "not reached; see the failures"


@dataclass(frozen=True)
class Outcome:
    """What became of one rule."""

    name: str
    """Key in `RULES`."""
    status: Status
    detail: str = ""
    """What was seen."""
    where: str | None = None
    """`file:line`, where it can be told."""
    special_remedy: str | None = None
    """Takes the place of the rule's."""

    @property
    def remedy(self) -> str:
        """What to do when the rule does not hold."""
        return self.special_remedy or self.rule.remedy

    @property
    def rule(self) -> Rule:
        """The rule that was looked at."""
        return RULES[self.name]

    def as_json(self) -> dict[str, Any]:
        """Return a mapping of plain values."""
        return {
            "check": self.name,
            "status": self.status,
            "detail": self.detail,
            "where": self.where,
            "rule": self.rule.rule,
            "remedy": self.remedy,
        }


@dataclass(frozen=True)
class CheckReport:
    """The outcome of a check.

    Example:
        report = check_environment(MyEnv)
        assert report.passed, report.text
    """

    environment: str
    outcomes: Sequence[Outcome]
    """One per rule, in the order of `RULES`."""
    notes: Sequence[str] = ()
    """What a reader should know about how the check was made."""
    duration_s: float = 0.0

    @property
    def failures(self) -> list[Outcome]:
        """The rules that do not hold."""
        return [outcome for outcome in self.outcomes if outcome.status == "failed"]

    @property
    def passed(self) -> bool:
        """Whether no rule was found broken; skipped rules do not count."""
        return not self.failures

    @property
    def text(self) -> str:
        """The report as plain text."""
        from rich.console import Console

        console = Console(file=io.StringIO(), width=WIDTH, color_system=None)
        self.print_to(console)
        return str(console.file.getvalue())  # type: ignore[attr-defined]  # the StringIO above

    def as_json(self) -> dict[str, Any]:
        """Return the report as a mapping of plain values."""
        return {
            "environment": self.environment,
            "passed": self.passed,
            "duration_s": round(self.duration_s, 2),
            "notes": list(self.notes),
            "checks": [outcome.as_json() for outcome in self.outcomes],
        }

    def print_to(self, console: Any) -> None:
        """Print a table of the rules and, below it, each failure with its remedy.

        Rules that were not reached share one row.
        """
        from rich.markup import escape
        from rich.table import Table

        table = Table(title=f"check of {self.environment}", title_justify="left")
        table.add_column("check", no_wrap=True)
        table.add_column("result", no_wrap=True)
        table.add_column("seen", overflow="fold")
        unreached = [outcome for outcome in self.outcomes if outcome.detail == NOT_REACHED]
        collapsed = unreached if len(unreached) > 1 else []
        for outcome in self.outcomes:
            if outcome not in collapsed:
                seen = "see below" if outcome.status == "failed" else escape(outcome.detail)
                table.add_row(outcome.rule.title, MARKS[outcome.status], seen)
        if collapsed:
            table.add_row(f"{len(collapsed)} others", MARKS["skipped"], NOT_REACHED)
        console.print(table)
        for note in self.notes:
            console.print(f"note: {escape(note)}", highlight=False)
        for outcome in self.failures:
            _print_failure(console, outcome)
        console.print(self._verdict(), highlight=False)

    def _verdict(self) -> str:
        counts = dict.fromkeys(MARKS, 0)
        for outcome in self.outcomes:
            counts[outcome.status] += 1
        summary = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        return f"\n{summary} in {self.duration_s:.1f} s"


def _print_failure(console: Any, outcome: Outcome) -> None:
    from rich.markup import escape
    from rich.padding import Padding

    console.print(f"\n[bold red]{outcome.rule.title}[/bold red]", highlight=False)
    lines = {"at": outcome.where or "", "seen": outcome.detail}
    lines |= {"rule": outcome.rule.rule, "remedy": outcome.remedy}
    for name, line in lines.items():
        if line:
            text = f"[bold]{name + ':':8}[/bold]{escape(line)}"
            console.print(
                Padding(text, (0, 0, 0, 2), expand=False), highlight=False, soft_wrap=name == "at"
            )


@dataclass
class Findings:
    """Gathers what is seen while a check runs; the first failure of a rule is the one told."""

    _failed: dict[str, Outcome] = field(default_factory=dict)
    _skipped: dict[str, str] = field(default_factory=dict)
    _passed: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def fail(
        self, name: str, detail: str, where: str | None = None, *, remedy: str | None = None
    ) -> None:
        """Record that a rule does not hold; `remedy` takes the place of the rule's."""
        self._failed.setdefault(name, Outcome(name, "failed", detail, where, remedy))

    def skip(self, name: str, reason: str) -> None:
        """Record why a rule could not be looked at."""
        self._skipped.setdefault(name, reason)

    def passed(self, name: str, detail: str = "") -> None:
        """Record what was seen of a rule that holds; a failure goes before it, a skip does not."""
        self._passed.setdefault(name, detail)

    def note(self, text: str) -> None:
        """Record how the check was made, once."""
        if text not in self.notes:
            self.notes.append(text)

    def has_failed(self, name: str) -> bool:
        """Whether a rule was found broken."""
        return name in self._failed

    def outcomes(self) -> list[Outcome]:
        """Return one outcome per rule; rules that were not reached are skipped."""
        return [self._outcome(name) for name in RULES]

    def _outcome(self, name: str) -> Outcome:
        if name in self._failed:
            return self._failed[name]
        if name in self._passed:
            return Outcome(name, "passed", self._passed[name])
        if name in self._skipped:
            return Outcome(name, "skipped", self._skipped[name])
        return Outcome(name, "skipped", NOT_REACHED)


LIBRARY = str(Path(__file__).resolve().parents[2])
PREFIXES = {sys.prefix, sys.base_prefix} - {"/", "/usr", "/usr/local"}
INSTALLED = tuple(
    f"{Path(folder).resolve()}{os.sep}"
    for folder in {*PREFIXES, sysconfig.get_paths()["stdlib"], LIBRARY}
)
LOOP_BOUNDARY = str(Path("asyncio", "events.py"))
"""Frames outside of it belong to the caller of the loop, not to the code that runs in it."""

METHOD = re.compile(r"(\w+)\.(\w+)")
"""How messages name a method: `MyEnv.score returned None`, `MyEnv.score() takes 2 …`."""


def is_own_file(file_name: str) -> bool:
    """Whether a file is the author's: neither Python's, nor installed, nor of this library."""
    if file_name.startswith("<") or "site-packages" in file_name:
        return False
    return not str(Path(file_name).resolve()).startswith(INSTALLED)


def shown(file_name: str, line: int) -> str:
    """Return `file:line`, relative to the working directory where that is shorter."""
    path = Path(file_name).resolve()
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return f"{path}:{line}"


def stack_site(frame: FrameType | None) -> str | None:
    """Return the innermost line of the author on a stack, as far as the event loop."""
    while frame is not None and not frame.f_code.co_filename.endswith(LOOP_BOUNDARY):
        if is_own_file(frame.f_code.co_filename):
            return shown(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def awaiting_site() -> str | None:
    """Return a line of the author that waits for an installed package, None outside of a loop.

    Clients look up names and connect in tasks of their own, on whose stack the author is not.
    """
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:
        return None
    sites = (_site_before_package(task.get_coro()) for task in tasks)
    return next((site for site in sites if site is not None), None)


def pending_method(names: Iterable[str]) -> tuple[str, str] | None:
    """Return the method of the author a task waits in, and the line, if it has one of these names.

    The outermost one is named, as `MyEnv.score`.
    """
    for task in asyncio.all_tasks():
        step: Any = task.get_coro()
        while step is not None:
            frame = getattr(step, "cr_frame", None)
            if frame is not None and is_named_method(frame, names):
                return method_name(frame), shown(frame.f_code.co_filename, frame.f_lineno)
            step = getattr(step, "cr_await", None)
    return None


def is_named_method(frame: FrameType, names: Iterable[str]) -> bool:
    """Whether a frame runs a function of the author with one of these names."""
    return frame.f_code.co_name in names and is_own_file(frame.f_code.co_filename)


def method_name(frame: FrameType) -> str:
    """Return what a frame runs as `MyEnv.score`, or the bare name of a function."""
    owner = frame.f_locals.get("self")
    name = frame.f_code.co_name
    return name if owner is None else f"{type(owner).__name__}.{name}"


def _site_before_package(step: Any) -> str | None:
    """Return the innermost line of the author in what a coroutine awaits, if a package follows."""
    site, is_in_package = None, False
    while step is not None:
        frame = getattr(step, "cr_frame", None) or getattr(step, "gi_frame", None)
        if frame is not None and is_own_file(frame.f_code.co_filename):
            site, is_in_package = shown(frame.f_code.co_filename, frame.f_lineno), False
        elif frame is None:  # an object's own __await__, which Python does not let us look into
            is_in_package |= type(step).__name__ == "coroutine_wrapper"
        else:
            is_in_package |= "site-packages" in frame.f_code.co_filename
        step = getattr(step, "cr_await", None) or getattr(step, "gi_yieldfrom", None)
    return site if is_in_package else None


def traceback_site(
    trace: TracebackType | None, *, outermost: bool = False, anywhere: bool = False
) -> str | None:
    """Return the line of the author where an exception was raised.

    Args:
        trace: of the exception.
        outermost: where it was caught instead.
        anywhere: a line of this library or of another will do.
    """
    lines = [
        shown(frame.filename, frame.lineno or 0)
        for frame in traceback.extract_tb(trace)
        if anywhere or is_own_file(frame.filename)
    ]
    if not lines:
        return None
    return lines[0] if outermost else lines[-1]


def code_site(code: CodeType | None) -> str | None:
    """Return where a piece of code begins."""
    return None if code is None else shown(code.co_filename, code.co_firstlineno)


def hook_site(env_cls: type[Any], names: Iterable[str]) -> str | None:
    """Return where a class defines the first of these methods that is the author's own."""
    for name in names:
        method: Callable[..., Any] | None = inspect.getattr_static(env_cls, name, None)
        function = inspect.unwrap(getattr(method, "__func__", method)) if method else None
        if inspect.isfunction(function) and is_own_file(function.__code__.co_filename):
            return code_site(function.__code__)
    return None


def class_site(cls: type[Any]) -> str | None:
    """Return where a class is defined; None for one made without a class statement."""
    try:
        return shown(inspect.getfile(cls), inspect.getsourcelines(cls)[1])
    except (OSError, TypeError):
        return None


def mentioned_site(error: BaseException, others: Iterable[str] = ()) -> str | None:
    """Return where the author defines the method that the message of an exception names.

    The class is looked for among the objects this library worked with when it raised: it may be
    that of the environment or of one of its conversations.

    Args:
        error: with its traceback.
        others: methods to point at when that class does not define the named one itself.
    """
    named = METHOD.findall(str(error))
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        for cls in [type(value) for value in frame.f_locals.values()]:
            bases = {base.__name__ for base in cls.__mro__}
            methods = [method for class_name, method in named if class_name in bases]
            site = hook_site(cls, [*methods, *others]) if methods else None
            if site is not None:
                return site
    return None


def misspelt_setting(env_cls: type[Any], config: BaseModel) -> str | None:
    """Return which undeclared setting resembles a declared one, or None.

    A config keeps undeclared settings, so that an environment may read them; one that its files
    read is the author's own, whatever it resembles.
    """
    known = sorted(f"{ENV_PREFIX}{name}" for name in type(config).model_fields)
    undeclared = config.model_extra or {}
    read = _names_read(env_cls) if undeclared else set()
    for key in undeclared:
        name = f"{ENV_PREFIX}{key}"
        hint = near_name(name, known)
        if hint and key not in read:
            return f"{name}: no such setting{hint}"
    return None


def _names_read(env_cls: type[Any]) -> set[str]:
    """Return the attributes that the author's files of a class and its bases read.

    `config.split` and `getattr(config, "split")` both read `split`.
    """
    names: set[str] = set()
    for base in env_cls.__mro__:
        try:
            file_name = inspect.getfile(base)
        except (TypeError, OSError):
            continue  # built in, or typed at a prompt
        if is_own_file(file_name) and Path(file_name).is_file():
            for node in ast.walk(ast.parse(Path(file_name).read_bytes())):
                names |= _read_by(node)
    return names


def _read_by(node: ast.AST) -> set[str]:
    match node:
        case ast.Attribute(attr=name, ctx=ast.Load()):
            return {name}
        case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]):
            return {name}
    return set()
