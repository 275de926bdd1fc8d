"""Measure the time to fork a workspace, to run a program in it, to save its files and to close it.

The baselines are a copy of the same files by `cp -a`, and a program in a plain sandbox; and with
`--image`, a container of podman.

Usage: python benchmarks/workspaces.py [--runs N] [--files N] [--image NAME] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from atroposlib.sandbox.bubblewrap import Bubblewrap
from atroposlib.sandbox.interface import SandboxLimits
from atroposlib.workspaces import Workspace, WorkspaceSpec
from atroposlib.workspaces.local import LocalWorkspaces
from atroposlib.workspaces.overlay import Kind

AT_ONCE = 8
NUM_CHANGED = 100
CHANGE = f"""
find . -type f | sort | head -{NUM_CHANGED} | while read file; do echo changed >> "$file"; done
"""
KINDS: dict[str, Kind] = {"overlay": "overlay", "copy": "copy"}
Samples = dict[str, list[float]]


async def timed(samples: Samples, name: str, action: Callable[[], Awaitable[object]]) -> None:
    """Append the milliseconds of an action to the samples of its name."""
    started = time.perf_counter()
    await action()
    samples.setdefault(name, []).append(1000 * (time.perf_counter() - started))


def write_files(folder: Path, number: int) -> None:
    """Write a tree of small files, 50 per folder."""
    for index in range(number):
        place = folder / f"folder{index // 50}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"file{index}.txt").write_text(f"line {index}\n" * 100)


async def of_workspaces(
    samples: Samples, folder: Path, label: str, runs: int, *, warm: int
) -> None:
    """Fork, run and close, one after the other and several at once."""
    workspaces = LocalWorkspaces(cache=folder / f"cache-{label}", kind=KINDS[label], warm=warm)
    spec = WorkspaceSpec("benchmark", source=folder / "source")
    name = f"{label}, {'in advance' if warm else 'made when needed'}"
    await timed(samples, f"{name}: prepare", lambda: workspaces.prepare(spec))
    base = await workspaces.prepare(spec)
    forks: list[Workspace] = []

    async def fork() -> None:
        forks.append(await base.fork())

    async def fork_many() -> None:
        await asyncio.gather(*(fork() for _ in range(AT_ONCE)))

    await timed(samples, f"{name}: first fork", fork)
    for _ in range(runs):
        await asyncio.sleep(0.05)  # in which workspaces are made in advance
        await timed(samples, f"{name}: fork", fork)
        await timed(samples, f"{name}: run `true`", lambda: forks[-1].run(["true"]))
        await timed(samples, f"{name}: close", lambda: forks[-1].close())
    for _ in range(max(runs // AT_ONCE, 1)):
        await timed(samples, f"{name}: {AT_ONCE} forks at once", fork_many)
        await asyncio.gather(*(each.close() for each in forks))
        forks.clear()
    await workspaces.close()


async def of_saving(samples: Samples, folder: Path, label: str, runs: int) -> None:
    """Save a workspace with changed files, and load them into another one."""
    workspaces = LocalWorkspaces(cache=folder / f"cache-{label}", kind=KINDS[label], warm=0)
    base = await workspaces.prepare(WorkspaceSpec("benchmark", source=folder / "source"))
    changed = await base.fork()
    await changed.run(["sh", "-c", CHANGE])
    archive = await changed.save()
    name = f"{label}, {NUM_CHANGED} changed files"
    for _ in range(runs):
        other = await base.fork()
        await timed(samples, f"{name}: save, {len(archive):,} bytes", changed.save)
        await timed(samples, f"{name}: load", functools.partial(other.load, archive))
        await other.close()
    await workspaces.close()


async def of_baselines(samples: Samples, folder: Path, runs: int, image: str | None) -> None:
    """Copy the files, and run a program in a plain sandbox and in a container."""
    sandbox = Bubblewrap(limits=SandboxLimits())
    root = next((folder / "cache-overlay").glob("*/root"))
    podman = ["podman", "run", "--rm", "--network=none", str(image), "true"]
    for number in range(runs):
        copied = folder / f"copied{number}"
        copy = functools.partial(_call, ["cp", "-a", str(root), str(copied)])
        await timed(samples, "baseline: cp -a of the base", copy)
        shutil.rmtree(copied)
        await timed(
            samples, "baseline: `true` in a sandbox", lambda: sandbox.run(["/usr/bin/true"])
        )
        if image is not None:
            await timed(samples, "baseline: podman run", functools.partial(_call, podman))


async def _call(words: list[str]) -> None:
    await asyncio.to_thread(subprocess.run, words, check=True, capture_output=True)


async def measure(runs: int, files: int, image: str | None) -> Samples:
    """Return milliseconds by name of what was measured."""
    samples: Samples = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder / "source", files)
        await of_workspaces(samples, folder, "overlay", runs, warm=0)
        await of_workspaces(samples, folder, "overlay", runs, warm=AT_ONCE)
        await of_workspaces(samples, folder, "copy", runs, warm=0)
        for label in KINDS:
            await of_saving(samples, folder, label, runs)
        await of_baselines(samples, folder, runs, image)
    return samples


def main() -> None:
    """Print a table, and write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--runs", type=int, default=24, help="repetitions of each action")
    parser.add_argument("--files", type=int, default=500, help="files of the base")
    parser.add_argument("--image", help="image for `podman run`, with a program `true`")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    samples = asyncio.run(measure(options.runs, options.files, options.image))
    results = {
        name: {"median_ms": statistics.median(values), "max_ms": max(values)}
        for name, values in samples.items()
    }
    baseline = results["baseline: cp -a of the base"]["median_ms"]
    table = Table(title=f"Workspaces of a base with {options.files} files")
    for column in ("", "median ms", "max ms", "relative to cp -a"):
        table.add_column(column, justify="left" if not column else "right")
    for name, row in results.items():
        ratio = row["median_ms"] / baseline
        table.add_row(name, f"{row['median_ms']:.2f}", f"{row['max_ms']:.2f}", f"{ratio:.3f}")
    Console().print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
