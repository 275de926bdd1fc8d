"""Every page of the viewer in a real browser."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atroposlib.viewer.app import Screen, build_app, launch_app
from atroposlib.viewer.sources import JsonlSource
from atroposlib.viewer.token_reader import TokenReader
from atroposlib.viewer.viewer import Viewer, ViewState
from tests.viewer.conftest import Watched
from tests.viewer.groups import PIXEL, byte_tokenizer, hostile_group, make_group, write_groups
from tests.viewer.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
NUM_PLAIN = 60
TOOL = '{"name": "add", "arguments": {"a": 1}}'
THINKING = f"<think>hidden</think>so <tool_call>{TOOL}</tool_call> 7"
OpenPage = Callable[..., Watched]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A served file: a hostile group, one with tools, one with an image, and many plain ones."""
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
    seen = make_group("what is it", ["a dot", "a cat"], [1.0, 0.0], env_name="sight")
    for messages in seen["messages"]:
        messages[0]["content"] = [image, {"type": "text", "text": "what is it"}]
    groups = [
        hostile_group(),
        make_group("three plus four", [THINKING, "it is 8"], [1.0, -0.5], env_name="sums"),
        seen,
        "not json",
        *(
            make_group(f"question {i}", [f"answer {i}", "none"], [i / 10, 0.0], env_name="plain")
            for i in range(NUM_PLAIN)
        ),
    ]
    path = write_groups(tmp_path_factory.mktemp("groups") / "groups.jsonl", groups)
    reader = TokenReader("bytes", lambda _: byte_tokenizer())
    viewer = Viewer(JsonlSource(path), reader)
    wait_until(lambda: not viewer.is_reading and reader.wait(0))
    app = build_app(viewer)
    yield launch_app(app)
    app.close()
    viewer.close()


def show(watched: Watched, tab: str, wanted: str) -> Any:
    """Go to a tab and wait for something on it."""
    watched.page.click(f"#v-tab-{tab}-button")
    watched.page.wait_for_selector(f"#v-{tab} {wanted}")
    return watched.page


def open_group(watched: Watched, text: str) -> Any:
    """Search a group and open it."""
    page = show(watched, "groups", "tbody tr")
    page.fill("#v-search input, #v-search textarea", text)
    page.wait_for_function("document.querySelectorAll('.v-groups tbody tr').length == 1")
    page.click(".v-groups tbody tr")
    page.wait_for_selector("#v-rollouts .v-card")
    return page


def test_overview_tells_scores_and_broken_lines(url: str, open_page: OpenPage) -> None:
    watched = open_page(url)

    page = watched.page
    page.wait_for_selector("#v-overview .v-table")
    text = page.inner_text("#v-overview")
    assert "sums" in text
    assert "line 4: not JSON" in text
    assert page.title() == "Atropos rollouts"
    assert watched.complaints == []


@pytest.mark.long
def test_filters_narrow_the_list_and_clear_widens_it(url: str, open_page: OpenPage) -> None:
    watched = open_page(url)
    page = show(watched, "groups", "tbody tr")

    assert page.inner_text("#v-status").strip() == "1 to 20 of 63"
    page.fill(".v-number >> nth=0 >> input, textarea", "5.5")
    page.wait_for_function("document.querySelector('#v-status').innerText.includes('of 5')")
    page.fill("#v-search input, #v-search textarea", "ANSWER 57")
    page.wait_for_function("document.querySelector('#v-status').innerText.includes('of 1')")
    assert "question 57" in page.inner_text("#v-groups")
    page.click("#v-clear")
    page.wait_for_function("document.querySelector('#v-status').innerText.includes('of 63')")
    assert watched.complaints == []


