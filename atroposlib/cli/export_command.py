"""The shared part of `atropos-sft-gen` and `atropos-dpo-gen`: flags, progress, report, exit codes.

It also has the functions that `atroposlib.cli.sft` and `atroposlib.cli.dpo` offer to scripts.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import msgspec

from atroposlib.errors import ConfigError, MissingExtraError, TrajectoryApiError
from atroposlib.exporting.formats import OutputFormat, Recipe
from atroposlib.exporting.groups import BatchClient, ExportGroup
from atroposlib.exporting.output import Mode, kind_of, with_score
from atroposlib.exporting.report import ExportReport, report_text
from atroposlib.exporting.run import ExportRequest, ExportStoppedError, SourceRequest, run_export
from atroposlib.exporting.texts import decoder_of
from atroposlib.utils.command_parser import (
    end_command,
    integer_between,
    number_between,
    reader_may_leave,
)
from atroposlib.utils.text import find_common_prefix, without_secrets

__all__ = [
    "ExportKind",
    "add_shared_flags",
    "check_for_batch",
    "consume_records",
    "find_common_prefix",
    "grab_group",
    "notify",
    "register_to_api",
    "run_command",
]

DEFAULT_TOKENIZER = "NousResearch/DeepHermes-3-Llama-3-8B-Preview"
_count = integer_between(1, 10**9)
_RUNS_DIR = "atropos_runs"


class ExportKind(NamedTuple):
    """The records that a command makes."""

    formats: Mapping[str, OutputFormat]
    recipe: Callable[..., Recipe]
    """Takes a format, the rule, a decoder and a rule on truncation."""
    rule: Any
    """A `SelectionRule` or a `PairRule`."""

    def recipe_for(self, form: OutputFormat) -> Callable[..., Recipe]:
        return partial(self.recipe, form, self.rule)


def add_shared_flags(
    parser: argparse.ArgumentParser, formats: Mapping[str, OutputFormat], *, min_score_diff: float
) -> None:
    """Add the flags of both commands."""
    parser.add_argument("filepath", help="file to write, or folder with --output dataset")
    source = parser.add_argument_group(
        "source of groups",
        "By default the service at --api-url. If a trainer is registered, groups are read without "
        "taking them. If none is, this command registers in its place, so that environments "
        "start, and takes the groups until a trainer registers.",
    )
    source.add_argument("--api-url", default="http://localhost:8000", help="(%(default)s)")
    chosen = source.add_mutually_exclusive_group()
    chosen.add_argument("--file", metavar="JSONL", help="a file of groups, as process writes them")
    chosen.add_argument("--run", metavar="NAME", help="a stored run, by name or .sqlite3 file")
    chosen.add_argument(
        "--consume",
        action="store_true",
        help="RESET the run at --api-url, register as its trainer, take its batches permanently",
    )
    source.add_argument("--data-dir", default=_RUNS_DIR, help="folder of --run (%(default)s)")
    source.add_argument(
        "--no-wait", action="store_true", help="end after the current groups of the service"
    )
    source.add_argument(
        "--group-size",
        type=_count,
        default=2,
        help="trajectories per group of the environments; used if this command registers in place "
        "of a trainer, with batches of 64 such groups (%(default)s)",
    )
    source.add_argument(
        "--max-token-len",
        type=_count,
        action=_StoreGiven,
        default=2048,
        help="maximum tokens of a trajectory; used if this command registers in place of a trainer "
        "(%(default)s with --consume, else no limit unless given)",
    )
    _add_selection_flags(parser, min_score_diff=min_score_diff)
    _add_output_flags(parser, formats)


def _add_selection_flags(parser: argparse.ArgumentParser, *, min_score_diff: float) -> None:
    choice = parser.add_argument_group("selection")
    choice.add_argument(
        "--num-seqs-to-save",
        type=_records,
        default=100,
        help="records to write, at least 1 (%(default)s)",
    )
    choice.add_argument("--all", action="store_true", help="write every record")
    choice.add_argument(
        "--allow-negative-scores", action="store_true", help="accept scores of 0 and below"
    )
    choice.add_argument(
        "--minimum-score-diff-max-min",
        type=number_between(-math.inf, math.inf),
        default=min_score_diff,
        help="minimum difference of scores, exclusive (%(default)s)",
    )
    choice.add_argument(
        "--drop-truncated", action="store_true", help="leave out truncated completions"
    )
    choice.add_argument(
        "--keep-duplicates", action="store_true", help="write duplicates of earlier records"
    )


class _StoreGiven(argparse.Action):
    """Stores a value also under `DEST_given`, which has no default."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, values)
        setattr(namespace, f"{self.dest}_given", values)


