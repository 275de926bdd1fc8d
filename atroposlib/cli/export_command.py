"""The command line of an export: flags, progress bar, report, messages and exit codes.

`atropos-sft-gen` and `atropos-dpo-gen` share this page. It also holds what `atroposlib.cli.sft`
and `atroposlib.cli.dpo` offer to scripts.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from atroposlib.errors import ConfigError, MissingExtraError, TrajectoryApiError
from atroposlib.exporting.formats import Recipe
from atroposlib.exporting.groups import BatchClient, ExportGroup
from atroposlib.exporting.output import Mode, kind_of
from atroposlib.exporting.report import ExportReport, report_text
from atroposlib.exporting.run import ExportRequest, ExportStoppedError, SourceRequest, run_export
from atroposlib.exporting.texts import decoder_of
from atroposlib.utils.command_parser import end_command, integer_between
from atroposlib.utils.text import find_common_prefix, without_secrets

__all__ = [
    "add_shared_flags",
    "check_for_batch",
    "consume_records",
    "find_common_prefix",
    "grab_group",
    "register_to_api",
    "run_command",
    "tell",
]

DEFAULT_TOKENIZER = "NousResearch/DeepHermes-3-Llama-3-8B-Preview"
_count = integer_between(1, 10**9)
_RUNS_DIR = "atropos_runs"


def add_shared_flags(
    parser: argparse.ArgumentParser, formats: Mapping[str, Any], *, min_score_diff: float
) -> None:
    """Add the flags that both commands have."""
    parser.add_argument("filepath", help="file, or folder with --output dataset, to write")
    source = parser.add_argument_group(
        "where groups come from",
        "By default the service at --api-url. Groups are looked at while a trainer is registered; "
        "while none is, this command stands in for one, so that environments start, and takes "
        "them until a trainer registers.",
    )
    source.add_argument("--api-url", default="http://localhost:8000", help="(%(default)s)")
    chosen = source.add_mutually_exclusive_group()
    chosen.add_argument("--file", metavar="JSONL", help="a file of groups, as process writes them")
    chosen.add_argument("--run", metavar="NAME", help="a stored run, by name or .sqlite3 file")
    chosen.add_argument(
        "--consume",
        action="store_true",
        help="be the trainer: RESETS the run at --api-url, registers, takes its batches for good",
    )
    source.add_argument("--data-dir", default=_RUNS_DIR, help="of --run (%(default)s)")
    source.add_argument(
        "--no-wait", action="store_true", help="end when all groups of the service were seen"
    )
    source.add_argument(
        "--group-size",
        type=_count,
        default=2,
        help="trajectories per group that environments make; sent to the service where this "
        "command stands in for a trainer, which takes batches of 64 such groups (%(default)s)",
    )
    source.add_argument(
        "--max-token-len",
        type=_count,
        action=_StoreGiven,
        default=2048,
        help="longest trajectory in tokens; sent to the service where this command stands in for "
        "a trainer (%(default)s with --consume; else no limit unless given)",
    )
    _add_choice_flags(parser, min_score_diff=min_score_diff)
    _add_output_flags(parser, formats)


def _add_choice_flags(parser: argparse.ArgumentParser, *, min_score_diff: float) -> None:
    choice = parser.add_argument_group("what is taken")
    choice.add_argument(
        "--num-seqs-to-save",
        type=_records,
        default=100,
        help="records to write, at least 1 (%(default)s)",
    )
    choice.add_argument("--all", action="store_true", help="every record")
    choice.add_argument("--allow-negative-scores", action="store_true", help="also 0 and below")
    choice.add_argument(
        "--minimum-score-diff-max-min", type=float, default=min_score_diff, help="(%(default)s)"
    )
    choice.add_argument(
        "--drop-truncated", action="store_true", help="leave completions out that were cut"
    )
    choice.add_argument(
        "--keep-duplicates", action="store_true", help="write what was written before, too"
    )


class _StoreGiven(argparse.Action):
    """Stores a value, and once more under a name that has no default."""

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


def _add_output_flags(parser: argparse.ArgumentParser, formats: Mapping[str, Any]) -> None:
    output = parser.add_argument_group("what is written")
    output.add_argument(
        "--format",
        choices=formats,
        help="; ".join(f"{name}: {form.about}" for name, form in formats.items()),
    )
    output.add_argument(
        "--save-messages", action="store_true", help="the same as --format atropos-messages"
    )
    output.add_argument("--keep-scores", action="store_true", help="a field score in every format")
    output.add_argument(
        "--output",
        choices=("auto", "jsonl", "parquet", "dataset"),
        default="auto",
        help="dataset: a folder; auto: Parquet for a name in .parquet, else JSONL",
    )
    again = output.add_mutually_exclusive_group()
    again.add_argument(
        "--append-to-previous", action="store_true", help="write more records to the output"
    )
    again.add_argument(
        "--resume", action="store_true", help="go on until the output has --num-seqs-to-save"
    )
    output.add_argument("--push-to-hub", metavar="OWNER/NAME", help="then upload it")
    output.add_argument("--public", action="store_true", help="of a repository made by that")
    output.add_argument("--tokenizer", default=DEFAULT_TOKENIZER, help="(%(default)s)")
    output.add_argument(
        "--any-tokenizer", action="store_true", help="also one that does not fit the groups"
    )


def _format_of(args: argparse.Namespace, formats: Mapping[str, Any]) -> Any:
    """Return the format asked for; ConfigError when two different ones are."""
    if args.save_messages and args.format not in (None, "atropos-messages"):
        raise ConfigError(f"--save-messages and --format {args.format} are different formats")
    return formats["atropos-messages" if args.save_messages else args.format or "atropos"]


def _mode_of(args: argparse.Namespace) -> Mode:
    if args.resume:
        return "resume"
    return "append" if args.append_to_previous else "new"


def source_of(
    args: argparse.Namespace, register: Callable[[], None], *, command: str
) -> SourceRequest:
    """Return where groups come from."""
    token = os.environ.get("ATROPOS_API_TOKEN")
    api_url = args.api_url.rstrip("/")
    if args.file is not None:
        return SourceRequest("file", file=Path(args.file))
    if args.run is not None:
        return SourceRequest("run", run=args.run, data_dir=Path(args.data_dir))
    if args.consume:
        return SourceRequest("consume", api_url=api_url, token=token, register=register)
    from atroposlib.api.client_consumer import consumer_registration

    stand_in = consumer_registration(
        command, group_size=args.group_size, max_token_len=getattr(args, "max_token_len_given", 0)
    )
    return SourceRequest(
        "live", api_url=api_url, token=token, waits=not args.no_wait, stand_in=stand_in
    )


def request_of(
    args: argparse.Namespace,
    formats: Mapping[str, Any],
    recipe: Callable[..., Any],
    source: SourceRequest,
) -> ExportRequest:
    """Put the flags together.

    Raises:
        ConfigError: flags contradict each other.
    """
    form = _format_of(args, formats)
    path = Path(args.filepath)
    if args.drop_truncated and not form.needs_tokenizer:
        raise ConfigError(
            "--drop-truncated needs a format made of text: whether a completion was cut is seen "
            "by its last token, which only its tokenizer knows"
        )
    return ExportRequest(
        path=path,
        kind=kind_of(path, args.output),
        mode=_mode_of(args),
        source=source,
        recipe=lambda decode, truncation: recipe(form, decode, truncation),
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
    formats: Mapping[str, Any],
    recipe: Callable[..., Recipe],
    *,
    tasks_per_step: int,
    unit: str,
) -> None:
    """Do what the flags of a command say; ends the process when that fails.

    Args:
        parser: Of the command; reports flags that contradict each other.
        args: parsed flags.
        formats: of the command.
        recipe: makes the recipe from a format, a decoder and a rule about truncation.
        tasks_per_step: groups per batch of `--consume`.
        unit: what a record is, in the plural.
    """

    def register() -> None:
        num_steps = STEPS_PER_SEQUENCE * args.num_seqs_to_save
        sizes = (args.group_size, args.max_token_len)
        asyncio.run(register_to_api(*sizes, args.api_url.rstrip("/"), num_steps, tasks_per_step))

    try:
        request = request_of(args, formats, recipe, source_of(args, register, command=parser.prog))
    except ConfigError as error:
        parser.error(str(error))
    _export_and_report(parser.prog, request, args, unit=unit)


def _export_and_report(
    command: str, request: ExportRequest, args: argparse.Namespace, *, unit: str
) -> None:
    """Export, print the report, push; ends the process with a message when that fails.

    Exit codes: 2 nothing was done, 1 the export ended early or the output holds no record at its
    end, 130 it was interrupted.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        if args.push_to_hub:
            from atroposlib.exporting.output import check_repository

            check_repository(args.push_to_hub)
        report = _with_bar(request, unit)
    except ExportStoppedError as stop:
        print(report_text(stop.report, unit=unit))
        end_command(command, str(stop), code=_INTERRUPTED if stop.is_interrupt else 1)
    except (ConfigError, MissingExtraError, TrajectoryApiError) as error:
        end_command(command, str(error), code=2)
    except KeyboardInterrupt:
        end_command(command, "stopped before anything was written", code=_INTERRUPTED)
    print(report_text(report, unit=unit))
    if not report.num_records and not request.path.exists():
        end_command(command, _shortfall(request, report), code=1)
    print(_shortfall(request, report))
    if args.push_to_hub and report.num_records:
        _push(command, request.path, args)


