"""The methods an environment implements or overrides, with their defaults.

This is the page to read before writing an environment. The base class calls each hook at the
moment its docstring names, passes arguments by position, and awaits the result when it can be
awaited, so a hook may also be a plain function. Items are the environment's own: the library
keeps them and hands them back, and never hashes, copies, compares or encodes them.

    get_next_item -> collect_trajectories -> postprocess_histories -> the trainer
                       (G x collect_trajectory)
"""

from __future__ import annotations

import asyncio
import inspect
from abc import ABCMeta, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar

from atroposlib.envs.config import BaseEnvConfig
from atroposlib.envs.rollouts import StragglerRule, assemble_group, gather_rollouts
from atroposlib.scored_data import ScoredDataGroup
from atroposlib.type_definitions import Item
from atroposlib.utils.score_pool import ScorePool

__all__ = [
    "EnvHooks",
    "settle",
]

LOCAL_VLLM_URL = "http://localhost:9001/v1"


async def settle(result: Any) -> Any:
    """Await what a hook returned when it can be awaited; return it otherwise."""
    if inspect.isawaitable(result):
        return await result
    return result


class EnvHooks(metaclass=ABCMeta):
    """Hooks for authors; `get_next_item` and `evaluate` must be written, the rest may be.

    Attributes:
        name: name of the environment in registrations, files and metrics.
        env_config_cls: config class; subclass `BaseEnvConfig` to add settings.
        default_model: model that the default `config_init` names, served by vLLM on this machine.
        default_settings: settings that the default `config_init` lays over those of the class.
        rollout_columns: names of further columns of the table `train/rollouts`.
        check_settings: settings for `check` only, such as the path of a small data set.
        config: settings of this instance.
        server: inference servers, as `self.server.chat_completion(...)`.
        tokenizer: Hugging Face tokenizer of `config.tokenizer_name`.
    """

    name: str | None = None
    env_config_cls: type[BaseEnvConfig] = BaseEnvConfig
    default_model: ClassVar[str | None] = None
    default_settings: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    rollout_columns: ClassVar[Sequence[str]] = ()
    check_settings: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    config: BaseEnvConfig
    server: Any  # a ServerManager, or whatever a test puts in its place
    tokenizer: Any = None  # transformers carries no types worth following

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, Any]:
        """Return the default settings: the environment's config, and its inference servers.

        The servers are a list of `APIServerConfig`, one `APIServerConfig`, or a `ServerBaseline`.
        This one takes `default_settings` and `default_model`; write your own for anything else.
        Called by the command line before YAML and flags are laid over them.
        """
        from atroposlib.envs.server_handling.config import APIServerConfig, ServerBaseline

        settings = dict(cls.default_settings)
        if cls.default_model is None:
            return cls.env_config_cls.model_validate(settings), ServerBaseline()
        settings.setdefault("tokenizer_name", cls.default_model)
        server = APIServerConfig(
            model_name=cls.default_model, base_url=LOCAL_VLLM_URL, server_type="vllm"
        )
        return cls.env_config_cls.model_validate(settings), server

    @classmethod
    def check_inputs(cls, config: BaseEnvConfig) -> None:
        """Find out whether what the environment reads is there; override it to add checks.

        Called by its commands before anything is loaded; `check` leaves it to `setup`.

        Raises:
            ConfigError: something is missing; the message says what and where.
        """
        return

    async def setup(self) -> None:
        """Load data and whatever else is needed; called once, before anything else."""
        return

    @abstractmethod
    async def get_next_item(self) -> Item:
        """Return the next item to roll out.

        None means that there is none now: serving asks again later, `process` ends. An exception
        ends the run.
        """

    @abstractmethod
    async def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Measure the policy; called without arguments every `steps_per_eval` trainer steps.

        The result is ignored. An exception is logged and counted, and training goes on.
        """

    async def collect_trajectory(self, item: Item) -> tuple[Any, list[Item]]:
        """Roll out an item once.

        Args:
            item: from `get_next_item` or the backlog.

        Returns:
            A `ScoredDataItem` (or, when `postprocess_histories` builds the group, anything), and
            items to roll out next. None in the first place gives up the group.

        An exception fails the group under its name; the other rollouts of the group finish.
        """
        raise NotImplementedError(
            f"{type(self).__name__} overrides neither collect_trajectory nor collect_trajectories"
        )

    async def collect_trajectories(self, item: Item) -> tuple[Any, list[Item]]:
        """Roll out an item `group_size` times and return the scored group.

        The default runs `collect_trajectory` that often at the same time and merges the results
        with every field they carry. Override it to sample all completions in one request.

        Args:
            item: from `get_next_item` or the backlog.

        Returns:
            A group, a list of groups, or None, and items to roll out next.
        """

        async def collect(item: Item) -> Any:
            return await settle(self.collect_trajectory(item))

        results, backlog = await gather_rollouts(
            collect,
            item,
            group_size=self.config.group_size,
            rule=StragglerRule.from_config(self.config),
            count_straggler=self.count_straggler,
        )
        overrides = type(self).postprocess_histories is not EnvHooks.postprocess_histories
        return assemble_group(results, is_scored_later=overrides), backlog

    async def complete_groups(self, groups: list[ScoredDataGroup]) -> list[ScoredDataGroup]:
        """Add to admitted groups what costs too much for dropped ones; the default adds nothing."""
        return groups

    def count_straggler(self, name: str) -> None:
        """Count a straggling rollout; called with `retried`, `left_out` or `given_up`."""
        return

    async def postprocess_histories(self, trajectories: Any) -> Any:
        """Turn what `collect_trajectories` returned into groups; the default changes nothing.

        Called only when there is something to process.

        Returns:
            A group, a list of groups and Nones, or None to give up.
        """
        return trajectories

    def rollout_cells(self, item: Item) -> Sequence[Any]:
        """Return the values of `rollout_columns`, the same for every completion of an item."""
        return ()

    def check_gold_answer(self, item: Item) -> str | Sequence[str] | None:
        """Return what a perfect model would write; called by `check` and by `process` only.

        `check` tests the scores with it, `process` shows it beside the completions. A list gives
        one answer per turn. None, the default, leaves the scores unchecked.
        """
        return None

    def check_judge_reply(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """Return the answer to a request outside a rollout, as one to a judge; for `check` only.

        Args:
            messages: of any request during a check. None, the default, means that it is the
                policy's turn.
        """
        return None

    async def cleanup(self) -> None:
        """Tidy up after a rollout; called when one ran to its end while serving."""
        return

    async def close(self) -> None:
        """Release what `setup` took; called once, when the run is over and rollouts have ended."""
        return

    @property
    def desired_name(self) -> str:
        """The name to register under: `wandb_name`, the class's `name`, or the class name."""
        return self.config.wandb_name or self.name or type(self).__name__

    @cached_property
    def score_pool(self) -> ScorePool:
        """Workers for scoring functions, as the config asks for; may be assigned.

        `await self.score_pool.run(function, *args, timeout=5, default=0.0)` neither stalls other
        rollouts nor runs for ever; see `ScorePool`.
        """
        return ScorePool(
            num_workers=self.config.num_score_workers,
            timeout_s=self.config.score_timeout_s,
            backend=self.config.score_backend.value,
        )

    def _opened_score_pool(self) -> ScorePool | None:
        pool = vars(self).get("score_pool")  # asking for the attribute would make one
        return pool if isinstance(pool, ScorePool) else None

    async def _close_score_pool(self) -> None:
        pool = self._opened_score_pool()
        if pool is not None:
            await asyncio.to_thread(pool.close)
