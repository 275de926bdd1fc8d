"""A simulated inference server: a fixed number of slots, heavy-tailed latencies, real HTTP.

A completion holds one slot while its tokens are generated. A cancelled request frees its slot at
once, and its tokens are wasted.

Usage: python inference_server.py JSON, where JSON has the fields of `Load`
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import sys
import time
from typing import Any

import msgspec
from aiohttp import web

__all__ = ["Load"]

_POOL_TOKENS = 1 << 16
_VOCABULARY = 50_000


@dataclasses.dataclass(frozen=True)
class Load:
    """Capacity of the server, and lengths of completions."""

    slots: int = 256
    """Number of completions generated at once."""
    median_tokens: int = 400
    """Median length of a completion; the lengths are log-normal."""
    spread: float = 0.8
    """Standard deviation of the logarithm of the length; 0 makes all lengths equal."""
    most_tokens: int = 4_000
    """Length of the longest completion."""
    tokens_per_s: float = 200.0
    """Tokens that one slot generates per second."""
    seed: int = 0

    def draw_tokens(self, rng: random.Random) -> int:
        """Return the length of one completion."""
        drawn = rng.lognormvariate(0.0, self.spread) * self.median_tokens
        return max(16, min(self.most_tokens, int(drawn)))

    @property
    def mean_tokens(self) -> float:
        """Mean length of a completion, estimated from a sample."""
        rng = random.Random(self.seed + 1)
        return sum(self.draw_tokens(rng) for _ in range(100_000)) / 100_000

    @property
    def completions_per_s(self) -> float:
        """Completions per second while every slot is busy."""
        return self.slots * self.tokens_per_s / self.mean_tokens


class Slots:
    """The slots, with counters of their use."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.finished_tokens = 0
        self.wasted_tokens = 0
        self.num_in_flight = 0
        self._free = asyncio.Semaphore(load.slots)
        self._rng = random.Random(load.seed)
        self._busy = 0
        self._busy_slot_s = 0.0
        self._changed_at = time.monotonic()

    async def generate(self) -> int:
        """Use a slot for one completion; return its length."""
        num_tokens = self.load.draw_tokens(self._rng)
        self.num_in_flight += 1
        try:
            async with self._free:
                await self._hold(num_tokens)
        finally:
            self.num_in_flight -= 1
        self.finished_tokens += num_tokens
        return num_tokens

    async def _hold(self, num_tokens: int) -> None:
        self._account(1)
        started = time.monotonic()
        try:
            await asyncio.sleep(num_tokens / self.load.tokens_per_s)
        except asyncio.CancelledError:
            elapsed = time.monotonic() - started
            self.wasted_tokens += int(elapsed * self.load.tokens_per_s)
            raise
        finally:
            self._account(-1)

    def _account(self, change: int) -> None:
        now = time.monotonic()
        self._busy_slot_s += self._busy * (now - self._changed_at)
        self._busy += change
        self._changed_at = now

    def figures(self) -> dict[str, float]:
        """Return the totals so far."""
        self._account(0)
        return {
            "at_s": self._changed_at,
            "busy_slot_s": self._busy_slot_s,
            "finished_tokens": self.finished_tokens,
            "wasted_tokens": self.wasted_tokens,
            "in_flight": self.num_in_flight,
        }


class Answers:
    """Completions in the format of a stock vLLM; ids and logprobs come from a pool."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self._ids = [rng.randrange(3, _VOCABULARY) for _ in range(_POOL_TOKENS)]
        self._logprobs = [round(-rng.expovariate(2.0), 6) for _ in range(_POOL_TOKENS)]
        self._rng = rng

    def body(self, lengths: list[int]) -> bytes:
        """Return a response with one choice per length."""
        choices = []
        for index, length in enumerate(lengths):
            first = self._rng.randrange(_POOL_TOKENS - length)
            choices.append(
                {
                    "index": index,
                    "text": "",
                    "finish_reason": "stop",
                    "token_ids": self._ids[first : first + length],
                    "logprobs": {"token_logprobs": self._logprobs[first : first + length]},
                }
            )
        answer = {"id": "c", "object": "text_completion", "model": "m", "choices": choices}
        return msgspec.json.encode(answer)


def build_app(load: Load) -> web.Application:
    """Return the server's application."""
    slots, answers = Slots(load), Answers(load.seed)

    async def complete(request: web.Request) -> web.Response:
        asked = msgspec.json.decode(await request.read())
        if asked.get("max_tokens") == 1:  # the client detects which route returns token ids
            return web.Response(body=answers.body([1]), content_type="application/json")
        lengths = await asyncio.gather(*(slots.generate() for _ in range(asked.get("n") or 1)))
        return web.Response(body=answers.body(list(lengths)), content_type="application/json")

    async def figures(_: web.Request) -> web.Response:
        return web.json_response(slots.figures())

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    app.router.add_get("/figures", figures)
    app.router.add_get("/health", health)
    return app


async def serve(load: Load) -> None:
    """Print the URL and serve until the process ends."""
    runner = web.AppRunner(build_app(load), access_log=None, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
    await site.start()
    address: Any = runner.addresses[0]
    print(f"http://127.0.0.1:{address[1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(Load(**json.loads(sys.argv[1]))))
