"""The settings that environments were published with, environment by environment."""

from __future__ import annotations

from typing import Any

import pytest

from atroposlib.envs.base import BaseEnv, EvalHandlingEnum
from atroposlib.envs.commands import environment_defaults
from atroposlib.envs.settings import layer_settings
from environments import math_server, math_server_zero
from environments.code_execution_server.code_execution_server import CodeConfig, CodingEnv
from environments.dataset_environment.dataset_env import DatasetEnvConfig
from environments.fundamental_prediction_environment import FundamentalPredictionEnv
from environments.game_environments.gymnasium.blackjack.blackjack_env_no_thinking import (
    BlackjackEnvNoThinking,
)
from environments.game_environments.gymnasium.blackjack.blackjack_env_thinking import (
    BlackjackEnv,
    BlackjackEnvConfig,
)
from environments.game_environments.gymnasium.gym_taxi import GymTaxiEnv
from environments.game_environments.textworld_env.textworld_env import (
    TextWorldEnv,
    TextWorldEnvConfig,
)
from environments.gsm8k_server import GSM8kEnv
from environments.infinimath.infinimath_env import InfiniteMathEnv, InfiniteMathEnvConfig
from environments.mcqa_thinking_env import MCQAThinkingEnv
from environments.rlaif_server import RLAIFEnv
from environments.smolagents_integration.smolagents_env import SmolagentsEnvConfig
from environments.tool_calling_server import SingleToolCallingEnv

HERMES = "NousResearch/DeepHermes-3-Llama-3-8B-Preview"
LIMITED = {"eval_handling": EvalHandlingEnum.LIMIT_TRAIN, "eval_limit_ratio": 0.1}
LARGE = {"tokenizer_name": HERMES, "batch_size": 1024, "inference_weight": 1.0, **LIMITED}
PORT_9001, PORT_9004 = "http://localhost:9001/v1", "http://localhost:9004/v1"
SLOTS = {"num_max_requests_at_once": 32, "num_requests_for_eval": 256}

