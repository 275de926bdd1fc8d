"""One run of the demo for a benchmark: settings and an empty folder in, its figures out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from example_trainer.demo.progress import DemoProgress
from example_trainer.demo.run import Demo, DemoResult
from example_trainer.demo.settings import DemoPaths, DemoSettings

__all__ = ["FinishedRun", "run_demo"]


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
    with DemoProgress() as progress:
        result = Demo(settings, paths, progress).run()
    lines = paths.trainer_metrics.read_text(encoding="utf-8").splitlines()
    return FinishedRun(result, [json.loads(line) for line in lines], paths)
