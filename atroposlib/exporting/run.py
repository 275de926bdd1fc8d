"""One export from source to output: opens both, checks the tokenizer, runs the pipeline in chunks.

source ─► chunk of groups ─► recipe.pick ─► recipe.build ─► new lines ─► output
                 │                                             │
                 └──────────────── report ◄────────────────────┘

The output is checked first: a refused export has changed nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

from atroposlib.errors import AtroposError, ConfigError, GroupError, TrajectoryApiError
from atroposlib.exporting.formats import Built, Recipe
from atroposlib.exporting.groups import (
    BatchClient,
    ExportGroup,
    RawGroup,
    consume_groups,
    export_group,
    find_run,
    open_jsonl,
    read_jsonl,
    read_run,
)
from atroposlib.exporting.output import Line, Mode, Output, OutputKind, encode_line, open_output
from atroposlib.exporting.report import DUPLICATE, ExportReport
from atroposlib.exporting.selection import TruncationRule
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
"""Rows of tokens are containers: by default a collection would follow every few groups."""


Progress = Callable[[int, ExportReport], None]
"""Receives the records written since the last call: 0 once all is prepared, then per chunk."""


def read_groups(
    source: Iterator[RawGroup], report: ExportReport, tell: Callable[[str], None]
) -> Iterator[tuple[str, ExportGroup]]:
    """Yield the groups of a source that can be read, each with where it was.

    Args:
        source: groups, not decoded yet.
        report: counts them, and those that cannot be read.
        tell: gets a line for each group that cannot be read, a few at most.
    """
    for raw in source:
        try:
            group = export_group(raw)
        except GroupError as error:
            report.add_broken(raw.where, str(error))
            if report.num_broken <= len(report.broken):
                tell(f"{raw.where} is left out: {error}")
            continue
        report.num_groups += 1
        report.num_from_text += bool(group.tokenized_from_text)
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
    chunk_groups: int = CHUNK_GROUPS,
    progress: Progress = lambda *_: None,
) -> None:
    """Write records until the source ends or there are enough.

    Args:
        groups: with where each was found.
        recipe: makes records of groups.
        output: takes them; what it holds already is not written again.
        report: counts what happens.
        has_score: whether records carry the score.
        max_records: the most to write; None for no limit.
        keeps_duplicates: whether a record that was there before is written again.
        chunk_groups: groups handled together: more are faster, fewer are written sooner.
        progress: called at the beginning and after every chunk.
    """
    progress(0, report)
    with _rare_collections():
        while max_records is None or report.num_records < max_records:
            chunk = list(islice(groups, chunk_groups))
            if not chunk:
                return
            room = None if max_records is None else max_records - report.num_records
            lines = _new_lines(
                recipe.build(_pick(chunk, recipe, report)),
                output,
                report,
                room,
                has_score=has_score,
                keeps_duplicates=keeps_duplicates,
            )
            progress(_write(lines, output, report), report)


def _pick(chunk: list[tuple[str, ExportGroup]], recipe: Recipe, report: ExportReport) -> list[Any]:
    picks: list[Any] = []
    for where, group in chunk:
        picked = recipe.pick(group, where)
        report.add_refused(picked.refused)
        picks += picked.picks
    return picks


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Collect garbage less often: what an export makes is freed without it."""
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
) -> list[tuple[Line, Built]]:
    """Return up to `room` records as lines, without those that were written before."""
    lines: list[tuple[Line, Built]] = []
    keys: set[bytes] = set()
    for candidate in built:
        if room is not None and len(lines) >= room:
            break
        if candidate.record is None:
            report.refused[candidate.reason] += 1
            continue
        line = encode_line(candidate.record, score=candidate.score if has_score else None)
        if not keeps_duplicates and (line.key in keys or line.key in output):
            report.refused[DUPLICATE] += 1
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


_GROUPS_TO_JUDGE = 32
_SERVICE_START_S = 60.0
_SECONDS_BEFORE_NOTE = 1.0


@dataclass(frozen=True)
class SourceRequest:
    """Where groups come from."""

    kind: Literal["live", "consume", "run", "file"]
    api_url: str = ""
    """Of `live` and `consume`."""
    run: str = ""
    data_dir: Path = Path("atropos_runs")
    file: Path = Path()
    token: str | None = None
    """Shown to the service."""
    waits: bool = True
    """Whether `live` waits for groups to come."""
    stand_in: Mapping[str, Any] | None = None
    """Of `live`: what to register as consumer with while there is no trainer; None only looks."""
    register: Callable[[], None] | None = None
    """Of `consume`: resets the run and registers as its trainer."""

    @property
    def is_endless(self) -> bool:
        """Whether more groups may always come."""
        return self.kind == "consume" or (self.kind == "live" and self.waits)


@dataclass(frozen=True)
class ExportRequest:
    """All settings of one export."""

    path: Path
    kind: OutputKind
    mode: Mode
    source: SourceRequest
    recipe: Callable[[Decoder | None, TruncationRule], Recipe]
    """Makes the recipe once the tokenizer is there."""
    has_score: bool
    needs_tokenizer: bool
    tokenizer: str
    """Name or folder."""
    max_records: int | None
    """Records to write; with mode `resume`, to have in the end. None for all."""
    drops_truncated: bool = False
    keeps_duplicates: bool = False
    checks_tokenizer: bool = True


class ExportStoppedError(AtroposError, RuntimeError):
    """An export ended before it was done; what it wrote is valid.

    Attributes:
        report: of what was done until then.
        is_interrupt: whether a person stopped it.
    """

    def __init__(self, message: str, report: ExportReport, *, is_interrupt: bool) -> None:
        super().__init__(message)
        self.report = report
        self.is_interrupt = is_interrupt


