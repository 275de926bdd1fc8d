"""Difference of the logprobs of an engine and of the trainer for the same tokens and weights."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from atroposlib.scored_data import IGNORE_INDEX, MASKED_LOGPROB
from example_trainer.batch import build_batch
from example_trainer.config import TrainingConfig
from example_trainer.model import autocast, load_model_and_tokenizer
from example_trainer.policy import prepare_policy
from example_trainer.processes import find_free_port
from example_trainer.training import row_rules
from h200_parts.records import PartTask, Records
from service_parts.server_process import end_process
from trainer_parts.models import MODEL_SIZES, write_model

_LOCAL = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_START_LIMIT_S = 240.0
_GROUP_SIZE = 4
_LARGEST_MEAN = {"float32": 1e-3, "bfloat16": 0.05}
"""Mean difference, in nats, that a check allows."""


class Gap(NamedTuple):
    """Differences of logprobs over sampled tokens, in nats."""

    mean: float
    p99: float
    largest: float
    kl: float
    """Estimate of KL(engine || trainer): the mean of `r - 1 - log r` with the ratio `r` of the
    trainer's probability to the engine's."""
    num_tokens: int


def part(task: PartTask, records: Records) -> None:
    """Sample from each engine and score its tokens with the trainer."""
    size = MODEL_SIZES["tiny 0.6b" if task.is_tiny else "0.6b"]
    model = write_model(Path(task.folder) / "model", size, device=task.device, dtype="bfloat16")
    for engine, dtype in _engines(task):
        case = f"{engine} in {dtype}"
        with records.case(case):
            groups = _sample(task, model, engine, dtype, vocabulary=size.vocabulary)
            for train_dtype in _train_dtypes(task):
                pair = f"{case} / trainer in {train_dtype}"
                gap = gap_of(task, model, groups, train_dtype)
                _record(records, gap, pair, is_exact=dtype == train_dtype == "float32")


def _engines(task: PartTask) -> list[tuple[str, str]]:
    """Return engines and their types; a vLLM is used where it is installed for the device."""
    if not task.on_gpu:
        return [("torch", "float32")]
    engines = [("torch", "bfloat16")]
    return [*engines, ("vllm", "bfloat16")] if importlib.util.find_spec("vllm") else engines


def _train_dtypes(task: PartTask) -> tuple[str, ...]:
    return ("mixed", "bfloat16") if task.on_gpu else ("float32", "bfloat16")


def _record(records: Records, gap: Gap, case: str, *, is_exact: bool) -> None:
    records.figure("tokens", gap.num_tokens, "tokens", case=case)
    records.figure("mean difference", gap.mean, "nats", case=case)
    records.figure("p99 difference", gap.p99, "nats", case=case)
    records.figure("largest difference", gap.largest, "nats", case=case)
    records.figure("KL(engine || trainer)", gap.kl, "nats", case=case)
    limit = _LARGEST_MEAN["float32" if is_exact else "bfloat16"]
    records.check(
        "engine and trainer agree",
        holds=gap.mean <= limit,
        detail=f"{gap.mean:.2g} nats on average, at most {limit:g}",
        case=case,
    )


def gap_of(task: PartTask, model: Path, groups: Sequence[dict[str, Any]], train_dtype: str) -> Gap:
    """Score groups with the trainer's own path and compare the logprobs."""
    config = TrainingConfig(
        model_name=str(model),
        device=task.device,
        train_dtype=train_dtype,  # type: ignore[arg-type]  # one of its values
        batch_size=_GROUP_SIZE,
        weight_bridge_mode="off",
        save_path=task.folder,
    )
    loaded, _ = load_model_and_tokenizer(config)
    policy = prepare_policy(loaded, config)
    batch = build_batch(
        groups, row_rules(config), microbatch_size=config.batch_size, packs=policy.packs
    )
    differences = []
    for microbatch in (mb.to(config.device) for mb in batch.microbatches):
        with torch.no_grad(), autocast(config):
            trainer_BT = policy.scorer(microbatch).logprobs_BT
        engine_BT = microbatch.inference_logprobs_BT
        is_sampled = (microbatch.labels_BT != IGNORE_INDEX) & (engine_BT != MASKED_LOGPROB)
        differences.append((trainer_BT - engine_BT)[is_sampled].double().cpu())
    log_ratio = torch.cat(differences)
    size = log_ratio.abs()
    return Gap(
        float(size.mean()),
        float(size.quantile(0.99)),
        float(size.max()),
        float((log_ratio.expm1() - log_ratio).mean()),
        size.numel(),
    )


def _sample(
    task: PartTask, model: Path, engine: str, dtype: str, *, vocabulary: int
) -> list[dict[str, Any]]:
    """Start an engine, sample groups from it, and end it."""
    port = find_free_port()
    log = Path(task.folder) / f"{engine}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            _command(task, model, engine, dtype, port), stdout=output, stderr=subprocess.STDOUT
        )
        try:
            _wait(process, port, log)
            return _groups(task, port, str(model), vocabulary=vocabulary)
        finally:
            end_process(process)


def _command(task: PartTask, model: Path, engine: str, dtype: str, port: int) -> list[str]:
    length = 128 if task.is_tiny else 4096
    common = ["--model", str(model), "--port", str(port), "--dtype", dtype]
    if engine == "torch":
        device = ["--device", task.device, "--max-model-len", str(length)]
        return [sys.executable, "-m", "example_trainer.torch_engine", *common, *device]
    memory = ["--max-model-len", str(length), "--gpu-memory-utilization", "0.4"]
    server = "vllm.entrypoints.openai.api_server"
    return [sys.executable, "-m", server, *common, *memory]


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    ends_at = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < ends_at:
        if process.poll() is not None:
            last = log.read_text(errors="replace").strip().splitlines()[-1:] or ["no output"]
            raise RuntimeError(f"the engine exited with {process.returncode}: {last[0]}")
        try:
            with _LOCAL.open(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError(f"the engine was not ready after {_START_LIMIT_S:g} s")


def _groups(task: PartTask, port: int, model: str, *, vocabulary: int) -> list[dict[str, Any]]:
    num_groups, prompt_tokens, max_tokens = (2, 8, 24) if task.is_tiny else (16, 128, 512)
    rng = random.Random(0)
    prompts = [
        [rng.randrange(3, vocabulary) for _ in range(prompt_tokens)] for _ in range(num_groups)
    ]

    def sampled(number: int) -> dict[str, Any]:
        body = {
            "model": model,
            "prompt": prompts[number],
            "n": _GROUP_SIZE,
            "max_tokens": max_tokens,
            "temperature": 1.0,
            "seed": number,
            "logprobs": 0,
            "return_token_ids": True,
            "ignore_eos": True,
        }
        return _group(prompts[number], _post(port, body)["choices"])

    with ThreadPoolExecutor(num_groups) as pool:
        return list(pool.map(sampled, range(num_groups)))


def _group(prompt: list[int], choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
    ids = [choice["token_ids"] for choice in choices]
    return {
        "tokens": [prompt + completion for completion in ids],
        "masks": [[IGNORE_INDEX] * len(prompt) + completion for completion in ids],
        "scores": [float(i % 2) for i in range(len(ids))],
        "inference_logprobs": [
            [MASKED_LOGPROB] * len(prompt) + choice["logprobs"]["token_logprobs"]
            for choice in choices
        ],
    }


def _post(port: int, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with _LOCAL.open(request, timeout=300) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except urllib.error.HTTPError as error:
        reason = error.read().decode(errors="replace")[:300]
        raise RuntimeError(f"the engine answered {error.code}: {reason}") from error
