"""Every setting of an environment: its default, its bounds, its flag, and light help."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from atroposlib.envs.commands import evaluate_command, process_command, serve_command
from atroposlib.envs.config import (
    BaseEnvConfig,
    EvalHandlingEnum,
    ScoreBackendEnum,
    StragglerPolicyEnum,
)
from atroposlib.envs.server_handling.config import (
    APIServerConfig,
    ServerBaseline,
    ServerManagerConfig,
)
from atroposlib.envs.settings import flags_of, read_flags

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]

ENV_DEFAULTS: dict[str, Any] = {
    "group_size": 4,
    "max_num_workers": -1,
    "max_eval_workers": 16,
    "max_num_workers_per_node": 8,
    "steps_per_eval": 100,
    "max_token_length": 2048,
    "eval_handling": EvalHandlingEnum.STOP_TRAIN,
    "eval_limit_ratio": 0.5,
    "inference_weight": 1.0,
    "batch_size": -1,
    "max_batches_offpolicy": 3,
    "tokenizer_name": "NousResearch/DeepHermes-3-Llama-3-3B-Preview",
    "use_wandb": True,
    "rollout_server_url": "http://localhost:8000",
    "total_steps": 1000,
    "wandb_name": None,
    "num_rollouts_to_keep": 32,
    "num_rollouts_per_group_for_logging": 1,
    "ensure_scores_are_not_same": True,
    "data_path_to_save_groups": None,
    "data_dir_to_save_evals": None,
    "min_items_sent_before_logging": 2,
    "include_messages": False,
    "min_batch_allocation": None,
    "worker_timeout": 600,
    "thinking_mode": False,
    "reasoning_effort": None,
    "max_reasoning_tokens": None,
    "custom_thinking_prompt": None,
    "metrics_path": None,  # ours: the local metrics log
    "use_tensorboard": False,  # ours: the same metrics for TensorBoard
    # ours: what the scheduler does with rollouts that lag behind, and where scores are computed
    "straggler_batches": 0.0,
    "straggler_policy": "WAIT",
    "straggler_timeout_s": 0.0,
    "straggler_retries": 2,
    "min_group_size": 2,
    "rollout_grace_s": 10.0,
    "end_with_trainer": True,
    "engine_timeout": 900.0,
    "score_backend": "PROCESS",
    "num_score_workers": 2,
    "score_timeout_s": 20.0,
}
SERVER_DEFAULTS: dict[str, Any] = {
    "timeout": 1200,
    "num_max_requests_at_once": 512,
    "num_requests_for_eval": 64,
    "model_name": "default",
    "rolling_buffer_length": 1000,
    "server_type": "openai",
    "tokenizer_name": "none",
    "api_key": "",
    "base_url": "",
    "n_kwarg_is_ignored": False,
    "health_check": True,
    "startup_timeout": 600.0,  # ours: how long a server that never answered is waited for
}
MANAGER_DEFAULTS: dict[str, Any] = {
    "slurm": False,
    "testing": False,
    "max_n_completions": 8,
    "proxy_url": None,
}
TYPED = {
    "group_size": ("8", 8),
    "max_num_workers": ("-1", -1),
    "max_eval_workers": ("2", 2),
    "max_num_workers_per_node": ("2", 2),
    "steps_per_eval": ("-1", -1),
    "max_token_length": ("64", 64),
    "eval_handling": ("LIMIT_TRAIN", EvalHandlingEnum.LIMIT_TRAIN),
    "eval_limit_ratio": ("0.25", 0.25),
    "inference_weight": ("-1", -1.0),
    "batch_size": ("16", 16),
    "max_batches_offpolicy": ("0", 0),
    "tokenizer_name": ("gpt2", "gpt2"),
    "use_wandb": ("False", False),
    "rollout_server_url": ("http://api:1/", "http://api:1/"),
    "total_steps": ("-1", -1),
    "wandb_name": ("None", None),
    "num_rollouts_to_keep": ("0", 0),
    "num_rollouts_per_group_for_logging": ("-1", -1),
    "ensure_scores_are_not_same": ("no", False),
    "data_path_to_save_groups": ("a/b.jsonl", "a/b.jsonl"),
    "data_dir_to_save_evals": ("evals", "evals"),
    "min_items_sent_before_logging": ("-1", -1),
    "include_messages": ("1", True),
    "min_batch_allocation": ("None", None),
    "worker_timeout": ("1e3", 1000.0),
    "thinking_mode": ("true", True),
    "reasoning_effort": ("none", "none"),
    "max_reasoning_tokens": ("None", None),
    "custom_thinking_prompt": ("-think-", "-think-"),
    "metrics_path": ("m.jsonl", "m.jsonl"),
    "use_tensorboard": ("true", True),
    "straggler_batches": ("0.75", 0.75),
    "straggler_policy": ("RETRY", StragglerPolicyEnum.RETRY),
    "straggler_timeout_s": ("7.5", 7.5),
    "straggler_retries": ("5", 5),
    "min_group_size": ("3", 3),
    "rollout_grace_s": ("2.5", 2.5),
    "end_with_trainer": ("false", False),
    "engine_timeout": ("60", 60.0),
    "score_backend": ("THREAD", ScoreBackendEnum.THREAD),
    "num_score_workers": ("3", 3),
    "score_timeout_s": ("1.5", 1.5),
}

SCRIPT = """
import sys
from atroposlib.envs import commands
from atroposlib.envs.check import check_command
from atroposlib.envs.config import BaseEnvConfig
from atroposlib.envs.server_handling.config import APIServerConfig

