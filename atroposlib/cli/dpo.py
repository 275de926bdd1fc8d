"""`atropos-dpo-gen`: write better and worse trajectories of groups as preference pairs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any

from atroposlib.cli import export_command as export_calls
from atroposlib.cli.export_command import (
    add_shared_flags,
    check_for_batch,
    consume_records,
    find_common_prefix,
    grab_group,
    run_command,
)
from atroposlib.exporting.formats import DPO_FORMATS, DpoRecipe
from atroposlib.exporting.output import with_score
from atroposlib.exporting.selection import STRATEGIES, PairRule
from atroposlib.utils.command_parser import CommandParser

__all__ = [
    "check_for_batch",
    "dpo_data_grabber",
    "find_common_prefix",
    "grab_group_data",
    "main",
    "register_to_api",
]

_TASKS_PER_STEP = 8


def main() -> None:
    """Export until there are enough pairs, then print a report."""
    parser = _parser()
    args = parser.parse_args()
    rule = PairRule(
        args.pairs,
        args.save_n_pairs_per_group,
        args.allow_negative_scores,
        args.minimum_score_diff_max_min,
    )
    run_command(
        parser,
        args,
        DPO_FORMATS,
        lambda form, decode, truncation: DpoRecipe(form, rule, decode, truncation, seed=args.seed),
        tasks_per_step=_TASKS_PER_STEP,
        unit="pairs",
    )


def grab_group_data(
    tok: Any,
    datagroup: Mapping[str, Any],
    save_messages: bool,
    save_n_pairs_per_group: int,
    allow_negative_scores: bool = False,
    minimum_score_diff_max_min: float = 0.0,
) -> list[dict[str, Any]]:
    """Return the pairs of one group, best first; the rejected sides are drawn at random.

    Args:
        tok: tokenizer with `decode`; not used with `save_messages`.
        datagroup: `tokens`, `scores`, and where there are some `masks` and `messages`.
        save_messages: give chats as `pos` and `neg`, without `prefix`.
        save_n_pairs_per_group: maximum number of pairs, and of worst trajectories that the rejected
            sides are drawn from.
        allow_negative_scores: let scores of 0 and below be the better side.
        minimum_score_diff_max_min: what the better score must exceed the other one by.

    Raises:
        ConfigError: messages are asked for and the group has none.
    """
    rule = PairRule(
        "best-random", save_n_pairs_per_group, allow_negative_scores, minimum_score_diff_max_min
    )
    seed = random.getrandbits(32)
    found = grab_group(
        tok,
        datagroup,
        save_messages,
        DPO_FORMATS,
        lambda form, decode: DpoRecipe(form, rule, decode, seed=seed),
    )
    return [with_score(record, score) for record, score in found]


async def register_to_api(
    group_size: int, max_token_len: int, api_url: str, num_steps: int
) -> None:
    """Reset the run at an address, register as its trainer, and print both answers.

    Raises:
        TrajectoryApiError: the service is away or refuses.
    """
    await export_calls.register_to_api(
        group_size, max_token_len, api_url, num_steps, _TASKS_PER_STEP
    )


async def dpo_data_grabber(
    filepath: str,
    api_url: str,
    group_size: int,
    max_token_len: int,
    tokenizer: str,
    save_messages: bool,
    save_n_pairs_per_group: int,
    num_seqs_to_save: int,
    allow_negative_scores: bool,
    minimum_score_diff_max_min: float,
    append_to_previous: bool,
) -> None:
    """Act as the trainer at an address until `num_seqs_to_save` pairs are written.

    Raises:
        ConfigError: the output exists and may not be added to; the service was not touched.
        ExportStoppedError: the service went away; what was written is valid.
    """
    rule = PairRule(
        "best-random", save_n_pairs_per_group, allow_negative_scores, minimum_score_diff_max_min
    )

    def register(num_steps: int) -> None:
        asyncio.run(register_to_api(group_size, max_token_len, api_url, num_steps))

    await consume_records(
        filepath,
        api_url,
        save_messages,
        DPO_FORMATS,
        lambda form, decode, truncation: DpoRecipe(form, rule, decode, truncation),
        tokenizer=tokenizer,
        max_records=num_seqs_to_save,
        appends=append_to_previous,
        register=register,
    )


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="atropos-dpo-gen",
        description="Write better and worse trajectories of scored groups as preference pairs.",
    )
    add_shared_flags(parser, DPO_FORMATS, min_score_diff=0.5)
    parser.add_argument(
        "--save-n-pairs-per-group", type=int, default=3, help="of each group (%(default)s)"
    )
    parser.add_argument(
        "--pairs",
        choices=STRATEGIES,
        default="best-random",
        help="how sides are paired; all need the score difference (%(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of random pairs (%(default)s)")
    return parser


if __name__ == "__main__":
    main()
