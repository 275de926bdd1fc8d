r"""Environments of GEM: text in, text out.

    reset(seed) ─► observation ─► turn ─► step(answer) ─► observation + reward ─► …

NAME is an id of the package, such as `game:GuessTheNumber-v0-easy`. Answers are passed on without
the thinking; most games read the text in `\boxed{}`. Environments that run answers as code in this
process, or that cannot be used from several threads, are refused; the message names a replacement.
"""

from __future__ import annotations

import inspect
import logging
import random
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from atroposlib.adapters.interface import (
    Adapter,
    AdapterArgs,
    Episode,
    EpisodeThreads,
    Item,
    finite_reward,
    separate_random,
    shown_error,
)
from atroposlib.envs.conversation import ChatMessage, Reply, Turn
from atroposlib.errors import ConfigError
from atroposlib.utils.text import near_name

__all__ = ["GemAdapter", "GemArgs", "GemEpisode"]

EVAL_SEEDS = 1_000_000_000
"""First seed of evaluations; those of training are smaller."""
MAX_ACTION_CHARACTERS = 100_000
START_TIMEOUT_S = 600.0
"""Time to wait for the starts of other episodes, one at a time."""
RUNS_CODE = "it runs answers as code outside a sandbox"
USES_SIGNALS = "its scorer needs a process of its own or the main thread"
REFUSED: Mapping[str, tuple[str, str]] = {
    "gem.envs.code_env": (RUNS_CODE, "environments/code_execution_server has a sandbox"),
    "gem.envs.reasoning_gym": (RUNS_CODE, "use reasoning-gym:NAME"),
    "gem.envs.math_env": (USES_SIGNALS, "use dataset:NAME with the reward function accuracy"),
    "gem.envs.math_visual_env": (USES_SIGNALS, "there is no replacement"),
}
"""Modules whose environments are refused: the reason, and what to use instead."""


class GemArgs(AdapterArgs):
    """Arguments of the environment."""

    env_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of gem.make, such as max_turns."
    )
    show_suffix: bool = Field(
        True, description="Whether the hint that follows observations in GEM is shown."
    )
    solved_above: float = Field(
        0.99, allow_inf_nan=False, description="Return above which the metric `solved` is 1."
    )


class GemEpisode(Episode):
    """One episode, in a thread of its own."""

    def __init__(self, adapter: GemAdapter, seed: int) -> None:
        super().__init__()
        self._adapter = adapter
        self._seed = seed
        self._thread = adapter.threads.open()
        self._env: Any = None
        self._return = 0.0
        self._steps = 0

    async def begin(self) -> Sequence[ChatMessage]:
        return [{"role": "user", "content": await self._thread.call(self._reset)}]

    async def reply(self, turn: Turn) -> Reply:
        action = turn.answer[:MAX_ACTION_CHARACTERS]
        text, reward, is_over, is_truncated = await self._thread.call(self._step, action)
        self._return += reward
        self._steps += 1
        self.metrics["truncated"] = float(is_truncated)
        return Reply(text, reward=reward, is_done=is_over or is_truncated)

    async def close(self) -> None:
        solved = self._return > self._adapter.args.solved_above
        self.metrics.update(solved=float(solved), steps=self._steps)
        await self._thread.close(self._close)

    def _reset(self) -> str:
        source = separate_random("gem")
        source.seed(self._seed)  # some constructors draw, too
        # Some games are made with variables of their module.
        with self._adapter.threads.alone(START_TIMEOUT_S):
            self._env = self._adapter.make()
            observation, info = self._env.reset(seed=self._seed)
        return self._shown(observation, info)

    def _step(self, action: str) -> tuple[str, float, bool, bool]:
        observation, reward, is_over, is_truncated, info = self._env.step(action)
        checked = finite_reward(reward, f"step of {self._adapter.name}")
        return self._shown(observation, info), checked, bool(is_over), bool(is_truncated)

    def _shown(self, observation: Any, info: Mapping[str, Any]) -> str:
        suffix = info.get("suffix") if self._adapter.args.show_suffix else None
        return f"{observation}\n{suffix}" if suffix else str(observation)

    def _close(self) -> None:
        # Not every environment of the package has this method.
        close = getattr(self._env, "close", None)
        if close is not None:
            close()


class GemAdapter(Adapter):
    """One environment id; an item is the seed of an episode."""

    args_cls = GemArgs
    begin_timeout_s = START_TIMEOUT_S
    default_settings: ClassVar[Mapping[str, Any]] = {"max_turns": 32, "max_token_length": 8192}
    args: GemArgs

    def __init__(self, name: str, args: GemArgs, **settings: Any) -> None:
        super().__init__(name, args, **settings)
        self.threads = EpisodeThreads(name)

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

    def start(self, item: Item) -> GemEpisode:
        return GemEpisode(self, item["seed"])

    def make(self) -> Any:
        """Make the environment.

        Raises:
            ConfigError: the environment refuses its arguments, or lacks a package or data.
        """
        import gem

        try:
            return gem.make(self.name, **self.args.env_kwargs)
        except (ImportError, LookupError, OSError, TypeError, AssertionError) as error:
            raise ConfigError(f"gem.make({self.name!r}) failed: {shown_error(error)}") from error

    def _inspect(self) -> None:
        """Check the name and the arguments, and import the environment's module."""
        _import_gem()
        from gem.envs.registration import ENV_REGISTRY

        if self.name not in ENV_REGISTRY:
            raise ConfigError(
                f"gem has no environment {self.name!r}{near_name(self.name, list(ENV_REGISTRY))}"
            )
        module = str(ENV_REGISTRY[self.name].entry_point).partition(":")[0]
        if module in REFUSED:
            reason, remedy = REFUSED[module]
            raise ConfigError(f"{self.name} is not offered: {reason}; {remedy}")
        env = self.make()
        check_arguments(env, self.args.env_kwargs, self.name)
        try:
            env.reset(seed=0)
        except Exception as error:  # such as missing data, which some games read only now
            raise ConfigError(f"{self.name} cannot start: {shown_error(error)}") from error
        separate_random("gem")


def check_arguments(env: Any, given: Mapping[str, Any], name: str) -> None:
    """Refuse arguments that the constructor of a game takes as `**_`, which it ignores.

    Raises:
        ConfigError: there is one.
    """
    parameters = inspect.signature(type(env).__init__).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD and p.name.startswith("_") for p in parameters):
        return
    known = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][1:]
    for argument in given:
        if argument not in known:
            hint = near_name(argument, known) or f"; it has {', '.join(known)}"
            raise ConfigError(f"env_kwargs: {name} has no argument {argument!r}{hint}")


def _import_gem() -> None:
    """Import the package and undo its change of the root logger."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    with warnings.catch_warnings():  # of packages that it imports, when they are compiled
        warnings.simplefilter("ignore", SyntaxWarning)
        import gem  # noqa: F401

    root.setLevel(level)
    root.handlers[:] = handlers
