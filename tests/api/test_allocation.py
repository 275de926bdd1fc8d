"""The values reported to one environment, against the worked example of the contract."""

from __future__ import annotations

import pytest

from atroposlib.api.environments import MIN_ENV_WEIGHT, EnvRegistry, weight_share
from atroposlib.api.queue import queue_view
from atroposlib.api.schemas import RegisterEnv


def registry_of(*envs: dict[str, object], disconnected: int | None = None) -> EnvRegistry:
    registry = EnvRegistry()
    for env in envs:
        fields = {"desired_name": "env", "max_token_length": 1000, "weight": 1.0, **env}
        registry.add(RegisterEnv.model_construct(**fields), now=0.0)
    if disconnected is not None:
        registry.connect(list(registry)[disconnected], False)
    return registry


def shares_of(registry: EnvRegistry) -> list[float]:
    return [weight_share(env, registry.total_weight) for env in registry]


def test_env_weight_is_the_share_of_context_times_weight():
    # 1000*1 + 1000*3 + 500*1 + 0 = 4500
    registry = registry_of({}, {"weight": 3}, {"max_token_length": 500}, {"weight": -1})

    assert shares_of(registry) == pytest.approx(
        [1000 / 4500, 3000 / 4500, 500 / 4500, MIN_ENV_WEIGHT]
    )


@pytest.mark.parametrize("weight", [0.0, -2.0])
def test_env_weight_without_a_positive_total_is_the_minimum(weight):
    assert shares_of(registry_of({"weight": weight})) == [MIN_ENV_WEIGHT]


def test_env_weight_of_a_disconnected_environment_does_not_count_itself():
    assert shares_of(registry_of({}, {}, disconnected=0)) == [1.0, 1.0]


def test_env_weight_that_overflows_is_the_minimum():
    env = {"max_token_length": 2**62, "weight": 1e300}

    assert shares_of(registry_of(env, env)) == [MIN_ENV_WEIGHT] * 2


def test_minimum_shares_leave_out_the_disconnected_and_the_unreserved():
    shares = ({}, {"min_batch_allocation": 0.25}, {"min_batch_allocation": 0.5})

    assert registry_of(*shares, disconnected=2).minimums == {1: 0.25}


@pytest.mark.parametrize(
    ("shares", "expected"), [((), 1.0), ((0.25, 0.5), 0.25), ((0.8, 0.8), 0.0)]
)
def test_unallocated_fraction_is_what_no_share_takes(shares, expected):
    registry = registry_of(*({"min_batch_allocation": share} for share in shares))

    assert registry.unallocated_fraction == expected


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
