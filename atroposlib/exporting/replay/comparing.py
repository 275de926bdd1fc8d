"""Two runs beside each other, prompt by prompt; pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean

from atroposlib.exporting.groups import ExportGroup
from atroposlib.exporting.splitting import prompt_lengths

__all__ = ["PromptRecord", "RunRecord", "comparison_text", "record_run"]

_MOST_SHOWN = 10


@dataclass
class PromptRecord:
    """What a run has of one prompt."""

    where: str
    """Where it was first found."""
    scores: list[float] = field(default_factory=list)
    completions: set[tuple[int, ...]] = field(default_factory=set)


@dataclass
class RunRecord:
    """What a comparison needs of a run."""

    num_groups: int = 0
    scores: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    """Tokens of completions."""
    prompts: dict[tuple[int, ...], PromptRecord] = field(default_factory=dict)


def record_run(groups: Iterable[tuple[str, ExportGroup]]) -> RunRecord:
    """Gather the groups of a run by prompt."""
    run = RunRecord()
    for where, group in groups:
        run.num_groups += 1
        run.scores += group.scores
        for ids, length, score in zip(
            group.tokens, prompt_lengths(group), group.scores, strict=True
        ):
            length = len(ids) if length is None else length
            run.lengths.append(len(ids) - length)
            known = run.prompts.setdefault(tuple(ids[:length]), PromptRecord(where))
            known.scores.append(score)
            known.completions.add(tuple(ids[length:]))
    return run


def comparison_text(first: RunRecord, second: RunRecord, *, names: tuple[str, str]) -> str:
    """Write for people how two runs differ.

    Args:
        first: the earlier one.
        second: the later one.
        names: of both.
    """
    rows = [("", *names), *_figures(first, second)]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    shared = first.prompts.keys() & second.prompts.keys()
    lines.append(
        f"{len(shared)} prompts are in both, {len(first.prompts) - len(shared)} only in "
        f"{names[0]}, {len(second.prompts) - len(shared)} only in {names[1]}"
    )
    if not shared:
        return "\n".join(lines)
    same = sum(len(first.prompts[p].completions & second.prompts[p].completions) for p in shared)
    lines.append(f"{same} different completions of these prompts are in both")
    return "\n".join([*lines, *_changes(first.prompts, second.prompts, shared)])


def _figures(first: RunRecord, second: RunRecord) -> list[tuple[str, str, str]]:
    def both(name: str, of: Mapping[str, float | None]) -> tuple[str, str, str]:
        cells = ["-" if value is None else f"{value:.4g}" for value in of.values()]
        return (name, *cells)  # type: ignore[return-value]

    runs = {"first": first, "second": second}
    return [
        both("groups", {name: run.num_groups for name, run in runs.items()}),
        both("trajectories", {name: len(run.scores) for name, run in runs.items()}),
        both(
            "mean score", {n: fmean(run.scores) if run.scores else None for n, run in runs.items()}
        ),
        both(
            "mean completion tokens",
            {name: fmean(run.lengths) if run.lengths else None for name, run in runs.items()},
        ),
    ]


def _changes(
    first: Mapping[tuple[int, ...], PromptRecord],
    second: Mapping[tuple[int, ...], PromptRecord],
    shared: Iterable[tuple[int, ...]],
) -> list[str]:
    by_change: dict[float, list[tuple[int, ...]]] = defaultdict(list)
    for prompt in shared:
        by_change[fmean(second[prompt].scores) - fmean(first[prompt].scores)].append(prompt)
    ups = sum(len(prompts) for change, prompts in by_change.items() if change > 0)
    downs = sum(len(prompts) for change, prompts in by_change.items() if change < 0)
    lines = [f"mean score of {ups} of them is higher in the second run, of {downs} lower"]
    for change in sorted(by_change, key=abs, reverse=True):
        for prompt in by_change[change]:
            if change and len(lines) <= _MOST_SHOWN:
                before, after = first[prompt], second[prompt]
                lines.append(
                    f"  {before.where} and {after.where}: {fmean(before.scores):.4g} to "
                    f"{fmean(after.scores):.4g}"
                )
    return lines
