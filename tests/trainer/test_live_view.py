"""The live view of the trainer: what it shows, and that the terminal is given back."""

from __future__ import annotations

import io
import logging
import sys

from rich.console import Console

from atroposlib.utils.line_stream import can_show
from example_trainer.run_log import LiveDisplay, TrainingView, sparkline, time_shares

STEP = {
    "train/reward_mean": 0.5,
    "train/loss": -0.25,
    "alignment/k3": 0.001,
    "train/step_time": 4.0,
    "train/data_fetch_time": 1.0,
    "train/forward_time": 1.0,
    "train/backward_time": 2.0,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(view: TrainingView, *, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False, record=True)
    console.print(view)
    return console.export_text()


def test_view_shows_figures_trend_and_time_left():
    view = TrainingView("a/model", 10, activity="training", step=2, elapsed_s=65)
    view.history.extend([{**STEP, "train/reward_mean": 0.1}, STEP])

    text = shown(view)

    assert "step 2 of 10 | 1:05 | about 0:32 left | training" in text
    assert "a/model" in text
    assert "▁█" in text
    assert "waiting 25%  forward 25%  backward 50%" in text


def test_view_before_the_first_step_and_on_a_narrow_terminal():
    assert "loading" in shown(TrainingView("m", 10))
    view = TrainingView("m", 10, step=1)
    view.history.append(STEP)

    assert max(map(len, shown(view, width=30).splitlines())) <= 30


def test_view_is_rendered_while_another_thread_adds_a_step():
    view = TrainingView("m", 10, step=1)

    class RecordReadDuringAppend(dict):
        def __contains__(self, key: object) -> bool:
            view.history.append(STEP)
            return super().__contains__(key)

    view.history.append(RecordReadDuringAppend(STEP))

    assert "reward" in shown(view)


def test_view_shows_control_characters_of_names_as_signs():
    assert "\x1b" not in shown(TrainingView("evil\x1b]0;title\x07", 1, activity="\x1b[2J"))


def test_sparkline_spans_from_lowest_to_highest_and_skips_what_is_no_number():
    assert sparkline([0.0, float("nan"), 7.0], width=8) == "▁ █"
    assert sparkline([1.0, 1.0], width=8) == "▁▁"
    assert sparkline([float("inf")], width=8) == ""


def test_time_shares_of_nothing_are_none():
    assert time_shares([{}]) == []


def test_display_puts_log_lines_above_and_gives_the_terminal_back():
    terminal = Terminal()
    handler = logging.StreamHandler(terminal)
    log = logging.getLogger("test_live_view")
    log.addHandler(handler)
    try:
        with LiveDisplay("model", 3, stream=terminal) as display:
            assert handler.stream is not terminal
            log.warning("a line \x1b[2J")
            display.show_activity("training")
            display.show_step(1, STEP)
        assert handler.stream is terminal
    finally:
        log.removeHandler(handler)

    text = terminal.getvalue()
    assert "a line ␛[2J" in text
    assert "step 1 of 3" in text
    assert "ended" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1


def test_display_leaves_handlers_alone_that_look_their_stream_up():
    log = logging.getLogger("test_live_view")
    handler = logging._StderrHandler()  # what transformers uses; its stream cannot be set
    log.addHandler(handler)
    try:
        with LiveDisplay("model", 3, stream=sys.stderr):
            pass
    finally:
        log.removeHandler(handler)

    assert handler.stream is sys.stderr


def test_display_needs_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    assert can_show(Terminal())
    assert not can_show(io.StringIO())
    monkeypatch.setenv("TERM", "dumb")
    assert not can_show(Terminal())
