"""Two trainers and fifty environments for minutes: mixed formats, sizes and shares, one account.

python -m tests.api.soak.soak --minutes 5 --store sqlite
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from tests.api.soak.actors import Actor, Environment, Trainer, held_groups, register_trainer
from tests.api.soak.attack import running, service, stop_all
from tests.api.soak.ledger import Ledger

__all__ = ["soak"]

_NUM_ENVS = 50
_GROUP_SIZE = 8
_BATCH_SEQUENCES = 64
_SIZES = ((8,), (4, 8), (1, 2, 4, 8), (2, 4), (16, 8))
_SHARES = {0: 0.25, 1: 0.1}


def soak(
    folder: Path,
    *,
    seconds: float,
    store: str = "sqlite",
    on_sample: Callable[[float, int, dict[str, object]], None] = lambda *_: None,
) -> tuple[Ledger, list[int]]:
    """Run the load, then stop it and count.

    Args:
        folder: where the run lives.
        seconds: how long environments post.
        store: `memory`, `sqlite` or `redis`.
        on_sample: told the seconds, the resident bytes and `/status`, ten times over the run.

    Returns:
        The account, and the resident bytes of the first replica over time.
    """
    ledger = Ledger()
    with service(folder, store) as (replicas, _):
        env_ids = register_trainer(
            replicas[0].url,
            batch_size=_BATCH_SEQUENCES,
            num_envs=_NUM_ENVS,
            group_size=_GROUP_SIZE,
            min_batch_allocation=_SHARES.get,
        )
        urls = [replica.url for replica in replicas]
        environments = [
            # The two that are guaranteed a share post more, or everybody would wait for them.
            Environment(
                urls,
                ledger,
                seed=env_id,
                env_id=env_id,
                sizes=_SIZES[env_id % len(_SIZES)] if env_id not in _SHARES else (_GROUP_SIZE,),
                pause_s=0.05 if env_id in _SHARES else 1.0,
            )
            for env_id in env_ids
        ]
        trainers = [
            Trainer(urls, ledger, seed=1000),
            Trainer(urls, ledger, seed=1001, lease_s=30.0),
        ]
        samples = []
        actors: list[Actor] = [*environments, *trainers]
        with running(actors):
            started = time.monotonic()
            for _ in range(10):
                time.sleep(seconds / 10)
                samples.append(_resident_bytes(replicas[0].pid))
                status = httpx.get(urls[0] + "/status", timeout=10).json()
                on_sample(time.monotonic() - started, samples[-1], status)
            stop_all(environments)
            ledger.num_queued = _settle(urls[0])
    return ledger, samples


def _settle(url: str) -> int:
    """Wait until nothing moves any more; return the groups that the service still holds."""
    held, unchanged = -1, 0
    while unchanged < 6:
        time.sleep(0.5)
        before, held = held, held_groups(url, "queued", "buffered", "in_flight")
        unchanged = unchanged + 1 if held == before else 0
    return held


def _resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in the status of the process")


def main() -> None:
    """Soak a service and print the account; exit code 1 when it does not balance."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--store", choices=["memory", "sqlite", "redis"], default="sqlite")
    arguments = parser.parse_args()

    def show(seconds: float, resident: int, status: dict[str, object]) -> None:
        print(f"{seconds:6.0f} s  {resident / 1e6:7.1f} MB resident  {status}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        ledger, samples = soak(
            Path(folder), seconds=60 * arguments.minutes, store=arguments.store, on_sample=show
        )
    faults = ledger.faults(in_flight=0)
    growth = samples[-1] / samples[1]
    print(
        f"{len(ledger.acknowledged)} groups posted and taken, {len(ledger.refused)} refused, "
        f"{sum(ledger.delivered.values())} delivered in {len(ledger.deliveries)} batches, "
        f"{ledger.num_queued} still held; resident memory x{growth:.2f} over the last 80%"
    )
    print("; ".join(faults) or "every posted group is accounted for exactly once")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
