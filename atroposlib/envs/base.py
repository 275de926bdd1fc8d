"""`BaseEnv`, the base class of environments, and the names that environments import from here.

Read this page before writing an environment. `EnvHooks` has the methods that an environment
implements or overrides, with their defaults. Each docstring says when its hook is called. Arguments
are positional, and a result is awaited if it is awaitable: a hook may also be a plain function. The
library stores and returns items as they are; it never hashes, copies, compares or encodes them.

    get_next_item -> collect_trajectories -> postprocess_histories -> the trainer
                       (G x collect_trajectory)

Under `serve`, the methods below are called in this order for one item; all can be overridden:

    add_train_workers                     while there is room          _serving_loop.add_workers
      get_next_item                       hook                         rollout_scheduler
      handle_env                          one task per item            _serving_loop.roll_out
        collect_trajectories              hook
        postprocess_histories             hook, if there is a result
        handle_send_to_api                if there are groups          _delivery.deliver
          complete_groups                 hook, after admission
          add_rollouts_for_wandb          for each group               _reporter.add_rollouts
          _send_scored_data_to_api        one request                  _delivery.send
        cleanup                           hook

`BaseEnv` has the methods that the library calls, which may be overridden too. Each delegates to one
member. Members call all hooks on the environment, so overrides and replaced methods apply
everywhere. A public attribute is declared here and held by the member named in its `held_by`.

    member               responsible for                                     module
    _reporter            metrics, tables, evaluation results                 reporting
    _registration        registration, step, limits, status of the queue     service_session
    _delivery            admitting, saving and sending groups                rollouts
    rollout_scheduler    rollout tasks, backlog, time limits                 scheduler
    evaluation_runner    the evaluation task                                 scheduler
    _serving_loop        `serve`: rollouts for a trainer                     scheduler
    (none)               `process` and `evaluate`                            offline

Names that need heavy packages are imported on first access.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import os
import sys
from abc import ABCMeta, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from pydantic import BaseModel, Field

from atroposlib.envs.config import BaseEnvConfig, EvalHandlingEnum
from atroposlib.envs.constants import ENV_NAMESPACE, NAMESPACE_SEP, OPENAI_NAMESPACE
from atroposlib.envs.offline import ProcessRun, evaluate_once
from atroposlib.envs.reporting import (
    GroupWriter,
    PartSums,
    Reporter,
    RunFigures,
    load_env_checkpoint,
    restore_attributes,
    save_env_checkpoint,
)
from atroposlib.envs.rollouts import (
    GroupDelivery,
    StragglerRule,
    assemble_group,
    gather_rollouts,
)
from atroposlib.envs.scheduler import (
    EvaluationRunner,
    RolloutScheduler,
    ServingLoop,
    next_item_of,
)
from atroposlib.envs.server_handling.config import (
    APIServerConfig,
    OpenaiConfig,
    ReasoningConfig,
    ServerBaseline,
    ServerManagerConfig,
)
from atroposlib.envs.server_handling.server_baseline import APIServer
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.envs.service_session import EnvRegistration, EnvSession
from atroposlib.errors import ConfigError
from atroposlib.scored_data import ScoredDataGroup, ScoredDataItem
from atroposlib.type_definitions import UUID, Item, Message
from atroposlib.utils.aio import SideThread, settle
from atroposlib.utils.gymnasium_names import keep_removed_games
from atroposlib.utils.model_paths import or_missing_folder, use_cache_without_hub
from atroposlib.utils.run_log import MetricsLog
from atroposlib.utils.score_pool import ScorePool
from atroposlib.utils.starting import collection_paused
from atroposlib.utils.tokenizers.earlier_calls import keep_earlier_calls

if TYPE_CHECKING:
    import aiohttp
    import wandb
    from transformers import AutoTokenizer

    from atroposlib.envs.server_handling.config import resolve_openai_configs
    from atroposlib.frontend.jsonl2html import generate_html
    from atroposlib.utils.cli import (
        adjust_model_defaults,
        extract_namespace,
        get_double_dash_flags,
        get_prefixed_pydantic_model,
        merge_dicts,
    )
    from atroposlib.utils.io import parse_http_response
    from atroposlib.utils.metrics import get_std_min_max_avg

__all__ = [
    "ENV_NAMESPACE",
    "NAMESPACE_SEP",
    "OPENAI_NAMESPACE",
    "UUID",
    "APIServer",
    "APIServerConfig",
    "AutoTokenizer",
    "BaseEnv",
    "BaseEnvConfig",
    "BaseModel",
    "EnvHooks",
    "EvalHandlingEnum",
    "Field",
    "Item",
    "Message",
    "OpenaiConfig",
    "ReasoningConfig",
    "ScoredDataGroup",
    "ScoredDataItem",
    "ServerBaseline",
    "ServerManager",
    "ServerManagerConfig",
    "adjust_model_defaults",
    "aiohttp",
    "extract_namespace",
    "generate_html",
    "get_double_dash_flags",
    "get_prefixed_pydantic_model",
    "get_std_min_max_avg",
    "logger",
    "merge_dicts",
    "parse_http_response",
    "resolve_openai_configs",
    "wandb",
]

logger = logging.getLogger(__name__)

LOCAL_VLLM_URL = "http://localhost:9001/v1"


class EnvHooks(metaclass=ABCMeta):
    """Hooks for authors; `get_next_item` and `evaluate` are required, the others optional.

    Attributes:
        name: name of the environment in registrations, files and metrics.
        env_config_cls: config class; to add settings, subclass that of the base class:
            `BaseEnvConfig`, `SingleTurnEnvConfig` or `MultiTurnEnvConfig`.
        default_model: model of the default `config_init`, served by vLLM on this machine.
        default_settings: settings of the default `config_init`; they override those of the class.
        rollout_columns: names of additional columns of the table `train/rollouts`.
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
    server: Any  # a ServerManager, or a test's substitute
    tokenizer: Any = None  # transformers is untyped

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, Any]:
        """Return the default settings: the environment's config and its inference servers.

        The servers are a list of `APIServerConfig`, one `APIServerConfig`, or a `ServerBaseline`.
        The default uses `default_settings` and `default_model`. Called by the command line; YAML
        and flags override the result.
        """
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
        """Check that the inputs of the environment exist; override it to add checks.

        Called by all commands except `check`, before anything is loaded.

        Raises:
            ConfigError: an input is missing; the message names it.
        """
        return

    async def setup(self) -> None:
        """Load data and other resources; called once, before all other hooks."""
        return

    @abstractmethod
    async def get_next_item(self) -> Item:
        """Return the next item to roll out.

        None means that no item is available now: `serve` asks again later, `process` ends. An
        exception ends the run.
        """

    @abstractmethod
    async def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Measure the policy; called without arguments every `steps_per_eval` trainer steps.

        The result is ignored. An exception is logged and counted, and training continues.
        """

    async def collect_trajectory(self, item: Item) -> tuple[Any, list[Item]]:
        """Roll out an item once.

        An exception fails the group, counted under its name; the other rollouts of the group
        finish.

        Args:
            item: from `get_next_item` or the backlog.

        Returns:
            A `ScoredDataItem`, or any value if `postprocess_histories` builds the group, and items
            to roll out next. None instead of the first drops the group.
        """
        name = type(self).__name__
        if type(self).collect_trajectories is not EnvHooks.collect_trajectories:
            raise NotImplementedError(
                f"{name} rolls out whole groups: call collect_trajectories(item)"
            )
        raise NotImplementedError(
            f"{name} overrides neither collect_trajectory nor collect_trajectories"
        )

    async def collect_trajectories(self, item: Item) -> tuple[Any, list[Item]]:
        """Roll out an item `group_size` times and return the scored group.

        The default runs `collect_trajectory` concurrently and merges all fields of the results.
        Override it to sample all completions in one request.

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
        group = assemble_group(results, is_scored_later=overrides)
        if group is None and any(result is not None for result in results):
            num_missing = sum(result is None for result in results)
            self.count_incomplete_group(num_missing, num_rollouts=len(results))
        return group, backlog

    async def complete_groups(self, groups: list[ScoredDataGroup]) -> list[ScoredDataGroup]:
        """Add data that is expensive to obtain; called with admitted groups only."""
        return groups

    def count_straggler(self, name: str) -> None:
        """Count a rollout that took too long; called with `retried`, `left_out` or `given_up`."""
        return

    def count_incomplete_group(self, num_missing: int, *, num_rollouts: int) -> None:
        """Count a group that is dropped because `num_missing` of its rollouts returned None."""
        return

    async def postprocess_histories(self, trajectories: Any) -> Any:
        """Convert the result of `collect_trajectories`, if it is not empty, to groups.

        Returns:
            A group, a list of groups and Nones, or None to drop the item. The default returns
            `trajectories`.
        """
        return trajectories

    def rollout_cells(self, item: Item) -> Sequence[Any]:
        """Return the values of `rollout_columns`, the same for every completion of an item."""
        return ()

    def check_gold_answer(self, item: Item) -> str | Sequence[str] | None:
        """Return the answer of a perfect model; called by `check` and `process` only.

        `check` compares its score with others, `process` shows it next to the completions. A list
        has one answer per turn. With None, the default, scores are not compared.
        """
        return None

    def check_judge_reply(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """Return the answer to a request that is not the policy's, such as a judge's.

        Called by `check` with the messages of every request. None, the default, means that the
        request is for the policy.
        """
        return None

    async def cleanup(self) -> None:
        """Clean up after a rollout; called under `serve` when one was not cancelled."""
        return

    async def close(self) -> None:
        """Release the resources of `setup`; called once, after the last rollout has ended."""
        return

    @property
    def desired_name(self) -> str:
        """Name to register under: `wandb_name`, the attribute `name`, or the class name."""
        return self.config.wandb_name or self.name or type(self).__name__

    @cached_property
    def score_pool(self) -> ScorePool:
        """Workers for scoring functions, as configured; may be assigned.

        `await self.score_pool.run(function, *args, timeout=5, default=0.0)` does not block other
        rollouts; see `ScorePool`.
        """
        return ScorePool(
            num_workers=self.config.num_score_workers,
            timeout_s=self.config.score_timeout_s,
            backend=self.config.score_backend.value,
        )

    def _opened_score_pool(self) -> ScorePool | None:
        pool = vars(self).get("score_pool")  # the attribute itself would create one
        return pool if isinstance(pool, ScorePool) else None

    async def _close_score_pool(self) -> None:
        pool = self._opened_score_pool()
        if pool is not None:
            await asyncio.to_thread(pool.close)


LAZY_NAMES = {
    "AutoTokenizer": "transformers",
    "adjust_model_defaults": "atroposlib.utils.cli",
    "aiohttp": None,
    "extract_namespace": "atroposlib.utils.cli",
    "generate_html": "atroposlib.frontend.jsonl2html",
    "get_double_dash_flags": "atroposlib.utils.cli",
    "get_prefixed_pydantic_model": "atroposlib.utils.cli",
    "get_std_min_max_avg": "atroposlib.utils.metrics",
    "merge_dicts": "atroposlib.utils.cli",
    "parse_http_response": "atroposlib.utils.io",
    "resolve_openai_configs": "atroposlib.envs.server_handling.config",
    "wandb": None,
}
"""Name to the module that defines it; None for a name that is a module itself."""


def __getattr__(name: str) -> Any:
    if name not in LAZY_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = LAZY_NAMES[name]
    with collection_paused():
        imported = importlib.import_module(module or name)
        value = globals()[name] = imported if module is None else getattr(imported, name)
    return value


def _lookup(name: str) -> Any:
    """Return a lazy name of this module; a test may have replaced it."""
    return getattr(sys.modules[__name__], name)


def _load_tokenizer(name: str) -> Any:
    logger.info("loading the tokenizer %s", name)
    use_cache_without_hub(name)
    try:
        return keep_earlier_calls(_lookup("AutoTokenizer").from_pretrained(name))
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(" .:")
        raise ConfigError(
            f"tokenizer {name!r} cannot be loaded: {or_missing_folder(reason, name)}; "
            "--env.tokenizer_name takes the name of a hub repository or a local folder"
        ) from error


def _service_token() -> str | None:
    return os.environ.get("ATROPOS_API_TOKEN")


def _as_list(server_configs: Any) -> Any:
    if isinstance(server_configs, tuple):
        return list(server_configs)
    is_accepted = isinstance(server_configs, list | ServerBaseline)
    return server_configs if is_accepted else [server_configs]


_NO_DEFAULT = object()


class _HeldBy:
    """Attribute of an environment that one of its members holds, maybe under another name.

    Before the member exists, the value is in the environment.
    """

    def __init__(self, member: str, name: str = "", default: Any = _NO_DEFAULT) -> None:
        self.member = member
        self.name = name
        self._default = default

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self._own_name = name
        self.name = self.name or name

    def __get__(self, env: Any, owner: type[Any]) -> Any:
        if env is not None and self.member in vars(env):
            return getattr(vars(env)[self.member], self.name)
        if env is not None and self._own_name in vars(env):
            return vars(env)[self._own_name]
        if self._default is not _NO_DEFAULT:
            return self._default
        if env is None:
            return self
        raise AttributeError(f"{owner.__name__!r} object has no attribute {self._own_name!r} yet")

    def __set__(self, env: Any, value: Any) -> None:
        if self.member in vars(env):
            setattr(vars(env)[self.member], self.name, value)
        else:  # before the constructor of the base class, where authors may set any attribute
            vars(env)[self._own_name] = value

    def replace_default(self, cls: type[Any], value: Any) -> None:
        """Replace a value in the class of an author, which would hide this attribute."""
        held = _HeldBy(self.member, self.name, default=value)
        held.__set_name__(cls, self._own_name)
        setattr(cls, self._own_name, held)


class _Member:
    """A member of an environment, made when it is first used.

    It takes over attributes that were set on the environment, as in tests that make one without its
    constructor. If the class of an author has a property instead of an attribute, the member reads
    and sets that.
    """

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self._make = make

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self._name = name

    def __get__(self, env: Any, owner: type[Any]) -> Any:
        if env is None:
            return self
        member = vars(env)[self._name] = self._make(env)
        properties = {}
        for name, held in HELD_ATTRIBUTES.items():
            if held.member != self._name:
                continue
            if _is_property(inspect.getattr_static(owner, name)):
                properties[held.name] = name
            elif name in vars(env):
                setattr(member, held.name, vars(env).pop(name))
        if properties:
            _use_properties(member, env, properties)
        return member


def _is_property(found: Any) -> bool:
    return hasattr(type(found), "__set__") and not isinstance(found, _HeldBy)


def _use_properties(member: Any, env: Any, names: Mapping[str, str]) -> None:
    """Let a member use properties of the environment in place of its own attributes.

    Args:
        member: the member.
        env: the environment.
        names: attribute of the member to property of the environment.
    """

    def use(name: str) -> property:
        return property(lambda _: getattr(env, name), lambda _, value: setattr(env, name, value))

    initial = {own: vars(member).pop(own) for own in names if own in vars(member)}
    kind = type(member)
    member.__class__ = type(kind.__name__, (kind,), {own: use(name) for own, name in names.items()})
    for own, value in initial.items():
        setattr(member, own, value)


def _make_scheduler(env: BaseEnv) -> RolloutScheduler:
    return RolloutScheduler(
        # Looked up at each call, so that hooks of an instance can be replaced.
        run_rollout=lambda item_uuid: env.handle_env(item_uuid),
        next_item=lambda: next_item_of(env),
        count_failure=env.count_failure,
        count_straggler=env.count_straggler,
    )


def _make_serving_loop(env: BaseEnv) -> ServingLoop:
    return ServingLoop(
        env,
        reporter=env._reporter,
        registration=env._registration,
        delivery=env._delivery,
        scheduler=env.rollout_scheduler,
        evaluations=env.evaluation_runner,
    )


held_by: Any = _HeldBy  # untyped, so that attributes can be declared with their own types
made_by: Any = _Member


class BaseEnv(EnvHooks):
    """An environment: items in, scored groups of token sequences out.

    Implement `get_next_item`, `evaluate`, and `collect_trajectory` or `collect_trajectories`; call
    `MyEnv.cli()` in the main block. `EnvHooks` documents all hooks.

    Args:
        config: settings; this instance updates `batch_size`, `total_steps`, `group_size` and
            `data_path_to_save_groups` in it.
        server_configs: a list of server configs, a single one, or a `ServerBaseline`.
        slurm: Whether to discover the inference servers through Slurm.
        testing: Whether to use scripted servers.

    Attributes:
        server_configs: configs of the inference servers, as a list.
        eval_metrics: free for the environment to use.
        process_mode: True under `process`, absent otherwise.
        n_groups_to_process: number of groups that `process` makes.
        group_size_to_process: number of trajectories per group under `process`.
    """

    server_cls: type[Any] = APIServer
    """Server class of all configs; with the abstract default, `server_type` decides."""
    retry_interval_s: float = 1.0
    """Seconds between two attempts to reach the service or the trainer."""
    status_interval_s: float = 0.2
    """Seconds between two status requests."""
    shutdown_grace_s: float = 10.0
    """Seconds to send a finished group when the run ends."""
    empty_rollout_s: float = 0.1
    """Minimum duration of a rollout without data, in seconds."""
    final_engine_timeout_s: float = 60.0
    """Seconds that the final evaluation waits for an inference server."""

    process_mode: bool
    n_groups_to_process: int
    group_size_to_process: int

    _stand_in_tokenizer: Any = None
    """Tokenizer that `check` uses in place of the configured one."""

    _side_thread: SideThread = made_by(lambda env: SideThread())
    _reporter: Reporter = made_by(Reporter)
    _registration: EnvRegistration = made_by(
        lambda env: EnvRegistration(env, env._reporter, token=_service_token)
    )
    _delivery: GroupDelivery = made_by(
        lambda env: GroupDelivery(env, env._reporter, env._side_thread)
    )
    rollout_scheduler: RolloutScheduler = made_by(_make_scheduler)
    evaluation_runner: EvaluationRunner = made_by(
        lambda env: EvaluationRunner(
            on_end=env.rollout_scheduler.wake, count_failure=env.count_failure
        )
    )
    _serving_loop: ServingLoop = made_by(_make_serving_loop)

    run_log: MetricsLog = held_by("_reporter")
    wandb_run: Any = held_by("_reporter")
    run_figures: RunFigures = held_by("_reporter")
    settings_yaml: str | None = held_by("_reporter")
    drop_counts: Counter[str] = held_by("_reporter")
    failure_counts: Counter[str] = held_by("_reporter")
    straggler_counts: Counter[str] = held_by("_reporter")
    note_counts: Counter[str] = held_by("_reporter")
    reward_parts_since_log: PartSums = held_by("_reporter")
    completion_lengths: list[int] = held_by("_reporter")
    rollouts_for_wandb: list[Any] = held_by("_reporter")
    task_duration: list[float] = held_by("_reporter")
    succeeded_task_duration: list[float] = held_by("_reporter")
    failed_task_duration: list[float] = held_by("_reporter")
    task_successful: list[int] = held_by("_reporter")
    mainloop_timings: list[float] = held_by("_reporter")
    workers_added_list: list[int] = held_by("_reporter")
    service_session: EnvSession | None = held_by("_registration")
    env_id: int | None = held_by("_registration")
    status_dict: dict[str, Any] | None = held_by("_registration")
    curr_step: int = held_by("_registration")
    max_token_len: int = held_by("_registration")
    max_num_workers: int = held_by("_registration")
    wandb_project: str | None = held_by("_registration")
    wandb_group: str | None = held_by("_registration")
    wandb_prepend: str | None = held_by("_registration")
    checkpoint_dir: str = held_by("_registration")
    checkpoint_interval: int = held_by("_registration")
    jsonl_writer: GroupWriter | None = held_by("_delivery")
    items_sent_this_step: int = held_by("_delivery")
    workers: set[asyncio.Task[Any]] = held_by("rollout_scheduler")
    backlog: list[Any] = held_by("rollout_scheduler")
    running_items: dict[str, dict[str, Any]] = held_by("rollout_scheduler")
    last_completed_item: Any = held_by("rollout_scheduler")
    eval_runner: asyncio.Task[Any] | None = held_by("evaluation_runner", "task")
    last_loop_time: float | None = held_by("_serving_loop")

    def __init__(
        self, config: BaseEnvConfig, server_configs: Any, slurm: bool = False, testing: bool = False
    ) -> None:
        keep_removed_games()
        self.config = config
        self.testing = testing
        self.max_token_length = config.max_token_length
        self.eval_metrics: list[Any] = []
        self.eval_workers: set[Any] = set()
        servers = _as_list(server_configs)
        self.server = ServerManager(
            servers,
            slurm=slurm,
            testing=testing,
            server_class=self.server_cls,
            reasoning_config=ReasoningConfig.from_env_config(config),
        )
        self.server_configs: list[Any] = (
            servers if isinstance(servers, list) else [s.config for s in self.server.servers]
        )
        stand_in = self._stand_in_tokenizer
        self.tokenizer = _load_tokenizer(config.tokenizer_name) if stand_in is None else stand_in
        for name, held in HELD_ATTRIBUTES.items():
            vars(self).pop(name, None)  # set by an author before this constructor
            found = inspect.getattr_static(type(self), name)
            if not isinstance(found, _HeldBy) and not _is_property(found):
                held.replace_default(type(self), found)
        for name in MEMBERS:
            vars(self).pop(name, None)
        for name in MEMBERS:
            getattr(self, name)

    async def env_manager(self) -> None:
        """Serve until the last step of the trainer; waits for the service and the trainer.

        Cancel it to stop early: rollouts may continue for `rollout_grace_s`, finished groups are
        delivered, `close` is called, the environment disconnects, logs are closed. A second
        cancellation skips the wait.

        Raises:
            InferenceError: no inference server was up for `engine_timeout`, before the last step.
        """
        await self._serving_loop.run()

    async def process_manager(self) -> None:
        """Make `n_groups_to_process` groups without a service; write them and an HTML page.

        An exception of a hook ends the run; groups made until then are written, with their page.

        Raises:
            NoDataError: too many items in a row gave no group.
            InferenceError: no inference server was up for `engine_timeout`, once one had answered.
        """
        await ProcessRun(self, self._reporter, self._registration, self._delivery).run()

    async def _run_evaluate(self) -> None:
        """Set up and evaluate once, without a service.

        Raises:
            NoDataError: no request to a model was answered.
            InferenceError: no inference server was up for `engine_timeout`, once one had answered.
        """
        await evaluate_once(self, self._reporter)

    async def setup_wandb(self) -> None:
        """Wait for the trainer's project and open a Weights & Biases run in it.

        Does nothing if the environment has set `wandb_project` and opened a run itself.
        """
        await self._registration.open_wandb()

    async def register_env(self) -> None:
        """Wait for the service and the trainer, and register.

        Raises:
            ConfigError: neither the config nor the trainer sets a number of steps.
        """
        await self._registration.register()

    async def _register_env(self) -> dict[str, Any]:
        """Send one registration request and return the response."""
        return await self._registration.ask_to_register()

    async def get_server_info(self) -> None:
        """Fetch batch size and length limit of the trainer.

        Raises:
            ConfigError: no batch size is known, or a group does not fit into a batch.
        """
        await self._registration.fetch_settings()

    async def get_status(self) -> None:
        """Fetch `status_dict`; register again if the service does not know the environment."""
        await self._registration.fetch_status()

    async def env_step_checks(self) -> None:
        """On a new trainer step, evaluate, save and log; called after each `get_status`."""
        await self._serving_loop.act_on_step()

    async def add_train_workers(self) -> None:
        """Start rollouts up to the limit; called when there is room."""
        await self._serving_loop.add_workers()

    async def handle_env(self, item_uuid: str) -> Any:
        """Roll out, score and send the item of `running_items[item_uuid]`.

        Returns the groups; None if the rollout failed or the uuid is unknown.
        """
        return await self._serving_loop.roll_out(item_uuid)

    async def handle_send_to_api(
        self,
        scored_data: ScoredDataGroup | list[ScoredDataGroup | None],
        item: Item | None = None,
        do_send_to_api: bool = True,
        abort_on_any_max_length_exceeded: bool = True,
    ) -> None:
        """Admit, record and send the groups of a rollout.

        Dropped groups are logged and counted by reason. Admitted groups are changed in place:
        missing fields become None, arrays become lists, and `include_messages` fills `messages`.

        Args:
            scored_data: one group, or a list of groups and Nones, sent in one request.
            item: the item of the groups; passed on to `add_rollouts_for_wandb`.
            do_send_to_api: Whether to send the groups; `process` only records them.
            abort_on_any_max_length_exceeded: Whether to drop groups with a trajectory that is too
                long for the trainer.
        """
        await self._delivery.deliver(
            scored_data,
            item,
            is_sent=do_send_to_api,
            limits_length=abort_on_any_max_length_exceeded,
        )

    async def _send_scored_data_to_api(
        self, scored_data: ScoredDataGroup | list[ScoredDataGroup]
    ) -> None:
        """Send one group, or several in one request; log and count a rejection."""
        await self._delivery.send(scored_data)

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Log the metrics since the last call.

        Called when the trainer's step changes and enough groups were sent. Overrides add keys and
        await `super().wandb_log`. All keys except those of the inference servers get the registered
        name as a prefix.

        Args:
            wandb_metrics: metrics to log as well; changed in place.
        """
        await self._reporter.log({} if wandb_metrics is None else wandb_metrics)

    async def create_rollout_table(self, wandb_metrics: dict[str, Any]) -> dict[str, Any]:
        """Add the kept rollouts as table `train/rollouts`; called by `wandb_log`."""
        return self._reporter.add_rollout_table(wandb_metrics)

    async def add_rollouts_for_wandb(
        self, scored_data: ScoredDataGroup, item: Item | None = None
    ) -> None:
        """Keep the first trajectories of a group for the table; called for each admitted group.

        A row is `(decoded text, score, *rollout_cells(item))`.
        """
        await self._reporter.add_rollouts(scored_data, item)

    def perf_stats(self, metrics_dict: dict[str, Any]) -> dict[str, Any]:
        """Add statistics of the durations of rollouts and of the loop."""
        return self._reporter.add_durations(metrics_dict)

    async def evaluate_log(
        self,
        metrics: Mapping[str, Any],
        task_name: str | None = None,
        model_name: str | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
        generation_parameters: Mapping[str, Any] | None = None,
        samples: Sequence[Mapping[str, Any]] | None = None,
        verbose: bool = True,
    ) -> None:
        """Write an evaluation's result to `data_dir_to_save_evals`; if that is None, only warn.

        For the arguments see `atroposlib.envs.eval.evaluate_log`. Defaults are `<name>_eval`, the
        model of the config or of the first inference server, and `max_token_length`.

        Raises:
            NoDataError: no request of the evaluation was answered, and every metric is 0.
        """
        self._reporter.write_evaluation(
            metrics,
            task_name=task_name,
            model_name=model_name,
            generation_parameters=generation_parameters,
            start_time=start_time,
            end_time=end_time,
            samples=samples,
            verbose=verbose,
        )

    def save_checkpoint(self, step: int, data: Mapping[str, Any] | None = None) -> None:
        """Save state; called at each multiple of the trainer's checkpoint interval.

        Without `data`, nothing is written: override it and pass the values to save to this method.

        Args:
            step: the multiple that was reached.
            data: attribute name to JSON value, restored by `load_checkpoint`.
        """
        if data is not None:
            save_env_checkpoint(self.checkpoint_dir, self.wandb_prepend, step, data)

    def load_checkpoint(self) -> None:
        """Restore state; called after registration with a run that is past its first step.

        Sets only attributes that exist; the log names the others in the file.
        """
        data = load_env_checkpoint(self.checkpoint_dir, self.wandb_prepend, self.curr_step)
        restore_attributes(self, data)

    def count_failure(self, name: str) -> None:
        self.failure_counts[name] += 1

    def count_straggler(self, name: str) -> None:
        self.straggler_counts[name] += 1

    def count_incomplete_group(self, num_missing: int, *, num_rollouts: int) -> None:
        self._delivery.drop_incomplete_group(num_missing, num_rollouts=num_rollouts)

    @property
    def derived_batch_size(self) -> int:
        """Number of sequences of each batch that this environment may fill, -1 when unknown."""
        return self._registration.derived_batch_size

    async def _run_close_hook(self) -> None:
        self.run_figures.end()
        await self._reporter.tolerate(self.close(), "close")
        await self._reporter.tolerate(self._close_score_pool(), "closing the score pool")
        await self._reporter.tolerate(self.server.close(), "closing the inference connections")

    def _close_records(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        self._delivery.close()
        self._side_thread.close()
        self._reporter.close(error, step=self.curr_step)

    @cached_property
    def client(self) -> Any:
        """Asynchronous OpenAI client of the first inference server."""
        import openai

        from atroposlib.envs.server_handling.engine_http import make_http_client

        config = self.server_configs[0]
        return openai.AsyncOpenAI(
            api_key=config.key_for_client,
            base_url=config.known_base_url,
            timeout=config.timeout,
            http_client=make_http_client(config.known_base_url or ""),
        )

    @cached_property
    def wandb(self) -> Any:
        """The `wandb` module under `use_wandb`, otherwise None; may be assigned."""
        return _lookup("wandb") if self.config.use_wandb else None

    @classmethod
    def cli(cls) -> NoReturn:
        """Run the command line `serve | process | evaluate | check` and exit."""
        from atroposlib.envs.commands import run_cli

        run_cli(cls)

    @classmethod
    def get_cli_serve_config_cls(cls) -> type:
        """Return the command class of `serve`; override it to add flags."""
        from atroposlib.envs.commands import serve_command

        return serve_command(cls)

    @classmethod
    def get_cli_process_config_cls(cls) -> type:
        from atroposlib.envs.commands import process_command

        return process_command(cls)

    @classmethod
    def get_cli_evaluate_config_cls(cls) -> type:
        from atroposlib.envs.commands import evaluate_command

        return evaluate_command(cls)

    @classmethod
    def get_cli_check_config_cls(cls) -> type:
        from atroposlib.envs.check import check_command

        return check_command(cls)


HELD_ATTRIBUTES = {name: held for name, held in vars(BaseEnv).items() if isinstance(held, _HeldBy)}
MEMBERS = [name for name, member in vars(BaseEnv).items() if isinstance(member, _Member)]
