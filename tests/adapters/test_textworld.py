"""The adapter of TextWorld and its environment, against the installed package."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("textworld", reason="needs the package textworld")

from textworld.generator import compile_game

from atroposlib.adapters.registry import make_adapter
from atroposlib.adapters.textworld import (
    DEFAULT_SETTINGS,
    TextWorldAdapter,
    TextWorldEpisode,
    command_of,
    plain_feedback,
    random_settings,
)
from atroposlib.envs.conversation import Turn
from atroposlib.errors import ConfigError, EpisodeFailedError
from environments.game_environments.textworld_env.textworld_env import (
    TextWorldEnv,
    TextWorldEnvConfig,
)
from tests.adapters.playing import adapter_env, roll_out

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "environments/game_environments/textworld_env/textworld_env.py"
EASY = {"settings": {"level": 2}}


async def opened(name: str, **args: Any) -> TextWorldAdapter:
    adapter = make_adapter(f"textworld:{name}", args, seed=3)
    await adapter.open()
    assert isinstance(adapter, TextWorldAdapter)
    return adapter


async def play(adapter: TextWorldAdapter, item: Any, commands: list[str]) -> list[Any]:
    episode = adapter.start(item)
    seen: list[Any] = [await episode.begin()]
    for index, command in enumerate(commands):
        seen.append(await episode.reply(Turn(command, index, ())))
    await episode.close()
    return [*seen, episode.metrics]


async def test_walkthrough_wins_the_game_with_exact_tokens(make_env: Callable[..., Any]) -> None:
    make_env()  # puts the character tokenizer in place
    replies: list[str] = ["ok"]

    async with adapter_env(
        "textworld:tw-treasure_hunter", EASY, lambda _: replies.pop(0), group_size=1
    ) as env:
        item = await env.get_next_item()
        walkthrough = env.check_gold_answer(item)
        replies += ["dance", *walkthrough]
        [rollout], group = await roll_out(env, item)

    assert group["scores"] == [1.0]
    assert rollout.metrics["won"] == 1.0
    assert len(rollout.rewards) == len(walkthrough) + 1
    assert "Score: 0 of 1." in rollout.messages[0]["content"]


async def test_rollouts_of_an_item_start_alike_from_one_file() -> None:
    adapter = await opened("tw-coin_collector", **EASY)
    item = await adapter.item(0)

    games = await asyncio.gather(*(play(adapter, item, ["look", "go east"]) for _ in range(4)))

    assert all(game == games[0] for game in games)
    await adapter.close()


async def test_oldest_files_are_deleted_and_the_folder_at_the_end() -> None:
    adapter = await opened("tw-treasure_hunter", settings={"level": 1}, cache_games=1)
    first = adapter.start(await adapter.item(0))
    await first.begin()
    folder = adapter._files.path_of("x").parents[1]

    await adapter.item(1)
    kept_in_use = len(list(folder.iterdir()))
    await first.close()

    assert kept_in_use == 1  # the other one was deleted, since the first is played
    assert len(list(folder.iterdir())) <= 1
    await adapter.close()
    assert not folder.exists()


async def test_game_file_is_played(tmp_path: Path) -> None:
    maker = await opened("tw-treasure_hunter", settings={"level": 1})
    item = await maker.item(0)
    made = Path(await maker.taken_game(item))
    for file in made.parent.iterdir():
        shutil.copy(file, tmp_path / file.name)
    walkthrough = list(maker.gold_answer(item) or ())
    maker.give_back(item)
    await maker.close()
    adapter = await opened(str(tmp_path / made.name))

    *_, last, metrics = await play(adapter, await adapter.item(0), walkthrough)

    assert last.is_done
    assert metrics["won"] == 1.0
    await adapter.close()


async def test_game_that_cannot_be_made_fails_its_item() -> None:
    adapter = await opened("tw-coin_collector", settings={"level": 9999})

    with pytest.raises(EpisodeFailedError, match="tw-coin_collector made no game"):
        await adapter.item(0)
    await adapter.close()


async def test_game_that_an_abandoned_call_makes_is_not_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled, begun, go_on = [], threading.Semaphore(0), threading.Event()

    def compile_slowly(game: Any, options: Any) -> None:
        assert go_on.wait(60)
        compiled.append(options.path)
        compile_game(game, options)

    def make(item: Any, path: Path) -> None:
        begun.release()
        TextWorldAdapter._make(adapter, item, path)

    monkeypatch.setattr("textworld.generator.compile_game", compile_slowly)
    adapter = await opened("tw-treasure_hunter", settings={"level": 1})
    monkeypatch.setattr(adapter, "_make", make)
    item = adapter._item(1)
    first = asyncio.ensure_future(adapter.taken_game(item))
    await asyncio.to_thread(begun.acquire)
    second = asyncio.ensure_future(adapter.taken_game(item))
    first.cancel()
    await asyncio.to_thread(begun.acquire)
    go_on.set()

    assert (await second).endswith(".z8")
    assert len(compiled) == 1
    await adapter.close()


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("tw-simpel", {}, "did you mean tw-simple"),
        ("no/such.z8", {}, "no game file"),
        ("tw-simple", {"settings": {"level": 3}}, "no setting 'level'"),
    ],
)
async def test_wrong_settings_are_named_before_the_first_rollout(
    name: str, args: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        await opened(name, **args)


async def test_broken_story_is_named_at_which_the_interpreter_ends_the_process(
    tmp_path: Path,
) -> None:
    adapter = await opened("tw-simple")
    made = Path(await adapter.taken_game(await adapter.item(0)))
    story = await asyncio.to_thread(made.read_bytes)
    await adapter.close()
    broken = {b"": "not a game", b"x" * 80: "not a game", story[:-1000]: "is incomplete"}

    for content, message in broken.items():
        path = tmp_path / "game.z8"
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            await opened(str(path))

    path.write_bytes(story)
    whole = await opened(str(path))
    episode = whole.start(await whole.item(0))
    assert await episode.begin()
    await episode.close()
    await whole.close()


@pytest.mark.parametrize("challenge", list(DEFAULT_SETTINGS))
def test_random_settings_are_those_of_the_challenge(challenge: str) -> None:
    drawn = [random_settings(challenge, random.Random(seed)) for seed in range(50)]

    assert all(set(settings) <= set(DEFAULT_SETTINGS[challenge]) for settings in drawn)
    assert len({str(settings) for settings in drawn}) > 5


async def test_seed_without_a_game_is_replaced() -> None:
    adapter = await opened("tw-treasure_hunter")
    item = {"seed": 8, "challenge": "tw-treasure_hunter", "settings": {"level": 10}}

    path = await adapter.taken_game(item)

    assert path.endswith(".z8")
    await adapter.close()


async def test_episodes_of_several_games_begin_at_once() -> None:
    adapter = await opened("tw-simple+tw-cooking", randomize=True)
    items = [await adapter.item(index) for index in range(3)]
    episodes = [adapter.start(item) for item in items * 3]

    openings = await asyncio.gather(*(episode.begin() for episode in episodes))

    assert all("Score: 0 of" in str(opening[0]["content"]) for opening in openings)
    for episode in episodes:
        await episode.close()
    await adapter.close()


@pytest.mark.filterwarnings("ignore:Not enough variation")  # of the package, in large games
async def test_hardest_random_settings_make_games() -> None:
    cooking = [random_settings("tw-cooking", random.Random(seed)) for seed in range(20)]
    without_take = next(settings for settings in cooking if not settings["take"])
    coins = [random_settings("tw-coin_collector", random.Random(seed)) for seed in range(500)]
    hardest = max(coins, key=lambda settings: int(settings["level"]))

    for challenge, settings in (("tw-cooking", without_take), ("tw-coin_collector", hardest)):
        adapter = await opened(challenge, settings=settings)

        assert (await adapter.item(0))["settings"].items() >= settings.items()
        await adapter.close()


@pytest.mark.parametrize(
    ("answer", "command"),
    [
        ("go north", "go north"),
        ("\n> take key\nand leave", "take key"),
        ("I should look. <action>look</action>", "look"),
        ("", ""),
        ("x" * 500, "x" * 100),
        ("go \x01\x02\x00north é\x1b\\d", "go north d"),
    ],
)
def test_command_of(answer: str, command: str) -> None:
    assert command_of(answer) == command


def test_plain_feedback_has_neither_banner_nor_status_line() -> None:
    text = "\n  ____ \n |$$ \\|\nHello.\n\n\n\n-= Hall =-\n>            -= Hall =-0/1\n"

    assert plain_feedback(text) == "Hello.\n\n-= Hall =-"


def test_settings_of_the_environment_become_those_of_the_adapter() -> None:
    config = TextWorldEnvConfig(challenge_names=["tw-simple", "tw-cooking"], max_steps=7)

    assert config.adapter == "textworld:tw-simple+tw-cooking"
    assert config.adapter_args == {"randomize": True, "normalize": False}
    assert config.max_turns == 7
    published, _ = TextWorldEnv.config_init()
    assert (published.group_size, published.max_token_length) == (16, 32768)
    assert (
        published.challenge_names == list(DEFAULT_SETTINGS) or len(published.challenge_names) == 4
    )


@pytest.mark.parametrize(
    "program",
    [
        ["-m", "atroposlib.cli.env", "textworld:tw-treasure_hunter", "check", "--args",
         "settings={level: 1}", "--env.max_turns", "6", "--env.num_eval_items", "2"],
        [str(SCRIPT), "check"],
    ],
)  # fmt: skip
def test_check_command_is_green(tmp_path: Path, program: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *program],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
    )

    assert done.returncode == 0, done.stdout + done.stderr


async def test_hostile_commands_neither_end_the_process_nor_write_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = random.Random(3)
    hostile = ["save", "restore", "script", "\\x", "\\d", "\x00", "quit", "restart", ""]
    letters = [chr(code) for code in range(1, 0x800)]
    hostile += ["".join(source.choices(letters, k=source.randrange(300))) for _ in range(300)]

    adapter = make_adapter("textworld:tw-coin_collector", {"settings": {"level": 1}}, seed=0)
    await adapter.open()
    episode = adapter.start(await adapter.item(0))
    assert isinstance(episode, TextWorldEpisode)
    await episode.begin()
    replies = [await episode.reply(Turn(text, i, ())) for i, text in enumerate(hostile)]
    await episode.close()
    await adapter.close()

    assert all(reply.messages or reply.is_done for reply in replies)
    assert not await asyncio.to_thread(lambda: list(tmp_path.iterdir()))


@pytest.mark.parametrize("command", ["quit", "q", "look. Q", "q, look"])
async def test_game_is_not_left_by_a_command(command: str) -> None:
    adapter = make_adapter("textworld:tw-coin_collector", {"settings": {"level": 1}}, seed=0)
    await adapter.open()
    episode = adapter.start(await adapter.item(0))
    assert isinstance(episode, TextWorldEpisode)
    await episode.begin()

    await episode.reply(Turn(command, 0, ()))
    after = await episode.reply(Turn("inventory", 1, ()))
    await episode.close()
    await adapter.close()

    assert "You are carrying nothing" in str(after.messages)  # and no question
    assert "yes or no" not in str(after.messages)
