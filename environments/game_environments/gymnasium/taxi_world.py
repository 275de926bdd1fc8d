"""The town of gymnasium's Taxi: where things are, what a move does, the shortest way.

+ - - - - +        rows and columns count from 0, from the top and from the left;
| R : | …          `|` is a wall, `:` is none; a passenger waits at one of four places
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import Any, NamedTuple

from environments.game_environments.gymnasium.package import load_gymnasium

__all__ = ["ACTIONS", "DROP_OFF", "PICK_UP", "PLACES", "TaxiWorld", "Traffic", "taxi_world"]

ACTIONS = ("south", "north", "east", "west", "pick up", "drop off")
"""By their number."""
PICK_UP, DROP_OFF = 4, 5
PLACES = ("Red", "Green", "Yellow", "Blue")
IN_TAXI = len(PLACES)
NAMES = ("Taxi-v4", "Taxi-v3")
"""The game by its name in newer and in older releases; the rules are the same."""


class Traffic(NamedTuple):
    """A state, decoded."""

    row: int
    column: int
    passenger: int
    """Index in `PLACES`, or 4 in the taxi."""
    destination: int
    """Index in `PLACES`."""

    @property
    def is_aboard(self) -> bool:
        """Whether the passenger is in the taxi."""
        return self.passenger == IN_TAXI


class Step(NamedTuple):
    """What an action leads to."""

    state: int
    is_done: bool
    """Whether the passenger is where they want to be."""


class TaxiWorld:
    """The rules, read from gymnasium; nothing here changes.

    Args:
        env: the game, unwrapped.
    """

    def __init__(self, env: Any) -> None:
        self._env = env
        self.map = [b"".join(row).decode() for row in env.desc]
        self.places = [(int(row), int(column)) for row, column in env.locs]

    def start(self, seed: int) -> int:
        """Return the first state of a game."""
        state, _ = self._env.reset(seed=seed)
        return int(state)

    def decode(self, state: int) -> Traffic:
        """Return where taxi and passenger are."""
        return Traffic(*(int(part) for part in self._env.decode(state)))

    def legal(self, state: int) -> list[int]:
        """Return the actions that change something."""
        return [number for number, may in enumerate(self._env.action_mask(state)) if may]

    def step(self, state: int, action: int) -> Step:
        """Return what an action leads to."""
        [(_, after, _, is_done)] = self._env.P[state][action]
        return Step(int(after), bool(is_done))

    def shortest_way(self, state: int) -> list[int]:
        """Return a shortest list of actions that brings the passenger to their destination."""
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
        """Return the map with `T` where the taxi is."""
        traffic = self.decode(state)
        rows = list(self.map)
        row, at = traffic.row + 1, 2 * traffic.column + 1
        rows[row] = f"{rows[row][:at]}T{rows[row][at + 1 :]}"
        return "\n".join(rows)

    def describe(self, state: int) -> str:
        """Return where taxi, passenger and destination are, in words."""
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
    """Return the town, built once.

    Raises:
        MissingExtraError: gymnasium is not installed.
    """
    gymnasium = load_gymnasium()
    name = next(name for name in NAMES if name in gymnasium.registry)
    return TaxiWorld(gymnasium.make(name).unwrapped)
