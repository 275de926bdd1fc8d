"""Measure the time of `--help` of each command, compared with an empty interpreter.

Usage: python benchmarks/startup.py [--runs N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parents[1]

COMMANDS: dict[str, list[str]] = {
    "empty interpreter": ["-c", "pass"],
    "import atroposlib.api.client": ["-c", "import atroposlib.api.client"],
    "run-api --help": ["-m", "atroposlib.cli.run_api", "--help"],
    "gsm8k_server.py --help": ["environments/gsm8k_server.py", "--help"],
    "gsm8k_server.py serve --help": ["environments/gsm8k_server.py", "serve", "--help"],
    "atropos-grpo --help": ["-m", "example_trainer.grpo", "--help"],
    "atropos-demo --help": ["-m", "example_trainer.demo.cli", "--help"],
}


def seconds_of(arguments: list[str]) -> float:
    """Return the duration of one run in seconds.

    Raises:
        SystemExit: The command failed; the message has its output.
    """
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    elapsed = time.perf_counter() - started
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    return elapsed


def measure(runs: int) -> dict[str, dict[str, float]]:
    """Run all commands `runs` times in turn, after one warm-up each."""
    for arguments in COMMANDS.values():
        seconds_of(arguments)
    samples: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(runs):
        for name, arguments in COMMANDS.items():
            samples[name].append(seconds_of(arguments))
    baseline = statistics.median(samples["empty interpreter"])
    return {
        name: {
            "median_s": statistics.median(values),
            "max_s": max(values),
            "ratio": statistics.median(values) / baseline,
        }
        for name, values in samples.items()
    }


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, help="measured runs of each command")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()

    figures = measure(options.runs)
    table = Table("command", "median s", "max s", "x empty interpreter")
    for name, row in figures.items():
        table.add_row(name, f"{row['median_s']:.2f}", f"{row['max_s']:.2f}", f"{row['ratio']:.1f}")
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