def _records(text: str) -> int:
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(
            f"expected an integer of 1 or more, got {text!r}; --all writes every record"
        )
    return count


def _add_output_flags(parser: argparse.ArgumentParser, formats: Mapping[str, OutputFormat]) -> None:
    output = parser.add_argument_group("output")
    output.add_argument(
        "--format",
        choices=formats,
        help="; ".join(f"{name}: {form.about}" for name, form in formats.items()),
    )
    output.add_argument(
        "--save-messages", action="store_true", help="the same as --format atropos-messages"
    )
    output.add_argument("--keep-scores", action="store_true", help="add score to every format")
    output.add_argument(
        "--output",
        choices=("auto", "jsonl", "parquet", "dataset"),
        default="auto",
        help="dataset: a folder; auto: Parquet for a name in .parquet, else JSONL",
    )
    again = output.add_mutually_exclusive_group()
    again.add_argument(
        "--append-to-previous", action="store_true", help="add records to an existing output"
    )
    again.add_argument(
        "--resume",
        action="store_true",
        help="add records until the output has --num-seqs-to-save",
    )
    output.add_argument(
        "--push-to-hub", metavar="OWNER/NAME", help="upload the output to this hub repository"
    )
    output.add_argument(
        "--public", action="store_true", help="make a repository created by --push-to-hub public"
    )
    output.add_argument(
        "--tokenizer",
        default=DEFAULT_TOKENIZER,
        help="name or folder of the tokenizer that the groups were made with (%(default)s)",
    )
    output.add_argument(
        "--any-tokenizer",
        action="store_true",
        help="accept a tokenizer that does not match the groups",
    )


def _format_of(args: argparse.Namespace, formats: Mapping[str, OutputFormat]) -> OutputFormat:
    if args.save_messages and args.format not in (None, "atropos-messages"):
        raise ConfigError(f"--save-messages and --format {args.format} are different formats")
    return formats["atropos-messages" if args.save_messages else args.format or "atropos"]


def _mode_of(args: argparse.Namespace) -> Mode:
    if args.resume:
        return "resume"
    return "append" if args.append_to_previous else "new"


def _source_of(args: argparse.Namespace, *, command: str, tasks_per_step: int) -> SourceRequest:
    api_url = args.api_url.rstrip("/")
    if args.file is not None:
        return SourceRequest("file", file=Path(args.file))
    if args.run is not None:
        return SourceRequest("run", run=args.run, data_dir=Path(args.data_dir))
    if args.consume:
        sizes = (args.group_size, args.max_token_len)
        return _consuming(api_url, *sizes, args.num_seqs_to_save, tasks_per_step)
    from atroposlib.api.client_consumer import consumer_registration

    stand_in = consumer_registration(
        command, group_size=args.group_size, max_token_len=getattr(args, "max_token_len_given", 0)
    )
    token = os.environ.get("ATROPOS_API_TOKEN")
    return SourceRequest(
        "live", api_url=api_url, token=token, waits=not args.no_wait, stand_in=stand_in
    )


def _consuming(
    api_url: str, group_size: int, max_token_len: int, max_records: int, tasks_per_step: int
) -> SourceRequest:
    """Return a source that resets the run of a service and registers as its trainer."""

    def register() -> None:
        num_steps = STEPS_PER_SEQUENCE * max_records
        asyncio.run(register_to_api(group_size, max_token_len, api_url, num_steps, tasks_per_step))

    token = os.environ.get("ATROPOS_API_TOKEN")
    return SourceRequest("consume", api_url=api_url, token=token, register=register)


