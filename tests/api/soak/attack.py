"""A run under load whose parts are killed at random moments, and the account afterwards.

python -m tests.api.soak.attack --kills 100 --store sqlite
python -m tests.api.soak.attack --kills 100 --store redis --victims replica redis
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.api.soak.actors import (
    Actor,
    Environment,
    Trainer,
    held_groups,
    register_trainer,
)
from tests.api.soak.ledger import Ledger
from tests.api.soak.service_process import Process, RedisServer, Replica

__all__ = ["attack", "running", "service", "stop_all"]

_GROUP_SEQUENCES = 4
GROUPS_PER_BATCH = 4
_DRAIN_S = 60.0


def attack(
    folder: Path,
    *,
    kills: int,
    store: str = "sqlite",
    victims: Sequence[str] = ("replica",),
    seed: int = 0,
    on_kill: Callable[[int], None] = lambda _: None,
) -> Ledger:
    """Load a service, kill its parts with SIGKILL, restart them, drain it, return the account.

    Args:
        folder: where the run and the logs live.
        kills: how many times a part is killed.
        store: `sqlite` (one replica) or `redis` (two replicas of one run).
        victims: what is killed: `replica`, `redis`.
        seed: of the moments, the victims and the load.
        on_kill: told the number of each kill.
    """
    rng, ledger = random.Random(seed), Ledger()
    with service(folder, store) as (replicas, redis):
        register_trainer(replicas[0].url, batch_size=GROUPS_PER_BATCH * _GROUP_SEQUENCES)
        urls = [replica.url for replica in replicas]
        environments = [
            Environment(urls, ledger, seed=seed + n, sizes=(_GROUP_SEQUENCES,), pause_s=0.002)
            for n in range(4)
        ]
        trainer = Trainer(urls, ledger, seed=seed + 100)
        choices: dict[str, list[Process]] = {"replica": list(replicas), "redis": [*redis]}
        with running([*environments, trainer]):
            for number in range(kills):
                time.sleep(rng.uniform(0.02, 0.6))
                victim = rng.choice([p for name in victims for p in choices[name]])
                victim.kill()
                ledger.mark_kill(victim.url if isinstance(victim, Replica) else None)
                on_kill(number + 1)
                time.sleep(rng.uniform(0.0, 0.1))
                victim.start()
            stop_all(environments)
            ledger.num_queued = _drain(urls[0])
    return ledger


@contextmanager
def service(folder: Path, store: str) -> Iterator[tuple[list[Replica], list[RedisServer]]]:
    redis = [RedisServer(folder)] if store == "redis" else []
    processes: list[Process] = list(redis)
    try:
        for server in redis:
            server.start()
        url = redis[0].url if redis else store
        replicas = [Replica(folder, url) for _ in range(2 if redis else 1)]
        processes += replicas
        for replica in replicas:
            replica.start()
        yield replicas, redis
    finally:
        for process in reversed(processes):
            process.stop()


@contextmanager
def running(actors: Sequence[Actor]) -> Iterator[None]:
    for actor in actors:
        actor.start()
    try:
        yield
    finally:
        stop_all(actors)
    for actor in actors:
        if actor.error is not None:
            raise actor.error


def stop_all(actors: Sequence[Actor]) -> None:
    for actor in actors:
        actor.stop()
    for actor in actors:
        actor.join(timeout=60)
        assert not actor.is_alive(), f"{type(actor).__name__} did not end"


def _drain(url: str) -> int:
    """Wait until the trainer has taken every batch there is; return the groups that are left.

    What a killed service had handed out comes back only once it counts as dead.
    """
    deadline = time.monotonic() + _DRAIN_S
    while time.monotonic() < deadline:
        if not held_groups(url, "in_flight") and held_groups(url, "queued") < GROUPS_PER_BATCH:
            break
        time.sleep(0.1)
    return held_groups(url, "in_flight", "queued")


def main() -> None:
    """Attack a run and print the account; exit code 1 when it does not balance."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--store", choices=["sqlite", "redis"], default="sqlite")
    parser.add_argument("--victims", nargs="+", choices=["replica", "redis"], default=["replica"])
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        ledger = attack(
            Path(folder),
            kills=arguments.kills,
            store=arguments.store,
            victims=arguments.victims,
            seed=arguments.seed,
            on_kill=lambda number: print(f"\rkill {number}", end="", flush=True),
        )
        elapsed = time.monotonic() - started
    faults = ledger.faults()
    repeated = sum(times - 1 for times in ledger.delivered.values())
    print(
        f"\r{arguments.kills} kills in {elapsed:.0f} s: {len(ledger.acknowledged)} groups "
        f"acknowledged, {len(ledger.deliveries)} batches delivered, {ledger.num_queued} groups "
        f"left in the queue, {repeated} groups delivered again after a kill"
    )
    print("; ".join(faults) or "every acknowledged group is accounted for")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
