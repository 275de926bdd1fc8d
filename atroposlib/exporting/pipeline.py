"""One export from source to output: groups read, chosen, decoded and written in chunks.

source ─► chunk of groups ─► recipe.pick ─► recipe.build ─► new lines ─► output
                 │                                             │
                 └──────────────── report ◄────────────────────┘
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, Protocol

from atroposlib.errors import GroupError
from atroposlib.exporting.groups import ExportGroup, RawGroup, export_group
from atroposlib.exporting.lines import Line, encode_line
from atroposlib.exporting.output import Output
from atroposlib.exporting.recipes import Built, Recipe
from atroposlib.exporting.report import DUPLICATE, ExportReport

__all__ = ["CHUNK_GROUPS", "Progress", "export_groups", "read_groups"]

CHUNK_GROUPS = 256

_OBJECTS_PER_COLLECTION = 200_000
"""Rows of tokens are containers: by default a collection would follow every few groups."""


class Progress(Protocol):
    """Is told how an export goes on."""

    def begin(self) -> None:
        """All is prepared; the first group comes next."""

    def advance(self, num_records: int, report: ExportReport) -> None:
        """So many records were written since the last call."""


def read_groups(
    source: Iterator[RawGroup], report: ExportReport, tell: Callable[[str], None]
) -> Iterator[tuple[str, ExportGroup]]:
    """Yield the groups of a source that can be read, each with where it was.

    Args:
        source: groups, not decoded yet.
        report: counts them, and those that cannot be read.
        tell: gets a line for each group that cannot be read, a few at most.
    """
    for raw in source:
        try:
            group = export_group(raw)
        except GroupError as error:
            report.add_broken(raw.where, str(error))
            if report.num_broken <= len(report.broken):
                tell(f"{raw.where} is left out: {error}")
            continue
        report.num_groups += 1
        report.num_from_text += bool(group.tokenized_from_text)
        report.num_sequences += len(group.tokens)
        yield raw.where, group


def export_groups(
    groups: Iterator[tuple[str, ExportGroup]],
    recipe: Recipe,
    output: Output,
    report: ExportReport,
    *,
    has_score: bool,
    max_records: int | None,
    keeps_duplicates: bool = False,
    chunk_groups: int = CHUNK_GROUPS,
    progress: Progress | None = None,
) -> None:
    """Write records until the source ends or there are enough.

    Args:
        groups: with where each was found.
        recipe: makes records of groups.
        output: takes them; what it holds already is not written again.
        report: counts what happens.
        has_score: whether records carry the score.
        max_records: the most to write; None for no limit.
        keeps_duplicates: whether a record that was there before is written again.
        chunk_groups: groups handled together: more are faster, fewer are written sooner.
        progress: is told of the beginning, and after every chunk.
    """
    if progress is not None:
        progress.begin()
    writer = _Writer(output, report, has_score=has_score, keeps_duplicates=keeps_duplicates)
    with _rare_collections():
        while max_records is None or report.num_records < max_records:
            chunk = list(islice(groups, chunk_groups))
            if not chunk:
                return
            room = None if max_records is None else max_records - report.num_records
            written = writer.write(recipe.build(_pick(chunk, recipe, report)), room)
            if progress is not None:
                progress.advance(written, report)


def _pick(chunk: list[tuple[str, ExportGroup]], recipe: Recipe, report: ExportReport) -> list[Any]:
    picks: list[Any] = []
    for where, group in chunk:
        picked = recipe.pick(group, where)
        report.add_refused(picked.refused)
        picks += picked.picks
    return picks


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Collect garbage less often: what an export makes is freed without it."""
    before = gc.get_threshold()
    gc.set_threshold(_OBJECTS_PER_COLLECTION, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class _Writer:
    """Leaves out records that were written before and writes the rest."""

    def __init__(
        self, output: Output, report: ExportReport, *, has_score: bool, keeps_duplicates: bool
    ) -> None:
        self._output = output
        self._report = report
        self._has_score = has_score
        self._keeps_duplicates = keeps_duplicates

    def write(self, built: list[Built], room: int | None) -> int:
        """Write up to `room` records; return how many."""
        lines: list[Line] = []
        keys: set[bytes] = set()
        taken: list[Built] = []
        for candidate in built:
            if room is not None and len(lines) >= room:
                break
            if candidate.record is None:
                self._report.refused[candidate.reason] += 1
                continue
            score = candidate.score if self._has_score else None
            line = encode_line(candidate.record, score=score)
            is_known = line.key in keys or line.key in self._output
            if is_known and not self._keeps_duplicates:
                self._report.refused[DUPLICATE] += 1
                continue
            keys.add(line.key)
            lines.append(line)
            taken.append(candidate)
        if not lines:
            return 0
        self._output.write(lines, taken[0].record or {})
        for line, done in zip(lines, taken, strict=True):
            self._report.num_repaired += line.is_repaired
            self._report.add_record(
                where=done.where,
                score=done.score,
                length=done.num_tokens,
                is_truncated=done.is_truncated,
            )
        return len(lines)
