"""The adapter of Gymnasium, against the installed environments."""

from __future__ import annotations

import asyncio
import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gymnasium", reason="needs the package gymnasium")

import gymnasium
import numpy
from gymnasium import spaces

from atroposlib.adapters.gymnasium import GymnasiumAdapter, find_action, plain_text
from atroposlib.adapters.registry import make_adapter
from atroposlib.envs.conversation import Turn
from atroposlib.errors import ConfigError, EpisodeError
from tests.adapters.playing import adapter_env, roll_out

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
LAKE = {"env_kwargs": {"is_slippery": False, "map_name": "4x4"}}
TO_THE_GOAL = ["down", "down", "right", "right", "down", "right"]


async def opened(name: str, **args: Any) -> GymnasiumAdapter:
    adapter = make_adapter(f"gymnasium:{name}", args, seed=3)
    await adapter.open()
    assert isinstance(adapter, GymnasiumAdapter)
    return adapter


async def play(adapter: GymnasiumAdapter, item: Any, answers: list[str]) -> list[Any]:
    """Return the first messages and the replies of an episode."""
    episode = adapter.start(item)
    seen: list[Any] = [await episode.begin()]
    for index, answer in enumerate(answers):
        seen.append(await episode.reply(Turn(answer, index, ())))
        if seen[-1].is_done:
            break
    await episode.close()
    return [*seen, episode.metrics]


async def test_frozen_lake_is_solved_with_exact_tokens(make_env: Callable[..., Any]) -> None:
    make_env()  # puts the character tokenizer in place

    def policy(prompt: str) -> str:
        return f"<action>{TO_THE_GOAL[min(5, len(re.findall('<action>[a-z]', prompt)))]}</action>"

    async with adapter_env("gymnasium:FrozenLake-v1", LAKE, policy) as env:
        rollouts, group = await roll_out(env)

    assert group["scores"] == [1.0, 1.0]
    assert [rollout.metrics["solved"] for rollout in rollouts] == [1.0, 1.0]
    assert "[S]FFF" in rollouts[0].messages[0]["content"]
    assert len(rollouts[0].rewards) == 6


@pytest.mark.parametrize(
    ("name", "answers"),
    [
        ("Blackjack-v1", ["hit", "stick"]),
        ("Taxi-v3", ["south", "pick up"]),
        ("CliffWalking-v1", ["up", "right"]),
        ("FrozenLake-v1", ["left"]),
    ],
)
async def test_shipped_mapping_names_the_actions(name: str, answers: list[str]) -> None:
    adapter = await opened(name)
    item = await adapter.item(0)

    games = await asyncio.gather(*(play(adapter, item, answers) for _ in range(3)))

    assert games[0] == games[1] == games[2]  # the same seed
    opening, *replies, metrics = games[0]
    assert all(answer in opening[0]["content"].lower() for answer in answers)
    assert metrics["invalid_answers"] == 0
    assert metrics["steps"] == len(replies)


async def test_seeds_of_items_differ_and_repeat() -> None:
    first, again = await opened("Blackjack-v1"), await opened("Blackjack-v1")

    items = [await first.item(index) for index in range(20)]

    assert items == [await again.item(index) for index in range(20)]
    assert len({item["seed"] for item in items}) == 20
    held_out = await first.eval_items(5)
    assert {item["seed"] for item in items}.isdisjoint(item["seed"] for item in held_out)


async def test_minigrid_is_played_as_text() -> None:
    pytest.importorskip("minigrid", reason="needs the package minigrid")
    adapter = await opened("minigrid:MiniGrid-Empty-5x5-v0")
    moves = ["forward", "forward", "right", "forward", "forward"]

    opening, *replies, metrics = await play(adapter, await adapter.item(0), moves)

    assert "forward" in opening[0]["content"]
    assert replies[-1].is_done
    assert replies[-1].reward > 0.9
    assert metrics["solved"] == 1.0


async def test_time_limit_of_the_environment_is_a_truncation() -> None:
    limited = {"env_kwargs": {"max_episode_steps": 2, **LAKE["env_kwargs"]}}
    adapter = await opened("FrozenLake-v1", **limited)

    *_, reply, metrics = await play(adapter, await adapter.item(0), ["up", "up"])

    assert reply.is_done
    assert metrics["truncated"] == 1.0


