"""Uncertainty of evaluation metrics, and paired tests between two models. Pure.

An item may be sampled several times; the samples of one item are not independent. The unit of all
rules is therefore the item: its values are averaged first, and items are resampled as a whole
(a bootstrap clustered by item). A metric is the mean of the means of its items.

    values of items [N][K] -> `interval_of` -> mean, standard error, 95% interval
    two models on the same items -> `compare_items` -> difference, interval, p-value
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, Literal, NamedTuple

import numpy as np

__all__ = [
    "CONFIDENCE",
    "INTERVAL_ENDS",
    "Interval",
    "PairedDifference",
    "attempts_of",
    "compare_items",
    "interval_metrics",
    "interval_of",
    "mcnemar_p_value",
    "numbers_of",
    "pass_at_k",
    "randomization_p_value",
    "uncertainty_metrics",
    "wilson_interval",
]

INTERVAL_ENDS = ("_stderr", "_ci_low", "_ci_high")
"""Ends of the names that describe the uncertainty of the metric with the rest of the name."""
CONFIDENCE = 0.95
Z = statistics.NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
NUM_RESAMPLES = 2000
NUM_RANDOMIZATIONS = 10_000
SEED = 0
"""Seed of the resampling: the same values always give the same result."""
MIN_BOOTSTRAP_ITEMS = 5
"""Fewer items give intervals that are far too narrow, of width 0 for equal values."""
RESAMPLED_AT_ONCE = 2**22
"""Values held in memory by one step of the resampling."""

IntervalRule = Literal["wilson", "bootstrap", "none"]


class Interval(NamedTuple):
    """A mean over items with its uncertainty."""

    mean: float
    stderr: float | None
    """Standard error over items; None for a single item with other values than 0 and 1."""
    low: float | None
    """Lower end of the 95% interval; None for too few items with other values than 0 and 1."""
    high: float | None
    rule: IntervalRule
    """`wilson` for one value of 0 or 1 per item, else `bootstrap` over items."""


class PairedDifference(NamedTuple):
    """The difference of two models on the same items: the second minus the first."""

    difference: float
    low: float | None
    """Lower end of its 95% interval, by bootstrap over items; None for too few of them."""
    high: float | None
    p_value: float
    """Two-sided, of the hypothesis that the models are equal."""
    test: Literal["mcnemar", "randomization"]
    """McNemar's exact test for one value of 0 or 1 per item, else the paired randomization test."""
    num_items: int


def interval_of(values: Sequence[Sequence[float]]) -> Interval:
    """Return mean, standard error and 95% interval of a metric.

    Args:
        values: [N][K] finite values of the samples of each item, at least one item and sample.
    """
    means = [statistics.fmean(row) for row in values]
    mean = statistics.fmean(means)
    num_items = len(means)
    if all(len(row) == 1 for row in values) and _are_binary(means):
        low, high = wilson_interval(sum(means), num_items)
        return Interval(mean, math.sqrt(mean * (1 - mean) / num_items), low, high, "wilson")
    if num_items == 1:
        return Interval(mean, None, None, None, "none")
    stderr = statistics.stdev(means) / math.sqrt(num_items)
    if num_items < MIN_BOOTSTRAP_ITEMS:
        return Interval(mean, stderr, None, None, "none")
    low, high = _percentiles(_resampled_means(means))
    return Interval(mean, stderr, low, high, "bootstrap")


def wilson_interval(num_correct: float, num_items: int) -> tuple[float, float]:
    """Return the 95% score interval of a proportion; it lies within 0 and 1.

    Source: Wilson 1927, "Probable Inference, the Law of Succession, and Statistical Inference".
    """
    share = num_correct / num_items
    spread = Z * math.sqrt(share * (1 - share) / num_items + Z**2 / (4 * num_items**2))
    center, scale = share + Z**2 / (2 * num_items), 1 + Z**2 / num_items
    low = 0.0 if share == 0 else (center - spread) / scale  # exact at the ends
    return low, 1.0 if share == 1 else (center + spread) / scale


