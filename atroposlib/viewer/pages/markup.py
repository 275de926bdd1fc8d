"""Small pieces of HTML that all pages share; pure.

Text from a run is data: `shown` and `block` escape it and make control characters visible, and CSS
isolates its writing direction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from atroposlib.utils.text import inert_markup

__all__ = [
    "block",
    "chip",
    "empty",
    "figure",
    "folded",
    "notice",
    "number",
    "part_chips",
    "score_chip",
    "score_class",
    "shown",
    "sparkline",
    "table",
]  # fmt: skip

MAX_BLOCK_CHARACTERS = 20_000
"""Longer texts are cut in two: the rest is folded away."""


def shown(text: object) -> str:
    """Escape text of any origin for content or for an attribute."""
    return inert_markup(str(text))


def block(text: str, *, max_characters: int = MAX_BLOCK_CHARACTERS) -> str:
    """Show text with its line breaks; what is beyond the limit is folded."""
    if len(text) <= max_characters:
        return f'<div class="v-text">{shown(text)}</div>'
    rest = text[max_characters:]
    return f'<div class="v-text">{shown(text[:max_characters])}</div>' + folded(
        f"{len(rest):,} more characters", f'<div class="v-text">{shown(rest)}</div>'
    )


def folded(title: str, content: str, *, is_open: bool = False, kind: str = "") -> str:
    """Fold markup away under a title, which is escaped here."""
    return (
        f'<details class="v-fold {kind}"{" open" if is_open else ""}>'
        f"<summary>{shown(title)}</summary>{content}</details>"
    )


def notice(text: str, kind: str = "note") -> str:
    """Say something above a page; kinds are `note` and `bad`."""
    return f'<p class="v-notice v-{kind}" role="status">{shown(text)}</p>'


def empty(text: str) -> str:
    """Say that there is nothing, and what to do."""
    return f'<p class="v-empty">{shown(text)}</p>'


def number(value: float | None) -> str:
    """Write a number as short as it can be read."""
    if value is None:
        return "-"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.1f}"


def score_class(score: float | None) -> str:
    """Return the CSS class of a score: as in the page of a file, green, gold or pink."""
    if score is None:
        return "v-none"
    return "v-pos" if score > 0 else "v-neg" if score < 0 else "v-zero"


def score_chip(score: float | None) -> str:
    """Show a score in its colour."""
    return f'<b class="v-score {score_class(score)}">{number(score)}</b>'


def chip(text: str, title: str = "") -> str:
    """Show a small fact."""
    hint = f' title="{shown(title)}"' if title else ""
    return f'<span class="v-chip"{hint}>{shown(text)}</span>'


def part_chips(parts: Mapping[str, float]) -> str:
    """Show the named parts of a reward, each as a small fact."""
    hint = "part of the reward, before it is weighed"
    return "".join(chip(f"{name} {number(value)}", hint) for name, value in parts.items())


def figure(name: str, value: str, more: str = "") -> str:
    """Show a figure large with its name; `more` is markup."""
    return (
        f'<div class="v-figure"><span>{shown(name)}</span><strong>{shown(value)}</strong>'
        f"{more}</div>"
    )


def sparkline(values: Sequence[float]) -> str:
    """Draw values as a small line; nothing for fewer than two."""
    if len(values) < 2:
        return ""
    low, high = min(0.0, *values), max(values)
    span = (high - low) or 1.0
    points = " ".join(
        f"{120 * i / (len(values) - 1):.1f},{26 - 24 * (value - low) / span:.1f}"
        for i, value in enumerate(values)
    )
    return (
        '<svg class="v-spark" viewBox="0 0 120 28" preserveAspectRatio="none" aria-hidden="true">'
        f'<polyline points="{points}"/></svg>'
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, kind: str = "") -> str:
    """Make a table; cells are markup."""
    top = "".join(f"<th>{shown(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<table class="v-table {kind}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>'
    )
