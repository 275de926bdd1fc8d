"""`atropos-dpo-gen`: write better and worse trajectories of groups as preference pairs."""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Mapping
from typing import Any

import msgspec

from atroposlib.cli import sft
from atroposlib.cli.export_command import export_and_report, tell
from atroposlib.cli.export_flags import (
    add_shared_flags,
    consuming_request,
    request_of,
    source_of,
)
from atroposlib.cli.sft import check_for_batch, find_common_prefix
from atroposlib.errors import ConfigError
from atroposlib.exporting.dpo_formats import DPO_FORMATS
from atroposlib.exporting.groups import ExportGroup
from atroposlib.exporting.pairing import STRATEGIES, PairRule
from atroposlib.exporting.recipes import DpoRecipe
from atroposlib.exporting.run import run_export
from atroposlib.exporting.texts import decoder_of

__all__ = [
    "check_for_batch",
    "dpo_data_grabber",
    "find_common_prefix",
    "grab_group_data",
    "main",
    "register_to_api",
]

_TASKS_PER_STEP = 8
_STEPS_PER_SEQUENCE = 2


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

    def register() -> None:
        num_steps = _STEPS_PER_SEQUENCE * args.num_seqs_to_save
        api_url = args.api_url.rstrip("/")
        asyncio.run(register_to_api(args.group_size, args.max_token_len, api_url, num_steps))

    try:
        request = request_of(
            args,
            DPO_FORMATS,
            lambda form, decode, truncation: DpoRecipe(
                form, rule, decode, truncation, seed=args.seed
            ),
            source_of(args, register),
        )
    except ConfigError as error:
        parser.error(str(error))
    export_and_report("atropos-dpo-gen", request, args, unit="pairs")


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
        save_n_pairs_per_group: the most to make; the rejected sides are among so many worst.
        allow_negative_scores: let scores of 0 and below be the better side.
        minimum_score_diff_max_min: what the better score must exceed the other one by.

    Raises:
        ConfigError: messages are asked for and the group has none.
    """
    form = DPO_FORMATS["atropos-messages" if save_messages else "atropos"]
    if save_messages and not datagroup.get("messages"):
        raise ConfigError(
            "the group has no messages; run the environment with --env.include_messages true"
        )
    group = msgspec.convert(dict(datagroup), ExportGroup)
    rule = PairRule(
        "best-random", save_n_pairs_per_group, allow_negative_scores, minimum_score_diff_max_min
    )
    decode = None if save_messages else decoder_of(tok)
    recipe = DpoRecipe(form, rule, decode, seed=random.getrandbits(32))
    built = recipe.build(recipe.pick(group, "the group").picks)
    return [_with_score(entry.record, entry.score) for entry in built if entry.record is not None]


async def register_to_api(
    group_size: int, max_token_len: int, api_url: str, num_steps: int
) -> None:
    """Reset the run at an address, register as its trainer, and print both answers.

    Raises:
        TrajectoryApiError: the service is away or refuses.
    """
    await sft.register_to_api(group_size, max_token_len, api_url, num_steps, _TASKS_PER_STEP)


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
    """Be the trainer at an address until so many pairs are written; arguments as the flags.

    Raises:
        ConfigError: the output exists and may not be added to; the service was not touched.
        ExportStoppedError: the service went away; what was written is valid.
    """
    form = DPO_FORMATS["atropos-messages" if save_messages else "atropos"]
    rule = PairRule(
        "best-random", save_n_pairs_per_group, allow_negative_scores, minimum_score_diff_max_min
    )

    def register() -> None:
        num_steps = _STEPS_PER_SEQUENCE * num_seqs_to_save
        asyncio.run(register_to_api(group_size, max_token_len, api_url, num_steps))

    request = consuming_request(
        filepath,
        api_url,
        form,
        lambda decode, truncation: DpoRecipe(form, rule, decode, truncation),
        tokenizer=tokenizer,
        max_records=num_seqs_to_save,
        appends=append_to_previous,
        register=register,
    )
    await asyncio.to_thread(run_export, request, tell=tell)


def _with_score(record: Mapping[str, Any], score: float) -> dict[str, Any]:
    rejected = {"neg": record["neg"]}
    return {**{k: v for k, v in record.items() if k != "neg"}, "score": score, **rejected}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="atropos-dpo-gen",
        description="Write better and worse trajectories of scored groups as preference pairs. "
        "Groups are looked at, not taken, unless --consume is given.",
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
