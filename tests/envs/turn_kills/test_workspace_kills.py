"""Rollouts with workspaces whose environment is killed with SIGKILL."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from atroposlib.workspaces import WorkspaceError
from atroposlib.workspaces.local import LocalWorkspaces
from tests.envs.live_service import LiveService, ScriptedTrainer, until
from tests.envs.turn_kills.workspace_actors import (
    GROUP_SIZE,
    NUM_TURNS,
    WorkshopEngine,
    open_base,
    tag_of,
    undisturbed,
)
from tests.fakes import ScriptedEngine

REPOSITORY = Path(__file__).parents[3]
WAIT_S = 120.0


class Environment:
    """The process of the environment; `kill` sends SIGKILL and starts it again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.num_kills = 0
        self._start()

    def _start(self) -> None:
        words = [sys.executable, "-m", "tests.envs.turn_kills.workspace_actors", str(self._folder)]
        with (self._folder / "env.log").open("ab") as log:
            self.process = subprocess.Popen(words, cwd=REPOSITORY, stdout=log, stderr=log)

    def kill(self) -> None:
        self.check()
        self.process.kill()
        self.process.wait()
        self.num_kills += 1
        self._start()

    def check(self) -> None:
        """Raise if the process has ended by itself."""
        if self.process.poll() is not None:
            raise AssertionError((self._folder / "env.log").read_text()[-3000:])


@contextmanager
def environment(folder: Path) -> Iterator[Environment]:
    running = Environment(folder)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait()


async def play_with_kills(
    folder: Path, service: LiveService, *, num_items: int, num_kills: int
) -> tuple[list[dict[str, Any]], int]:
    """Return the delivered groups, and the number of completions."""
    (folder / "num_items").write_text(str(num_items))
    chance = random.Random(num_kills)
    written = WorkshopEngine()
    service.start()
    registration = {"batch_size": GROUP_SIZE, "max_token_len": 8192, "num_steps": 1_000_000}
    async with (
        ScriptedEngine(written, delay_s=0.03) as engine,
        ScriptedTrainer(service.url, **registration) as trainer,
    ):
        urls = {"service": service.url, "engine": engine.base_url}
        (folder / "urls.json").write_text(json.dumps(urls))
        await trainer.register()
        with environment(folder) as running:
            for _ in range(num_kills):
                await _until_sampled(written, chance.randint(4, 12), running)
                running.kill()
            await asyncio.wait_for(trainer.train(num_items), WAIT_S)
            await until(lambda: not (folder / "turns.sqlite.workspaces").exists(), WAIT_S)
    return trainer.groups, written.num_sampled


async def _until_sampled(engine: WorkshopEngine, num_more: int, running: Environment) -> None:
    """Wait until the engine has sampled more completions."""
    enough = engine.num_sampled + num_more

    def is_reached() -> bool:
        running.check()
        return engine.num_sampled >= enough

    await until(is_reached, WAIT_S)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_items", "num_kills"),
    [
        pytest.param(1, 1, id="once"),
        pytest.param(12, 15, id="fifteen", marks=pytest.mark.long),
    ],
)
async def test_files_of_killed_rollouts_are_those_of_undisturbed_ones(
    num_items: int, num_kills: int, service: LiveService, tmp_path: Path
) -> None:
    try:
        workspaces = LocalWorkspaces(cache=tmp_path / "cache", warm=0)
    except WorkspaceError as error:
        pytest.skip(str(error))

    groups, num_sampled = await play_with_kills(
        tmp_path, service, num_items=num_items, num_kills=num_kills
    )

    base = await open_base(workspaces, tmp_path)
    chats = [chat for group in groups for chat in group["messages"]]
    assert len(chats) == num_items * GROUP_SIZE
    assert len({tag_of(chat[0]["content"]) for chat in chats}) == len(chats)
    for chat in chats:
        read = [message["content"] for message in chat[1:] if message["role"] == "user"]
        assert read == await undisturbed(base, tag_of(chat[0]["content"]))
    num_again = num_sampled - len(chats) * NUM_TURNS
    assert num_again <= 2 * GROUP_SIZE * num_kills  # two groups run at a time
    await workspaces.close()
