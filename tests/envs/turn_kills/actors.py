"""The processes of a run that is killed: an environment, its engine and its tool server.

Usage: python -m tests.envs.turn_kills.actors engine|tool|env FOLDER

A walk has ten turns. In each, the policy writes a digit, and a tool with state answers it. Both are
functions of the walk's random tag, so `expected_walk` knows what an undisturbed walk looks like.
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
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import aiohttp
from aiohttp import web

from atroposlib.envs import base
from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.conversation import ChatMessage, Conversation, Reply, Turn
from atroposlib.envs.multi_turn_env import MultiTurnEnv, MultiTurnEnvConfig
from tests.fakes import CharTokenizer, ScriptedEngine

__all__ = [
    "GROUP_SIZE", "MAX_GROUPS", "NUM_TURNS", "CharTokenizers", "ExpectedWalk", "NumberedEnv",
    "Ports", "expected_walk",
]  # fmt: skip

NUM_TURNS = 10
GROUP_SIZE = 4
MAX_GROUPS = 3
"""Groups that are rolled out at the same time."""
ENGINE_DELAY_S = 0.03
OPENING = re.compile(r"Walk (\d+) ([0-9a-f]{8})")


class Ports(NamedTuple):
    service: int
    engine: int
    tool: int

    @classmethod
    def read(cls, folder: Path) -> Ports:
        return cls(*json.loads((folder / "ports.json").read_text()))


class ExpectedWalk(NamedTuple):
    """A walk that nothing disturbs."""

    messages: list[ChatMessage]
    score: float


def digit_of(tag: str, turn: int) -> int:
    """Return what the policy writes."""
    return hashlib.blake2b(f"digit {tag} {turn}".encode(), digest_size=2).digest()[0] % 10


def value_of(tag: str, turn: int, digit: int) -> int:
    """Return what the tool answers."""
    return hashlib.blake2b(f"value {tag} {turn} {digit}".encode(), digest_size=2).digest()[0] % 10


def opening_of(number: int, tag: str) -> list[ChatMessage]:
    return [{"role": "user", "content": f"Walk {number} {tag}: write a digit."}]


def answer_of(value: int, num_calls: int) -> str:
    return f"{value} at call {num_calls}"


def expected_walk(number: int, tag: str) -> ExpectedWalk:
    messages = opening_of(number, tag)
    total = 0
    for turn in range(NUM_TURNS):
        digit = digit_of(tag, turn)
        total += value_of(tag, turn, digit)
        messages.append({"role": "assistant", "content": str(digit)})
        if turn + 1 < NUM_TURNS:
            content = answer_of(value_of(tag, turn, digit), turn + 1)
            messages.append({"role": "user", "content": content})
    return ExpectedWalk(messages, total / 100)


class CountingEngine(ScriptedEngine):
    """Writes the digits, and records each completion that it samples."""

    def __init__(self, folder: Path) -> None:
        super().__init__(self._digit, delay_s=ENGINE_DELAY_S)
        self._log = (folder / "sampled.jsonl").open("a", buffering=1)

    def _digit(self, prompt: str) -> str:
        found = OPENING.search(prompt)
        if found is None:  # the probe of the environment
            return "ok"
        number, tag, turn = int(found[1]), found[2], prompt.count(" at call ")
        record = {"number": number, "tag": tag, "turn": turn, "at": time.time()}
        self._log.write(json.dumps(record) + "\n")
        self.requests.clear()
        return str(digit_of(tag, turn))


class ToolServer:
    """Counts the calls of each walk; a call with a known key is answered again, not counted."""

    def __init__(self, folder: Path) -> None:
        path = folder / "calls.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        self._answers: dict[str, str] = {}
        self._num_calls: dict[str, int] = {}
        for record in map(json.loads, lines):
            self._answers[record["key"]] = record["answer"]
            self._num_calls[record["tag"]] = record["calls"]
        self._log = path.open("a", buffering=1)
        self._repeated = (folder / "repeated_calls").open("a", buffering=1)

    async def answer(self, request: web.Request) -> web.Response:
        key, call = request.headers["Idempotency-Key"], await request.json()
        if key in self._answers:
            self._repeated.write(f"{key}\n")
            return web.json_response({"answer": self._answers[key]})
        tag = call["tag"]
        num_calls = self._num_calls[tag] = self._num_calls.get(tag, 0) + 1
        answer = answer_of(value_of(tag, call["turn"], call["digit"]), num_calls)
        record = {"key": key, "tag": tag, "calls": num_calls, "answer": answer}
        self._log.write(json.dumps(record) + "\n")
        self._answers[key] = answer
        return web.json_response({"answer": answer})


class Walk(Conversation):
    """Ten digits, each answered by the tool; the values add up to the score."""

    unfinished_reward = -100.0

    def __init__(self, number: int, tool_url: str, session: aiohttp.ClientSession) -> None:
        self.number = number
        self.tag = secrets.token_hex(4)
        self._tool_url = tool_url
        self._session = session

    def opening(self) -> Sequence[ChatMessage]:
        return opening_of(self.number, self.tag)

    async def reply(self, turn: Turn) -> Reply:
        call = {"tag": self.tag, "turn": turn.index, "digit": int(turn.text)}
        answer = await self._call_tool(call, turn.key)
        is_done = turn.index + 1 == NUM_TURNS
        return Reply("" if is_done else answer, reward=int(answer[0]) / 100, is_done=is_done)

    def state(self) -> dict[str, str]:
        return {"tag": self.tag}

    def restore(self, state: Mapping[str, str]) -> None:
        self.tag = state["tag"]

    async def _call_tool(self, call: dict[str, Any], key: str) -> str:
        headers = {"Idempotency-Key": key}
        while True:
            try:
                async with self._session.post(self._tool_url, json=call, headers=headers) as done:
                    return str((await done.json())["answer"])
            except aiohttp.ClientError:
                await asyncio.sleep(0.05)  # the tool server is down


class NumberedEnv(MultiTurnEnv):
    """Numbers its items across restarts, in a file of `folder`."""

    folder: ClassVar[Path]
    status_interval_s = 0.2
    retry_interval_s = 0.1
    empty_rollout_s = 0.0

    @property
    def next_number(self) -> int:
        path = self.folder / "next_item"
        return int(path.read_text()) if path.exists() else 0

    def take_number(self) -> dict[str, int]:
        number = self.next_number
        following = self.folder / "next_item.new"
        following.write_text(str(number + 1))
        following.replace(self.folder / "next_item")
        return {"number": number}


class WalkEnv(NumberedEnv):
    """Has items until the file `stop` exists."""

    name = "walks"

    async def setup(self) -> None:
        self.session = aiohttp.ClientSession()

    async def close(self) -> None:
        await self.session.close()

    async def get_next_item(self) -> dict[str, int] | None:
        return None if (self.folder / "stop").exists() else self.take_number()

    def start_conversation(self, item: Mapping[str, int]) -> Walk:
        url = f"http://127.0.0.1:{Ports.read(self.folder).tool}/call"
        return Walk(item["number"], url, self.session)


class CharTokenizers:
    """Stands in for `AutoTokenizer`."""

    @staticmethod
    def from_pretrained(name: str) -> CharTokenizer:
        return CharTokenizer()


async def serve_engine(folder: Path) -> None:
    await CountingEngine(folder).start(Ports.read(folder).engine)
    await asyncio.Event().wait()


async def serve_tool(folder: Path) -> None:
    app = web.Application()
    app.router.add_post("/call", ToolServer(folder).answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", Ports.read(folder).tool).start()
    await asyncio.Event().wait()


async def serve_walks(folder: Path) -> None:
    vars(base)["AutoTokenizer"] = CharTokenizers
    WalkEnv.folder = folder
    ports = Ports.read(folder)
    config = MultiTurnEnvConfig(
        turn_journal=str(folder / "turns.sqlite"),
        group_size=GROUP_SIZE,
        max_num_workers=MAX_GROUPS,
        max_turns=NUM_TURNS,
        max_batches_offpolicy=0,
        steps_per_eval=0,
        total_steps=1_000_000,
        end_with_trainer=False,
        use_wandb=False,
        tokenizer_name="characters",
        ensure_scores_are_not_same=False,
        include_messages=True,
        rollout_server_url=f"http://127.0.0.1:{ports.service}",
    )
    server = APIServerConfig(
        model_name="m",
        base_url=f"http://127.0.0.1:{ports.engine}/v1",
        server_type="vllm",
        timeout=5,
    )
    await WalkEnv(config, server).env_manager()


ROLES = {"engine": serve_engine, "tool": serve_tool, "env": serve_walks}

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    os.chdir(sys.argv[2])
    asyncio.run(ROLES[sys.argv[1]](Path(sys.argv[2])))
