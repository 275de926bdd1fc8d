"""The flags that `atropos-sft-gen` and `atropos-dpo-gen` share, and the request they make."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from atroposlib.errors import ConfigError
from atroposlib.exporting.output import Mode, kind_of
from atroposlib.exporting.run import ExportRequest, SourceRequest

__all__ = [
    "DEFAULT_TOKENIZER",
    "add_shared_flags",
    "request_of",
    "source_of",
]

DEFAULT_TOKENIZER = "NousResearch/DeepHermes-3-Llama-3-8B-Preview"
_LARGEST_COUNT = 10**9
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
        help="trajectories per group that environments make; told to the service where this "
        "command stands in for a trainer, which takes batches of 64 such groups (%(default)s)",
    )
    source.add_argument(
        "--max-token-len",
        type=_count,
        action=_StoreGiven,
        default=2048,
        help="longest trajectory in tokens; told to the service where this command stands in for "
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
    choice.add_argument("--all", action="store_true", help="as many as there are")
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


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _LARGEST_COUNT:
        raise argparse.ArgumentTypeError(
            f"expected an integer from 1 to {_LARGEST_COUNT}, got {text!r}"
        )
    return int(text)


def _records(text: str) -> int:
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no whole number of 1 or more; --all writes as many records as there are"
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
    """Return what happens to an output that exists."""
    if args.resume:
        return "resume"
    return "append" if args.append_to_previous else "new"


def source_of(
    args: argparse.Namespace, register: Callable[[], None], *, command: str
) -> SourceRequest:
    """Return where groups come from.

    Args:
        args: parsed flags.
        register: resets the run and registers, for `--consume`.
        command: name under which it stands in for a trainer.
    """
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

    Args:
        args: parsed flags.
        formats: of the command.
        recipe: makes the recipe from a format, a decoder and a rule about truncation.
        source: where groups come from.

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
