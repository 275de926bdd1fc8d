"""Runs of the demo with other settings, and the argument that selects rows of a benchmark."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

from example_trainer.demo.cli import Demo, DemoResult
from example_trainer.demo.settings import DemoPaths, DemoSettings
from example_trainer.launch.report import RunProgress

__all__ = ["FinishedRun", "names_of", "run_demo"]


class FinishedRun(NamedTuple):
    """Results and files of a run."""

    result: DemoResult
    steps: list[dict[str, Any]]
    """Metrics of the trainer, one entry per step."""
    paths: DemoPaths


def run_demo(settings: DemoSettings, folder: Path) -> FinishedRun:
    """Run a demo in an empty folder; returns when all its processes have ended."""
    paths = DemoPaths(folder.resolve())
    paths.logs.mkdir(parents=True)
    with RunProgress() as progress:
        result = Demo(settings, paths, progress).run()
    lines = paths.trainer_metrics.read_text(encoding="utf-8").splitlines()
    return FinishedRun(result, [json.loads(line) for line in lines], paths)


def names_of(rows: Collection[str]) -> Callable[[str], list[str]]:
    """Return an argument type that parses names of rows, separated by commas."""

    def chosen(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        for name in names:
            if name not in rows:
                raise argparse.ArgumentTypeError(f"expected one of {', '.join(rows)}, got {name!r}")
        return names

    return chosen
