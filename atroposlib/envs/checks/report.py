"""The rules of `check`, the report of its findings, and their places in the author's files.

A report has one outcome per rule and can be printed, or written as text or JSON. A place is a
`file:line` outside Python, installed packages and this library.
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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel

from atroposlib.envs.settings import ENV_PREFIX
from atroposlib.utils.text import near_name

__all__ = [
    "OTHER_HOOKS",
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
    "misspelled_setting",
    "pending_method",
    "site_of",
    "stack_site",
    "suspended_site",
    "traceback_site",
]


class Rule(NamedTuple):
    """A rule that every environment must follow."""

    title: str
    """Name of the rule in the table of the report."""
    rule: str
    """The condition that must hold."""
    remedy: str
    """Advice for an environment that breaks the rule."""


RULES: dict[str, Rule] = {
    "config": Rule(
        "settings",
        "config_init returns settings that the environment can be built from",
        "correct config_init, or the arguments that the constructor takes",
    ),
    "setup": Rule(
        "setup",
        "setup loads the data and returns without raising",
        "correct what the error names; if data is missing or large, use a small local set here: "
        "--dataset-path, or check_settings of the class",
    ),
    "network": Rule(
        "no network",
        "only the inference servers are reached over the network",
        "load data and models from local files: --dataset-path here, and a setting for the path",
    ),
    "rollout": Rule(
        "rollouts",
        "an item yields at least one group",
        "return (group, backlog) from collect_trajectories, or a trajectory from "
        "collect_trajectory",
    ),
    "shape": Rule(
        "group shape",
        "a group has group_size trajectories; tokens, masks, scores and logprobs match in length",
        "give every trajectory one entry in each field, and one mask and logprob per token",
    ),
    "masks": Rule(
        "masks",
        "masks[t] is -100, or tokens[t] where the model generated that token",
        "use node.masked_tokens from managed_server, or masks from tokenize_for_trainer; mark a "
        "demonstration from a data set with the override sft",
    ),
    "logprobs": Rule(
        "logprobs",
        "inference_logprobs[t] is the engine's logprob of tokens[t]; 1.0 where masked",
        "use node.logprobs from managed_server unchanged; the trainer does the causal shift",
    ),
    "context": Rule(
        "prefix continuity",
        "the tokens before each trained reply are the prompt that the model received",
        "keep one managed_server session per rollout and use its tokens; do not tokenize the "
        "conversation again",
    ),
    "finite": Rule(
        "finite numbers",
        "scores, advantages and logprobs are finite numbers",
        "find the division by zero or the log of zero, and give such trajectories a finite score",
    ),
    "spread": Rule(
        "scores differ",
        "answers of different quality get different scores",
        "check what the scoring function compares; a group of equal scores has zero advantages",
    ),
    "wrong": Rule(
        "wrong answers",
        "an empty and a meaningless answer score less than the gold answer, which cannot be copied "
        "from the prompt",
        "score the content of the answer, not its form, and compare it with the item's gold answer",
    ),
    "truncated": Rule(
        "truncated answers",
        "a truncated answer scores less than the gold answer, or is masked",
        'check finish_reason: "length" marks a truncated answer; read answers only after </think>',
    ),
    "determinism": Rule(
        "determinism",
        "two runs with the same seed and the same replies give the same prompts and scores, and "
        "the same answer scores the same under another seed",
        "use a random.Random(seed), sort sets, and keep timestamps and UUIDs out of prompts",
    ),
    "items": Rule(
        "items unchanged",
        "a rollout does not change its item",
        "copy a value before changing it: messages = list(item['messages'])",
    ),
    "siblings": Rule(
        "failed rollouts",
        "when one rollout fails, the other rollouts of its group run to completion",
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
        "re-raise CancelledError, also where BaseException is caught",
    ),
    "evaluation": Rule(
        "evaluation",
        "evaluate returns, and its results are written",
        "call self.evaluate_log(metrics, samples=...) or add the metrics in wandb_log",
    ),
    "blocking": Rule(
        "event loop",
        "no call blocks the event loop for more than 100 ms",
        "run it in a thread (asyncio.to_thread) or in the score pool; use asyncio.sleep instead of "
        "time.sleep",
    ),
    "leftovers": Rule(
        "nothing left running",
        "tasks, threads and processes end with close()",
        "keep a reference to each task, thread and process, and end it in close()",
    ),
}


WIDTH = 100

Status = Literal["passed", "failed", "skipped"]
MARKS: dict[Status, str] = {
    "passed": "[green]passed[/green]",
    "failed": "[bold red]FAILED[/bold red]",
    "skipped": "[yellow]skipped[/yellow]",
}

PRECEDENCE: Sequence[Status] = ("skipped", "passed", "failed")
"""A later status replaces an earlier one."""

NOT_REACHED = "not reached; see the failures"
WITHOUT_GROUP = "not reached, since no item yields a group"


@dataclass(frozen=True)
class Outcome:
    """The result of checking one rule."""

    name: str
    """Key in `RULES`."""
    status: Status
    detail: str = ""
    """The observation: how the rule is broken, or why it was skipped."""
    where: str | None = None
    """`file:line` in the author's files, None if unknown."""
    special_remedy: str | None = None
    """Replaces the remedy of the rule."""

    @property
    def remedy(self) -> str:
        return self.special_remedy or self.rule.remedy

    @property
    def rule(self) -> Rule:
        return RULES[self.name]

    def as_json(self) -> dict[str, Any]:
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
    """The findings of a check.

    Example:
        report = check_environment(MyEnv)
        assert report.passed, report.text
    """

    environment: str
    outcomes: Sequence[Outcome]
    """One per rule, in the order of `RULES`."""
    notes: Sequence[str] = ()
    """Remarks on how the check was made, such as a substituted tokenizer."""
    duration_s: float = 0.0
    mistake: BaseException | None = None
    """A mistake in the name or the arguments of a task set; `setup` raised it."""

    @property
    def failures(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.status == "failed"]

    @property
    def passed(self) -> bool:
        """Whether no rule is broken; skipped rules do not count."""
        return not self.failures

    @property
    def text(self) -> str:
        from rich.console import Console

        stream = io.StringIO()
        self.print_to(Console(file=stream, width=WIDTH, color_system=None))
        return stream.getvalue()

    def as_json(self) -> dict[str, Any]:
        return {
            "environment": self.environment,
            "passed": self.passed,
            "duration_s": round(self.duration_s, 2),
            "notes": list(self.notes),
            "checks": [outcome.as_json() for outcome in self.outcomes],
        }

    def print_to(self, console: Any) -> None:
        """Print a table of the rules, then each failure with its remedy.

        Rules that were not reached share one row.
        """
        from rich.markup import escape
        from rich.table import Table

        table = Table(title=escape(f"check of {self.environment}"), title_justify="left")
        table.add_column("check", no_wrap=True)
        table.add_column("result", no_wrap=True)
        table.add_column("seen", overflow="fold")
        reason = NOT_REACHED if self.failures else WITHOUT_GROUP
        unreached = [outcome for outcome in self.outcomes if outcome.detail == reason]
        collapsed = unreached if len(unreached) > 1 else []
        for outcome in self.outcomes:
            if outcome not in collapsed:
                seen = "see below" if outcome.status == "failed" else escape(outcome.detail)
                table.add_row(outcome.rule.title, MARKS[outcome.status], seen)
        if collapsed:
            table.add_row(f"{len(collapsed)} others", MARKS["skipped"], reason)
        console.print(table)
        for note in self.notes:
            console.print(f"note: {escape(note)}", highlight=False)
        for outcome in self.failures:
            _print_failure(console, outcome)
        counts = Counter(outcome.status for outcome in self.outcomes)
        summary = ", ".join(f"{counts[status]} {status}" for status in MARKS if counts[status])
        console.print(f"\n{summary} in {self.duration_s:.1f} s", highlight=False)


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
    """Collects the findings of a check.

    A failure of a rule replaces a pass, and a pass replaces a skip. Otherwise the first outcome of
    a rule is kept.
    """

    notes: list[str] = field(default_factory=list)
    mistake: BaseException | None = None
    """The exception of `setup` that stands for a mistake in the command line."""
    _outcomes: dict[str, Outcome] = field(default_factory=dict)

    def fail(
        self, name: str, detail: str, where: str | None = None, *, remedy: str | None = None
    ) -> None:
        """Record a broken rule; `remedy` replaces the rule's own."""
        self._record(Outcome(name, "failed", detail, where, remedy))

    def skip(self, name: str, reason: str) -> None:
        """Record why a rule could not be checked."""
        self._record(Outcome(name, "skipped", reason))

    def passed(self, name: str, detail: str = "") -> None:
        """Record that a rule holds."""
        self._record(Outcome(name, "passed", detail))

    def note(self, text: str) -> None:
        """Add a remark to the report, once."""
        if text not in self.notes:
            self.notes.append(text)

    def add(self, others: Findings) -> None:
        """Add the findings of a run."""
        for note in others.notes:
            self.note(note)
        for outcome in others._outcomes.values():
            self._record(outcome)
        self.mistake = self.mistake or others.mistake

    def has_failed(self, name: str) -> bool:
        return name in self._outcomes and self._outcomes[name].status == "failed"

    def outcomes(self) -> list[Outcome]:
        """Return one outcome per rule; rules that were not reached are skipped."""
        has_failure = any(self.has_failed(name) for name in RULES)
        reason = NOT_REACHED if has_failure else WITHOUT_GROUP
        return [self._outcomes.get(name, Outcome(name, "skipped", reason)) for name in RULES]

    def _record(self, outcome: Outcome) -> None:
        known = self._outcomes.get(outcome.name)
        rank = PRECEDENCE.index
        if known is None or rank(outcome.status) > rank(known.status):
            self._outcomes[outcome.name] = outcome


