"""Completions with distinct first tokens: the first tokens are drawn, and each is continued."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

__all__ = ["generate_with_diverse_first_tokens"]

_TOP_LOGPROBS = 20


class _HasServer(Protocol):
    """The attributes that an environment needs to call the function."""

    server: Any

    @property
    def fallback_generate(self) -> Callable[..., Awaitable[list[str]]]:
        """Called with the arguments of the function below, for servers without logprobs."""


async def generate_with_diverse_first_tokens(
    self: _HasServer,
    messages: Sequence[Mapping[str, Any]],
    prefill: str = "",
    n: int = 8,
    max_tokens: int = 4096,
    temperature: float = 1.0,
) -> list[str]:
    """Generate up to `n` completions, each with a different first token.

    Meant as a method of an environment. Waits for one request for the most likely first tokens,
    then for one request per drawn token; cancelling is safe.

    Args:
        self: the environment.
        messages: messages of the prompt.
        prefill: prefix of every completion.
        n: number of completions; there are fewer if the server returns fewer first tokens.
        max_tokens: maximum tokens per completion, the first one included.
        temperature: temperature of the draw and of the continuations.

    Returns:
        The completions, with the first token and without the prefill.
    """
    opened = [*messages, {"role": "assistant", "content": prefill}]
    first = await self.server.chat_completion(
        messages=opened,
        n=1,
        max_tokens=1,
        temperature=0.0,
        logprobs=True,
        top_logprobs=_TOP_LOGPROBS,
    )
    logprobs = _first_token_logprobs(first)
    if not logprobs:
        return await self.fallback_generate(list(messages), prefill, n, max_tokens, temperature)

    async def continue_from(token: str) -> str:
        reply = {"role": "assistant", "content": prefill + token}
        completion = await self.server.chat_completion(
            messages=[*messages, reply],
            n=1,
            max_tokens=max_tokens - 1,
            temperature=temperature,
            top_p=0.3,
            extra_body={"min_p": 0.5, "repetition_penalty": 1.05},
        )
        return token + (completion.choices[0].message.content or "")

    tokens = _draw(logprobs, n, temperature)
    return list(await asyncio.gather(*(continue_from(token) for token in tokens)))


def _first_token_logprobs(completion: Any) -> dict[str, float]:
    logprobs = getattr(completion.choices[0], "logprobs", None)
    if logprobs is None or not logprobs.content:
        return {}
    return {entry.token: entry.logprob for entry in logprobs.content[0].top_logprobs}


def _draw(logprobs: Mapping[str, float], n: int, temperature: float) -> list[str]:
    """Draw distinct tokens, weighted by `exp(logprob / temperature)`.

    Source: Efraimidis & Spirakis 2006, "Weighted random sampling with a reservoir": the n largest
    `log(u) / weight` are a weighted sample without replacement.
    """
    scale = max(temperature, 1e-6)
    keys = {
        token: logprob / scale - math.log(random.expovariate(1.0) or 1e-300)
        for token, logprob in logprobs.items()
    }
    return sorted(keys, key=keys.__getitem__, reverse=True)[: max(0, n)]
