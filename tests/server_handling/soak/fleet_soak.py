"""Three engines under the load of hundreds of rollouts; one is killed and later started again.

Every rollout holds a conversation of several turns, half of them in tracked sessions and half with
plain chats. None may be lost, and the engine must be given work again once it is back.

Usage: python -m tests.server_handling.soak.fleet_soak [--rollouts 300] [--seconds 10]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from atroposlib.envs.server_handling.config import APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManager
from example_trainer.processes import find_free_ports
from tests.fakes import CharTokenizer

NAMES = ("one", "two", "three")
NUM_TURNS = 4
ENGINE_DELAY_S = 0.1


@dataclass
class Outcome:
    """What became of the rollouts, and who answered when."""

    finished: int = 0
    lost: list[str] = field(default_factory=list)
    turns_elsewhere: int = 0
    """Turns answered by another engine than the turn before."""
    mixed_up: list[str] = field(default_factory=list)
    """Sequences that do not hold exactly the replies of their rollout."""
    before: Counter[str] = field(default_factory=Counter)
    while_down: Counter[str] = field(default_factory=Counter)
    after: Counter[str] = field(default_factory=Counter)
    """Answers of each engine: before the kill, until the restart, and from then on."""
    slowest_turn_s: float = 0.0


class Engines:
    """The processes of the engines, at ports that stay theirs."""

    def __init__(self) -> None:
        self.ports = find_free_ports(len(NAMES))
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, index: int) -> None:
        module = "tests.server_handling.soak.engine_process"
        arguments = [str(self.ports[index]), NAMES[index], str(ENGINE_DELAY_S)]
        self._processes[index] = subprocess.Popen([sys.executable, "-m", module, *arguments])

    def kill(self, index: int) -> None:
        process = self._processes.pop(index)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()

    def kill_all(self) -> None:
        for index in list(self._processes):
            self.kill(index)

    async def wait_until_ready(self, index: int) -> None:
        async with httpx.AsyncClient() as client:
            for _ in range(600):
                try:
                    await client.get(f"http://127.0.0.1:{self.ports[index]}/health")
                    return
                except httpx.HTTPError:
                    await asyncio.sleep(0.05)
        raise TimeoutError(f"engine {NAMES[index]} did not start within 30 seconds")


class Soak:
    """The load, and the count of what it meets."""

    def __init__(self, manager: ServerManager) -> None:
        self.manager = manager
        self.outcome = Outcome()
        self.answered_by = self.outcome.before
        self.is_over = False

    async def keep_rolling(self, number: int) -> None:
        while not self.is_over:
            try:
                await (self._tracked(number) if number % 2 else self._plain(number))
                self.outcome.finished += 1
            except Exception as error:  # noqa: BLE001 - a lost rollout is what is counted
                self.outcome.lost.append(f"{type(error).__name__}: {error}")

    async def _plain(self, number: int) -> None:
        await self._converse(self.manager.chat_completion, number)

    async def _tracked(self, number: int) -> None:
        async with self.manager.managed_server() as session:
            replies = await self._converse(session.chat_completion, number)
            nodes = session.get_state()["nodes"]
        sampled = [token for token in nodes[0].masked_tokens if token != -100]
        text = CharTokenizer().decode(sampled, True)
        if len(nodes) != 1 or text != "".join(replies):
            self.outcome.mixed_up.append(f"{len(nodes)} sequences, {text!r} for {replies}")

    async def _converse(self, ask: Any, number: int) -> list[str]:
        messages = [{"role": "user", "content": f"rollout {number}"}]
        replies: list[str] = []
        for _ in range(NUM_TURNS):
            started = time.monotonic()
            chat = await ask(messages=messages, max_tokens=16)
            taken_s = time.monotonic() - started
            self.outcome.slowest_turn_s = max(self.outcome.slowest_turn_s, taken_s)
            replies.append(chat.choices[0].message.content)
            self.answered_by[replies[-1]] += 1
            self.outcome.turns_elsewhere += len(replies) > 1 and replies[-1] != replies[-2]
            messages += [{"role": "assistant", "content": replies[-1]}]
            messages += [{"role": "user", "content": "go on"}]
        return replies


async def run_soak(*, num_rollouts: int, seconds: float) -> Outcome:
    """Kill the first engine after a third of the time and start it again after two thirds."""
    engines = Engines()
    try:
        for index in range(len(NAMES)):
            engines.start(index)
        for index in range(len(NAMES)):
            await engines.wait_until_ready(index)
        manager = _manager(engines.ports)
        soak = Soak(manager)
        rollouts = [asyncio.create_task(soak.keep_rolling(i)) for i in range(num_rollouts)]
        await asyncio.sleep(seconds / 3)
        engines.kill(0)
        soak.answered_by = soak.outcome.while_down
        await asyncio.sleep(seconds / 3)
        engines.start(0)
        await engines.wait_until_ready(0)
        soak.answered_by = soak.outcome.after
        await asyncio.sleep(seconds / 3)
        soak.is_over = True
        await asyncio.wait_for(asyncio.gather(*rollouts), timeout=60)
        await manager.close()
        return soak.outcome
    finally:
        engines.kill_all()


def _manager(ports: list[int]) -> ServerManager:
    urls = [f"http://127.0.0.1:{port}/v1" for port in ports]
    manager = ServerManager(
        [
            APIServerConfig(base_url=url, server_type="vllm", model_name="scripted", timeout=30)
            for url in urls
        ]
    )
    for server in manager.servers:
        server.tokenizer = CharTokenizer()
    return manager


def main() -> None:
    """Run the soak, print what happened, and fail if a rollout was lost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=300, help="rollouts at the same time")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of the load")
    arguments = parser.parse_args()
    outcome = asyncio.run(run_soak(num_rollouts=arguments.rollouts, seconds=arguments.seconds))
    print(f"rollouts finished   {outcome.finished}")
    print(f"rollouts lost       {len(outcome.lost)} {outcome.lost[:3]}")
    print(f"sequences mixed up  {len(outcome.mixed_up)} {outcome.mixed_up[:3]}")
    print(f"turns elsewhere     {outcome.turns_elsewhere}")
    print(f"slowest turn        {outcome.slowest_turn_s:.2f} s")
    for name in ("before", "while_down", "after"):
        print(f"answers {name:<11} {dict(getattr(outcome, name))}")
    if outcome.lost or outcome.mixed_up or not outcome.after[NAMES[0]]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
