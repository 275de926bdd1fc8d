"""Measure the environments on their samples: completions per second, and stalls of the event loop.

Usage: python benchmarks/environments.py [--seconds S] [--only WORD] [--json FILE]

Each environment rolls out its own items with a scripted model, which responds at once with correct
and wrong answers. The measured work is thus prompts, tokens, scores and groups. A stall is the
processor time of one callback of the loop, so that other programs do not count; the first item
warms up. The last rows are programs on one core, four in flight: without a sandbox as the baseline,
and in a sandbox. Programs per second are meaningful on an idle machine only; the processor time of
a program, including all processes around it, is meaningful on a busy one too.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import importlib
import json
import os
import re
import resource
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[0] = str(REPOSITORY)  # this folder has a module `environments` too

from atroposlib.envs.check import check_command  # noqa: E402
from atroposlib.envs.checks.runner import (  # noqa: E402
    Stage,
    is_local_tokenizer,
    next_item,
    roll_out,
    seeded,
    staged_settings,
)
from atroposlib.envs.checks.scripted_model import make_script  # noqa: E402
from atroposlib.envs.running import favour_event_loop  # noqa: E402
from atroposlib.sandbox import SandboxUnavailableError, open_sandbox, run_python  # noqa: E402
from atroposlib.sandbox.interface import PYTHON  # noqa: E402
from atroposlib.utils.aio import settle  # noqa: E402
from environments.card_table import find_cards  # noqa: E402

TARGET_STALL_MS = 50.0
TARGET_PROGRAMS = 50.0
IN_FLIGHT = 4
PR_SET_CHILD_SUBREAPER = 36
PROGRAM = "print(sum(range(1000)))"


class Programs(NamedTuple):
    """Throughput of programs."""

    per_s: float
    processor_ms: float
    """Processor time per program, including all processes around it."""


class Figures(NamedTuple):
    """Results of one environment."""

    completions_per_s: float
    longest_stall_ms: float
    num_completions: int


def main() -> None:
    """Measure the selected environments and programs and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="time per environment")
    parser.add_argument("--only", default="", help="part of the paths of modules, or `sandbox`")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    chosen = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    for path in find_cards():
        if chosen.only in path:
            results[path] = _measured(path, chosen.seconds)
    programs = {}
    if chosen.only in "sandbox":
        _adopt_descendants()
        programs = asyncio.run(programs_per_second(chosen.seconds))
    _print(results, programs)
    if chosen.json:
        rows = {name: figures._asdict() for name, figures in programs.items()}
        chosen.json.write_text(json.dumps({"environments": results, "sandbox": rows}, indent=2))


def measure(path: str, seconds: float) -> Figures:
    """Roll out items of an environment for some seconds.

    Args:
        path: Module of the environment, relative to `environments/`.
        seconds: Duration after the first item.
    """
    module: Any = importlib.import_module(f"environments.{path[:-3].replace('/', '.')}")
    source = (REPOSITORY / "environments" / path).read_text(encoding="utf-8")
    env_cls = getattr(module, re.findall(r"(\w+)\.cli\(\)", source)[-1])
    settings = check_command(env_cls)().layered({})
    is_stand_in = not is_local_tokenizer(settings.env.tokenizer_name)
    with TemporaryDirectory() as folder, seeded():
        staged = staged_settings(settings, Path(folder), is_stand_in=is_stand_in)
        staged.env.num_score_workers = 1  # started by the first item
        stage = Stage.build(env_cls, staged, is_stand_in=is_stand_in)
        return asyncio.run(_roll_out_for(stage, seconds))


async def programs_per_second(seconds: float) -> dict[str, Programs]:
    """Run an empty and a short program on one core, four in flight.

    Returns:
        Results by name; empty without a sandbox.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        sandbox = open_sandbox()
        runs: dict[str, Callable[[], Awaitable[Any]]] = {
            "python without a sandbox": _run_bare,
            "sandbox: true": lambda: sandbox.run(["/usr/bin/true"]),
            "sandbox: python": lambda: run_python(sandbox, PROGRAM),
        }
        return {name: await _repeat(run, seconds) for name, run in runs.items()}
    except SandboxUnavailableError:
        return {}
    finally:
        os.sched_setaffinity(0, before)


async def _repeat(run: Callable[[], Awaitable[Any]], seconds: float) -> Programs:
    await run()
    started, processor_before, count = time.perf_counter(), _processor_s(), 0

    async def repeat() -> None:
        nonlocal count
        while time.perf_counter() - started < seconds:
            await run()
            count += 1

    await asyncio.gather(*(repeat() for _ in range(IN_FLIGHT)))
    elapsed = time.perf_counter() - started
    return Programs(count / elapsed, 1e3 * (_processor_s() - processor_before) / count)


def _processor_s() -> float:
    """Return the processor time of this process and its descendants, adopted ones included."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _adopt_descendants() -> None:
    """Become the parent of orphaned descendants, so that their time is counted."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


async def _run_bare() -> None:
    process = await asyncio.create_subprocess_exec(
        *PYTHON, "-c", PROGRAM, stdout=asyncio.subprocess.DEVNULL
    )
    await process.wait()


async def _roll_out_for(stage: Stage, seconds: float) -> Figures:
    await settle(stage.env.setup())
    try:
        await _roll_out_next(stage)
        favour_event_loop()  # like the commands of an environment after `setup`
        with _watched_callbacks() as stalls:
            started, count = time.perf_counter(), 0
            while time.perf_counter() - started < seconds:
                count += await _roll_out_next(stage)
            elapsed = time.perf_counter() - started
    finally:
        await settle(stage.env.close())
        await stage.env._close_score_pool()
        await stage.env.server.close()
    return Figures(count / elapsed, 1e3 * max(stalls), count)


async def _roll_out_next(stage: Stage) -> int:
    item = await next_item(stage.env)
    stage.model.start(make_script(await settle(stage.env.check_gold_answer(item))))
    await roll_out(stage.env, item)
    return len(stage.model.sampled)


@contextmanager
def _watched_callbacks() -> Iterator[list[float]]:
    """Yield a list to which the processor seconds of every callback of the loop are added."""
    stalls = [0.0]
    run = asyncio.events.Handle._run

    def timed(handle: Any) -> None:
        before = time.thread_time()
        try:
            run(handle)
        finally:
            stalls.append(time.thread_time() - before)

    asyncio.events.Handle._run = timed  # type: ignore[method-assign, assignment]
    try:
        yield stalls
    finally:
        asyncio.events.Handle._run = run  # type: ignore[method-assign]


def _measured(path: str, seconds: float) -> dict[str, Any]:
    try:
        return measure(path, seconds)._asdict()
    except Exception as error:  # noqa: BLE001 - one environment that fails is a row of the table
        return {"error": f"{type(error).__name__}: {error}"}


def _print(results: dict[str, dict[str, Any]], programs: dict[str, Programs]) -> None:
    table = Table("environment", "completions/s", "longest stall, ms", "completions")
    for path, row in results.items():
        if "error" in row:
            table.add_row(path, row["error"][:60], "", "")
            continue
        late = " !" if row["longest_stall_ms"] > TARGET_STALL_MS else ""
        table.add_row(
            path,
            f"{row['completions_per_s']:,.0f}",
            f"{row['longest_stall_ms']:.1f}{late}",
            str(row["num_completions"]),
        )
    for name, figures in programs.items():
        table.add_row(
            name,
            f"{figures.per_s:.1f} programs/s (target {TARGET_PROGRAMS:g})",
            f"{figures.processor_ms:.1f} ms of processor time each",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
