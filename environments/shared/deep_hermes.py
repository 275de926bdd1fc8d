"""Settings that the environments published for the same 8B thinking model have in common."""

from __future__ import annotations

from typing import Any, TypeVar

from atroposlib.envs.base import APIServerConfig, BaseEnvConfig, EvalHandlingEnum

__all__ = ["deep_hermes_settings"]

MODEL = "NousResearch/DeepHermes-3-Llama-3-8B-Preview"

Config = TypeVar("Config", bound=BaseEnvConfig)


def deep_hermes_settings(
    config_cls: type[Config], **settings: Any
) -> tuple[Config, APIServerConfig]:
    """Return what `config_init` of such an environment returns.

    Args:
        config_cls: the environment's config class.
        settings: what is its own; they win.
    """
    common = {
        "tokenizer_name": MODEL,
        "batch_size": 1024,
        "inference_weight": 1.0,
        "eval_handling": EvalHandlingEnum.LIMIT_TRAIN,
        "eval_limit_ratio": 0.1,
    }
    server = APIServerConfig(
        model_name=MODEL,
        base_url="http://localhost:9004/v1",
        api_key="x",
        server_type="vllm",
        num_max_requests_at_once=32,
        num_requests_for_eval=256,
    )
    return config_cls(**{**common, **settings}), server
