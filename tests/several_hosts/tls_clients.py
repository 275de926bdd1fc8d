"""Every client of service and engine asks one URL for its step; prints the steps.

A program, since clients read SSL_CERT_FILE when they are imported.
"""

from __future__ import annotations

import asyncio
import json
import sys

from atroposlib.api.client import RetryRule, TrainerClient, TrajectoryApiClient
from atroposlib.envs.server_handling.engine_http import EngineHttp
from example_trainer.engine import EngineConnection

_ONCE = RetryRule(attempts=1)


async def ask_as_environment(url: str) -> list[int]:
    """Ask with the environment's clients of the service and of an engine."""
    async with TrajectoryApiClient(url, retry=_ONCE) as service:
        steps = [(await service.status())["current_step"]]
    engine = EngineHttp(url, api_key=None, timeout_s=10)
    steps.append((await engine.get_json("/status"))["current_step"])
    await engine.close()
    return steps


def ask_as_trainer(url: str) -> list[int]:
    """Ask with the trainer's clients of the service and of an engine."""
    with TrainerClient(url, retry=_ONCE) as service:
        steps = [service.status()["current_step"]]
    engine = EngineConnection(url)
    steps.append(engine.send("GET", "/status").json()["current_step"])
    engine.close()
    return steps


if __name__ == "__main__":
    address = sys.argv[1]
    print(json.dumps(asyncio.run(ask_as_environment(address)) + ask_as_trainer(address)))
