from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest

from atroposlib.envs.eval import evaluate_log


def test_files_have_the_documented_content(tmp_path: Path) -> None:
    evaluate_log(
        {"eval/acc": np.float64(0.5)},
        eval_dir=tmp_path / "evals",
        task_name="t",
        model_name="m",
        start_time=10.0,
        end_time=12.5,
        generation_parameters={"temperature": 0.0},
        samples=[{"question": "q", "score": np.int64(1), "odd": {1}}],
        verbose=False,
    )

    assert json.loads((tmp_path / "evals" / "metrics.json").read_text()) == {
        "config_general": {
            "model_name": "m",
            "total_evaluation_time_seconds": "2.5",
            "generation_parameters": {"temperature": 0.0},
        },
        "results": {"atropos|t|0": {"eval/acc": 0.5}, "all": {"eval/acc": 0.5}},
    }
    sample = json.loads((tmp_path / "evals" / "samples.jsonl").read_text())
    assert sample == {"question": "q", "score": 1, "odd": "{1}"}


def test_earlier_results_are_kept_together_under_a_number(tmp_path: Path) -> None:
    for value in (1, 2, 3):
        samples = [{"value": value}] if value != 2 else None
        evaluate_log({"a": value}, eval_dir=tmp_path, samples=samples, verbose=False)

    def result(name: str) -> int:
        return int(json.loads((tmp_path / name).read_text())["results"]["all"]["a"])

    assert (result("metrics.json"), result("metrics-2.json"), result("metrics-1.json")) == (3, 2, 1)
    assert json.loads((tmp_path / "samples.jsonl").read_text()) == {"value": 3}
    assert json.loads((tmp_path / "samples-1.jsonl").read_text()) == {"value": 1}
    assert not (tmp_path / "samples-2.jsonl").exists()


def test_without_a_folder_it_prints_and_warns(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.WARNING):
        evaluate_log({"eval/accuracy": 0.625}, task_name="sums")

    assert "data_dir_to_save_evals" in caplog.text
    assert "0.625" in capsys.readouterr().out


def test_verbose_prints_a_table_even_of_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate_log({}, eval_dir=tmp_path, task_name="empty_task")

    assert "empty_task" in capsys.readouterr().out