ENVIRONMENTS: dict[type[BaseEnv], tuple[dict[str, Any], dict[str, Any]]] = {
    GSM8kEnv: (
        {"tokenizer_name": "NousResearch/DeepHermes-3-Llama-3-3B-Preview", "group_size": 8}
        | {"total_steps": 1000, "batch_size": 12, "steps_per_eval": 100, "dataset_path": None}
        | {"max_token_length": 2048, "wandb_name": "gsm8k", "temperature": 1.0}
        | {"eval_temperature": 0.0},
        {"base_url": PORT_9001, "api_key": "x", "num_requests_for_eval": 256},
    ),
    MCQAThinkingEnv: (
        {**LARGE, "group_size": 32, "max_num_workers": 128, "total_steps": 2000}
        | {"steps_per_eval": 20, "max_token_length": 15360, "wandb_name": "mcqa_deep_thinking"}
        | {"temperature": 1.0, "eval_temperature": 0.5},
        {"base_url": PORT_9004, "model_name": HERMES, **SLOTS},
    ),
    RLAIFEnv: (
        {**LARGE, "group_size": 2, "max_num_workers": 6144, "total_steps": 1000}
        | {"steps_per_eval": 10000, "max_token_length": 8192, "wandb_name": "rlaif"}
        | {"steering_probability": 0.05, "num_verdicts": 3},
        {"base_url": PORT_9004, "model_name": HERMES},
    ),
    SingleToolCallingEnv: (
        {"tokenizer_name": HERMES, "batch_size": 1024, **LIMITED, "group_size": 16}
        | {"steps_per_eval": 25, "max_num_workers_per_node": 16, "min_batch_allocation": 0.1}
        | {"total_steps": 2000, "max_token_length": 16384, "wandb_name": "toolcall_think"}
        | {"temperature": 0.8},
        {"base_url": PORT_9004, "model_name": HERMES},
    ),
    FundamentalPredictionEnv: (
        {**LARGE, "group_size": 16, "max_num_workers": 128, "total_steps": 2000}
        | {"steps_per_eval": 20, "max_token_length": 16384}
        | {"wandb_name": "fundamental_metric_prediction"}
        | {"temperature": 0.8, "eval_temperature": 0.2, "magnitude_in_score": False},
        {"base_url": PORT_9004, "model_name": HERMES},
    ),
    math_server.MathEnv: (
        {"tokenizer_name": "NousResearch/Hermes-4-14B", "group_size": 16, "batch_size": 1024}
        | {"max_token_length": 16384, "max_num_workers_per_node": 12, "inference_weight": 4}
        | {"min_batch_allocation": 0.1, "steps_per_eval": 25, "total_steps": 1000, **LIMITED}
        | {"run_evaluation": True, "mask_too_long_completions": True, "percent_to_judge": 0.3}
        | {"percent_length_penalty": 0.1, "wandb_name": "math"},
        {"base_url": PORT_9004, "server_type": "sglang"},
    ),
    math_server_zero.MathEnv: (
        {"tokenizer_name": "Qwen/Qwen3-4B-Instruct-2507", "batch_size": 64, "total_steps": 120}
        | {"steps_per_eval": 20, "max_token_length": 32000, "start_tok_length": 32000}
        | {"max_num_workers_per_node": 24, "worker_timeout": 1500, **LIMITED}
        | {"percent_length_penalty": 0.0, "wandb_name": "math-zero-env"},
        {"base_url": PORT_9001, "server_type": "vllm", "num_requests_for_eval": 256},
    ),
    InfiniteMathEnv: (
        {"tokenizer_name": "NousResearch/Nous-Hermes-2-Yi-34B", "group_size": 8}
        | {"max_num_workers": 64, "total_steps": 10000, "batch_size": 1024, "steps_per_eval": 25}
        | {"max_token_length": 4096, "min_evaluations": 10, "incorrect_reward": -0.5}
        | {"length_threshold_ratio": 0.6}
        | {"data_path_to_save_groups": "data/infinite_math_groups.jsonl"},
        {},
    ),
    CodingEnv: (
        {"tokenizer_name": "Qwen/Qwen3-14B", "group_size": 8, "total_steps": 600}
        | {"batch_size": -1, "steps_per_eval": 10, "max_batches_offpolicy": 2}
        | {"max_eval_workers": 128, "eval_handling": EvalHandlingEnum.STOP_TRAIN}
        | {"max_token_length": 32768, "min_items_sent_before_logging": 0}
        | {"worker_timeout": 7200, "temperature": 1.0, "top_p": 1.0, "eval_temperature": 0.6},
        {},
    ),
    BlackjackEnv: (
        {**LARGE, "group_size": 16, "max_num_workers": 128, "total_steps": 2000}
        | {"steps_per_eval": 20, "max_token_length": 16384},
        {"base_url": PORT_9004, "model_name": HERMES, **SLOTS},
    ),
    BlackjackEnvNoThinking: (
        {"tokenizer_name": HERMES, "group_size": 16, "max_token_length": 2048}
        | {"steps_per_eval": 50, "max_episode_turns": 10, "eval_episodes": 100}
        | {"temperature": 0.5, "max_turn_tokens": 512},
        {"base_url": PORT_9001},
    ),
}


@pytest.mark.parametrize(
    "env_cls", ENVIRONMENTS, ids=lambda cls: f"{cls.__module__.rsplit('.', 1)[-1]}.{cls.__name__}"
)
def test_config_init_gives_the_published_settings(env_cls: type[BaseEnv]) -> None:
    published, of_server = ENVIRONMENTS[env_cls]

    config, servers = env_cls.config_init()

    [server] = servers if isinstance(servers, list) else [servers]
    assert {name: getattr(config, name) for name in published} == published
    assert {name: getattr(server, name) for name in of_server} == of_server


@pytest.mark.parametrize(
    ("env_cls", "name"),
    [
        (GSM8kEnv, "gsm8k"),
        (math_server.MathEnv, "math"),
        (math_server_zero.MathEnv, "math"),
        (BlackjackEnvNoThinking, "blackjack_no_thinking"),
        (GymTaxiEnv, "gym_taxi"),
    ],
)
def test_environment_has_its_published_name(env_cls: type[BaseEnv], name: str) -> None:
    assert env_cls.name == name


