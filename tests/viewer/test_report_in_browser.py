"""The page of a file in a real browser, opened from disk."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atroposlib.frontend.jsonl2html import generate_html
from tests.viewer.conftest import Watched
from tests.viewer.groups import hostile_group, make_group, write_groups
from tests.viewer.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


@pytest.fixture
def report(tmp_path: Path) -> str:
    groups = [make_group(f"question {i}", [f"answer {i}"], [float(i % 3)]) for i in range(6)]
    source = write_groups(tmp_path / "groups.jsonl", [*groups, "broken", hostile_group()])
    generate_html(source)
    return source.with_suffix(".html").as_uri()


def shown_groups(page: Any) -> list[str]:
    found: list[str] = page.eval_on_selector_all(
        "details.group:not([hidden]) > summary", "all => all.map(e => e.firstChild.data)"
    )
    return found


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_report_is_searched_and_sorted_and_stays_inert(
    report: str,
    open_page: Callable[..., Watched],
    scheme: str,
) -> None:
    watched = open_page(report, scheme=scheme)
    page = watched.page

    # Only the scores of the last group differ.
    assert shown_groups(page) == ["Group 6", *(f"Group {i}" for i in range(6))]
    page.select_option("#order", "file")
    assert shown_groups(page) == [f"Group {i}" for i in range(7)]
    assert page.is_visible("summary .about >> text=question 4")
    page.select_option("#order", "best")
    assert shown_groups(page)[:4] == ["Group 2", "Group 5", "Group 1", "Group 4"]
    page.fill("#search", "ANSWER 4")
    wait_until(lambda: len(shown_groups(page)) == 1)
    assert shown_groups(page) == ["Group 4"]
    assert page.is_visible("text=answer 4")
    page.fill("#search", "")
    wait_until(lambda: len(shown_groups(page)) == 7)
    page.click("#toggle")
    heading = page.evaluate(
        "getComputedStyle(document.querySelector('#group-2-item-0 h3'), '::after').content"
    )
    assert "2.0" in heading
    page.keyboard.press("ArrowDown")
    assert page.locator(".item.active").count() == 1
    assert page.evaluate("window.attacked") is None
    assert page.is_visible("h1")
    assert watched.complaints == []


def test_infinite_and_missing_scores_do_not_disturb_the_order(
    tmp_path: Path, open_page: Callable[..., Watched]
) -> None:
    scores = [2.0, -math.inf, math.nan, math.inf, 5.0, 0.5]
    groups = [make_group(f"question {i}", ["answer"], [score]) for i, score in enumerate(scores)]
    source = write_groups(tmp_path / "groups.jsonl", groups)
    generate_html(source)
    page = open_page(source.with_suffix(".html").as_uri()).page

    page.select_option("#order", "best")
    assert shown_groups(page) == [f"Group {i}" for i in (3, 4, 0, 5, 1, 2)]
    page.select_option("#order", "worst")
    assert shown_groups(page) == [f"Group {i}" for i in (1, 5, 0, 4, 2, 3)]
