"""The report of a run: newest run, findings, escaping, the door."""

from __future__ import annotations

import json
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from example_trainer.reporting.page import HeldOut, read_records
from example_trainer.reporting.writing import (
    find,
    main,
    settings_path,
    write_report,
    write_settings,
)

EVIL = "</td><script>alert(1)</script><img src=x onerror=alert(1)>"


def record(step, **extra):
    return {"step": step, "time": 1.0e9 + step, "train/loss": 1.0 / step, **extra}


def lines_of(*records):
    return [json.dumps(one) for one in records]


def write_metrics(tmp_path, *records):
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(lines_of(*records)) + "\n")
    return path


class Tags(HTMLParser):
    """Names of all tags; fails on one that is not closed in order."""

    VOID = frozenset({"meta"})

    def __init__(self, text):
        super().__init__()
        self.names, self.open = [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.names.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_records_of_a_continued_run_count_once_and_a_half_written_line_is_counted():
    lines = [*lines_of(record(1), record(2), record(3), record(2, late=1), record(3)), '{"step":']

    found = read_records(lines)

    assert [one["step"] for one in found.steps] == [1, 2, 3]
    assert found.steps[1]["late"] == 1
    assert found.num_unreadable == 1


def test_records_of_an_older_run_in_the_same_file_are_left_out():
    found = read_records(lines_of(record(1), record(2), record(3), record(1, new=1)))

    assert [one["step"] for one in found.steps] == [1]
    assert found.steps[0]["new"] == 1


def test_records_without_a_loss_are_no_steps():
    assert read_records(lines_of({"step": 4, "benchmark/mode": "none"})).steps == []


@pytest.mark.parametrize(
    ("metrics", "word"),
    [
        ([{"grpo/clipped_fraction": 0.4}], "clip range"),
        ([{"alignment/diff_abs_mean": 0.2}], "dtypes"),
        ([{"train/staleness_mean": 5.0}], "several steps old"),
        ([{"train/truncation_rate": 0.5}], "completions were truncated"),
        ([{"train/skipped_steps": 1.0}], "1 of 1 steps were skipped"),
        ([{"train/loss": float("nan")}], "NaN at 1 steps, first at 1"),
        ([{"train/entropy": 1.0}] + [{"train/entropy": 0.1}] * 3, "from 1 to 0.1"),
        ([{"train/step_time": 4.0, "train/data_fetch_time": 3.0}] * 4, "75% of the time"),
    ],
)
def test_findings_name_what_is_conspicuous(metrics, word):
    found = find([record(i, **extra) for i, extra in enumerate(metrics, start=1)])

    assert len(found) == 1
    assert word in found[0]


def test_findings_of_a_healthy_run_are_none():
    healthy = {"grpo/clipped_fraction": 0.1, "train/entropy": 0.8, "train/staleness_mean": 1.0}

    assert find([record(i, **healthy) for i in range(1, 9)]) == []
    assert find([]) == []


def test_report_is_one_file_that_asks_for_nothing_and_runs_nothing(tmp_path):
    times = {
        "train/compute_time": 2.0,
        "train/forward_time": 0.5,
        "train/backward_time": 1.0,
        "train/data_fetch_time": 0.1,
        "train/sync_time": 0.2,
    }
    metrics = write_metrics(
        tmp_path, *(record(i, **times, **{"alignment/k3": 0.1 * i}) for i in range(1, 61))
    )
    settings = {
        "model_name": f"a/{EVIL}",
        "training_steps": 60,
        "api_key": "hidden-word",  # pragma: allowlist secret
    }
    write_settings(metrics, settings, {"model_name": EVIL})

    write_report(metrics, tmp_path / "report.html")

    page = (tmp_path / "report.html").read_text()
    names = Tags(page).names
    assert names.count("svg") == 3  # loss, KL, time
    assert not {"script", "img", "link", "iframe"} & set(names)
    assert "http:" not in page
    assert "https:" not in page
    assert "hidden-word" not in page + settings_path(metrics).read_text()
    assert "60 of 60" in page
    assert "50 more" in page


@pytest.mark.parametrize("records", [[], [record(1)], [record(1, **{"train/loss": EVIL})]])
def test_report_of_hardly_anything_is_a_page(tmp_path, records):
    metrics = write_metrics(tmp_path, *records)

    assert write_report(metrics, tmp_path / "report.html") == len(records)

    assert "script" not in Tags((tmp_path / "report.html").read_text()).names


def test_report_shows_the_accuracy_of_an_environment(tmp_path):
    metrics = write_metrics(tmp_path, record(1), record(2))
    environment = tmp_path / "environment.jsonl"
    environment.write_text(
        '{"step": 1, "sums_0_train/percent_correct": 0.25}\n{"step": 2, "other": 1}\nbroken\n'
        '{"step": 2, "sums_0_train/percent_correct": 0.75}\n'
    )

    write_report(metrics, tmp_path / "report.html", environment_path=environment)

    assert "0.25 → 0.75" in (tmp_path / "report.html").read_text()


def test_door_takes_a_folder_and_says_where_the_report_is(tmp_path, capsys):
    write_metrics(tmp_path, record(1))

    main([str(tmp_path)])

    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}: 1 steps\n"


