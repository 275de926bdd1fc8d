"""Traces of agents: which rollout a sequence is of, tolerant reading, phases, recordings."""

from __future__ import annotations

import json
from typing import Any

import pytest

from atroposlib.agent_tasks.trace import (
    cast_lines,
    drawn_pieces,
    phases_of,
    read_trace,
    rollout_of_row,
    sendable,
    terminal_pieces,
)
from tests.exporting.traced_groups import make_trace, shipped_group


@pytest.mark.parametrize(
    ("traces", "row", "expected"),
    [
        ([{}, None, {}, None, None], 0, (0, 2)),
        ([{}, None, {}, None, None], 1, (0, 2)),
        ([{}, None, {}, None, None], 4, (2, 3)),
        ([None, {}], 0, None),
        ([None, None], 1, None),
        ([{}], 1, None),
        ([{}], -1, None),
        ("text", 0, None),
        (None, 0, None),
    ],
)
def test_sequence_belongs_to_the_rollout_of_the_nearest_earlier_trace(
    traces: Any, row: int, expected: tuple[int, int] | None
) -> None:
    found = rollout_of_row({"traces": traces}, row)

    assert (found and (found.first_row, found.num_rows)) == expected


def test_read_trace_keeps_a_whole_trace() -> None:
    assert read_trace(make_trace()) == make_trace()
    assert read_trace(shipped_group()["traces"][0]) == shipped_group()["traces"][0]


@pytest.mark.parametrize("value", [None, 3, "trace", [], True])
def test_read_trace_refuses_what_is_no_object(value: Any) -> None:
    assert read_trace(value) is None


def test_read_trace_leaves_out_what_has_another_type() -> None:
    events = [
        {"at": "soon", "kind": "turn"},
        {"at": 1, "kind": "dance"},
        {"at": 1, "kind": ["turn"]},
        {"at": 10**400, "kind": "turn"},
        "turn",
        {"at": 2, "kind": "tool_result", "text": 3, "exit_code": "1", "branch": -1},
        {"at": 3, "kind": "tool_result", "text": "ok", "exit_code": None},
    ]

    trace = read_trace(
        {
            "events": events,
            "task": 5,
            "reward": float("nan"),
            "reward_parts": {"a": "b", "c": 1},
            "changes": [3, {"path": 4}, {"path": "/a"}],
            "verifier": "no",
        }
    )

    assert trace == {
        "version": 1,
        "events": [
            {"at": 2.0, "kind": "tool_result"},
            {"at": 3.0, "kind": "tool_result", "text": "ok", "exit_code": None},
        ],
        "reward_parts": {"c": 1},
        "changes": [{"path": "/a"}],
    }


def test_phases_last_until_the_next_and_the_last_until_the_end() -> None:
    trace = read_trace(make_trace())
    assert trace is not None

    phases = phases_of(trace)

    assert [(p.name, p.start_s, p.exit_code) for p in phases] == [
        ("fork", 0.0, None),
        ("agent", 0.02, 0),
        ("verifier", 8.4, 0),
    ]
    assert [round(p.duration_s, 6) for p in phases] == [0.02, 8.38, 1.2]


def test_recording_has_the_agents_output_as_a_terminal_shows_it() -> None:
    trace = read_trace(make_trace())
    assert trace is not None
    trace["events"].append(
        {"at": 9.0, "kind": "output", "stream": "verifier/stdout", "text": "not the agent's"}
    )

    header, *events = map(json.loads, cast_lines(trace))

    assert header["timestamp"] == 1764000000
    assert {"version", "width", "height"} <= header.keys()
    assert events == [
        [0.0, "m", "fork"],
        [0.02, "m", "agent"],
        [0.3, "o", "\x1b[1mstarts\x1b[0m\r\n"],
        [8.1, "o", "\r\nall done\r\n"],
        [8.4, "m", "verifier"],
    ]


def test_line_ends_of_a_terminal_are_kept() -> None:
    trace = read_trace(
        {"events": [{"at": 0, "kind": "output", "stream": "agent/stdout", "text": "a\r\nb\nc\r"}]}
    )
    assert trace is not None

    assert terminal_pieces(trace) == [(0.0, "a\r\nb\r\nc\r")]


@pytest.mark.parametrize(
    ("text", "drawn"),
    [
        ("\x1b[1;31mred\x1b[0m\x1b[2K\x1b[?25l\b\t\x1b[10;20H.", None),
        ("a\x1b]52;c;c2V0\x07b", "ab"),
        ("a\x1b]0;title\x1b\\b", "ab"),
        ("a\x9d52;c;c2V0\x9cb", "ab"),
        ("a\x1bP$q\x22p\x1b\\b\x1b_x\x1b\\c\x1b^x\x1b\\d\x1bXx\x1b\\e", "abcde"),
        ("a\x1b[6nb\x1b[cd\x1b[>0qe\x1b[18tf\x05g\x1bZh\x9bcI", "abdefghcI"),
        ("a\x1b[?1000hb\x1b[?2004hc\x1b[>1ud\x1b[1;2;3;4;5Te", "abcde"),
        ("a\x1bcb\x1b#8c\x1b\x1b]2;t\x07d", "abcd"),
        ("a\x1b[\x1b[6nb\x1b[\x1b\x1b[5ic", "a[b[c"),
    ],
)
def test_recording_has_only_escape_sequences_that_draw(text: str, drawn: str | None) -> None:
    expected = text if drawn is None else drawn

    for size in (1, 2, 3, len(text)):
        pieces = [(0.1 * n, text[n : n + size]) for n in range(0, len(text), size)]
        assert "".join(piece for _, piece in drawn_pieces(pieces)) == expected


def test_recording_of_a_sequence_without_end_is_text() -> None:
    pieces = [(0.0, "a\x1b]52;c;"), *((0.1 * n, "x" * 1000) for n in range(100)), (11.0, "\x07b")]

    drawn = "".join(piece for _, piece in drawn_pieces(pieces))

    assert drawn.isprintable()
    assert drawn.endswith("b")


@pytest.mark.parametrize(
    "unit", ["\x90", "\x1b]", "\x1b[", "\x1b]\x9d", "\x1b[1;", "\x1b(", "\x1b"]
)
def test_recording_of_many_sequences_without_end_takes_linear_time(unit: str) -> None:
    drawn = "".join(piece for _, piece in drawn_pieces([(0.0, unit * 500_000), (0.1, "~")]))

    assert "\x1b" not in drawn


def test_values_of_an_agent_can_be_sent() -> None:
    deep: list[Any] = []
    for _ in range(500):
        deep = [deep]
    values = {
        "a\udcff": ["\ud800", float("nan"), float("-inf"), 10**30, True, None, 1.5],
        "b": deep,
    }

    sent = json.loads(json.dumps(sendable(values), allow_nan=False).encode())

    assert sent.pop("b")
    assert sent == {
        "a\\udcff": ["\\ud800", "nan", "-inf", f"{10**30:#x}", True, None, 1.5],
    }
