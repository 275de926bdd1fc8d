"""Rules that derive the findings of a run from the records of its steps; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from example_trainer.reporting.series import series_of, short_number

__all__ = ["Limit", "find"]

_END_SHARE = 0.1
_FEW_STEPS = 4
_COLLAPSED_ENTROPY = 0.2
"""Of what it was at the start."""


class Limit(NamedTuple):
    """The mean of a metric over the last tenth of a run should not be above `most`."""

    key: str
    most: float
    what: str
    """The value that is too high, and the remedy."""


LIMITS = (
    Limit(
        "grpo/clipped_fraction",
        0.3,
        "many ratios to the sampler's logprobs lie outside the clip range: take smaller steps "
        "(--lr), publish weights more often, or use --importance-correction",
    ),
    Limit(
        "alignment/diff_abs_mean",
        0.1,
        "the trainer's and the engine's logprobs differ: look at dtypes, at the temperature and "
        "at --logprobs-mode, and at staleness below",
    ),
    Limit(
        "train/staleness_mean",
        4,
        "groups were sampled by weights several steps old: publish more often "
        "(--vllm-restart-interval), or let environments work less ahead",
    ),
    Limit(
        "train/truncation_rate",
        0.2,
        "many completions were cut before their end: raise the token limits, or shorten answers "
        "with --overlong-max-tokens",
    ),
    Limit(
        "train/zero_advantage_groups_fraction",
        0.5,
        "most groups carry no gradient, because all their scores are equal: make problems harder "
        "or easier, or groups larger",
    ),
    Limit(
        "train/padding_fraction",
        0.5,
        "most of the computed tokens are padding: use --packing on",
    ),
    Limit("alignment/missing_fraction", 0.0, "tokens came without the sampler's logprobs"),
)


def find(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what there is to say of a run, as sentences; nothing for a run without steps."""
    if not steps:
        return []
    found = [text for limit in LIMITS if (text := _above(steps, limit))]
    return [*_events(steps), *_collapse(steps), *found, *_waits(steps)]


def _above(steps: Sequence[Mapping[str, Any]], limit: Limit) -> str | None:
    last = _end_mean(steps, limit.key)
    if last is None or last <= limit.most:
        return None
    return (
        f"{limit.key} is {short_number(last)} in the last steps, above {limit.most:g}"
        f"{_worst(steps, limit.key)}: {limit.what}"
    )


def _worst(steps: Sequence[Mapping[str, Any]], key: str) -> str:
    """Return the largest value of a metric and its step; empty where there is only one."""
    series = series_of(steps, key, key)
    if series is None or len(series.ys) < 2:
        return ""
    worst = max(range(len(series.ys)), key=lambda i: series.ys[i])
    return f" (worst: {short_number(series.ys[worst])} at step {series.xs[worst]:.0f})"


def _events(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    skipped = sum(float(record.get("train/skipped_steps") or 0) for record in steps)
    no_number = [record["step"] for record in steps if record["train/loss"] != record["train/loss"]]
    found = []
    if skipped:
        found.append(
            f"{skipped:.0f} of {len(steps)} steps were skipped, since their gradient was not finite"
        )
    if no_number:
        found.append(f"the loss was no number at {len(no_number)} steps, first {no_number[0]}")
    return found


def _collapse(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """Compare the entropy at the end with that at the start."""
    for key in ("train/entropy", "train/entropy_estimate"):
        first, last = _start_mean(steps, key), _end_mean(steps, key)
        if first is None or last is None:
            continue
        if len(steps) >= _FEW_STEPS and first > 0 and last < _COLLAPSED_ENTROPY * first:
            return [
                f"the entropy fell from {short_number(first)} to {short_number(last)}: the policy "
                "hardly explores any more (a higher --clip-eps-high, a KL penalty, or an earlier "
                "checkpoint may help)"
            ]
        return []
    return []


def _waits(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    total = _sum(steps, "train/step_time")
    found = []
    for key, what in (
        ("train/data_fetch_time", "waiting for batches: environments or the engine are the limit"),
        ("train/sync_time", "saving and publishing weights: do it less often"),
    ):
        if total and len(steps) >= _FEW_STEPS and _sum(steps, key) > total / 2:
            found.append(f"{_sum(steps, key) / total:.0%} of the time went into {what}")
    return found


def _sum(steps: Sequence[Mapping[str, Any]], key: str) -> float:
    series = series_of(steps, key, key)
    return sum(series.ys) if series else 0.0


def _end_mean(steps: Sequence[Mapping[str, Any]], key: str) -> float | None:
    return _mean(steps[-_num_end(steps) :], key)


def _start_mean(steps: Sequence[Mapping[str, Any]], key: str) -> float | None:
    return _mean(steps[: _num_end(steps)], key)


def _num_end(steps: Sequence[Mapping[str, Any]]) -> int:
    return max(1, round(len(steps) * _END_SHARE))


def _mean(steps: Sequence[Mapping[str, Any]], key: str) -> float | None:
    series = series_of(steps, key, key)
    return sum(series.ys) / len(series.ys) if series else None
