"""Measure what our path to an inference server costs per request, against plain aiohttp.

A mock engine in a process of its own answers as vLLM does, with ids and logprobs, and at once, so
that the client is what limits. A thousand requests are in flight all the time; direct aiohttp and
our path take turns in one process, with the garbage collector set as environments set it. The cost
is processor time per request. The longest stall is that of the loop's own work; by the clock it
includes what the kernel gave to other processes, as a watcher in an idle process shows.
`text` goes through the OpenAI client and has no target.

Usage: python benchmarks/inference.py [--only plain-short ...] [--rounds 4] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from atroposlib.envs.running import favour_event_loop
from inference_parts.pass_watch import PassWatch
from inference_parts.paths import NUM_IN_FLIGHT, PROMPT_WORDS, Paths, load_tokenizer

MOCK_ENGINE = Path(__file__).parent / "inference_parts" / "mock_engine.py"
LOOP_WATCH = Path(__file__).parent / "scheduler_parts" / "loop_watch.py"

LENGTHS = {"short": 64, "long": 2_048}
CASES = [f"{path}-{length}" for path in ("plain", "chat", "text") for length in LENGTHS]
HELD_TO_TARGET = ("plain", "chat")
MOST_OVERHEAD = 1.3
LONGEST_STALL_MS = 20.0


class Round(NamedTuple):
    """One measurement of one way."""

    cpu_us: float
    wall_us: float
    clock_stall_ms: float
    own_stall_ms: float


async def measure(one: Callable[[], Awaitable[None]], num_requests: int) -> Round:
    """Make requests, `NUM_IN_FLIGHT` of them at a time; return the cost of each."""
    left = num_requests

    async def worker() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await one()

    gc.collect()
    favour_event_loop()  # as the commands of an environment do
    watch = PassWatch()
    watch.start()
    started, started_cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(worker() for _ in range(NUM_IN_FLIGHT)))
    wall_s, cpu_s = time.perf_counter() - started, time.process_time() - started_cpu
    return Round(1e6 * cpu_s / num_requests, 1e6 * wall_s / num_requests, *watch.stop())


def run_case(case: str, tokenizer: Any, *, num_rounds: int) -> dict[str, Any]:
    """Measure both ways of one case in alternation and return its figures."""
    path, length = case.split("-")
    num_output = LENGTHS[length]
    num_requests = NUM_IN_FLIGHT if path == "text" else 4_000 if length == "short" else 2_000
    command = [sys.executable, str(MOCK_ENGINE), str(PROMPT_WORDS), str(num_output), "0", "0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
        assert engine.stdout is not None
        assert engine.stdin is not None
        url = f"http://127.0.0.1:{int(engine.stdout.readline())}"
        rounds = asyncio.run(_rounds(path, url, tokenizer, num_output, num_requests, num_rounds))
        engine.stdin.close()
    return figures_of(case, rounds)


async def _rounds(
    path: str, url: str, tokenizer: Any, num_output: int, num_requests: int, num_rounds: int
) -> list[tuple[Round, Round]]:
    paths = Paths(url, tokenizer, num_output)
    direct, ours = paths.pair(path)
    for one in (direct, ours):
        await measure(one, NUM_IN_FLIGHT)  # connections, caches
    rounds = [
        (await measure(direct, num_requests), await measure(ours, num_requests))
        for _ in range(num_rounds)
    ]
    await paths.close()
    return rounds


def figures_of(case: str, rounds: list[tuple[Round, Round]]) -> dict[str, Any]:
    """Return medians over the rounds; the stall is the longest of our rounds."""
    path = case.split("-")[0]
    overhead = statistics.median(ours.cpu_us / direct.cpu_us for direct, ours in rounds)
    stall_ms = max(ours.own_stall_ms for _, ours in rounds)
    is_met = overhead <= MOST_OVERHEAD and stall_ms <= LONGEST_STALL_MS
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
        "met": is_met if path in HELD_TO_TARGET else None,
    }


def print_table(results: list[dict[str, Any]], idle_stall_ms: float) -> None:
    """Print one line per case."""
    table = Table(title=f"{NUM_IN_FLIGHT:,} requests in flight, prompt of {PROMPT_WORDS} tokens")
    columns = ["case", "direct, CPU/request", "ours", f"ours / direct (<= {MOST_OVERHEAD})"]
    columns += ["wall time, ratio", f"longest stall (<= {LONGEST_STALL_MS:.0f} ms)", "by the clock"]
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
    console.print(f"longest stall of an idle process beside it: {idle_stall_ms:.1f} ms")


def main() -> None:
    """Run the cases asked for and print one table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--rounds", type=int, default=4, help="measurements of each way")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    idle = subprocess.Popen([sys.executable, str(LOOP_WATCH)], stdout=subprocess.PIPE)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = load_tokenizer(Path(folder))
        results = [
            run_case(case, tokenizer, num_rounds=arguments.rounds) for case in arguments.only
        ]
    idle.terminate()
    idle_stall_ms = json.loads(idle.communicate()[0])["stall_max_ms"]
    print_table(results, idle_stall_ms)
    if arguments.json:
        figures = {"cases": results, "idle_stall_max_ms": idle_stall_ms}
        arguments.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
