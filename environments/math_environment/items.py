"""The four kinds of items, and the groups that items of the backlog refer to."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from atroposlib.envs.single_turn import Trajectory

__all__ = ["KeptGroup", "KeptGroups", "Kind", "MathItem"]

Kind = Literal["normal", "rlaif", "judge", "selfcorrect"]
MOST_KEPT = 128


class MathItem(NamedTuple):
    """Something to roll out; small, since the backlog may hold many."""

    problem: str
    answer: str
    r"""The gold answer inside `\boxed{}`."""
    kind: Kind = "normal"
    solutions: tuple[str, ...] = ()
    """What is judged, without thinking: one for `judge`, two for `rlaif`."""
    is_right: bool = False
    """Of `judge`: whether the solution is."""
    kept: int = -1
    """Of `rlaif` and `selfcorrect`: where their trajectories are."""


class KeptGroup(NamedTuple):
    """Trajectories that were sampled and wait for their group."""

    messages: Sequence[Mapping[str, Any]]
    trajectories: Sequence[Trajectory]
    scores: Sequence[float]
    """Empty where they are still to be judged."""


class KeptGroups:
    """Trajectories that items of the backlog name by a number.

    Args:
        most: so many are held; the oldest is forgotten first, and its item then gives no group.
    """

    def __init__(self, most: int = MOST_KEPT) -> None:
        self._groups: OrderedDict[int, KeptGroup] = OrderedDict()
        self._most = most
        self._next = 0

    def put(self, group: KeptGroup) -> int:
        """Keep a group; returns its number."""
        self._groups[self._next] = group
        self._next += 1
        if len(self._groups) > self._most:
            self._groups.popitem(last=False)
        return self._next - 1

    def take(self, number: int) -> KeptGroup | None:
        """Hand a group out, once; None when it is not here."""
        return self._groups.pop(number, None)