@pytest.mark.long
def test_what_is_typed_while_the_page_is_renewed_is_kept(
    url: str, open_page: OpenPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = open_page(url)
    page = show(watched, "groups", "tbody tr")
    page_of, is_renewing, may_end = Screen.page, threading.Event(), threading.Event()

    def slow(screen: Screen, view: ViewState) -> str:
        if view.page == "groups" and not is_renewing.is_set():
            is_renewing.set()
            may_end.wait(120)
        return page_of(screen, view)

    monkeypatch.setattr(Screen, "page", slow)
    assert is_renewing.wait(120)  # by the clock; nothing else happens
    page.fill("#v-search input, #v-search textarea", "three plus four")
    page.wait_for_timeout(500)
    may_end.set()

    page.wait_for_function("document.querySelector('#v-status').innerText.includes('of 1')")
    page.wait_for_timeout(2_500)  # the next renewal
    assert page.locator(".v-groups tbody tr").count() == 1


@pytest.mark.long
def test_pages_of_the_list_are_turned(url: str, open_page: OpenPage) -> None:
    watched = open_page(url)
    page = show(watched, "groups", "tbody tr")

    page.click("#v-next-rows")
    page.wait_for_function("document.querySelector('#v-status').innerText.includes('21 to 40')")
    first = page.locator(".v-groups tbody tr td").first.inner_text()
    page.keyboard.press("j")  # the first row that is shown, not the first of all
    page.wait_for_selector(f".v-name:has-text('{first}')")
    assert "21 to 40" in page.locator("#v-status").inner_text()
    page.keyboard.press("p")
    page.wait_for_function("document.querySelector('#v-status').innerText.includes('1 to 20')")

    assert page.locator(".v-groups tbody tr").count() == 20


@pytest.mark.long
def test_keys_walk_through_groups_and_rollouts(url: str, open_page: OpenPage) -> None:
    watched = open_page(url)
    page = open_group(watched, "three plus four")
    page.click("#v-tab-groups-button")
    page.click("#v-clear")
    page.wait_for_function("document.querySelector('#v-status').innerText.includes('of 63')")
    page.click("#v-tab-conversation-button")
    page.wait_for_selector("#v-conversation .v-message")

    page.keyboard.press("j")
    page.wait_for_function("document.querySelector('.v-name').innerText.includes('line 3')")
    page.keyboard.press("k")
    page.wait_for_function("document.querySelector('.v-name').innerText.includes('line 2')")
    page.keyboard.press("l")
    page.wait_for_function(
        "document.querySelector('#v-head .v-pick.v-selected').dataset.rollout == '1'"
    )
    page.wait_for_function(
        "document.querySelector('#v-conversation').innerText.includes('it is 8')"
    )
    page.keyboard.press("4")
    page.wait_for_selector("#v-tokens .v-tokens b")
    assert watched.complaints == []


@pytest.mark.long
def test_hovering_a_token_shows_its_id_logprob_and_position(url: str, open_page: OpenPage) -> None:
    watched = open_page(url)
    page = open_group(watched, "three plus four")
    page = show(watched, "tokens", ".v-tokens b")

    page.hover("#v-tokens .v-tokens b.s >> nth=-1")
    tip = page.inner_text("#v-tip")

    assert "id 1" in tip
    assert "logprob" in tip
    assert "position" in tip
    assert "</s>" in page.inner_text("#v-tokens .v-tokens")
    assert page.locator("#v-tokens .v-tokens b.m").count() > 10
    page.click("#v-color label >> nth=1")
    page.wait_for_selector("#v-tokens .v-tokens b.a3")
    assert watched.complaints == []


@pytest.mark.long
def test_conversation_folds_thinking_and_calls(url: str, open_page: OpenPage) -> None:
    watched = open_page(url)
    open_group(watched, "three plus four")
    page = show(watched, "conversation", ".v-think")

    assert not page.is_visible("#v-conversation .v-think .v-text")
    assert "calls add" in page.inner_text("#v-conversation .v-call summary")
    page.click("#v-conversation .v-think summary")
    assert page.inner_text("#v-conversation .v-think .v-text") == "hidden"


@pytest.mark.long
def test_compare_marks_what_differs(url: str, open_page: OpenPage) -> None:
    watched = open_page(url)
    open_group(watched, "answer 57")
    page = show(watched, "compare", ".v-diff ins")

    assert page.inner_text("#v-compare .v-diff >> nth=0") == "answer 57"
    assert page.inner_text("#v-compare .v-diff >> nth=1") == "none"


@pytest.mark.long
def test_a_page_of_one_group_opens_the_first_where_none_is_open(
    url: str, open_page: OpenPage
) -> None:
    watched = open_page(url)
    watched.page.wait_for_selector("#v-overview .v-table")
    page = show(watched, "conversation", ".v-message")

    assert "line 1" in page.inner_text("#v-head .v-name")
    assert watched.complaints == []


def test_tokens_that_are_shown_become_text_when_the_tokenizer_has_been_loaded(
    tmp_path: Path, open_page: OpenPage
) -> None:
    may_load = threading.Event()

    def load(_: str) -> Any:
        may_load.wait()
        return byte_tokenizer()

    path = write_groups(tmp_path / "groups.jsonl", [make_group("question", ["right"], [1.0])])
    viewer = Viewer(JsonlSource(path), TokenReader("bytes", load, is_lazy=True))
    wait_until(lambda: not viewer.is_reading and len(viewer.index))
    app = build_app(viewer)
    watched = open_page(launch_app(app))
    page = show(watched, "tokens", ".v-tokens b")
    before = page.inner_text(".v-tokens")

    may_load.set()
    page.wait_for_function("document.querySelector('.v-tokens').innerText.includes('question')")

    assert before.startswith("⟨")
    app.close()
    viewer.close()


@pytest.mark.long
def test_images_are_shown_and_plain_text_pads_its_boxes(url: str, open_page: OpenPage) -> None:
    watched = open_page(url)
    open_group(watched, "what is it")
    page = show(watched, "images", "img.v-image")

    assert page.evaluate("document.querySelector('#v-images img').naturalWidth") == 1
    page.click("#v-tab-plain-button")
    page.wait_for_function("document.querySelector('#v-tab-plain textarea').value.includes('what')")
    page.click("#v-tab-groups-button")
    page.click("#v-clear")
    page.wait_for_function("document.querySelector('#v-status').innerText.includes('of 63')")
    page.click("#v-tab-plain-button")
    page.click("#v-grab")
    page.wait_for_function(
        "document.querySelector('#v-tab-plain textarea').value.includes('question 0')"
    )
    assert watched.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_hostile_text_is_inert_on_every_page(url: str, open_page: OpenPage, scheme: str) -> None:
    watched = open_page(url, scheme=scheme)
    page = show(watched, "groups", "tbody tr")
    page.click(".v-groups tbody tr")
    page.wait_for_selector("#v-rollouts .v-card")

    for tab, wanted in (
        ("overview", ".v-table"),
        ("groups", "tbody tr"),
        ("rollouts", ".v-card"),
        ("tokens", ".v-tokens b"),
        ("conversation", ".v-message"),
        ("compare", ".v-two"),
        ("images", ".v-empty"),
    ):
        show(watched, tab, wanted)
    page.click("#v-tab-plain-button")
    page.wait_for_function("document.querySelector('#v-tab-plain textarea').value.length > 100")

    assert page.evaluate("window.attacked") is None
    assert page.is_visible("#v-head .v-name")
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    lightness = sum(map(int, background[background.index("(") + 1 : -1].split(",")[:3]))
    assert (lightness < 150) == (scheme == "dark")
    assert watched.complaints == []
