"""Groups taken from a service as its trainer: resets the run, registers, takes every batch."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from atroposlib.api.client_protocol import auth_headers
from atroposlib.errors import ConfigError, TrajectoryApiError
from atroposlib.exporting.groups import RawGroup
from atroposlib.utils.inert_text import inert_block
from atroposlib.utils.secret_masking import without_secrets

if TYPE_CHECKING:
    import httpx

__all__ = ["consume_groups", "fetch_batch", "register_trainer", "registration"]

_TIMEOUT_S = 60.0
_POLL_S = 1.0


def registration(
    *, group_size: int, tasks_per_step: int, max_token_len: int, num_steps: int
) -> dict[str, Any]:
    """Return what this tool registers as a trainer with."""
    return {
        "wandb_group": "test",
        "wandb_project": "test",
        "batch_size": group_size * tasks_per_step,
        "max_token_len": max_token_len,
        "checkpoint_dir": "checkpoints",
        "save_checkpoint_interval": 10,
        "starting_step": 0,
        "num_steps": num_steps,
    }


async def register_trainer(
    api_url: str, settings: dict[str, Any], *, token: str | None = None
) -> list[Any]:
    """Reset the run at an address and register as its trainer; return both answers.

    Raises:
        TrajectoryApiError: the service is away or refuses.
    """
    import httpx

    async with httpx.AsyncClient(timeout=_TIMEOUT_S, headers=auth_headers(token)) as client:
        return [
            await _answer(client, "GET", f"{api_url}/reset_data"),
            await _answer(client, "POST", f"{api_url}/register", settings),
        ]


async def fetch_batch(api_url: str, *, token: str | None = None) -> list[dict[str, Any]] | None:
    """Return the groups of the next batch; None when none is ready or no trainer is registered.

    Raises:
        TrajectoryApiError: the service is away or refuses.
    """
    import httpx

    async with httpx.AsyncClient(timeout=_TIMEOUT_S, headers=auth_headers(token)) as client:
        answer = await _answer(client, "GET", f"{api_url}/batch")
    if not isinstance(answer, dict) or answer.get("status") == "error":
        return None
    return answer.get("batch")


def consume_groups(
    fetch: Callable[[], list[dict[str, Any]] | None],
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[RawGroup]:
    """Yield the groups of batch after batch, for ever.

    Args:
        fetch: takes the next batch, None when there is none.
        sleep: waits; replaced in tests.
    """
    number = 0
    while True:
        batch = fetch()
        for group in batch or ():
            number += 1
            yield RawGroup(f"received group {number}", "json", json.dumps(group).encode())
        if not batch:
            sleep(_POLL_S)


async def _answer(
    client: httpx.AsyncClient, method: str, url: str, body: dict[str, Any] | None = None
) -> Any:
    import httpx

    try:
        reply = await client.request(method, url, json=body)
    except (httpx.HTTPError, asyncio.TimeoutError) as error:
        raise TrajectoryApiError(
            f"{method} {without_secrets(url)} got no answer: {type(error).__name__}; is the "
            "trajectory service running there? `run-api` starts one"
        ) from error
    except httpx.InvalidURL as error:
        raise ConfigError(f"{without_secrets(url)} is no address: {error}") from error
    if reply.status_code >= 400:
        raise TrajectoryApiError(
            f"{method} {without_secrets(url)} answered {reply.status_code}: "
            f"{inert_block(reply.text[:500])}",
            status=reply.status_code,
        )
    try:
        return reply.json()
    except ValueError:
        return reply.text
