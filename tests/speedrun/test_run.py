"""One entry through the whole command: four processes, the clock, the journal, the result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from example_trainer.demo.settings import REPOSITORY
from example_trainer.speedrun import rules

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
FASTEST = REPOSITORY / "benchmarks" / "speedrun" / "forty-steps.yaml"


def test_fastest_entry_with_few_steps_is_measured_and_its_batches_are_read(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    lines = FASTEST.read_text(encoding="utf-8").splitlines()
    entry = tmp_path / FASTEST.name
    entry.write_text(
        "\n".join("  steps: 3" if line.startswith("  steps:") else line for line in lines)
    )
    output = tmp_path / "result.json"
    command = [sys.executable, "-m", "example_trainer.speedrun.cli", "run", str(entry)]
    command += ["--seed", "0", "--files", str(tmp_path / "files"), "--output", str(output)]

    finished = subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )

    assert output.is_file(), finished.stdout + finished.stderr
    result = rules.read_result(output)
    [run] = result.runs
    # Three steps are too few, and one seed is not three: everything else is in order.
    assert finished.returncode == 1
    assert all("runs of the seeds" in each or "below 80%" in each
               for each in rules.violations(result, rules.read_entry(entry)))  # fmt: skip
    assert (run.consumed.steps, run.consumed.held_out_prompts) == (3, 0)
    assert run.num_correct > 0
    assert 0 < run.consumed.completion_tokens < run.consumed.tokens
    assert json.loads(output.read_text(encoding="utf-8"))["machine"]["cores"] == rules.NUM_CORES
