"""The timeline of an agent in a browser: its replay, its keys, narrow screens, hostile output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from atroposlib.viewer.app import build_app, launch_app
from atroposlib.viewer.sources import JsonlSource
from atroposlib.viewer.token_reader import TokenReader
from atroposlib.viewer.viewer import Viewer
from tests.exporting.traced_groups import make_trace, traced_group
from tests.viewer.conftest import Watched
from tests.viewer.groups import ATTACKS, byte_tokenizer, make_group, write_groups
from tests.viewer.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
OpenPage = Callable[..., Watched]
MOVES = "\x1b[2J\x1b[Hab\x1b[1;2Hc\x1b[K\n\x1b[999999999Ax\x1b[38;5;300my\x1b[48;2;1;2;3mz\x1b["
KEY_REPORTS = "\x1b[>4;1m"
"""Sent by shells and editors to a terminal; it does not change how text looks."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A served file: an agent with a sub-agent, and one whose every output is hostile."""
    hostile = make_trace()
    for i, event in enumerate(hostile["events"]):
        event["text"] = "\n".join(ATTACKS) + (MOVES if i == 2 else "")
    plain = make_trace()
    for event in plain["events"]:
        if event["kind"] == "output":
            event["text"] = f"{KEY_REPORTS}plain\n"
    groups = [
        traced_group(),
        make_group("hostile", ["x"], [1.0], traces=[hostile]),
        make_group("plain", ["x"], [1.0], traces=[plain]),
    ]
    path = write_groups(tmp_path_factory.mktemp("groups") / "groups.jsonl", groups)
    reader = TokenReader("bytes", lambda _: byte_tokenizer())
    viewer = Viewer(JsonlSource(path), reader)
    wait_until(lambda: not viewer.is_reading and reader.wait(0))
    app = build_app(viewer, start_page="timeline")
    yield launch_app(app)
    app.close()
    viewer.close()


def timeline(watched: Watched) -> Any:
    watched.page.wait_for_selector(".v-timeline")
    return watched.page


def open_replay(page: Any) -> None:
    page.focus(".v-replay > summary")
    page.keyboard.press("Enter")
    page.wait_for_selector(".v-terminal span")


def test_replay_is_played_paused_and_sought_by_keys(url: str, open_page: OpenPage) -> None:
    watched = open_page(url)
    page = timeline(watched)

    open_replay(page)
    assert "starts" in page.inner_text(".v-terminal")
    assert "all done" in page.inner_text(".v-terminal")
    assert page.get_attribute(".v-terminal span", "class") == "v-bold"
    page.focus(".v-seek")
    page.keyboard.press("Home")
    assert page.inner_text(".v-clock").startswith("0.0 / ")
    assert "all done" not in page.inner_text(".v-terminal")
    page.select_option(".v-speed", "8")
    page.focus(".v-play")
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelector('.v-terminal').innerText.includes('all done')")
    page.wait_for_function("document.querySelector('.v-play').innerText === 'play'")
    assert watched.complaints == []


def test_other_sequence_is_opened_from_its_turn(url: str, open_page: OpenPage) -> None:
    watched = open_page(url)
    page = timeline(watched)

    page.click("text=sequence 1")

    page.wait_for_selector(".v-timeline [data-rollout='0']")
    assert "Changed files (2)" in page.inner_text("#v-timeline")
    assert watched.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_narrow_screen_needs_no_horizontal_scrolling(
    url: str, open_page: OpenPage, scheme: str
) -> None:
    watched = open_page(url, scheme=scheme)
    page = timeline(watched)

    page.set_viewport_size({"width": 390, "height": 844})
    open_replay(page)

    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    colors = page.evaluate(
        "[...document.querySelectorAll('.v-terminal, .v-terminal span')].map("
        "(part) => getComputedStyle(part).color)"
    )
    assert set(colors) == {"rgb(230, 237, 243)"}
    assert watched.complaints == []


def test_keys_and_links_reach_tabs_that_a_narrow_screen_keeps_in_a_menu(
    url: str, open_page: OpenPage
) -> None:
    watched = open_page(url)
    page = timeline(watched)
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_selector("#v-tabs .overflow-dropdown button >> text=Compare", state="attached")

    for key, name in (("6", "compare"), ("1", "overview"), ("8", "timeline"), ("9", "plain")):
        page.keyboard.press(key)
        page.wait_for_selector(f"#v-tab-{name}", state="visible")
    page.keyboard.press("1")
    page.wait_for_selector("#v-tab-overview", state="visible")
    page.click("[data-opens]")

    page.wait_for_selector("#v-tab-timeline", state="visible")
    assert watched.complaints == []


def test_hostile_output_is_text(url: str, open_page: OpenPage) -> None:
    watched = open_page(url)
    page = timeline(watched)
    page.keyboard.press("j")
    page.wait_for_function("document.querySelector('#v-head').innerText.includes('line 2')")

    open_replay(page)
    page.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true; })")

    assert page.evaluate("window.attacked") is None
    assert "window.attacked = 1</script>" in page.inner_text(".v-terminal")
    assert page.locator(".v-terminal *:not(div):not(span)").count() == 0
    assert watched.complaints == []


def test_private_sequences_do_not_change_the_style(url: str, open_page: OpenPage) -> None:
    watched = open_page(url)
    page = timeline(watched)
    for line in (2, 3):
        page.keyboard.press("j")
        page.wait_for_function(
            f"document.querySelector('#v-head').innerText.includes('line {line}')"
        )

    open_replay(page)

    assert "plain" in page.inner_text(".v-terminal")
    assert page.locator(".v-terminal .v-bold").count() == 0
    assert watched.complaints == []
