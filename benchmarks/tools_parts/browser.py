"""How long the viewer takes in a real browser: from a click to the page that was asked for."""

from __future__ import annotations

import contextlib
import io
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from atroposlib.frontend.jsonl2html import generate_html
from atroposlib.viewer.app import build_app, launch_app
from atroposlib.viewer.index import GroupFilter
from atroposlib.viewer.sources import JsonlSource
from atroposlib.viewer.token_reader import TokenReader
from atroposlib.viewer.viewer import Viewer

__all__ = ["BrowserFigure", "measure_browser", "measure_report"]

REPEATS = 20
REPORT_GROUPS = 1000
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync")
_CHANGED = "([selector, before]) => document.querySelector(selector).innerText !== before"


class BrowserFigure(NamedTuple):
    """One line of the table, in milliseconds."""

    what: str
    median_ms: float
    slowest_ms: float


def measure_browser(source: Path, tokenizer: Any) -> Iterator[BrowserFigure]:
    """Open a file of groups and use it; nothing is yielded where there is no browser.

    Args:
        source: the file.
        tokenizer: of its tokens.
    """
    path = shutil.which("chromium")
    if path is None:
        return
    from playwright.sync_api import sync_playwright

    started = time.perf_counter()
    viewer = Viewer(JsonlSource(source), TokenReader("benchmark", lambda _: tokenizer))
    while viewer.is_reading or not viewer.reader.wait(1):
        time.sleep(0.01)
    taken_ms = 1000 * (time.perf_counter() - started)
    yield BrowserFigure(f"reading {len(viewer.index):,} groups", taken_ms, taken_ms)
    yield from _searches(viewer)
    app = build_app(viewer)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, headless=True, args=list(QUIET))
        page = browser.new_page(viewport={"width": 1366, "height": 768})
        page.goto(_floor_url())
        yield _clicks(page, "empty Gradio event", "#floor-button", "#floor-text")
        page.goto(launch_app(app))
        yield from _pages(page)
        browser.close()
    viewer.close()


def measure_report(source: Path) -> Iterator[BrowserFigure]:
    """Write the page of the first thousand groups of a file."""
    part = source.with_name("part.jsonl")
    with source.open("rb") as lines:
        part.write_bytes(b"".join(islice(lines, REPORT_GROUPS)))
    times = [_timed_ms(lambda: _write_report(part)) for _ in range(3)]
    yield _figure(f"page of a file, {REPORT_GROUPS:,} groups", times)


def _write_report(source: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        generate_html(source)


def _pages(page: Any) -> Iterator[BrowserFigure]:
    page.click("#v-tab-groups-button")
    page.wait_for_selector(".v-groups tbody tr")
    yield _clicks(page, "next page of the list", "#v-next-rows", "#v-groups")
    page.click(".v-groups tbody tr")
    page.wait_for_selector("#v-rollouts .v-card")
    yield _clicks(page, "next group, side by side", "#v-next-group", "#v-rollouts")
    page.click("#v-tab-tokens-button")
    page.wait_for_selector("#v-tokens .v-tokens")
    yield _clicks(page, "next group, tokens", "#v-next-group", "#v-tokens")
    page.click("#v-tab-conversation-button")
    page.wait_for_selector("#v-conversation .v-message")
    yield _clicks(page, "next rollout, conversation", "#v-next-rollout", "#v-conversation")


def _clicks(page: Any, what: str, button: str, content: str) -> BrowserFigure:
    """Click a button until content changes, several times."""
    times = []
    for _ in range(REPEATS + 1):
        before = page.inner_text(content)
        times.append(
            _timed_ms(lambda before=before: _click(page, button, content, before))  # type: ignore[misc]
        )
    return _figure(what, times[1:])  # the first one also warms up


def _click(page: Any, button: str, content: str, before: str) -> None:
    page.click(button)
    page.wait_for_function(_CHANGED, arg=[content, before])


def _searches(viewer: Viewer) -> Iterator[BrowserFigure]:
    """Search words that occur once and words that occur everywhere, each for the first time."""
    times = []
    for number in range(10):
        wanted = GroupFilter(text=f"answer {number}" if number % 2 else f"question {number * 997}")
        times.append(_timed_ms(lambda wanted=wanted: _search(viewer, wanted)))  # type: ignore[misc]
    yield _figure("text search of all groups", times)
    ordered = [_timed_ms(lambda: viewer.index.match(GroupFilter(min_score=0.5), "spread"))
               for _ in range(10)]  # fmt: skip
    yield _figure("filter and order of all groups", ordered)


def _search(viewer: Viewer, wanted: GroupFilter) -> None:
    while not viewer.match(wanted, "oldest").is_complete:
        pass


def _timed_ms(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return 1000 * (time.perf_counter() - started)


def _figure(what: str, times: list[float]) -> BrowserFigure:
    return BrowserFigure(what, statistics.median(times), max(times))


def _floor_url() -> str:
    """Serve a page on which a click changes a word: what Gradio itself costs."""
    import gradio as gr

    with gr.Blocks(analytics_enabled=False) as blocks:
        button = gr.Button("again", elem_id="floor-button")
        text = gr.HTML("0", elem_id="floor-text")
        options: dict[str, Any] = {"queue": False, "show_progress": "hidden"}
        button.click(lambda: str(time.time()), None, text, **options)
    return launch_app(blocks)
