"""The choice of trajectories: SFT examples, preference pairs, prompt boundaries; pure.

Strategies for pairs:

    best-random     the n best, each against a random one of the n worst that is low enough
    best-worst      best against worst, second best against second worst, ...
    all-pairs       every pair whose scores are far enough apart, the widest first
    one-per-group   the best against the worst, whatever n is

In every strategy a pair needs `rejected score < chosen score - min_score_diff`, strictly.

The end of a prompt is found from masks and tokens, never from text. Trajectories that cannot be
used are counted by reason. Random draws are made by a `Chooser` that is passed in.
"""

from __future__ import annotations

import hashlib
import os.path
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from atroposlib.exporting.groups import ExportGroup
from atroposlib.scored_data import IGNORE_INDEX, has_placeholder_tokens

__all__ = [
    "STRATEGIES",
    "UNKNOWN_ENDS",
    "GroupChooser",
    "Pair",
    "PairRule",
    "SelectionRule",
    "Span",
    "TrajectoryReader",
    "TruncationRule",
    "common_prefix_length",
    "pair_prompt_length",
    "pair_up",
    "prompt_lengths",
    "select",
    "trained_spans",
]

BELOW_ZERO = "score not above 0"
TOO_CLOSE = "too close to the lowest score of the group"
BEYOND_BEST = "not among the best of the group"


class SelectionRule(NamedTuple):
    """The conditions on an SFT example."""

    num_best: int = 3
    """The most that are taken from one group."""
    allow_negative: bool = False
    """Whether scores of 0 and below pass."""
    min_score_diff: float = 0.0
    """Minimum difference to the lowest score of the group; 0 disables the condition."""


class Selection(NamedTuple):
    """The outcome for one group."""

    chosen: list[int]
    """Positions in the group, best first."""
    refused: dict[str, int]
    """Trajectories that were left out, by reason."""


def rank(scores: Sequence[float]) -> list[int]:
    """Return positions by score, highest first; equal scores keep their order."""
    return sorted(range(len(scores)), key=scores.__getitem__, reverse=True)


def select(
    scores: Sequence[float], rule: SelectionRule, *, eligible: Sequence[int] | None = None
) -> Selection:
    """Choose trajectories of a group.

    Args:
        scores: [G].
        rule: what they must satisfy.
        eligible: positions to choose from, in order; None for all. The lowest score is that of the
            whole group nevertheless.
    """
    chosen = rank(scores)
    if eligible is not None and len(eligible) < len(scores):
        allowed = set(eligible)
        chosen = [i for i in chosen if i in allowed]
    refused: dict[str, int] = {}

    def keep(kept: list[int], reason: str) -> list[int]:
        if len(kept) < len(chosen):
            refused[reason] = len(chosen) - len(kept)
        return kept

    if not rule.allow_negative:
        chosen = keep([i for i in chosen if scores[i] > 0], BELOW_ZERO)
    if rule.min_score_diff > 0:
        lowest = min(scores)
        chosen = keep([i for i in chosen if scores[i] - lowest > rule.min_score_diff], TOO_CLOSE)
    chosen = keep(chosen[: max(0, rule.num_best)], BEYOND_BEST)
    return Selection(chosen, refused)


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
    """The conditions on a preference pair."""

    strategy: str = "best-random"
    num_pairs: int = 3
    """The most that are made of one group."""
    allow_negative: bool = False
    """Whether a chosen trajectory may score 0 or less."""
    min_score_diff: float = 0.5
    """Minimum difference between the chosen and the rejected score; exclusive."""


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


STRATEGIES: Mapping[
    str, Callable[[Sequence[float], Sequence[int], PairRule, Chooser], list[Pair]]
] = {
    "best-random": _best_random,
    "best-worst": _best_worst,
    "all-pairs": _all_pairs,
    "one-per-group": lambda scores, best, *rest: _best_worst(scores, best[:1], *rest),
}
"""Functions that make pairs, by the name of the strategy."""


class Span(NamedTuple):
    """A stretch of tokens that are all trained on, or all not."""

    start: int
    end: int
    is_trained: bool


def prompt_lengths(group: ExportGroup) -> list[int | None]:
    """Return how many tokens the prompt of each trajectory has.

    The first trained token ends the prompt. When no mask of the group tells prompt from completion
    (masks are absent, or all or nothing is trained on), the tokens that all trajectories begin with
    are the prompt, short of the last token of the shortest one; a lone trajectory has none then.

    Returns:
        [G] tokens of the prompt; None for a trajectory of which nothing is trained on while others
        of its group are.
    """
    firsts = _prompt_ends(group)
    if firsts is None:
        shared = common_prefix_length(group.tokens) if len(group.tokens) > 1 else 0
        shortest = min(map(len, group.tokens))
        return [min(shared, max(0, shortest - 1))] * len(group.tokens)
    return firsts


