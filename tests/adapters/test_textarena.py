"""The adapter of TextArena, against the installed games."""

from __future__ import annotations

import asyncio
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("textarena", reason="needs the package textarena")

import textarena
from aiohttp import web
from aiohttp.test_utils import TestServer
from textarena.envs.registration import ENV_REGISTRY, EnvSpec

from atroposlib.adapters.registry import make_adapter
from atroposlib.adapters.textarena import TextArenaAdapter, legal_move
from atroposlib.envs.conversation import Turn
from atroposlib.errors import ConfigError, EpisodeConnectionError, EpisodeError
from tests.adapters.playing import adapter_env, roll_out
from tests.fakes import ScriptedEngine

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
GUESS = "textarena:GuessTheNumber-v0"


def guess(prompt: str) -> str:
    """Halve the interval that the hints leave."""
    low, high = 1, 20
    for guessed, hint in re.findall(
        r"\[(\d+)\](?:(?!\[\d).)*?number is (lower|higher)", prompt, re.S
    ):
        low, high = (low, int(guessed) - 1) if hint == "lower" else (int(guessed) + 1, high)
    return f"[{(low + high) // 2}]"


async def opened(spec: str, **args: Any) -> TextArenaAdapter:
    adapter = make_adapter(spec, args, seed=3)
    await adapter.open()
    assert isinstance(adapter, TextArenaAdapter)
    return adapter


async def play(adapter: TextArenaAdapter, item: Any, moves: list[str]) -> list[Any]:
    """Return the first messages and the replies of a game."""
    episode = adapter.start(item)
    seen: list[Any] = [await episode.begin()]
    for index, move in enumerate(moves):
        seen.append(await episode.reply(Turn(move, index, ())))
        if seen[-1].is_done:
            break
    await episode.close()
    return seen


async def test_game_of_one_player_is_won(make_env: Callable[..., Any]) -> None:
    make_env()  # puts the character tokenizer in place

    async with adapter_env(GUESS, {}, guess) as env:
        rollouts, group = await roll_out(env)

    assert group["scores"] == [1.0, 1.0]
    assert rollouts[0].messages[0] == rollouts[1].messages[0]
    assert rollouts[0].metrics["invalid_move"] == 0.0


async def test_items_depend_on_the_seed_only() -> None:
    first, again = await opened(GUESS), await opened(GUESS)

    items = [await first.item(index) for index in range(4)]

    assert items == [await again.item(index) for index in range(4)]
    assert len({item["seed"] for item in items}) == 4


@pytest.mark.parametrize("name", ["2048-v0", "KuhnPoker-v0", "Sokoban-v0", "TicTacToe-v0"])
async def test_games_at_the_same_time_go_alike(name: str) -> None:
    adapter = await opened(f"textarena:{name}")
    item = await adapter.item(0)
    moves = {"2048-v0": ["[up]", "[left]"] * 5, "Sokoban-v0": ["[up]", "[left]"] * 3}
    chosen = moves.get(name, ["[check]", "[call]", "[4]", "[0]"])

    games = await asyncio.gather(*(play(adapter, item, chosen) for _ in range(6)))

    assert all(game == games[0] for game in games)


async def test_global_generator_is_left_alone() -> None:
    adapter = await opened(GUESS)
    random.seed(7)
    expected = random.Random(7).random()

    await play(adapter, await adapter.item(0), ["[3]", "[4]"])

    assert random.random() == expected


async def test_second_invalid_move_loses() -> None:
    adapter = await opened("textarena:TicTacToe-v0")
    episode = adapter.start(await adapter.item(0))
    await episode.begin()

    first = await episode.reply(Turn("nothing", 0, ()))
    second = await episode.reply(Turn("nothing", 1, ()))
    await episode.close()

    assert "invalid move" in first.messages
    assert not first.is_done
    assert second.is_done
    assert second.reward == -1.0
    assert episode.metrics["invalid_move"] == 1.0


@pytest.mark.parametrize("name", ["Countdown-v0", "Cryptarithm-v0", "Slitherlink-v0"])
async def test_invalid_moves_of_games_that_exchange_reward_and_reason_are_scored(
    name: str,
) -> None:
    adapter = await opened(f"textarena:{name}")

    *_, last = await play(adapter, await adapter.item(0), ["nothing"] * 40)

    assert last.is_done
    assert 0.0 <= last.reward < 1.0


