"""Evaluations whose replies are graded by a judge, a model on a server of its own by default.

    item ─► one chat ─► reply ─► request, with quoted texts ─► judge ─► verdict ─► EvalGrade

A reply without text is not sent to the judge. A verdict counts if the judge gives exactly one; a
missing one is the lowest grade, and a metric has their share.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from atroposlib.envs.base import APIServerConfig, ServerManager
from atroposlib.envs.server_handling.chat_rendering import text_of_content
from atroposlib.errors import ConfigError, ContextOverflowError
from atroposlib.tasks.evaluations import EvalFamilyConfig, EvaluationEnv

__all__ = [
    "HostedJudgeConfig",
    "JudgeModel",
    "JudgedEvalConfig",
    "JudgedEvaluationEnv",
    "judge_of",
]

logger = logging.getLogger(__name__)


class JudgedEvalConfig(EvalFamilyConfig):
    """Settings of the evaluations with a model as judge."""

    judge_model_name: str | None = Field(
        None, description="Model of the judge; None uses the evaluated model."
    )
    judge_base_url: str | None = Field(
        None,
        description="URL of the judge's server, ending in /v1; None uses the servers of the "
        "evaluated model.",
    )
    judge_api_key_env: str = Field(
        "OPENAI_API_KEY", description="Environment variable with the key of the judge's server."
    )
    judge_temperature: float = Field(0.0, ge=0, description="Sampling temperature of the judge.")
    judge_max_tokens: int = Field(
        2048, ge=1, le=65536, description="Token limit of the judge's reply."
    )


class HostedJudgeConfig(JudgedEvalConfig):
    """Settings of the evaluations whose judge is `gpt-4o` at OpenAI by default."""

    judge_model_name: str | None = Field(
        "gpt-4o", description="Model of the judge; None uses the evaluated model."
    )
    judge_base_url: str | None = Field(
        "https://api.openai.com/v1",
        description="URL of the judge's server, ending in /v1; None uses the servers of the "
        "evaluated model, and that model.",
    )


class JudgeModel:
    """The judge of an evaluation, which gets requests of one message; created by `judge_of`.

    Args:
        server: object with `chat_completion`.
        is_own: Whether the server is closed with the judge.
        temperature: sampling temperature.
        max_tokens: token limit of a reply.
        max_concurrent_calls: maximum number of requests at a time; None: the server's limit.
    """

    def __init__(
        self,
        server: Any,
        *,
        is_own: bool,
        temperature: float,
        max_tokens: int,
        max_concurrent_calls: int | None = None,
    ) -> None:
        self._server = server
        self._is_own = is_own
        self._sampling = {"n": 1, "temperature": temperature, "max_tokens": max_tokens}
        calls = max_concurrent_calls
        self._slots = contextlib.nullcontext() if calls is None else asyncio.Semaphore(calls)

    async def reply(self, request: str) -> str:
        """Return the reply; empty if it was truncated, or if the request exceeds the context."""
        messages = [{"role": "user", "content": request}]
        try:
            async with self._slots:
                chat = await self._server.chat_completion(
                    messages=messages, split="eval", **self._sampling
                )
        except ContextOverflowError:
            logger.debug("a request of %d characters exceeds the judge's context", len(request))
            return ""
        choice = chat.choices[0]
        return "" if choice.finish_reason == "length" else text_of_content(choice.message.content)

    async def close(self) -> None:
        if self._is_own:
            await self._server.close()


def judge_of(env: EvaluationEnv, *, max_concurrent_calls: int | None = None) -> JudgeModel:
    """Return the judge that the settings of an evaluation name.

    Raises:
        ConfigError: a judge at an `https` address has no key.
    """
    config: JudgedEvalConfig = env.config  # type: ignore[assignment]
    server = env.server
    if config.judge_base_url is not None:
        is_hosted = config.judge_base_url.startswith("https://")
        if is_hosted and not os.environ.get(config.judge_api_key_env):
            raise ConfigError(
                f"{config.judge_api_key_env} is not set, and the judge at {config.judge_base_url} "
                "needs its key: set it, name another variable with --env.judge_api_key_env, or "
                "let the evaluated model judge with --env.judge_base_url None"
            )
        own = APIServerConfig(
            model_name=config.judge_model_name or env.server_configs[0].model_name,
            base_url=config.judge_base_url,
            api_key=os.environ.get(config.judge_api_key_env),
            health_check=False,
        )
        server = ServerManager([own])
    return JudgeModel(
        server,
        is_own=server is not env.server,
        temperature=config.judge_temperature,
        max_tokens=config.judge_max_tokens,
        max_concurrent_calls=max_concurrent_calls,
    )


class JudgedEvaluationEnv(EvaluationEnv):
    """An evaluation whose replies are graded by a judge; implement `grade` with `self.judge`.

    Attributes:
        judge: the judge.
    """

    env_config_cls = JudgedEvalConfig
    config: JudgedEvalConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.judge = self.make_judge()

    def make_judge(self) -> JudgeModel:
        return judge_of(self)

    def evaluation_metrics(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        metrics = super().evaluation_metrics(samples)
        del metrics[f"{self.source.prefix}total_correct"]  # scores are not right or wrong
        return metrics

    async def close(self) -> None:
        await self.judge.close()
        await super().close()
