"""Pages that people look at: on a phone, in light and dark, by keyboard, for assistive software."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atroposlib.frontend.jsonl2html import generate_html
from atroposlib.viewer.app import build_app, launch_app
from atroposlib.viewer.sources import JsonlSource
from atroposlib.viewer.token_reader import TokenReader
from atroposlib.viewer.viewer import Viewer
from example_trainer.reporting.page import HeldOut
from example_trainer.reporting.writing import write_comparison, write_report, write_settings
from tests.viewer.conftest import Watched
from tests.viewer.groups import ATTACKS, byte_tokenizer, hostile_group, make_group, write_groups
from tests.viewer.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
OpenPage = Callable[..., Watched]
PHONE = {"width": 390, "height": 844}
TABLE = "| a | b | c |\n|---|---|---|\n| " + " | ".join(["a cell of one long word" + "x" * 40] * 3)
VIEWER_PAGES = (
    ("overview", ".v-table"),
    ("groups", "tbody tr"),
    ("rollouts", ".v-card"),
    ("tokens", ".v-tokens b"),
    ("conversation", ".v-message"),
    ("compare", ".v-two"),
)

FOCUSED = """() => {
  const at = document.activeElement, style = getComputedStyle(at);
  const isSeen = style.outlineStyle !== "none" || style.boxShadow !== "none";
  return [at.tagName.toLowerCase() + (at.id ? "#" + at.id : "") + (at.hash || ""), isSeen];
}"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run: its groups, some of them hostile, and both of its pages."""
    folder = tmp_path_factory.mktemp("run")
    ordinary = [
        make_group(f"question {i % 4}", [TABLE, "# a heading\n\n`x`"], [i / 4, -1.0], step=i)
        for i in range(12)
    ]
    hostile_one = hostile_group()
    hostile_one["messages"][2][1]["content"] = "x" * 10_000  # a megabyte takes axe minutes
    groups = write_groups(folder / "groups.jsonl", [hostile_one, *ordinary])
    metrics = folder / "metrics.jsonl"
    steps = (
        {"step": i, "train/loss": 1 / i, "train/reward_mean": i / 40, "train/entropy": 0.5}
        for i in range(1, 41)
    )
    metrics.write_text("".join(json.dumps(step) + "\n" for step in steps))
    hostile = "".join(attack for attack in ATTACKS if attack.isprintable())
    write_settings(metrics, {"model_name": "m" * 200, "algorithm": "grpo"}, {hostile: hostile})
    generate_html(groups, folder / "rollouts.html")
    held_out = [HeldOut("share of right answers", 0.25, 0.75, 40), HeldOut(hostile, None, 2.0)]
    write_report(
        metrics,
        folder / "report.html",
        held_out=held_out,
        groups=[[groups]],
        rollouts_path=folder / "rollouts.html",
    )
    other = folder / ("x" * 100) / "metrics.jsonl"
    other.parent.mkdir()
    other.write_text(metrics.read_text())
    write_settings(other, {"model_name": "other", hostile: hostile}, {})
    write_comparison([metrics, other], folder / "comparison.html")
    return folder


@pytest.fixture(scope="module")
def viewer_url(run: Path) -> Iterator[str]:
    viewer = Viewer(
        JsonlSource(run / "groups.jsonl"), TokenReader("bytes", lambda _: byte_tokenizer())
    )
    wait_until(lambda: not viewer.is_reading and viewer.reader.wait(0))
    app = build_app(viewer)
    yield launch_app(app)
    app.close()
    viewer.close()


def check_page(page: Any, where: str, scheme: str) -> None:
    """Fail with the elements that break a rule of axe-core, which includes the contrast of text.

    Only colors differ in the dark.
    """
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    options = {"runOnly": ["color-contrast"]} if scheme == "dark" else {}
    found = axe.Axe().run(page, options=options).response["violations"]
    broken = [
        f"{rule['id']}: {' '.join(map(str, node['target']))}: {node['failureSummary']}"
        for rule in found
        for node in rule["nodes"]
    ]
    assert not broken, f"{where}, {scheme}: " + "\n".join(broken[:10])


def check_width(page: Any, where: str) -> None:
    wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert wide <= 0, f"{where} is {wide} px wider than the screen"


