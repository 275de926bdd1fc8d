"""The `process` command as a user types it: own process, flags, tokenizer from disk, HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from atroposlib.scored_data import check_group
from tests.byte_tokenizer import save_byte_tokenizer
from tests.environments.offline import read_groups
from tests.fakes import ScriptedEngine

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    """A byte-level tokenizer with a chat template, saved as a folder."""
    return save_byte_tokenizer(tmp_path / "tokenizer")


async def run(script: str, engine: ScriptedEngine, folder: Path, *flags: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(ROOT / script),
        "process",
        *("--env.tokenizer_name", str(folder / "tokenizer")),
        *("--env.data_path_to_save_groups", str(folder / "groups.jsonl")),
        *("--env.use_wandb", "false", "--env.group_size", "3", "--env.total_steps", "2"),
        *("--env.max_token_length", "3000", "--env.num_score_workers", "1"),
        *("--openai.base_url", engine.base_url, "--openai.model_name", "scripted"),
        *("--openai.tokenizer_name", str(folder / "tokenizer")),
        *flags,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
    )
    output, _ = await asyncio.wait_for(process.communicate(), timeout=120)
    assert process.returncode == 0, output.decode()


def check_output(folder: Path, tokenizer: Any) -> None:
    groups = read_groups(folder / "groups.jsonl")
    assert [len(group["tokens"]) for group in groups] == [3, 3]
    for group in groups:
        check_group(group)
        for ids, mask, chat in zip(group["tokens"], group["masks"], group["messages"], strict=True):
            written = [t for t, m in zip(ids, mask, strict=True) if m != -100]
            assert tokenizer.decode(written) == chat[-1]["content"] + "</s>"
    assert (folder / "groups.html").exists()


@pytest.mark.long
async def test_reasoning_gym_process(tmp_path: Path, tokenizer: Any) -> None:
    params = {"chain_sum": {"min_terms": 2, "max_terms": 2, "max_digits": 1, "min_digits": 1}}
    async with ScriptedEngine(lambda _: "<answer>5</answer>", tokenizer=tokenizer) as engine:
        await run(
            "environments/reasoning_gym_environment/reasoning_gym_environment.py",
            engine,
            tmp_path,
            *("--env.task_names", "chain_sum", "--env.task_params", json.dumps(params)),
            *("--env.system_prompt", ""),
        )

    check_output(tmp_path, tokenizer)
    prompts = [g["messages"][0][0] for g in read_groups(tmp_path / "groups.jsonl")]
    assert [prompt["role"] for prompt in prompts] == ["user", "user"]


@pytest.mark.long
async def test_gsm8k_process(tmp_path: Path, tokenizer: Any) -> None:
    data = ROOT / "environments" / "data" / "gsm8k_sample"
    async with ScriptedEngine(lambda _: "It is \\boxed{5}.", tokenizer=tokenizer) as engine:
        await run("environments/gsm8k_server.py", engine, tmp_path, "--env.dataset_path", str(data))

    check_output(tmp_path, tokenizer)
    scores = {s for g in read_groups(tmp_path / "groups.jsonl") for s in g["scores"]}
    assert scores <= {1.0, -1.0}
