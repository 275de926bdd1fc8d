"""Gymnasium environments as conversations: observations as text, answers as actions.

    reset(seed) ─► prompt + observation ─► turn ─► action ─► step ─► reward, observation ─► …

A mapping says how: the prompt, the names of the actions, the form of observations. Mappings of
common environments are in `gymnasium_mappings.yaml`; `--args FILE` gives another one. Every
environment whose actions are a `Discrete` or a `Text` space can be played, also without a mapping.
"""

from __future__ import annotations

import fnmatch
import importlib.resources
import importlib.util
import io
import logging
import random
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml
from pydantic import Field

from atroposlib.adapters.interface import (
    Adapter,
    AdapterArgs,
    Episode,
    EpisodeThreads,
    Item,
    finite_reward,
)
from atroposlib.envs.conversation import ChatMessage, Reply, Turn
from atroposlib.errors import ConfigError
from atroposlib.utils.text import texts_in_tag

__all__ = ["GymnasiumAdapter", "GymnasiumArgs", "GymnasiumEpisode", "find_action", "plain_text"]

logger = logging.getLogger(__name__)

EVAL_SEEDS = 1_000_000_000
"""First seed of evaluations; those of training are smaller."""
MAX_ACTIONS = 1000
MAX_ACTION_CHARACTERS = 100_000

_HIGHLIGHTED = re.compile(r"\x1b\[[0-9;]*m([^\x1b]*)\x1b\[0m")
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class GymnasiumArgs(AdapterArgs):
    """The environment and its mapping; fields that are not given come from the shipped mapping."""

    env_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of gymnasium.make, such as map_name."
    )
    prompt: str | None = Field(
        None, description="First message; {actions} stands for the names of the actions."
    )
    actions: dict[int, str | list[str]] | None = Field(
        None, description="Names of each action by its number, for a Discrete space."
    )
    observation: Literal["auto", "render", "str", "value"] = Field(
        "auto",
        description="Text of an observation: the ansi rendering, str() of the environment, or the "
        "value; auto is the first of render and value that the environment has.",
    )
    observation_template: str = Field(
        "{text}",
        description="Message with an observation; {text}, {value}, {info} and {value[0]} are "
        "replaced.",
    )
    invalid_reward: float = Field(
        -0.1, allow_inf_nan=False, description="Reward of an answer that names no action."
    )
    ends_on_invalid: bool = Field(
        False, description="Whether an answer that names no action ends the game."
    )
    solved_above: float = Field(
        0.0, allow_inf_nan=False, description="Return above which the metric `solved` is 1."
    )


def shipped_mapping(env_id: str) -> dict[str, Any]:
    """Return the shipped mapping whose pattern matches an environment id; empty if none does."""
    text = importlib.resources.files("atroposlib.adapters").joinpath("gymnasium_mappings.yaml")
    mappings: dict[str, dict[str, Any]] = yaml.safe_load(text.read_text(encoding="utf-8"))
    bare = env_id.rpartition(":")[2]
    return next((m for pattern, m in mappings.items() if fnmatch.fnmatch(bare, pattern)), {})


def _make_importable(module: str) -> None:
    """Let a module of the current folder be imported, which is not on the path of a command."""
    package, folder = module.partition(".")[0], Path.cwd()
    is_here = (folder / f"{package}.py").is_file() or (folder / package).is_dir()
    if package and is_here and importlib.util.find_spec(package) is None:
        sys.path.append(str(folder))


def plain_text(rendering: str) -> str:
    """Return a rendering without terminal codes; highlighted characters are put in brackets."""
    return _ESCAPE.sub("", _HIGHLIGHTED.sub(r"[\1]", rendering)).strip("\n")


def find_action(answer: str, actions: Mapping[str, int]) -> int | None:
    """Return the action that an answer names; None if it names none, or several.

    Args:
        answer: text of the policy; within `<action>` tags, or the whole answer.
        actions: number by lower-case name.
    """
    tagged = texts_in_tag(answer, "action")
    text = " ".join((tagged[-1] if tagged else answer).lower().split())
    if text.strip(" .\"'`*") in actions:
        return actions[text.strip(" .\"'`*")]
    names = sorted(actions, key=len, reverse=True)  # "pick up" before "up"
    pattern = "|".join(rf"(?<![\w-]){re.escape(name)}(?![\w-])" for name in names)
    found = {actions[name] for name in re.findall(pattern, text)}
    return found.pop() if len(found) == 1 else None


