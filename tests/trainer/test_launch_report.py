"""The results of a run and its progress display."""

from __future__ import annotations

import io
import json
import logging
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from atroposlib.envs.rollouts import Admission, GroupDelivery
from atroposlib.envs.run_snapshot import RepeatedErrors
from atroposlib.envs.scheduler import RolloutScheduler
from atroposlib.utils.command_parser import prepare_command
from example_trainer.launch.report import (
    RewardPoint,
    RunProgress,
    count_steps,
    curve_text,
    find_drop,
    find_lack,
    find_rewards,
    find_unfilled,
    plain_number,
    read_rewards,
    with_interval,
    write_curve,
    write_rollouts_page,
)
from example_trainer.reporting.page import rolling_mean
from example_trainer.reporting.run_folder import measured_names

POINTS = [RewardPoint(step, min(1.0, 0.3 + step / 100)) for step in range(1, 61)]


def group_line(question: str) -> str:
    messages = [[{"role": "user", "content": question}, {"role": "assistant", "content": "7"}]]
    return json.dumps({"messages": messages, "scores": [1.0], "tokens": [[1]]}) + "\n"


def test_read_rewards_unfinished_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    key = "some_name_0_train/percent_correct"
    lines = [json.dumps({"step": step, key: step / 10}) for step in (1, 2)]
    path.write_text("\n".join([*lines, '{"other": 1, "step": 2}', '{"step": 3, "some_na']))

    assert read_rewards(path) == [RewardPoint(1, 0.1), RewardPoint(2, 0.2)]


