"""Groups of a live service, looked at without taking any; waits for more until stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from atroposlib.api.client_consumer import Consumer, InspectionClient
from atroposlib.errors import ConfigError, TrajectoryApiError
from atroposlib.exporting.groups import RawGroup
from atroposlib.utils.secret_masking import without_secrets

__all__ = ["check_inspectable", "watch_groups"]

_STATES = ("past", "in_flight", "queued")
_POLL_S = 1.0
_QUIET_ROUNDS_BEFORE_HINT = 5


def check_inspectable(client: InspectionClient) -> None:
    """Make sure that the service is there and lets itself be looked at.

    Raises:
        ConfigError: it is a service without the inspection routes.
        TrajectoryApiError: it is away, or the token is not enough.
    """
    try:
        client.groups("queued", limit=1)
    except TrajectoryApiError as error:
        if error.status in (404, 405):
            raise ConfigError(
                f"the service at {without_secrets(client.base_url)} has no routes to look at "
                "groups; --consume takes its batches as a trainer would"
            ) from error
        raise


def watch_groups(
    client: InspectionClient,
    *,
    is_endless: bool,
    tell: Callable[[str], None] = lambda _: None,
    consumer: Consumer | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[RawGroup]:
    """Yield every group once: the last delivered ones, those in flight, those that wait, new ones.

    Groups that leave between two looks and are not kept by the service any more are missed.

    Args:
        client: of the service.
        is_endless: whether to wait for more groups once all were seen.
        tell: gets a sentence when nothing comes and the reason is known.
        consumer: stands in for a trainer while there is none, and takes what was yielded; None
            only looks.
        sleep: waits; replaced in tests.
    """
    seen: set[int] = set()
    told: set[str] = set()
    num_quiet_rounds = 0
    try:
        while True:
            has_leased = consumer is not None and consumer.attend()
            entries = (entry for state in _STATES for entry in client.new_groups(state, seen))
            new = sorted({entry["id"] for entry in entries})
            for payload in client.payloads(new):
                if payload is not None:
                    yield RawGroup(f"group {payload.group_id}", payload.lane, payload.content)
            seen.update(new)
            if not is_endless:
                return
            if consumer is not None:
                consumer.settle()
            num_quiet_rounds = 0 if new else num_quiet_rounds + 1
            if num_quiet_rounds == _QUIET_ROUNDS_BEFORE_HINT:
                reason = _why_quiet(client)
                if reason not in told:  # groups come and go; each reason is news once
                    tell(reason)
                told.add(reason)
            sleep(0.0 if new or has_leased else _POLL_S)
    finally:
        if consumer is not None:
            consumer.release()


def _why_quiet(client: InspectionClient) -> str:
    if int(client.info()["batch_size"]) < 0:
        return (
            "no trainer is registered, so environments do not start; start one, or let this "
            "command be the trainer with --consume"
        )
    if not any(env["is_connected"] for env in client.envs()):
        return (
            "no environment is connected yet: start one with `serve`, and with "
            f"--env.rollout_server_url {without_secrets(client.base_url)} where that is not its "
            "default"
        )
    return "waiting for new groups; Ctrl-C ends the export and keeps what is written"
