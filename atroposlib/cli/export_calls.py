"""What `atroposlib.cli.sft` and `atroposlib.cli.dpo` let scripts call, besides their commands."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from atroposlib.cli.export_command import tell
from atroposlib.errors import ConfigError
from atroposlib.exporting.groups import ExportGroup
from atroposlib.exporting.recipes import Recipe
from atroposlib.exporting.run import ExportRequest, SourceRequest, run_export
from atroposlib.exporting.sources.consumed import fetch_batch, register_trainer, registration
from atroposlib.exporting.splitting import common_prefix_length
from atroposlib.exporting.texts import decoder_of
from atroposlib.utils.secret_masking import without_secrets

__all__ = [
    "STEPS_PER_SEQUENCE",
    "check_for_batch",
    "consume_records",
    "find_common_prefix",
    "grab_group",
    "register_to_api",
]

STEPS_PER_SEQUENCE = 2
"""Steps registered for each record asked for: batches that give none must not end the run."""

_POLL_S = 1.0


def find_common_prefix(strings: Sequence[str]) -> str:
    """Return the longest text all strings begin with; empty for no strings."""
    return str(strings[0][: common_prefix_length(strings)]) if strings else ""


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
    settings = registration(
        group_size=group_size,
        tasks_per_step=tasks_per_step,
        max_token_len=max_token_len,
        num_steps=num_steps,
    )
    token = os.environ.get("ATROPOS_API_TOKEN")
    tell(f"resetting the run at {without_secrets(api_url)} and registering as its trainer")
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
    made = recipe(_format_of(formats, save_messages), None if save_messages else decoder_of(tok))
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
    """Be the trainer of a service until so many records are written.

    Args:
        filepath: JSONL to write.
        api_url: of the service.
        save_messages: take the format `atropos-messages` instead of `atropos`.
        formats: of the command.
        recipe: makes the recipe from a format, a decoder and a rule about truncation.
        tokenizer: name or folder.
        max_records: to write.
        appends: whether to add to a file that exists.
        register: resets the run and registers for so many steps.

    Raises:
        ConfigError: the output exists and may not be added to; the service was not touched.
        ExportStoppedError: the service went away; what was written is valid.
    """
    form = _format_of(formats, save_messages)
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


def _format_of(formats: Mapping[str, Any], save_messages: bool) -> Any:
    return formats["atropos-messages" if save_messages else "atropos"]