def _request_of(args: argparse.Namespace, kind: ExportKind, source: SourceRequest) -> ExportRequest:
    """Return the settings of an export; raises ConfigError for flags that exclude each other."""
    form = _format_of(args, kind.formats)
    path = Path(args.filepath)
    if args.drop_truncated and not form.needs_tokenizer:
        raise ConfigError(
            "--drop-truncated needs a format made of text: its tokenizer is needed to recognize "
            "the last token of a complete completion"
        )
    return ExportRequest(
        path=path,
        kind=kind_of(path, args.output),
        mode=_mode_of(args),
        source=source,
        recipe=kind.recipe_for(form),
        has_score=form.has_score or args.keep_scores,
        needs_tokenizer=form.needs_tokenizer,
        tokenizer=args.tokenizer,
        max_records=None if args.all else args.num_seqs_to_save,
        drops_truncated=args.drop_truncated,
        keeps_duplicates=args.keep_duplicates,
        checks_tokenizer=not args.any_tokenizer,
    )


_INTERRUPTED = 130


def run_command(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    kind: ExportKind,
    *,
    tasks_per_step: int,
    unit: str,
) -> None:
    """Run a command; a failure ends the process.

    Args:
        parser: Parser of the command; reports flags that exclude each other.
        args: Parsed flags.
        kind: The records that the command makes.
        tasks_per_step: Groups per batch with `--consume`.
        unit: Plural name of a record.
    """
    try:
        source = _source_of(args, command=parser.prog, tasks_per_step=tasks_per_step)
        request = _request_of(args, kind, source)
    except ConfigError as error:
        parser.error(str(error))
    _export_and_report(parser.prog, request, args, unit=unit)


