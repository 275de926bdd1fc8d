"""Whether one server is up: asked cheaply, at start and after failures only.

request fails -> confirm() -> one shared probe -> up: retry / down: watch() until it is back
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from atroposlib.utils.awaiting import end_task

__all__ = ["ServerHealth"]

logger = logging.getLogger(__name__)


class ServerHealth:
    """The verdict on one server and the task that revises it.

    Invariant: while `is_up` is False because of a probe, one watcher task is running that sets it
    back. A verdict set from outside stands until the next probe.

    Args:
        name: Address of the server, for messages.
        startup_timeout_s: How long requests wait for a server that never answered, for messages;
            None where that is not known.
        remedy: What to do about a server that never answered, for messages.

    Attributes:
        has_answered: Whether the server ever answered; until then its address may be wrong.
    """

    def __init__(
        self, name: str, *, startup_timeout_s: float | None = None, remedy: str = ""
    ) -> None:
        self.name = name
        self._remedy = remedy
        self._startup_timeout_s = startup_timeout_s
        self.watcher: asyncio.Task[None] | None = None
        self.has_answered = False
        self._is_up = True
        self._probing: asyncio.Task[bool] | None = None

    @property
    def is_up(self) -> bool:
        """Whether requests may be sent; True until the first failed probe."""
        return self._is_up

    @is_up.setter
    def is_up(self, value: bool) -> None:
        if value and not self._is_up:
            logger.info("inference server %s answers again", self.name)
        elif self._is_up and not value:
            until = "until it does"
            if not self.has_answered and self._startup_timeout_s is not None:
                until = f"for it for up to {self._startup_timeout_s:g} s (startup_timeout)"
                until += f"; {self._remedy}" if self._remedy else ""
            logger.warning(
                "inference server %s does not answer; requests wait %s", self.name, until
            )
        self._is_up = value

    def start_watching(self, watch: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `watch` in the background unless it already runs on this event loop."""
        if self._is_running(self.watcher):
            return
        self.watcher = asyncio.create_task(watch())

    async def confirm(self, probe: Callable[[], Awaitable[bool]]) -> bool:
        """Probe once and keep the verdict; callers that come meanwhile share the probe."""
        if not self._is_running(self._probing):
            self._probing = asyncio.create_task(_run(probe))
        assert self._probing is not None
        self.is_up = await asyncio.shield(self._probing)
        self.has_answered = self.has_answered or self.is_up
        return self.is_up

    async def close(self) -> None:
        """End the background tasks."""
        for task in (self.watcher, self._probing):
            if self._is_running(task):
                assert task is not None
                await end_task(task)

    @staticmethod
    def _is_running(task: asyncio.Task[Any] | None) -> bool:
        # A task of a loop that has ended never finishes, so it does not count.
        return (
            task is not None and not task.done() and task.get_loop() is asyncio.get_running_loop()
        )


async def _run(probe: Callable[[], Awaitable[bool]]) -> bool:
    return await probe()