async def test_game_without_a_check_of_its_players_is_not_played_alone() -> None:
    adapter = await opened("textarena:PublicGoodsGame-v0", opponent_moves=["[1]"])

    assert adapter.num_players == 2


@pytest.mark.parametrize("seat", [0, 1])
async def test_random_opponent_plays_legal_moves_to_the_end(seat: int) -> None:
    adapter = await opened("textarena:TicTacToe-v0", seat=seat)
    rewards = []
    for index in range(12):
        episode = adapter.start(await adapter.item(index))
        shown = (await episode.begin())[0]["content"]
        for turn in range(9):
            free = shown.rpartition("Available Moves:")[2]
            move = re.findall(r"\[\d\]", free)[0]
            reply = await episode.reply(Turn(move, turn, ()))
            if reply.is_done:
                break
            shown = reply.messages
        rewards.append(reply.reward)
        assert episode.metrics["invalid_move"] == 0.0
        await episode.close()

    assert set(rewards) <= {-1.0, 0.0, 1.0}
    assert len(set(rewards)) > 1


def test_legal_move_leaves_the_game_as_it_is() -> None:
    env = textarena.make("TicTacToe-v0-raw")
    env.reset(num_players=2, seed=0)
    env.step("[4]")
    before = str(env.state.game_state)

    moves = {legal_move(env, [f"[{n}]" for n in (4, 5)], random.Random(n)) for n in range(8)}

    assert moves == {"[5]"}
    assert str(env.state.game_state) == before


async def test_model_opponent_is_asked_for_its_moves() -> None:
    def opponent(prompt: str) -> str:
        assert "[0] is taken" not in prompt
        free = prompt.rpartition("Available Moves:")[2]
        return "<think>[0] is taken.</think>" + re.findall(r"\[\d\]", free)[-1]

    async with ScriptedEngine(opponent) as engine:
        adapter = await opened(
            "textarena:TicTacToe-v0",
            opponent="model",
            opponent_base_url=engine.base_url,
            opponent_model="m",
        )
        game = await play(adapter, await adapter.item(0), ["[0]", "[1]", "[2]"])
        await adapter.close()

    assert "placed their symbol (X) in cell 8" in game[1].messages
    assert game[-1].is_done
    assert game[-1].reward == 1.0


async def test_opponent_that_does_not_answer_fails_the_rollout() -> None:
    adapter = await opened(
        "textarena:TicTacToe-v0",
        opponent="model",
        opponent_base_url="http://127.0.0.1:9/v1",
        opponent_model="m",
    )

    with pytest.raises(EpisodeError, match="opponent's API failed"):
        await play(adapter, await adapter.item(0), ["[0]"])
    await adapter.close()


@pytest.mark.parametrize("status", [200, 401, 404])
async def test_opponent_whose_address_or_model_is_wrong_is_named(status: int) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="<html>a page</html>", content_type="text/html", status=status)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        adapter = await opened(
            "textarena:TicTacToe-v0",
            opponent="model",
            opponent_base_url=str(server.make_url("/")),
            opponent_model="m",
        )

        with pytest.raises(ConfigError, match=f"opponent.* {server.make_url('/')} .*"):
            await play(adapter, await adapter.item(0), ["[0]"])
        await adapter.close()


@pytest.mark.parametrize("status", [200, 401, 404])
async def test_opponent_that_refuses_after_it_has_answered_fails_the_rollout(status: int) -> None:
    answers = [web.json_response({"choices": [{"message": {"content": "[1]"}}]})]

    async def answer(_: web.Request) -> web.Response:
        page = web.Response(text="<html>a page</html>", content_type="text/html", status=status)
        return answers.pop() if answers else page

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        adapter = await opened(
            "textarena:TicTacToe-v0",
            opponent="model",
            opponent_base_url=str(server.make_url("/")),
            opponent_model="m",
        )

        with pytest.raises(EpisodeConnectionError, match="opponent"):
            await play(adapter, await adapter.item(0), ["[0]", "[2]"])
        await adapter.close()