def run_export(
    request: ExportRequest, *, tell: Callable[[str], None], progress: Progress = lambda *_: None
) -> ExportReport:
    """Export; returns the report.

    Raises:
        ConfigError: the output exists, the source is not there, the tokenizer is the wrong one.
        ExportStoppedError: the service went away, the disk is full, or it was interrupted.
    """
    report = ExportReport()
    with ExitStack() as ending:
        output = open_output(request.path, request.kind, request.mode)
        ending.callback(output.close)
        _tell_existing(output, tell)
        source = ending.enter_context(closing(_open_source(request.source, ending, tell)))
        try:
            _export(request, source, output, report, tell, progress)
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
    tell: Callable[[str], None],
    progress: Progress,
) -> None:
    room = request.max_records
    if room is not None and request.mode == "resume":
        room = max(0, room - output.existing.num_records)
    if room == 0:
        return  # without waiting for a group whose tokenizer could be judged
    groups = read_groups(source, report, tell)
    decode, truncation = None, TruncationRule()
    if request.needs_tokenizer:
        tokenizer = load_tokenizer(request.tokenizer)
        num_judged = 1 if request.source.is_endless else _GROUPS_TO_JUDGE
        first = list(islice(groups, num_judged))
        groups = chain(first, groups)
        if request.checks_tokenizer:
            _check(request.tokenizer, tokenizer, [group for _, group in first], tell)
        decode = decoder_of(tokenizer)
        truncation = TruncationRule(frozenset(tokenizer.all_special_ids), request.drops_truncated)
        report.knows_truncation = bool(truncation.end_ids)
    export_groups(
        groups,
        request.recipe(decode, truncation),
        output,
        report,
        has_score=request.has_score,
        max_records=room,
        keeps_duplicates=request.keeps_duplicates,
        # What comes by and by is written as it comes.
        chunk_groups=1 if request.source.is_endless else CHUNK_GROUPS,
        progress=progress,
    )


def _open_source(
    request: SourceRequest, ending: ExitStack, tell: Callable[[str], None]
) -> Any:  # a generator of RawGroup
    if request.kind == "file":
        return read_jsonl(open_jsonl(request.file))
    if request.kind == "run":
        return read_run(find_run(request.run, request.data_dir))
    if request.kind == "consume":
        assert request.register is not None
        request.register()
        return _consume(request, ending)
    return _open_service(request, ending, tell)


def _consume(request: SourceRequest, ending: ExitStack) -> Iterator[RawGroup]:
    client = ending.enter_context(BatchClient(request.api_url, token=request.token))
    return consume_groups(client.next_groups)


def _open_service(
    request: SourceRequest, ending: ExitStack, tell: Callable[[str], None]
) -> Iterator[RawGroup]:
    """Look at a running service, standing in for a trainer while there is none."""
    from atroposlib.api.client_consumer import Consumer, InspectionClient
    from atroposlib.exporting.groups import check_inspectable, watch_groups

    client = ending.enter_context(InspectionClient(request.api_url, token=request.token))
    consumer = None
    if request.waits and request.stand_in is not None:
        _wait_for_service(request, tell)
        consumer = Consumer(request.api_url, request.stand_in, tell, token=request.token)
        ending.enter_context(consumer)
    try:
        check_inspectable(client)
    except ConfigError:
        # An older service: its groups are seen only by taking them.
        if consumer is None or int(client.info()["batch_size"]) >= 0:
            raise
        consumer.register()
        return _consume(request, ending)
    return watch_groups(client, is_endless=request.waits, tell=tell, consumer=consumer)


def _wait_for_service(request: SourceRequest, tell: Callable[[str], None]) -> None:
    """Let a service that is started with the same line come up."""
    from atroposlib.api.client import TrainerClient

    is_told = False

    def say(waited_s: float) -> None:
        nonlocal is_told
        if waited_s >= _SECONDS_BEFORE_NOTE and not is_told:
            is_told = True
            tell(
                f"waiting up to {_SERVICE_START_S:.0f} s for the service at "
                f"{without_secrets(request.api_url)}; `run-api` starts one"
            )

    with TrainerClient(request.api_url, token=request.token) as trainer:
        trainer.wait_until_up(_SERVICE_START_S, on_wait=say)


def _check(
    name: str, tokenizer: Any, groups: list[ExportGroup], tell: Callable[[str], None]
) -> None:
    verdict = check_tokenizer(tokenizer, groups)
    if verdict.reason is None:
        return
    if verdict.is_wrong:
        raise ConfigError(
            f"{name} is not the tokenizer these groups were made with: {verdict.reason}; name the "
            "right one with --tokenizer, or export anyway with --any-tokenizer"
        )
    tell(f"warning: {name} may not be the tokenizer of these groups: {verdict.reason}")


def _tell_existing(output: Output, tell: Callable[[str], None]) -> None:
    existing = output.existing
    if existing.num_records:
        tell(f"{output.path} holds {existing.num_records} records; they stay")
    if existing.num_cut_bytes:
        tell(f"half a line at its end ({existing.num_cut_bytes} bytes) was removed")
    if existing.broken_lines:
        named = ", ".join(map(str, existing.broken_lines[:10]))
        tell(f"{len(existing.broken_lines)} of its lines are not records and stay: {named}")


def _stopped(
    reason: str, output: Output, report: ExportReport, *, is_interrupt: bool
) -> ExportStoppedError:
    num_records = output.existing.num_records + output.num_written
    kept = f"{num_records} records are in {output.path}" if num_records else "nothing was written"
    again = "--resume goes on with it: the same command with that flag"
    message = f"{reason}; {kept}" + (f"; {again}" if num_records else "")
    return ExportStoppedError(message, report, is_interrupt=is_interrupt)
