"""The environment of the benchmark, once as the library runs it and once in a naive loop.

Both roll out the same way; what differs is who starts, cancels and sends.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import uuid
from typing import Any

import aiohttp

from atroposlib.envs.base import BaseEnv

__all__ = ["BenchmarkEnv", "NaiveEnv", "replace_rollouts"]

POLL_S = 0.1
GZIP_MINIMUM_BYTES = 1024


class BenchmarkEnv(BaseEnv):
    """One prompt, G single completions, random scores.

    Attributes:
        sent_tokens: generated tokens in groups that the service has accepted.
    """

    name = "benchmark"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sent_tokens = 0
        self._rng = random.Random(0)
        self._num_items = 0

    async def get_next_item(self) -> int:
        """Return a number."""
        self._num_items += 1
        return self._num_items

    async def collect_trajectory(self, item: int) -> tuple[Any, list[Any]]:
        """Wait for one completion."""
        async with self.server.managed_server(tokenizer=self.tokenizer) as session:
            await session.completion(prompt=f"w{item}", max_tokens=1 << 20)
            node = session.get_state()["nodes"][0]
        return {
            "tokens": node.tokens,
            "masks": node.masked_tokens,
            "inference_logprobs": node.logprobs,
            "scores": self._rng.random(),
        }, []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    async def _send_scored_data_to_api(self, scored_data: Any) -> None:
        num_tokens = sum(len(row) for row in scored_data["tokens"]) - len(scored_data["tokens"])
        dropped = sum(self.drop_counts.values())
        await super()._send_scored_data_to_api(scored_data)
        if sum(self.drop_counts.values()) == dropped:
            self.sent_tokens += num_tokens


def replace_rollouts(env: BenchmarkEnv, *, length: int, seconds: float) -> None:
    """Have rollouts wait and return trajectories that are there already: only sending is left."""
    rng = random.Random(1)
    ids = [rng.randrange(3, 50_000) for _ in range(length)]
    logprobs = [-rng.random() for _ in range(length)]

    async def collect(item: Any) -> tuple[Any, list[Any]]:
        await asyncio.sleep(seconds * rng.uniform(0.5, 1.5))
        score = rng.random()
        kept = {"tokens": ids, "masks": ids, "inference_logprobs": logprobs}
        return {**kept, "scores": score}, []

    env.collect_trajectory = collect  # type: ignore[method-assign]


class NaiveEnv(BenchmarkEnv):
    """Looks every 0.1 s, cancels everything when the queue is full, encodes in the event loop."""

    async def env_manager(self) -> None:
        """Serve until cancelled; then let the running rollouts finish, as the library does."""
        await self.register_env()
        await self.get_server_info()
        self._tasks: dict[str, tuple[Any, asyncio.Task[Any]]] = {}
        self._http = aiohttp.ClientSession()
        try:
            while True:
                await self.get_status()
                await self._adjust()
                await asyncio.sleep(POLL_S)
        except asyncio.CancelledError:
            running = {task for _, task in self._tasks.values()}
            if running:
                await asyncio.wait(running, timeout=self.config.rollout_grace_s)
        finally:
            await self._http.close()
            await self.server.close()
            await self.registration.session().leave(timeout_s=5)

    async def _adjust(self) -> None:
        config, queued = self.config, (self.status_dict or {})["queue_size"]
        if queued * config.group_size >= config.max_batches_offpolicy * config.batch_size:
            for item, task in self._tasks.values():
                self.backlog.append(item)
                task.cancel()
            self._tasks.clear()
            return
        limit = config.max_batches_offpolicy * config.batch_size // config.group_size - queued
        limit = min(limit, self.max_num_workers)
        while len(self._tasks) > max(0, limit):  # the oldest, as it always was
            item, task = self._tasks.pop(next(iter(self._tasks)))
            self.backlog.append(item)
            task.cancel()
        while len(self._tasks) < limit:
            item = self.backlog.pop() if self.backlog else await self.get_next_item()
            name = uuid.uuid4().hex
            task = asyncio.create_task(self._work(name, item))
            self._tasks[name] = (item, task)

    async def _work(self, name: str, item: Any) -> None:
        try:
            group, _ = await self.collect_trajectories(item)
            body = json.dumps({**group, "env_id": self.env_id}).encode()
            headers = {"Content-Type": "application/json"}
            if len(body) >= GZIP_MINIMUM_BYTES:
                body = gzip.compress(body)
                headers["Content-Encoding"] = "gzip"
            url = f"{self.config.rollout_server_url}/scored_data"
            async with self._http.post(url, data=body, headers=headers) as answer:
                answer.raise_for_status()
            self.sent_tokens += sum(len(row) - 1 for row in group["tokens"])
        finally:
            self._tasks.pop(name, None)
