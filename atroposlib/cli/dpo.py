"""`atropos-dpo-gen`: write better and worse trajectories of groups as preference pairs."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial
from typing import Any

from atroposlib.cli import export_command as export_calls
from atroposlib.cli.export_command import (
    ExportKind,
    add_shared_flags,
    check_for_batch,
    consume_records,
    find_common_prefix,
    grab_group,
    run_command,
)
from atroposlib.exporting.formats import DPO_FORMATS, DpoRecipe
from atroposlib.exporting.selection import STRATEGIES, PairRule
from atroposlib.utils.command_parser import CommandParser, prepare_command

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
    """Export pairs and print a report."""
    prepare_command()
    parser = _parser()
    args = parser.parse_args()
    rule = PairRule(
        args.pairs,
        args.save_n_pairs_per_group,
        args.allow_negative_scores,
        args.minimum_score_diff_max_min,
    )
    kind = ExportKind(DPO_FORMATS, partial(DpoRecipe, seed=args.seed), rule)
    run_command(parser, args, kind, tasks_per_step=_TASKS_PER_STEP, unit="pairs")


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
        tok: Tokenizer with `decode`; not used with `save_messages`.
        datagroup: `tokens`, `scores`, and optionally `masks` and `messages`.
        save_messages: Whether `pos` and `neg` are chats, without `prefix`.
        save_n_pairs_per_group: Maximum number of pairs, and of worst trajectories that the rejected
            sides are drawn from.
        allow_negative_scores: Whether the better side may score 0 or less.
        minimum_score_diff_max_min: Minimum difference between the sides, exclusive.

    Raises:
        ConfigError: `save_messages` is set and the group has no messages.
    """
    rule = PairRule(
        "best-random", save_n_pairs_per_group, allow_negative_scores, minimum_score_diff_max_min
    )
    recipe = partial(DpoRecipe, seed=random.getrandbits(32))
    return grab_group(tok, datagroup, save_messages, ExportKind(DPO_FORMATS, recipe, rule))


async def register_to_api(
    group_size: int, max_token_len: int, api_url: str, num_steps: int
) -> None:
    """Reset the run of a service, register as its trainer, and print both responses.

    Raises:
        TrajectoryApiError: the service is unreachable or rejects a request.
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
    """Act as the trainer of a service until `num_seqs_to_save` pairs are written.

    Raises:
        ConfigError: the output exists and `append_to_previous` is False; no request was sent.
        ExportStoppedError: the service became unreachable; the output is valid.
    """
    rule = PairRule(
        "best-random", save_n_pairs_per_group, allow_negative_scores, minimum_score_diff_max_min
    )
    await consume_records(
        filepath,
        api_url,
        save_messages,
        ExportKind(DPO_FORMATS, DpoRecipe, rule),
        group_size=group_size,
        max_token_len=max_token_len,
        tasks_per_step=_TASKS_PER_STEP,
        tokenizer=tokenizer,
        max_records=num_seqs_to_save,
        appends=append_to_previous,
    )


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="atropos-dpo-gen",
        description="Write better and worse trajectories of scored groups as preference pairs.",
    )
    add_shared_flags(parser, DPO_FORMATS, min_score_diff=0.5)
    parser.add_argument(
        "--save-n-pairs-per-group", type=int, default=3, help="pairs per group (%(default)s)"
    )
    parser.add_argument(
        "--pairs",
        choices=STRATEGIES,
        default="best-random",
        help="pairing strategy; every pair has the minimum difference of scores (%(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of best-random (%(default)s)")
    return parser


if __name__ == "__main__":
    main()
