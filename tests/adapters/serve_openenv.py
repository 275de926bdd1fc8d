"""A server of openenv with small environments, each under a path, for tests: `python -m ... PORT`.

`guess` asks for a number, `sums` has MCP tools, `tasks` is `guess` with splits, `lonely` allows one
session, `newer` speaks another version of the protocol, `blank` has actions without fields, and
`moves` takes a direction and a speed. Some guesses break the environment on purpose.
"""

from __future__ import annotations

import asyncio
import enum
import sys
import time
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastmcp import FastMCP
from openenv.core.env_server.http_server import HTTPEnvServer
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction
from openenv.core.env_server.types import Action, Observation, State

RAISES, HANGS, NO_REWARD, INFINITE = 13, 99, 77, 66


class GuessAction(Action):
    guess: int


class GuessObservation(Observation):
    message: str


class GuessEnv(Environment[GuessAction, GuessObservation, State]):
    """The number is the seed modulo 10; with a task, its index."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    number = -1

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Any:
        self.number = (seed or 0) % 10
        return GuessObservation(message=f"guess a number, seed {seed}")

    def step(self, action: GuessAction, timeout_s: float | None = None, **kwargs: Any) -> Any:
        if action.guess == RAISES:
            raise KeyError("unlucky")
        if action.guess == HANGS:
            time.sleep(12)
        if action.guess == NO_REWARD:
            return GuessObservation(message="over", done=True)
        if action.guess == INFINITE:
            return GuessObservation(message="over", done=True, reward=float("inf"))
        is_right = action.guess == self.number
        distance = abs(action.guess - self.number)
        return GuessObservation(
            message="right" if is_right else "try again",
            done=is_right,
            reward=1.0 if is_right else -0.25,
            metadata={"distance": distance},
        )

    @property
    def state(self) -> State:
        return State()


class TaskEnv(GuessEnv):
    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        split: str = "",
        index: int = 0,
        **kwargs: Any,
    ) -> Any:
        self.number = index
        return GuessObservation(message=f"task {split} {index}")

    def list_splits(self) -> list[str]:
        return ["train", "test"]

    def num_tasks(self, split: str) -> int:
        return {"train": 5, "test": 2}[split]


class SumEnv(MCPEnvironment):
    """The numbers follow from the seed; `submit` ends the episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        mcp = FastMCP("sums")
        self.numbers = (0, 0)
        self.answer: int | None = None

        @mcp.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        @mcp.tool
        def fail(text: str) -> str:
            """Fail."""
            raise ValueError(text)

        @mcp.tool
        async def wait() -> str:
            """Take two seconds."""
            await asyncio.sleep(2)
            return "waited"

        @mcp.tool
        def submit(answer: str) -> str:
            """Submit the sum."""
            self.answer = int(answer)
            return "submitted"

        super().__init__(mcp)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Any:
        seed = seed or 0
        self.numbers = (seed % 10, seed // 10 % 10)
        question = f"What is {self.numbers[0]} + {self.numbers[1]}?"
        return GuessObservation(message=question)

    async def step_async(
        self, action: Action, timeout_s: float | None = None, **kwargs: Any
    ) -> Any:
        observation = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        observation.reward = 0.1 if isinstance(action, CallToolAction) else None
        if self.answer is not None:
            observation.done = True
            observation.reward = float(self.answer == sum(self.numbers))
        return observation

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Any:
        raise ValueError(f"unknown action {action!r}")

    @property
    def state(self) -> State:
        return State()


class Direction(enum.Enum):
    LEFT = "left"
    RIGHT = "right"


class MoveAction(Action):
    direction: Direction
    speed: int


class MoveEnv(Environment[MoveAction, GuessObservation, State]):
    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Any:
        return GuessObservation(message="move")

    def step(self, action: MoveAction, timeout_s: float | None = None, **kwargs: Any) -> Any:
        return GuessObservation(message=f"moved {action.direction.value}", reward=1.0, done=True)

    @property
    def state(self) -> State:
        return State()


ENVIRONMENTS: dict[str, tuple[Any, Any, Any, int]] = {
    "guess": (GuessEnv, GuessAction, GuessObservation, 4),
    "lonely": (GuessEnv, GuessAction, GuessObservation, 1),
    "tasks": (TaskEnv, GuessAction, GuessObservation, 8),
    "sums": (SumEnv, Action, Observation, 8),
    "newer": (GuessEnv, GuessAction, GuessObservation, 8),
    "blank": (GuessEnv, Action, Observation, 8),
    "moves": (MoveEnv, MoveAction, GuessObservation, 1),
}


def main() -> None:
    servers = []
    root = FastAPI()

    @root.get("/test/sessions")
    def count_sessions() -> int:
        return sum(server.active_sessions for server in servers)

    for name, (env, action, observation, most) in ENVIRONMENTS.items():
        version = "2.0.0" if name == "newer" else "1.0.0"
        app = FastAPI(title="OpenEnv Environment HTTP API", version=version)
        server = HTTPEnvServer(env, action, observation, max_concurrent_envs=most, env_name=name)
        server.register_routes(app)
        servers.append(server)
        root.mount(f"/{name}", app)
    uvicorn.run(root, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")


if __name__ == "__main__":
    main()
