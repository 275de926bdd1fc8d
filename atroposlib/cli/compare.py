"""`atropos-compare`: compare the results of evaluations, metric by metric, on their common items.

    RUN_DIR/metrics.json  ─► metrics ────────────────┐
    RUN_DIR/samples.jsonl ─► values of each item ─► paired difference, 95% interval, p-value

The first run is the baseline of all others. The same item has the same `item_id` in every run.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atroposlib.envs.evaluation import digest_of
from atroposlib.envs.evaluation_statistics import INTERVAL_ENDS, PairedDifference, compare_items
from atroposlib.errors import ConfigError
from atroposlib.utils.command_parser import (
    CommandParser,
    end_command,
    prepare_command,
    reader_may_leave,
)
from atroposlib.utils.json_text import decode_line
from atroposlib.utils.text import inert_block, near_name

__all__ = ["EvaluationResult", "RunComparison", "compare_runs", "main", "read_result"]

_COMMAND = "atropos-compare"
_HEAD = ("metric", "baseline", "run", "difference", "95% interval", "p", "items")
_TASK_KEY = re.compile(r"atropos\|(.*)\|0", re.DOTALL)
MAX_NUMBER = 1e300
"""Sums and differences of values up to this one are finite."""
_TRAINER_METRICS = ("metrics.jsonl", "trainer_metrics.jsonl")
_METRICS_FILE = re.compile(r"metrics(-\d+)?\.json")


@dataclass(frozen=True)
class EvaluationResult:
    """The result of one evaluation."""

    label: str
    """The argument that named it."""
    task: str
    model: str | None
    sampling: Mapping[str, Any]
    metrics: Mapping[str, float]
    """Numbers only."""
    values: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)
    """Metric to item to the [K] values of its samples; empty without samples that name items."""

    @property
    def items(self) -> set[str]:
        return {item for of_items in self.values.values() for item in of_items}


@dataclass(frozen=True)
class RunComparison:
    """A run compared with the baseline."""

    run: EvaluationResult
    num_common_items: int
    differences: Mapping[str, PairedDifference]
    """Metric to its paired difference; metrics without values per item are missing."""


def main() -> None:
    """Print the comparison; exit code 2 if the runs cannot be compared."""
    prepare_command()
    args = _parser().parse_args()
    if len(args.runs) < 2:
        end_command(_COMMAND, "two or more results are needed; see --help", code=2)
    try:
        runs = [read_result(Path(name), name) for name in args.runs]
        comparisons = compare_runs(runs)
        names = _chosen_metrics(runs, args.metric)
    except (ConfigError, OSError) as error:
        end_command(_COMMAND, error, code=2)
    try:
        with reader_may_leave():
            if args.json:
                print(json.dumps(_as_json(runs, comparisons, names), indent=2))
            else:
                print(inert_block(_text(runs, comparisons, names)))
    except OSError as error:  # such as standard output on a full disk
        end_command(_COMMAND, error, code=1)


def read_result(path: Path, label: str) -> EvaluationResult:
    """Read the result in a folder, or an earlier one by the name of its file of metrics.

    Args:
        path: folder of `data_dir_to_save_evals`, or a file such as `metrics-1.json` in it.
        label: name of the result in tables and errors.

    Raises:
        ConfigError: there is no readable result.
    """
    file = path / "metrics.json" if path.is_dir() else path
    named = _METRICS_FILE.fullmatch(file.name)
    if named is None or not file.is_file():
        hint = ""
        if (path / "progress.jsonl").is_file():
            hint = "; it has an unfinished evaluation, which the same command continues"
        elif path.is_dir():  # such as a run of atropos-train
            below = sorted(
                str(found.parent) for found in path.glob("environments/*/*/metrics.json")
            )
            hint = f"; these folders of it have one: {', '.join(below)}" if below else ""
        if any((path / name).is_file() for name in _TRAINER_METRICS) or (
            path.name in _TRAINER_METRICS
        ):
            hint += "; the curves of training runs are compared by atropos-report RUN RUN"
        raise ConfigError(
            f"{label} has no result of an evaluation{hint}; expected a folder given as "
            "--env.data_dir_to_save_evals, with metrics.json, or a file metrics-<number>.json of it"
        )
    try:
        report = decode_line(file.read_bytes())
        general, results = _mapping(report["config_general"]), _mapping(report["results"])
        metrics = _mapping(results["all"])
        [task] = [found[1] for name in results if (found := _TASK_KEY.fullmatch(name))]
        sampling = _mapping(general.get("generation_parameters") or {})
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{file} is not the result of an evaluation ({error!r}); expected the keys "
            "config_general and results, as written by evaluate"
        ) from error
    return EvaluationResult(
        label=label,
        task=task,
        model=general.get("model_name"),
        sampling=sampling,
        metrics={name: float(value) for name, value in metrics.items() if _is_number(value)},
        values=_read_values(file.with_name(f"samples{named[1] or ''}.jsonl")),
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{value!r:.50} is not an object")
    return value


def _read_values(path: Path) -> dict[str, dict[str, list[float]]]:
    """Return metric to item to values; the score is a metric of samples without `metric_values`."""
    values: dict[str, dict[str, list[float]]] = {}
    if not path.is_file():
        return values
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = decode_line(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{path}: line {number} is not JSON: {error}") from error
            item = _item_of(record)
            if item is None:
                continue
            of_metrics = record.get("metric_values") or {"score": record.get("score")}
            if not isinstance(of_metrics, Mapping):
                raise ConfigError(f"{path}: line {number}: metric_values is not an object")
            for name, value in of_metrics.items():
                if _is_number(value):
                    values.setdefault(name, {}).setdefault(item, []).append(float(value))
    return values


def _item_of(record: Any) -> str | None:
    """Return what identifies the item of a sample: its id, or the chat before the first reply."""
    if not isinstance(record, Mapping):
        return None
    if isinstance(record.get("item_id"), str):
        return str(record["item_id"])
    chat = []
    messages = record.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, Mapping) or message.get("role") == "assistant":
            break
        chat.append(message)
    return digest_of(chat) if chat else None


def _is_number(value: Any) -> bool:
    """Whether a value is a number that can be compared; NaN is not."""
    return isinstance(value, int | float) and abs(value) <= MAX_NUMBER


def compare_runs(runs: Sequence[EvaluationResult]) -> list[RunComparison]:
    """Compare all runs with the first.

    Raises:
        ConfigError: the runs have different tasks, or no item in common.
    """
    baseline = runs[0]
    comparisons = []
    for run in runs[1:]:
        if run.task != baseline.task:
            raise ConfigError(
                f"{baseline.label} is an evaluation of {baseline.task}, {run.label} of {run.task}; "
                "only results of the same task can be compared"
            )
        common = baseline.items & run.items
        if baseline.items and run.items and not common:
            raise ConfigError(
                f"{baseline.label} and {run.label} have no item in common ({len(baseline.items)} "
                f"and {len(run.items)} items); evaluate both on the same data, with the same "
                "--env.dataset_path or data set of the hub"
            )
        differences = {
            name: compare_items(baseline.values[name], run.values[name])
            for name in baseline.values
            if name in run.values and baseline.values[name].keys() & run.values[name].keys()
        }
        comparisons.append(RunComparison(run, len(common), differences))
    return comparisons


def _chosen_metrics(runs: Sequence[EvaluationResult], wanted: Sequence[str] | None) -> list[str]:
    """Return the metrics to show, in the order of the baseline; those of all runs come first."""
    known = dict.fromkeys(
        name
        for run in runs
        for name in (*run.metrics, *run.values)
        if not name.endswith(INTERVAL_ENDS)
    )
    for name in wanted or ():
        if name not in known:
            hint = near_name(name, known) or f"; they have {', '.join(known)}"
            raise ConfigError(f"no result has the metric {name!r}{hint}")
    return list(wanted or known)


def _as_json(
    runs: Sequence[EvaluationResult], comparisons: Sequence[RunComparison], names: Sequence[str]
) -> dict[str, Any]:
    return {
        "task": runs[0].task,
        "baseline": runs[0].label,
        "runs": [
            {
                "run": run.label,
                "model": run.model,
                "num_items": len(run.items) or None,
                "metrics": {name: run.metrics[name] for name in names if name in run.metrics},
            }
            for run in runs
        ],
        "comparisons": [
            {
                "run": each.run.label,
                "num_common_items": each.num_common_items,
                "metrics": {
                    name: _difference_json(runs[0], each, name)
                    for name in names
                    if _plain_difference(runs[0], each, name) is not None
                },
            }
            for each in comparisons
        ],
    }


def _difference_json(
    baseline: EvaluationResult, comparison: RunComparison, name: str
) -> dict[str, Any]:
    paired = comparison.differences.get(name)
    if paired is None:
        return {"difference": _plain_difference(baseline, comparison, name)}
    return {
        "difference": paired.difference,
        "ci_low": paired.low,
        "ci_high": paired.high,
        "p_value": paired.p_value,
        "test": paired.test,
        "num_items": paired.num_items,
    }


def _plain_difference(
    baseline: EvaluationResult, comparison: RunComparison, name: str
) -> float | None:
    if name in comparison.differences:
        return comparison.differences[name].difference
    if name in baseline.metrics and name in comparison.run.metrics:
        return comparison.run.metrics[name] - baseline.metrics[name]
    return None


def _text(
    runs: Sequence[EvaluationResult], comparisons: Sequence[RunComparison], names: Sequence[str]
) -> str:
    lines = [f"task {runs[0].task}", f"baseline: {_titled(runs[0])}"]
    for comparison in comparisons:
        lines += ["", f"{_titled(comparison.run)}, against the baseline"]
        lines += _remarks(runs[0], comparison)
        rows: list[tuple[str, ...]] = [_HEAD]
        rows += [_row(runs[0], comparison, name) for name in names]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
    lines += [
        "",
        "p: McNemar's exact test for one right or wrong sample per item, else a paired "
        "randomization test; not corrected for the number of metrics",
    ]
    return "\n".join(lines)


def _titled(run: EvaluationResult) -> str:
    items = f", {len(run.items)} items" if run.items else ""
    return f"{run.label} ({run.model or 'unknown model'}{items})"


def _remarks(baseline: EvaluationResult, comparison: RunComparison) -> list[str]:
    run, remarks = comparison.run, []
    if not baseline.items or not run.items:
        remarks.append(
            "note: samples.jsonl is missing or names no items, so differences have no interval"
        )
    elif len(baseline.items | run.items) > comparison.num_common_items:
        remarks.append(
            f"note: differences are over the {comparison.num_common_items} common items; the "
            "metrics are over all items of their run"
        )
    names = sorted(baseline.sampling.keys() | run.sampling.keys())
    for name in names:
        first, second = (each.sampling.get(name, "unset") for each in (baseline, run))
        if first != second:
            remarks.append(f"note: {name} differs: {first} in the baseline, {second} in this run")
    return remarks


def _row(baseline: EvaluationResult, comparison: RunComparison, name: str) -> tuple[str, ...]:
    difference = _plain_difference(baseline, comparison, name)
    paired = comparison.differences.get(name)
    interval = ""
    if paired is not None and paired.low is not None and paired.high is not None:
        interval = f"{paired.low:+.4f} to {paired.high:+.4f}"
    return (
        name,
        _number(baseline.metrics.get(name)),
        _number(comparison.run.metrics.get(name)),
        "-" if difference is None else f"{difference:+.4f}",
        interval,
        "" if paired is None else f"{paired.p_value:.3g}",
        "" if paired is None else str(paired.num_items),
    )


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value.is_integer() and abs(value) > 1 else f"{value:.4f}"


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=_COMMAND,
        description="Compare the results of evaluations, metric by metric, on their common items. "
        "The first run is the baseline of all others.",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN_DIR",
        help="folder of results (--env.data_dir_to_save_evals), or a file metrics-<number>.json in "
        "it; the first is the baseline",
    )
    parser.add_argument(
        "--metric", action="append", metavar="NAME", help="show this metric only; may be repeated"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


if __name__ == "__main__":
    main()
