"""Selection of trajectories: SFT examples, preference pairs, prompt lengths; pure.

Strategies for pairs:

    best-random     the n best, each with a random one of the n worst that is low enough
    best-worst      best with worst, second best with second worst, ...
    all-pairs       every pair with a large enough difference of scores, the largest first
    one-per-group   the best with the worst, regardless of n

In every strategy a pair needs `rejected score < chosen score - min_score_diff`, strictly.

The prompt length is computed from masks and tokens, never from text. Trajectories that are dropped
are counted by reason. A `Chooser` argument makes random draws.
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
    "PairRule",
    "PreferencePair",
    "SelectionRule",
    "Span",
    "TrajectoryReader",
    "TruncationRule",
    "UsableTrajectory",
    "common_prefix_length",
    "end_of_reply",
    "line_break_ids",
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
    """Maximum number of examples per group."""
    allow_negative: bool = False
    """Whether scores of 0 and below are accepted."""
    min_score_diff: float = 0.0
    """Minimum difference to the lowest score of the group, exclusive; 0 disables the condition."""


class Selection(NamedTuple):
    """The trajectories selected from one group."""

    chosen: list[int]
    """Positions in the group, best first."""
    dropped: Mapping[str, int]
    """Numbers of other trajectories, by reason."""


def rank(scores: Sequence[float]) -> list[int]:
    """Return positions by score, highest first; equal scores keep their order."""
    return sorted(range(len(scores)), key=scores.__getitem__, reverse=True)


def select(
    scores: Sequence[float], rule: SelectionRule, *, eligible: Sequence[int] | None = None
) -> Selection:
    """Choose trajectories of a group.

    Args:
        scores: [G].
        rule: Conditions on the trajectories.
        eligible: Positions to choose from; None for all. The lowest score is always that of the
            whole group.
    """
    allowed = range(len(scores)) if eligible is None else set(eligible)
    ranked = [i for i in rank(scores) if i in allowed]
    positive = ranked if rule.allow_negative else [i for i in ranked if scores[i] > 0]
    apart = positive
    if rule.min_score_diff > 0:
        lowest = min(scores)
        apart = [i for i in positive if scores[i] - lowest > rule.min_score_diff]
    best = apart[: max(0, rule.num_best)]
    dropped = Counter(
        {
            BELOW_ZERO: len(ranked) - len(positive),
            TOO_CLOSE: len(positive) - len(apart),
            BEYOND_BEST: len(apart) - len(best),
        }
    )
    return Selection(best, +dropped)


NO_REJECTED = "no trajectory low enough to pair with"
BEYOND_PAIRS = "beyond the pairs of the group"


class Chooser(Protocol):
    """The method of `random.Random` that a strategy uses."""

    def randrange(self, stop: int, /) -> int: ...


class GroupChooser:
    """Draws that depend only on the seed and the place of a group, so that exports can resume."""

    def __init__(self, seed: int, where: str) -> None:
        self._name = f"{seed}:{where}"
        self._num_draws = 0

    def randrange(self, stop: int, /) -> int:
        self._num_draws += 1
        name = f"{self._name}:{self._num_draws}".encode()
        return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") % stop


class PairRule(NamedTuple):
    """The conditions on a preference pair."""

    strategy: str = "best-random"
    num_pairs: int = 3
    """Maximum number of pairs per group."""
    allow_negative: bool = False
    """Whether a chosen trajectory may score 0 or less."""
    min_score_diff: float = 0.5
    """Minimum difference between the chosen and the rejected score, exclusive."""


class PreferencePair(NamedTuple):
    """Positions of both sides in their group."""

    chosen: int
    rejected: int


class Pairing(NamedTuple):
    """The pairs of one group."""

    pairs: list[PreferencePair]
    dropped: Mapping[str, int]
    """Numbers of trajectories that are on no side of a pair, by reason."""


def pair_up(scores: Sequence[float], rule: PairRule, chooser: Chooser) -> Pairing:
    """Pair trajectories of a group.

    Args:
        scores: [G].
        rule: Conditions on the pairs.
        chooser: Draws the rejected side if the strategy is random.
    """
    order = rank(scores)
    best = order if rule.allow_negative else [i for i in order if scores[i] > 0]
    if rule.num_pairs <= 0:
        dropped = Counter({BELOW_ZERO: len(order) - len(best), BEYOND_PAIRS: len(best)})
        return Pairing([], +dropped)
    pairs = STRATEGIES[rule.strategy](scores, best, rule, chooser)
    unpaired = [i for i in order if not any(i in pair for pair in pairs)]
    unchosen = [i for i in unpaired if i in best]
    dropped = Counter({BELOW_ZERO: len(unpaired) - len(unchosen)})
    dropped[NO_REJECTED] = sum(not _is_low_enough(scores, i, order[-1], rule) for i in unchosen)
    dropped[BEYOND_PAIRS] = len(unchosen) - dropped[NO_REJECTED]
    return Pairing(pairs, +dropped)


def _is_low_enough(scores: Sequence[float], chosen: int, rejected: int, rule: PairRule) -> bool:
    return scores[rejected] < scores[chosen] - rule.min_score_diff


def _best_random(
    scores: Sequence[float], best: Sequence[int], rule: PairRule, chooser: Chooser
) -> list[PreferencePair]:
    """Draw for the lowest of the best first: its candidates suit all better ones too."""
    worst = sorted(range(len(scores)), key=scores.__getitem__)[: rule.num_pairs]
    pairs = []
    for chosen in reversed(best[: rule.num_pairs]):
        candidates = [i for i in worst if _is_low_enough(scores, chosen, i, rule)]
        if candidates:
            rejected = candidates[chooser.randrange(len(candidates))]
            worst.remove(rejected)
            pairs.append(PreferencePair(chosen, rejected))
    return pairs[::-1]


def _best_worst(
    scores: Sequence[float], best: Sequence[int], rule: PairRule, _: Chooser
) -> list[PreferencePair]:
    worst = rank(scores)[::-1]
    pairs = [PreferencePair(*sides) for sides in zip(best, worst, strict=False)]
    return [p for p in pairs if _is_low_enough(scores, *p, rule)][: rule.num_pairs]


def _all_pairs(
    scores: Sequence[float], best: Sequence[int], rule: PairRule, _: Chooser
) -> list[PreferencePair]:
    pairs = [
        PreferencePair(chosen, rejected)
        for chosen in best
        for rejected in range(len(scores))
        if _is_low_enough(scores, chosen, rejected, rule)
    ]
    pairs.sort(key=lambda pair: scores[pair.rejected] - scores[pair.chosen])
    return pairs[: rule.num_pairs]


STRATEGIES: Mapping[
    str, Callable[[Sequence[float], Sequence[int], PairRule, Chooser], list[PreferencePair]]
] = {
    "best-random": _best_random,
    "best-worst": _best_worst,
    "all-pairs": _all_pairs,
    "one-per-group": lambda scores, best, *rest: _best_worst(scores, best[:1], *rest),
}
"""Functions that make pairs, by the name of the strategy."""


class Span(NamedTuple):
    """A range of positions that are all trained, or all masked."""

    start: int
    end: int
    is_trained: bool


def prompt_lengths(group: ExportGroup) -> list[int | None]:
    """Return the number of prompt tokens of each trajectory.

    The first trained token ends the prompt. Without masks that separate prompt and completion, the
    prompt is the common prefix of all trajectories, except for the last token of the shortest one.
    A single trajectory without such a mask has no prompt.

    Returns:
        [G]; None for a trajectory without trained tokens in a group that has trained tokens.
    """
    if has_prompt_masks(group):
        return [_first_trained(mask) for mask in group.masks or ()]
    shared = common_prefix_length(group.tokens) if len(group.tokens) > 1 else 0
    shortest = min(map(len, group.tokens))
    return [min(shared, max(0, shortest - 1))] * len(group.tokens)


def has_prompt_masks(group: ExportGroup) -> bool:
    """Whether a mask of the group has both trained and masked tokens."""
    return any(0 < mask.count(IGNORE_INDEX) < len(mask) for mask in group.masks or ())


def common_prefix_length(rows: Sequence[Any]) -> int:
    """Return the length of the common prefix of token lists or texts."""
    return len(os.path.commonprefix(rows))  # noqa: RUF071 - of rows, not of paths


def pair_prompt_length(
    chosen: Sequence[int], rejected: Sequence[int], *, chosen_prompt: int, rejected_prompt: int
) -> int:
    """Return the number of prompt tokens of a pair: the length of its prompts' common prefix."""
    longest = min(chosen_prompt, rejected_prompt)
    return common_prefix_length([chosen[:longest], rejected[:longest]])


