"""Taxi: bring a passenger to their destination on a grid of five by five cells.

    seed -> map and places -> [number of an action -> new map] x N -> delivered, or an illegal one

A game scores 1 if the passenger was delivered, 0 if picked up, else -1. An illegal or invalid
action ends it. Needs gymnasium, no data:

    python environments/game_environments/gymnasium/gym_taxi.py process --env.total_steps 4 \
        --env.tokenizer_name NAME --openai.model_name NAME
"""

from __future__ import annotations

import asyncio
import statistics
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, cast

from pydantic import Field

from atroposlib.envs.conversation import ChatMessage, Reply, Turn
from atroposlib.envs.multi_turn_env import Rollout
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.games import (
    Game,
    GameEnv,
    GameEnvConfig,
    load_gymnasium,
    opening_messages,
)

__all__ = ["DROP_OFF", "PICK_UP", "PLACES", "GymTaxiEnv", "TaxiRide", "read_action", "taxi_world"]

ACTIONS = ("south", "north", "east", "west", "pick up", "drop off")
"""Names of the actions, by number."""
PICK_UP, DROP_OFF = 4, 5
PLACES = ("Red", "Green", "Yellow", "Blue")
IN_TAXI = len(PLACES)
NAMES = ("Taxi-v4", "Taxi-v3")
"""Names of the game in newer and in older releases; the rules are the same."""


class Traffic(NamedTuple):
    """A decoded state."""

    row: int
    column: int
    passenger: int
    """Index in `PLACES`, or 4 in the taxi."""
    destination: int
    """Index in `PLACES`."""

    @property
    def is_aboard(self) -> bool:
        return self.passenger == IN_TAXI


class Step(NamedTuple):
    """Result of an action."""

    state: int
    is_done: bool
    """Whether the passenger was delivered."""


class TaxiWorld:
    """The rules, read from the unwrapped gymnasium environment; immutable."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self.map = [b"".join(row).decode() for row in env.desc]
        self.places = [(int(row), int(column)) for row, column in env.locs]

    def start(self, seed: int) -> int:
        state, _ = self._env.reset(seed=seed)
        return int(state)

    def decode(self, state: int) -> Traffic:
        return Traffic(*(int(part) for part in self._env.decode(state)))

    def legal(self, state: int) -> list[int]:
        return [number for number, may in enumerate(self._env.action_mask(state)) if may]

    def step(self, state: int, action: int) -> Step:
        [(_, after, _, is_done)] = self._env.P[state][action]
        return Step(int(after), bool(is_done))

    def shortest_way(self, state: int) -> list[int]:
        """Return a shortest sequence of actions that delivers the passenger."""
        ways: dict[int, list[int]] = {state: []}
        queue = deque([state])
        while queue:
            here = queue.popleft()
            for action in self.legal(here):
                after, is_done = self.step(here, action)
                if is_done:
                    return [*ways[here], action]
                if after not in ways:
                    ways[after] = [*ways[here], action]
                    queue.append(after)
        raise ValueError(f"no way leads from state {state} to the destination")

    def draw(self, state: int) -> str:
        """Return the map, with `T` at the position of the taxi."""
        traffic = self.decode(state)
        rows = list(self.map)
        row, at = traffic.row + 1, 2 * traffic.column + 1
        rows[row] = f"{rows[row][:at]}T{rows[row][at + 1 :]}"
        return "\n".join(rows)

    def describe(self, state: int) -> str:
        """Return the positions of taxi, passenger and destination, as text."""
        traffic = self.decode(state)
        passenger = "in the taxi" if traffic.is_aboard else f"at {self._named(traffic.passenger)}"
        return (
            f"The taxi is at row {traffic.row}, column {traffic.column}. The passenger is "
            f"{passenger} and wants to go to {self._named(traffic.destination)}."
        )

    def _named(self, place: int) -> str:
        row, column = self.places[place]
        return f"{PLACES[place]} (row {row}, column {column})"


@lru_cache(maxsize=1)
def taxi_world() -> TaxiWorld:
    """Return the world; cached.

    Raises:
        MissingExtraError: gymnasium is not installed.
    """
    gymnasium = load_gymnasium()
    name = next(name for name in NAMES if name in gymnasium.registry)
    return TaxiWorld(gymnasium.make(name).unwrapped)


CARD = EnvironmentCard(
    task="drive a taxi to a passenger and on to the destination",
    turns="up to 40",
    reward="delivered 1, picked up 0, else -1; an illegal action ends the game",
    data="made on the spot",
    needs="`pip install '.[examples]'`",
    command="process --env.total_steps 4",
)

NOT_PICKED_UP = -1.0
DELIVERED = 1.0
RULES = """You drive a taxi. Drive to the passenger, pick them up, drive to their destination and \
drop them off.
Rows count from 0 at the top, columns from 0 at the left. In the map, T is the taxi; R, G, Y and B \
are the places Red, Green, Yellow and Blue; | is a wall and : is an open way.
Hint: bring the taxi to the row and the column of the place you need; walls can make a detour \
through another row necessary.
Each turn, end your answer with the number of one available action; any other number ends the \
ride."""
STATE = "```\n{map}\n```\n{description}\nAvailable actions: {actions}"


def read_action(answer: str) -> int | None:
    """Return the action given by the last character; None if it is not an action's number."""
    last = answer.strip()[-1:]
    return int(last) if last.isascii() and last.isdigit() and int(last) < len(ACTIONS) else None