def test_report_is_written_although_the_reader_of_its_name_has_left(tmp_path, leave_reader):
    write_metrics(tmp_path, record(1))
    leave_reader()

    main([str(tmp_path)])

    assert (tmp_path / "report.html").is_file()


def test_door_says_what_cannot_be_read(tmp_path, capsys):
    with pytest.raises(SystemExit) as ending:
        main([str(tmp_path / "no.jsonl")])

    assert ending.value.code == 2
    assert "no.jsonl: cannot be read (No such file" in capsys.readouterr().err


def test_door_says_that_a_folder_is_no_run(tmp_path, capsys):
    with pytest.raises(SystemExit) as ending:
        main([str(tmp_path)])

    assert ending.value.code == 2
    assert "has no metrics of a trainer (metrics.jsonl or trainer_" in capsys.readouterr().err


@pytest.mark.parametrize("records", [[], [{"step": 1, "sums_0_train/percent_correct": 0.5}]])
def test_door_refuses_metrics_without_a_step_of_a_trainer(tmp_path, capsys, records):
    metrics = write_metrics(tmp_path, *records)

    with pytest.raises(SystemExit) as ending:
        main([str(metrics)])

    assert ending.value.code == 2
    said = capsys.readouterr().err
    assert "metrics.jsonl: no metrics of a trainer" in said
    assert "with --environment" in said
    assert not (tmp_path / "report.html").exists()


def test_door_loads_nothing_heavy():
    script = (
        "import example_trainer.reporting.writing, sys; "
        "print(*(m for m in ('torch', 'matplotlib', 'transformers', 'pydantic') "
        "if m in sys.modules))"
    )

    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert (found.returncode, found.stdout) == (0, "\n")


def test_report_begins_with_the_held_out_result_and_says_what_each_reward_is(tmp_path):
    metrics = write_metrics(tmp_path, *(record(i, **{"train/reward_mean": 0.5}) for i in (1, 2)))
    environment = tmp_path / "environment.jsonl"
    environment.write_text(
        '{"step": 1, "sums_0_train/reward/format": 0.25, "sums_0_train/percent_correct": 0.5}\n'
        '{"step": 2, "sums_0_train/reward/format": 0.75, "sums_0_train/reward/<b>": "x"}\n'
    )
    results = [HeldOut("share of right answers", 0.125, 0.5, 40), HeldOut(EVIL, None, 1.0)]

    write_report(metrics, tmp_path / "report.html", environment_path=environment, held_out=results)

    page = (tmp_path / "report.html").read_text()
    Tags(page)
    assert "share of right answers: 0.125 before, 0.5 after (+0.375), 40 problems" in page
    assert "1 after the training" in page
    assert page.index("Held-out result") < page.index('class="facts"')
    assert "<dt>reward</dt><dd>mean score of the trajectories" in page
    assert "<dt>format</dt><dd>a named part of the environment" in page
    assert "Parts of the reward" in page
    assert "<script" not in page


def test_worth_checking_names_the_worst_value_and_its_step():
    steps = [
        record(i, **{"train/truncation_rate": rate}) for i, rate in ((1, 0.3), (2, 0.9), (3, 0.5))
    ]

    [finding] = find(steps)

    assert "is 0.5 in the last steps, above 0.2 (worst: 0.9 at step 2): many completions" in finding
