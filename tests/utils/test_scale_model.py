"""The discrete-event model of `benchmarks/scale.py`: figures that can be worked out by hand."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in [name for name in sys.modules if name.startswith("scale_parts")]:
        monkeypatch.delitem(sys.modules, name)
    from scale_parts import model as found

    return found


def plain(model: Any, **changes: Any) -> Any:
    """All completions have 100 tokens; a full engine of 8 slots decodes 80 tokens per second."""
    settings = {
        "slots": 8,
        "slot_tokens_per_s": 10.0,
        "engine_tokens_per_s": math.inf,
        "prefill_tokens_per_s": math.inf,
        "kv_tokens": math.inf,
        "prompt_tokens": 0,
        "median_tokens": 100,
        "spread": 0.0,
        "group_size": 4,
        "batch_size": 4,
        "max_batches_offpolicy": 100,
        "update_s": 0.0,
    }
    return model.Cluster(**settings | changes)


def test_full_slots_decode_at_their_rate(model: Any) -> None:
    found = model.simulate(plain(model), warm_up_s=105, window_s=1000)

    assert found.slot_use == pytest.approx(1.0)
    assert found.sequences_per_s == pytest.approx(0.8, rel=0.02)  # 8 slots, 10 s each


def test_saturated_engine_shares_its_rate(model: Any) -> None:
    found = model.simulate(plain(model, engine_tokens_per_s=40.0), warm_up_s=105, window_s=1000)

    assert found.sequences_per_s == pytest.approx(0.4, rel=0.03)


def test_off_policy_bound_leaves_slots_idle(model: Any) -> None:
    """One batch ahead is one group of four in eight slots."""
    found = model.simulate(plain(model, max_batches_offpolicy=1), warm_up_s=105, window_s=1000)

    assert found.slot_use == pytest.approx(0.5, rel=0.02)


def test_prefill_and_updates_cost_time_of_all_slots(model: Any) -> None:
    """Eight prompts of 50 tokens at 100 per second take 4 s of every 14 s."""
    cluster = plain(model, prompt_tokens=50, prefill_tokens_per_s=100.0)

    found = model.simulate(cluster, warm_up_s=140, window_s=1400)

    assert found.sequences_per_s == pytest.approx(8 / 14, rel=0.03)


def test_full_cache_preempts_and_computes_again(model: Any) -> None:
    """Eight sequences need 800 tokens at their ends, and 600 fit."""
    found = model.simulate(plain(model, kv_tokens=600.0), warm_up_s=105, window_s=1000)

    assert 0.0 < found.recomputed_share < 1.0
    assert 0.3 < found.sequences_per_s < 0.8


def test_busy_service_limits_the_run(model: Any) -> None:
    """Ten seconds per group of four."""
    cluster = plain(model, service_s_per_group=10.0, max_batches_offpolicy=4)

    found = model.simulate(cluster, warm_up_s=200, window_s=1000)

    assert found.sequences_per_s == pytest.approx(0.4, rel=0.05)
    assert found.service_load == pytest.approx(1.0, rel=0.05)


def test_many_engines_scale_and_load_the_service_together(model: Any) -> None:
    cluster = plain(model, engines=16, batch_size=64, spread=0.5, service_s_per_group=0.001)
    larger = dataclasses.replace(cluster, engines=160, batch_size=640)

    one, ten = (model.simulate(c, warm_up_s=60, window_s=200) for c in (cluster, larger))

    assert ten.sequences_per_s == pytest.approx(10 * one.sequences_per_s, rel=0.05)
    assert ten.service_load == pytest.approx(10 * one.service_load, rel=0.05)
    assert model.simulate(cluster, warm_up_s=60, window_s=200) == one