@pytest.mark.parametrize(("ends", "is_done"), [(False, False), (True, True)])
async def test_answer_without_an_action_costs_a_little(ends: bool, is_done: bool) -> None:
    adapter = await opened("FrozenLake-v1", invalid_reward=-0.5, ends_on_invalid=ends)

    _, reply, metrics = await play(adapter, await adapter.item(0), ["up and down"])

    assert (reply.reward, reply.is_done) == (-0.5, is_done)
    assert metrics["invalid_answers"] == 1


REWARDS = {"nan": float("nan"), "none": None, "yes": 1.0, "array": numpy.array([0.5])}


class Echo(gymnasium.Env):  # type: ignore[type-arg]
    """A text environment that breaks on request."""

    action_space = spaces.Text(20)
    observation_space = spaces.Text(20)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return "write yes", {}

    def step(self, action: str) -> Any:
        if action == "raise":
            raise KeyError("a defect of the environment")
        if action == "stop":
            raise StopIteration
        if action == "hang":
            time.sleep(12)
        reward: Any = REWARDS.get(action, 0.0)
        return f"you wrote {action}", reward, action == "yes", False, {}


class StringIoRendering(Echo):
    action_space = spaces.Discrete(2)  # type: ignore[assignment]
    metadata = {"render_modes": ["ansi", "rgb_array"]}  # noqa: RUF012 - as environments write it

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def render(self) -> io.StringIO:  # type: ignore[override]
        return io.StringIO("a board")


class ClosesAfterReset(Echo):
    game: Any = None

    def close(self) -> None:
        self.game.end()


class Continuous(Echo):
    action_space = spaces.Box(0, 1)  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    envs = {
        "Echo-v0": Echo,
        "Continuous-v0": Continuous,
        "ClosesAfterReset-v0": ClosesAfterReset,
        "StringIoRendering-v0": StringIoRendering,
    }
    for name, env_cls in envs.items():
        gymnasium.register(name, env_cls, disable_env_checker=True, order_enforce=False)
    yield
    for name in envs:
        del gymnasium.registry[name]


async def test_text_space_takes_the_text_of_the_answer() -> None:
    adapter = await opened("Echo-v0")

    opening, first, invalid, last, _ = await play(
        adapter, await adapter.item(0), ["<action>no</action>", "y" * 21, "<think>hm</think>yes"]
    )

    assert "at most 20 characters" in opening[0]["content"]
    assert first.messages == "you wrote no"
    assert invalid.reward == -0.1
    assert last.is_done
    assert last.reward == 1.0


async def test_reward_may_be_an_array_of_one_number() -> None:
    adapter = await opened("Echo-v0")

    _, reply, _ = await play(adapter, await adapter.item(0), ["array"])

    assert reply.reward == 0.5


async def test_environment_that_cannot_be_closed_before_a_reset_is_played(
    caplog: pytest.LogCaptureFixture,
) -> None:
    adapter = await opened("ClosesAfterReset-v0")

    assert "ClosesAfterReset-v0 was not closed: AttributeError" in caplog.text
    assert "TEXT" in adapter.prompt


def test_module_of_the_current_folder_is_imported(tmp_path: Path) -> None:
    (tmp_path / "own_games.py").write_text(
        "import gymnasium\n"
        "gymnasium.register('Own-v0', 'gymnasium.envs.toy_text.frozen_lake:FrozenLakeEnv')\n"
    )
    program = (
        "import sys; sys.path[0] = sys.argv.pop(1); from atroposlib.cli.env import main; main()"
    )

    done = subprocess.run(
        [sys.executable, "-c", program, str(REPOSITORY), "gymnasium:own_games:Own-v0", "check"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
    )

    assert done.returncode == 0, done.stdout + done.stderr


async def test_rendering_may_be_a_string_io() -> None:
    adapter = await opened("StringIoRendering-v0")

    opening, *_ = await play(adapter, await adapter.item(0), [])

    assert opening[0]["content"].endswith("a board")


async def test_value_is_shown_if_the_rendering_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StringIoRendering, "render", lambda self: None)
    adapter = await opened("StringIoRendering-v0")

    opening, *_ = await play(adapter, await adapter.item(0), [])

    assert opening[0]["content"].endswith("write yes")


