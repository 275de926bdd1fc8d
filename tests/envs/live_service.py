"""The real trajectory service on a loopback port, and a scripted trainer for it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn

from atroposlib.api.client import TrajectoryApiClient
from atroposlib.api.server import create_app
from atroposlib.api.settings import ApiSettings

REGISTRATION = {
    "wandb_group": "",
    "wandb_project": "",
    "batch_size": 4,
    "max_token_len": 64,
    "checkpoint_dir": "",
    "save_checkpoint_interval": 0,
    "starting_step": 0,
    "num_steps": 3,
}


class LiveService:
    """The service in a thread; may be stopped and started again, which forgets its run."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    def start(self, settings: ApiSettings | None = None) -> None:
        config = uvicorn.Config(
            create_app(settings),
            host="127.0.0.1",
            port=self.port,
            log_config=None,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        deadline = time.monotonic() + 60
        while not self._server.started:
            assert time.monotonic() < deadline, "the service did not start"
            time.sleep(0.005)

    def stop(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(10)
            self._server = self._thread = None


class ScriptedTrainer:
    """Registers and takes batches; keeps what it got."""

    def __init__(self, url: str, **registration: Any) -> None:
        self.client = TrajectoryApiClient(url)
        self.registration = {**REGISTRATION, **registration}
        self.groups: list[dict[str, Any]] = []
        self.steps = 0

    async def register(self) -> None:
        await self.client.register_trainer(**self.registration)
        await self._take_batch()  # a trainer has started once it asked for a batch

    async def _take_batch(self) -> bool:
        batch = await self.client.batch()
        if batch is None:
            return False
        self.steps += 1
        self.groups += batch
        return True

    async def train(self, num_steps: int, *, pace_s: float = 0.0) -> None:
        """Take batches until so many came."""
        while self.steps < num_steps:
            has_arrived = await self._take_batch()
            await asyncio.sleep(pace_s if has_arrived else 0.005)

    async def __aenter__(self) -> ScriptedTrainer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()


async def until(condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
    """Wait until something holds."""

    async def poll() -> None:
        while not condition():  # noqa: ASYNC110 - what is waited for knows nothing of the test
            await asyncio.sleep(0.002)

    await asyncio.wait_for(poll(), timeout_s)


async def serve_until(env: Any, body: Awaitable[Any], timeout_s: float = 60.0) -> None:
    """Run the environment while something else happens, then cancel it as a signal would."""
    serving = asyncio.create_task(env.env_manager())
    acting = asyncio.ensure_future(body)
    try:
        await asyncio.wait(
            {serving, acting}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if serving.done():
            serving.result()
        assert acting.done(), "the environment ended first, or time is up"
        acting.result()
    finally:
        for task in (serving, acting):
            task.cancel()
        await asyncio.wait({serving, acting})
