"""The report of a finished run, written again from its folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from example_trainer.launch.options import EnvironmentPlan, RunPaths
from example_trainer.reporting.page import HeldOut
from example_trainer.reporting.run_folder import find_run
from example_trainer.reporting.writing import main, write_report, write_settings
from tests.trainer.reporting.test_report import record
from tests.trainer.test_launch_report import group_line


def make_run(folder: Path, names: list[str]) -> RunPaths:
    """Write the files of a run of two steps as `atropos-train` does, without its report."""
    paths = RunPaths(folder)
    for name in names:
        plan = EnvironmentPlan(program=(), folder=folder / "environments" / name, name=name)
        plan.folder.mkdir(parents=True)
        plan.metrics.write_text(f'{{"step": 1, "{name}_0_train/percent_correct": 0.5}}\n')
        plan.groups.write_text(group_line(f"question of {name}"))
    paths.trainer_metrics.write_text("".join(f"{json.dumps(record(i))}\n" for i in (1, 2)))
    paths.rollouts.write_text("rollouts")
    write_settings(paths.trainer_metrics, {"model_name": "org/tiny", "training_steps": 2}, {})
    return paths


def write_summary(paths: RunPaths, names: list[str], *, steps: int = 2) -> None:
    evaluated = {name: {"eval/score": 0.5, "eval/score_ci_low": 0.25} for name in names}
    summary = {
        "environments": names,
        "steps": steps,
        "evaluations_before": {names[0]: {"eval/score": 0.125}},
        "evaluations_after": evaluated,
        "seconds": 75.0,
    }
    paths.summary.write_text(json.dumps(summary))


@pytest.mark.parametrize("names", [["sums"], ["words", "sums"]])
def test_report_again_is_that_of_the_run(tmp_path: Path, names: list[str]) -> None:
    paths = make_run(tmp_path, names)
    write_summary(paths, names)
    plans = [EnvironmentPlan(program=(), folder=tmp_path / "environments" / n) for n in names]
    held_out = [HeldOut(f"{n}: eval/score", None if i else 0.125, 0.5) for i, n in enumerate(names)]
    write_report(
        paths.trainer_metrics,
        paths.report,
        environment_path=plans[0].metrics if len(names) == 1 else None,
        held_out=held_out,
        title=f"Training of tiny on {', '.join(names)}",
        seconds=75.0,
        groups=[[plan.groups] for plan in plans],
        rollouts_path=paths.rollouts,
    )
    by_the_run = paths.report.read_text()

    main([str(tmp_path)])

    assert paths.report.read_text() == by_the_run
    assert f"question of {names[0]}" in by_the_run


def test_report_of_an_unfinished_run_has_its_environments(tmp_path: Path) -> None:
    paths = make_run(tmp_path, ["sums"])

    main([str(tmp_path)])

    page = paths.report.read_text()
    assert "Training of tiny on sums" in page
    assert "<dt>accuracy</dt><dd>0.5</dd>" in page
    assert "question of sums" in page


def test_results_of_an_earlier_part_of_a_run_are_left_out(tmp_path: Path) -> None:
    paths = make_run(tmp_path, ["sums"])
    write_summary(paths, ["sums"], steps=1)

    found = find_run(paths.trainer_metrics, planned_steps=2)

    assert (found.held_out, found.seconds) == ([], None)


def test_folder_of_the_demo_has_its_environment_itself(tmp_path: Path) -> None:
    (tmp_path / "environment_metrics.jsonl").touch()
    (tmp_path / "groups.jsonl").touch()
    (tmp_path / "groups_1.jsonl").touch()
    summary = {"title": "T", "accuracy_before": 0.5, "accuracy_after": 0.75, "num_held_out": 8}
    (tmp_path / "summary.json").write_text(json.dumps({**summary, "steps": 3}))

    found = find_run(tmp_path / "trainer_metrics.jsonl", planned_steps=3)

    assert found.environment_path == tmp_path / "environment_metrics.jsonl"
    assert [path.name for path in found.groups[0]] == ["groups.jsonl", "groups_1.jsonl"]
    assert found.held_out == [HeldOut("share of right answers", 0.5, 0.75, 8)]
    assert found.title == "T"


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"environments": 1, "evaluations_after": {"a": {"b": "c"}, "d": 1}, "seconds": []}',
    ],
)
def test_summary_of_another_shape_is_not_used(tmp_path: Path, text: str) -> None:
    (tmp_path / "summary.json").write_text(text)

    found = find_run(tmp_path / "metrics.jsonl", planned_steps=None)

    assert (found.held_out, found.names, found.seconds) == ([], [], None)
    assert found.environment_path is None
