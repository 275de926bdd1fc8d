"""Change the pure rules in small ways, and list the changes that no test notices.

    python -m helpers.mutants                        25 mutants of each subject, always the same
    python -m helpers.mutants --part 3/60            every 60th mutant; other parts have the others
    python -m helpers.mutants loss --sample 0        all mutants of one subject

The order of the mutants is random and depends on their names only, so that a sample stays the same
when other lines change. `equivalent.yaml` lists mutants that behave like the code, each with the
reason; they are left out.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from helpers.mutants.running import Mutant, Verdict, load_libraries, mutants_of, run_mutants
from helpers.mutants.subjects import SUBJECTS, Subject

EQUIVALENT = Path(__file__).with_name("equivalent.yaml")


class Result(NamedTuple):
    """One subject and what became of its mutants."""

    subject: Subject
    num_all: int
    num_equivalent: int
    verdicts: Sequence[Verdict]
    duration_s: float

    def count(self, outcome: str) -> int:
        return sum(verdict.outcome == outcome for verdict in self.verdicts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the mutants, print table and survivors, and return the exit code."""
    options = _parser().parse_args(arguments)
    names = options.subjects or [subject.name for subject in SUBJECTS]
    equivalent = yaml.safe_load(EQUIVALENT.read_text(encoding="utf-8")) or {}
    complaint = _unknown_entries(equivalent)
    if complaint:
        print(complaint, file=sys.stderr)
        return 2
    load_libraries()
    results = []
    for subject in SUBJECTS:
        if subject.name in names:
            results.append(_run(subject, options, equivalent))
            print(*_survivors(results[-1]), sep="", end="", flush=True)
    print("\n".join(_table(results)))
    killed, num = _totals(results)
    return int(100 * killed < options.at_least * num)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m helpers.mutants", description=__doc__.partition("\n")[0]
    )
    choices = [subject.name for subject in SUBJECTS]
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT", help=", ".join(choices))
    parser.add_argument("--sample", type=int, default=25, help="mutants of each subject; 0: all")
    parser.add_argument("--part", type=_part, metavar="K/N", help="part K of N; K may exceed N")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument(
        "--at-least", type=float, default=85.0, metavar="PERCENT", help="exit code 1 below it"
    )
    return parser


def _part(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/([1-9]\d*)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"expected a part K/N such as 3/60, not {text!r}")
    return int(found[1]) % int(found[2]), int(found[2])


def _unknown_entries(equivalent: Mapping[str, Mapping[str, str]]) -> str | None:
    known = {mutant.name for subject in SUBJECTS for mutant in mutants_of(subject)}
    for path, reasons in equivalent.items():
        for name in reasons:
            if f"{path}: {name}" not in known:
                return (
                    f"{EQUIVALENT.name}: {path} has no mutant {name!r}; remove or rename the entry"
                )
    return None


def _run(
    subject: Subject, options: argparse.Namespace, equivalent: Mapping[str, Mapping[str, str]]
) -> Result:
    everything = mutants_of(subject)
    tested = [m for m in everything if m.change.name not in equivalent.get(m.path, ())]
    chosen = _chosen(tested, options)
    started = time.monotonic()
    verdicts = list(run_mutants(subject, chosen, jobs=options.jobs)) if chosen else []
    duration_s = time.monotonic() - started
    return Result(subject, len(everything), len(everything) - len(tested), verdicts, duration_s)


def _chosen(mutants: Sequence[Mutant], options: argparse.Namespace) -> Sequence[Mutant]:
    if options.part is not None:
        part, count = options.part
        return [mutant for mutant in mutants if mutant.change.order % count == part]
    return mutants[: options.sample] if options.sample else mutants


def _totals(results: Sequence[Result]) -> tuple[int, int]:
    num = sum(len(result.verdicts) for result in results)
    return num - sum(result.count("survived") for result in results), num


def _table(results: Sequence[Result]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [
        "| subject | mutants | equivalent | tried | killed | timed out | survived | killed | s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        num = len(result.verdicts)
        survived = result.count("survived")
        lines.append(
            f"| {result.subject.name} | {result.num_all} | {result.num_equivalent} | {num} "
            f"| {result.count('killed')} | {result.count('timed out')} | {survived} "
            f"| {_percent(num - survived, num)} | {result.duration_s:.0f} |"
        )
    killed, num = _totals(results)
    num_all = sum(result.num_all for result in results)
    lines.append(
        f"| total | {num_all} | | {num} | | | {num - killed} | {_percent(killed, num)} | |"
    )
    return lines


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


def _survivors(result: Result) -> list[str]:
    return [
        f"survived: {mutant.path}:{mutant.change.line}: {mutant.change.name}\n"
        for mutant, outcome, _ in result.verdicts
        if outcome == "survived"
    ]


if __name__ == "__main__":
    sys.exit(main())
