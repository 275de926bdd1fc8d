"""`atropos-report`: write the report of a run, or the comparison of several, from their metrics."""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from atroposlib.errors import ConfigError
from atroposlib.utils.command_parser import (
    CommandParser,
    end_command,
    prepare_command,
    reader_may_leave,
)
from atroposlib.utils.text import mask_secrets
from atroposlib.utils.writable import write_file
from example_trainer.reporting.comparison import (
    MAX_RUNS,
    PAGE_MARK,
    ComparedRun,
    make_comparison_page,
    make_labels,
)
from example_trainer.reporting.examples import (
    GroupExcerpt,
    RolloutExamples,
    choose_examples,
    read_excerpt,
)
from example_trainer.reporting.page import (
    MAX_STEP,
    STEP_SIGN,
    Fact,
    HeldOut,
    RunRecords,
    Series,
    charted_number,
    make_page,
    read_records,
    series_of,
    short_number,
)
from example_trainer.reporting.run_folder import METRICS_NAMES, ROLLOUTS_NAME, find_run, metrics_in

_FINDINGS_END_SHARE = 0.1
_FEW_STEPS = 4
_COLLAPSED_ENTROPY = 0.2
"""Share of the entropy at the start."""


class Limit(NamedTuple):
    """Maximum of the mean of a metric over the last tenth of a run."""

    key: str
    most: float
    what: str
    """Description of an exceeded limit, and the remedy by the names of settings, of which the
    commands have different flags."""


LIMITS = (
    Limit(
        "grpo/clipped_fraction",
        0.3,
        "many ratios to the sampler's logprobs are outside the clip range: use a smaller lr, "
        "publish weights more often, or use importance_correction",
    ),
    Limit(
        "alignment/diff_abs_mean",
        0.1,
        "the trainer's and the engine's logprobs differ: check dtypes, the temperature, "
        "logprobs_mode, and staleness below",
    ),
    Limit(
        "train/staleness_mean",
        4,
        "groups were sampled by weights several steps old: publish more often "
        "(vllm_restart_interval), or reduce max_batches_offpolicy of the environments",
    ),
    Limit(
        "train/truncation_rate",
        0.2,
        "many completions were truncated: increase the token limits, or shorten answers with "
        "overlong_max_tokens",
    ),
    Limit(
        "train/zero_advantage_groups_fraction",
        0.5,
        "most groups have no gradient, because all their scores are equal: use harder or easier "
        "problems, or larger groups",
    ),
    Limit("train/padding_fraction", 0.5, "most of the computed tokens are padding: use packing=on"),
    Limit("alignment/missing_fraction", 0.0, "tokens have no logprobs of the sampler"),
)


