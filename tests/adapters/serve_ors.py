"""A server of openreward's SDK with small environments, for tests: `python -m ... PORT`.

`sums` has a terminal tool, `games` ends by a tool, `slow` takes seconds to start a session. Some
calls break the environment on purpose. Routes under /test look into the server.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import uvicorn
from openreward.environments import Environment, JSONObject, Server, TextBlock, ToolOutput, tool
from openreward.environments.environment import terminal
from openreward.environments.types import ImageBlock, Message, Split
from pydantic import BaseModel

SIZES = {"train": 5, "test": 2}


class AddParams(BaseModel, extra="forbid"):
    a: int
    b: int


class AnswerParams(BaseModel, extra="forbid"):
    answer: str


def output(text: str, **settings: Any) -> ToolOutput:
    return ToolOutput(blocks=[TextBlock(text=text)], **settings)


class Base(Environment):
    @classmethod
    def list_tasks(cls, split: str) -> list[JSONObject]:
        return [{"a": i, "b": 10 * i, "split": split} for i in range(SIZES[split])]

    @tool
    async def add(self, params: AddParams) -> ToolOutput:
        """Add two numbers."""
        total = params.a + params.b
        metadata = {"total": total, "truncated": True}
        return output(str(total), reward=0.125, metadata=metadata)


class Sums(Base):
    @classmethod
    def list_splits(cls) -> list[Any]:
        return [Split(name="train", type="train"), Split(name="test", type="test")]

    def get_prompt(self) -> Any:
        task = self.task_spec
        return [TextBlock(text=f"What is {task['a']} + {task['b']}? ({task['split']})")]

    @terminal
    @tool
    async def answer(self, params: AnswerParams) -> ToolOutput:
        """Answer the question."""
        right = str(self.task_spec["a"] + self.task_spec["b"])
        return output("graded", reward=float(params.answer.strip() == right), finished=True)


class Games(Base):
    @classmethod
    def list_splits(cls) -> list[Any]:
        return ["train"]

    def get_messages(self) -> Any:
        shown = [TextBlock(text="look:"), ImageBlock(data="", mimeType="image/png")]
        return [
            Message(role="system", blocks=[TextBlock(text="You play.")]),
            Message(role="user", blocks=shown),
        ]

    @tool
    async def answer(self, params: AnswerParams) -> ToolOutput:
        """Answer, or break the environment."""
        if params.answer == "raise":
            raise KeyError("unlucky")
        if params.answer == "hang":
            await asyncio.sleep(12)
        if params.answer == "wait":
            await asyncio.sleep(2)
            return output("waited")
        if params.answer == "none":
            return output("over", finished=True)
        return output("over", reward=0.5, finished=True)


class Slow(Sums):
    num_starting = 0
    num_created = 0

    def __init__(self, **settings: Any) -> None:
        Slow.num_starting += 1
        time.sleep(1.5)
        super().__init__(**settings)
        Slow.num_starting -= 1
        Slow.num_created += 1


def main() -> None:
    server = Server([Sums, Games, Slow])
    for (
        middleware
    ) in server.app.user_middleware:  # one sends unknown paths to the first environment
        if "root_paths" in middleware.kwargs:
            middleware.kwargs["root_paths"].add("test")

    @server.app.get("/test/sessions")
    def count_sessions() -> int:
        return len(server._active_envs)

    @server.app.get("/test/starting")
    def count_starting() -> int:
        return Slow.num_starting

    @server.app.get("/test/created")
    def count_created() -> int:
        return Slow.num_created

    @server.app.post("/test/later")
    def pass_time(seconds: float) -> None:
        """Make every ping look older."""
        for sid in server._last_ping:
            server._last_ping[sid] -= seconds

    @server.app.get("/test/pings")
    def last_pings() -> list[float]:
        return [time.monotonic() - at for at in server._last_ping.values()]

    uvicorn.run(server.app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")


if __name__ == "__main__":
    main()
