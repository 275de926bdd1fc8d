"""The public surface of `atroposlib.envs.base`: names, identities, signatures, attributes."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from typing import Any

import pytest

from atroposlib.envs import base
from atroposlib.envs.base import BaseEnv
from tests.fakes import CharTokenizer

pytestmark = pytest.mark.slow

HOMES = {
    "APIServer": "atroposlib.envs.server_handling.server_baseline",
    "APIServerConfig": "atroposlib.envs.server_handling.server_baseline",
    "BaseEnvConfig": "atroposlib.envs.config",
    "BaseModel": "pydantic",
    "ENV_NAMESPACE": "atroposlib.envs.constants",
    "EvalHandlingEnum": "atroposlib.envs.config",
    "Field": "pydantic",
    "Item": "atroposlib.type_definitions",
    "Message": "atroposlib.type_definitions",
    "NAMESPACE_SEP": "atroposlib.envs.constants",
    "OPENAI_NAMESPACE": "atroposlib.envs.constants",
    "OpenaiConfig": "atroposlib.envs.server_handling.openai_server",
    "ReasoningConfig": "atroposlib.envs.server_handling.server_baseline",
    "ScoredDataGroup": "atroposlib.scored_data",
    "ScoredDataItem": "atroposlib.scored_data",
    "ServerBaseline": "atroposlib.envs.server_handling.server_baseline",
    "ServerManager": "atroposlib.envs.server_handling.server_manager",
    "ServerManagerConfig": "atroposlib.envs.server_handling.server_manager",
    "UUID": "atroposlib.type_definitions",
    "adjust_model_defaults": "atroposlib.utils.cli",
    "extract_namespace": "atroposlib.utils.cli",
    "generate_html": "atroposlib.frontend.jsonl2html",
    "get_double_dash_flags": "atroposlib.utils.cli",
    "get_prefixed_pydantic_model": "atroposlib.utils.cli",
    "get_std_min_max_avg": "atroposlib.utils.metrics",
    "merge_dicts": "atroposlib.utils.cli",
    "parse_http_response": "atroposlib.utils.io",
    "resolve_openai_configs": "atroposlib.envs.server_handling.openai_server",
}

SIGNATURES = {
    "__init__": "(self, config, server_configs, slurm=False, testing=False)",
    "config_init": "()",
    "setup": "(self)",
    "get_next_item": "(self)",
    "evaluate": "(self, *args, **kwargs)",
    "collect_trajectory": "(self, item)",
    "collect_trajectories": "(self, item)",
    "postprocess_histories": "(self, trajectories)",
    "wandb_log": "(self, wandb_metrics=None)",
    "create_rollout_table": "(self, wandb_metrics)",
    "add_rollouts_for_wandb": "(self, scored_data, item=None)",
    "save_checkpoint": "(self, step, data=None)",
    "load_checkpoint": "(self)",
    "cleanup": "(self)",
    "close": "(self)",
    "get_server_info": "(self)",
    "get_status": "(self)",
    "setup_wandb": "(self)",
    "env_step_checks": "(self)",
    "add_train_workers": "(self)",
    "handle_send_to_api": (
        "(self, scored_data, item=None, do_send_to_api=True, abort_on_any_max_length_exceeded=True)"
    ),
    "_send_scored_data_to_api": "(self, scored_data)",
    "perf_stats": "(self, metrics_dict)",
    "_register_env": "(self)",
    "register_env": "(self)",
    "handle_env": "(self, item_uuid)",
    "env_manager": "(self)",
    "process_manager": "(self)",
    "_run_evaluate": "(self)",
    "evaluate_log": (
        "(self, metrics, task_name=None, model_name=None, start_time=None, end_time=None, "
        "generation_parameters=None, samples=None, verbose=True)"
    ),
    "cli": "()",
    "get_cli_serve_config_cls": "()",
    "get_cli_process_config_cls": "()",
    "get_cli_evaluate_config_cls": "()",
}

SYNCHRONOUS = {
    "__init__", "config_init", "save_checkpoint", "load_checkpoint", "perf_stats", "cli",
    "get_cli_serve_config_cls", "get_cli_process_config_cls", "get_cli_evaluate_config_cls",
}  # fmt: skip

INITIAL = {
    "workers": set(),
    "eval_workers": set(),
    "backlog": [],
    "running_items": {},
    "eval_runner": None,
    "items_sent_this_step": 0,
    "curr_step": 0,
    "max_token_len": -1,
    "max_num_workers": 8,
    "completion_lengths": [],
    "rollouts_for_wandb": [],
    "task_duration": [],
    "succeeded_task_duration": [],
    "failed_task_duration": [],
    "task_successful": [],
    "mainloop_timings": [],
    "workers_added_list": [],
    "last_loop_time": None,
    "last_completed_item": None,
    "wandb_project": None,
    "wandb_group": None,
    "wandb_prepend": None,
    "checkpoint_dir": "",
    "checkpoint_interval": -1,
    "jsonl_writer": None,
    "testing": False,
    "wandb_run": None,
    "wandb": None,
    "max_token_length": 2048,
    "eval_metrics": [],
    "derived_batch_size": -1,
}


class MinimalEnv(BaseEnv):
    async def get_next_item(self) -> Any:
        return None

    async def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        return None


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> BaseEnv:
    class Tokenizers:
        @staticmethod
        def from_pretrained(name: str) -> CharTokenizer:
            return CharTokenizer()

    monkeypatch.setattr(base, "AutoTokenizer", Tokenizers)
    config = base.BaseEnvConfig(use_wandb=False)
    return MinimalEnv(config, [base.APIServerConfig(model_name="m", base_url="http://x/v1")])


@pytest.mark.parametrize(("name", "home"), HOMES.items())
def test_base_name_is_the_same_object_as_at_its_home(name: str, home: str) -> None:
    assert getattr(base, name) is getattr(importlib.import_module(home), name)


def test_base_module_names_import_as_modules() -> None:
    import aiohttp
    import transformers
    import wandb

    assert base.wandb is wandb
    assert base.aiohttp is aiohttp
    assert base.AutoTokenizer is transformers.AutoTokenizer


def test_base_every_listed_name_exists() -> None:
    assert [name for name in base.__all__ if getattr(base, name, None) is None] == []


def test_base_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = base.no_such_name


def test_base_import_leaves_heavy_packages_alone() -> None:
    heavy = "('transformers', 'wandb', 'torch', 'datasets', 'fastapi', 'openai', 'vllm')"
    code = f"import atroposlib.envs.base, sys; print([m for m in {heavy} if m in sys.modules])"

    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )

    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(("name", "expected"), SIGNATURES.items())
def test_base_env_signature(name: str, expected: str) -> None:
    method = getattr(BaseEnv, name)

    signature = inspect.signature(method)

    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    shown = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    assert shown == expected
    assert inspect.iscoroutinefunction(method) is (name not in SYNCHRONOUS)


def test_base_env_abstract_methods_are_exactly_two() -> None:
    assert BaseEnv.__abstractmethods__ == {"get_next_item", "evaluate"}


def test_base_env_class_attributes() -> None:
    assert BaseEnv.name is None
    assert BaseEnv.env_config_cls is base.BaseEnvConfig
    assert BaseEnv.server_cls is base.APIServer


@pytest.mark.parametrize(("name", "value"), INITIAL.items())
def test_base_env_initial_attribute(env: BaseEnv, name: str, value: Any) -> None:
    assert getattr(env, name) == value


def test_base_env_attributes_may_be_replaced(env: BaseEnv) -> None:
    env.backlog = ["item"]
    env.completion_lengths = [1]
    env.eval_runner = None
    env.client = "own client"
    env.wandb_run = "own run"
    env.wandb = "own module"

    assert (env.backlog, env.client, env.wandb_run) == (["item"], "own client", "own run")
    assert env.wandb == "own module"


async def test_base_env_hooks_without_default_say_so(env: BaseEnv) -> None:
    with pytest.raises(NotImplementedError, match="MinimalEnv overrides neither"):
        await env.collect_trajectory("item")
    with pytest.raises(NotImplementedError):
        await env.collect_trajectories("item")
    assert await env.setup() is None
    assert await env.cleanup() is None
    assert await env.close() is None
    assert await env.postprocess_histories("same") == "same"
