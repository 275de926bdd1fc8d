"""How fast the tools around a run are.

Usage: python benchmarks/tools.py [--groups 100000] [--json FILE]

Exports: groups of four trajectories of 97 tokens in a JSONL file, to records of several formats.
The floor is msgspec decoding the same file; the ratio is the CPU time of an export to that of its
floor. `per CPU s` is what one free core does; `per s` is by the clock, on the machine as it was.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory

from tools_parts.export import measure_export


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=100_000, help="to export (%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    args = parser.parse_args()
    figures = []
    print(f"{'export':18}{'records':>10}{'sequences per s':>17}{'per CPU s':>11}{'x floor':>9}")
    with TemporaryDirectory() as folder:
        for figure in measure_export(Path(folder), num_groups=args.groups):
            figures.append(figure)
            ratio = figure.cpu_seconds / figures[0].cpu_seconds
            print(
                f"{figure.what:18}{figure.num_records:10,}{figure.sequences_per_s:17,.0f}"
                f"{figure.sequences_per_cpu_s:11,.0f}{ratio:9.1f}",
                flush=True,
            )
    if args.json:
        rows = [{**f._asdict(), "sequences_per_cpu_s": f.sequences_per_cpu_s} for f in figures]
        Path(args.json).write_text(json.dumps({"export": rows}, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
