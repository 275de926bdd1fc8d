"""An environment and a trainer that are only clients of the service, for faults at little cost.

    python -m tests.several_hosts.plain_clients environment URL RECORD
    python -m tests.several_hosts.plain_clients trainer URL METRICS

They use the clients that the real ones use. The environment posts a named group about ten times a
second and records each acknowledged one; a step of the trainer is a line with the names of a batch,
written before the batch is acknowledged, as the trainer's journal is.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from atroposlib.api.client import RetryRule, TrainerClient, TrajectoryApiClient
from tests.several_hosts.cluster import GROUP_SIZE, GROUPS_PER_BATCH, ClusterRun, Part
from tests.several_hosts.lines import append_line, read_lines

__all__ = ["PlainClusterRun"]

_PAUSE_S = 0.1
_PATIENT = RetryRule(attempts=None, max_delay_s=1.0, deadline_s=600.0)


class PlainClusterRun(ClusterRun):
    """Service, one environment and trainer; no engine, no model."""

    environments = ("env1",)
    host_names = ("service", "env1", "trainer")
    checked_urls = (("service", "/health/ready"),)

    def _save_model(self) -> None:
        pass

    def _make_parts(self, think_s: float) -> list[Part]:
        return [
            *self._service_parts(),
            self._client("env1", "environment", self._record("env1")),
            self._client("trainer", "trainer", self.metrics),
        ]

    def _client(self, host: str, role: str, path: Path) -> Part:
        path.parent.mkdir(exist_ok=True)
        program = [sys.executable, "-m", "tests.several_hosts.plain_clients"]
        return self._part(host, host, [*program, role, self._url("service"), str(path)], role=role)


async def post_groups(url: str, record: Path, token: str | None) -> None:
    """Post groups until SIGINT; the last one is recorded as well."""
    is_ending = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, is_ending.set)
    async with TrajectoryApiClient(url, retry=_PATIENT, token=token) as client:
        await client.register_env(
            max_token_length=8, desired_name="plain", weight=1.0, group_size=GROUP_SIZE
        )
        for number in itertools.count():
            if is_ending.is_set():
                return
            name = f"{os.getpid()}-{number}"
            row = [1, 2, 3]
            group: dict[str, Any] = {"tokens": [row] * GROUP_SIZE, "masks": [row] * GROUP_SIZE}
            group |= {"scores": [float(i) for i in range(GROUP_SIZE)]}
            await client.post_group({**group, "generation_params": {"name": name}})
            append_line(record, {"name": name, "time": time.monotonic()})
            await asyncio.sleep(_PAUSE_S)


def take_batches(url: str, metrics: Path, token: str | None) -> None:
    """Take batches until the process ends; skip the steps that an earlier process has made."""
    with TrainerClient(url, retry=_PATIENT, token=token) as client:
        client.wait_until_up(60.0)
        taken = {line["batch"] for line in read_lines(metrics)}
        client.register(
            wandb_group="",
            wandb_project="",
            batch_size=GROUP_SIZE * GROUPS_PER_BATCH,
            max_token_len=8,
            checkpoint_dir="",
            save_checkpoint_interval=0,
            starting_step=len(taken),
            num_steps=1_000_000,
        )
        while True:
            batch = client.batch(lease_s=600.0, wait_s=5.0)
            if batch is None or batch.batch_id is None:
                continue
            number = batch.batch_id.partition("-")[0]
            if number not in taken:
                taken.add(number)
                names = [group["generation_params"]["name"] for group in batch.groups]
                append_line(metrics, {"step": len(taken), "batch": number, "names": names})
            client.ack(batch.batch_id, steps_done=len(taken))


def main() -> None:
    role, url, path = sys.argv[1:]
    token = os.environ.get("ATROPOS_API_TOKEN")
    if role == "environment":
        asyncio.run(post_groups(url, Path(path), token))
    else:
        take_batches(url, Path(path), token)


if __name__ == "__main__":
    main()