def numbers_by_name(names: Mapping[int, Sequence[str]]) -> dict[str, int]:
    """Return the number of each name of an action, in the form that `find_action` takes.

    Raises:
        ConfigError: an action has no name, or two actions have the same one.
    """
    numbers: dict[str, int] = {}
    for number, given in names.items():
        plain = [" ".join(name.lower().split()) for name in given]
        if not all(plain) or not plain:
            raise ConfigError(f"actions: action {number} has no name, got {list(given)}")
        for name in plain:
            if numbers.setdefault(name, number) != number:
                raise ConfigError(
                    f"actions: {name!r} names the actions {numbers[name]} and {number}"
                )
    return numbers


class GymnasiumEpisode(Episode):
    """One episode of an environment, in a thread of its own."""

    def __init__(self, adapter: GymnasiumAdapter, seed: int) -> None:
        super().__init__()
        self._adapter = adapter
        self._seed = seed
        self._thread = adapter.threads.open()
        self._env: Any = None
        self._return = 0.0
        self._steps = 0
        self._num_invalid = 0

    async def begin(self) -> Sequence[ChatMessage]:
        observation = await self._thread.call(self._reset)
        prompt = self._adapter.prompt
        return [{"role": "user", "content": f"{prompt}\n\n{observation}".strip()}]

    async def reply(self, turn: Turn) -> Reply:
        action = self._adapter.action_of(turn.answer)
        if action is None:
            self._num_invalid += 1
            args = self._adapter.args
            return Reply(
                f"That names no action. {self._adapter.action_help}",
                reward=args.invalid_reward,
                is_done=args.ends_on_invalid,
            )
        observation, reward, is_over, is_truncated = await self._thread.call(self._step, action)
        self._return += reward
        self._steps += 1
        self.metrics["truncated"] = float(is_truncated)
        return Reply(observation, reward=reward, is_done=is_over or is_truncated)

    async def close(self) -> None:
        solved = self._return > self._adapter.args.solved_above
        self.metrics.update(
            solved=float(solved), steps=self._steps, invalid_answers=self._num_invalid
        )
        await self._thread.close(self._close)

    def _reset(self) -> str:
        self._env = self._adapter.make()
        value, info = self._env.reset(seed=self._seed)
        return self._adapter.text_of(self._env, value, info)

    def _step(self, action: Any) -> tuple[str, float, bool, bool]:
        value, reward, is_over, is_truncated, info = self._env.step(action)
        text = self._adapter.text_of(self._env, value, info)
        checked = finite_reward(reward, f"step of {self._adapter.name}")
        return text, checked, bool(is_over), bool(is_truncated)

    def _close(self) -> None:
        if self._env is not None:
            self._env.close()