def find(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return sentences about possible problems of a run."""
    if not steps:
        return []
    found = [text for limit in LIMITS if (text := _above(steps, limit))]
    return [*_events(steps), *_collapse(steps), *found, *_waits(steps)]


def _above(steps: Sequence[Mapping[str, Any]], limit: Limit) -> str | None:
    last = _end_mean(steps, limit.key)
    if last is None or last <= limit.most:
        return None
    return (
        f"{limit.key} is {short_number(last)} in the last steps, above {limit.most:g}"
        f"{_worst(steps, limit.key)}: {limit.what}"
    )


def _worst(steps: Sequence[Mapping[str, Any]], key: str) -> str:
    """Return the largest value of a metric and its step; empty for a single step."""
    series = series_of(steps, key, key)
    if series is None or len(series.ys) < 2:
        return ""
    worst = max(range(len(series.ys)), key=lambda i: series.ys[i])
    return f" (worst: {short_number(series.ys[worst])} at step {series.xs[worst]:.0f})"


def _events(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    skipped = sum(charted_number(record.get("train/skipped_steps")) or 0.0 for record in steps)
    losses = [(record["step"], record["train/loss"]) for record in steps]
    not_numbers = [step for step, loss in losses if loss != loss]
    found = []
    if skipped:
        found.append(
            f"{skipped:.0f} of {len(steps)} steps were skipped, since their gradient was not finite"
        )
    if not_numbers:
        found.append(f"the loss was NaN at {len(not_numbers)} steps, first at {not_numbers[0]}")
    return found


def _collapse(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    for key in ("train/entropy", "train/entropy_estimate"):
        first, last = _start_mean(steps, key), _end_mean(steps, key)
        if first is None or last is None:
            continue
        if len(steps) >= _FEW_STEPS and first > 0 and last < _COLLAPSED_ENTROPY * first:
            return [
                f"the entropy fell from {short_number(first)} to {short_number(last)}: the policy "
                "has almost stopped exploring (a higher clip_eps_high, a KL penalty, or an "
                "earlier checkpoint may help)"
            ]
        return []
    return []


def _waits(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    total = _sum(steps, "train/step_time")
    found = []
    for key, what in (
        ("train/data_fetch_time", "waiting for batches: environments or the engine are too slow"),
        ("train/sync_time", "saving and publishing weights: do so less often"),
    ):
        if total and len(steps) >= _FEW_STEPS and _sum(steps, key) > total / 2:
            found.append(f"{_sum(steps, key) / total:.0%} of the time was spent {what}")
    return found


def _sum(steps: Sequence[Mapping[str, Any]], key: str) -> float:
    series = series_of(steps, key, key)
    return sum(series.ys) if series else 0.0


def _end_mean(steps: Sequence[Mapping[str, Any]], key: str) -> float | None:
    return _mean(steps[-_num_end(steps) :], key)


def _start_mean(steps: Sequence[Mapping[str, Any]], key: str) -> float | None:
    return _mean(steps[: _num_end(steps)], key)


def _num_end(steps: Sequence[Mapping[str, Any]]) -> int:
    return max(1, round(len(steps) * _FINDINGS_END_SHARE))


def _mean(steps: Sequence[Mapping[str, Any]], key: str) -> float | None:
    series = series_of(steps, key, key)
    return sum(series.ys) / len(series.ys) if series else None


REPORT_NAME = "report.html"
COMPARISON_NAME = "comparison.html"
_PAGE_START = b"<!doctype html>"
_ACCURACY = "share of right answers"
_ACCURACY_KEY = "percent_correct"
_PART_KEY = "train/reward/"
_MOST_PARTS = 6
"""Number of colors of the charts."""
_UNREADABLE = (
    ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError
)  # fmt: skip
"""Errors of a line that is not a record with a step."""
_END_OF_TIME = 253_402_300_800
"""Year 10,000 in seconds; dates end there."""
_END_SHARE = 10
"""Divisor of the number of steps for the means at the start and at the end."""


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
    """Write the settings of a run, and the changed ones, for its report; secrets are masked."""
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
    title: str | None = None,
    seconds: float | None = None,
    groups: Sequence[Sequence[Path]] = (),
    rollouts_path: Path | None = None,
) -> int:
    """Write the report of the newest run in a metrics file and return its number of steps.

    Args:
        metrics_path: JSON Lines of the trainer; its settings are read from the same folder.
        report_path: The HTML file.
        environment_path: JSON Lines of an environment, for its accuracy and parts of its reward.
        held_out: Results on problems that were not trained on.
        needs_steps: Whether to reject metrics without a step.
        title: Heading of the page; by default the name of the model.
        seconds: Duration of the whole run.
        groups: JSON Lines of groups for each environment, oldest first, for examples of rollouts.
        rollouts_path: Page of rollouts to link to, if it is in the folder of the report.

    Raises:
        ConfigError: a file cannot be read, or has no step despite `needs_steps`.
    """
    records = read_records(_lines(metrics_path))
    if needs_steps:
        _require_steps(records, metrics_path)
    kept = read_settings(metrics_path)
    settings, changed = kept.get("settings", {}), kept.get("changed", {})
    environment = _lines(environment_path) if environment_path else []
    accuracy = _accuracy(environment)
    page = make_page(
        records.steps,
        title=title or _title(settings),
        lead=_lead(records.steps, settings, seconds),
        facts=_facts(records.steps, settings, accuracy),
        findings=find(records.steps),
        settings=settings,
        changed=changed,
        accuracy=accuracy,
        reward_parts=_reward_parts(environment),
        held_out=held_out,
        notes=_notes(records, settings),
        examples=_examples(groups),
        rollouts_name=_neighbor(rollouts_path, report_path),
    )
    report_path.parent.mkdir(parents=True, exist_ok=True)
    write_file(report_path, page.encode("utf-8", "replace"))
    return len(records.steps)


def write_comparison(metrics_paths: Sequence[Path], page_path: Path) -> int:
    """Write the page that compares runs and return the number of steps of the longest.

    Raises:
        ConfigError: a file cannot be read, has no step, is given twice, or there are more than
            `MAX_RUNS`; or `page_path` is another file than such a page.
    """
    if len(metrics_paths) > MAX_RUNS:
        raise ConfigError(
            f"{len(metrics_paths)} runs; expected at most {MAX_RUNS}, one for each color of a chart"
        )
    resolved = [path.resolve() for path in metrics_paths]
    for i, path in enumerate(resolved):
        if path in resolved[:i]:
            raise ConfigError(f"{metrics_paths[i]}: the same run is given twice")
    _require_comparison(page_path)
    # A folder gives the name if the file has the name that the trainer writes.
    labels = make_labels([path.parent if path.name in METRICS_NAMES else path for path in resolved])
    runs = [_compared(path, label) for path, label in zip(metrics_paths, labels, strict=True)]
    page_path.parent.mkdir(parents=True, exist_ok=True)
    write_file(page_path, make_comparison_page(runs).encode("utf-8", "replace"))
    return max(len(run.steps) for run in runs)


def _compared(metrics_path: Path, label: str) -> ComparedRun:
    records = read_records(_lines(metrics_path))
    _require_steps(records, metrics_path)
    settings = read_settings(metrics_path).get("settings", {})
    found = find_run(metrics_path, planned_steps=settings.get("training_steps"))
    title = found.title or _title(settings, found.names)
    environment = _lines(found.environment_path) if found.environment_path else []
    return ComparedRun(
        label=label,
        source=str(metrics_path),
        lead=f"{title} · {_lead(records.steps, settings, found.seconds)}",
        steps=records.steps,
        settings=settings,
        environments=found.environments,
        accuracy=_accuracy(environment),
        reward_parts=_reward_parts(environment),
        held_out=found.held_out,
    )


def _start_of(path: Path) -> bytes | None:
    """Return the beginning of a file; None if there is no file."""
    if not path.exists():
        return None
    if not path.is_file():  # the page would take the place of a device such as /dev/null
        raise ConfigError(f"{path} is not a regular file; give another file with --output")
    try:
        with path.open("rb") as file:
            return file.read(1024)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error


def _require_page(path: Path) -> None:
    """Raise `ConfigError` if a file exists that is not a page, such as the metrics of a run."""
    start = _start_of(path)
    if start and not start.startswith(_PAGE_START):
        raise ConfigError(f"{path} exists and is not a page; give another file with --output")


def _require_comparison(path: Path) -> None:
    """Raise `ConfigError` if a file exists that is not a page of several runs."""
    start = _start_of(path)
    if start is not None and PAGE_MARK.encode() not in start:
        raise ConfigError(
            f"{path} exists and is not a comparison of runs; give another file with --output"
        )


def _require_steps(records: RunRecords, metrics_path: Path) -> None:
    if not records.steps:
        raise ConfigError(
            f"{metrics_path}: no metrics of a trainer (no line with step and {STEP_SIGN}); give "
            "the metrics of an environment with --environment, in addition to those of its trainer"
        )


def _lines(path: Path) -> list[str]:
    try:
        # Not `splitlines`: text in JSON may have other characters that end a line, such as U+2028.
        return path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error


MAX_EXAMPLE_GROUPS = 256
"""Groups that are read from each end of a run, to choose examples."""
MAX_EXAMPLE_BYTES = 16 * 2**20
"""Bytes that are read from each end."""


def _examples(groups: Sequence[Sequence[Path]]) -> RolloutExamples:
    first: list[GroupExcerpt] = []
    last: list[GroupExcerpt] = []
    for paths in groups:
        if paths:
            start, end = _end_lines(paths)
            first += filter(None, map(read_excerpt, start))
            last += filter(None, map(read_excerpt, end))
    return choose_examples(first, last)


def _end_lines(paths: Sequence[Path]) -> tuple[list[bytes], list[bytes]]:
    """Return lines of the start of the first file and of the end of the last one, all different."""
    try:
        if len(paths) == 1 and paths[0].stat().st_size <= 2 * MAX_EXAMPLE_BYTES:
            with paths[0].open("rb") as file:
                lines = file.read(2 * MAX_EXAMPLE_BYTES).splitlines()
            half = len(lines) // 2
            return lines[:half][:MAX_EXAMPLE_GROUPS], lines[half:][-MAX_EXAMPLE_GROUPS:]
        return list(_first_lines(paths[0])), _last_lines(paths[-1])
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be read ({error.strerror})") from error


def _first_lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        lines = file.read(MAX_EXAMPLE_BYTES).splitlines()
    yield from lines[:MAX_EXAMPLE_GROUPS]  # the last line may be incomplete


def _last_lines(path: Path) -> list[bytes]:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - MAX_EXAMPLE_BYTES))
        lines = file.read(MAX_EXAMPLE_BYTES).splitlines()
    return lines[-MAX_EXAMPLE_GROUPS:]


def _neighbor(path: Path | None, report_path: Path) -> str | None:
    is_neighbor = path is not None and path.parent == report_path.parent and path.is_file()
    return path.name if path is not None and is_neighbor else None


def read_settings(metrics_path: Path) -> dict[str, Any]:
    """Return the settings stored with a metrics file; empty if they cannot be read."""
    try:
        kept = json.loads(settings_path(metrics_path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    kept = kept if isinstance(kept, dict) else {}
    return {
        key: value
        for key, value in kept.items()
        if isinstance(value, dict) or key not in ("settings", "changed")
    }


def _title(settings: Mapping[str, Any], environments: Sequence[str] = ()) -> str:
    name = str(settings.get("model_name") or "").rstrip("/").rpartition("/")[2]
    title = f"Training of {name}" if name else "Training run"
    return f"{title} on {', '.join(environments)}" if environments else title


def _lead(
    steps: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], seconds: float | None
) -> str:
    """Return the size and the duration of the run in one line."""
    parts = [f"{len(steps):,} optimizer steps"] if steps else []
    if settings.get("algorithm"):
        parts.append(str(settings["algorithm"]))
    tokens = series_of(steps, "train/input_tokens", "")
    if tokens is not None:
        parts.append(f"{sum(tokens.ys):,.0f} tokens")
    if seconds is not None:
        parts.append(f"{_duration(seconds)} in total")
    elif times := series_of(steps, "train/step_time", ""):
        parts.append(f"{_duration(sum(times.ys))} in steps")
    return " · ".join([*parts, *(fact.value for fact in _dates(steps))])


def _duration(seconds: float) -> str:
    """Return `45 s`, `4 min 59 s` or `3 h 7 min`."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


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
        facts.append(Fact("time in steps", _duration(sum(times.ys))))
    if tokens is not None:
        facts.append(Fact("tokens fed to the model", f"{sum(tokens.ys):,.0f}"))
    return [*facts, *_dates(steps)]


def _change(series: Series) -> str:
    size = max(1, len(series.ys) // _END_SHARE)
    first, last = (sum(part) / size for part in (series.ys[:size], series.ys[-size:]))
    return f"{_rounded(first)} → {_rounded(last)}" if len(series.ys) > 1 else _rounded(last)


def _rounded(value: float) -> str:
    return short_number(float(f"{value:.3g}"))


def _dates(steps: Sequence[Mapping[str, Any]]) -> list[Fact]:
    times = [time for record in steps if (time := charted_number(record.get("time"))) is not None]
    if not times or not 0 <= times[-1] < _END_OF_TIME:
        return []
    last = datetime.datetime.fromtimestamp(times[-1], datetime.timezone.utc)
    return [Fact("last step", f"{last:%Y-%m-%d %H:%M} UTC")]


def _accuracy(lines: Sequence[str]) -> Series | None:
    found = _series(lines, lambda key: _ACCURACY if key.endswith(_ACCURACY_KEY) else None)
    return found[0] if found else None


def _reward_parts(lines: Sequence[str]) -> list[Series]:
    parts = _series(lines, lambda key: key.rpartition(_PART_KEY)[2] if _PART_KEY in key else None)
    return parts[:_MOST_PARTS]


def _series(lines: Sequence[str], name_of: Callable[[str], str | None]) -> list[Series]:
    """Return the metrics of an environment for which `name_of` returns a name, sorted by it."""
    points: dict[str, dict[float, float]] = {}
    for line in lines:
        try:
            record = json.loads(line)
            step, entries = float(record["step"]), reversed(record.items())
        except _UNREADABLE:
            continue
        if not abs(step) <= MAX_STEP:
            continue
        for key, value in entries:  # reversed: of several with one name, the first counts
            name = name_of(key)
            number = None if name is None else charted_number(value)
            if name is not None and number is not None:
                points.setdefault(name, {})[step] = number
    return [
        Series(name, sorted(values), [values[step] for step in sorted(values)])
        for name, values in sorted(points.items())
    ]


def _notes(records: RunRecords, settings: Mapping[str, Any]) -> list[str]:
    notes = []
    if records.num_unreadable:
        notes.append(f"Lines of the metrics that could not be read: {records.num_unreadable}.")
    if not settings:
        notes.append("The settings of the run were not found next to its metrics.")
    return notes


def main(argv: Sequence[str] | None = None) -> None:
    """Write the page; exit with 0 on success, 2 for invalid flags or unusable files."""
    prepare_command()
    parser = CommandParser(
        prog="atropos-report",
        description="Write the report of a training run: one HTML file with its curves. Several "
        "runs are compared in one file.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="RUN",
        help=f"the folder of a run, or its metrics of the trainer; at most {MAX_RUNS} runs",
    )
    parser.add_argument(
        "--output",
        type=Path,
        help=f"the HTML file; default: {REPORT_NAME} next to the metrics, for several runs "
        f"{COMPARISON_NAME} in the current folder",
    )
    parser.add_argument(
        "--environment",
        type=Path,
        help="metrics of an environment of one run, for its accuracy; default: those in its folder",
    )
    parser.add_argument(
        "--groups",
        type=Path,
        metavar="GROUPS.jsonl",
        help="groups of an environment of one run, for examples of its rollouts; default: those "
        "in its folder",
    )
    arguments = parser.parse_args(argv)
    try:
        metrics = [metrics_in(run) for run in arguments.runs]
        if len(metrics) == 1:
            _report_one(metrics[0], arguments)
        else:
            _compare(metrics, arguments)
    except (ConfigError, OSError) as error:
        end_command("atropos-report", f"error: {error}", code=2)


def _report_one(metrics: Path, arguments: argparse.Namespace) -> None:
    report = arguments.output or metrics.with_name(REPORT_NAME)
    _require_page(report)
    settings = read_settings(metrics).get("settings", {})
    found = find_run(metrics, planned_steps=settings.get("training_steps"))
    num_steps = write_report(
        metrics,
        report,
        environment_path=arguments.environment or found.environment_path,
        held_out=found.held_out,
        needs_steps=True,
        title=found.title or _title(settings, found.names),
        seconds=found.seconds,
        groups=[[arguments.groups]] if arguments.groups else found.groups,
        rollouts_path=report.with_name(ROLLOUTS_NAME),
    )
    with reader_may_leave():
        print(f"{report}: {num_steps} steps")


def _compare(metrics: Sequence[Path], arguments: argparse.Namespace) -> None:
    for flag in ("environment", "groups"):
        if getattr(arguments, flag) is not None:
            raise ConfigError(f"--{flag} belongs to the report of one run; leave it out")
    page = arguments.output or Path(COMPARISON_NAME)
    num_steps = write_comparison(metrics, page)
    with reader_may_leave():
        print(f"{page}: {len(metrics)} runs, the longest of {num_steps} steps")


if __name__ == "__main__":
    main()
