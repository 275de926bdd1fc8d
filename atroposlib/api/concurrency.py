"""Limits on the sequences that inference engines generate at once; pure.

An engine slows down once its cache is full: it preempts sequences and computes them again. One rule
per engine finds the number of requests just below that point:

    one reading per poll ──► next_limit ──► limit of the engine
    sum of the limits ──► divide_sequences ──► environments, by their weights

`next_limit` adds a constant after a window with headroom and multiplies by a factor below 1 after
one with congestion (AIMD, as in TCP). Between two changes it waits until the metrics show the
effect of the last one (the settle gate):

    limit raised     judged once a window has passed; raised again only if the load has reached it
    limit lowered    judged once the load has fallen to it, since no request is aborted, or after
                     `longest_settle_s`

Invariant: the limit stays within `floor` and `ceiling`, whatever an engine reports.

Source: Chiu and Jain 1989, "Analysis of the increase and decrease algorithms for congestion
avoidance in computer networks". Unlike there, a full cache without preemptions holds the limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

__all__ = [
    "ConcurrencyRule",
    "EngineLimit",
    "EngineReading",
    "decayed_limit",
    "divide_sequences",
    "first_limit",
    "next_limit",
]


class EngineReading(NamedTuple):
    """The load of one engine at one time."""

    running: float
    """Sequences that are generated."""
    waiting: float
    """Requests in the engine's queue."""
    cache_use: float | None = None
    """Used part of the cache of keys and values, 0 to 1; None if it is not reported."""
    preemptions: float | None = None
    """Preempted sequences since the engine started; None if they are not reported."""

    @property
    def load(self) -> float:
        return self.running + self.waiting


@dataclass(frozen=True)
class ConcurrencyRule:
    """Settings of `next_limit`; the same for each engine."""

    first: int = 64
    """Sequences per engine before the first reading."""
    floor: int = 8
    """Smallest limit of an engine."""
    ceiling: int = 4096
    """Largest limit of an engine."""
    window_s: float = 10.0
    """Seconds between two decisions."""
    longest_settle_s: float = 600.0
    """Seconds after which a lowered limit is judged although the load is above it."""
    decrease: float = 0.9
    """Factor after a window with congestion."""
    full_cache: float = 0.97
    """Used part of the cache from which the limit is not raised."""
    tolerated: float = 0.1
    """Preemptions per window, as a fraction of the running sequences, that are no congestion."""
    tolerated_waiting: float = 0.1
    """Waiting requests, as a fraction of the limit, that are no congestion."""


@dataclass(frozen=True)
class EngineLimit:
    """The limit of one engine, and what has been observed since it last changed."""

    limit: float
    since: float
    """Time of the start of the window, seconds."""
    changed_at: float
    """Time of the last change, seconds."""
    preemptions: float | None = None
    """Reading at the start of the window; None before the first."""
    least_waiting: float | None = None
    """Smallest number of waiting requests in the window."""
    is_draining: bool = False
    """Whether the limit was lowered and the load has not reached it."""
    step: float | None = None
    """Sequences that are added; None before the first congestion, where the limit grows by half."""

    @property
    def num_sequences(self) -> int:
        return int(self.limit)


def first_limit(rule: ConcurrencyRule, *, now: float) -> EngineLimit:
    """Return the limit of an engine that has not answered."""
    return EngineLimit(_bounded(float(rule.first), rule), since=now, changed_at=now)


def next_limit(
    state: EngineLimit, reading: EngineReading, rule: ConcurrencyRule, *, now: float
) -> EngineLimit:
    """Return the limit after a reading; call it once per poll.

    Args:
        state: result of the last call.
        reading: what the engine reports now.
        rule: settings.
        now: time of the reading, seconds; the same clock for all calls.
    """
    before, total = state.preemptions, reading.preemptions or 0.0
    if before is None or total < before:
        return _observing(state, reading, now)  # the first reading, or the engine was restarted
    waiting = reading.waiting
    if state.least_waiting is not None:
        waiting = min(waiting, state.least_waiting)
    state = replace(state, least_waiting=waiting)
    if state.is_draining:
        has_drained = reading.load <= 1.05 * state.limit + 1.0
        if has_drained or now - state.changed_at >= rule.longest_settle_s:
            return _observing(state, reading, now)
        return state
    if now - state.since < rule.window_s:
        return state
    is_congested = (
        total - before > rule.tolerated * reading.running + 1.0
        or waiting > rule.tolerated_waiting * state.limit + 1.0
    )
    if is_congested:
        return _lowered(state, reading, rule, now)
    has_room = reading.cache_use is None or reading.cache_use < rule.full_cache
    is_used = reading.load >= 0.9 * state.limit
    if has_room and is_used and state.limit < rule.ceiling:
        step = state.limit / 2.0 if state.step is None else state.step
        raised = replace(state, limit=_bounded(state.limit + step, rule), changed_at=now)
        return _observing(raised, reading, now)
    return _observing(state, reading, now)


def _observing(state: EngineLimit, reading: EngineReading, now: float) -> EngineLimit:
    """Start a window."""
    return replace(
        state,
        since=now,
        preemptions=reading.preemptions or 0.0,
        least_waiting=None,
        is_draining=False,
    )


def _lowered(
    state: EngineLimit, reading: EngineReading, rule: ConcurrencyRule, now: float
) -> EngineLimit:
    """Lower the limit below what the engine can hold at most: the load, if that is smaller."""
    held = min(state.limit, max(reading.load, 1.0))
    lowered = _bounded(rule.decrease * held, rule)
    return replace(
        state,
        limit=lowered,
        changed_at=now,
        is_draining=True,
        step=max(1.0, lowered / 32.0),
    )


def decayed_limit(state: EngineLimit, rule: ConcurrencyRule, *, now: float) -> EngineLimit:
    """Return the limit of an engine that does not answer; call it once per failed poll.

    It keeps its value for one window and then falls once per window, down to the floor. The next
    reading starts a new window from there.
    """
    if now - state.since < rule.window_s:
        return state
    lowered = _bounded(rule.decrease * state.limit, rule)
    return replace(state, limit=lowered, since=now, changed_at=now, preemptions=None)


def _bounded(limit: float, rule: ConcurrencyRule) -> float:
    return max(float(rule.floor), min(float(rule.ceiling), limit))


def divide_sequences(
    num_sequences: int, weights: Mapping[int, float], demands: Mapping[int, float]
) -> dict[int, int]:
    """Divide the sequences of all engines by weight; what one does not use goes to the others.

    Weighted max-min fairness: an environment that demands less than its part gets its demand, and
    the rest is divided again. If all demand less, the rest is divided too, so that each can grow.

    Args:
        num_sequences: sum of the limits of all engines.
        weights: positive weights by environment id.
        demands: sequences that some of them can use; the others can use any number.

    Returns:
        At least one sequence for each.
    """
    parts = dict.fromkeys(weights, 0.0)
    left, unfilled = float(num_sequences), set(weights)
    while unfilled:
        unit = left / sum(weights[env_id] for env_id in unfilled)
        filled = {e for e in unfilled if demands.get(e, math.inf) <= unit * weights[e]}
        for env_id in filled:
            parts[env_id] = demands[env_id]
        left -= sum(demands[env_id] for env_id in filled)
        unfilled -= filled
        if not filled:
            break
    sharing = unfilled or set(weights)
    total = sum(weights[env_id] for env_id in sharing)
    for env_id in sharing:
        parts[env_id] += max(0.0, left) * weights[env_id] / total
    return {env_id: max(1, int(part + 1e-9)) for env_id, part in parts.items()}
