from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atroposlib.utils.run_log import MetricsLog

pytestmark = pytest.mark.slow


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_local_file_gets_every_call_at_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    log = MetricsLog(use_wandb=False, metrics_path=path, now=lambda: 99.0)
    log.start(project="p", group=None, name="n", config={})

    log.log({"a": np.float32(0.5), "b": [np.int64(2)], "t": log.table(["x"], [["y"]])}, step=3)
    log.log({"a": float("inf")}, step=4)

    assert read(path) == [
        {"step": 3, "time": 99.0, "a": 0.5, "b": [2], "t": {"columns": ["x"], "rows": [["y"]]}},
        {"step": 4, "time": 99.0, "a": float("inf")},
    ]
    assert log.wandb_run is None
    log.finish()
    log.finish()


def test_local_file_is_appended_to_after_a_restart(tmp_path: Path) -> None:
    for step in (1, 2):
        log = MetricsLog(use_wandb=False, metrics_path=tmp_path / "m.jsonl")
        log.log({}, step=step)
        log.finish()

    assert [row["step"] for row in read(tmp_path / "m.jsonl")] == [1, 2]


def test_local_file_keeps_the_rows_of_a_wandb_table_without_a_run(tmp_path: Path) -> None:
    import wandb

    log = MetricsLog(use_wandb=False, metrics_path=tmp_path / "m.jsonl")

    log.log({"t": wandb.Table(columns=["text", "answer"], data=[["a", "4"]])}, step=1)
    log.finish()

    (row,) = read(tmp_path / "m.jsonl")
    assert row["t"] == {"columns": ["text", "answer"], "rows": [["a", "4"]]}


def test_without_a_file_numbers_go_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    log = MetricsLog(use_wandb=False, metrics_path=None)

    with caplog.at_level(logging.INFO):
        log.log({"train/score": 0.25, "t": log.table(["x"], [])}, step=7)

    assert "step 7" in caplog.text
    assert '"train/score": 0.25' in caplog.text


def test_offline_run_is_recorded_without_its_secrets(offline_wandb: Path) -> None:
    log = MetricsLog(use_wandb=True, metrics_path=offline_wandb / "m.jsonl")
    # pragma: allowlist nextline secret
    settings = {"api_key": "sk-topsecret", "group_size": 4}
    log.start(project="atropos", group="g", name="n", config=settings)
    assert log.wandb_run is not None

    log.log({"a": 1, "t": log.table(["text", "score"], [["hello", 1.0]])}, step=2)
    assert dict(log.wandb_run.config) == {"api_key": "***", "group_size": 4}
    log.finish()

    [run_file] = offline_wandb.glob("wandb/offline-run-*/run-*.wandb")
    # wandb's own service process writes the file, a moment after `finish` has returned.
    deadline = time.monotonic() + 60
    while b"group_size" not in run_file.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.02)
    recorded = run_file.read_bytes()
    assert b"group_size" in recorded
    assert b"sk-topsecret" not in recorded
    [row] = read(offline_wandb / "m.jsonl")
    assert row["t"] == {"columns": ["text", "score"], "rows": [["hello", 1.0]]}
    assert log.wandb_run is None


def test_disabled_wandb_still_writes_the_local_file(
    offline_wandb: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    log = MetricsLog(use_wandb=True, metrics_path=offline_wandb / "m.jsonl")
    log.start(project=None, group=None, name=None, config={})

    log.log({"a": 1, "t": log.table(["x"], [[1]])}, step=0)
    log.finish()

    assert read(offline_wandb / "m.jsonl")[0]["a"] == 1
    assert not list(offline_wandb.glob("wandb/offline-run-*"))


def test_wandb_that_cannot_start_warns_with_the_remedy_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import wandb

    def fail(**_: Any) -> None:
        raise wandb.errors.UsageError("no API key configured")

    monkeypatch.setattr(wandb, "init", fail)
    log = MetricsLog(use_wandb=True, metrics_path=tmp_path / "m.jsonl")

    with caplog.at_level(logging.WARNING):
        log.start(project=None, group=None, name=None, config={})
    log.log({"a": 1}, step=0)
    log.finish()

    assert "no API key configured" in caplog.text
    assert "WANDB_MODE=offline" in caplog.text
    assert read(tmp_path / "m.jsonl")[0]["a"] == 1


def test_wandb_that_fails_later_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class BrokenRun:
        def log(self, *_: Any, **__: Any) -> None:
            raise OSError("disk full")

        finish = log

    log = MetricsLog(use_wandb=True, metrics_path=tmp_path / "m.jsonl")
    log.wandb_run = BrokenRun()

    with caplog.at_level(logging.WARNING):
        log.log({"a": 1}, step=5)
        log.finish()

    assert "step 5: disk full" in caplog.text
    assert read(tmp_path / "m.jsonl")[0]["step"] == 5


def test_local_file_that_ends_within_a_line_goes_on_with_a_new_one(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text('{"step": 1}\n{"ste')
    log = MetricsLog(use_wandb=False, metrics_path=tmp_path / "m.jsonl")

    log.log({}, step=2)
    log.finish()

    first, torn, last = (tmp_path / "m.jsonl").read_text().splitlines()
    assert (first, torn) == ('{"step": 1}', '{"ste')
    assert json.loads(last)["step"] == 2


def test_named_wandb_run_is_continued_and_gets_no_step_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    class ContinuedRun:
        starting_step = 4  # the run has steps 0 to 3

        def __init__(self) -> None:
            self.steps: list[int] = []

        def log(self, metrics: dict[str, Any], *, step: int) -> None:
            self.steps.append(step)

    opened: dict[str, Any] = {}
    run = ContinuedRun()
    monkeypatch.setattr(wandb, "init", lambda **options: opened.update(options) or run)
    log = MetricsLog(use_wandb=True, metrics_path=tmp_path / "m.jsonl")

    log.start(project="p", group="g", name=None, config={}, run_id="abc")
    for step in (3, 4, 5):
        log.log({"a": 1}, step=step)

    assert (opened["id"], opened["resume"]) == ("abc", "allow")
    assert run.steps == [4, 5]
    assert [row["step"] for row in read(tmp_path / "m.jsonl")] == [3, 4, 5]


@pytest.mark.slow
def test_start_in_a_terminal_without_an_account_does_not_ask_for_one(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path\n"
        "from atroposlib.utils.run_log import MetricsLog\n"
        "log = MetricsLog(use_wandb=True, metrics_path=Path('m.jsonl'))\n"
        "log.start(project='p', group=None, name=None, config={})\n"
        "log.log({'a': 1}, step=0)\n"
        "log.finish()\n"
    )
    known = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    ours, theirs = os.openpty()  # a terminal in which nothing is typed

    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**known, "HOME": str(tmp_path), "PYTHONPATH": str(Path.cwd())},
        stdin=theirs,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    os.close(ours)
    os.close(theirs)
    assert done.returncode == 0, done.stderr
    assert "wandb is not available (no account: run `wandb login`" in done.stderr
    assert [row["step"] for row in read(tmp_path / "m.jsonl")] == [0]
