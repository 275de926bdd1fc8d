"""The environments of the benchmark: the library's scheduler, and a simple loop as the baseline.

Rollouts are the same; starting, cancelling and sending them differ.

As a script, it serves one environment and measures its event loop. SIGUSR1 starts a measurement,
SIGUSR2 ends it, and SIGTERM stops the environment, which then prints one JSON object.

Usage: python environment_process.py JSON
"""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import random
import signal
import sys
import uuid
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).parents[1]))

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
from atroposlib.envs.running import favour_event_loop
from scheduler_parts.loop_watch import LoopWatch

__all__ = ["BenchmarkEnv"]

POLL_S = 0.1
GZIP_MINIMUM_BYTES = 1024


class BenchmarkEnv(BaseEnv):
    """An environment with one prompt, single completions and random scores."""

    name = "benchmark"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sent_tokens = 0
        """Generated tokens in groups that the service accepted."""
        self._rng = random.Random(0)
        self._num_items = 0

    async def get_next_item(self) -> int:
        self._num_items += 1
        return self._num_items

    async def collect_trajectory(self, item: int) -> tuple[Any, list[Any]]:
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
        pass

    async def _send_scored_data_to_api(self, scored_data: Any) -> None:
        num_tokens = sum(len(row) for row in scored_data["tokens"]) - len(scored_data["tokens"])
        dropped = sum(self.drop_counts.values())
        await super()._send_scored_data_to_api(scored_data)
        if sum(self.drop_counts.values()) == dropped:
            self.sent_tokens += num_tokens


def replace_rollouts(env: BenchmarkEnv, *, length: int, seconds: float) -> None:
    """Replace the engine: rollouts wait and return prepared trajectories of `length` tokens."""
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
    """The baseline: polls, cancels all rollouts if the queue is full, and encodes in the loop."""

    async def env_manager(self) -> None:
        """Serve until cancelled, then wait for running rollouts like the library."""
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
            await self._registration.session().leave(timeout_s=5)

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
        while len(self._tasks) > max(0, limit):  # the oldest first
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


KINDS: dict[str, type[BenchmarkEnv]] = {"scheduler": BenchmarkEnv, "naive": NaiveEnv}


async def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Serve until SIGTERM; return the results of the last measurement and the totals."""
    config = BaseEnvConfig(**settings["config"])
    server = APIServerConfig(
        model_name="m",
        base_url=settings["inference_url"] + "/v1",
        server_type="vllm",
        api_key="x",
        num_max_requests_at_once=settings["requests_at_once"],
    )
    env = KINDS[settings["kind"]](config, [server])
    if settings["local_length"]:
        replace_rollouts(env, length=settings["local_length"], seconds=settings["local_s"])
    favour_event_loop()  # like the commands of an environment
    watch, figures = LoopWatch(), dict[str, Any]()

    def begin() -> None:
        figures["sent_tokens"] = -env.sent_tokens
        watch.start()

    def end() -> None:
        figures.update(watch.stop(), sent_tokens=figures["sent_tokens"] + env.sent_tokens)

    loop = asyncio.get_running_loop()
    serving = asyncio.create_task(env.env_manager())
    loop.add_signal_handler(signal.SIGUSR1, begin)
    loop.add_signal_handler(signal.SIGUSR2, end)
    loop.add_signal_handler(signal.SIGTERM, serving.cancel)
    print("ready", flush=True)  # signals are handled from here on
    await asyncio.wait({serving})
    if not serving.cancelled() and serving.exception():
        serving.result()
    return {
        **figures,
        "total_sent_tokens": env.sent_tokens,
        "failures": dict(env.failure_counts),
        "drops": dict(env.drop_counts),
    }


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    print(json.dumps(asyncio.run(run(json.loads(sys.argv[1])))))