def interval_metrics(name: str, values: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return `<name>_stderr`, `<name>_ci_low` and `<name>_ci_high`, those that are known."""
    interval = interval_of(values)
    known = zip(INTERVAL_ENDS, (interval.stderr, interval.low, interval.high), strict=True)
    return {f"{name}{end}": value for end, value in known if value is not None}


def pass_at_k(m: int, c: int, k: int) -> float:
    """Estimate the probability that at least one of `k` samples is correct.

    Args:
        m: Number of samples drawn.
        c: Number of correct samples among them.
        k: Number of attempts.

    Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code",
    arXiv:2107.03374, section 2.1: `1 - C(m - c, k) / C(m, k)`.
    """
    if m - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(m - c + 1, m + 1))


def attempts_of(num_samples: int) -> list[int]:
    """Return the numbers of attempts that are reported: powers of two, and all samples."""
    powers = [2**i for i in range(num_samples.bit_length()) if 2**i < num_samples]
    return [*powers, num_samples]


def compare_items(
    first: Mapping[str, Sequence[float]], second: Mapping[str, Sequence[float]]
) -> PairedDifference:
    """Compare two models on their common items.

    Args:
        first: item to its [K] values under the first model.
        second: likewise for the second model; at least one item in common.
    """
    names = sorted(first.keys() & second.keys())
    means = [
        (statistics.fmean(first[name]), statistics.fmean(second[name])) for name in names
    ]  # [N] pairs
    differences = [new - old for old, new in means]
    difference = statistics.fmean(differences)
    low, high = None, None
    if len(names) >= MIN_BOOTSTRAP_ITEMS:
        low, high = _percentiles(_resampled_means(differences))
    single = all(len(first[name]) == len(second[name]) == 1 for name in names)
    if single and all(_are_binary(pair) for pair in means):
        p_value = mcnemar_p_value(
            num_gained=sum(new > old for old, new in means),
            num_lost=sum(new < old for old, new in means),
        )
        return PairedDifference(difference, low, high, p_value, "mcnemar", len(names))
    p_value = randomization_p_value(differences)
    return PairedDifference(difference, low, high, p_value, "randomization", len(names))


def mcnemar_p_value(*, num_gained: int, num_lost: int) -> float:
    """Return the two-sided p-value of McNemar's exact test.

    Args:
        num_gained: items that only the second model answered correctly.
        num_lost: items that only the first model answered correctly.
    """
    num_changed, fewer = num_gained + num_lost, min(num_gained, num_lost)
    if num_changed == 0:
        return 1.0
    tail: int = sum(math.comb(num_changed, i) for i in range(fewer + 1))
    share: float = 2 * tail / (1 << num_changed)
    return min(1.0, share)


def randomization_p_value(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of [N] paired differences by random exchange of the models.

    If the models are equal, the sign of each difference is a coin flip.
    """
    array = np.asarray(differences, dtype=np.float64)
    least = abs(float(array.mean())) - 1e-12
    generator = np.random.default_rng(SEED)
    num_extreme = 0
    for count in _portions(NUM_RANDOMIZATIONS, len(array)):
        signs = generator.integers(0, 2, size=(count, len(array)), dtype=np.int8) * 2 - 1
        num_extreme += int(np.sum(np.abs((signs * array).mean(axis=1)) >= least))
    return (num_extreme + 1) / (NUM_RANDOMIZATIONS + 1)


def _are_binary(values: Sequence[float]) -> bool:
    return all(value in (0.0, 1.0) for value in values)


def _resampled_means(values: Sequence[float]) -> np.ndarray:
    """Return [NUM_RESAMPLES] means of N values drawn with replacement."""
    generator = np.random.default_rng(SEED)
    array = np.asarray(values, dtype=np.float64)
    means = [
        array[generator.integers(0, len(array), size=(count, len(array)))].mean(axis=1)
        for count in _portions(NUM_RESAMPLES, len(array))
    ]
    return np.concatenate(means)


def _portions(num_rows: int, num_values: int) -> Iterator[int]:
    """Yield numbers of rows that are drawn at once."""
    most = max(1, RESAMPLED_AT_ONCE // num_values)
    for start in range(0, num_rows, most):
        yield min(most, num_rows - start)


def _percentiles(resampled: np.ndarray) -> tuple[float, float]:
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(resampled, [tail, 100 - tail])
    return float(low), float(high)


def uncertainty_metrics(
    metrics: Mapping[str, float],
    *,
    item_ids: Sequence[str],
    values: Sequence[Mapping[str, float]],
    is_correct: Sequence[bool],
) -> dict[str, float]:
    """Return the intervals of the metrics of an evaluation, and pass@k with several samples.

    A metric gets `_stderr`, `_ci_low` and `_ci_high` if its value is the mean of its values over
    items. With K samples per item, `eval/pass_at_<k>` is added for powers of two up to K, and K.

    Args:
        metrics: metrics of the evaluation by name.
        item_ids: [S] the item of each sample.
        values: [S] values of the metrics that are means, by name; a sample may lack some.
        is_correct: [S] whether the sample counts as correct for pass@k.
    """
    by_name: dict[str, dict[str, list[float]]] = {}
    for item_id, row in zip(item_ids, values, strict=True):
        for name, value in row.items():
            by_name.setdefault(name, {}).setdefault(item_id, []).append(value)
    found: dict[str, float] = {}
    for name, of_items in by_name.items():
        rows = list(of_items.values())
        mean = statistics.fmean(statistics.fmean(row) for row in rows)
        if name in metrics and math.isclose(mean, metrics[name], rel_tol=1e-9, abs_tol=1e-9):
            found.update(interval_metrics(name, rows))
    correct: dict[str, list[bool]] = {}
    for item_id, right in zip(item_ids, is_correct, strict=True):
        correct.setdefault(item_id, []).append(right)
    return {**found, **_pass_metrics(list(correct.values()))}


def _pass_metrics(correct: Sequence[Sequence[bool]]) -> dict[str, float]:
    num_samples = min((len(row) for row in correct), default=0)
    if num_samples < 2:
        return {}
    found: dict[str, float] = {}
    for k in attempts_of(num_samples):
        values = [[pass_at_k(len(row), sum(row), k)] for row in correct]
        found[f"eval/pass_at_{k}"] = statistics.fmean(value for [value] in values)
        found.update(interval_metrics(f"eval/pass_at_{k}", values))
    return found


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics that are numbers, without tables and counts by name."""
    return {name: value for name, value in metrics.items() if isinstance(value, Real)}
