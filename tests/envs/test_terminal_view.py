"""The view as text: a snapshot in, lines out."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from atroposlib.envs.live_view import RunView, view_lines
from atroposlib.envs.run_snapshot import ErrorLine, RunSnapshot

HOSTILE = "answer \x1b[2J\x1b[31m\x1b]0;owned\x07 \u202etxet\x9b1m\ud800\n\nnext\r" + "long " * 5000
FULL: dict[str, Any] = {
    "name": "gsm8k_0",
    "activity": "rolling out",
    "elapsed_s": 3725.0,
    "step": 3,
    "total_steps": 100,
    "group_size": 8,
    "groups_running": 7,
    "most_groups_running": 16,
    "groups_sending": 2,
    "oldest_rollout_s": 41.6,
    "groups_done": 132,
    "groups_per_s": 0.4,
    "tokens_done": 1_234_567,
    "tokens_per_s": 1890.4,
    "queue_groups": 12,
    "queue_batches": 1.5,
    "staleness_mean": 0.25,
    "staleness_max": 2,
    "scores": (-1.0, 1.0, 1.0, 1.0),
    "drops": {"scores_equal": 12, "too_long": 1},
    "failures": {"ValueError": 3},
    "stragglers": {"retried": 2},
    "errors": (ErrorLine(0.0, "ValueError: the judge did not answer", count=3),),
}


def rendered(
    *, width: int = 80, max_lines: int = 40, encoding: str = "utf-8", **values: Any
) -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=stream, width=width, record=True, force_terminal=True)
    console.print(RunView(RunSnapshot(**{**FULL, **values}), max_lines=max_lines))
    return console.export_text()


def test_view_shows_every_figure_on_eighty_columns() -> None:
    text = rendered()

    for expected in (
        "gsm8k_0",
        "1:02:05",
        "rolling out",
        "step       3 of 100",
        "rollouts   56 (groups: 7 of 16)",
        "longest    42 s, 2 sending",
        "made       132 groups, 24.0/min",
        "tokens/s   1,890 (1.2M made)",
        "queue      12 groups, 1.5 batches",
        "staleness  0.2 steps, at most 2",
        "drops      scores_equal 12, too_long 1",
        "failures   ValueError 3",
        "stragglers retried 2",
        "scores     mean 0.500 of the last 4",
        "-1  25% ██████████ ",
        " 1  75% ██████████████████████████████",
        "3x ValueError: the judge did not answer",
    ):
        assert expected in text
    assert {len(line) for line in text.splitlines()} == {80}


@pytest.mark.parametrize("width", [8, 20, 40, 60, 79, 80, 81, 119, 120, 300])
def test_view_is_as_wide_as_the_terminal_and_never_wider(width: int) -> None:
    lines = rendered(width=width).splitlines()

    assert {len(line) for line in lines} == {min(width, 120)}


def test_view_narrow_puts_each_figure_on_a_line_of_its_own() -> None:
    text = rendered(width=50)

    assert "│ step       3 of 100 " in text
    assert "│ queue      12 groups, 1.5 batches " in text


@pytest.mark.parametrize("max_lines", [1, 3, 5, 8, 12, 16, 20])
def test_view_fits_the_height_of_the_terminal(max_lines: int) -> None:
    text = rendered(max_lines=max_lines)

    assert len(text.splitlines()) <= max(3, max_lines)
    assert "rolling out" in text


def test_view_with_little_height_gives_up_the_histogram_before_the_errors() -> None:
    text = rendered(max_lines=12)

    assert "the judge did not answer" in text
    assert "mean 0.500" in text
    assert "█" not in text


def test_view_renders_hostile_text_inert_and_on_one_line() -> None:
    names = {HOSTILE: 1}
    hostile = rendered(errors=(ErrorLine(0.0, HOSTILE),), drops=names, failures=names, name=HOSTILE)
    harmless = rendered(errors=(ErrorLine(0.0, "x"),), drops={"x": 1}, failures={"x": 1})

    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800]", hostile)
    assert "answer ␛[2J␛[31m␛]0;owned␇ �txet�1m� next␍" not in hostile  # a return is white space
    assert "answer ␛[2J␛[31m␛]0;owned␇ �txet�1m� next" in hostile
    assert len(hostile.splitlines()) == len(harmless.splitlines())


def test_view_interprets_no_markup_of_rich() -> None:
    text = rendered(errors=(ErrorLine(0.0, "[bold]x[/bold] :smile: [link=http://a]y[/link]"),))

    assert "[bold]x[/bold] :smile: [link=http://a]y[/link]" in text


def test_view_wide_characters_keep_the_frame() -> None:
    lines = view_lines(
        RunSnapshot(**{**FULL, "errors": (ErrorLine(0.0, "間違った答え" * 40),)}), width=76
    )

    assert max(line.cell_len for line in lines) <= 76


def test_view_without_service_shows_no_queue() -> None:
    text = rendered(queue_groups=None, step_word="group", most_groups_running=None)

    assert "queue" not in text
    assert "staleness" not in text
    assert "group      3 of 100" in text
    assert "rollouts   56 (groups: 7)" in text


def test_view_at_the_start_says_what_is_not_known_yet() -> None:
    start = RunSnapshot(name="n", activity="a", elapsed_s=0.0, step=0, total_steps=-1)
    text = "\n".join(line.plain for line in view_lines(start, width=76))

    assert "scores     none yet" in text
    assert "step       0" in text
    assert "drops" not in text


def test_view_on_a_terminal_without_unicode_uses_ascii() -> None:
    text = rendered(encoding="ascii", errors=(ErrorLine(0.0, HOSTILE),))

    assert text.isascii()
    assert "75% ##########" in text


def test_view_colours_are_those_of_the_terminal_itself() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=80, force_terminal=True, color_system="truecolor")
    console.print(RunView(RunSnapshot(**FULL)))

    codes = re.findall(r"\x1b\[([\d;]*)m", stream.getvalue())

    assert set(";".join(codes).split(";")) <= {
        "0",
        "1",
        "2",
        "31",
    }  # bold, dim, red: no background, no fixed colour
