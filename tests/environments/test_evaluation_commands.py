"""`evaluate` of a shipped evaluation as a user types it: killed, continued, refused."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.byte_tokenizer import save_byte_tokenizer
from tests.envs.live_service import until
from tests.fakes import ScriptedEngine
from tests.scripted_engine import Fault

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "environments" / "data" / "mmlu_sample"


@asynccontextmanager
async def evaluating(
    engine: ScriptedEngine, folder: Path, *flags: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(ROOT / "environments/eval_environments/mmlu_eval.py"),
        "evaluate",
        *("--env.dataset_path", str(SAMPLE), "--env.tokenizer_name", str(folder / "tokenizer")),
        *("--env.data_dir_to_save_evals", str(folder / "evals"), "--env.use_wandb", "false"),
        *("--openai.base_url", engine.base_url, "--openai.model_name", "scripted"),
        *flags,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def output_of(process: asyncio.subprocess.Process) -> str:
    output, _ = await asyncio.wait_for(process.communicate(), timeout=120)
    return output.decode()


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def test_killed_evaluation_goes_on_from_its_finished_samples(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path / "tokenizer")
    progress = tmp_path / "evals" / "progress.jsonl"
    one_by_one = ("--openai.num_requests_for_eval", "1", "--openai.num_max_requests_at_once", "1")
    async with ScriptedEngine(["<answer>B</answer>"]) as engine:
        async with evaluating(engine, tmp_path, *one_by_one) as process:
            engine.delay_s = 0.2
            await until(lambda: len(lines_of(progress)) >= 4)
            process.kill()
            await process.communicate()
        num_finished = len(lines_of(progress)) - 1
        engine.delay_s = 0.0
        before = len(engine.requests)

        async with evaluating(engine, tmp_path) as process:
            output = await output_of(process)
        num_asked = len(engine.requests) - before

    samples = lines_of(tmp_path / "evals" / "samples.jsonl")
    assert process.returncode == 0, output
    assert f"resuming: {num_finished} finished samples" in output
    assert num_finished >= 3
    assert num_asked == len(samples) - num_finished
    assert len({sample["item_id"] for sample in samples}) == len(samples) == 8
    metrics = json.loads((tmp_path / "evals" / "metrics.json").read_text())["results"]["all"]
    assert metrics["eval/overall_accuracy"] == 2 / 8
    assert metrics["eval/subject_astronomy_accuracy"] == 0.5
    assert metrics["eval/category_humanities_accuracy"] == 0.0
    assert metrics["eval/subject_high_school_macroeconomics_accuracy"] == 1.0
    assert metrics["eval/overall_accuracy_ci_low"] < 0.25 < metrics["eval/overall_accuracy_ci_high"]
    assert not progress.exists()


async def test_engine_that_fails_every_request_ends_the_evaluation(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path / "tokenizer")
    async with ScriptedEngine(["<answer>B</answer>"]) as engine:
        engine.fail_next(*[Fault(status=400, message="scripted refusal")] * 1000)
        flags = ("--env.max_retries", "2", "--env.retry_delay", "0")
        async with evaluating(engine, tmp_path, *flags) as process:
            output = await output_of(process)

    assert process.returncode == 1
    assert "8 of 8 samples of the evaluation failed: InferenceError (8)" in output
    assert "no reply to a question after 2 tries" in output
    assert "scripted refusal" in output
    assert not (tmp_path / "evals" / "metrics.json").exists()
