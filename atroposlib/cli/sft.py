"""`atropos-sft-gen`: write the best trajectories of groups as examples to imitate."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from atroposlib.cli.export_command import export_and_report, tell
from atroposlib.cli.export_flags import (
    add_shared_flags,
    consuming_request,
    request_of,
    source_of,
)
from atroposlib.errors import ConfigError
from atroposlib.exporting.groups import ExportGroup
from atroposlib.exporting.recipes import SftRecipe
from atroposlib.exporting.run import run_export
from atroposlib.exporting.selection import SelectionRule
from atroposlib.exporting.sft_formats import SFT_FORMATS
from atroposlib.exporting.sources.consumed import fetch_batch, register_trainer, registration
from atroposlib.exporting.splitting import common_prefix_length
from atroposlib.exporting.texts import decoder_of

__all__ = [
    "check_for_batch",
    "find_common_prefix",
    "grab_group_data",
    "main",
    "register_to_api",
    "sft_data_grabber",
]

_POLL_S = 1.0
_STEPS_PER_SEQUENCE = 2


def main() -> None:
    """Export until there are enough records, then print a report."""
    parser = _parser()
    args = parser.parse_args()
    rule = SelectionRule(
        args.save_top_n_per_group, args.allow_negative_scores, args.minimum_score_diff_max_min
    )

    def register() -> None:
        asyncio.run(
            register_to_api(
                args.group_size,
                args.max_token_len,
                args.api_url.rstrip("/"),
                _STEPS_PER_SEQUENCE * args.num_seqs_to_save,
                args.tasks_per_step,
            )
        )

    try:
        request = request_of(
            args,
            SFT_FORMATS,
            lambda form, decode, truncation: SftRecipe(form, rule, decode, truncation),
            source_of(args, register),
        )
    except ConfigError as error:
        parser.error(str(error))
    export_and_report("atropos-sft-gen", request, args, unit="examples")


def find_common_prefix(strings: Sequence[str]) -> str:
    """Return the longest text all strings begin with; empty for no strings."""
    return str(strings[0][: common_prefix_length(strings)]) if strings else ""


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
    form = SFT_FORMATS["atropos-messages" if save_messages else "atropos"]
    if save_messages and not datagroup.get("messages"):
        raise ConfigError(
            "the group has no messages; run the environment with --env.include_messages true"
        )
    group = msgspec.convert(dict(datagroup), ExportGroup)
    rule = SelectionRule(save_top_n_per_group, allow_negative_scores, minimum_score_diff_max_min)
    recipe = SftRecipe(form, rule, None if save_messages else decoder_of(tok))
    built = recipe.build(recipe.pick(group, "the group").picks)
    return [{**entry.record, "score": entry.score} for entry in built if entry.record is not None]


async def register_to_api(
    group_size: int, max_token_len: int, api_url: str, num_steps: int, tasks_per_step: int = 64
) -> None:
    """Reset the run at an address, register as its trainer, and print both answers.

    Raises:
        TrajectoryApiError: the service is away or refuses.
    """
    settings = registration(
        group_size=group_size,
        tasks_per_step=tasks_per_step,
        max_token_len=max_token_len,
        num_steps=num_steps,
    )
    token = os.environ.get("ATROPOS_API_TOKEN")
    tell(f"resetting the run at {api_url} and registering as its trainer")
    for answer in await register_trainer(api_url, settings, token=token):
        print(answer)


async def check_for_batch(api_url: str) -> list[dict[str, Any]]:
    """Wait for the next batch and return its groups; asks every second."""
    token = os.environ.get("ATROPOS_API_TOKEN")
    while True:
        batch = await fetch_batch(api_url, token=token)
        if batch is not None:
            return batch
        await asyncio.sleep(_POLL_S)


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
    """Be the trainer at an address until so many records are written; arguments as the flags.

    Raises:
        ConfigError: the output exists and may not be added to; the service was not touched.
        ExportStoppedError: the service went away; what was written is valid.
    """
    form = SFT_FORMATS["atropos-messages" if save_messages else "atropos"]
    rule = SelectionRule(save_top_n_per_group, allow_negative_scores, minimum_score_diff_max_min)

    def register() -> None:
        num_steps = _STEPS_PER_SEQUENCE * num_seqs_to_save
        asyncio.run(register_to_api(group_size, max_token_len, api_url, num_steps, tasks_per_step))

    request = consuming_request(
        filepath,
        api_url,
        form,
        lambda decode, truncation: SftRecipe(form, rule, decode, truncation),
        tokenizer=tokenizer,
        max_records=num_seqs_to_save,
        appends=append_to_previous,
        register=register,
    )
    await asyncio.to_thread(run_export, request, tell=tell)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="atropos-sft-gen",
        description="Write the best trajectories of scored groups as examples to imitate. Groups "
        "are looked at, not taken, unless --consume is given.",
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
