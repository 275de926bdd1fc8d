"""Print the coverage of the tests as a table: `python -m helpers.coverage_figures REPORT.json`.

`coverage json` writes the report; `make figures` runs everything. The exit code is 1 if the lines
of `atroposlib` or the branches of the pure rules are below their goals.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from helpers.pure_rules import PURE_RULES

LINES_GOAL = 90.0
"""Percent of the lines of `atroposlib`."""
BRANCHES_GOAL = 95.0
"""Percent of the branches of the pure rules."""


class Counts(NamedTuple):
    """Lines and branches, of one module or several."""

    num_lines: int = 0
    covered_lines: int = 0
    num_branches: int = 0
    covered_branches: int = 0

    def plus(self, other: Counts) -> Counts:
        return Counts(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    @property
    def lines(self) -> float:
        """Percent; 100 of nothing."""
        return 100.0 * self.covered_lines / self.num_lines if self.num_lines else 100.0

    @property
    def branches(self) -> float:
        return 100.0 * self.covered_branches / self.num_branches if self.num_branches else 100.0


def read_report(
    report: Mapping[str, Mapping[str, Mapping[str, Mapping[str, int]]]],
) -> dict[str, Counts]:
    """Return the counts of each module, by its path relative to the repository."""
    return {
        path.replace("\\", "/"): Counts(
            summary["num_statements"],
            summary["covered_lines"],
            summary.get("num_branches", 0),
            summary.get("covered_branches", 0),
        )
        for path, file in report["files"].items()
        for summary in [file["summary"]]
    }


def is_pure_rule(path: str) -> bool:
    """Return whether a module, such as `atroposlib/wire/groups.py`, only computes."""
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return name in PURE_RULES


def total(modules: Iterable[Counts]) -> Counts:
    """Return the sum of the counts of several modules."""
    sums = Counts()
    for counts in modules:
        sums = sums.plus(counts)
    return sums


def table(modules: Mapping[str, Counts]) -> tuple[list[str], bool]:
    """Return the lines of a Markdown table, and whether both goals are met."""
    library = {path: c for path, c in modules.items() if path.startswith("atroposlib/")}
    rules = {path: c for path, c in modules.items() if is_pure_rule(path)}
    of_library, of_rules = total(library.values()), total(rules.values())
    lines = [
        "| modules | lines | covered | branches | covered | goal |",
        "|---|---|---|---|---|---|",
    ]
    folders = sorted({"/".join(path.split("/")[:2]) for path in library})
    for folder in folders:
        counts = total(c for path, c in library.items() if path.startswith(folder))
        lines.append(_row(folder, counts))
    lines.append(_row("**atroposlib**", of_library, f"lines >= {LINES_GOAL:g} %"))
    lines += [_row(path, counts) for path, counts in sorted(rules.items())]
    lines.append(_row("**pure rules**", of_rules, f"branches >= {BRANCHES_GOAL:g} %"))
    return lines, of_library.lines >= LINES_GOAL and of_rules.branches >= BRANCHES_GOAL


def _row(name: str, counts: Counts, goal: str = "") -> str:
    return (
        f"| {name} | {counts.num_lines} | {counts.lines:.1f} % "
        f"| {counts.num_branches} | {counts.branches:.1f} % | {goal} |"
    )


def main(arguments: Sequence[str]) -> int:
    """Print the table of a report, and return the exit code."""
    report = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    lines, is_met = table(read_report(report))
    print("\n".join(lines))
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
