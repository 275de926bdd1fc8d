"""What one browser tab looks at."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Any, get_args

from atroposlib.viewer.group_index import ORDERS, GroupFilter, Order
from atroposlib.viewer.pages.tokens import Colour

__all__ = ["PAGES", "ROWS_PER_PAGE", "BrowserTab", "ViewState", "filter_of"]

PAGES = ("overview", "groups", "rollouts", "tokens", "conversation", "compare", "images", "plain")
ROWS_PER_PAGE = 20
NO_FILTER = GroupFilter()
_SIGNALS = {"any": "any", "differ": "differ", "all equal": "equal"}
_ANY_ENVIRONMENT = "all"


@dataclass(frozen=True)
class ViewState:
    """One tab of a browser."""

    page: str = "overview"
    wanted: GroupFilter = NO_FILTER
    order: Order = "oldest"
    offset: int = 0
    """First row of the list."""
    group: int | None = None
    """Position of the open group."""
    rollout: int = 0
    other: int | None = None
    """The rollout that the open one is compared with; None: the one whose score differs most."""
    colour: Colour = "logprob"
    token: int = 0
    """First token shown."""
    digest: int = 0
    """Of what is on screen, so that a page that has not changed is left alone."""


class BrowserTab:
    """The view of one browser tab, whose events arrive at the same time and take turns.

    Were the view handed from event to event, one that began before another and ended after it
    would undo what the other changed.
    """

    def __init__(self, view: ViewState) -> None:
        self.view = view
        self.turn = threading.Lock()
        """Held while an event changes the view and shows it."""

    def __deepcopy__(self, memo: Any) -> BrowserTab:
        """Another tab that begins alike: Gradio copies the first for each."""
        return BrowserTab(self.view)


def filter_of(
    text: Any,
    environment: Any,
    order: Any,
    signal: Any,
    *ranges: Any,
) -> tuple[GroupFilter, Order]:
    """Return the filter and order that widgets stand for.

    Args:
        text: to search for.
        environment: a name, or `all`.
        order: one of `ORDERS`.
        signal: `any`, `differ` or `all equal`.
        ranges: least and most score, tokens and step as typed, in this order; what is no number
            leaves an end open.
    """
    low, high, shortest, longest, first, last = (*ranges, *[None] * 6)[:6]
    wanted = GroupFilter(
        environment=None if environment in (None, "", _ANY_ENVIRONMENT) else str(environment),
        min_score=_number(low),
        max_score=_number(high),
        min_tokens=_whole(shortest),
        max_tokens=_whole(longest),
        min_step=_whole(first),
        max_step=_whole(last),
        text=str(text or "").strip(),
        signal=_SIGNALS.get(str(signal), "any"),  # type: ignore[arg-type]
    )
    chosen: Order = order if order in get_args(Order) else ORDERS[0]
    return wanted, chosen


def _number(value: Any) -> float | None:
    """Read what was typed; what is no number leaves the end open."""
    try:
        number = float(str(value).replace(",", ".") if value is not None else "nan")
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _whole(value: Any) -> int | None:
    number = _number(value)
    return None if number is None else int(number)