async def test_value_is_shown_if_another_rendering_is_asked_for() -> None:
    adapter = await opened("StringIoRendering-v0", env_kwargs={"render_mode": "rgb_array"})

    opening, *_ = await play(adapter, await adapter.item(0), [])

    assert opening[0]["content"].endswith("write yes")


@pytest.mark.parametrize("rendering", [["a", "board"], numpy.zeros((2, 2, 3), dtype=numpy.uint8)])
async def test_rendering_that_is_no_text_is_named(
    monkeypatch: pytest.MonkeyPatch, rendering: Any
) -> None:
    monkeypatch.setattr(StringIoRendering, "render", lambda self: rendering)
    adapter = await opened("StringIoRendering-v0")

    with pytest.raises(ConfigError, match=f"type {type(rendering).__name__}; expected a text"):
        await play(adapter, await adapter.item(0), [])


async def test_names_of_actions_are_found_whatever_their_spaces() -> None:
    adapter = await opened("FrozenLake-v1", actions={0: " Go  left ", 1: "go\ndown"})

    assert adapter.action_of("<action>go left</action>") == 0
    assert adapter.action_of("I go down") == 1


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ("raise", "EpisodeFailedError"),
        ("stop", "EpisodeFailedError"),
        ("hang", "EpisodeTimeoutError"),
        ("nan", "EpisodeRewardError"),
        ("none", "EpisodeRewardError"),
    ],
)
async def test_broken_environment_fails_its_rollout_and_no_other(
    make_env: Callable[..., Any], answer: str, error: str
) -> None:
    make_env()
    replies = iter(["ok", answer, "yes"])

    limit_s = 4 if answer == "hang" else 60  # steps that must not be late have the same limit
    async with adapter_env(
        "gymnasium:Echo-v0", {}, lambda _: next(replies), episode_retries=0, step_timeout_s=limit_s
    ) as env:
        item = await env.get_next_item()
        with pytest.raises(EpisodeError) as caught:
            await env.collect_trajectory(item)
        rollout, _ = await env.collect_trajectory(item)

    assert type(caught.value).__name__ == error
    assert rollout.rewards == [1.0]
    assert env.episodes_open == 0


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("FrozenLak-v1", {}, "FrozenLak"),
        ("Continuous-v0", {}, "expected a Discrete or a Text space"),
        ("FrozenLake-v1", {"actions": {7: "jump"}}, "has no action 7; expected 0 to 3"),
        ("FrozenLake-v1", {"actions": {0: "left", 2: []}}, "action 2 has no name"),
        ("FrozenLake-v1", {"actions": {0: ["left", " "]}}, "action 0 has no name"),
        ("FrozenLake-v1", {"actions": {0: "go", 1: "Go"}}, "'go' names the actions 0 and 1"),
        ("FrozenLake-v1", {"env_kwargs": {"no_such": 1}}, "no_such"),
        ("Echo-v0", {"observation": "render"}, "has no ansi rendering"),
        ("no_such_module:Env-v0", {}, "no_such_module"),
    ],
)
async def test_wrong_mapping_is_named_before_the_first_rollout(
    name: str, args: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        await opened(name, **args)


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("<action>pick up</action>", 2),
        ("I would rather not go up.\n<action>DOWN</action>", 1),
        ("up", 0),
        ("`Up`.", 0),
        ("I go up", 0),
        ("up or down", None),
        ("<action>up</action> then <action>pick  up</action>", 2),
        ("cup", None),
        ("", None),
    ],
)
def test_find_action(answer: str, number: int | None) -> None:
    assert find_action(answer, {"up": 0, "down": 1, "pick up": 2}) == number


def test_plain_text_marks_highlighted_characters() -> None:
    assert plain_text("\n\x1b[41mS\x1b[0mFF\n\x1b[2K") == "[S]FF"


def test_check_command_is_green(tmp_path: Path) -> None:
    mapping = tmp_path / "lake.yaml"
    mapping.write_text(
        "env_kwargs: {map_name: 4x4}\nactions: {0: west, 1: south, 2: east, 3: north}\n"
    )
    spec = "gymnasium:FrozenLake-v1"

    done = subprocess.run(
        [sys.executable, "-m", "atroposlib.cli.env", spec, "check", "--args", str(mapping)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
    )

    assert done.returncode == 0, done.stdout + done.stderr