def _export_and_report(
    command: str, request: ExportRequest, args: argparse.Namespace, *, unit: str
) -> None:
    """Export, print the report, upload; a failure ends the process with a message.

    Exit codes: 2 nothing was done, 1 the export ended early or the output has no records, 130 it
    was interrupted.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        if args.push_to_hub:
            from atroposlib.exporting.output import check_repository

            check_repository(args.push_to_hub)
        report = _with_bar(request, unit)
    except ExportStoppedError as stop:
        with reader_may_leave():
            print(report_text(stop.report, unit=unit))
        end_command(command, str(stop), code=_INTERRUPTED if stop.is_interrupt else 1)
    except (ConfigError, MissingExtraError, TrajectoryApiError) as error:
        end_command(command, str(error), code=2)
    except KeyboardInterrupt:
        end_command(command, "stopped before anything was written", code=_INTERRUPTED)
    is_written = report.num_records > 0 or request.path.exists()
    with reader_may_leave():
        print(report_text(report, unit=unit))
        if is_written:
            print(_last_line(request, report))
    if not is_written:
        end_command(command, _last_line(request, report), code=1)
    if args.push_to_hub and report.num_records:
        _push(command, request.path, args)


def notify(line: str) -> None:
    """Print a line on standard error, above the progress bar."""
    from tqdm import tqdm

    tqdm.write(line, file=sys.stderr)


def _with_bar(request: ExportRequest, unit: str) -> ExportReport:
    from tqdm import tqdm

    with ExitStack() as ending:
        bar: tqdm[Any] | None = None

        def advance(num_records: int, report: ExportReport) -> None:
            nonlocal bar
            if bar is None:  # its clock starts here, not when the tokenizer began to load
                total = request.max_records
                bar = ending.enter_context(tqdm(total=total, unit=f" {unit}", file=sys.stderr))
            dropped = (f"{count} {reason}" for reason, count in report.dropped.most_common(3))
            bar.set_postfix_str(", ".join(dropped), refresh=False)
            bar.update(num_records)

        return run_export(request, notify=notify, progress=advance)


def _last_line(request: ExportRequest, report: ExportReport) -> str:
    if report.num_records:
        return f"written to {request.path}"
    if report.dropped["no messages"] == report.num_sequences and report.num_sequences:
        return (
            "nothing was written: the groups have no messages; run the environment with "
            "--env.include_messages true, or choose a --format made of text"
        )
    if not report.num_groups and request.mode == "resume" and request.path.exists():
        return f"nothing was added: {request.path} already holds at least the requested number"
    if not report.num_groups:
        return "nothing was written: there are no groups"
    return "nothing was written: every trajectory was dropped, the reasons are above"


def _push(command: str, path: Path, args: argparse.Namespace) -> None:
    from atroposlib.exporting.output import push_to_hub

    try:
        push_to_hub(path, args.push_to_hub, is_public=args.public)
    except ConfigError as error:
        end_command(command, str(error), code=1)
    with reader_may_leave():
        print(f"pushed to {args.push_to_hub}")


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


STEPS_PER_SEQUENCE = 2
"""Steps registered per record, so that batches without records do not end the run early."""

_POLL_S = 1.0


async def register_to_api(
    group_size: int, max_token_len: int, api_url: str, num_steps: int, tasks_per_step: int = 64
) -> None:
    """Reset the run of a service, register as its trainer, and print both responses.

    Args:
        group_size: Trajectories per group.
        max_token_len: Maximum tokens of a trajectory.
        api_url: Address of the service.
        num_steps: Batches of the run.
        tasks_per_step: Groups per batch.

    Raises:
        TrajectoryApiError: the service is unreachable or rejects a request.
    """
    notify(f"resetting the run at {without_secrets(api_url)} and registering as its trainer")
    with BatchClient(api_url, token=os.environ.get("ATROPOS_API_TOKEN")) as client:
        answers = await asyncio.to_thread(
            client.take_over,
            group_size=group_size,
            tasks_per_step=tasks_per_step,
            max_token_len=max_token_len,
            num_steps=num_steps,
        )
    for answer in answers:
        print(answer)


async def check_for_batch(api_url: str) -> list[dict[str, Any]]:
    """Poll every second for the next batch, and return its groups."""
    with BatchClient(api_url, token=os.environ.get("ATROPOS_API_TOKEN")) as client:
        while True:
            batch = await asyncio.to_thread(client.next_groups)
            if batch is not None:
                return batch
            await asyncio.sleep(_POLL_S)


def grab_group(
    tok: Any, datagroup: Mapping[str, Any], save_messages: bool, kind: ExportKind
) -> list[dict[str, Any]]:
    """Return the records of one group with the field `score`, best first.

    Args:
        tok: Tokenizer with `decode`; not used with `save_messages`.
        datagroup: `tokens`, `scores`, and optionally `masks` and `messages`.
        save_messages: Whether to use the format `atropos-messages` instead of `atropos`.
        kind: The records to make.

    Raises:
        ConfigError: `save_messages` is set and the group has no messages.
    """
    if save_messages and not datagroup.get("messages"):
        raise ConfigError(
            "the group has no messages; run the environment with --env.include_messages true"
        )
    group = msgspec.convert(dict(datagroup), ExportGroup)
    form = kind.formats["atropos-messages" if save_messages else "atropos"]
    recipe = kind.recipe_for(form)(None if save_messages else decoder_of(tok))
    built = recipe.build(recipe.pick(group, "the group").picks)
    return [with_score(entry.record, entry.score) for entry in built if entry.record is not None]


async def consume_records(
    filepath: str,
    api_url: str,
    save_messages: bool,
    kind: ExportKind,
    *,
    group_size: int,
    max_token_len: int,
    tasks_per_step: int,
    tokenizer: str,
    max_records: int,
    appends: bool,
) -> None:
    """Act as the trainer of a service until `max_records` records are written.

    Args:
        filepath: JSON Lines file to write.
        api_url: Address of the service.
        save_messages: Whether to use the format `atropos-messages` instead of `atropos`.
        kind: The records to make.
        group_size: Trajectories per group.
        max_token_len: Maximum tokens of a trajectory.
        tasks_per_step: Groups per batch.
        tokenizer: Name or folder.
        max_records: Number of records.
        appends: Whether to add to an existing file.

    Raises:
        ConfigError: the file exists and `appends` is False; no request was sent.
        ExportStoppedError: the service became unreachable; the file is valid.
    """
    form = kind.formats["atropos-messages" if save_messages else "atropos"]
    request = ExportRequest(
        path=Path(filepath),
        kind="jsonl",
        mode="append" if appends else "new",
        source=_consuming(api_url, group_size, max_token_len, max_records, tasks_per_step),
        recipe=kind.recipe_for(form),
        has_score=form.has_score,
        needs_tokenizer=form.needs_tokenizer,
        tokenizer=tokenizer,
        max_records=max_records,
    )
    await asyncio.to_thread(run_export, request, notify=notify)
