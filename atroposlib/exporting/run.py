"""One export from source to output: opens both, checks the tokenizer, runs the pipeline in chunks.

source ─► chunk of groups ─► recipe.pick ─► recipe.build ─► new lines ─► output
                 │                                             │
                 └──────────────── report ◄────────────────────┘

The output is opened before the source, so that a rejected export changes nothing.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

from atroposlib.api.client_consumer import Consumer, InspectionClient
from atroposlib.errors import AtroposError, ConfigError, GroupError, TrajectoryApiError
from atroposlib.exporting.formats import Built, Recipe
from atroposlib.exporting.groups import (
    BatchClient,
    ExportGroup,
    RawGroup,
    check_inspectable,
    consume_groups,
    export_group,
    find_run,
    open_jsonl,
    read_jsonl,
    read_run,
    watch_groups,
)
from atroposlib.exporting.output import Line, Mode, Output, OutputKind, encode_line, open_output
from atroposlib.exporting.report import DUPLICATE, ExportReport
from atroposlib.exporting.selection import TruncationRule, line_break_ids
from atroposlib.exporting.texts import Decoder, check_tokenizer, decoder_of, load_tokenizer
from atroposlib.utils.text import without_secrets

__all__ = [
    "ExportRequest",
    "ExportStoppedError",
    "SourceRequest",
    "export_groups",
    "read_groups",
    "run_export",
]

CHUNK_GROUPS = 256

_OBJECTS_PER_COLLECTION = 200_000
"""Threshold of the garbage collector; the default one is reached after a few groups."""


Progress = Callable[[int, ExportReport], None]
"""Receives the number of records written since the last call: 0 at the start, then per chunk."""


def read_groups(
    source: Iterator[RawGroup], report: ExportReport, notify: Callable[[str], None]
) -> Iterator[tuple[str, ExportGroup]]:
    """Yield the readable groups of a source, each with its place.

    Args:
        source: Encoded groups.
        report: Counts readable and unreadable groups.
        notify: Receives a line for each of the first unreadable groups.
    """
    for raw in source:
        try:
            group = export_group(raw)
        except GroupError as error:
            report.add_broken(raw.where, str(error))
            if report.num_broken <= len(report.broken):
                notify(f"{raw.where} is left out: {error}")
            continue
        report.num_groups += 1
        report.num_from_text += bool(group.tokenized_from_text)
        report.num_with_images += group.has_images
        report.num_sequences += len(group.tokens)
        yield raw.where, group


def export_groups(
    groups: Iterator[tuple[str, ExportGroup]],
    recipe: Recipe,
    output: Output,
    report: ExportReport,
    *,
    has_score: bool,
    max_records: int | None,
    keeps_duplicates: bool = False,
    skips_existing: bool = False,
    chunk_groups: int = CHUNK_GROUPS,
    progress: Progress = lambda *_: None,
) -> None:
    """Write records until the source ends or there are `max_records`.

    Args:
        groups: Groups with their places.
        recipe: Makes records of groups.
        output: Receives the records.
        report: Counts records and dropped trajectories.
        has_score: Whether records have the field `score`.
        max_records: None for no limit.
        keeps_duplicates: Whether duplicates of earlier records are written.
        skips_existing: Whether each record that the output had before is left out once, although
            duplicates are kept: an export is resumed that had written it.
        chunk_groups: Groups processed together; larger chunks are faster, smaller ones are written
            sooner.
        progress: Called at the start and after every chunk.
    """
    progress(0, report)
    written_before = Counter(output.existing.keys) if skips_existing else Counter[bytes]()
    with _rare_collections():
        while max_records is None or report.num_records < max_records:
            chunk = list(islice(groups, chunk_groups))
            if not chunk:
                return
            picks: list[Any] = []
            for where, group in chunk:
                picked = recipe.pick(group, where)
                report.dropped.update(picked.dropped)
                picks += picked.picks
            lines = _new_lines(
                recipe.build(picks),
                output,
                report,
                None if max_records is None else max_records - report.num_records,
                has_score=has_score,
                keeps_duplicates=keeps_duplicates,
                written_before=written_before,
            )
            progress(_write(lines, output, report), report)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Collect garbage less often: an export makes no reference cycles."""
    before = gc.get_threshold()
    gc.set_threshold(_OBJECTS_PER_COLLECTION, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _new_lines(
    built: list[Built],
    output: Output,
    report: ExportReport,
    room: int | None,
    *,
    has_score: bool,
    keeps_duplicates: bool,
    written_before: Counter[bytes],
) -> list[tuple[Line, Built]]:
    """Encode up to `room` records that are not duplicates.

    A record that `written_before` has is removed from it, and left out also if duplicates are kept.
    """
    lines: list[tuple[Line, Built]] = []
    keys: set[bytes] = set()
    for candidate in built:
        if room is not None and len(lines) >= room:
            break
        if candidate.record is None:
            report.dropped[candidate.reason] += 1
            continue
        line = encode_line(candidate.record, score=candidate.score if has_score else None)
        if keeps_duplicates:
            is_left_out = written_before[line.key] > 0
            if is_left_out:
                written_before[line.key] -= 1
        else:
            is_left_out = line.key in keys or line.key in output
        if is_left_out:
            report.dropped[DUPLICATE] += 1
            continue
        keys.add(line.key)
        lines.append((line, candidate))
    return lines


def _write(lines: list[tuple[Line, Built]], output: Output, report: ExportReport) -> int:
    if lines:
        output.write([line for line, _ in lines], lines[0][1].record or {})
    for line, done in lines:
        report.num_repaired += line.is_repaired
        report.add_record(
            where=done.where,
            score=done.score,
            length=done.num_tokens,
            is_truncated=done.is_truncated,
        )
    return len(lines)


_CHECKED_GROUPS = 32
_SERVICE_START_S = 60.0
_SECONDS_BEFORE_NOTE = 1.0


@dataclass(frozen=True)
class SourceRequest:
    """The source of an export."""

    kind: Literal["live", "consume", "run", "file"]
    api_url: str = ""
    """For `live` and `consume`."""
    run: str = ""
    data_dir: Path = Path("atropos_runs")
    file: Path = Path()
    token: str | None = None
    """API token for the service."""
    waits: bool = True
    """Whether `live` waits for new groups."""
    stand_in: Mapping[str, Any] | None = None
    """For `live`: registration as consumer while there is no trainer; None does not register."""
    register: Callable[[], None] | None = None
    """For `consume`: resets the run and registers as its trainer."""

    @property
    def is_endless(self) -> bool:
        return self.kind == "consume" or (self.kind == "live" and self.waits)


@dataclass(frozen=True)
class ExportRequest:
    """All settings of one export."""

    path: Path
    kind: OutputKind
    mode: Mode
    source: SourceRequest
    recipe: Callable[[Decoder | None, TruncationRule], Recipe]
    """Makes the recipe after the tokenizer is loaded."""
    has_score: bool
    needs_tokenizer: bool
    tokenizer: str
    """Name or folder."""
    max_records: int | None
    """Maximum number of new records; with mode `resume`, of all records. None for no limit."""
    drops_truncated: bool = False
    keeps_duplicates: bool = False
    checks_tokenizer: bool = True


class ExportStoppedError(AtroposError, RuntimeError):
    """An export ended early; its output is valid.

    Attributes:
        report: Counts until then.
        is_interrupt: Whether the user stopped it.
    """

    def __init__(self, message: str, report: ExportReport, *, is_interrupt: bool) -> None:
        super().__init__(message)
        self.report = report
        self.is_interrupt = is_interrupt


def run_export(
    request: ExportRequest, *, notify: Callable[[str], None], progress: Progress = lambda *_: None
) -> ExportReport:
    """Run an export and return its report.

    Raises:
        ConfigError: the output exists, the source does not, or the tokenizer does not match.
        ExportStoppedError: the service became unreachable, a write failed, or the user interrupted.
    """
    report = ExportReport()
    with ExitStack() as ending:
        output = open_output(request.path, request.kind, request.mode)
        ending.callback(_close, output, report)
        _describe_existing(output, notify)
        source = ending.enter_context(closing(_open_source(request.source, ending, notify)))
        try:
            _export(request, source, output, report, notify, progress)
        except KeyboardInterrupt:
            raise _stopped("stopped", output, report, is_interrupt=True) from None
        except (TrajectoryApiError, OSError) as error:
            raise _stopped(str(error), output, report, is_interrupt=False) from error
    return report


def _export(
    request: ExportRequest,
    source: Iterator[RawGroup],
    output: Output,
    report: ExportReport,
    notify: Callable[[str], None],
    progress: Progress,
) -> None:
    room = request.max_records
    if room is not None and request.mode == "resume":
        room = max(0, room - output.existing.num_records)
    if room == 0:
        return  # without waiting for a group to check the tokenizer with
    groups = read_groups(source, report, notify)
    decode, truncation = None, TruncationRule()
    if request.needs_tokenizer:
        tokenizer = load_tokenizer(request.tokenizer)
        num_checked = 1 if request.source.is_endless else _CHECKED_GROUPS
        first = list(islice(groups, num_checked))
        groups = chain(first, groups)
        if request.checks_tokenizer:
            _check(request.tokenizer, tokenizer, [group for _, group in first], notify)
        decode = decoder_of(tokenizer)
        truncation = TruncationRule(
            frozenset(tokenizer.all_special_ids), request.drops_truncated, line_break_ids(tokenizer)
        )
        report.knows_truncation = bool(truncation.end_ids)
    export_groups(
        groups,
        request.recipe(decode, truncation),
        output,
        report,
        has_score=request.has_score,
        max_records=room,
        keeps_duplicates=request.keeps_duplicates,
        skips_existing=request.mode == "resume",
        chunk_groups=1 if request.source.is_endless else CHUNK_GROUPS,
        progress=progress,
    )


def _open_source(
    request: SourceRequest, ending: ExitStack, notify: Callable[[str], None]
) -> Any:  # a generator of RawGroup
    if request.kind == "file":
        return read_jsonl(open_jsonl(request.file))
    if request.kind == "run":
        return read_run(find_run(request.run, request.data_dir))
    if request.kind == "consume":
        assert request.register is not None
        request.register()
        return _consume(request, ending)
    return _open_service(request, ending, notify)


def _consume(request: SourceRequest, ending: ExitStack) -> Iterator[RawGroup]:
    client = ending.enter_context(BatchClient(request.api_url, token=request.token))
    return consume_groups(client)


def _open_service(
    request: SourceRequest, ending: ExitStack, notify: Callable[[str], None]
) -> Iterator[RawGroup]:
    """Read the groups of a service, registered as consumer while it has no trainer."""
    client = ending.enter_context(InspectionClient(request.api_url, token=request.token))
    consumer = None
    if request.waits and request.stand_in is not None:
        _wait_for_service(request, notify)
        consumer = Consumer(request.api_url, request.stand_in, notify, token=request.token)
        ending.enter_context(consumer)
    try:
        check_inspectable(client)
    except ConfigError:
        # The groups of an older service can only be read by taking its batches.
        if consumer is None or int(client.info()["batch_size"]) >= 0:
            raise
        consumer.register()
        return _consume(request, ending)
    return watch_groups(client, is_endless=request.waits, notify=notify, consumer=consumer)


def _wait_for_service(request: SourceRequest, notify: Callable[[str], None]) -> None:
    """Wait for a service that is started at the same time."""
    from atroposlib.api.client import TrainerClient

    is_noted = False

    def note(waited_s: float) -> None:
        nonlocal is_noted
        if waited_s >= _SECONDS_BEFORE_NOTE and not is_noted:
            is_noted = True
            notify(
                f"waiting up to {_SERVICE_START_S:.0f} s for the service at "
                f"{without_secrets(request.api_url)}; `run-api` starts one"
            )

    with TrainerClient(request.api_url, token=request.token) as trainer:
        trainer.wait_until_up(_SERVICE_START_S, on_wait=note)


def _check(
    name: str, tokenizer: Any, groups: list[ExportGroup], notify: Callable[[str], None]
) -> None:
    mismatch = check_tokenizer(tokenizer, groups)
    if mismatch is None:
        return
    if mismatch.is_certain:
        raise ConfigError(
            f"{name} is not the tokenizer these groups were made with: {mismatch.reason}; set the "
            "right one with --tokenizer, or export anyway with --any-tokenizer"
        )
    notify(f"warning: {name} may not be the tokenizer of these groups: {mismatch.reason}")


def _close(output: Output, report: ExportReport) -> None:
    try:
        output.close()
    except (OSError, KeyboardInterrupt) as error:
        is_interrupt = isinstance(error, KeyboardInterrupt)
        reason = "stopped" if is_interrupt else f"{output.path} cannot be written: {error}"
        raise ExportStoppedError(
            f"{reason}; its records are in {output.part}; to finish it, run the same command with "
            "--resume",
            report,
            is_interrupt=is_interrupt,
        ) from error


def _describe_existing(output: Output, notify: Callable[[str], None]) -> None:
    existing = output.existing
    if existing.num_records:
        notify(f"{output.path} has {existing.num_records} records; they are kept")
    if existing.num_cut_bytes:
        notify(f"an incomplete last line ({existing.num_cut_bytes} bytes) was removed")
    if existing.broken_lines:
        named = ", ".join(map(str, existing.broken_lines[:10]))
        notify(f"{len(existing.broken_lines)} of its lines are not records and are kept: {named}")


def _stopped(
    reason: str, output: Output, report: ExportReport, *, is_interrupt: bool
) -> ExportStoppedError:
    num_records = output.existing.num_records + output.num_written
    kept = f"{num_records} records are in {output.path}" if num_records else "nothing was written"
    again = "; to continue, run the same command with --resume" if num_records else ""
    message = f"{reason}; {kept}{again}"
    return ExportStoppedError(message, report, is_interrupt=is_interrupt)