class GymnasiumAdapter(Adapter):
    """One environment id; an item is the seed of a game."""

    args_cls = GymnasiumArgs
    default_settings: ClassVar[Mapping[str, Any]] = {"max_turns": 32, "max_token_length": 4096}
    args: GymnasiumArgs

    def __init__(self, name: str, args: GymnasiumArgs, **settings: Any) -> None:
        super().__init__(name, args, **settings)
        shipped = shipped_mapping(name)
        given = {field: getattr(args, field) for field in args.model_fields_set}
        kwargs = {**shipped.pop("env_kwargs", {}), **given.pop("env_kwargs", {})}
        self.args = GymnasiumArgs(**{**shipped, **given}, env_kwargs=kwargs)
        self.threads = EpisodeThreads(name)
        self.prompt = ""
        self.action_help = ""
        self._numbers: dict[str, int] = {}
        self._text_space: Any = None
        self._renders = False

    async def open(self) -> None:
        thread = self.threads.open()
        try:
            await thread.call(self._inspect)
        finally:
            await thread.close()

    async def item(self, index: int) -> Item:
        return {"seed": random.Random(f"{self.seed}:{index}").randrange(EVAL_SEEDS)}

    async def eval_items(self, limit: int) -> Sequence[Item]:
        return [{"seed": EVAL_SEEDS + i} for i in range(limit)]

    def start(self, item: Item) -> GymnasiumEpisode:
        return GymnasiumEpisode(self, item["seed"])

    def make(self) -> Any:
        """Make the environment, with text rendering if it is used.

        Raises:
            ConfigError: gymnasium does not know the id, or refuses the arguments.
        """
        import gymnasium

        kwargs = dict(self.args.env_kwargs)
        if self._renders:
            kwargs.setdefault("render_mode", "ansi")
        try:
            return gymnasium.make(self.name, **kwargs)
        except (gymnasium.error.Error, ImportError, TypeError) as error:
            raise ConfigError(f"gymnasium.make({self.name!r}) failed: {error}") from error
        except (LookupError, ValueError) as error:  # a value in env_kwargs
            raise ConfigError(
                f"gymnasium.make({self.name!r}) failed with env_kwargs {self.args.env_kwargs}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def action_of(self, answer: str) -> Any:
        """Return the action of an answer; None if it names none."""
        if self._text_space is None:
            return find_action(answer, self._numbers)
        tagged = texts_in_tag(answer, "action")
        text = (tagged[-1] if tagged else answer).strip()
        return text if self._text_space.contains(text) else None

    def text_of(self, env: Any, value: Any, info: Any) -> str:
        """Return the message with an observation."""
        if self.args.observation == "str":
            text = plain_text(str(env.unwrapped))
        else:
            # A text or, as Gymnasium also permits, a `StringIO`; None if it has been printed.
            rendering: Any = env.render() if self._renders else None
            is_file = isinstance(rendering, io.StringIO)
            shown = rendering.getvalue() if is_file else rendering
            if not isinstance(shown, str | None):
                raise ConfigError(
                    f"{self.name} renders an object of type {type(shown).__name__}; expected a "
                    "text: set render_mode to ansi in env_kwargs, or observation=value"
                )
            text = str(value) if shown is None else plain_text(shown)
        try:
            return self.args.observation_template.format(text=text, value=value, info=info)
        except (KeyError, IndexError, AttributeError, ValueError, TypeError) as error:
            raise ConfigError(
                f"observation_template does not fit the observation {value!r:.100}: {error!r}"
            ) from error

    def _inspect(self) -> None:
        """Read the spaces of the environment, and check that the mapping fits them."""
        _make_importable(self.name.rpartition(":")[0])
        env = self.make()
        try:
            modes = env.metadata.get("render_modes") or ()
            wanted = self.args.observation
            if wanted == "render" and "ansi" not in modes:
                raise ConfigError(f"{self.name} has no ansi rendering; it has {list(modes)}")
            is_text = "ansi" in modes and self.args.env_kwargs.get("render_mode", "ansi") == "ansi"
            self._renders = wanted == "render" or (wanted == "auto" and is_text)
            self._read_actions(env.action_space)
        finally:
            try:
                env.close()
            except Exception as error:  # noqa: BLE001 - some expect a `reset` before
                logger.warning("%s was not closed: %r", self.name, error)
        listed = self.action_help
        prompt = self.args.prompt or f"You play {self.name}. {{actions}}"
        self.prompt = prompt.replace("{actions}", listed)

    def _read_actions(self, space: Any) -> None:
        from gymnasium import spaces

        if isinstance(space, spaces.Text):
            self._text_space = space
            limit = min(space.max_length, MAX_ACTION_CHARACTERS)
            self.action_help = (
                f"Write your action as <action>TEXT</action>, at most {limit} characters."
            )
            return
        if not isinstance(space, spaces.Discrete):
            raise ConfigError(
                f"{self.name} takes actions from {space}; expected a Discrete or a Text space"
            )
        first, count = int(space.start), int(space.n)
        if count > MAX_ACTIONS:
            raise ConfigError(
                f"{self.name} has {count} actions; at most {MAX_ACTIONS} can be named"
            )
        named = self.args.actions or {n: str(n) for n in range(first, first + count)}
        outside = sorted(n for n in named if not first <= n < first + count)
        if outside:
            raise ConfigError(
                f"actions: {self.name} has no action {outside[0]}; expected {first} to "
                f"{first + count - 1}"
            )
        names = {n: [name] if isinstance(name, str) else list(name) for n, name in named.items()}
        self._numbers = numbers_by_name(names)
        shown = ", ".join(given[0] for given in names.values())
        self.action_help = f"Write one action as <action>NAME</action>; the actions are: {shown}."
