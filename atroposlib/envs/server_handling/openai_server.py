"""Any OpenAI-compatible provider: chat and text completions, no token ids."""

from __future__ import annotations

from typing import Any

from atroposlib.envs.server_handling.config import resolve_openai_configs
from atroposlib.envs.server_handling.openai_compatible import OpenAICompatibleServer
from atroposlib.envs.server_handling.server_baseline import (
    APIServer,
    APIServerConfig,
    AsyncSemWithAdaptiveWeight,
    OpenaiConfig,
    ReasoningConfig,
    TokensAndLogprobs,
)
from atroposlib.errors import NoTokenIdsError

__all__ = [
    "APIServer",
    "APIServerConfig",
    "AsyncSemWithAdaptiveWeight",
    "OpenAIServer",
    "OpenaiConfig",
    "ReasoningConfig",
    "resolve_openai_configs",
]


class OpenAIServer(OpenAICompatibleServer):
    """A provider that offers only the OpenAI protocol.

    The protocol has no token ids. Tracked sessions tokenize the texts (see `text_sampling`), which
    suits data generation, distillation, evaluation and judges, but not a policy gradient.
    """

    gives_token_ids = False

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> TokensAndLogprobs:
        raise NoTokenIdsError("the OpenAI protocol returns no token ids; use server_type vllm")
