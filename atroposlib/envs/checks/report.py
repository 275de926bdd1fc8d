"""What a check found: one outcome per rule, as an object, as text and as JSON."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from atroposlib.envs.checks.rules import RULES, Rule

__all__ = ["CheckReport", "Findings", "Outcome"]

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
        """Return one outcome per rule; those nobody reached are skipped."""
        return [self._outcome(name) for name in RULES]

    def _outcome(self, name: str) -> Outcome:
        if name in self._failed:
            return self._failed[name]
        if name in self._passed:
            return Outcome(name, "passed", self._passed[name])
        if name in self._skipped:
            return Outcome(name, "skipped", self._skipped[name])
        return Outcome(name, "skipped", NOT_REACHED)
