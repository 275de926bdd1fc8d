"""Decide which groups go on to the trainer, and name the reason for each that does not.

Pure rules. Every reason is the name of a counter, `drops/<reason>` in the metrics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from atroposlib.errors import GroupError
from atroposlib.scored_data import IGNORE_INDEX, check_group

__all__ = [
    "Admission",
    "Vocabulary",
    "as_number",
    "check_lengths",
    "check_signal",
    "completion_lengths",
    "wrong_number",
]


class Admission(NamedTuple):
    """The answer to whether a group is used."""

    reason: str | None = None
    """Why it is dropped, as a counter name; None when it is used."""
    detail: str = ""
    """What is wrong with it, for the log."""

    @property
    def is_accepted(self) -> bool:
        """Whether the group is used."""
        return self.reason is None


ACCEPTED = Admission()

_REQUIRED = {"tokens": "a list of lists", "masks": "a list of lists", "scores": "a list of numbers"}


def check_signal(
    group: Any, *, group_size: int, scores_must_differ: bool, smallest_size: int | None = None
) -> Admission:
    """Check that a group is well-formed, of the right size, and carries a training signal.

    Args:
        group: what an environment returned as a group; may be anything.
        group_size: [G] trajectories expected; `group_overrides["group_size"]` goes before it.
        scores_must_differ: drop groups of two or more trajectories with one and the same score.
        smallest_size: fewest trajectories of a group that lost stragglers; None: none may.

    Returns:
        Accepted, or a drop for `malformed`, `wrong_size` or `scores_equal`.
    """
    if not isinstance(group, Mapping):
        return Admission("malformed", f"a group is a mapping, not a {type(group).__name__}")
    for name, wanted in _REQUIRED.items():
        value = group.get(name)
        if value is not None and not isinstance(value, list | tuple):
            return Admission("malformed", f"{name}: expected {wanted}, not {type(value).__name__}")
    overrides = group.get("group_overrides") or {}
    if not isinstance(overrides, Mapping):
        return Admission("malformed", f"group_overrides: expected a mapping, got {overrides!r}")
    expected = overrides.get("group_size", group_size)
    tokens = group.get("tokens")
    smallest = expected if smallest_size is None else min(smallest_size, expected)
    if tokens is not None and not smallest <= len(tokens) <= expected:
        return Admission("wrong_size", f"{len(tokens)} trajectories, expected {expected}")
    try:
        check_group(group)
    except GroupError as error:
        return Admission("malformed", str(error))
    except TypeError as error:
        return Admission("malformed", _wrong_number_of(group) or str(error))
    scores = group["scores"]
    if scores_must_differ and len(scores) > 1 and all(s == scores[0] for s in scores):
        return Admission("scores_equal", f"all {len(scores)} scores are {scores[0]}")
    return ACCEPTED


def wrong_number(path: str, values: Sequence[Any]) -> str | None:
    """Return the error of the first value that is not a number, or None.

    For example `scores[0] is 'right'; expected a number`.

    NumPy's numbers and tensors of one element are numbers; texts are not, whatever they spell.
    """
    for i, value in enumerate(values):
        try:
            math.isfinite(value)
        except (TypeError, ValueError):
            return f"{path}[{i}] is {value!r:.60}; expected a number"
    return None


def as_number(value: Any, said: str) -> float:
    """Return what an author's method gave as a float.

    Args:
        value: what it gave.
        said: how the error begins, as `MyEnv.score returned`.

    Raises:
        TypeError: it is not a number; a string with a number in it is refused too.
    """
    try:
        if not isinstance(value, str | bytes):
            return float(value)
    except (TypeError, ValueError):
        pass
    raise TypeError(f"{said} {value!r}; expected a number")


def _wrong_number_of(group: Mapping[str, Any]) -> str | None:
    """Look at the fields whose numbers `check_group` adds up."""
    wrong = wrong_number("scores", group["scores"])
    rows = group.get("inference_logprobs")
    if wrong or not isinstance(rows, list | tuple):
        return wrong
    found = (
        wrong_number(f"inference_logprobs[{i}]", row)
        for i, row in enumerate(rows)
        if isinstance(row, list | tuple)
    )
    return next((text for text in found if text), None)


def check_lengths(tokens: Sequence[Sequence[int]], *, max_token_len: int) -> Admission:
    """Check that every trajectory is shorter than the trainer's limit.

    Args:
        tokens: [G][L] token ids.
        max_token_len: the first length that is refused; 0 or less lifts the limit.

    Returns:
        Accepted, or a drop for `too_long`.
    """
    longest = max((len(sequence) for sequence in tokens), default=0)
    if max_token_len > 0 and longest >= max_token_len:
        detail = f"{longest} tokens in the longest trajectory, the trainer takes fewer than"
        return Admission("too_long", f"{detail} {max_token_len}")
    return ACCEPTED


class Vocabulary:
    """The token ids a tokenizer knows, looked up once.

    Args:
        tokenizer: of the environment. One that does not say what it knows is asked nothing.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._num_ids = _num_ids(tokenizer)
        self._is_exact = False

    def check(self, tokens: Sequence[Sequence[int]]) -> Admission:
        """Check that every token is one of the tokenizer.

        Args:
            tokens: [G][L] token ids.

        Returns:
            Accepted, or a drop for `outside_vocabulary`.
        """
        for i, sequence in enumerate(tokens):
            if len(sequence) == 0 or not self._num_ids:
                continue
            low, high = min(sequence), max(sequence)
            if high >= self._num_ids and not self._is_exact:
                # Where ids have gaps the largest is beyond their number; to find it takes long.
                self._num_ids = max(self._num_ids, _largest_id(self.tokenizer) + 1)
                self._is_exact = True
            if low < 0 or high >= self._num_ids:
                wrong = low if low < 0 else high
                return Admission(
                    "outside_vocabulary",
                    f"tokens[{i}] holds the id {wrong}, the environment's tokenizer knows 0 to "
                    f"{self._num_ids - 1}; environment, engine and trainer must use one tokenizer",
                )
        return ACCEPTED


def _num_ids(tokenizer: Any) -> int:
    """Return how many ids a tokenizer says it has, 0 when it says nothing."""
    try:
        return len(tokenizer)
    except Exception:  # noqa: BLE001 -- authors bring tokenizers of every kind
        return 0


def _largest_id(tokenizer: Any) -> int:
    try:
        return int(max(tokenizer.get_vocab().values()))
    except Exception:  # noqa: BLE001 -- as above
        return -1


def completion_lengths(masks: Sequence[Sequence[int]]) -> list[int]:
    """Return [G] how many tokens of each trajectory are trained on."""
    return [
        len(mask) - mask.count(IGNORE_INDEX)
        if isinstance(mask, list | tuple)
        else sum(1 for label in mask if label != IGNORE_INDEX)
        for mask in masks
    ]
