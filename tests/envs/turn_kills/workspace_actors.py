"""An environment with workspaces that is killed: commands change files, and list them in each turn.

Usage: python -m tests.envs.turn_kills.workspace_actors FOLDER

The policy writes a digit in each turn, a function of the rollout's random tag. The digit and the
turn determine the command, so `undisturbed` knows what a rollout reads that nothing disturbs.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from atroposlib.envs import base
from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.conversation import ChatMessage, Conversation, Reply, Turn
from atroposlib.envs.multi_turn_env import MultiTurnEnvConfig
from atroposlib.sandbox import SandboxLimits
from atroposlib.workspaces import Base, LazyWorkspace, Workspace, WorkspaceSpec
from atroposlib.workspaces.local import LocalWorkspaces
from tests.envs.turn_kills.actors import CharTokenizers, NumberedEnv

__all__ = ["GROUP_SIZE", "NUM_TURNS", "WorkshopEngine", "open_base", "tag_of", "undisturbed"]

NUM_TURNS = 6
GROUP_SIZE = 3
OPENING = re.compile(r"Files (\d+) ([0-9a-f]{8})")
LIMITS = SandboxLimits(wall_s=60.0, cpu_s=30, memory_bytes=2**29, disk_bytes=2**24)
COMMANDS = (
    "echo {digit} > new-{turn}; chmod 75{digit} new-{turn}",
    "ln -sfn new-{digit} link; echo {digit} >> shared",
    "rm -rf folder; mkdir -p folder/{digit}; echo {turn} > folder/{digit}/file",
    "rm -f new-*; chmod +x shared",
    "mv shared moved-{digit}; ln -s folder shared",
    "chmod 500 folder; rm -f kept; echo {digit} > /tmp/outside",
)
LISTING = r"""
cd /; find app tmp \( -type d -printf '%p %m\n' -o -printf '%p %y %m %s %l\n' \) | sort
find app tmp -type f -print0 | sort -z | xargs -0 md5sum
"""


def tag_of(text: str) -> str:
    """Return the tag in the opening of a rollout."""
    found = OPENING.search(text)
    assert found is not None, text
    return found[2]


def digit_of(tag: str, turn: int) -> int:
    """Return what the policy writes, 0 to 7."""
    return hashlib.blake2b(f"{tag} {turn}".encode(), digest_size=2).digest()[0] % 8


async def change(workspace: Workspace, turn: int, digit: int) -> str:
    """Run the command of a turn, and return a digest of all files."""
    command = COMMANDS[turn].format(turn=turn, digit=digit)
    result = await workspace.run(["sh", "-c", f"{command}\n{LISTING}"])
    assert result.is_success, result
    return f"{hashlib.sha256(result.text.encode()).hexdigest()} at turn {turn}"


async def undisturbed(base: Base, tag: str) -> list[str]:
    """Return what a rollout that nothing disturbs reads in its turns."""
    workspace = await base.fork()
    try:
        return [await change(workspace, turn, digit_of(tag, turn)) for turn in range(NUM_TURNS - 1)]
    finally:
        await workspace.close()


async def open_base(workspaces: LocalWorkspaces, folder: Path) -> Base:
    """Prepare the base, or take it from the cache."""
    source = folder / "source"
    (source / "folder").mkdir(parents=True, exist_ok=True)
    for name in ("shared", "kept", "folder/first"):
        (source / name).write_text(f"{name}\n")
    return await workspaces.prepare(WorkspaceSpec("files", source=source, limits=LIMITS))


class WorkshopEngine:
    """Writes the digits; counts its completions."""

    def __init__(self) -> None:
        self.num_sampled = 0

    def __call__(self, prompt: str) -> str:
        found = OPENING.search(prompt)
        if found is None:  # the probe of the environment
            return "ok"
        self.num_sampled += 1
        return str(digit_of(found[2], prompt.count(" at turn ")))


class FilesConversation(Conversation):
    """Changes files in each turn, and answers with a digest of all files."""

    unfinished_reward = -100.0

    def __init__(self, number: int, base: Base) -> None:
        self.number = number
        self.tag = secrets.token_hex(4)
        self.workspace = LazyWorkspace(base.fork)

    def opening(self) -> Sequence[ChatMessage]:
        return [{"role": "user", "content": f"Files {self.number} {self.tag}: write a digit."}]

    async def reply(self, turn: Turn) -> Reply:
        listing = await change(self.workspace, turn.index, int(turn.text))
        is_done = turn.index + 1 == NUM_TURNS
        return Reply("" if is_done else listing, reward=int(turn.text) / 100, is_done=is_done)

    def state(self) -> str:
        return self.tag

    def restore(self, state: str) -> None:
        self.tag = state

    async def close(self) -> None:
        await self.workspace.close()


class FilesEnv(NumberedEnv):
    """Has as many items as the file `num_items` says."""

    name = "files"

    async def setup(self) -> None:
        self.workspaces = LocalWorkspaces(cache=self.folder / "cache", warm=0)
        self.base = await open_base(self.workspaces, self.folder)

    async def close(self) -> None:
        await self.workspaces.close()

    async def get_next_item(self) -> dict[str, int] | None:
        is_over = self.next_number == int((self.folder / "num_items").read_text())
        return None if is_over else self.take_number()

    def start_conversation(self, item: Mapping[str, int]) -> FilesConversation:
        return FilesConversation(item["number"], self.base)


async def serve_files(folder: Path) -> None:
    vars(base)["AutoTokenizer"] = CharTokenizers
    FilesEnv.folder = folder
    urls = json.loads((folder / "urls.json").read_text())
    settings: dict[str, Any] = {"max_batches_offpolicy": 0, "steps_per_eval": 0}
    config = MultiTurnEnvConfig(
        turn_journal=str(folder / "turns.sqlite"),
        group_size=GROUP_SIZE,
        max_num_workers=2,
        max_turns=NUM_TURNS,
        total_steps=1_000_000,
        end_with_trainer=False,
        use_wandb=False,
        tokenizer_name="characters",
        ensure_scores_are_not_same=False,
        include_messages=True,
        rollout_server_url=urls["service"],
        **settings,
    )
    server = APIServerConfig(model_name="m", base_url=urls["engine"], server_type="vllm", timeout=5)
    await FilesEnv(config, server).env_manager()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    os.chdir(sys.argv[1])
    asyncio.run(serve_files(Path(sys.argv[1])))
