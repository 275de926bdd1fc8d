"""Completions that start with different tokens: drawn first tokens, each continued once."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

__all__ = ["generate_with_diverse_first_tokens"]

_TOP_LOGPROBS = 20


class _HasServer(Protocol):
    """The attributes that an environment needs to call the function."""

    server: Any

    async def fallback_generate(
        self,
        messages: list[Mapping[str, Any]],
        prefill: str,
        n: int,
        max_tokens: int,
        temperature: float,
    ) -> list[str]:
        """Generate without logprobs."""


async def generate_with_diverse_first_tokens(
    self: _HasServer,
    messages: Sequence[Mapping[str, Any]],
    prefill: str = "",
    n: int = 8,
    max_tokens: int = 4096,
    temperature: float = 1.0,
) -> list[str]:
    """Generate up to `n` completions, no two of which start with the same token.

    Meant to be used as a method of an environment. Waits for one request that asks for the most
    likely first tokens, then for one request per drawn token; cancelling is safe.

    Args:
        self: has `server`, and `fallback_generate` for servers that return no logprobs.
        messages: the chat to reply to.
        prefill: how every reply starts.
        n: completions wanted; fewer when the server names fewer first tokens.
        max_tokens: most tokens per completion, the first one included.
        temperature: of the draw and of the continuations.

    Returns:
        The completions, each with its first token and without the prefill.
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
    """Draw distinct tokens, likelier ones first, weighted by `exp(logprob / temperature)`.

    Source: Efraimidis & Spirakis 2006, "Weighted random sampling with a reservoir": the n largest
    of `log(u) / weight` are a weighted draw without repetition.
    """
    scale = max(temperature, 1e-6)
    keys = {
        token: logprob / scale - math.log(random.expovariate(1.0) or 1e-300)
        for token, logprob in logprobs.items()
    }
    return sorted(keys, key=keys.__getitem__, reverse=True)[: max(0, n)]
