"""A scripted trainer and a real environment, while everything around them fails at random.

Rollouts raise and hang, completions are malformed, requests are dropped or answered with garbage,
score workers die, the engine restarts, the service is killed with SIGKILL and started again.

python -m tests.envs.soak.chaos --groups 10000
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from atroposlib.envs import base
from atroposlib.envs.base import APIServerConfig
from atroposlib.utils.math_check import check_math_answer
from tests.api.soak.ledger import Ledger
from tests.api.soak.service_process import Replica
from tests.envs.soak.actors import LEASE_S, ChaosEngine, ChaosEnv, LeasingTrainer, Odds
from tests.fakes import CharTokenizer

__all__ = ["Account", "chaos"]

SAMPLE = Path(__file__).parents[3] / "environments" / "data" / "gsm8k_sample"
GROUP_SIZE = 4
GROUPS_PER_BATCH = 8
REGISTRATION = {
    "wandb_group": "",
    "wandb_project": "",
    "batch_size": GROUP_SIZE * GROUPS_PER_BATCH,
    "max_token_len": 4000,
    "checkpoint_dir": "",
    "save_checkpoint_interval": 0,
    "starting_step": 0,
    "num_steps": 1_000_000,
}


@dataclass
class Account:
    """What happened, and what does not add up."""

    ledger: Ledger
    happened: dict[str, int]
    num_steps: int
    num_evaluations: int
    leaked_tasks: list[str]
    num_undecided: int
    """Finished groups that were neither taken nor refused by the service."""

    def faults(self) -> list[str]:
        """Say what does not add up; nothing may come twice, whatever was killed."""
        found = self.ledger.faults(in_flight=0)
        if self.ledger.repeated_without_cause(in_flight=0):
            found.append("groups were trained on twice")
        if self.num_undecided:
            found.append(f"{self.num_undecided} finished groups were never decided")
        return [*found, *(f"leaked: {task}" for task in self.leaked_tasks)]


class CharTokenizers:
    """Stands in for `AutoTokenizer`."""

    @staticmethod
    def from_pretrained(*_: Any, **__: Any) -> CharTokenizer:
        return CharTokenizer()


async def chaos(
    folder: Path,
    *,
    groups: int,
    seed: int = 0,
    kill_every_s: tuple[float, float] = (2.0, 8.0),
    on_progress: Callable[[int], None] = lambda _: None,
) -> Account:
    """Run until the service took so many groups and was killed; drain; return the account."""
    before = asyncio.all_tasks()
    odds, ledger = Odds(seed), Ledger()
    service = Replica(folder, "sqlite", run="chaos")
    async with AsyncExitStack() as stack:
        await asyncio.to_thread(service.start)
        stack.push_async_callback(asyncio.to_thread, service.stop)
        await asyncio.to_thread(_register, service.url)
        engine = ChaosEngine(odds, {})
        await stack.enter_async_context(engine)
        env = _make_env(folder, service.url, engine.base_url, odds, ledger)
        await _warm_up(env)
        trainer = LeasingTrainer(service.url, ledger, seed=seed)
        trainer.start()
        stack.callback(trainer.stop)
        serving = asyncio.create_task(env.env_manager())
        striking = asyncio.create_task(_strike(service, engine, ledger, odds, kill_every_s))
        await _until_taken(env, engine, serving, striking, groups, on_progress)
        serving.cancel()
        await asyncio.wait({serving})
        await asyncio.to_thread(_drain, service.url, trainer, ledger)
    # Callbacks of closed connections run once more before their tasks are gone.
    await asyncio.sleep(0.2)
    return Account(
        ledger=ledger,
        happened=dict(odds.happened),
        num_steps=trainer.num_steps,
        num_evaluations=env.num_evaluations,
        leaked_tasks=[repr(task) for task in asyncio.all_tasks() - before],
        num_undecided=env.num_posted - len(ledger.acknowledged) - env.num_refused,
    )


def _register(url: str) -> None:
    httpx.post(url + "/register", json=REGISTRATION).raise_for_status()
    httpx.get(url + "/batch").raise_for_status()


def _make_env(
    folder: Path, service_url: str, engine_url: str, odds: Odds, ledger: Ledger
) -> ChaosEnv:
    vars(base)["AutoTokenizer"] = CharTokenizers
    config, server = ChaosEnv.config_init()
    settings = {
        "dataset_path": str(SAMPLE),
        "use_wandb": False,
        "group_size": GROUP_SIZE,
        "max_token_length": 3900,
        "max_num_workers": 32,
        "max_batches_offpolicy": 8,
        "rollout_server_url": service_url,
        "total_steps": -1,
        "steps_per_eval": 25,
        "eval_handling": base.EvalHandlingEnum.LIMIT_TRAIN,
        "worker_timeout": 15.0,
        "straggler_policy": "RETRY",
        "straggler_retries": 1,
        "rollout_grace_s": 30.0,
        "metrics_path": str(folder / "metrics.jsonl"),
    }
    config = type(config).model_validate({**config.model_dump(), **settings})
    chosen = {"base_url": engine_url, "model_name": "scripted", "timeout": 10}
    chaotic_server = APIServerConfig.model_validate({**server.model_dump(), **chosen})
    env = ChaosEnv(config, [chaotic_server])
    env.odds, env.ledger = odds, ledger
    env.server.servers[0].health_poll_s = 0.1
    env.server.servers[0].max_backoff_s = 0.2
    return env


async def _warm_up(env: ChaosEnv) -> None:
    """Have the score workers import what they need, which takes longer than a rollout may."""
    checks = (env.score_pool.run(check_math_answer, "\\boxed{1}", "1", timeout=60) for _ in "12")
    await asyncio.gather(*checks)


async def _until_taken(
    env: ChaosEnv,
    engine: ChaosEngine,
    serving: asyncio.Task[Any],
    striking: asyncio.Task[Any],
    groups: int,
    on_progress: Callable[[int], None],
) -> None:
    try:
        while len(env.ledger.acknowledged) < groups or not env.ledger.kills:
            engine._answers_by_problem = env.answers()
            on_progress(len(env.ledger.acknowledged))
            done, _ = await asyncio.wait(
                {serving, striking}, timeout=0.5, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()
                raise AssertionError("the environment ended before its time")
    finally:
        striking.cancel()
        await asyncio.wait({striking})


async def _strike(
    service: Replica, engine: ChaosEngine, ledger: Ledger, odds: Odds, every: tuple[float, float]
) -> None:
    """Restart the engine, or kill the service and start it again, at random moments."""
    while True:
        await asyncio.sleep(odds.rng.uniform(*every))
        if odds.strike("engine restarts", 0.3):
            port = engine.port
            await asyncio.shield(engine.stop())
            await asyncio.sleep(odds.rng.uniform(0.0, 0.5))
            await asyncio.shield(engine.start(port))
            continue
        odds.happened["service kills"] += 1
        # Whole, so that a run that ends now does not leave a service that is down.
        await asyncio.shield(asyncio.to_thread(_kill_and_start, service, ledger))


def _kill_and_start(service: Replica, ledger: Ledger) -> None:
    service.kill()
    ledger.mark_kill()
    service.start()


def _drain(url: str, trainer: LeasingTrainer, ledger: Ledger) -> None:
    """Let the trainer take every batch there is; count the groups that are left.

    A batch whose answer was lost when the service was killed comes back when its lease is over.
    """
    deadline = time.monotonic() + 2 * LEASE_S
    while time.monotonic() < deadline:
        queued = _queued(url)
        missing = len(ledger.acknowledged - ledger.delivered.keys()) - queued
        if queued < GROUPS_PER_BATCH and missing <= 0:
            break
        time.sleep(0.1)
    trainer.stop()
    trainer.join(timeout=60)
    if trainer.error is not None:
        raise trainer.error
    ledger.num_queued = _queued(url)


def _queued(url: str) -> int:
    for _ in range(100):  # the service may be on its way up again
        try:
            return int(httpx.get(url + "/status", timeout=10).json()["queue_size"])
        except (httpx.TransportError, ValueError):
            time.sleep(0.1)
    raise AssertionError("the service did not come back")


def describe(account: Account, *, elapsed_s: float) -> str:
    """Say in a line what was done and what was found."""
    ledger = account.ledger
    happened = ", ".join(f"{count} {name}" for name, count in sorted(account.happened.items()))
    return (
        f"{len(ledger.acknowledged)} groups taken by the service in {elapsed_s:.0f} s, "
        f"{len(ledger.delivered)} trained on in {account.num_steps} steps, {ledger.num_queued} "
        f"left in the queue, {account.num_evaluations} evaluations; injected: {happened}"
    )


def main() -> None:
    """Run and print the account; exit code 1 when it does not balance."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        account = asyncio.run(
            chaos(
                Path(folder),
                groups=arguments.groups,
                seed=arguments.seed,
                on_progress=lambda number: print(f"\r{number} groups", end="", flush=True),
            )
        )
        elapsed_s = time.monotonic() - started
    faults = account.faults()
    print(f"\r{describe(account, elapsed_s=elapsed_s)}")
    print("; ".join(faults) or "no task leaked, no group lost, none trained on twice")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
