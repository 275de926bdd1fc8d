"""What one environment is told, against the worked example of the contract."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from atroposlib.api.environments import (
    MIN_ENV_WEIGHT,
    minimum_shares,
    total_weight,
    unallocated_fraction,
    weight_share,
)
from atroposlib.api.queue import queue_view


@dataclass
class Env:
    env_id: int
    max_token_length: int = 1000
    weight: float = 1.0
    min_batch_allocation: float | None = None
    is_connected: bool = True


def test_env_weight_is_the_share_of_context_times_weight():
    # 1000*1 + 1000*3 + 500*1 + 0 = 4500
    envs = [Env(0), Env(1, weight=3), Env(2, 500), Env(3, weight=-1)]

    weights = [weight_share(env, total_weight(envs)) for env in envs]

    assert weights == pytest.approx([1000 / 4500, 3000 / 4500, 500 / 4500, MIN_ENV_WEIGHT])


@pytest.mark.parametrize("weight", [0.0, -2.0])
def test_env_weight_without_a_positive_total_is_the_minimum(weight):
    env = Env(0, weight=weight)

    assert weight_share(env, total_weight([env])) == MIN_ENV_WEIGHT


def test_env_weight_of_a_disconnected_environment_does_not_count_itself():
    gone, there = Env(0, is_connected=False), Env(1)

    assert weight_share(gone, total_weight([gone, there])) == 1.0
    assert weight_share(there, total_weight([gone, there])) == 1.0


def test_env_weight_that_overflows_is_the_minimum():
    env = Env(0, max_token_length=2**62, weight=1e300)

    assert weight_share(env, total_weight([env, env])) == MIN_ENV_WEIGHT


def test_minimum_shares_leave_out_the_disconnected_and_the_unreserved():
    envs = [Env(0), Env(1, min_batch_allocation=0.25), Env(2, min_batch_allocation=0.5)]
    envs[2].is_connected = False

    assert minimum_shares(envs) == {1: 0.25}


@pytest.mark.parametrize(
    ("shares", "expected"), [({}, 1.0), ({1: 0.25, 2: 0.5}, 0.25), ({1: 0.8, 2: 0.8}, 0.0)]
)
def test_unallocated_fraction_is_what_no_share_takes(shares, expected):
    assert unallocated_fraction(shares) == expected


@pytest.mark.parametrize(
    ("env_id", "group_size", "expected"),
    [
        # Sequences: env 0 has 12, 1 has 10, 2 has 16, 3 has 3, nobody has 2; packs of 8.
        # Reserved: env 1 int(16*0.25) = 4, env 2 int(16*0.5) = 8.
        (0, 4, (12, 3)),  # 12 + (16-4) + (16-8) + 8 + 8 = 48; / 4
        (1, 2, (25, 5)),  # 10 + 16 + (16-8) + 8 + 8 = 50; / 2
        (2, 8, (7, 2)),  # 16 + 16 + (16-4) + 8 + 8 = 60; // 8
        (3, 1, (47, 3)),  # 3 + 16 + (16-4) + (16-8) + 8 = 47
    ],
)
def test_queue_view_counts_others_in_packs_less_their_reserve(env_id, group_size, expected):
    view = queue_view(
        env_id,
        {0: 12, 1: 10, 2: 16, 3: 3, None: 2},
        group_size=group_size,
        pack_size=8,
        batch_size=16,
        minimums={1: 0.25, 2: 0.5},
    )

    assert view == expected


def test_queue_view_counts_others_also_when_every_group_is_single():
    view = queue_view(0, {0: 2, 1: 5}, group_size=1, pack_size=1, batch_size=4, minimums={1: 0.5})

    assert view == (2 + 5 - 2, 2)
