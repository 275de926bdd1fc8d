"""Kills the processes of a run in a random order, and counts what was sampled and delivered."""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from atroposlib.api.client import TrajectoryApiClient
from atroposlib.errors import TrajectoryApiError
from tests.envs.live_service import REGISTRATION, until
from tests.envs.turn_kills.actors import GROUP_SIZE, NUM_TURNS, OPENING, Ports, expected_walk

__all__ = ["KillAccount", "run_with_kills"]

REPOSITORY = Path(__file__).parents[3]
ROLES = ("env", "engine", "tool", "service")
BUILD_S = 120.0


class Processes:
    """The four processes; `kill` sends SIGKILL to one and starts it again."""

    def __init__(self, folder: Path, ports: Ports) -> None:
        self._folder = folder
        self._ports = ports
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, role: str) -> None:
        own = [sys.executable, "-m", "tests.envs.turn_kills.actors", role, str(self._folder)]
        service = [
            sys.executable,
            "-m",
            "atroposlib.cli.run_api",
            "--port",
            str(self._ports.service),
        ]
        service += ["--run", "walks", "--data-dir", str(self._folder / "runs")]
        with (self._folder / f"{role}.log").open("ab") as log:
            self._running[role] = subprocess.Popen(
                service if role == "service" else own, cwd=REPOSITORY, stdout=log, stderr=log
            )

    def kill(self, role: str) -> None:
        self._running[role].kill()
        self._running[role].wait()

    def check(self) -> None:
        """Raise if a process has ended by itself."""
        for role, process in self._running.items():
            if process.poll() is not None:
                log = (self._folder / f"{role}.log").read_text()
                raise AssertionError(f"{role} ended with {process.returncode}:\n{log[-3000:]}")

    def end(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()


@contextmanager
def running(folder: Path, ports: Ports) -> Iterator[Processes]:
    processes = Processes(folder, ports)
    try:
        for role in reversed(ROLES):
            processes.start(role)
        yield processes
    finally:
        processes.end()


class ProcessKill(NamedTuple):
    """A process that was ended; a completion may still be sampled between the two times."""

    role: str
    began_at: float
    ended_at: float


@dataclass
class KillAccount:
    """What happened in a run."""

    kills: list[ProcessKill] = field(default_factory=list)
    sampled: list[dict[str, Any]] = field(default_factory=list)
    """Completions of the engine."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    """Groups that the service delivered."""
    num_items: int = 0
    num_repeated_calls: int = 0

    @property
    def numbers(self) -> list[int]:
        """Item of each delivered group."""
        return [walk_of(group["messages"][0])[0] for group in self.groups]

    @property
    def scores(self) -> list[float]:
        return [score for group in self.groups for score in group["scores"]]

    def num_sampled_again(self) -> Counter[int]:
        """Completions of each item beyond those of its delivered group."""
        by_item = Counter(record["number"] for record in self.sampled)
        return Counter({n: count - GROUP_SIZE * NUM_TURNS for n, count in by_item.items()})

    def faults(self) -> list[str]:
        """Describe everything that an undisturbed run would not show, or that was lost."""
        numbers = Counter(self.numbers)
        found = [f"item {n} was delivered {c} times" for n, c in numbers.items() if c > 1]
        begun = {record["number"] for record in self.sampled}
        found += [f"item {n} was sampled and lost" for n in sorted(begun - set(numbers))]
        for group in self.groups:
            for messages, score in zip(group["messages"], group["scores"], strict=True):
                wanted = expected_walk(*walk_of(messages))
                if messages != wanted.messages or abs(score - wanted.score) > 1e-9:
                    found.append(f"{messages} has {score}, expected {wanted}")
        for number, extra in self.num_sampled_again().items():
            times = [record["at"] for record in self.sampled if record["number"] == number]
            kills = sum(
                min(times) <= kill.ended_at and kill.began_at <= max(times) + 1
                for kill in self.kills
            )
            if extra > GROUP_SIZE * kills:
                found.append(f"item {number}: {extra} turns sampled again after {kills} kills")
        return found


def walk_of(messages: list[dict[str, Any]]) -> tuple[int, str]:
    """Return item and tag of a chat."""
    found = OPENING.search(messages[0]["content"])
    assert found is not None, messages
    return int(found[1]), found[2]


async def run_with_kills(
    folder: Path, ports: Ports, *, num_kills: int, min_groups: int, seed: int
) -> KillAccount:
    """Kill a process after every few completions; then let all walks finish and take the groups."""
    (folder / "ports.json").write_text(json.dumps(ports))
    account = KillAccount()
    chance = random.Random(seed)
    order = [role for _ in range(-(-num_kills // 4)) for role in chance.sample(ROLES, 4)]
    with running(folder, ports) as processes:
        client = TrajectoryApiClient(f"http://127.0.0.1:{ports.service}")
        try:
            await _register(client)
            for role in order[:num_kills]:
                await _until_sampled(folder, processes, chance.randint(3, 40))
                began_at = time.time()
                processes.kill(role)
                account.kills.append(ProcessKill(role, began_at, ended_at=time.time()))
                processes.start(role)
                if role == "service":  # a trainer, which waits for a batch, asks again
                    account.groups += await _answered(client.batch) or []
            await until(lambda: _num_items(folder) >= min_groups, BUILD_S)
            (folder / "stop").touch()
            await _take_groups(client, folder, account, processes)
        finally:
            await client.close()
    account.sampled = _sampled(folder)
    account.num_items = _num_items(folder)
    account.num_repeated_calls = (folder / "repeated_calls").read_bytes().count(b"\n")
    return account


async def _register(client: TrajectoryApiClient) -> None:
    registration = {**REGISTRATION, "batch_size": GROUP_SIZE, "max_token_len": 4096}
    registration["num_steps"] = 1_000_000
    await _answered(lambda: client.register_trainer(**registration))
    assert await client.batch() is None  # a trainer has started once it asked for a batch


async def _answered(ask: Callable[[], Awaitable[Any]]) -> Any:
    """Repeat a request while the service starts."""
    deadline = time.monotonic() + BUILD_S
    while True:
        try:
            return await ask()
        except TrajectoryApiError:
            assert time.monotonic() < deadline, "the service did not start"
            await asyncio.sleep(0.05)


async def _until_sampled(folder: Path, processes: Processes, num_more: int) -> None:
    """Wait until the engine has sampled more completions."""
    before = _num_lines(folder)

    def is_reached() -> bool:
        processes.check()
        return _num_lines(folder) >= before + num_more

    await until(is_reached, BUILD_S)


async def _take_groups(
    client: TrajectoryApiClient, folder: Path, account: KillAccount, processes: Processes
) -> None:
    """Take batches until every walk that was sampled is delivered, or none comes any more."""
    deadline = time.monotonic() + BUILD_S
    while time.monotonic() < deadline:
        processes.check()
        batch = await _answered(client.batch)
        account.groups += batch or []
        begun = {record["number"] for record in _sampled(folder)}
        if batch is None and begun <= set(account.numbers):
            return
        if batch is None:
            await asyncio.sleep(0.05)


def _sampled(folder: Path) -> list[dict[str, Any]]:
    path = folder / "sampled.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if re.fullmatch(r"\{.*\}", line)]


def _num_lines(folder: Path) -> int:
    path = folder / "sampled.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _num_items(folder: Path) -> int:
    path = folder / "next_item"
    return int(path.read_text()) if path.exists() else 0
