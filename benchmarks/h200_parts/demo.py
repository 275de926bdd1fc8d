"""The demo on the torch engine: a tiny model, the service, an environment and the trainer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from demo_runs import run_demo
from example_trainer.demo.settings import DemoSettings, settings_for
from h200_parts.records import PartTask, Records

_LEAST_GAIN = 0.1
"""Accuracy that the whole demo gains at least; it gains about 0.5."""


def part(task: PartTask, records: Records) -> None:
    """Run the demo, or in a rehearsal one step of each of its processes."""
    settings = _settings(task)
    finished = run_demo(settings, Path(task.folder) / "demo")
    before, after = finished.result.before.accuracy, finished.result.after.accuracy
    records.figure("accuracy before", before, "of the held-out problems")
    records.figure("accuracy after", after, "of the held-out problems")
    records.figure("duration", finished.result.seconds, "s")
    records.figure("optimizer steps", len(finished.steps), "steps")
    for name, unit in (
        ("train/tokens_per_s", "tokens/s"),
        ("alignment/diff_abs_mean", "nats"),
        ("train/step_time", "s"),
        ("train/sync_time", "s"),
    ):
        values = [step[name] for step in finished.steps if name in step]
        records.figure(name, sum(values) / len(values) if values else None, f"{unit}, mean")
    records.check(
        "every step was taken",
        holds=len(finished.steps) == settings.steps,
        detail=f"{len(finished.steps)} of {settings.steps}",
    )
    if not task.is_tiny:
        records.check(
            "accuracy rises",
            holds=after >= before + _LEAST_GAIN,
            detail=f"{before:.1%} to {after:.1%}",
        )


def _settings(task: PartTask) -> DemoSettings:
    engine: dict[str, Any] = {"engine": "torch"}
    if not task.is_tiny:
        return replace(settings_for("full"), **engine)
    settings = settings_for("quick", steps=1)
    warm_up = replace(
        settings.warm_up, worked_accuracy=0.0, num_conversations=256, steps_per_check=2
    )
    # A model that has hardly trained answers nothing: groups of equal scores are trained as well.
    sections = {"env": {"ensure_scores_are_not_same": False}}
    return replace(
        settings,
        **engine,
        num_held_out=4,
        groups_per_step=2,
        warm_up=warm_up,
        environment_sections=sections,
    )