def stops_of(page: Any, count: int) -> list[str]:
    """Press Tab and return the elements that got the focus; each must show it."""
    stops = []
    for _ in range(count):
        page.keyboard.press("Tab")
        name, is_seen = page.evaluate(FOCUSED)
        assert is_seen, f"the focus of {name} is not visible"
        stops.append(name)
    return stops


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["report", "rollouts", "comparison"])
def test_pages_of_a_run_fit_a_phone_and_keep_the_rules_of_axe(
    run: Path, open_page: OpenPage, name: str, scheme: str
) -> None:
    watched = open_page((run / f"{name}.html").as_uri(), scheme=scheme)
    page = watched.page
    page.set_viewport_size(PHONE)
    page.evaluate(
        "for (const one of [...document.querySelectorAll('details')].slice(0, 6)) one.open = true"
    )

    check_width(page, name)
    check_page(page, name, scheme)
    assert page.evaluate("window.attacked") is None
    assert watched.complaints == []


def test_report_starts_with_result_curve_and_answers_and_is_read_by_keyboard(
    run: Path, open_page: OpenPage
) -> None:
    watched = open_page((run / "report.html").as_uri())
    page = watched.page

    tops = [
        page.locator(place).first.bounding_box()["y"]
        for place in ("h1", ".held-out", ".answers", ".facts", ".charts", "table")
    ]
    assert tops == sorted(tops)
    assert page.locator("figure.main svg").bounding_box()["y"] < 768
    places = ("answers", "numbers", "curves", "steps", "settings")
    assert stops_of(page, 6) == ["a#content", *(f"a#{p}" for p in places)]
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    page.wait_for_function("location.hash === '#steps'")
    page.goto((run / "report.html").as_uri())
    page.click("text=All rollouts of the first and the last steps")
    page.wait_for_selector("h1 >> text=Rendered Messages")
    assert watched.complaints == []


def test_rollouts_are_reached_selected_and_searched_by_keyboard(
    run: Path, open_page: OpenPage
) -> None:
    watched = open_page((run / "rollouts.html").as_uri())
    page = watched.page

    stops = stops_of(page, 5)
    assert stops == [
        "a#groups-container",
        "input#search",
        "select#order",
        "button#toggle",
        "summary",
    ]
    page.keyboard.press("Enter")
    page.wait_for_selector("details.group[open] .item")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    assert page.evaluate("document.activeElement.id") == "group-0-item-0"
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "search"
    assert page.locator("summary .score.high").count() > 0
    assert watched.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_of_the_viewer_fit_a_phone_and_keep_the_rules_of_axe(
    viewer_url: str, open_page: OpenPage, scheme: str
) -> None:
    watched = open_page(viewer_url, scheme=scheme)
    page = watched.page
    page.set_viewport_size(PHONE)
    page.wait_for_selector("#v-overview .v-table")
    page.keyboard.press("j")

    for number, (tab, wanted) in enumerate(VIEWER_PAGES, start=1):
        page.keyboard.press(str(number))
        page.wait_for_selector(f"#v-{tab} {wanted}")
        check_width(page, tab)
        check_page(page, tab, scheme)
    assert watched.complaints == []


def test_viewer_is_used_by_keyboard_only(viewer_url: str, open_page: OpenPage) -> None:
    watched = open_page(viewer_url)
    page = watched.page
    page.wait_for_selector("#v-overview .v-table")
    controls = ["v-previous-group", "v-next-group", "v-previous-rollout", "v-next-rollout"]

    stops = stops_of(page, 6)
    assert stops == [
        "a#v-tabs", *(f"button#{name}" for name in controls), "button#v-tab-overview-button"
    ]  # fmt: skip
    page.keyboard.press("2")
    page.wait_for_selector("#v-groups tbody tr")
    page.focus("#v-groups tbody tr >> nth=2")
    page.keyboard.press("Space")
    page.wait_for_selector("#v-rollouts .v-card")
    page.focus("#v-rollouts .v-card >> nth=1")
    page.keyboard.press("Enter")
    page.wait_for_selector("#v-rollouts .v-card.v-selected[data-rollout='1']")
    assert watched.complaints == []