class GymTaxiEnvConfig(GameEnvConfig):
    """Settings of a ride."""

    max_turns: int = Field(
        40, ge=1, description="Maximum number of actions; the longest shortest way has 18."
    )
    max_turn_tokens: int | None = Field(256, ge=1, description="Maximum tokens of one turn.")
    thinking_active: bool = Field(
        False, description="Whether the policy is asked to think before each action."
    )


class TaxiRide(Game):
    """One game as a conversation."""

    def __init__(self, world: TaxiWorld, *, seed: int, thinking_active: bool) -> None:
        self.world = world
        self.world_state = world.start(seed)
        self.thinking_active = thinking_active
        self.was_picked_up = False
        self.unfinished_reward = NOT_PICKED_UP

    def opening(self) -> list[ChatMessage]:
        return opening_messages(f"{RULES}\n\n{self._shown()}", thinking_active=self.thinking_active)

    async def reply(self, turn: Turn) -> Reply:
        """Apply the action; the turn that ends the game has its whole reward."""
        action = read_action(turn.answer)
        if action is None or action not in self.world.legal(self.world_state):
            return Reply(reward=self.unfinished_reward, is_done=True)
        self.world_state, self.is_won = self.world.step(self.world_state, action)
        if self.is_won:
            return Reply(reward=DELIVERED, is_done=True)
        if self.world.decode(self.world_state).is_aboard:
            self.was_picked_up = True
            self.unfinished_reward = 0.0
        return Reply(self._shown())

    def _shown(self) -> str:
        actions = [f"{number} {ACTIONS[number]}" for number in self.world.legal(self.world_state)]
        return STATE.format(
            map=self.world.draw(self.world_state),
            description=self.world.describe(self.world_state),
            actions=", ".join(actions),
        )


class GymTaxiEnv(GameEnv):
    """Rides of a taxi; an item is the seed of the first state."""

    name = "gym_taxi"
    env_config_cls = GymTaxiEnvConfig
    config: GymTaxiEnvConfig
    default_model = "NousResearch/DeepHermes-3-Llama-3-8B-Preview"
    default_settings: ClassVar[dict[str, Any]] = {"group_size": 32, "max_token_length": 8192}

    async def setup(self) -> None:
        self.world = await asyncio.to_thread(taxi_world)

    def start_conversation(self, item: dict[str, int]) -> TaxiRide:
        thinking_active = self.config.thinking_active
        return TaxiRide(self.world, seed=item["seed"], thinking_active=thinking_active)

    def metrics_of(self, rollouts: Sequence[Rollout], area: str) -> dict[str, float]:
        metrics = super().metrics_of(rollouts, area)
        if rollouts:
            rides = [cast(TaxiRide, rollout.conversation) for rollout in rollouts]
            metrics[f"{area}/percent_correct"] = statistics.fmean(ride.is_won for ride in rides)
            metrics[f"{area}/percent_picked_up_passenger"] = statistics.fmean(
                ride.was_picked_up for ride in rides
            )
        return metrics

    def check_gold_answer(self, item: dict[str, int]) -> list[str]:
        return [str(action) for action in self.world.shortest_way(self.world.start(item["seed"]))]


if __name__ == "__main__":
    GymTaxiEnv.cli()
