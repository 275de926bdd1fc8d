"""Parts of single-turn environments: thinking in tags, and the settings of DeepHermes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any, TypeVar

from atroposlib.envs.base import (
    APIServerConfig,
    BaseEnvConfig,
    EvalHandlingEnum,
)
from atroposlib.envs.server_handling.chat_rendering import render_messages
from atroposlib.envs.single_turn_env import SingleTurnEnv

__all__ = ["DEEP_THINKING", "ThinkingEnv", "answer_after_thinking", "deep_hermes_settings"]

DEEP_THINKING = (
    "You are an AI that thinks deeply. Before you answer you may reason for as long as you need: "
    "look at the problem from several sides, try ideas, and check each step. Put all of that "
    "inside <think> </think> tags, and give your solution or answer after the closing tag."
)

THINK_TAG = re.compile(r"<(/?)think>", re.IGNORECASE)


def answer_after_thinking(completion: str) -> str | None:
    """Return what follows the thinking; None unless there is exactly one pair of tags."""
    tags = list(THINK_TAG.finditer(completion))
    if [tag[1] for tag in tags] != ["", "/"]:
        return None
    return completion[tags[1].end() :]


class ThinkingEnv(SingleTurnEnv):
    """`score` receives the whole completion; very short ones do not move the policy."""

    scores_thinking = True
    min_trained_tokens = 10

    @cached_property
    def opened_tag(self) -> str:
        """The opening tag where the chat template writes it before every answer, else empty."""
        prompt = render_messages(self.tokenizer, [{"role": "user", "content": "?"}])
        return "<think>" if prompt.rstrip().endswith("<think>") else ""


MODEL = "NousResearch/DeepHermes-3-Llama-3-8B-Preview"

SERVER = {"num_max_requests_at_once": 32, "num_requests_for_eval": 256}

Config = TypeVar("Config", bound=BaseEnvConfig)


def deep_hermes_settings(
    config_cls: type[Config], *, server: Mapping[str, Any] = SERVER, **settings: Any
) -> tuple[Config, APIServerConfig]:
    """Return what `config_init` of such an environment returns.

    Args:
        config_cls: the environment's config class.
        server: settings of the server besides its address.
        settings: what is its own; they win.
    """
    common = {
        "tokenizer_name": MODEL,
        "batch_size": 1024,
        "inference_weight": 1.0,
        "eval_handling": EvalHandlingEnum.LIMIT_TRAIN,
        "eval_limit_ratio": 0.1,
    }
    config = APIServerConfig(
        model_name=MODEL,
        base_url="http://localhost:9004/v1",
        api_key="x",
        server_type="vllm",
        **server,
    )
    return config_cls(**{**common, **settings}), config
