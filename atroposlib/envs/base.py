"""`BaseEnv`: what every environment subclasses, and the names environments import from here.

    EnvHooks          what authors write                         env_hooks
    ScoringEnv        workers for scoring functions              env_scoring
    ReportingEnv      metrics, tables, evaluations, checkpoints  env_metrics
    DeliveringEnv     admitting, saving and sending groups       env_delivery
    RegisteredEnv     standing with the trajectory service       env_registration
    ServingEnv        rollouts for a trainer                     env_serving
    OfflineEnv        `process` and `evaluate`                   env_offline
    BaseEnv           construction and command line

Names that need heavy packages are imported when first asked for.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pydantic import BaseModel, Field

from atroposlib.envs.config import BaseEnvConfig, EvalHandlingEnum
from atroposlib.envs.constants import ENV_NAMESPACE, NAMESPACE_SEP, OPENAI_NAMESPACE
from atroposlib.envs.delivery import GroupWriter
from atroposlib.envs.hooks import settle
from atroposlib.envs.offline import OfflineEnv
from atroposlib.envs.reporting import RunFigures
from atroposlib.envs.reward_parts import PartSums
from atroposlib.envs.run_snapshot import RepeatedErrors
from atroposlib.envs.scheduler import EvaluationRunner, RolloutScheduler
from atroposlib.envs.server_handling.config import (
    APIServerConfig,
    OpenaiConfig,
    ReasoningConfig,
    ServerBaseline,
    ServerManagerConfig,
)
from atroposlib.envs.server_handling.server_baseline import APIServer
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.envs.service_session import EngineWatch
from atroposlib.errors import ConfigError
from atroposlib.scored_data import ScoredDataGroup, ScoredDataItem
from atroposlib.type_definitions import UUID, Item, Message
from atroposlib.utils.aio import SideThread
from atroposlib.utils.gymnasium_names import keep_removed_games
from atroposlib.utils.model_paths import missing_folder
from atroposlib.utils.run_log import RunLog
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
"""Name to the module it comes from; None for a name that is itself a module."""


def __getattr__(name: str) -> Any:
    """Import a name of `LAZY_NAMES` when it is first asked for."""
    if name not in LAZY_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = LAZY_NAMES[name]
    value = importlib.import_module(name) if module is None else _member(module, name)
    globals()[name] = value
    return value


def _member(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _lookup(name: str) -> Any:
    """Return a lazy name of this module as callers see it, replaced by a test or not."""
    return getattr(sys.modules[__name__], name)


def _load_tokenizer(name: str) -> Any:
    logger.info("loading the tokenizer %s", name)
    try:
        return keep_earlier_calls(_lookup("AutoTokenizer").from_pretrained(name))
    except (OSError, ValueError, KeyError) as error:
        reason = missing_folder(name) or str(error).strip().partition("\n")[0].rstrip(" .:")
        raise ConfigError(
            f"tokenizer {name!r} cannot be loaded: {reason}; "
            "--env.tokenizer_name takes the name of a hub repository or a local folder"
        ) from error


class BaseEnv(OfflineEnv):
    """An environment: items in, scored groups of token sequences out.

    Write `get_next_item`, `evaluate`, and `collect_trajectory` or `collect_trajectories`; call
    `MyEnv.cli()` in the main block. The hooks and their moments are in `EnvHooks`.

    Args:
        config: settings; this instance writes `batch_size`, `total_steps`, `group_size` and
            `data_path_to_save_groups` back into it.
        server_configs: a list of server configs, a single one, or a `ServerBaseline`.
        slurm: find the inference servers through Slurm.
        testing: use scripted servers.

    Attributes:
        server_configs: the configs of the inference servers, as a list.
        eval_metrics: for environments that gather metrics here; the library leaves it alone.
        max_token_length: `config.max_token_length`.
    """

    server_cls: type[Any] = APIServer
    """Server class for all configs; the abstract default chooses by `server_type`."""

    def __init__(
        self, config: BaseEnvConfig, server_configs: Any, slurm: bool = False, testing: bool = False
    ) -> None:
        keep_removed_games()
        self.config = config
        self.testing = testing
        self.max_token_length = config.max_token_length
        self.eval_metrics: list[Any] = []
        self._init_reporting()
        self._init_serving()
        if isinstance(server_configs, tuple):
            server_configs = list(server_configs)
        elif not isinstance(server_configs, list | ServerBaseline):
            server_configs = [server_configs]
        self.server = ServerManager(
            server_configs,
            slurm=slurm,
            testing=testing,
            server_class=self.server_cls,
            reasoning_config=ReasoningConfig.from_env_config(config),
        )
        self.server_configs: list[Any] = (
            server_configs
            if isinstance(server_configs, list)
            else [server.config for server in self.server.servers]
        )
        self.tokenizer = (
            _load_tokenizer(config.tokenizer_name)
            if self.tokenizer is None
            else keep_earlier_calls(self.tokenizer)
        )
        self.max_num_workers = self._most_workers()
        self.jsonl_writer = None
        if config.data_path_to_save_groups is not None:
            self.jsonl_writer = GroupWriter(config.data_path_to_save_groups)
            config.data_path_to_save_groups = str(self.jsonl_writer.path)

    def _init_reporting(self) -> None:
        path = self.config.metrics_path
        self.run_log = RunLog(
            use_wandb=self.config.use_wandb,
            metrics_path=None if path is None else Path(path),
            use_tensorboard=self.config.use_tensorboard,
        )
        self.run_figures = RunFigures()
        self._side_thread = SideThread()
        self.drop_counts = Counter()
        self.failure_counts = Counter()
        self.straggler_counts = Counter()
        self.note_counts = Counter()
        self.completion_lengths = []
        self.reward_parts_since_log = PartSums()
        self.rollouts_for_wandb = []
        self.task_duration = []
        self.succeeded_task_duration = []
        self.failed_task_duration = []
        self.task_successful = []
        self.mainloop_timings = []
        self.workers_added_list = []
        self.curr_step = 0
        self.max_token_len = -1
        self.wandb_project = None
        self.wandb_group = None
        self.wandb_prepend = None
        self.checkpoint_dir = ""
        self.checkpoint_interval = -1

    def _init_serving(self) -> None:
        self.rollout_scheduler = RolloutScheduler(
            # Looked up at each call, so that instances may replace their hooks.
            run_rollout=lambda item_uuid: self.handle_env(item_uuid),
            next_item=lambda: settle(self.get_next_item()),
            count_failure=self.count_failure,
            count_straggler=self.count_straggler,
        )
        self.evaluation_runner = EvaluationRunner(
            on_end=self.rollout_scheduler.wake, count_failure=self.count_failure
        )
        self.eval_workers: set[Any] = set()
        self.service_session = None
        self.env_id = None
        self.status_dict = None
        self.items_sent_this_step = 0
        self.last_loop_time = None
        self._asked_steps = self.config.total_steps
        self._groups_in_status = 0
        self._failures_in_a_row = 0
        self._failures_told = 0
        self._repeated_errors = RepeatedErrors(logger)
        self._trainer_steps = -1
        self._num_evaluations_logged = 0
        self._step_logged = 0
        self._engine_watch = EngineWatch([])

    def _service_token(self) -> str | None:
        # Not kept: what holds no secret cannot show one.
        return os.environ.get("ATROPOS_API_TOKEN")

    @cached_property
    def client(self) -> Any:
        """An asynchronous OpenAI client of the first inference server."""
        import openai

        config = self.server_configs[0]
        return openai.AsyncOpenAI(
            api_key=config.key_for_client, base_url=config.known_base_url, timeout=config.timeout
        )

    @cached_property
    def wandb(self) -> Any:
        """The `wandb` module when metrics go there, or None; may be assigned."""
        return _lookup("wandb") if self.config.use_wandb else None

    @classmethod
    def cli(cls) -> NoReturn:
        """Run the command line `serve | process | evaluate` and exit."""
        from atroposlib.envs.commands import run_cli

        run_cli(cls)

    @classmethod
    def check_inputs(cls, config: BaseEnvConfig) -> None:
        """Find out whether what the environment reads is there; override it to add checks.

        Called by its commands before anything is loaded; `check` leaves it to `setup`.

        Raises:
            ConfigError: something is missing; the message says what and where.
        """

    @classmethod
    def get_cli_serve_config_cls(cls) -> type:
        """Return the command class of `serve`; override it to add flags."""
        from atroposlib.envs.commands import serve_command

        return serve_command(cls)

    @classmethod
    def get_cli_process_config_cls(cls) -> type:
        """Return the command class of `process`."""
        from atroposlib.envs.commands import process_command

        return process_command(cls)

    @classmethod
    def get_cli_evaluate_config_cls(cls) -> type:
        """Return the command class of `evaluate`."""
        from atroposlib.envs.commands import evaluate_command

        return evaluate_command(cls)

    @classmethod
    def get_cli_check_config_cls(cls) -> type:
        """Return the command class of `check`."""
        from atroposlib.envs.check import check_command

        return check_command(cls)
