"""Recurrent layers in the torch engine: exact tokens, whatever happens to the slots."""

from __future__ import annotations

import json
import random
import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from atroposlib.errors import ConfigError
from example_trainer.demo.settings import train_tokenizer
from example_trainer.torch_engine.jobs import Job, PromptRequest
from example_trainer.torch_engine.loading import TorchEngineOptions, load_engine

pytestmark = pytest.mark.slow

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip
LINEAR = {
    "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
MAMBA = {"mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_chunk_size": 8}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": LINEAR,
    "mamba": {"state_size": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2},
    "granitemoehybrid": {
        **MAMBA, "layer_types": ["linear_attention", "full_attention"] * 2, "num_local_experts": 2,
    },
}  # fmt: skip


def save_model(folder: Path, kind: str, *, seed: int = 0) -> Path:
    """Save a small model with random weights, whose logits are of the size of trained ones."""
    tokenizer = train_tokenizer([[{"role": "user", "content": "a"}]], max_length=256)
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[kind](vocab_size=len(tokenizer), **SIZES, **MODELS[kind])
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def generate(engine: Any, requests: list[PromptRequest]) -> list[Job]:
    """Return the finished jobs of requests that run together."""
    num_done = threading.Semaphore(0)
    jobs = [Job(request, on_done=lambda _: num_done.release()) for request in requests]
    for job in jobs:
        engine.submit(job)
    for _ in jobs:
        num_done.acquire()
    assert [job.error for job in jobs] == [None] * len(jobs)
    return jobs


def largest_difference(folder: Path, jobs: list[Job]) -> float:
    """Return how far a logprob of the jobs is from that of the model as transformers loads it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    worst = 0.0
    for job in jobs:
        for completion in job.completions:
            ids = torch.tensor([completion.all_ids])
            with torch.no_grad():
                logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
            own = logprobs.gather(1, ids[0, 1:, None])[len(job.request.prompt_ids) - 1 :, 0]
            gap = (own - torch.tensor(completion.logprobs)).abs().max()
            worst = max(worst, float(gap))
    return worst


def mixed_requests(num: int) -> list[PromptRequest]:
    """Return requests that share beginnings, end at different times, and have several samples."""
    rng = random.Random(0)
    shared = [rng.randrange(3, 60) for _ in range(40)]
    return [
        PromptRequest(
            (*shared[: rng.choice([3, 10, 40])], *rng.choices(range(3, 60), k=rng.choice([0, 7]))),
            num_completions=rng.choice([1, 2, 4]),
            max_tokens=rng.choice([1, 5, 20]),
            seed=number,
        )
        for number in range(num)
    ]


@pytest.mark.parametrize("kind", sorted(set(MODELS) - {"mamba"}))
def test_every_token_has_the_logprob_of_the_whole_sequence(tmp_path: Path, kind: str) -> None:
    folder = save_model(tmp_path, kind)
    engine = load_engine(TorchEngineOptions(str(folder), device="cpu", max_num_seqs=8)).engine
    try:
        jobs = generate(engine, mixed_requests(12))
    finally:
        engine.close()

    assert largest_difference(folder, jobs) < 1e-3


@pytest.mark.parametrize("kind", ["qwen3_5_text", "lfm2"])
def test_states_are_computed_again_when_the_caches_were_full(tmp_path: Path, kind: str) -> None:
    folder = save_model(tmp_path, kind)
    engine = load_engine(TorchEngineOptions(str(folder), device="cpu", max_num_seqs=8)).engine
    engine.batch.limits = replace(engine.batch.limits, max_cache_tokens=400)
    try:
        jobs = generate(engine, mixed_requests(12))
        preemptions = engine.counts().preemptions
    finally:
        engine.close()

    assert preemptions > 0
    assert largest_difference(folder, jobs) < 1e-3


def test_new_weights_continue_from_states_of_their_own(tmp_path: Path) -> None:
    old, new = (save_model(tmp_path / str(seed), "qwen3_5_text", seed=seed) for seed in (0, 1))
    engine = load_engine(TorchEngineOptions(str(old), device="cpu")).engine
    half_way: Future[None] = Future()

    def note(completion: Any) -> None:
        if len(completion.tokens) == 5 and not half_way.done():
            half_way.set_result(None)

    job_done = threading.Event()
    request = PromptRequest(tuple(range(3, 15)), max_tokens=200, seed=0)
    job = Job(request, on_done=lambda _: job_done.set(), on_token=note)
    try:
        engine.submit(job)
        half_way.result()
        engine.pause("keep").result()
        num_old = len(job.completions[0].tokens)
        engine.reload(new, version=None).result()
        engine.resume()
        job_done.wait()
    finally:
        engine.close()

    [completion] = job.completions
    model = AutoModelForCausalLM.from_pretrained(new, dtype=torch.float32).eval()
    ids = torch.tensor([completion.all_ids])
    with torch.no_grad():
        logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    own = logprobs.gather(1, ids[0, 1:, None])[len(request.prompt_ids) - 1 :, 0]
    gaps = (own - torch.tensor(completion.logprobs)).abs()
    assert num_old < len(completion.tokens)
    assert gaps[num_old:].max() < 1e-3


@pytest.mark.parametrize(
    ("available", "for_states"),
    [
        (200_000, 100_000),  # half of it
        (100_000, 100_000 - 256 * 256),  # all but the tokens of one whole sequence
    ],
)
def test_states_limit_the_sequences_that_run_at_once(
    tmp_path: Path, caplog: Any, available: int, for_states: int
) -> None:
    folder = save_model(tmp_path, "qwen3_5_text")
    options = TorchEngineOptions(str(folder), device="cpu", kv_cache_memory_bytes=available)

    engine = load_engine(options).engine
    try:
        limits = engine.batch.limits
        jobs = generate(engine, mixed_requests(6))
    finally:
        engine.close()

    # Two layers of 4 heads of 8 x 8, and of 64 channels by 4 tokens, in float32.
    of_a_sequence = 2 * 4 * (4 * 8 * 8 + 64 * 4)
    assert limits.max_num_seqs == for_states // of_a_sequence
    assert limits.max_cache_tokens >= limits.max_model_len == 256
    assert "sequences run at the same time, not 256" in caplog.text
    assert largest_difference(folder, jobs) < 1e-3
    with pytest.raises(ConfigError, match=r"one sequence of 256 tokens take 0\.00 GiB"):
        load_engine(replace(options, kv_cache_memory_bytes=1000))


def test_model_without_a_largest_length_needs_one(tmp_path: Path) -> None:
    folder = save_model(tmp_path, "mamba")
    config = json.loads((folder / "config.json").read_text())
    del config["max_position_embeddings"]  # a Mamba of a hub has none
    (folder / "config.json").write_text(json.dumps(config))
    options = TorchEngineOptions(str(folder), device="cpu")

    with pytest.raises(ConfigError, match=r"no max_position_embeddings: set --max-model-len$"):
        load_engine(options)
    engine = load_engine(replace(options, max_model_len=128)).engine
    try:
        jobs = generate(engine, mixed_requests(6))
    finally:
        engine.close()

    assert largest_difference(folder, jobs) < 1e-3
