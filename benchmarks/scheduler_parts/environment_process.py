"""An environment in a process of its own that reports what its event loop went through.

    SIGUSR1 begins a measurement · SIGUSR2 ends it · SIGTERM stops the environment in order

Usage: python environment_process.py JSON; writes one JSON object when it ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from atroposlib.envs.base import APIServerConfig, BaseEnvConfig
from atroposlib.envs.running import favour_event_loop
from scheduler_parts.environments import BenchmarkEnv, NaiveEnv, replace_rollouts
from scheduler_parts.loop_watch import LoopWatch

KINDS: dict[str, type[BenchmarkEnv]] = {"scheduler": BenchmarkEnv, "naive": NaiveEnv}


async def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Serve until SIGTERM; return the figures of the last measurement and the totals."""
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
    favour_event_loop()  # as the commands of an environment do
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
    print("ready", flush=True)  # signals are answered from now on
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
