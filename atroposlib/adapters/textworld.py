"""TextWorld: text adventures, made from a seed or loaded from a file.

    index ─► challenge, settings, seed ─► GameMaker ─► game file ─► reset ─► description
                                             (cache)                           │
          score of the game ◄── step(command) ◄── turn of the policy ◄─────────┘

NAME is a challenge such as `tw-simple`, several joined by `+`, or a game file (`.z8`, `.ulx`,
`.json`). Making a game takes seconds, so it happens with its item; the files are kept in a folder
that is removed at the end, and the oldest unused ones are deleted from it. The reward of a turn is
the change of the game's score.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import shutil
import tempfile
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from atroposlib.adapters.interface import (
    Adapter,
    AdapterArgs,
    Episode,
    EpisodeThreads,
    Item,
    finite_reward,
    shown_error,
)
from atroposlib.envs.conversation import ChatMessage, Reply, Turn
from atroposlib.errors import ConfigError, EpisodeFailedError, EpisodeTimeoutError
from atroposlib.utils.text import near_name, texts_in_tag

__all__ = [
    "DEFAULT_SETTINGS",
    "TextWorldAdapter",
    "TextWorldArgs",
    "TextWorldEpisode",
    "command_of",
    "plain_feedback",
    "random_settings",
]

STORY_HEADER_BYTES = 64
STORY_UNITS: Mapping[int, int] = {1: 2, 2: 2, 3: 2, 4: 4, 5: 4, 6: 8, 7: 8, 8: 8}
"""Bytes that the length in the header of a story file is counted in, by version."""
GAME_SUFFIXES = (".z8", ".z5", ".z6", ".ulx", ".json")
EVAL_SEEDS = 1_000_000_000
"""First seed of evaluations; those of training are smaller."""
MAX_COMMAND_CHARACTERS = 100
META_COMMANDS = frozenset(
    (
        *("save", "restore", "restart", "quit", "q", "undo"),
        *("script", "transcript", "noscript", "unscript"),
    )
)
"""Words that address the interpreter: they end games, or read and write files."""
MAKE_TIMEOUT_S = 600.0
"""Time to wait for the games of other episodes: each takes seconds, one at a time."""
CLOSE_S = 12.0
PROMPT = (
    "You play a text adventure. Each of your messages is one command, such as: go north, take "
    "key, open chest, put apple on table, look. Write the command and nothing else."
)
DEFAULT_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "tw-coin_collector": {"level": 5},
    "tw-cooking": {
        "recipe": 1,
        "take": 1,
        "go": 1,
        "open": False,
        "cook": False,
        "cut": False,
        "drop": False,
        "recipe_seed": 0,
        "split": None,
    },
    "tw-simple": {"rewards": "dense", "goal": "detailed", "test": False},
    "tw-treasure_hunter": {"level": 5},
}
"""Settings of each challenge, unless others are given."""

MAX_SEEDS, SEED_STRIDE = 8, 1000
"""Seeds tried for one game, and their distance."""
MAX_ROOMS = 100
"""Rooms of a game that TextWorld 1.7 can make."""
COIN_LEVELS = [
    100 * distractors + length
    for distractors in range(3)
    for length in range(1, MAX_ROOMS // (distractors + 1) + 1)
]
"""Levels of the coin collector, 1 to 300, without those that need more rooms."""

_ART = re.compile(r"[\s_|\\/<>$]*[_|\\/<>$][\s_|\\/<>$]*")
_STATUS = re.compile(r">| {20}")
_UNSAFE = re.compile(r"[^A-Za-z0-9 ,.'\n-]")


class TextWorldArgs(AdapterArgs):
    """Settings of the games, and what the policy reads."""

    settings: dict[str, Any] = Field(
        default_factory=dict,
        description="Settings of the challenge, such as level or recipe; others keep their "
        "default.",
    )
    randomize: bool = Field(
        False, description="Whether settings that are not given are drawn for each game."
    )
    prompt: str = Field(PROMPT, description="Instructions before the first description.")
    show_commands: bool = Field(
        False, description="Whether the commands that the game accepts are listed."
    )
    normalize: bool = Field(
        True, description="Whether the score is divided by its maximum, so that a win earns 1."
    )
    cache_games: int = Field(
        64, ge=1, le=100_000, description="Number of made games that are kept on disk."
    )


def _generated(item: Item) -> tuple[Any, Any]:
    """Return the game of an item and its options, from the first seed for which there is one.

    The generator fails for some seeds; for treasure hunts of level 10, for a third of them.
    """
    import textworld
    from textworld.challenges import CHALLENGES

    seed, num_left = item["seed"], MAX_SEEDS
    while True:
        num_left -= 1
        options = textworld.GameOptions()
        options.seeds = seed
        try:
            return CHALLENGES[item["challenge"]][1](dict(item["settings"]), options), options
        except Exception:  # the package raises errors of many kinds
            if num_left == 0:
                raise
        seed += SEED_STRIDE


def random_settings(challenge: str, source: random.Random) -> dict[str, Any]:
    """Draw the settings of a challenge, over the whole range of its difficulties."""
    if challenge == "tw-simple":
        return {
            "rewards": source.choice(["dense", "balanced", "sparse"]),
            "goal": source.choice(["detailed", "brief", "none"]),
        }
    if challenge == "tw-coin_collector":
        return {"level": source.choice(COIN_LEVELS)}
    if challenge == "tw-treasure_hunter":
        return {"level": source.randint(1, 30)}
    recipe = source.randint(1, 4)
    take = source.randint(0, recipe)
    chances = {name: source.random() < 0.5 for name in ("open", "cook", "drop")}
    return {
        "recipe": recipe,
        "take": take,
        "go": source.choice([1, 6, 9, 12]),
        "cut": chances["cook"] and source.random() < 0.5,
        # A recipe is only drawn where an ingredient has to be taken.
        "recipe_seed": source.randrange(1_000_000) if take else 0,
        **chances,
    }


def command_of(answer: str) -> str:
    """Return the command of an answer: in `<action>` tags, else its first line with text.

    Only letters, digits and simple punctuation are kept: the interpreter is native code, which
    reads a backslash as a command of its own and ends this process at control characters.
    """
    tagged = texts_in_tag(answer, "action")
    text = _UNSAFE.sub("", (tagged[-1] if tagged else answer).replace("\t", " "))
    lines = [line.strip(" \t>`\"'") for line in text.splitlines() if line.strip()]
    return lines[0][:MAX_COMMAND_CHARACTERS] if lines else ""


def plain_feedback(text: str) -> str:
    """Return what a game prints without its banner and status line."""
    lines = [line.rstrip() for line in text.splitlines()]
    kept = [line for line in lines if not _ART.fullmatch(line) and not _STATUS.match(line)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip()


class GameFiles:
    """The made games: a folder with a bounded number of files.

    Args:
        max_games: number of games that are kept; those in use are kept in addition.
    """

    def __init__(self, max_games: int) -> None:
        self._max_games = max_games
        self._folder: Path | None = None
        self._users: OrderedDict[str, int] = OrderedDict()

    def path_of(self, key: str) -> Path:
        """Return the path of a game, in a folder of its own."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="textworld-"))
        return self._folder / key / "game.z8"

    def take(self, key: str) -> None:
        self._users[key] = self._users.get(key, 0) + 1
        self._users.move_to_end(key)

    def give_back(self, key: str) -> None:
        """Note that an episode has ended; delete the oldest games that are not in use."""
        self._users[key] -= 1
        for old in [key for key, users in self._users.items() if not users]:
            if len(self._users) <= self._max_games:
                break
            del self._users[old]
            shutil.rmtree(self.path_of(old).parent, ignore_errors=True)

    def close(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


class TextWorldEpisode(Episode):
    """One game, in a thread of its own."""

    def __init__(self, adapter: TextWorldAdapter, item: Item) -> None:
        super().__init__()
        self._adapter = adapter
        self._item = item
        self._thread = adapter.threads.open()
        self._env: Any = None
        self._score = 0.0
        self._max_score = 1.0
        self._steps = 0
        self._has_game = False

    async def begin(self) -> Sequence[ChatMessage]:
        path = await self._adapter.taken_game(self._item)
        self._has_game = True
        shown = await self._thread.call(self._reset, path)
        return [{"role": "user", "content": f"{self._adapter.args.prompt}\n\n{shown}".strip()}]

    async def reply(self, turn: Turn) -> Reply:
        command = command_of(turn.answer)
        self._steps += 1
        if not command or META_COMMANDS & set(re.split(r"[^a-z]+", command.lower())):
            return Reply("Write one command of the game.")
        shown, reward, is_done = await self._thread.call(self._step, command)
        return Reply(shown, reward=reward, is_done=is_done)

    async def close(self) -> None:
        self.metrics.update(steps=self._steps, score=self._score, max_score=self._max_score)
        try:
            await self._thread.close(self._close)
        finally:
            if self._has_game:
                self._adapter.give_back(self._item)

    def _reset(self, path: str) -> str:
        # Loading uses the parser with which games are made; the package has one.
        with self._adapter.threads.alone(MAKE_TIMEOUT_S):
            self._env = self._adapter.start_game(path)
            self._env.seed(self._item["seed"])
            state = self._env.reset()
        self._max_score = float(state.get("max_score") or 1)
        objective = state.get("objective")
        text = self._text_of(state)
        return f"{objective}\n\n{text}" if objective and objective not in text else text

    def _step(self, command: str) -> tuple[str, float, bool]:
        state, score, is_done = self._env.step(command)
        checked = finite_reward(score, f"step of {self._adapter.name}")
        change, self._score = checked - self._score, checked
        self.metrics["won"] = float(bool(state.get("won")))
        if self._adapter.args.normalize:
            change /= self._max_score
        return self._text_of(state), change, bool(is_done)

    def _text_of(self, state: Mapping[str, Any]) -> str:
        parts = [plain_feedback(str(state.get("feedback") or ""))]
        parts.append(f"Score: {self._score:g} of {self._max_score:g}.")
        parts.append(" ".join(str(state.get("inventory") or "").split()))
        if self._adapter.args.show_commands:
            commands = state.get("admissible_commands") or ()
            parts.append(f"Commands: {', '.join(commands)}.")
        return "\n\n".join(part for part in parts if part)

    def _close(self) -> None:
        if self._env is not None:
            self._env.close()


class TextWorldAdapter(Adapter):
    """Challenges, or a game file; an item is a game.

    Attributes:
        names: the challenges; empty for a game file.
    """

    args_cls = TextWorldArgs
    begin_timeout_s = MAKE_TIMEOUT_S
    default_settings: ClassVar[Mapping[str, Any]] = {
        "max_turns": 50,
        "max_token_length": 16_384,
        "max_turn_tokens": 512,
    }
    args: TextWorldArgs

    def __init__(self, name: str, args: TextWorldArgs, **settings: Any) -> None:
        super().__init__(name, args, **settings)
        self.names = () if Path(name).suffix in GAME_SUFFIXES else tuple(name.split("+"))
        self.threads = EpisodeThreads(name)
        self._files = GameFiles(args.cache_games)
        self._making: dict[str, asyncio.Lock] = {}
        self._is_closed = False

    async def open(self) -> None:
        await asyncio.to_thread(self._check_names)

    async def close(self) -> None:
        self._is_closed = True
        await asyncio.to_thread(self._close)

    async def item(self, index: int) -> Item:
        item = self._item(random.Random(f"{self.seed}:{index}").randrange(EVAL_SEEDS))
        await self.taken_game(item)
        self.give_back(item)
        return item

    async def eval_items(self, limit: int) -> Sequence[Item]:
        return [self._item(EVAL_SEEDS + i) for i in range(limit)]

    def start(self, item: Item) -> TextWorldEpisode:
        return TextWorldEpisode(self, item)

    def gold_answer(self, item: Item) -> Sequence[str] | None:
        """Return the walkthrough of a made game."""
        if not self.names:
            return None
        path = self._files.path_of(_key_of(item))
        if not path.is_file():
            self._make(item, path)
        with self.threads.alone(MAKE_TIMEOUT_S):
            env = self.start_game(str(path))
            walkthrough = env.reset().get("extra.walkthrough")
        try:
            return list(walkthrough) if walkthrough else None
        finally:
            env.close()

    async def taken_game(self, item: Item) -> str:
        """Return the path of an item's game, which is made if needed; `give_back` ends its use."""
        if not self.names:
            return self.name
        key = _key_of(item)
        self._files.take(key)
        try:
            async with self._making.setdefault(key, asyncio.Lock()):
                path = self._files.path_of(key)
                if not path.is_file():
                    thread = self.threads.open()
                    try:
                        await thread.call(self._make, item, path)
                    finally:
                        await thread.close()
        except BaseException:
            self.give_back(item)
            raise
        finally:
            self._making.pop(key, None)
        return str(path)

    def give_back(self, item: Item) -> None:
        if self.names:
            self._files.give_back(_key_of(item))

    def start_game(self, path: str) -> Any:
        """Return the environment of a game file, not reset yet."""
        import textworld

        infos = textworld.EnvInfos(
            objective=True,
            score=True,
            max_score=True,
            inventory=True,
            won=True,
            lost=True,
            admissible_commands=self.args.show_commands,
            extras=["walkthrough"],
        )
        return textworld.start(path, infos)

    def _item(self, seed: int) -> Item:
        if not self.names:
            return {"seed": seed}
        source = random.Random(f"settings {seed}")
        challenge = source.choice(self.names)
        drawn = random_settings(challenge, source) if self.args.randomize else {}
        settings = {**DEFAULT_SETTINGS[challenge], **drawn, **self.args.settings}
        return {"seed": seed, "challenge": challenge, "settings": settings}

    def _make(self, item: Item, path: Path) -> None:
        """Make the game of an item; the file appears once it is complete.

        One that an abandoned call has made meanwhile is kept, since others may be loading it.
        """
        from textworld.generator import compile_game

        unfinished = Path(tempfile.mkdtemp(dir=_made_folder(path.parent.parent)))
        try:
            with self.threads.alone(MAKE_TIMEOUT_S):  # the package has one generator for all games
                if self._is_closed:
                    raise EpisodeFailedError("the task set has been closed")
                if not path.is_file():
                    game, options = _generated(item)
                    options.path = str(unfinished / path.name)
                    compile_game(game, options)
                    shutil.rmtree(path.parent, ignore_errors=True)
                    unfinished.rename(path.parent)
        except Exception as error:  # any exception of the generator fails this rollout only
            shutil.rmtree(unfinished, ignore_errors=True)
            raise EpisodeFailedError(
                f"{item['challenge']} made no game with {item['settings']}: {shown_error(error)}"
            ) from error
        shutil.rmtree(unfinished, ignore_errors=True)

    def _close(self) -> None:
        with contextlib.suppress(EpisodeTimeoutError), self.threads.alone(CLOSE_S):
            pass  # the compiler of a game that is being made has ended
        self._files.close()

    def _check_names(self) -> None:
        from jericho import UnsupportedGameWarning  # the interpreter of the package
        from textworld.challenges import CHALLENGES

        # Made games report their score themselves.
        warnings.filterwarnings("ignore", category=UnsupportedGameWarning)

        if not self.names and not Path(self.name).is_file():
            raise ConfigError(f"no game file {self.name}")
        if Path(self.name).suffix.startswith(".z"):
            _check_story(Path(self.name))
        for name in self.names:
            if name not in DEFAULT_SETTINGS or name not in CHALLENGES:
                raise ConfigError(
                    f"textworld has no challenge {name!r}"
                    f"{near_name(name, DEFAULT_SETTINGS) or ', and no such game file exists'}"
                )
        known = {name for challenge in self.names for name in DEFAULT_SETTINGS[challenge]}
        for setting in self.args.settings:
            if setting not in known:
                raise ConfigError(
                    f"settings: {self.name} has no setting {setting!r}{near_name(setting, known)}; "
                    f"it has {', '.join(sorted(known))}"
                )


def _check_story(path: Path) -> None:
    """Raise `ConfigError` for a file at which the interpreter would end the whole process.

    Source: The Z-Machine Standards Document, version 1.1, section 11.
    """
    with path.open("rb") as file:
        header = file.read(STORY_HEADER_BYTES)
    if len(header) < STORY_HEADER_BYTES or header[0] not in STORY_UNITS:
        raise ConfigError(f"{path} is not a game of the Z-machine")
    num_bytes = int.from_bytes(header[26:28], "big") * STORY_UNITS[header[0]]
    if num_bytes > path.stat().st_size:
        raise ConfigError(
            f"{path} is incomplete: it has {path.stat().st_size} bytes of {num_bytes}"
        )


def _made_folder(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _key_of(item: Item) -> str:
    """Return the folder name of an item's game."""
    settings = "-".join(f"{k}={v}" for k, v in sorted(item["settings"].items()))
    return re.sub(r"[^A-Za-z0-9_=.-]", "_", f"{item['challenge']}-{item['seed']}-{settings}")[:200]
