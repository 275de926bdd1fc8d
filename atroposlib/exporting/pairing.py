"""Which trajectories of a group become preference pairs; pure, random draws included.

    best-random     the n best, each against a random one of the n worst that is low enough
    best-worst      best against worst, second best against second worst, ...
    all-pairs       every pair whose scores are far enough apart, the widest first
    one-per-group   the best against the worst, whatever n is

In every strategy a pair needs `rejected score < chosen score - min_score_diff`, strictly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from atroposlib.exporting.selection import BELOW_ZERO, rank

__all__ = ["STRATEGIES", "Chooser", "GroupChooser", "Pair", "PairRule", "Pairing", "pair_up"]

NO_REJECTED = "no trajectory low enough to pair with"
NO_PAIRS_ASKED = "beyond the pairs of the group"


class Chooser(Protocol):
    """The one method needed of `random.Random`."""

    def randrange(self, stop: int, /) -> int:
        """Return a whole number from 0 to `stop` - 1."""


class GroupChooser:
    """Draws for one group, the same whenever that group is seen: an export may be resumed.

    Args:
        seed: of the export.
        where: names the group.
    """

    def __init__(self, seed: int, where: str) -> None:
        self._name = f"{seed}:{where}"
        self._num_draws = 0

    def randrange(self, stop: int, /) -> int:
        """Return a whole number from 0 to `stop` - 1."""
        self._num_draws += 1
        name = f"{self._name}:{self._num_draws}".encode()
        return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") % stop


class PairRule(NamedTuple):
    """What a pair must satisfy."""

    strategy: str = "best-random"
    num_pairs: int = 3
    """The most that are made of one group."""
    allow_negative: bool = False
    """Whether a chosen trajectory may score 0 or less."""
    min_score_diff: float = 0.5
    """What the chosen score must exceed the rejected one by."""


class Pair(NamedTuple):
    """Positions of both sides in their group."""

    chosen: int
    rejected: int


class Pairing(NamedTuple):
    """The outcome for one group."""

    pairs: list[Pair]
    refused: dict[str, int]
    """Trajectories that could not be a chosen side, by reason."""


def pair_up(scores: Sequence[float], rule: PairRule, chooser: Chooser) -> Pairing:
    """Pair trajectories of a group.

    Args:
        scores: [G].
        rule: what pairs must satisfy.
        chooser: draws the rejected side where the strategy is random.
    """
    order = rank(scores)
    best = order if rule.allow_negative else [i for i in order if scores[i] > 0]
    refused = {BELOW_ZERO: len(order) - len(best)} if len(best) < len(order) else {}
    if rule.num_pairs <= 0:
        pairs: list[Pair] = []
        refused[NO_PAIRS_ASKED] = len(best)
    else:
        pairs = STRATEGIES[rule.strategy](scores, best, rule, chooser)
    unpaired = len(best) - len({pair.chosen for pair in pairs})
    reachable = sum(_is_low_enough(scores, i, order[-1], rule) for i in best)
    if rule.num_pairs > 0 and len(best) > reachable:
        refused[NO_REJECTED] = len(best) - reachable
        unpaired -= len(best) - reachable
    if rule.num_pairs > 0 and unpaired > 0:
        refused[NO_PAIRS_ASKED] = unpaired
    return Pairing(pairs, refused)


def _is_low_enough(scores: Sequence[float], chosen: int, rejected: int, rule: PairRule) -> bool:
    return scores[rejected] < scores[chosen] - rule.min_score_diff


def _best_random(
    scores: Sequence[float], best: Sequence[int], rule: PairRule, chooser: Chooser
) -> list[Pair]:
    """Draw for the lowest of the best first: what suits it suits all above it, too."""
    worst = sorted(range(len(scores)), key=scores.__getitem__)[: rule.num_pairs]
    pairs = []
    for chosen in reversed(best[: rule.num_pairs]):
        candidates = [i for i in worst if _is_low_enough(scores, chosen, i, rule)]
        if candidates:
            rejected = candidates[chooser.randrange(len(candidates))]
            worst.remove(rejected)
            pairs.append(Pair(chosen, rejected))
    return pairs[::-1]


def _best_worst(
    scores: Sequence[float], best: Sequence[int], rule: PairRule, _: Chooser
) -> list[Pair]:
    worst = rank(scores)[::-1]
    pairs = [Pair(*sides) for sides in zip(best, worst, strict=False)]
    return [p for p in pairs if _is_low_enough(scores, *p, rule)][: rule.num_pairs]


def _all_pairs(
    scores: Sequence[float], best: Sequence[int], rule: PairRule, _: Chooser
) -> list[Pair]:
    pairs = [
        Pair(chosen, rejected)
        for chosen in best
        for rejected in range(len(scores))
        if _is_low_enough(scores, chosen, rejected, rule)
    ]
    pairs.sort(key=lambda pair: scores[pair.rejected] - scores[pair.chosen])
    return pairs[: rule.num_pairs]


def _one_per_group(
    scores: Sequence[float], best: Sequence[int], rule: PairRule, chooser: Chooser
) -> list[Pair]:
    return _best_worst(scores, best[:1], rule, chooser)


STRATEGIES: Mapping[
    str, Callable[[Sequence[float], Sequence[int], PairRule, Chooser], list[Pair]]
] = {
    "best-random": _best_random,
    "best-worst": _best_worst,
    "all-pairs": _all_pairs,
    "one-per-group": _one_per_group,
}
"""How pairs are made, by the name of the strategy."""
