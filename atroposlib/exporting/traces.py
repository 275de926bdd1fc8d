"""Export and import of agents' rollouts as files of other programs.

    groups ─► records ─► one file per rollout          atif.py, openenv_traces.py
    files ─► records ─► groups by task                 trace_records.py

A file is a trajectory of ATIF, a training trace of OpenEnv, or JSON Lines of either. A folder is
searched for `trajectory.json`, as Harbor writes them, else for all JSON files. Rewards that a
trajectory lacks are read from the `result.json` of its Harbor trial.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from atroposlib.errors import ConfigError, GroupError
from atroposlib.exporting.atif import atif_of, read_atif
from atroposlib.exporting.openenv_traces import openenv_of, read_openenv
from atroposlib.exporting.trace_records import (
    RolloutRecord,
    group_of_records,
    is_finite,
    records_of_group,
)
from atroposlib.utils.tokenize_for_trainer import ChatTokenizer
from atroposlib.utils.writable import naming_writes
from atroposlib.wire import decode_group

__all__ = [
    "TRACE_FORMATS",
    "TraceFormat",
    "TracesReport",
    "export_traces",
    "import_traces",
    "read_trace_files",
]

TraceFormat = Literal["atif", "openenv"]
TRACE_FORMATS: tuple[TraceFormat, ...] = get_args(TraceFormat)
_TRAJECTORY = "trajectory.json"
_RESULT = "result.json"
_MAX_FILE_BYTES = 2**30


@dataclass
class TracesReport:
    """Counts of an export or an import."""

    num_groups: int = 0
    num_rollouts: int = 0
    num_from_text: int = 0
    """Rollouts whose tokens were made from text."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Rollouts that were left out, by reason."""

    def text(self, target: str) -> str:
        """Return the lines for the terminal."""
        lines = [f"{self.num_rollouts:,} rollouts of {self.num_groups:,} groups: {target}"]
        if self.num_from_text:
            lines.append(
                f"{self.num_from_text:,} rollouts have tokens made from text (tokenized_from_text, "
                "no logprobs)"
            )
        lines += [f"left out: {count:,}, {reason}" for reason, count in self.left_out.items()]
        return "\n".join(lines)


def export_traces(
    groups: Iterable[tuple[str, Mapping[str, Any]]],
    folder: Path,
    kind: TraceFormat,
    *,
    notify: Callable[[str], None] = lambda _: None,
) -> TracesReport:
    """Write each rollout of the groups to a file; the folder is made, or is empty.

    Args:
        groups: place and fields of each group.
        folder: where the files go.
        kind: their format.
        notify: receives a line for each rollout that is left out.

    Raises:
        ConfigError: the folder has files, or cannot be written to.
        OSError: a file cannot be written, as on a full disk.
    """
    _make_empty(folder)
    report = TracesReport()
    for number, (where, group) in enumerate(groups):
        try:
            records = records_of_group(group, where)
        except GroupError as error:
            report.left_out["not a group"] += 1
            notify(f"{where} is left out: {error}")
            continue
        report.num_groups += 1
        for i, record in enumerate(records):
            name = f"group-{number:05d}-rollout-{i}"
            try:
                document = atif_of(record, name=name) if kind == "atif" else openenv_of(record)
                text = json.dumps(document, allow_nan=False)
            # Of the group, a number that is not finite, or too many levels.
            except (ValueError, RecursionError) as error:
                report.left_out[str(error)] += 1
                notify(f"{where}, rollout {i}, is left out: {error}")
                continue
            file = folder / f"{name}.json"
            with naming_writes(file):
                file.write_text(text, encoding="utf-8")
            report.num_rollouts += 1
    return report


