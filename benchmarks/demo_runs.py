"""Runs of the demo for a benchmark: settings and an empty folder in, its figures out."""

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
    """What a benchmark wants to know of a run."""

    result: DemoResult
    steps: list[dict[str, Any]]
    """The trainer's metrics, step by step."""
    paths: DemoPaths


def run_demo(settings: DemoSettings, folder: Path) -> FinishedRun:
    """Go through a whole demo; returns once all its processes have ended."""
    paths = DemoPaths(folder.resolve())
    paths.logs.mkdir(parents=True)
    with RunProgress() as progress:
        result = Demo(settings, paths, progress).run()
    lines = paths.trainer_metrics.read_text(encoding="utf-8").splitlines()
    return FinishedRun(result, [json.loads(line) for line in lines], paths)


def names_of(rows: Collection[str]) -> Callable[[str], list[str]]:
    """Return the type of an argument that names some of the rows of a table, by commas."""

    def chosen(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        for name in names:
            if name not in rows:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(rows)}")
        return names

    return chosen
