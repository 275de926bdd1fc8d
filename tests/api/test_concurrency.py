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


@pytest.mark.parametrize(
    ("state", "reading", "expected"),
    [
        # each exactly at its bound, and the next beyond it
        (observed(limit=100.0), EngineReading(90, 0, preemptions=0), 150.0),  # 0.9 of the limit
        (observed(limit=100.0), EngineReading(80, 9, preemptions=0), 100.0),
        (observed(limit=100.0), EngineReading(80, 10, preemptions=0), 150.0),  # waiting is load
        (observed(limit=100.0), EngineReading(100, 11, preemptions=0), 150.0),  # 10 + 1 may wait
        (observed(limit=100.0), EngineReading(100, 12, preemptions=0), 90.0),
        (observed(limit=100.0), EngineReading(100, 0, preemptions=11), 150.0),  # 10 + 1 tolerated
        (observed(limit=100.0), EngineReading(100, 0, preemptions=12), 90.0),
        (observed(limit=100.0, preemptions=5.0), EngineReading(100, 0, preemptions=16), 150.0),
        (observed(limit=100.0), EngineReading(100, 0, 0.97, 0), 100.0),  # full from 0.97
        (observed(limit=100.0), EngineReading(100, 0, 0.96, 0), 150.0),
        (observed(limit=100.0, step=7.0), EngineReading(100, 0, preemptions=0), 107.0),
        (observed(limit=1_000.0), EngineReading(1_000, 0, preemptions=0), 1_000.0),  # the ceiling
        (observed(limit=999.0), EngineReading(1_000, 0, preemptions=0), 1_000.0),
        (observed(limit=8.0), EngineReading(0, 50, preemptions=0), 8.0),  # the floor
        (observed(limit=100.0, least_waiting=3.0), EngineReading(100, 99, preemptions=0), 150.0),
    ],
)
def test_next_limit_at_its_bounds_table(
    state: EngineLimit, reading: EngineReading, expected: float
) -> None:
    assert next_limit(state, reading, RULE, now=10.0).limit == pytest.approx(expected)


@pytest.mark.parametrize(("running", "is_draining"), [(106.0, False), (107.0, True)])
def test_limit_has_drained_at_a_twentieth_above_it(running: float, is_draining: bool) -> None:
    state = observed(limit=100.0, is_draining=True)  # 1.05 * 100 + 1 = 106

    state = next_limit(state, EngineReading(running, 0, preemptions=0), RULE, now=1.0)

    assert (state.is_draining, state.limit) == (is_draining, 100.0)


@pytest.mark.parametrize(("now", "is_draining"), [(599.9, True), (600.0, False)])
def test_drain_ends_after_the_longest_settling(now: float, is_draining: bool) -> None:
    state = observed(limit=100.0, is_draining=True)

    state = next_limit(state, EngineReading(500, 0, preemptions=0), RULE, now=now)

    assert state.is_draining is is_draining


def test_window_starts_with_what_was_read() -> None:
    state = observed(preemptions=None, least_waiting=5.0, is_draining=True)

    state = next_limit(state, EngineReading(1, 2), RULE, now=3.0)

    assert (state.since, state.preemptions, state.least_waiting) == (3.0, 0.0, None)
    assert (state.limit, state.changed_at, state.is_draining) == (64.0, 0.0, False)
    state = next_limit(state, EngineReading(1, 2), RULE, now=4.0)
    assert (state.since, state.preemptions, state.least_waiting) == (3.0, 0.0, 2)
    raised = next_limit(observed(), BUSY, RULE, now=10.0)
    assert (raised.changed_at, raised.since, raised.step) == (10.0, 10.0, None)


def test_lowered_limit_grows_by_a_thirty_second_of_it_and_at_least_by_one() -> None:
    crowd = EngineReading(100, 0, preemptions=99)

    large = next_limit(observed(limit=100.0), crowd, RULE, now=10.0)
    small = next_limit(observed(limit=10.0), crowd._replace(running=10), RULE, now=10.0)
    idle = next_limit(observed(limit=100.0), EngineReading(0, 0, preemptions=99), RULE, now=10.0)

    assert (large.step, large.changed_at, large.is_draining) == (90.0 / 32.0, 10.0, True)
    assert (small.limit, small.step) == (9.0, 1.0)
    assert idle.limit == 8.0
    low = replace(RULE, floor=1)
    assert next_limit(observed(), EngineReading(0, 0, preemptions=99), low, now=10.0).limit == 1.0


@pytest.mark.parametrize(("now", "expected"), [(9.9, 64.0), (10.0, 0.9 * 64)])
def test_decayed_limit_falls_after_a_whole_window(now: float, expected: float) -> None:
    state = decayed_limit(observed(), RULE, now=now)

    assert state.limit == pytest.approx(expected)
    if now == 10.0:
        assert (state.since, state.changed_at, state.preemptions) == (10.0, 10.0, None)


def test_first_limit_is_within_the_bounds() -> None:
    assert first_limit(RULE, now=7.0) == EngineLimit(64.0, since=7.0, changed_at=7.0)
    assert first_limit(replace(RULE, first=2), now=0.0).num_sequences == 8
    assert first_limit(replace(RULE, first=2_000), now=0.0).num_sequences == 1_000
    assert EngineLimit(8.9, since=0.0, changed_at=0.0).num_sequences == 8


def test_defaults_of_the_rule() -> None:
    assert ConcurrencyRule() == ConcurrencyRule(
        first=64, floor=8, ceiling=4096, window_s=10.0, longest_settle_s=600.0, decrease=0.9,
        full_cache=0.97, tolerated=0.1, tolerated_waiting=0.1,
    )  # fmt: skip


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
        (100, {0: 1.0, 1: 1.0}, {0: 50}, {0: 50, 1: 50}),  # exactly its part
        (0, {0: 1.0, 1: 1.0}, {0: 3}, {0: 1, 1: 1}),  # at least one each
        (3, {0: 0.1, 1: 0.2}, {}, {0: 1, 1: 2}),  # 3 * 0.1 / 0.3 is below 1 in floats
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
