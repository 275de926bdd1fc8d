"""Files and results in the folder of a run, for its report.

    RUN/summary.json                    results on held-out problems, duration, title
    RUN/environments/NAME/              of each environment of `atropos-train`
      environment_metrics.jsonl           accuracy and parts of the reward
      environment_metrics.settings.yaml   its settings
      groups.jsonl, groups_1.jsonl ...    rollouts

The demo has the files of its environment in RUN itself. A run that has not ended has no summary.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from atroposlib.errors import ConfigError
from atroposlib.utils.text import mask_secrets
from atroposlib.utils.yaml_text import read_yaml
from example_trainer.reporting.page import HeldOut

ENVIRONMENTS_NAME = "environments"
ENVIRONMENT_METRICS_NAME = "environment_metrics.jsonl"
GROUPS_NAME = "groups.jsonl"
ROLLOUTS_NAME = "rollouts.html"
SUMMARY_NAME = "summary.json"
METRICS_NAMES = ("metrics.jsonl", "trainer_metrics.jsonl")
"""Names of the trainer's metrics in the folder of a run."""
_INTERVAL_ENDS = ("_stderr", "_ci_low", "_ci_high")
"""Ends of the names by which `evaluate` reports the uncertainty of a metric."""


class FoundRun(NamedTuple):
    """The files and results of a run."""

    environment_path: Path | None
    """Metrics of its environment; None if there are several."""
    groups: Sequence[Sequence[Path]]
    """Files of groups of each environment, oldest first."""
    environments: Mapping[str, Mapping[str, Any]]
    """Settings of each environment by its name; the only one has the name `environment`."""
    names: Sequence[str]
    """Names of the environments for a title; empty if they are not known."""
    held_out: Sequence[HeldOut]
    title: str | None
    seconds: float | None
    """Duration of the whole run."""


def metrics_in(run: Path) -> Path:
    """Return the trainer's metrics in the folder of a run; a file is returned as it is.

    Raises:
        ConfigError: the folder has none.
    """
    if not run.is_dir():
        return run
    found = next((run / name for name in METRICS_NAMES if (run / name).exists()), None)
    if found is None:
        raise ConfigError(
            f"{run} has no metrics of a trainer ({' or '.join(METRICS_NAMES)}); expected the "
            "folder of a training run that has done a step"
        )
    return found


def find_run(metrics_path: Path, *, planned_steps: Any) -> FoundRun:
    """Find the files of a run next to its metrics.

    Args:
        metrics_path: Metrics of its trainer.
        planned_steps: Steps by its settings; a summary of fewer steps is that of an earlier part.
    """
    folder = metrics_path.parent
    summary = _read_summary(folder / SUMMARY_NAME)
    if planned_steps is not None and summary.get("steps") != planned_steps:
        summary = {}
    below = folder / ENVIRONMENTS_NAME
    present = sorted(path.name for path in below.iterdir()) if below.is_dir() else []
    listed = summary.get("environments")
    in_order = listed if isinstance(listed, list) else []
    names = [name for name in in_order if name in present] or present
    folders = [below / name for name in names] or [folder]
    metrics = [path / ENVIRONMENT_METRICS_NAME for path in folders]
    title = summary.get("title")
    keys = names if len(names) > 1 else ["environment"]
    return FoundRun(
        environment_path=metrics[0] if len(metrics) == 1 and metrics[0].is_file() else None,
        groups=[groups_files(path / GROUPS_NAME) for path in folders],
        environments={key: _read_settings(path) for key, path in zip(keys, metrics, strict=True)},
        names=names,
        held_out=_held_out(summary),
        title=title if isinstance(title, str) else None,
        seconds=_number(summary.get("seconds")),
    )


def groups_files(groups_path: Path) -> list[Path]:
    """Return the files of groups of an environment, oldest first.

    An environment that is restarted adds `_1`, `_2`, ... to the name.
    """
    files = [groups_path]
    while (
        again := groups_path.with_name(f"{groups_path.stem}_{len(files)}{groups_path.suffix}")
    ).is_file():
        files.append(again)
    return [path for path in files if path.is_file()]


def measured_names(metrics: Iterable[str]) -> list[str]:
    """Return the names of an evaluation's metrics without those of their uncertainty."""
    return [name for name in metrics if not name.endswith(_INTERVAL_ENDS)]


def _read_summary(path: Path) -> Mapping[str, Any]:
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return _mapping(summary)


def _read_settings(metrics_path: Path) -> Mapping[str, Any]:
    """Return section `env` of the settings that an environment stores next to its metrics."""
    try:
        text = metrics_path.with_suffix(".settings.yaml").read_text(encoding="utf-8")
        settings = _mapping(read_yaml(text)).get("env")
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return {}
    return _mapping(mask_secrets(settings))


def _held_out(summary: Mapping[str, Any]) -> list[HeldOut]:
    """Return the results of the demo, or of each evaluation of `atropos-train`."""
    accuracy = _number(summary.get("accuracy_after"))
    if accuracy is not None:
        before, count = _number(summary.get("accuracy_before")), summary.get("num_held_out")
        num_problems = count if isinstance(count, int) else None
        return [HeldOut("share of right answers", before, accuracy, num_problems)]
    earlier, later = (_mapping(summary.get(f"evaluations_{when}")) for when in ("before", "after"))
    return [
        HeldOut(f"{name}: {key}", _number(_mapping(earlier.get(name)).get(key)), value)
        for name, results in later.items()
        for key in measured_names(_mapping(results))
        if (value := _number(results[key])) is not None
    ]


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