LIBRARY = str(Path(__file__).resolve().parents[2])
PREFIXES = {sys.prefix, sys.base_prefix} - {"/", "/usr", "/usr/local"}
INSTALLED = tuple(
    f"{Path(folder).resolve()}{os.sep}"
    for folder in {*PREFIXES, sysconfig.get_paths()["stdlib"], LIBRARY}
)
LOOP_BOUNDARY = str(Path("asyncio", "events.py"))
"""Outer frames belong to the caller of the event loop, not to the code that it runs."""

METHOD = re.compile(r"(\w+)\.(\w+)")
"""Matches the method in `MyEnv.score returned None` and `MyEnv.score() takes 2 …`."""


def is_own_file(file_name: str) -> bool:
    """Whether a file is the author's: not of Python, an installed package or this library."""
    if file_name.startswith("<") or "site-packages" in file_name:
        return False
    return not str(Path(file_name).resolve()).startswith(INSTALLED)


def shown(file_name: str, line: int) -> str:
    """Return `file:line`, relative to the working directory for files below it."""
    path = Path(file_name).resolve()
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return f"{path}:{line}"


def stack_site(frame: FrameType | None) -> str | None:
    """Return the innermost line of the author on a stack, up to the event loop."""
    while frame is not None and not frame.f_code.co_filename.endswith(LOOP_BOUNDARY):
        if is_own_file(frame.f_code.co_filename):
            return shown(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def awaiting_site() -> str | None:
    """Return a line of the author that awaits an installed package; None outside an event loop.

    Clients resolve names and connect in tasks of their own, whose stack lacks the author's line.
    """
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:
        return None
    sites = (_site_before_package(task) for task in tasks)
    return next((site for site in sites if site is not None), None)


def pending_method(names: Iterable[str]) -> tuple[str, str] | None:
    """Return the author's outermost method with one of these names that a task is suspended in.

    Returns:
        The method as `MyEnv.score`, and its current line as `file:line`.
    """
    for task in asyncio.all_tasks():
        for _, frame in _await_chain(task):
            if frame is not None and is_named_method(frame, names):
                return method_name(frame), shown(frame.f_code.co_filename, frame.f_lineno)
    return None


def suspended_site(task: asyncio.Task[Any]) -> str | None:
    """Return the innermost line of the author that a task is suspended at."""
    frames = [frame for _, frame in _await_chain(task) if frame is not None]
    own = [frame for frame in frames if is_own_file(frame.f_code.co_filename)]
    return shown(own[-1].f_code.co_filename, own[-1].f_lineno) if own else None


def _await_chain(task: asyncio.Task[Any]) -> Iterator[tuple[Any, FrameType | None]]:
    """Yield the coroutines that a task awaits, outermost first, with their frames."""
    step: Any = task.get_coro()
    while step is not None:
        yield step, getattr(step, "cr_frame", None) or getattr(step, "gi_frame", None)
        step = getattr(step, "cr_await", None) or getattr(step, "gi_yieldfrom", None)


def is_named_method(frame: FrameType, names: Iterable[str]) -> bool:
    """Whether a frame runs a function of the author with one of these names."""
    return frame.f_code.co_name in names and is_own_file(frame.f_code.co_filename)


def method_name(frame: FrameType) -> str:
    """Return the name of a frame's method as `MyEnv.score`, or of its function as `score`."""
    owner = frame.f_locals.get("self")
    name = frame.f_code.co_name
    return name if owner is None else f"{type(owner).__name__}.{name}"


def _site_before_package(task: asyncio.Task[Any]) -> str | None:
    """Return the innermost line of the author in a task, if that line awaits a package."""
    site, is_in_package = None, False
    for step, frame in _await_chain(task):
        if frame is not None and is_own_file(frame.f_code.co_filename):
            site, is_in_package = shown(frame.f_code.co_filename, frame.f_lineno), False
        elif frame is None:  # an object's own __await__, which has no frame
            is_in_package |= type(step).__name__ == "coroutine_wrapper"
        else:
            is_in_package |= "site-packages" in frame.f_code.co_filename
    return site if is_in_package else None


def traceback_site(
    trace: TracebackType | None, *, outermost: bool = False, anywhere: bool = False
) -> str | None:
    """Return the innermost line of the author in a traceback.

    Args:
        trace: Traceback of an exception.
        outermost: Return the outermost line instead, where the exception was caught.
        anywhere: Whether lines of this library and of packages count too.
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
    """Return the first line of a code object of the author."""
    if code is None or not is_own_file(code.co_filename):
        return None
    return shown(code.co_filename, code.co_firstlineno)


def hook_site(env_cls: type[Any], names: Iterable[str]) -> str | None:
    """Return the line of the first of these methods that is defined in the author's files."""
    for name in names:
        method: Callable[..., Any] | None = inspect.getattr_static(env_cls, name, None)
        function = inspect.unwrap(getattr(method, "__func__", method)) if method else None
        if inspect.isfunction(function) and is_own_file(function.__code__.co_filename):
            return code_site(function.__code__)
    return None


def class_site(cls: type[Any]) -> str | None:
    """Return the line of a class statement of the author; None for a class made without one."""
    try:
        file_name = inspect.getfile(cls)
        is_own = is_own_file(file_name)
        return shown(file_name, inspect.getsourcelines(cls)[1]) if is_own else None
    except (OSError, TypeError):
        return None


OTHER_HOOKS = ("start_conversation", "score_all", "prompt", "score")
"""Methods that authors define where the base class collects; the most specific first."""


def site_of(env_cls: type[Any], names: Iterable[str]) -> str | None:
    """Return the line of the first of these methods or of `OTHER_HOOKS`, else of the class."""
    return hook_site(env_cls, (*names, *OTHER_HOOKS)) or class_site(env_cls)


def mentioned_site(error: BaseException, others: Iterable[str] = ()) -> str | None:
    """Return the line of the author's method that the message of an exception names.

    The class is searched among the local variables of the traceback: it may be the environment or
    one of its conversations.

    Args:
        error: An exception with its traceback.
        others: Alternatives for a class that does not define the named method itself.
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


def misspelled_setting(env_cls: type[Any], config: BaseModel) -> str | None:
    """Return an error message for an undeclared setting that resembles a declared one, or None.

    A config keeps undeclared settings for the environment to read. A setting that the author's
    files read is therefore not a misspelling.
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
    """Return the attributes read by the author's files that define a class and its bases.

    `config.split` and `getattr(config, "split")` both read `split`.
    """
    names: set[str] = set()
    for base in env_cls.__mro__:
        try:
            file_name = inspect.getfile(base)
        except (TypeError, OSError):
            continue  # built in, or defined in an interactive session
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
