"""Attributes that members of an environment hold, and classes of authors that override them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.envs.small_environment import SmallEnv, small_config

MakeEnv = Callable[..., Any]


async def process(env: Any, *, groups: int) -> None:
    env.process_mode = True
    env.n_groups_to_process = groups
    env.group_size_to_process = 2
    await env.process_manager()


class Defaults:
    """Defaults of another base class, which the constructor of `BaseEnv` replaces."""

    curr_step = 41
    max_num_workers = 3


class DefaultsEnv(Defaults, SmallEnv):
    max_token_len = 2
    workers: Any = ()


async def test_defaults_of_a_class_are_replaced_by_the_constructor(make_env: MakeEnv) -> None:
    env = make_env(DefaultsEnv)
    assert (env.curr_step, env.max_token_len, env.max_num_workers) == (0, -1, 4)
    assert env.workers == set()

    await process(env, groups=2)

    assert env.curr_step == 2
    assert not env.drop_counts


async def test_value_set_before_the_constructor_is_replaced_by_it(make_env: MakeEnv) -> None:
    class Early(SmallEnv):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.curr_step = 7
            assert self.curr_step == 7
            super().__init__(*args, **kwargs)

    assert make_env(Early).curr_step == 0


async def test_wandb_run_may_be_set_before_the_constructor(make_env: MakeEnv) -> None:
    class Early(SmallEnv):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.wandb_run = "early"
            super().__init__(*args, **kwargs)

    env = make_env(Early)
    assert env.wandb_run is None
    env.wandb_run = "own run"

    assert env.run_log.wandb_run == "own run"


async def test_property_of_a_class_sees_each_step(make_env: MakeEnv) -> None:
    class Curriculum(SmallEnv):
        steps: tuple[int, ...] = ()

        @property
        def curr_step(self) -> int:  # type: ignore[override]
            return self.steps[-1]

        @curr_step.setter
        def curr_step(self, step: int) -> None:
            self.steps += (step,)

    env = make_env(Curriculum)

    await process(env, groups=2)

    assert env.steps[0] == 0
    assert sorted(set(env.steps)) == [0, 1, 2]


@pytest.mark.parametrize("name", ["reporter", "registration", "delivery", "serving_loop"])
async def test_names_of_authors_do_not_collide_with_members(make_env: MakeEnv, name: str) -> None:
    env = make_env(SmallEnv)
    setattr(env, name, {"mine": 1})

    await process(env, groups=1)

    assert getattr(env, name) == {"mine": 1}


async def test_override_of_count_failure_sees_failed_rollouts(make_env: MakeEnv) -> None:
    class Counting(SmallEnv):
        def count_failure(self, name: str) -> None:
            self.events.append(name)
            super().count_failure(name)

        async def collect_trajectories(self, item: Any) -> Any:
            raise RuntimeError("no")

    env = make_env(Counting)

    with pytest.raises(RuntimeError):
        await process(env, groups=1)

    assert "RuntimeError" in env.events
    assert env.failure_counts["RuntimeError"] >= 1


def test_tokenizer_is_that_of_the_settings_whatever_was_set_before(make_env: MakeEnv) -> None:
    class Own(SmallEnv):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.tokenizer = "own"
            super().__init__(*args, **kwargs)

    assert make_env(Own).tokenizer != "own"


async def test_methods_work_on_an_environment_made_without_its_constructor() -> None:
    env: Any = object.__new__(SmallEnv)
    env.config = small_config()
    env.server = SimpleNamespace(servers=[])
    env.tokenizer = SimpleNamespace(decode=lambda ids, **_: "".join(map(chr, ids)))
    env.rollouts_for_wandb, env.task_duration = [], [1.0, 3.0]
    group = {"tokens": [[65, 66]], "masks": [[-100, 66]], "scores": [0.5]}

    await env.add_rollouts_for_wandb(group)

    assert env.rollouts_for_wandb == [[("AB", 0.5)]]
    assert env.perf_stats({})["train_perf/task_duration_mean"] == 2.0
    assert env.derived_batch_size == -1


def test_attribute_that_was_never_set_is_named() -> None:
    env: Any = object.__new__(SmallEnv)

    with pytest.raises(AttributeError, match="'SmallEnv' object has no attribute 'curr_step' yet"):
        _ = env.curr_step


def test_members_of_two_environments_are_separate(make_env: MakeEnv) -> None:
    first, second = make_env(), make_env()
    first.curr_step = 5

    assert (first.curr_step, second.curr_step) == (5, 0)