def tell(line: str) -> None:
    """Print a line where the progress bar is, without breaking it."""
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
            left_out = (f"{count} {reason}" for reason, count in report.refused.most_common(3))
            bar.set_postfix_str(", ".join(left_out), refresh=False)
            bar.update(num_records)

        return run_export(request, tell=tell, progress=advance)


def _shortfall(request: ExportRequest, report: ExportReport) -> str:
    if report.num_records:
        return f"written to {request.path}"
    if report.refused.get("no messages") == report.num_sequences and report.num_sequences:
        return (
            "nothing was written: the groups have no messages; run the environment with "
            "--env.include_messages true, or choose a --format made of text"
        )
    if not report.num_groups and request.mode == "resume" and request.path.exists():
        return f"nothing was added: {request.path} already holds at least the requested number"
    if not report.num_groups:
        return "nothing was written: there are no groups"
    return "nothing was written: no trajectory passed, the reasons are above"


def _push(command: str, path: Path, args: argparse.Namespace) -> None:
    from atroposlib.exporting.output import push_to_hub

    try:
        push_to_hub(path, args.push_to_hub, is_public=args.public)
    except ConfigError as error:
        end_command(command, str(error), code=1)
    print(f"pushed to {args.push_to_hub}")


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


STEPS_PER_SEQUENCE = 2
"""Steps registered for each record asked for: batches that give none must not end the run."""

