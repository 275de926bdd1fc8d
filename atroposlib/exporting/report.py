"""Counts of an export, and its report with histograms; pure."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from atroposlib.envs.live_view import score_bars

__all__ = ["DUPLICATE", "ExportReport", "report_text"]

_WIDTH = 30
_MAX_BARS = 10
DUPLICATE = "duplicate of a record already written"
_MOST_NAMED = 10


@dataclass
class ExportReport:
    """Counts of one export."""

    num_groups: int = 0
    """Groups that could be read."""
    num_sequences: int = 0
    """Trajectories of these groups."""
    num_from_text: int = 0
    """Groups whose tokens were made from text, because the server reports no token ids."""
    num_with_images: int = 0
    """Groups with images, which no format contains."""
    num_records: int = 0
    """Records written."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Trajectories that were not written, by reason."""
    broken: list[str] = field(default_factory=list)
    """The first groups that could not be read, with the reason."""
    num_broken: int = 0
    num_repaired: int = 0
    """Records in which lone surrogates were replaced."""
    num_truncated: int = 0
    """Records with a truncated completion."""
    truncated: list[str] = field(default_factory=list)
    """The places of the first truncated trajectories."""
    knows_truncation: bool = False
    """Whether the end-of-turn tokens are known."""
    scores: array[float] = field(default_factory=lambda: array("d"))
    """Scores of the records."""
    lengths: array[int] = field(default_factory=lambda: array("q"))
    """Completion tokens of the records."""

    def add_broken(self, where: str, reason: str) -> None:
        self.num_broken += 1
        if len(self.broken) < _MOST_NAMED:
            self.broken.append(f"{where}: {reason}")

    def add_record(self, *, where: str, score: float, length: int, is_truncated: bool) -> None:
        self.num_records += 1
        self.scores.append(score)
        self.lengths.append(length)
        if is_truncated:
            self.num_truncated += 1
            if len(self.truncated) < _MOST_NAMED:
                self.truncated.append(where)


def report_text(report: ExportReport, *, unit: str) -> str:
    """Return the report as text; `unit` is the plural name of a record."""
    lines = [
        f"{report.num_records} {unit} from {report.num_groups} groups with "
        f"{report.num_sequences} trajectories"
    ]
    lines += _dropped_lines(report.dropped)
    if report.num_broken:
        lines.append(f"groups that could not be read: {report.num_broken}")
        lines += [f"  {line}" for line in report.broken]
        if report.num_broken > len(report.broken):
            lines.append(f"  and {report.num_broken - len(report.broken)} more")
    if report.num_from_text:
        lines.append(
            f"tokenized from text: {report.num_from_text} of the groups, whose server reported no "
            "token ids"
        )
    if report.num_with_images:
        lines.append(f"with images: {report.num_with_images} of the groups; {unit} are text only")
    if report.num_repaired:
        lines.append(f"lone surrogates replaced in {report.num_repaired} {unit}")
    lines += _truncation_lines(report, unit)
    if report.num_records:
        lines += ["scores", *_histogram_lines(report.scores)]
        lines += ["tokens of completions", *_histogram_lines(report.lengths)]
    return "\n".join(lines)


def _dropped_lines(counts: Counter[str]) -> list[str]:
    if not counts:
        return []
    widest = max(len(str(count)) for count in counts.values())
    rows = [f"  {count:>{widest}}  {reason}" for reason, count in counts.most_common()]
    return [f"left out: {sum(counts.values())} trajectories", *rows]


def _histogram_lines(values: Sequence[float]) -> list[str]:
    bars = score_bars(values, max_bars=_MAX_BARS)
    widest = max(len(bar.label) for bar in bars)
    most = max(bar.num_scores for bar in bars)
    return [
        f"  {bar.label:>{widest}}  {'#' * -(-_WIDTH * bar.num_scores // most):{_WIDTH}}  "
        f"{bar.num_scores}"
        for bar in bars
    ]


def _truncation_lines(report: ExportReport, unit: str) -> list[str]:
    if not report.knows_truncation or not report.num_records:
        return []
    if not report.num_truncated:
        return [f"truncated: none of the {unit}"]
    more = report.num_truncated - len(report.truncated)
    named = "; ".join(report.truncated) + (f"; and {more} more" if more else "")
    return [f"truncated: {report.num_truncated} {unit} ({named})"]