class BrokenGame(textarena.Env):  # type: ignore[misc]  # an untyped base
    """Breaks in the way of its first move."""

    def reset(self, num_players: int, seed: int | None = None) -> None:
        self.state = textarena.SinglePlayerState(num_players=num_players, seed=seed, max_turns=9)
        self.state.reset(game_state={}, player_prompt_function=lambda **_: "break")

    def step(self, action: str) -> Any:
        if action == "raise":
            raise KeyError("a defect of the game")
        if action == "hang":
            time.sleep(12)
        if action in ("nan", "none"):
            self.state.set_outcome(reward=float("nan") if action == "nan" else 0.0)
            if action == "none":
                self.state.rewards = None
        elif action == "win":
            self.state.set_outcome(reward=1)
        return self.state.step()


class SlowGame(BrokenGame):
    """Takes a while to start, as those that draw a solvable board."""

    def reset(self, num_players: int, seed: int | None = None) -> None:
        time.sleep(0.2)
        super().reset(num_players, seed)


async def test_games_that_start_slowly_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(ENV_REGISTRY, "Slow-v0", EnvSpec("Slow-v0", SlowGame, None, {}))
    adapter = make_adapter("textarena:Slow-v0", {}, seed=0, step_timeout_s=0.1)
    await adapter.open()
    item = await adapter.item(0)
    episodes = [adapter.start(item) for _ in range(3)]

    begun = await asyncio.gather(*(episode.begin() for episode in episodes))
    for episode in episodes:
        await episode.close()

    assert len(begun) == 3
    assert adapter.begin_timeout_s is not None
    assert adapter.begin_timeout_s > adapter.step_timeout_s


@pytest.fixture
def broken_game() -> Iterator[str]:
    ENV_REGISTRY["Broken-v0"] = EnvSpec("Broken-v0", BrokenGame, None, {})
    yield "textarena:Broken-v0"
    del ENV_REGISTRY["Broken-v0"]


@pytest.mark.parametrize(
    ("move", "error"),
    [
        ("raise", "EpisodeFailedError"),
        ("hang", "EpisodeTimeoutError"),
        ("nan", "EpisodeRewardError"),
        ("none", "EpisodeRewardError"),
    ],
)
async def test_broken_game_fails_its_rollout_and_no_other(
    make_env: Callable[..., Any], broken_game: str, move: str, error: str
) -> None:
    make_env()
    replies = iter(["ok", move, "win"])

    limit_s = 4 if move == "hang" else 60  # steps that must not be late have the same limit
    async with adapter_env(
        broken_game, {}, lambda _: next(replies), episode_retries=0, step_timeout_s=limit_s
    ) as env:
        item = await env.get_next_item()
        with pytest.raises(EpisodeError) as caught:
            await env.collect_trajectory(item)
        rollout, _ = await env.collect_trajectory(item)

    assert type(caught.value).__name__ == error
    assert rollout.rewards == [1.0]


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("GuessTheNumbr-v0", {}, "did you mean GuessTheNumber"),
        ("GuessTheNumber-v0", {"env_kwargs": {"no": 1}}, "failed: TypeError"),
        ("GuessTheNumber-v0", {"num_players": 2}, "cannot start with 2 players"),
        ("TicTacToe-v0", {"seat": 2}, "has the seats 0 to 1"),
        ("IteratedPrisonersDilemma-v0", {}, "opponent_moves"),
        ("QuantumTicTacToe-v0", {}, "has 2 players: .* opponent_moves"),
        ("UsedCarNegotiation-v0", {}, "FileNotFoundError: .*blue_book.txt"),  # it is not packaged
        ("TwentyQuestions-v0", {}, "failed: ValueError"),  # it asks a model itself
        ("TicTacToe-v0", {"opponent": "model"}, "opponent_base_url and opponent_model"),
    ],
)
async def test_wrong_settings_are_named_before_the_first_rollout(
    name: str, args: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        await opened(f"textarena:{name}", **args)


def test_check_command_is_green(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "atroposlib.cli.env", GUESS, "check"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
    )

    assert done.returncode == 0, done.stdout + done.stderr
