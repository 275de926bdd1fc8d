"""The rule for the number of sequences on an engine, in tables and against a simulated engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.api.concurrency import (
    ConcurrencyRule,
    EngineLimit,
    EngineReading,
    decayed_limit,
    divide_sequences,
    first_limit,
    next_limit,
)
from tests.api.simulated_engine import SimulatedEngine, adaptive_limit, serve

RULE = ConcurrencyRule(first=64, floor=8, ceiling=1_000, window_s=10.0)
BUSY = EngineReading(running=64, waiting=0, cache_use=0.5, preemptions=0)
THRASHING = EngineReading(running=60, waiting=4, cache_use=1.0, preemptions=50)


def observed(limit: float = 64.0, **changes: object) -> EngineLimit:
    """Return a limit whose window began at 0."""
    state = EngineLimit(limit, since=0.0, changed_at=0.0, preemptions=0.0)
    return replace(state, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reading", "expected"),
    [
        (BUSY, 96.0),  # by half, before the first congestion
        (BUSY._replace(cache_use=None, preemptions=None), 96.0),
        (BUSY._replace(running=50), 64.0),  # the limit is not reached, so it is not the reason
        (BUSY._replace(cache_use=0.98), 64.0),  # full, without preemptions
        (BUSY._replace(preemptions=7), 64 * 1.5),  # 6.4 + 1 are tolerated
        (BUSY._replace(preemptions=8), 0.9 * 64),
        (BUSY._replace(waiting=8), 0.9 * 64),  # 6.4 + 1 may wait
        # the load is below the limit and too much: 0.9 of the load
        (BUSY._replace(running=40, preemptions=50), 36.0),
    ],
)
def test_next_limit_after_a_window_table(reading: EngineReading, expected: float) -> None:
    assert next_limit(observed(), reading, RULE, now=10.0).limit == pytest.approx(expected)


def test_next_limit_within_the_window_stays() -> None:
    assert next_limit(observed(), THRASHING, RULE, now=9.9).limit == 64.0


def test_next_limit_after_congestion_grows_by_a_constant() -> None:
    state = next_limit(observed(limit=640.0), EngineReading(640, 0, preemptions=99), RULE, now=10.0)
    reading = BUSY._replace(running=576.0, preemptions=99)
    state = next_limit(state, reading, RULE, now=11.0)  # drained: a window starts

    raised = next_limit(state, reading, RULE, now=21.0)
    raised_again = next_limit(raised, reading._replace(running=594.0), RULE, now=31.0)

    assert (state.limit, raised.limit, raised_again.limit) == (576.0, 594.0, 612.0)  # 576 / 32


def test_next_limit_lowered_once_until_the_load_has_followed() -> None:
    lowered = next_limit(observed(), THRASHING, RULE, now=10.0)

    still = next_limit(lowered, THRASHING._replace(preemptions=500), RULE, now=60.0)
    drained = next_limit(still, BUSY._replace(running=57, preemptions=500), RULE, now=61.0)
    judged = next_limit(drained, BUSY._replace(running=57, preemptions=500), RULE, now=71.0)

    assert still.limit == lowered.limit == drained.limit == pytest.approx(57.6)
    assert judged.limit > lowered.limit


def test_next_limit_load_that_never_falls_is_judged_in_the_end() -> None:
    lowered = next_limit(observed(), THRASHING, RULE, now=10.0)

    state = next_limit(lowered, THRASHING._replace(preemptions=500), RULE, now=611.0)
    state = next_limit(state, THRASHING._replace(preemptions=900), RULE, now=622.0)

    assert state.limit == pytest.approx(0.9 * 57.6)


def test_next_limit_a_burst_in_the_queue_is_no_congestion() -> None:
    state = observed()
    for now, waiting in ((1.0, 40), (2.0, 0), (3.0, 40), (10.0, 40)):
        state = next_limit(state, BUSY._replace(waiting=waiting), RULE, now=now)

    assert state.limit == 96.0


def test_next_limit_restarted_engine_starts_a_window() -> None:
    state = observed(preemptions=1_000.0)

    state = next_limit(state, BUSY._replace(preemptions=3), RULE, now=50.0)

    assert (state.limit, state.preemptions, state.since) == (64.0, 3.0, 50.0)


def test_decayed_limit_keeps_its_value_for_a_window_and_falls_to_the_floor() -> None:
    state = observed()

    assert decayed_limit(state, RULE, now=9.0).limit == 64.0
    for poll in range(10, 400):
        state = decayed_limit(state, RULE, now=float(poll))
    assert state.limit == 8.0
    assert next_limit(state, BUSY, RULE, now=400.0).limit == 8.0  # first a window of readings


readings = st.builds(
    EngineReading,
    running=st.floats(0, 1e6),
    waiting=st.floats(0, 1e6),
    cache_use=st.none() | st.floats(0, 10),
    preemptions=st.none() | st.floats(0, 1e9),
)


@given(st.lists(st.tuples(st.none() | readings, st.floats(0, 100)), max_size=40))
def test_the_limit_stays_within_its_bounds(
    polls: list[tuple[EngineReading | None, float]],
) -> None:
    state, now = first_limit(RULE, now=0.0), 0.0
    for reading, pause_s in polls:
        now += pause_s
        if reading is None:
            state = decayed_limit(state, RULE, now=now)
        else:
            state = next_limit(state, reading, RULE, now=now)

        assert RULE.floor <= state.num_sequences <= RULE.ceiling


@pytest.mark.parametrize(
    ("total", "weights", "demands", "expected"),
    [
        (100, {0: 0.75, 1: 0.25}, {}, {0: 75, 1: 25}),
        (100, {0: 3.0, 1: 1.0}, {0: 90, 1: 90}, {0: 75, 1: 25}),
        (100, {0: 0.75, 1: 0.25}, {0: 15}, {0: 15, 1: 85}),  # what 0 does not use
        # 1 has its demand; 80 are left for 0 and 2, of which 2 demands less than its 40
        (100, {0: 1.0, 1: 1.0, 2: 1.0}, {1: 20, 2: 30}, {0: 50, 1: 20, 2: 30}),
        (100, {0: 0.75, 1: 0.25}, {0: 20, 1: 20}, {0: 20 + 45, 1: 20 + 15}),  # all can grow
        (8, {0: 0.01, 1: 0.99}, {}, {0: 1, 1: 7}),
        (8, {}, {}, {}),
    ],
)
def test_divide_sequences_table(
    total: int, weights: dict[int, float], demands: dict[int, float], expected: dict[int, int]
) -> None:
    assert divide_sequences(total, weights, demands) == expected


@given(
    st.integers(0, 100_000),
    st.dictionaries(st.integers(0, 50), st.floats(0.01, 1.0), max_size=20),
    st.dictionaries(st.integers(0, 50), st.floats(0, 1e6), max_size=20),
)
def test_divided_sequences_add_up_to_the_total(
    total: int, weights: dict[int, float], demands: dict[int, float]
) -> None:
    parts = divide_sequences(total, weights, demands)

    assert parts.keys() == weights.keys()
    assert sum(parts.values()) <= total + len(parts)
    if parts:
        assert sum(parts.values()) >= total - len(parts)


def fixed_throughput(num_sequences: int, cache_tokens: int) -> float:
    engine = SimulatedEngine(cache_tokens)
    served = serve(engine, limit=lambda: num_sequences, warm_up_s=100.0, until_s=500.0)
    return served.tokens_per_s


@pytest.mark.parametrize("first", [8, 256])
def test_adaptive_limit_is_close_to_the_best_fixed_one(first: int) -> None:
    # More than about 60 sequences overflow this cache: 256 lose half of the throughput.
    best = max(fixed_throughput(number, 40_000) for number in (48, 52, 56, 60, 64, 72))
    engine = SimulatedEngine(40_000)
    limit = adaptive_limit(engine, ConcurrencyRule(first=first))

    served = serve(engine, limit=limit, warm_up_s=400.0, until_s=1_600.0)

    assert fixed_throughput(256, 40_000) < 0.6 * best
    assert served.tokens_per_s >= 0.95 * best
    assert 45 <= served.mean_limit <= 65


def test_two_environments_share_an_engine_by_their_weights() -> None:
    engine = SimulatedEngine(40_000)
    limit = adaptive_limit(engine, ConcurrencyRule())

    served = serve(engine, limit=limit, weights=(0.75, 0.25), warm_up_s=400.0, until_s=1_200.0)

    first, second = served.mean_loads
    assert first / second == pytest.approx(3.0, rel=0.1)
