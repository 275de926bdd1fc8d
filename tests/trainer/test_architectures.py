"""What the trainer and the torch engine compute for many makes is what transformers computes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "architectures.py"

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "makes",
    [
        pytest.param(["gpt_oss", "qwen3_moe", "gemma3_text", "qwen3_next"], id="some"),
        pytest.param([], id="all", marks=pytest.mark.long),
    ],
)
def test_no_logprob_differs(makes: list[str]) -> None:
    found = subprocess.run(
        [sys.executable, str(BENCHMARK), *makes], capture_output=True, text=True, check=False
    )

    assert found.returncode == 0, found.stdout + found.stderr
    assert "WRONG" not in found.stdout
    assert found.stdout.count("served") >= 3
