"""The metrics of a run that was killed and resumed: every step once, wherever they are read."""

from __future__ import annotations

import json

import pytest

from example_trainer.reporting.writing import settings_path
from example_trainer.run_log import length_through, open_run_log
from tests.trainer.tiny import tiny_config


def live(config, run_id, *, after, through, life=0):
    """Log the steps of one life of a run."""
    log = open_run_log(config, run_id=run_id, steps_done=after)
    for step in range(after + 1, through + 1):
        log.log({"train/loss": 1.0 / step, "life": life}, step=step)
    log.finish()


def logged(path):
    return [(line["step"], line["life"]) for line in map(json.loads, path.read_text().splitlines())]


@pytest.fixture
def metrics_path(tmp_path):
    return tmp_path / "saves" / "metrics.jsonl"


def test_steps_that_are_trained_again_stand_in_the_file_once(tmp_path, metrics_path):
    config = tiny_config(tmp_path)
    live(config, "run", after=0, through=5)

    live(config, "run", after=3, through=6, life=1)

    assert logged(metrics_path) == [(1, 0), (2, 0), (3, 0), (4, 1), (5, 1), (6, 1)]


@pytest.mark.parametrize("logged_steps", [2, 0], ids=["some", "none"])
def test_step_that_a_checkpoint_holds_and_the_file_lacks_is_logged_from_it(
    tmp_path, metrics_path, logged_steps
):
    config = tiny_config(tmp_path)
    live(config, "run", after=0, through=logged_steps)
    steps_done = logged_steps + 1
    of_checkpoint = {"train/loss": 0.5, "life": 0}

    open_run_log(config, run_id="run", steps_done=steps_done, last_metrics=of_checkpoint).finish()
    open_run_log(config, run_id="run", steps_done=steps_done, last_metrics=of_checkpoint).finish()

    assert logged(metrics_path) == [(step, 0) for step in range(1, steps_done + 1)]


def test_run_without_a_checkpoint_begins_its_file_again(tmp_path, metrics_path):
    config = tiny_config(tmp_path)
    live(config, "run", after=0, through=5)

    live(config, "run", after=0, through=2, life=1)

    assert logged(metrics_path) == [(1, 1), (2, 1)]


@pytest.mark.parametrize("torn", ['{"step": 4, "train/lo', '{"step": 3, "life": 0}', "\x00"])
def test_last_line_that_was_half_written_is_dropped(tmp_path, metrics_path, torn):
    config = tiny_config(tmp_path)
    live(config, "run", after=0, through=2)
    with metrics_path.open("a") as file:
        file.write(torn)

    live(config, "run", after=2, through=3, life=1)

    assert logged(metrics_path) == [(1, 0), (2, 0), (3, 1)]


def test_another_run_at_the_same_path_keeps_the_earlier_ones_aside(tmp_path, metrics_path):
    config = tiny_config(tmp_path)
    for life, run_id in enumerate(("first", "second", "third")):
        live(config, run_id, after=0, through=2, life=life)

    assert logged(metrics_path) == [(1, 2), (2, 2)]
    for number in (1, 2):
        aside = metrics_path.with_name(f"metrics.{number}.jsonl")
        assert logged(aside) == [(1, number - 1), (2, number - 1)]
        assert settings_path(aside).is_file()


def test_length_ends_before_the_first_line_of_a_later_step():
    lines = [b'{"step": 1}\n', b'{"step": 2}\n', b'{"step": 3}\n', b'{"step": 2}\n']

    assert length_through(lines, 2) == 24
    assert length_through(lines, 0) == 0
    assert length_through([], 2) == 0
    assert length_through([b'{"step": 1}\n', b"[]\n", b'{"step": 2}\n'], 2) == 12


def test_tensorboard_shows_each_step_of_a_resumed_run_once(tmp_path, metrics_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = tiny_config(tmp_path, use_tensorboard=True)
    live(config, "run", after=0, through=5)
    live(config, "run", after=3, through=6, life=1)

    events = EventAccumulator(str(metrics_path.parent / "tensorboard")).Reload()

    shown = [(event.step, event.value) for event in events.Scalars("life")]
    assert shown == [(1, 0), (2, 0), (3, 0), (4, 1), (5, 1), (6, 1)]