@pytest.mark.parametrize(
    ("config_cls", "settings", "defaults"),
    [
        (
            DatasetEnvConfig,
            {"dataset_name": "d", "prompt_field": "q"},
            {"dataset_config": None, "split": "train", "dataset_path": None}
            | {"answer_field": None, "ground_truth_field": None, "system_prompt": None}
            | {"prefill": None, "shuffle_dataset": True, "max_generations_per_prompt": 1}
            | {"include_messages_in_scoring": False, "reward_funcs": [], "reward_functions": []}
            | {"temperature": 0.7, "top_p": 0.9, "max_tokens": 4096, "length_warmup_steps": 0}
            | {"min_tokens": 0, "eval_dataset_name": None, "eval_dataset_config": None}
            | {"eval_dataset_split": None},
        ),
        (
            InfiniteMathEnvConfig,
            {},
            {"starting_level": 1, "progress_threshold": 0.8, "min_evaluations": 5}
            | {"max_attempts_per_problem": 3, "correct_reward": 1.0, "incorrect_reward": -1.0}
            | {"think_block_bonus": 0.2, "boxed_answer_bonus": 0.2, "temperature": 0.7}
            | {"apply_length_penalty": True, "length_threshold_ratio": 0.5, "top_p": 0.9}
            | {"word_problem_model_name": "gpt-4.1-mini", "word_problem_openai_base_url": None},
        ),
        (
            CodeConfig,
            {},
            {"dataset_name": "normal", "temperature": 0.6, "eval_temperature": 0.6, "top_p": 0.95}
            | {"eval_top_p": 0.95, "start_idx": 0, "max_eval_token_length": 40960},
        ),
        (
            BlackjackEnvConfig,
            {},
            {"env_name": "Blackjack-v1", "temperature": 0.7, "top_p": 0.9, "max_turns": 5}
            | {"wandb_name": "blackjack", "thinking_active": True, "eval_episodes": 100}
            | {"max_think_chars_history": 3000, "max_trajectory_tokens": 24576}
            | {"debug_mode": False, "group_size": 16, "tiebreak_token_factor": 0.01},
        ),
        (
            TextWorldEnvConfig,
            {},
            {"env_name": "TextWorld", "group_size": 16, "max_num_workers": 16, "total_steps": 500}
            | {"max_steps": 300, "max_token_length": 32768, "randomize_challenge_settings": True},
        ),
        (
            math_server_zero.RSConfig,
            {},
            {"start_tok_length": 8192, "run_evaluation": True, "mask_too_long_completions": True},
        ),
        (
            SmolagentsEnvConfig,
            {},
            {"dataset_path": "data/gaia", "split": "validation", "use_chat_completion": True}
            | {"max_steps": 12, "agent_verbosity": 2, "scoring_strategy": "combined"}
            | {"length_penalty_weight": 0.1, "save_full_traces": True, "debug_scoring": False}
            | {"max_concurrent_processes": 5, "process_timeout": 240},
        ),
    ],
)
def test_settings_have_the_published_names_and_defaults(
    config_cls: type[Any], settings: dict[str, Any], defaults: dict[str, Any]
) -> None:
    config = config_cls(**settings)

    assert {name: getattr(config, name) for name in defaults} == defaults


@pytest.mark.parametrize("is_random", [True, False])
def test_flag_decides_whether_settings_of_textworld_are_drawn(is_random: bool) -> None:
    flags = {"env.randomize_challenge_settings": is_random, "env.adapter_args": {"cache_games": 2}}

    settings = layer_settings("serve", environment_defaults(TextWorldEnv), {}, flags)

    drawn = {"randomize": is_random, "normalize": False, "cache_games": 2}
    assert settings.env.adapter_args == drawn  # type: ignore[attr-defined]


def test_key_of_the_storyteller_is_that_of_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from the shell")

    config = InfiniteMathEnvConfig()

    assert config.word_problem_openai_api_key == "from the shell"  # pragma: allowlist secret
    assert "from the shell" not in repr(config)
