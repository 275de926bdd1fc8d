"""Accuracy on held-out problems, measured through the engine that samples the rollouts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import aiohttp

from atroposlib.errors import InferenceError
from atroposlib.utils.text import inert_block, without_secrets
from example_trainer.demo.task import Problem

_CONCURRENT_REQUESTS = 32
"""So few that all prompts fit one step of vLLM. On a CPU, its engine ends if it has to split the
prompt of a request with a seed (`CPU Generator does not use offset`)."""
_REQUEST_TIMEOUT_S = 300.0
_TICK_S = 0.5


class HeldOutResult(NamedTuple):
    """Result of a model on the held-out problems."""

    num_correct: int
    num_problems: int

    @property
    def accuracy(self) -> float:
        """Share of correct answers, from 0 to 1."""
        return self.num_correct / self.num_problems


def measure_held_out(
    base_url: str,
    *,
    model_name: str,
    problems: Sequence[Problem],
    max_tokens: int,
    on_tick: Callable[[int], None],
) -> HeldOutResult:
    """Sample one answer per problem from an OpenAI-compatible server, at temperature 1 as rollouts.

    `on_tick` is called about twice a second with the number of answers so far, and may raise to end
    the measurement.

    Raises:
        InferenceError: A request failed; a missing answer does not count as a wrong one.
    """
    return asyncio.run(
        _measure(base_url, model_name, problems, max_tokens=max_tokens, on_tick=on_tick)
    )


async def _measure(
    base_url: str,
    model_name: str,
    problems: Sequence[Problem],
    *,
    max_tokens: int,
    on_tick: Callable[[int], None],
) -> HeldOutResult:
    timeout = aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=_CONCURRENT_REQUESTS)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def ask(number: int, problem: Problem) -> bool:
            body = {
                "model": model_name,
                "messages": problem.messages,
                "temperature": 1.0,
                "seed": number,
                "max_tokens": max_tokens,
            }
            return problem.is_correct(
                await _complete(session, f"{base_url}/chat/completions", body)
            )

        tasks = [asyncio.create_task(ask(*numbered)) for numbered in enumerate(problems)]
        pending = set(tasks)
        num_correct = 0
        try:
            while pending:
                done, pending = await asyncio.wait(pending, timeout=_TICK_S)
                on_tick(len(problems) - len(pending))
                num_correct += sum(task.result() for task in done)
        finally:
            for task in pending:
                task.cancel()
            # Retrieve all exceptions, which asyncio would otherwise log.
            await asyncio.gather(*tasks, return_exceptions=True)
    return HeldOutResult(num_correct, len(problems))


async def _complete(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> str:
    try:
        async with session.post(url, json=body) as answer:
            if answer.status != 200:
                reason = inert_block((await answer.text())[:300])
                raise InferenceError(
                    f"POST {without_secrets(url)} answered {answer.status}: {reason}"
                )
            reply = await answer.json()
    except (aiohttp.ClientError, asyncio.TimeoutError) as error:
        raise InferenceError(f"POST {without_secrets(url)} failed: {error!r}") from error
    return str(reply["choices"][0]["message"]["content"] or "")
