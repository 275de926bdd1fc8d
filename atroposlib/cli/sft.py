"""`atropos-sft-gen`: write the best trajectories of groups as examples to imitate."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from atroposlib.cli.export_command import (
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
from atroposlib.utils.command_parser import CommandParser

__all__ = [
    "check_for_batch",
    "find_common_prefix",
    "grab_group_data",
    "main",
    "register_to_api",
    "sft_data_grabber",
]


def main() -> None:
    """Export until there are enough records, then print a report."""
    parser = _parser()
    args = parser.parse_args()
    rule = SelectionRule(
        args.save_top_n_per_group, args.allow_negative_scores, args.minimum_score_diff_max_min
    )
    run_command(
        parser,
        args,
        SFT_FORMATS,
        lambda form, decode, truncation: SftRecipe(form, rule, decode, truncation),
        tasks_per_step=args.tasks_per_step,
        unit="examples",
    )


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
        tok: tokenizer with `decode`; not used with `save_messages`.
        datagroup: `tokens`, `scores`, and where there are some `masks` and `messages`.
        save_messages: give `messages` and `score` instead of `prefix`, `completion` and `score`.
        save_top_n_per_group: the most to take.
        allow_negative_scores: also take scores of 0 and below.
        minimum_score_diff_max_min: what a score must exceed the lowest one by; 0 asks for nothing.

    Raises:
        ConfigError: messages are asked for and the group has none.
    """
    rule = SelectionRule(save_top_n_per_group, allow_negative_scores, minimum_score_diff_max_min)
    found = grab_group(
        tok,
        datagroup,
        save_messages,
        SFT_FORMATS,
        lambda form, decode: SftRecipe(form, rule, decode),
    )
    return [{**record, "score": score} for record, score in found]


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
    """Act as the trainer at an address until `num_seqs_to_save` records are written.

    Raises:
        ConfigError: the output exists and may not be added to; the service was not touched.
        ExportStoppedError: the service went away; what was written is valid.
    """
    rule = SelectionRule(save_top_n_per_group, allow_negative_scores, minimum_score_diff_max_min)

    def register(num_steps: int) -> None:
        asyncio.run(register_to_api(group_size, max_token_len, api_url, num_steps, tasks_per_step))

    await consume_records(
        filepath,
        api_url,
        save_messages,
        SFT_FORMATS,
        lambda form, decode, truncation: SftRecipe(form, rule, decode, truncation),
        tokenizer=tokenizer,
        max_records=num_seqs_to_save,
        appends=append_to_previous,
        register=register,
    )


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="atropos-sft-gen",
        description="Write the best trajectories of scored groups as examples to imitate.",
    )
    add_shared_flags(parser, SFT_FORMATS, min_score_diff=0.0)
    parser.add_argument(
        "--save-top-n-per-group", type=int, default=3, help="of each group (%(default)s)"
    )
    parser.add_argument(
        "--tasks-per-step", type=int, default=64, help="groups per batch of --consume (%(default)s)"
    )
    return parser


if __name__ == "__main__":
    main()
