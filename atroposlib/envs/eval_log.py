"""Files an evaluation leaves behind: `metrics.json` and `samples.jsonl` of the latest result."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from atroposlib.utils.display import display_metrics_table
from atroposlib.utils.plain_json import to_plain

__all__ = ["evaluate_log"]

logger = logging.getLogger(__name__)


def evaluate_log(
    metrics: Mapping[str, Any],
    eval_dir: str | Path | None = None,
    task_name: str | None = None,
    model_name: str | None = None,
    start_time: float | None = None,
    end_time: float | None = None,
    generation_parameters: Mapping[str, Any] | None = None,
    samples: Sequence[Any] | None = None,
    verbose: bool = True,
) -> None:
    """Write the result of one evaluation, and print it.

    `metrics.json` and `samples.jsonl` are always the latest result; an earlier result is kept as
    `metrics-1.json`, `samples-1.jsonl`, then `-2` and so on.

    Args:
        metrics: name to value; may be empty.
        eval_dir: folder to write to, created when missing; None writes nothing and warns.
        task_name: the results stand under `atropos|<task_name>|0` and under `all`.
        model_name: the model evaluated.
        start_time: seconds since the epoch; None means now.
        end_time: seconds since the epoch; None means now.
        generation_parameters: sampling settings that were used.
        samples: one record per question, any JSON value; what has no JSON form becomes text.
        verbose: print a table of the metrics.
    """
    started = time.time() if start_time is None else start_time
    ended = time.time() if end_time is None else end_time
    if verbose:
        display_metrics_table(task_name, metrics, started, ended)
    if eval_dir is None:
        logger.warning("evaluation results are not saved: no folder given (data_dir_to_save_evals)")
        return

    folder = Path(eval_dir)
    folder.mkdir(parents=True, exist_ok=True)
    _keep_earlier_result(folder)
    report = {
        "config_general": {
            "model_name": model_name,
            "total_evaluation_time_seconds": str(ended - started),
            "generation_parameters": dict(generation_parameters or {}),
        },
        "results": {f"atropos|{task_name}|0": dict(metrics), "all": dict(metrics)},
    }
    text = json.dumps(report, indent=2, default=_as_text)
    (folder / "metrics.json").write_text(text + "\n", encoding="utf-8")
    if samples:
        with (folder / "samples.jsonl").open("w", encoding="utf-8") as file:
            for sample in samples:
                file.write(json.dumps(sample, default=_as_text) + "\n")
    logger.info("evaluation results are in %s", folder)


def _keep_earlier_result(folder: Path) -> None:
    number = 1
    while any((folder / f"{stem}-{number}{suffix}").exists() for stem, suffix in _FILES):
        number += 1
    for stem, suffix in _FILES:
        latest = folder / f"{stem}{suffix}"
        if latest.exists():
            latest.rename(folder / f"{stem}-{number}{suffix}")


_FILES = (("metrics", ".json"), ("samples", ".jsonl"))


def _as_text(value: Any) -> Any:
    try:
        return to_plain(value)
    except TypeError:
        return str(value)
