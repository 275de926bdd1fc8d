"""How fast the tools around a run are.

Usage: python benchmarks/tools.py [--groups 100000] [--part export|viewer] [--json FILE]

Exports: groups of four trajectories of 97 tokens in a JSONL file, to records of several formats.
The floor is msgspec decoding the same file; the ratio is the CPU time of an export to that of its
floor. `per CPU s` is what one free core does; `per s` is by the clock, on the machine as it was.

Viewer: the same groups in a browser, by the clock, from a click to the page that was asked for; its
floor is an empty Gradio event. Last, the page of a file that holds the first thousand of them.
"""

from __future__ import annotations

import argparse
import json
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tools_parts.browser import measure_browser, measure_report
from tools_parts.export import make_tokenizer, measure_export, write_groups


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=100_000, help="to export (%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    parser.add_argument("--part", choices=("export", "viewer"), help="only this one")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    if args.part != "viewer":
        found["export"] = _export(args.groups)
    if args.part != "export":
        found["viewer"] = _view(args.groups)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=2), encoding="utf-8")


def _export(num_groups: int) -> list[dict[str, Any]]:
    figures = []
    print(f"{'export':18}{'records':>10}{'sequences per s':>17}{'per CPU s':>11}{'x floor':>9}")
    with TemporaryDirectory() as folder:
        for figure in measure_export(Path(folder), num_groups=num_groups):
            figures.append(figure)
            ratio = figure.cpu_seconds / figures[0].cpu_seconds
            print(
                f"{figure.what:18}{figure.num_records:10,}{figure.sequences_per_s:17,.0f}"
                f"{figure.sequences_per_cpu_s:11,.0f}{ratio:9.1f}",
                flush=True,
            )
    return [{**f._asdict(), "sequences_per_cpu_s": f.sequences_per_cpu_s} for f in figures]


def _view(num_groups: int) -> list[dict[str, Any]]:
    figures = []
    tokenizer = make_tokenizer()
    print(f"{'viewer':32}{'median ms':>12}{'slowest ms':>12}")
    with TemporaryDirectory() as folder:
        source = Path(folder) / "groups.jsonl"
        write_groups(source, tokenizer, num_groups=num_groups)
        for figure in chain(measure_browser(source, tokenizer), measure_report(source)):
            figures.append(figure._asdict())
            print(
                f"{figure.what:32}{figure.median_ms:12,.0f}{figure.slowest_ms:12,.0f}", flush=True
            )
    return figures


if __name__ == "__main__":
    main()