def trained_spans(mask: Sequence[int]) -> list[Span]:
    """Split a trajectory by its mask [L] into alternating trained and masked spans, in order."""
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


NOTHING_TRAINED = "every token is masked"
TRUNCATED = "truncated"
PLACEHOLDERS = "placeholder tokens of ATROPOS_ALLOW_DUMMY_MANAGED_SERVER"


class TruncationRule(NamedTuple):
    """The rule that recognizes truncated completions, and whether they are dropped."""

    end_ids: Collection[int] = ()
    """Special tokens that end a complete completion; empty if unknown."""
    drops: bool = False
    tail_ids: Collection[int] = ()
    """Tokens of the line break that a chat template may write after the end; see `end_of_reply`."""


UNKNOWN_ENDS = TruncationRule()
"""Treats no completion as truncated."""


def line_break_ids(tokenizer: Any) -> frozenset[int]:
    """Return the tokens of a line break."""
    return frozenset(tokenizer.encode("\n", add_special_tokens=False))


def end_of_reply(
    ids: Sequence[int], end_ids: Collection[int], tail_ids: Collection[int]
) -> int | None:
    """Return the index of the token that ends a reply; None if the reply was truncated.

    Groups of rendered chats, as of `tokenize_for_trainer`, may also train the line break that the
    template writes after the end token.

    Args:
        ids: [C] the trained tokens of the reply.
        end_ids: special tokens.
        tail_ids: tokens that may follow the end.
    """
    last = len(ids) - 1
    while last > 0 and ids[last] in tail_ids:
        last -= 1
    return last if last >= 0 and ids[last] in end_ids else None


