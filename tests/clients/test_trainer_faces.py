"""Batches as the data classes of verl and SkyRL, in environments with the real packages."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.installing import NotInstallableError, packages_of
from tests.clients.running import PROGRAMS
from tests.envs import conftest as envs_conftest
from tests.envs.live_service import LiveService

service = envs_conftest.service
pytestmark = pytest.mark.clients

REPOSITORY = Path(__file__).parents[2]
# Two turns with a token of the environment between them, and one turn; then a longer prompt.
TWO_TURNS = {
    "tokens": [[1, 2, 7, 9, 8], [1, 2, 6]],
    "masks": [[-100, -100, 7, -100, 8], [-100, -100, 6]],
    "scores": [1.0, 0.0],
    "inference_logprobs": [[1.0, 1.0, -0.5, 1.0, -0.25], [1.0, 1.0, -2.0]],
    "reward_parts": [{"exact": 1.0}, {"exact": 0.0}],
    "finish_reasons": ["stop", "length"],
}
LONG_PROMPT = {
    "tokens": [[3, 4, 5, 6, 7], [3, 4, 5, 6, 8]],
    "masks": [[-100] * 4 + [7], [-100] * 4 + [8]],
    "scores": [-1.0, -1.0],
    "inference_logprobs": [[1.0] * 4 + [-0.5], [1.0] * 4 + [-1.5]],
    "reward_parts": [{"exact": -1.0}, {"exact": -1.0}],
    "finish_reasons": ["stop", "stop"],
}


def batches_in(
    name: str, service: LiveService, tmp_path: Path, **options: Any
) -> list[dict[str, Any]]:
    """Return what a program of a trainer made of two batches; the run has two steps after it."""
    pytest.importorskip("torch")
    pytest.importorskip("ray")
    try:
        packages = packages_of(name, limit_s=600, **options)
    except NotInstallableError as error:
        pytest.skip(str(error))
    service.start()
    page = (REPOSITORY / "docs" / "other_trainers.md").read_text(encoding="utf-8")
    module = f"atroposlib.api.trainers.{name}"
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if module in b)
    program = tmp_path / "block.py"
    program.write_text(block.replace("http://localhost:8000", service.url), encoding="utf-8")
    for group in (TWO_TURNS, LONG_PROMPT) * 2:
        httpx.post(f"{service.url}/scored_data", json=group).raise_for_status()

    run = subprocess.run(
        [sys.executable, str(PROGRAMS / f"{name}_batches.py"), str(program)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(packages)]),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        },
    )

    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    status = httpx.get(f"{service.url}/status").json()
    assert status["current_step"] == 2
    assert status.get("leased_batches", 0) == 0
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def test_verl_gets_every_token_mask_and_logprob_at_its_place(
    service: LiveService, tmp_path: Path
) -> None:
    first, second = batches_in("verl", service, tmp_path)

    assert first["prompts"] == [[0, 0, 1, 2], [0, 0, 1, 2], [3, 4, 5, 6], [3, 4, 5, 6]]
    assert first["responses"] == [[7, 9, 8], [6, 0, 0], [7, 0, 0], [8, 0, 0]]
    assert first["response_mask"] == [[1, 0, 1], [1, 0, 0], [1, 0, 0], [1, 0, 0]]
    assert first["input_ids"][0] == [0, 0, 1, 2, 7, 9, 8]
    assert first["attention_mask"][:2] == [[0, 0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0, 0]]
    assert first["position_ids"][:2] == [[0, 0, 0, 1, 2, 3, 4], [0, 0, 0, 1, 2, 0, 0]]
    assert first["rollout_log_probs"] == [
        [-0.5, 0.0, -0.25],
        [-2.0, 0.0, 0.0],
        [-0.5, 0.0, 0.0],
        [-1.5, 0.0, 0.0],
    ]
    assert first["rm_scores"] == [[0, 0, 1.0], [0.0, 0, 0], [-1.0, 0, 0], [-1.0, 0, 0]]
    assert first["token_level_scores"] == first["token_level_rewards"] == first["rm_scores"]
    assert first["exact"] == [1.0, 0.0, -1.0, -1.0]
    assert first["finish_reason"] == ["stop", "length", "stop", "stop"]
    assert first["__num_turns__"] == [2, 1, 1, 1]
    assert len(set(first["uid"])) == 2
    assert not set(first["uid"]) & set(second["uid"])
    # Scores 1 and 0 have the mean 0.5 and the sample deviation 0.7071; the others are equal.
    assert [[round(value, 3) for value in row] for row in first["computed"]] == [
        [0.707, 0.0, 0.707],
        [-0.707, 0.0, 0.0],
        [0.0, 0.0, 0.0],
        [0.0, 0.0, 0.0],
    ]


def test_skyrl_accepts_the_output_and_trains_on_the_sampled_tokens_only(
    service: LiveService, tmp_path: Path
) -> None:
    first, second = batches_in("skyrl", service, tmp_path, python_version="3.12")

    assert first["sequences"] == [
        [1, 2, 7, 9, 8],
        [0, 0, 1, 2, 6],
        [3, 4, 5, 6, 7],
        [3, 4, 5, 6, 8],
    ]
    assert first["loss_mask"] == [[1, 0, 1], [0, 0, 1], [0, 0, 1], [0, 0, 1]]
    assert first["rewards"] == [[0, 0, 1.0], [0, 0, 0.0], [0, 0, -1.0], [0, 0, -1.0]]
    assert first["logprobs"] == [[-0.5, 0, -0.25], [0, 0, -2.0], [0, 0, -0.5], [0, 0, -1.5]]
    assert first["stop_reasons"] == ["stop", "length", "stop", "stop"]
    assert first["env_metrics"][0] == {"exact": 1.0}
    assert first["rollout_metrics"]["atropos/trained_tokens_mean"] == 1.25
    assert second["sequences"] == first["sequences"]
