"""A second model: the judge of an environment, or the partner of a conversation.

    judge_base_url ─► server at that address ─────┐
    None ──────────► servers of the environment ──┴─► JudgeModel

The judge of an evaluation is asked as `split="eval"`, that of training as `split="train"`.
A partner reads the chat of the policy with the roles exchanged, from `chat_of_partner`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Sequence
from typing import Any, Literal, Protocol

from pydantic import BaseModel, Field

from atroposlib.envs.base import APIServerConfig, ServerManager
from atroposlib.envs.conversation import ChatMessage, visible_text
from atroposlib.envs.server_handling.chat_rendering import text_of_content
from atroposlib.errors import ConfigError, ContextOverflowError, NoVerdictError
from atroposlib.tasks.judge import Case, Votes, ask_judge

__all__ = [
    "JudgeConfig",
    "JudgeModel",
    "NoVerdictError",
    "chat_of_partner",
    "judge_of",
    "server_at",
]

logger = logging.getLogger(__name__)


class JudgeConfig(BaseModel):
    """Settings of a model as judge; a base in addition to that of the environment."""

    judge_model_name: str | None = Field(
        None,
        description="Model of the judge at `judge_base_url`; None uses the environment's own.",
    )
    judge_base_url: str | None = Field(
        None,
        description="URL of the judge's server, ending in /v1; None uses the servers of the "
        "environment, and their model.",
    )
    judge_api_key_env: str = Field(
        "OPENAI_API_KEY", description="Environment variable with the key of the judge's server."
    )
    judge_temperature: float = Field(0.0, ge=0, description="Sampling temperature of the judge.")
    judge_max_tokens: int = Field(
        2048, ge=1, le=65536, description="Token limit of the judge's reply."
    )


class JudgedEnv(Protocol):
    """Attributes of an environment that decide which model is its judge."""

    config: Any  # a JudgeConfig
    server: Any
    server_configs: list[Any]


class JudgeModel:
    """The judge of an environment; created by `judge_of`.

    Args:
        server: object with `chat_completion`.
        is_own: Whether the server is closed with the judge.
        temperature: sampling temperature.
        max_tokens: token limit of a reply.
        split: requests are those of training or of an evaluation.
        max_concurrent_calls: maximum number of requests at a time; None: the server's limit.
    """

    def __init__(
        self,
        server: Any,
        *,
        is_own: bool,
        temperature: float,
        max_tokens: int,
        split: Literal["train", "eval"] = "eval",
        max_concurrent_calls: int | None = None,
    ) -> None:
        self._server = server
        self._is_own = is_own
        self._sampling = {"temperature": temperature, "max_tokens": max_tokens, "split": split}
        calls = max_concurrent_calls
        self._slots = contextlib.nullcontext() if calls is None else asyncio.Semaphore(calls)

    async def reply(self, request: str) -> str:
        """Return the reply; empty if it was truncated, or if the request exceeds the context."""
        messages = [{"role": "user", "content": request}]
        try:
            async with self._slots:
                chat = await self._server.chat_completion(messages=messages, n=1, **self._sampling)
        except ContextOverflowError:
            logger.debug("a request of %d characters exceeds the judge's context", len(request))
            return ""
        choice = chat.choices[0]
        return "" if choice.finish_reason == "length" else text_of_content(choice.message.content)

    async def wins(self, case: Case) -> int | None:
        """Return how often the first answer wins, 0 to 2, asked once in each order.

        None unless both verdicts name an answer: one alone would repeat a preference for a place.
        """
        try:
            async with self._slots:
                votes: Votes = await ask_judge(self._server, case, num_verdicts=1, **self._sampling)
        except ContextOverflowError:
            logger.debug("two answers exceed the judge's context")
            return None
        return votes.first if votes.first + votes.second == votes.num_asked else None

    async def close(self) -> None:
        if self._is_own:
            await self._server.close()


def judge_of(
    env: JudgedEnv,
    *,
    split: Literal["train", "eval"] = "eval",
    max_concurrent_calls: int | None = None,
) -> JudgeModel:
    """Return the judge that the settings of an environment name.

    Raises:
        ConfigError: a judge at an `https` address has no key.
    """
    config: JudgeConfig = env.config
    server = env.server
    if config.judge_base_url is not None:
        server = server_at(
            config.judge_base_url,
            role="judge",
            model_name=config.judge_model_name or env.server_configs[0].model_name,
            api_key_env=config.judge_api_key_env,
        )
    return JudgeModel(
        server,
        is_own=server is not env.server,
        temperature=config.judge_temperature,
        max_tokens=config.judge_max_tokens,
        split=split,
        max_concurrent_calls=max_concurrent_calls,
    )


def chat_of_partner(
    system: str, messages: Sequence[ChatMessage], *, silence: str, max_characters: int
) -> list[dict[str, str]]:
    """Return a conversation as the partner sees it: without thinking, and with roles exchanged.

    The first message of the user is left out, since many chat templates demand that a user begins:
    `system` is to quote it.

    Args:
        system: system message of the partner.
        messages: chat of the policy.
        silence: stands for a message without text after its thinking.
        max_characters: maximum characters of a message; the rest is cut off.
    """
    roles = {"assistant": "user", "user": "assistant"}
    lines = [
        {
            "role": roles[m["role"]],
            "content": visible_text(str(m["content"]))[:max_characters] or silence,
        }
        for m in messages
        if m["role"] in roles
    ]
    return [{"role": "system", "content": system}, *lines[1:]]


def server_at(base_url: str, *, role: str, model_name: str, api_key_env: str) -> ServerManager:
    """Return the server of a second model.

    Args:
        base_url: its address, ending in /v1.
        role: start of the names of its settings, such as `judge`.
        model_name: its model.
        api_key_env: environment variable with its key.

    Raises:
        ConfigError: a server at an `https` address has no key.
    """
    if base_url.startswith("https://") and not os.environ.get(api_key_env):
        raise ConfigError(
            f"{api_key_env} is not set, and the {role} at {base_url} needs its key: set it, name "
            f"another variable with --env.{role}_api_key_env, or use the environment's own model "
            f"with --env.{role}_base_url None"
        )
    config = APIServerConfig(
        model_name=model_name,
        base_url=base_url,
        api_key=os.environ.get(api_key_env),
        health_check=False,
    )
    return ServerManager([config])
