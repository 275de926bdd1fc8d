"""A report at the end of a run is written whatever the metrics, settings and groups are."""

from __future__ import annotations

import json

import pytest

from atroposlib.frontend.jsonl2html import create_html_for_group
from atroposlib.viewer.rollouts import group_of
from example_trainer.reporting.writing import write_report

HUGE = "1" + "0" * 400
DEEP = "[" * 100_000
GOOD = '{"step": 1, "train/loss": 0.5, "train/reward_mean": 0.5}\n'
EVIL = "</script><img src=x onerror=alert(1)>\"'\u2028\u202e\x00"

METRICS = (
    '{"step": Infinity, "train/loss": 1}',
    f'{{"step": {HUGE}, "train/loss": 1}}',
    f'{{"step": 2, "train/loss": {HUGE}, "train/reward_mean": {HUGE}}}',
    '{"step": 2, "train/loss": "<b>", "train/reward_mean": "x"}',
    '{"step": 2, "train/loss": -1.7e308, "train/reward_mean": 1.7e308, "train/step_time": 1e308}',
    '{"step": 2, "train/loss": 1, "time": 1e300}',
    '{"step": 2, "train/loss": 1, "time": NaN}',
    '{"step": 2, "train/loss": 1, "train/skipped_steps": ["x"]}',
    '{"step": 2, "train/loss": 1, "train/compute_time": 1, "train/forward_time": "x"}',
    '{"step": 2, "train/loss": "\\ud800"}',
    DEEP,
    f'{{"step": 2, "train/loss": 1, "a": {DEEP}',
)


def write(folder, *, metrics=GOOD, groups=(), **arguments):
    (folder / "metrics.jsonl").write_text(metrics)
    report = folder / "report.html"
    write_report(folder / "metrics.jsonl", report, groups=groups, **arguments)
    return report.read_text()


@pytest.mark.parametrize("line", METRICS)
def test_report_of_absurd_metrics_is_written(tmp_path, line):
    page = write(tmp_path, metrics=GOOD + line + "\n")
    assert "<b>" not in page.replace("<figcaption><b>", "").replace('<b class="', "")


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 1, "x/percent_correct": 1.7e308}\n{"step": 2, "x/percent_correct": -1.7e308}',
        '{"step": NaN, "x/percent_correct": 1}',
        f'{{"step": {HUGE}, "x/percent_correct": {HUGE}}}',
        DEEP,
    ],
)
def test_report_of_absurd_metrics_of_an_environment_is_written(tmp_path, line):
    (tmp_path / "env.jsonl").write_text(line)
    assert "train/loss" not in write(tmp_path, environment_path=tmp_path / "env.jsonl")


@pytest.mark.parametrize(
    "settings", ['{"settings": [1], "changed": "x"}', '{"settings": null}', DEEP]
)
def test_report_without_usable_settings_is_written(tmp_path, settings):
    (tmp_path / "metrics_settings.json").write_text(settings)
    assert "settings of the run were not found" in write(tmp_path)


def test_text_of_groups_is_inert_and_scores_too_large_are_left_out(tmp_path):
    chat = [{"role": EVIL, "content": EVIL}, {"role": "assistant", "content": EVIL}]
    good = json.dumps({"messages": [chat], "scores": [1]})
    absurd = f'{{"messages": ["x", "y"], "scores": [{HUGE}, [[2]]]}}'
    file = tmp_path / "groups.jsonl"
    file.write_text("\n".join([good, absurd, DEEP, good, '{"messages": [["x"']))
    page = write(tmp_path, groups=[[file]])
    assert "&lt;img src=x" in page
    assert not {"<img", "</script>", "\u2028", "\u202e"} & {
        text for text in ("<img", "</script>", "\u2028", "\u202e") if text in page
    }


def test_line_separator_in_a_name_of_a_metric_does_not_end_its_line(tmp_path):
    line = json.dumps({"step": 2, "train/loss": 1, "a\u2028b": 1}, ensure_ascii=False)
    assert "could not be read" not in write(tmp_path, metrics=GOOD + line)


def test_scores_whose_squares_or_sums_overflow_have_an_advantage():
    group = group_of({"messages": ["x", "y"], "scores": [1e308, 1.0]})
    assert group.advantage(group.rollouts[0]) == pytest.approx(1.0)


def test_page_of_rollouts_takes_integers_larger_than_any_float():
    assert 'data-mean=""' in create_html_for_group(
        {"messages": ["x", "y"], "scores": [10**400, 2]}, 0
    )
