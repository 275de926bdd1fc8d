"""The measurements for a GPU, rehearsed on a CPU with tiny models."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
LAYOUTS = ("TRL", "packed", "tree", "flat")


def test_rehearsal_on_a_cpu_runs_every_part(tmp_path: Path) -> None:
    found = tmp_path / "results.json"
    command = [sys.executable, "benchmarks/h200.py", "--device", "cpu", "--tiny"]

    ended = subprocess.run(
        [*command, "--json", str(found)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == 0, f"{ended.stdout[-4000:]}\n{ended.stderr[-4000:]}"
    report = json.loads(found.read_text())
    assert not report["failures"]
    outcomes = {r["part"]: r["outcome"] for r in report["records"] if "outcome" in r}
    assert set(outcomes.values()) == {"completed"}
    assert set(outcomes) == {"device", "step_0.6b", "step_1.5b", "weights", "gap", "demo"}
    speeds = {r["case"] for r in report["records"] if r.get("figure") == "speed"}
    assert {f"16k rows / {layout}" for layout in LAYOUTS} <= speeds
    assert {goal["state"] for goal in report["goals"]} == {"not evaluated"}


def test_part_that_fails_is_reported_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    h200 = importlib.import_module("h200")

    records = h200.run_part("device", folder=tmp_path, device="cuda:99", is_tiny=True)

    failures = h200.failures_of(records)
    assert failures[0].startswith("device: runs (whole part): no: ")
    assert failures[1] == "device: exit code 1"


def test_goals_count_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    h200 = importlib.import_module("h200")
    peaks = {"TRL": 10.0, "packed": 6.0}
    records = [
        {"part": "step_0.6b", "figure": "peak memory", "case": f"plain / {name}", "value": peak}
        for name, peak in peaks.items()
    ]
    speed = {"part": "step_0.6b", "figure": "speed", "case": "16k rows / tree", "value": 29_000.0}

    goals = h200.goals_of([*records, speed])

    assert [goal.state(counts=True) for goal in goals] == ["missed", "not evaluated", "met"]
    assert {goal.state(counts=False) for goal in goals} == {"not evaluated"}