def has_prompt_masks(group: ExportGroup) -> bool:
    """Whether some mask of the group has both trained and other tokens."""
    return any(0 < mask.count(IGNORE_INDEX) < len(mask) for mask in group.masks or ())


def _prompt_ends(group: ExportGroup) -> list[int | None] | None:
    """Return the first trained position of each trajectory; None when no mask tells any."""
    if not group.masks or not has_prompt_masks(group):
        return None
    return [_first_trained(mask) for mask in group.masks]


def common_prefix_length(rows: Sequence[Any]) -> int:
    """Return how many entries all rows begin with; rows are lists of tokens, or texts."""
    return len(os.path.commonprefix(rows))  # noqa: RUF071 - of rows, not of paths


def pair_prompt_length(
    chosen: Sequence[int], rejected: Sequence[int], *, chosen_prompt: int, rejected_prompt: int
) -> int:
    """Return the tokens that the prompt of a preference pair has.

    Both sides must have been asked the same: the prompt is what both prompts begin with.
    """
    longest = min(chosen_prompt, rejected_prompt)
    return common_prefix_length([chosen[:longest], rejected[:longest]])


def trained_spans(mask: Sequence[int]) -> list[Span]:
    """Cut a trajectory where training begins or ends, by its mask [L].

    Returns:
        Spans that cover the trajectory, in order, trained and not by turns.
    """
    spans: list[Span] = []
    start = 0
    for i in range(1, len(mask) + 1):
        if i == len(mask) or (mask[i] == IGNORE_INDEX) != (mask[start] == IGNORE_INDEX):
            spans.append(Span(start, i, mask[start] != IGNORE_INDEX))
            start = i
    return spans


def _first_trained(mask: list[int]) -> int | None:
    num_masked = mask.count(IGNORE_INDEX)
    if mask[:num_masked].count(IGNORE_INDEX) == num_masked:  # one prompt, one completion
        return num_masked if num_masked < len(mask) else None
    for i, value in enumerate(mask):
        if value != IGNORE_INDEX:
            return i
    return None


NOTHING_TRAINED = "nothing of it is trained on"
TRUNCATED = "cut before its end"
PLACEHOLDERS = "placeholder tokens of ATROPOS_ALLOW_DUMMY_MANAGED_SERVER"


class TruncationRule(NamedTuple):
    """The signs of a truncated completion, and whether it is dropped."""

    end_ids: Collection[int] = ()
    """Special tokens, one of which ends every whole completion; none when that is not known."""
    drops: bool = False


UNKNOWN_ENDS = TruncationRule()
"""Nothing is taken for truncated."""


class Trajectory(NamedTuple):
    """A trajectory that was picked."""

    tokens: list[int]
    mask: list[int] | None
    prompt_length: int
    messages: Any
    score: float
    position: int
    is_truncated: bool


class TrajectoryReader:
    """Reads trajectories of a group: prompts, chats, truncation; refuses unusable ones."""

    def __init__(self, truncation: TruncationRule, *, needs_messages: bool) -> None:
        self._end_ids = frozenset(truncation.end_ids)
        self._drops = truncation.drops
        self._needs_messages = needs_messages

    def read(self, group: ExportGroup) -> tuple[dict[int, Trajectory], dict[str, int]]:
        """Return usable trajectories by position, and how many are not, by reason."""
        masks = group.masks if has_prompt_masks(group) else None
        sides: dict[int, Trajectory] = {}
        refused: Counter[str] = Counter()
        for i, prompt_length in enumerate(prompt_lengths(group)):
            messages = group.messages[i] if group.messages else None
            reason = self._why_not(prompt_length, messages)
            if has_placeholder_tokens(group.tokens[i]):
                reason = PLACEHOLDERS  # its messages too may be made of them
            mask = masks[i] if masks else None
            is_cut = reason is None and self._is_cut(group.tokens[i], mask)
            if is_cut and self._drops:
                reason = TRUNCATED
            if reason is not None:
                refused[reason] += 1
                continue
            sides[i] = Trajectory(
                group.tokens[i], mask, prompt_length or 0, messages, group.scores[i], i, is_cut
            )
        return sides, dict(refused)

    def _why_not(self, prompt_length: int | None, messages: Any) -> str | None:
        if self._needs_messages:
            return None if messages else "no messages"
        return NOTHING_TRAINED if prompt_length is None else None

    def _is_cut(self, ids: list[int], mask: list[int] | None) -> bool:
        if not self._end_ids or not ids:
            return False
        last = len(ids) - 1
        while mask and last > 0 and mask[last] == IGNORE_INDEX:
            last -= 1
        return ids[last] not in self._end_ids