def _make_empty(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        has_files = any(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written to: {error.strerror}") from error
    if has_files:
        raise ConfigError(f"{folder} is not empty and is left as it is; choose another folder")


def import_traces(
    paths: Sequence[Path],
    *,
    tokenizer: ChatTokenizer | None = None,
    reward: float | None = None,
    report: TracesReport,
) -> Iterator[dict[str, Any]]:
    """Yield the groups of trace files; rollouts of one task are one group.

    Args:
        paths: files and folders.
        tokenizer: makes the tokens of rollouts without ids.
        reward: score of rollouts that have none.
        report: receives the counts.

    Raises:
        ConfigError: a file is malformed; the message has the file, the step and what was expected.
    """
    by_group: dict[tuple[Any, ...], list[RolloutRecord]] = {}
    for where, value, trial in read_trace_files(paths):
        record = _record(value, where)
        if trial is not None:
            _add_trial(record, trial)
        record.score = reward if record.score is None else record.score
        if record.score is None:
            raise ConfigError(f"{where} has no reward; --reward gives one to such rollouts")
        own = record.place.group_id if record.place else None
        by_group.setdefault((own, record.task, record.is_exact), []).append(record)
    for records in by_group.values():
        records.sort(key=lambda record: record.place.rollout if record.place else 0)
        group = group_of_records(records, tokenizer)
        try:
            # A lone surrogate, which a model may generate, is kept.
            decode_group(json.dumps(group, ensure_ascii=False).encode("utf-8", "replace"))
        except GroupError as error:
            raise ConfigError(f"{records[0].where}: {error}") from error
        report.num_groups += 1
        report.num_rollouts += len(records)
        report.num_from_text += sum(not record.is_exact for record in records)
        yield group


def _record(value: Any, where: str) -> RolloutRecord:
    """Read a rollout in the format that its keys show."""
    if isinstance(value, list):
        value = {"turns": value}
    if isinstance(value, Mapping) and "turns" in value:
        return read_openenv(value, where)
    if isinstance(value, Mapping) and "steps" in value and "schema_version" in value:
        return read_atif(value, where)
    raise ConfigError(
        f"{where}: expected an ATIF trajectory (schema_version and steps), an OpenEnv training "
        "trace (turns), or a list of trace entries"
    )


def read_trace_files(
    paths: Sequence[Path],
) -> Iterator[tuple[str, Any, Mapping[str, Any] | None]]:
    """Yield place, document and result of the trial of each rollout in files and folders.

    Raises:
        ConfigError: a file cannot be read or is not JSON, or a folder has none.
    """
    for path in paths:
        for file in _files(path):
            trial = _trial_result(file)
            if file.suffix == ".jsonl":
                for number, line in enumerate(_read(file).splitlines(), start=1):
                    if line.strip():
                        where = f"{file}, line {number}"
                        yield where, _decoded(line, where), trial
            else:
                yield str(file), _decoded(_read(file), str(file)), trial


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(path.rglob(_TRAJECTORY))
    if not found:
        found = sorted(p for kind in ("*.json", "*.jsonl") for p in path.rglob(kind))
    if not found:
        raise ConfigError(f"{path} has no {_TRAJECTORY} and no other JSON file")
    return found


def _read(file: Path) -> bytes:
    try:
        size = file.stat().st_size
        if size > _MAX_FILE_BYTES:
            raise ConfigError(f"{file}: {size:,} bytes; expected at most {_MAX_FILE_BYTES:,}")
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error


def _decoded(content: bytes, where: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        # The message of other errors would quote the text, which is untrusted.
        place = f" at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else ""
        raise ConfigError(f"{where}: not JSON{place}; expected a trajectory or a trace") from error


def _trial_result(file: Path) -> Mapping[str, Any] | None:
    """Return the result of the Harbor trial that a trajectory is from: TRIAL/agent/FILE."""
    result = file.absolute().parent.parent / _RESULT
    if file.name != _TRAJECTORY or not result.is_file():
        return None
    value = _decoded(_read(result), str(result))
    return value if isinstance(value, Mapping) else None


def _add_trial(record: RolloutRecord, trial: Mapping[str, Any]) -> None:
    """Take the task and the reward of a trial, which the trajectory itself lacks."""
    task = trial.get("task_name")
    if isinstance(task, str) and record.place is None:
        record.task = task
        if record.trace is not None:
            record.trace["task"] = task
    result = trial.get("verifier_result")
    rewards = result.get("rewards") if isinstance(result, Mapping) else None
    if not isinstance(rewards, Mapping):
        return
    parts = {str(name): float(value) for name, value in rewards.items() if is_finite(value)}
    if record.score is None:
        record.score = parts.get("reward", next(iter(parts.values())) if len(parts) == 1 else None)
    for row in record.rows:
        row.fields.setdefault("reward_parts", parts)
    if record.trace is not None and record.score is not None:
        record.trace["reward"], record.trace["reward_parts"] = record.score, parts