class Config(BaseEnvConfig):
    colour: str = "red"

class Env:
    name = "light"
    env_config_cls = Config
    @classmethod
    def config_init(cls):
        # pragma: allowlist nextline secret
        return Config(group_size=77), [APIServerConfig(api_key="sk-secret", timeout=55)]
    get_cli_serve_config_cls = classmethod(commands.serve_command)
    get_cli_process_config_cls = classmethod(commands.process_command)
    get_cli_evaluate_config_cls = classmethod(commands.evaluate_command)
    get_cli_check_config_cls = classmethod(check_command)

try:
    commands.run_cli(Env)
finally:
    heavy = "torch transformers wandb datasets openai fastapi aiohttp vllm".split()
    print(*(name for name in heavy if name in sys.modules), file=sys.stderr)
"""


class Env:
    name = None
    env_config_cls = BaseEnvConfig

    @classmethod
    def config_init(cls) -> Any:
        return BaseEnvConfig(), ServerBaseline()


def test_base_env_config_has_exactly_the_contract_fields_and_defaults() -> None:
    assert BaseEnvConfig().model_dump() == ENV_DEFAULTS


def test_server_configs_have_exactly_the_contract_fields_and_defaults() -> None:
    baseline_names = list(SERVER_DEFAULTS)[:7]

    assert APIServerConfig().model_dump() == SERVER_DEFAULTS
    assert ServerBaseline().model_dump() == {name: SERVER_DEFAULTS[name] for name in baseline_names}
    assert ServerManagerConfig().model_dump() == MANAGER_DEFAULTS


def test_base_env_config_describes_every_field() -> None:
    for model in (BaseEnvConfig, APIServerConfig, ServerManagerConfig):
        for name, field in model.model_fields.items():
            assert (field.description or "").endswith("."), name


def test_base_env_config_unknown_keywords_become_attributes() -> None:
    config = BaseEnvConfig(group_name="g", start_tok_length=3)

    assert (config.group_name, config.start_tok_length) == ("g", 3)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("tokens", "valid"), [(1023, False), (1024, True), (32000, True), (32001, False)]
)
def test_base_env_config_max_reasoning_tokens_is_bounded(tokens: int, valid: bool) -> None:
    if valid:
        assert BaseEnvConfig(max_reasoning_tokens=tokens).max_reasoning_tokens == tokens
    else:
        with pytest.raises(ValidationError):
            BaseEnvConfig(max_reasoning_tokens=tokens)


def test_base_env_config_min_batch_allocation_above_one_is_the_services_to_scale() -> None:
    assert BaseEnvConfig(min_batch_allocation=1.5).min_batch_allocation == 1.5


def test_eval_handling_values_are_their_names() -> None:
    assert {member.name: member.value for member in EvalHandlingEnum} == {
        "STOP_TRAIN": "STOP_TRAIN",
        "LIMIT_TRAIN": "LIMIT_TRAIN",
        "NONE": "NONE",
    }


@pytest.mark.parametrize("make", [serve_command, process_command, evaluate_command])
def test_commands_have_exactly_the_contract_flags(make: Any) -> None:
    names = [flag.name for flag in flags_of(make(Env))]

    assert sorted(names) == sorted(
        [
            *(f"env.{name}" for name in ENV_DEFAULTS),
            *(f"openai.{name}" for name in SERVER_DEFAULTS),
            *MANAGER_DEFAULTS,
            "config",
            *([] if make is evaluate_command else ["quiet"]),  # ours: no live view
        ]
    )


def test_serve_flags_default_to_the_class_defaults() -> None:
    defaults = {flag.name: flag.default for flag in flags_of(serve_command(Env))}

    for prefix, table in (("env.", ENV_DEFAULTS), ("openai.", SERVER_DEFAULTS)):
        assert {name: defaults[prefix + name] for name in table} == table
    assert {name: defaults[name] for name in MANAGER_DEFAULTS} == MANAGER_DEFAULTS


@pytest.mark.parametrize("name", ENV_DEFAULTS)
@pytest.mark.parametrize("joined", [True, False])
def test_serve_env_flag_sets_its_field(name: str, joined: bool) -> None:
    word, value = TYPED[name]
    command_class = serve_command(Env)
    words = [f"--env.{name}={word}"] if joined else [f"--env.{name}", word]

    command = command_class(**read_flags(words, flags_of(command_class)))

    assert command.typed_flags() == {f"env.{name}": value}


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["serve", "--help"], ["process", "-h"]])
def test_help_shows_own_settings_and_what_is_often_needed(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stderr.strip()) == (0, "")
    own, often = done.stdout.split("\nOften needed:\n")
    assert own.split("\nSettings of this environment:\n")[1].startswith("  --env.colour TEXT\n")
    for name in ("config", "env.tokenizer_name", "env.group_size", "openai.base_url"):
        assert f"  --{name} " in often
    assert "--env.straggler_policy" not in done.stdout
    assert "--help all" in often
    assert "sk-secret" not in done.stdout


@pytest.mark.parametrize(
    "words",
    [["--help", "all"], ["-h", "all"], ["serve", "--help=all"], ["process", "--help", "all"]],
)
def test_help_lists_every_flag_with_its_effective_default_and_stays_light(
    words: list[str],
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stderr.strip()) == (0, "")
    for name in (*(f"env.{name}" for name in ENV_DEFAULTS), *MANAGER_DEFAULTS, "config"):
        assert f"  --{name} " in done.stdout
    assert "(default: 77)" in done.stdout
    assert "(default: 55)" in done.stdout
    assert "sk-secret" not in done.stdout
