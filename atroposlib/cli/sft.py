"""`atropos-sft-gen`: write the best trajectories of groups as demonstrations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atroposlib.cli.export_command import (
    ExportKind,
    add_shared_flags,
    check_for_batch,
    consume_records,
    find_common_prefix,
    grab_group,
    register_to_api,
    run_command,
)
from atroposlib.exporting.formats import SFT_FORMATS, SftRecipe
from atroposlib.exporting.selection import SelectionRule
from atroposlib.utils.command_parser import CommandParser, prepare_command

__all__ = [
    "check_for_batch",
    "find_common_prefix",
    "grab_group_data",
    "main",
    "register_to_api",
    "sft_data_grabber",
]


def main() -> None:
    """Export records and print a report."""
    prepare_command()
    parser = _parser()
    args = parser.parse_args()
    rule = SelectionRule(
        args.save_top_n_per_group, args.allow_negative_scores, args.minimum_score_diff_max_min
    )
    kind = ExportKind(SFT_FORMATS, SftRecipe, rule)
    run_command(parser, args, kind, tasks_per_step=args.tasks_per_step, unit="examples")


def grab_group_data(
    tok: Any,
    datagroup: Mapping[str, Any],
    save_messages: bool,
    save_top_n_per_group: int,
    allow_negative_scores: bool = False,
    minimum_score_diff_max_min: float = 0.0,
) -> list[dict[str, Any]]:
    """Return the records of one group, best first.

    Args:
        tok: Tokenizer with `decode`; not used with `save_messages`.
        datagroup: `tokens`, `scores`, and optionally `masks` and `messages`.
        save_messages: Whether records have `messages` instead of `prefix` and `completion`.
        save_top_n_per_group: Maximum number of records.
        allow_negative_scores: Whether scores of 0 and below are accepted.
        minimum_score_diff_max_min: Minimum difference to the lowest score, exclusive; 0 for none.

    Raises:
        ConfigError: `save_messages` is set and the group has no messages.
    """
    rule = SelectionRule(save_top_n_per_group, allow_negative_scores, minimum_score_diff_max_min)
    return grab_group(tok, datagroup, save_messages, ExportKind(SFT_FORMATS, SftRecipe, rule))


async def sft_data_grabber(
    filepath: str,
    api_url: str,
    group_size: int,
    max_token_len: int,
    tokenizer: str,
    save_messages: bool,
    save_top_n_per_group: int,
    num_seqs_to_save: int,
    allow_negative_scores: bool,
    minimum_score_diff_max_min: float,
    append_to_previous: bool,
    tasks_per_step: int = 64,
) -> None:
    """Act as the trainer of a service until `num_seqs_to_save` records are written.

    Raises:
        ConfigError: the output exists and `append_to_previous` is False; no request was sent.
        ExportStoppedError: the service became unreachable; the output is valid.
    """
    rule = SelectionRule(save_top_n_per_group, allow_negative_scores, minimum_score_diff_max_min)
    await consume_records(
        filepath,
        api_url,
        save_messages,
        ExportKind(SFT_FORMATS, SftRecipe, rule),
        group_size=group_size,
        max_token_len=max_token_len,
        tasks_per_step=tasks_per_step,
        tokenizer=tokenizer,
        max_records=num_seqs_to_save,
        appends=append_to_previous,
    )


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="atropos-sft-gen",
        description="Write the best trajectories of scored groups as demonstrations.",
    )
    add_shared_flags(parser, SFT_FORMATS, min_score_diff=0.0)
    parser.add_argument(
        "--save-top-n-per-group", type=int, default=3, help="records per group (%(default)s)"
    )
    parser.add_argument(
        "--tasks-per-step", type=int, default=64, help="groups per batch of --consume (%(default)s)"
    )
    return parser


if __name__ == "__main__":
    main()