def test_count_steps_counts_what_the_trainer_logged(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "train/loss": 0.5}\n{"step": 2, "train/loss": 0.4}\n{"ste')

    assert count_steps(path) == 2
    assert count_steps(tmp_path / "missing.jsonl") == 0


def test_find_drop_returns_the_reason_of_the_last_group_without_use(
    caplog: pytest.LogCaptureFixture,
) -> None:
    figures = SimpleNamespace(num_groups=2)
    reporter = SimpleNamespace(drop_counts=Counter(), run_figures=figures)
    delivery: Any = SimpleNamespace(_reporter=reporter)
    for score in (0.0, 1.0):
        admission = Admission("scores_equal", f"all 8 scores are {score}")
        GroupDelivery._drop_group(delivery, admission)

    assert find_drop(f"{caplog.text}another line\n") == "all 8 scores are 1.0"
    assert find_drop("another line\n") is None

    errors = RepeatedErrors(logging.getLogger(__name__))
    for count in range(1, 11):
        errors.log("a rollout failed, its group is lost", KeyError("answer"))
        shown = "'answer'" if count < 10 else "KeyError: 'answer'"
        assert find_drop(caplog.text) == shown


async def test_find_lack_names_what_the_scheduler_logs_without_an_item(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def no_item() -> None:
        return None

    scheduler = RolloutScheduler(
        run_rollout=lambda _: no_item(), next_item=no_item, count_failure=lambda _: None
    )

    await scheduler.fill(lambda: 1, timeout_s=0)

    assert find_lack(caplog.text) == "get_next_item returned None"
    assert find_lack("another line\n") is None
    skipped = "WARNING x: item skipped: its prompt leaves no room\n"
    assert find_lack(caplog.text + skipped) == "item skipped: its prompt leaves no room"


def test_find_unfilled_names_why_no_batch_followed_the_last_step() -> None:
    waits = "12:00:00 INFO step 3: no full batch yet; environment 0 (maths) reserves 4 sequences"
    step = "12:00:40 INFO step 3/9 | reward 0.1 | loss 0.1"
    unknown = "12:01:20 INFO step 4: no full batch yet; are environments running?"

    assert find_unfilled(waits) == "environment 0 (maths) reserves 4 sequences"
    assert find_unfilled(f"{step}\n{waits}\n{waits.replace('4 s', '5 s')}\n") == (
        "environment 0 (maths) reserves 5 sequences"
    )
    assert find_unfilled(f"{waits}\n{step}\n{unknown}\n") is None


def test_read_rewards_mean_of_nothing_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rewards = [float("nan"), 0.5, float("inf"), 10**400]
    lines = [{"step": i, "sums/train/percent_correct": each} for i, each in enumerate(rewards)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    assert read_rewards(path) == [RewardPoint(1, 0.5)]


def test_curve_of_values_beyond_its_limits_shows_them(tmp_path: Path) -> None:
    points = [RewardPoint(1, 2e6), RewardPoint(2, 0.5)]

    write_curve(points, tmp_path / "curve.png")

    assert "2.0e6" in curve_text(points, width=60, height=12)


def test_find_rewards_says_percent_correct_as_the_environment_logs_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "cat/train/percent_correct": 62.0}')

    metric, points = find_rewards([path], tmp_path / "trainer.jsonl")

    assert metric.summary.format(points[0].reward) == "percent_correct 62"
    assert metric.label == "percent_correct of the environment"


def test_read_rewards_no_file_yet_is_empty(tmp_path: Path) -> None:
    assert read_rewards(tmp_path / "metrics.jsonl") == []


def test_rolling_mean_window_grows_to_its_size() -> None:
    # 1; (1+3)/2; (3+5)/2; (5+0)/2
    assert rolling_mean([1.0, 3.0, 5.0, 0.0], 2) == [1.0, 2.0, 4.0, 2.5]


@pytest.mark.parametrize("points", [POINTS, POINTS[:1]])
def test_write_curve_makes_a_png(points: list[RewardPoint], tmp_path: Path) -> None:
    write_curve(points, tmp_path / "out" / "curve.png")

    assert (tmp_path / "out" / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_curve_text_is_plain_and_rises_from_left_to_right() -> None:
    text = curve_text(POINTS, width=60, height=12)

    lines = text.splitlines()
    drawn = [[i for i, mark in enumerate(line) if "⠀" < mark <= "⣿"] for line in lines]
    rows = [columns for columns in drawn if columns]
    assert "\x1b" not in text
    assert max(map(len, lines)) <= 60
    assert max(rows[0]) > max(rows[-1])  # the highest values stand furthest to the right


def test_curve_is_shown_by_a_terminal_without_its_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(shown, "ascii", write_through=True))

    prepare_command()
    print(curve_text(POINTS))

    assert b"trainer step" in shown.getvalue()


def test_write_rollouts_page_shows_first_and_last_groups(tmp_path: Path) -> None:
    groups = tmp_path / "groups.jsonl"
    groups.write_text("".join(group_line(f"question-{number}-") for number in range(9)))

    count = write_rollouts_page([[groups]], tmp_path / "page.html", groups_per_end=2)

    page = (tmp_path / "page.html").read_text()
    shown = [number for number in range(9) if f"question-{number}-" in page]
    assert count == 4
    assert shown == [0, 1, 7, 8]


def test_write_rollouts_page_unfinished_line_costs_no_group_of_another_file(tmp_path: Path) -> None:
    paths = [tmp_path / "one.jsonl", tmp_path / "other.jsonl"]
    for path in paths:
        path.write_text("".join(group_line(f"{path.stem}-{number}-") for number in range(3)))
    with paths[0].open("a") as file:
        file.write(group_line("killed")[:20])

    write_rollouts_page([[path] for path in paths], tmp_path / "page.html", groups_per_end=4)

    page = (tmp_path / "page.html").read_text()
    assert [number for number in range(3) if f"other-{number}-" in page] == [0, 1, 2]
    assert [number for number in range(3) if f"one-{number}-" in page] == [0, 1, 2]


def test_write_rollouts_page_damaged_bytes_cost_one_line(tmp_path: Path) -> None:
    groups = tmp_path / "groups.jsonl"
    lines = [group_line(f"question-{number}-").encode() for number in range(3)]
    groups.write_bytes(lines[0] + lines[1][:30] + b"\xe6\n" + lines[2])

    write_rollouts_page([[groups]], tmp_path / "page.html", groups_per_end=4)

    page = (tmp_path / "page.html").read_text()
    assert [number for number in range(3) if f"question-{number}-" in page] == [0, 2]


def test_write_rollouts_page_few_groups_are_shown_once(tmp_path: Path) -> None:
    groups = tmp_path / "groups.jsonl"
    groups.write_text("".join(group_line(f"question-{number}-") for number in range(3)))

    assert write_rollouts_page([[groups]], tmp_path / "page.html", groups_per_end=2) == 3


def test_progress_without_a_terminal_writes_plain_lines() -> None:
    out = io.StringIO()
    now = 0.0
    console = Console(file=out, force_terminal=False, soft_wrap=True)
    with RunProgress(console, clock=lambda: now) as progress:
        progress.begin("learn", "Learning [a lot]", expected="a minute")
        progress.update(1, 10, "step 1")  # too soon after the title to say more
        now = 10.0
        progress.update(5, 10, "step 5")
        now = 20.0
        progress.update(5, 10, "step 5")
        now = 40.0
        progress.update(5, 10, "step 5")
        progress.note("done")
        now = 42.0
        progress.end()

    assert out.getvalue().splitlines() == [
        "1. Learning [a lot] (a minute)",
        "   step 5, about 20 s left",
        "   no change for 30 s",
        "   done",
    ]
    assert progress.seconds_by_phase == {"learn": 42.0}


def test_progress_on_a_terminal_draws_and_removes_a_bar() -> None:
    out = io.StringIO()
    with RunProgress(Console(file=out, force_terminal=True, width=100)) as progress:
        progress.begin("learn", "Learning", expected="a minute")
        progress.update(5, 10, "step 5")
        progress._bar.refresh()
        progress.begin("rest", "Resting", expected="a second")

    assert "step 5" in out.getvalue()
    assert list(progress.seconds_by_phase) == ["learn", "rest"]


def test_curve_text_of_a_few_steps_names_no_mean() -> None:
    assert "(each step)" in curve_text(POINTS[:2], width=60, height=12)


@pytest.mark.parametrize(
    ("value", "text"),
    [(-1.388e-17, "0"), (0.0833333, "0.08333"), (-0.5, "-0.5"), (1234.5, "1234"), (2e-6, "2e-06")],
)
def test_plain_number_of_rounding_errors_is_zero(value: float, text: str) -> None:
    assert plain_number(value) == text


def test_evaluation_is_shown_with_its_interval() -> None:
    metrics = {"eval/a": 0.53125, "eval/a_stderr": 0.09, "eval/b": 2.0}
    metrics |= {"eval/a_ci_low": 0.3645, "eval/a_ci_high": 0.6913}

    names = measured_names(metrics)

    assert names == ["eval/a", "eval/b"]
    assert [with_interval(metrics, name) for name in names] == ["0.5312 (0.36 to 0.69)", "2"]