_POLL_S = 1.0


async def register_to_api(
    group_size: int, max_token_len: int, api_url: str, num_steps: int, tasks_per_step: int = 64
) -> None:
    """Reset the run at an address, register as its trainer, and print both answers.

    Args:
        group_size: trajectories per group.
        max_token_len: longest trajectory environments should send, in tokens.
        api_url: of the service.
        num_steps: batches of the run.
        tasks_per_step: groups per batch.

    Raises:
        TrajectoryApiError: the service is away or refuses.
    """
    tell(f"resetting the run at {without_secrets(api_url)} and registering as its trainer")
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
    """Wait for the next batch and return its groups; asks every second."""
    with BatchClient(api_url, token=os.environ.get("ATROPOS_API_TOKEN")) as client:
        while True:
            batch = await asyncio.to_thread(client.next_groups)
            if batch is not None:
                return batch
            await asyncio.sleep(_POLL_S)


def grab_group(
    tok: Any,
    datagroup: Mapping[str, Any],
    save_messages: bool,
    formats: Mapping[str, Any],
    recipe: Callable[..., Recipe],
) -> list[tuple[dict[str, Any], float]]:
    """Return the records of one group with their scores, best first.

    Args:
        tok: tokenizer with `decode`; not used with `save_messages`.
        datagroup: `tokens`, `scores`, and where there are some `masks` and `messages`.
        save_messages: take the format `atropos-messages` instead of `atropos`.
        formats: of the command.
        recipe: makes the recipe from a format and a decoder.

    Returns:
        What the format can hold; the rest is left out.

    Raises:
        ConfigError: messages are asked for and the group has none.
    """
    if save_messages and not datagroup.get("messages"):
        raise ConfigError(
            "the group has no messages; run the environment with --env.include_messages true"
        )
    group = msgspec.convert(dict(datagroup), ExportGroup)
    made = recipe(
        _form_of_messages(formats, save_messages), None if save_messages else decoder_of(tok)
    )
    built = made.build(made.pick(group, "the group").picks)
    return [(entry.record, entry.score) for entry in built if entry.record is not None]


async def consume_records(
    filepath: str,
    api_url: str,
    save_messages: bool,
    formats: Mapping[str, Any],
    recipe: Callable[..., Recipe],
    *,
    tokenizer: str,
    max_records: int,
    appends: bool,
    register: Callable[[int], None],
) -> None:
    """Act as the trainer of a service until `max_records` records are written.

    Args:
        filepath: JSONL to write.
        api_url: of the service.
        save_messages: take the format `atropos-messages` instead of `atropos`.
        formats: of the command.
        recipe: makes the recipe from a format, a decoder and a rule about truncation.
        tokenizer: name or folder.
        max_records: to write.
        appends: whether to add to a file that exists.
        register: resets the run and registers for this number of steps.

    Raises:
        ConfigError: the output exists and may not be added to; the service was not touched.
        ExportStoppedError: the service went away; what was written is valid.
    """
    form = _form_of_messages(formats, save_messages)
    request = ExportRequest(
        path=Path(filepath),
        kind="jsonl",
        mode="append" if appends else "new",
        source=SourceRequest(
            "consume",
            api_url=api_url,
            token=os.environ.get("ATROPOS_API_TOKEN"),
            register=lambda: register(STEPS_PER_SEQUENCE * max_records),
        ),
        recipe=lambda decode, truncation: recipe(form, decode, truncation),
        has_score=form.has_score,
        needs_tokenizer=form.needs_tokenizer,
        tokenizer=tokenizer,
        max_records=max_records,
    )
    await asyncio.to_thread(run_export, request, tell=tell)


def _form_of_messages(formats: Mapping[str, Any], save_messages: bool) -> Any:
    return formats["atropos-messages" if save_messages else "atropos"]
