"""Read the metrics and settings of a run and write its report."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from atroposlib.errors import ConfigError
from atroposlib.utils.text import mask_secrets
from example_trainer.checkpointing import write_file
from example_trainer.reporting.findings import find
from example_trainer.reporting.page import Fact, HeldOut, make_page
from example_trainer.reporting.series import (
    STEP_SIGN,
    RunRecords,
    Series,
    read_records,
    series_of,
    short_number,
)

__all__ = ["REPORT_NAME", "read_settings", "settings_path", "write_report", "write_settings"]

REPORT_NAME = "report.html"
_ACCURACY_KEY = "percent_correct"
_PART_KEY = "train/reward/"
_MOST_PARTS = 6
"""As many lines as the charts have colours."""
_END_SHARE = 10
"""One part of so many of the steps makes a figure of the start, and of the end."""


def settings_path(metrics_path: Path) -> Path:
    """Return the path of a run's settings, in the folder of its metrics."""
    return metrics_path.with_name(f"{metrics_path.stem}_settings.json")


def write_settings(
    metrics_path: Path,
    settings: Mapping[str, Any],
    changed: Mapping[str, Any],
    *,
    run_id: str | None = None,
) -> None:
    """Keep the settings of a run for its report; secrets in them are masked.

    Args:
        metrics_path: the metrics file of the run.
        settings: all of them, as JSON values.
        changed: those that are not at their defaults.
        run_id: which run it is.
    """
    path = settings_path(metrics_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {"settings": mask_secrets(settings), "changed": mask_secrets(changed), "run_id": run_id}
    write_file(path, (json.dumps(kept, indent=2, default=str) + "\n").encode())


def write_report(
    metrics_path: Path,
    report_path: Path,
    *,
    environment_path: Path | None = None,
    held_out: Sequence[HeldOut] = (),
    needs_steps: bool = False,
) -> int:
    """Write the report of the newest run in a metrics file.

    Args:
        metrics_path: JSON Lines of the trainer; its settings are read from the same folder.
        report_path: the HTML file.
        environment_path: JSON Lines of an environment, for its accuracy and parts of its reward.
        held_out: results on problems that were not trained on.
        needs_steps: refuse metrics without a step instead of writing a report of none.

    Returns:
        Number of steps in the report.

    Raises:
        ConfigError: a file cannot be read, or holds no step although there must be some.
    """
    records = read_records(_lines(metrics_path))
    if needs_steps and not records.steps:
        raise ConfigError(
            f"{metrics_path}: holds no metrics of a trainer (no line with step and {STEP_SIGN}); "
            "metrics of an environment are given with --environment, beside those of its trainer"
        )
    kept = read_settings(metrics_path)
    settings, changed = kept.get("settings", {}), kept.get("changed", {})
    environment = _lines(environment_path) if environment_path else []
    accuracy = _accuracy(environment)
    page = make_page(
        records.steps,
        title=_title(settings),
        facts=_facts(records.steps, settings, accuracy),
        findings=find(records.steps),
        settings=settings,
        changed=changed,
        accuracy=accuracy,
        reward_parts=_reward_parts(environment),
        held_out=held_out,
        notes=_notes(records, settings),
    )
    report_path.parent.mkdir(parents=True, exist_ok=True)
    report_path.write_text(page, encoding="utf-8")
    return len(records.steps)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error


def read_settings(metrics_path: Path) -> dict[str, Any]:
    """Return the settings stored with a metrics file; empty if they cannot be read."""
    try:
        kept = json.loads(settings_path(metrics_path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def _title(settings: Mapping[str, Any]) -> str:
    name = str(settings.get("model_name") or "").rstrip("/").rpartition("/")[2]
    return f"Training of {name}" if name else "Training run"


def _facts(
    steps: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], accuracy: Series | None
) -> list[Fact]:
    facts = []
    if steps:
        planned = settings.get("training_steps")
        facts.append(Fact("steps", f"{steps[-1]['step']}" + (f" of {planned}" if planned else "")))
    if "algorithm" in settings:
        facts.append(Fact("algorithm", str(settings["algorithm"])))
    if accuracy is not None:
        facts.append(Fact("accuracy", _change(accuracy)))
    for key, name in (
        ("train/reward_mean", "reward"),
        ("alignment/k3", "KL to the sampler"),
        ("train/entropy", "entropy"),
        ("train/staleness_mean", "staleness, steps"),
        ("train/tokens_per_s", "tokens/s"),
        ("train/mfu", "MFU"),
    ):
        series = series_of(steps, key, name)
        if series is not None:
            facts.append(Fact(name, _change(series)))
    times, tokens = (
        series_of(steps, "train/step_time", ""),
        series_of(steps, "train/input_tokens", ""),
    )
    if times is not None:
        facts.append(Fact("time in steps", str(datetime.timedelta(seconds=round(sum(times.ys))))))
    if tokens is not None:
        facts.append(Fact("tokens fed to the model", f"{sum(tokens.ys):,.0f}"))
    return [*facts, *_dates(steps)]


def _change(series: Series) -> str:
    """Write the mean of the first and of the last steps."""
    size = max(1, len(series.ys) // _END_SHARE)
    first, last = (sum(part) / size for part in (series.ys[:size], series.ys[-size:]))
    return f"{_rounded(first)} → {_rounded(last)}" if len(series.ys) > 1 else _rounded(last)


def _rounded(value: float) -> str:
    return short_number(float(f"{value:.3g}"))


def _dates(steps: Sequence[Mapping[str, Any]]) -> list[Fact]:
    times = [record["time"] for record in steps if isinstance(record.get("time"), int | float)]
    if not times:
        return []
    last = datetime.datetime.fromtimestamp(times[-1], datetime.timezone.utc)
    return [Fact("last step", f"{last:%Y-%m-%d %H:%M} UTC")]


def _accuracy(lines: Sequence[str]) -> Series | None:
    """Find the environment's share of right answers; its name stands before the metric's."""
    points: dict[float, float] = {}
    for line in lines:
        try:
            record = json.loads(line)
            value = next(v for k, v in record.items() if k.endswith(_ACCURACY_KEY))
            points[float(record["step"])] = float(value)
        except (ValueError, TypeError, KeyError, AttributeError, StopIteration):
            continue
    if not points:
        return None
    steps = sorted(points)
    return Series("share of right answers", steps, [points[step] for step in steps])


def _reward_parts(lines: Sequence[str]) -> list[Series]:
    """Find the named parts of the environment's reward; its name stands before the metric's."""
    points: dict[str, dict[float, float]] = {}
    for line in lines:
        try:
            record = json.loads(line)
            step = float(record["step"])
            found = {k.rpartition(_PART_KEY)[2]: v for k, v in record.items() if _PART_KEY in k}
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
        for name, value in found.items():
            if isinstance(value, int | float) and math.isfinite(value):
                points.setdefault(name, {})[step] = float(value)
    return [
        Series(name, sorted(values), [values[step] for step in sorted(values)])
        for name, values in sorted(points.items())
    ][:_MOST_PARTS]


def _notes(records: RunRecords, settings: Mapping[str, Any]) -> list[str]:
    notes = []
    if records.num_unreadable:
        notes.append(f"Lines of the metrics that could not be read: {records.num_unreadable}.")
    if not settings:
        notes.append("The settings of the run were not beside its metrics.")
    return notes