class UsableTrajectory(NamedTuple):
    """A usable trajectory of a group."""

    tokens: list[int]
    mask: list[int] | None
    prompt_length: int
    messages: Any
    score: float
    position: int
    is_truncated: bool


class TrajectoryReader:
    """Reads the usable trajectories of a group."""

    def __init__(self, truncation: TruncationRule, *, needs_messages: bool) -> None:
        self._end_ids = frozenset(truncation.end_ids)
        self._tail_ids = frozenset(truncation.tail_ids)
        self._drops = truncation.drops
        self._needs_messages = needs_messages

    def read(self, group: ExportGroup) -> tuple[dict[int, UsableTrajectory], Counter[str]]:
        """Return usable trajectories by position, and the numbers of others by reason."""
        masks = group.masks if has_prompt_masks(group) else None
        sides: dict[int, UsableTrajectory] = {}
        dropped: Counter[str] = Counter()
        for i, prompt_length in enumerate(prompt_lengths(group)):
            messages = group.messages[i] if group.messages else None
            reason = self._why_not(prompt_length, messages)
            if has_placeholder_tokens(group.tokens[i]):
                reason = PLACEHOLDERS  # its messages may be made of them too
            mask = masks[i] if masks else None
            is_truncated = reason is None and self._is_truncated(group.tokens[i], mask)
            if is_truncated and self._drops:
                reason = TRUNCATED
            if reason is not None:
                dropped[reason] += 1
                continue
            sides[i] = UsableTrajectory(
                group.tokens[i],
                mask,
                prompt_length or 0,
                messages,
                group.scores[i],
                i,
                is_truncated,
            )
        return sides, dropped

    def _why_not(self, prompt_length: int | None, messages: Any) -> str | None:
        if self._needs_messages:
            return None if messages else "no messages"
        return NOTHING_TRAINED if prompt_length is None else None

    def _is_truncated(self, ids: list[int], mask: list[int] | None) -> bool:
        if not self._end_ids or not ids:
            return False
        last = len(ids) - 1
        while mask and last > 0 and mask[last] == IGNORE_INDEX:
            last -= 1
        return end_of_reply(ids[: last + 1], self._end_ids, self._tail_ids) is None
