"""Measure the overhead of a request to an inference server, compared with plain aiohttp.

A mock engine in another process responds at once in vLLM's format, with ids and logprobs, so that
the client is the bottleneck. A thousand requests are in flight. Direct aiohttp and our server
classes alternate in one process, with the garbage collector configured as in environments. The cost
is processor time per request. The longest stall counts the processor time of the loop's thread; the
elapsed one also includes time that other processes used, as does the stall of an idle process.
`text` uses the OpenAI client and has no target.

Usage: python benchmarks/inference.py [--only plain-short ...] [--rounds 4] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from atroposlib.envs.running import favour_event_loop
from inference_parts.mock_engine import mock_engine
from inference_parts.paths import NUM_IN_FLIGHT, PROMPT_WORDS, Paths, Request, load_tokenizer
from scheduler_parts.loop_watch import IdleLoop, LoopWatch

LENGTHS = {"short": 64, "long": 2_048}
CASES = [f"{path}-{length}" for path in ("plain", "chat", "text") for length in LENGTHS]
WITH_TARGET = ("plain", "chat")
MAX_OVERHEAD = 1.3
MAX_STALL_MS = 20.0


class Round(NamedTuple):
    """One measurement of one kind of request."""

    cpu_us: float
    wall_us: float
    clock_stall_ms: float
    own_stall_ms: float


async def measure(one: Request, num_requests: int) -> Round:
    """Send requests, `NUM_IN_FLIGHT` at a time; return the cost per request."""
    left = num_requests

    async def worker() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await one()

    gc.collect()
    favour_event_loop()  # like the commands of an environment
    watch = LoopWatch(time.thread_time)
    watch.start()
    started, started_cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(worker() for _ in range(NUM_IN_FLIGHT)))
    wall_s, cpu_s = time.perf_counter() - started, time.process_time() - started_cpu
    stalls = watch.stop()
    return Round(
        1e6 * cpu_s / num_requests,
        1e6 * wall_s / num_requests,
        stalls["stall_max_ms"],
        stalls["own_stall_max_ms"],
    )


def run_case(case: str, tokenizer: Any, *, num_rounds: int) -> dict[str, Any]:
    """Measure both requests of one case in alternation and return the results."""
    path, length = case.split("-")
    num_output = LENGTHS[length]
    num_requests = NUM_IN_FLIGHT if path == "text" else 4_000 if length == "short" else 2_000
    with mock_engine(prompt_tokens=PROMPT_WORDS, output_tokens=num_output) as url:
        rounds = asyncio.run(_rounds(path, url, tokenizer, num_output, num_requests, num_rounds))
    return figures_of(case, rounds)


async def _rounds(
    path: str, url: str, tokenizer: Any, num_output: int, num_requests: int, num_rounds: int
) -> list[tuple[Round, Round]]:
    paths = Paths(url, tokenizer, num_output)
    direct, ours = paths.pair(path)
    for one in (direct, ours):
        await measure(one, NUM_IN_FLIGHT)  # warms up connections and caches
    rounds = [
        (await measure(direct, num_requests), await measure(ours, num_requests))
        for _ in range(num_rounds)
    ]
    await paths.close()
    return rounds


def figures_of(case: str, rounds: list[tuple[Round, Round]]) -> dict[str, Any]:
    """Return medians over the rounds, and the longest stall of our rounds."""
    path = case.split("-")[0]
    overhead = statistics.median(ours.cpu_us / direct.cpu_us for direct, ours in rounds)
    stall_ms = max(ours.own_stall_ms for _, ours in rounds)
    is_met = overhead <= MAX_OVERHEAD and stall_ms <= MAX_STALL_MS
    return {
        "case": case,
        "direct_cpu_us": statistics.median(direct.cpu_us for direct, _ in rounds),
        "ours_cpu_us": statistics.median(ours.cpu_us for _, ours in rounds),
        "overhead": overhead,
        "overhead_wall": statistics.median(
            ours.wall_us / direct.wall_us for direct, ours in rounds
        ),
        "stall_max_ms": stall_ms,
        "clock_stall_max_ms": max(ours.clock_stall_ms for _, ours in rounds),
        "direct_stall_max_ms": max(direct.own_stall_ms for direct, _ in rounds),
        "met": is_met if path in WITH_TARGET else None,
    }


def print_table(results: list[dict[str, Any]], idle_stall_ms: float) -> None:
    """Print one row per case."""
    table = Table(title=f"{NUM_IN_FLIGHT:,} requests in flight, prompt of {PROMPT_WORDS} tokens")
    columns = ["case", "direct, CPU/request", "ours", f"ours / direct (<= {MAX_OVERHEAD})"]
    columns += ["wall time, ratio", f"longest stall (<= {MAX_STALL_MS:.0f} ms)", "elapsed"]
    for column in [*columns, "longest stall, direct", "met"]:
        table.add_column(column, justify="left" if column == "case" else "right")
    for row in results:
        table.add_row(
            row["case"],
            f"{row['direct_cpu_us']:.0f} us",
            f"{row['ours_cpu_us']:.0f} us",
            f"{row['overhead']:.2f}",
            f"{row['overhead_wall']:.2f}",
            f"{row['stall_max_ms']:.1f} ms",
            f"{row['clock_stall_max_ms']:.1f} ms",
            f"{row['direct_stall_max_ms']:.0f} ms",
            {True: "yes", False: "NO", None: ""}[row["met"]],
        )
    console = Console(width=150)
    console.print(table)
    console.print(f"longest stall of an idle process: {idle_stall_ms:.1f} ms")


def main() -> None:
    """Run the selected cases and print one table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--rounds", type=int, default=4, help="measurements of each request")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    idle = IdleLoop()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = load_tokenizer(Path(folder))
        results = [
            run_case(case, tokenizer, num_rounds=arguments.rounds) for case in arguments.only
        ]
    idle_stall_ms = idle.stop()["stall_max_ms"]
    print_table(results, idle_stall_ms)
    if arguments.json:
        figures = {"cases": results, "idle_stall_max_ms": idle_stall_ms}
        arguments.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
