"""The page of an agent's rollout, as markup."""

from __future__ import annotations

import html
import json
import re
from typing import Any

import pytest

from atroposlib.viewer.index import searchable_text, summarize
from atroposlib.viewer.rollouts import group_of
from atroposlib.viewer.timeline import (
    MAX_DIFF_CHARACTERS,
    MAX_EVENT_MARKUP,
    MAX_EVENTS,
    MAX_TEXT_CHARACTERS,
    plain_text,
    timeline_page,
)
from tests.exporting.traced_groups import chat_group, make_trace, traced_group
from tests.viewer.groups import ATTACKS, make_group


def page_of(trace: Any, **fields: Any) -> str:
    group = group_of(make_group("q", ["a"], [1.0], traces=[trace], **fields))
    return timeline_page(group, group.rollouts[0])


def text_of(markup: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", markup)).split())


def test_page_shows_the_rollout_from_fork_to_reward() -> None:
    group = group_of(traced_group())

    page = timeline_page(group, group.rollouts[0])

    text = text_of(page)
    for part in (
        *("greet-by-name", "mini-swe-agent 1.2", "4 turns", "2 branches", "3 tool calls", "9.6 s"),
        *("tests 1", "fork 20 ms", "agent 8.4 s exit 0", "verifier 1.2 s", "I look at the files."),
        *("turn · 34 tokens", "turn of branch 1 · 18 tokens", "shell exit 0 300 ms ls -la"),
        *("branch 1 exit 1", "an empty answer; asked again", "Changed files (2)"),
        *("M /app/greeting.py +1 -1", "2 passed", "fork_ms 21.4"),
    ):
        assert part in text, part
    assert "<del>-hello</del><ins>+hi</ins>" in page
    assert '<button class="v-pick" data-rollout="1">sequence 1</button>' in page


def test_sequences_of_one_rollout_show_its_trace() -> None:
    group = group_of(traced_group())

    pages = [timeline_page(group, rollout) for rollout in group.rollouts]

    assert 'data-rollout="0"' in pages[1]
    assert 'data-rollout="3"' in pages[2]
    assert all("Changed files" in page for page in pages)


def test_result_is_shown_with_its_call_of_the_same_branch() -> None:
    page = text_of(page_of(make_trace()))

    assert page.index("ls -la") < page.index("total 0") < page.index("A sub-agent writes")
    assert page.index("pytest -q") < page.index("1 failed")


def test_rollout_without_a_trace_names_the_other_page() -> None:
    group = group_of(chat_group())

    assert "no trace of an agent" in timeline_page(group, group.rollouts[0])


@pytest.mark.parametrize(
    "trace",
    [
        {},
        {"events": "x"},
        {"events": [{}], "verifier": {"exit_code": "x"}},
        {"verifier": {"duration_s": float("nan")}},
        {"verifier": {"duration_s": 10**400}},
    ],
)
def test_incomplete_trace_has_a_page(trace: Any) -> None:
    assert "Timeline" in page_of(trace)


def test_every_text_of_a_trace_is_escaped() -> None:
    attack = "\n".join(ATTACKS)
    trace = make_trace()
    for event in trace["events"]:
        for name in ("text", "name", "call_id"):
            event.update({name: attack} if name in event else {})
        event.update({"arguments": {"command": attack}} if "arguments" in event else {})
    for name in ("task", "agent", "agent_version", "model", "instruction", "outcome"):
        trace[name] = attack
    trace["changes"] = [{"path": attack, "kind": attack, "size": 1, "diff": f"+{attack}"}]
    trace["verifier"] = {"output": attack, "ended_by": attack, "exit_code": attack}
    trace["reward_parts"] = trace["metrics"] = {attack: 1.0}

    page = page_of(trace)

    assert not re.search(r"<(script|img|style|textarea)", page)
    assert "onmouseover='" not in page
    assert page.isprintable() or set(filter(lambda c: not c.isprintable(), page)) <= {"\n", "\t"}
    data = html.unescape(re.search(r'data-cast="([^"]*)"', page)[1])  # type: ignore[index]
    assert json.loads(data)[0][1] == attack.replace("\n", "\r\n")


def test_long_texts_are_folded_and_longer_ones_cut() -> None:
    lines = "".join(f"line {i}\n" for i in range(100))
    trace = {
        "events": [
            {"at": 0, "kind": "turn", "text": lines},
            {"at": 1, "kind": "turn", "text": "x" * (MAX_TEXT_CHARACTERS + 5)},
            *({"at": 2, "kind": "error", "text": f"e{i}"} for i in range(MAX_EVENTS)),
        ]
    }

    page = page_of(trace)

    assert "84 more lines" in page
    assert "5 more characters are not shown" in page
    assert "2 more events" in page


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("10%\r50%\r100%\nnext\r\n", "100%\nnext\n"),
        ("\x1b]0;title\x07after", "after"),
        ("\x1b]0;never ends\nvisible", "\nvisible"),
        ("\x1bPq\x1b\\after \x1b(Bx", "after x"),
        ("plain", "plain"),
    ],
)
def test_plain_text_has_no_escape_sequences(text: str, expected: str) -> None:
    assert plain_text(text) == expected


def test_changed_lines_show_all_of_their_text() -> None:
    diff = "@@ -1 +1 @@\n-start\r\n+rm -rf build\recho done\n"
    page = page_of({"changes": [{"path": "/a", "kind": "modified", "size": 9, "diff": diff}]})

    assert "<del>-start</del>" in page
    assert re.search(r"<ins>\+rm -rf build.?echo done</ins>", page)


def test_page_of_a_long_rollout_has_a_limit() -> None:
    events = [{"at": i, "kind": "turn", "text": "words " * 20_000} for i in range(100)]
    change = {"path": "/a", "kind": "added", "size": 9, "diff": "+x\n" * 30_000}

    page = page_of({"events": events, "changes": [change] * 9})

    assert len(page) < MAX_EVENT_MARKUP + 20 * MAX_DIFF_CHARACTERS
    assert "more events are in the group" in page
    assert page.count("too large for the page") == 4


def test_agents_are_found_by_task_and_turns_without_messages() -> None:
    group = {**traced_group(), "messages": None}

    assert summarize(group, label="line 1").excerpt == "greet-by-name: Greet by name."
    assert "A sub-agent writes the test." in searchable_text(group)
