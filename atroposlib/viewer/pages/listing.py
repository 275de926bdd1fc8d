"""The list of groups: one page of rows; pure."""

from __future__ import annotations

from collections.abc import Sequence

from atroposlib.viewer.pages.markup import empty, number, score_chip, shown
from atroposlib.viewer.summaries import GroupSummary

__all__ = ["listing_page"]

_SHOWN_SCORES = 8


def listing_page(rows: Sequence[tuple[int, GroupSummary]], *, selected: int | None) -> str:
    """Return the rows as a table; a click on a row opens its group.

    Args:
        rows: positions and summaries.
        selected: position of the open group.
    """
    if not rows:
        return empty("No group matches. Widen the filter, or clear it with the button.")
    body = "".join(_row(position, row, position == selected) for position, row in rows)
    return (
        '<table class="v-table v-groups"><thead><tr><th>group</th><th>environment</th><th>step</th>'
        "<th>scores</th><th>mean</th><th>longest</th><th>question</th></tr></thead>"
        f"<tbody>{body}</tbody></table>"
    )


def _row(position: int, row: GroupSummary, is_selected: bool) -> str:
    scores = "".join(score_chip(score) for score in row.scores[:_SHOWN_SCORES])
    more = len(row.scores) - _SHOWN_SCORES
    mean = sum(row.scores) / len(row.scores) if row.scores else None
    return (
        f'<tr data-group="{position}" tabindex="0"{" class=v-selected" if is_selected else ""}>'
        f"<td>{shown(row.label)}</td><td>{shown(row.environment or '-')}</td>"
        f"<td>{number(row.step)}</td><td>{scores}{f' +{more}' if more > 0 else ''}</td>"
        f"<td>{number(mean)}</td><td>{row.longest:,}</td>"
        f'<td class="v-excerpt">{shown(row.excerpt)}</td></tr>'
    )
