"""The connection to a Redis server: its address, what it must be able to do, and patience.

A call that fails because the server is away is made again, with growing pauses, until its
deadline. Nothing that leaves this module, to the log or in an error, holds a password.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from atroposlib.api.store.base import StoreFullError
from atroposlib.api.store.redis_client import address_of, connect, is_passing
from atroposlib.errors import ConfigError, RunStoreError

__all__ = ["Argument", "RedisFullError", "RedisLink", "RunLostError"]

logger = logging.getLogger(__name__)

_OPEN_S = 5.0
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_OLDEST_VERSION = (7, 0)

Argument = str | bytes | int


class RunLostError(RunStoreError, ConfigError):
    """Redis no longer holds what it had acknowledged; going on would lose groups in silence."""


class RedisFullError(StoreFullError):
    """Redis is at its memory limit and takes no more payloads."""


class RedisLink:
    """Calls to one Redis server, made again while it is away.

    Attributes:
        address: host, port and database, or the path of the socket; never a password.
    """

    def __init__(self, url: str, *, patience_s: float) -> None:
        self._client = connect(url)
        self._execute: Callable[..., Awaitable[Any]] = self._client.execute_command
        self._patience_s = patience_s
        self._is_away = False
        self.address = address_of(self._client)

    async def open(self) -> None:
        """Check the server; waits for it a few seconds.

        Raises:
            ConfigError: it cannot be reached, refuses the user, or is too old.
        """
        try:
            deadline = time.monotonic() + min(_OPEN_S, self._patience_s)
            info = await self.attempt(lambda: self._execute("INFO"), deadline)
        except RunStoreError as error:
            raise ConfigError(f"{error}; is --store right, and is Redis running?") from error
        except TypeError as error:  # a query parameter that the client does not know
            raise ConfigError(f"{self.address}: the URL has an unknown parameter") from error
        if _version(info["redis_version"]) < _OLDEST_VERSION:
            raise ConfigError(
                f"{self.address} is Redis {info['redis_version']}; version 7.0 or later is needed"
            )
        await self._warn(info)

    async def call(
        self,
        script: str,
        keys: Sequence[str],
        arguments: Sequence[Argument],
        *,
        deadline: float | None = None,
    ) -> Any:  # what the script returns
        """Run a script, which Redis learns the first time.

        Args:
            script: its text.
            keys: the keys it touches.
            arguments: its other arguments.
            deadline: `time.monotonic()` after which it is not tried again; None: `patience_s`.

        Raises:
            RunLostError: the script found that Redis lost data of the run.
            RunStoreError: no answer came before the deadline, or Redis refused.
        """
        return await self.attempt(lambda: self.call_once(script, keys, arguments), deadline)

    async def call_once(
        self, script: str, keys: Sequence[str], arguments: Sequence[Argument]
    ) -> Any:  # what the script returns
        """Run a script without patience; errors are those of the client library."""
        from redis.exceptions import NoScriptError

        digest = hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
        command = ("EVALSHA", digest, len(keys), *keys, *arguments)
        try:
            reply = await self._execute(*command)
        except NoScriptError:
            await self._execute("SCRIPT LOAD", script)
            reply = await self._execute(*command)
        if reply[:1] == [b"lost"]:
            raise RunLostError(
                f"Redis at {self.address} lost data of this run: {reply[1].decode()}; bring its "
                "append-only file back, or start another run with --run"
            )
        return reply

    async def command(self, name: str, *arguments: Argument) -> Any:  # what Redis answers
        """Run a command that may run twice.

        Raises:
            RunStoreError: no answer came in time, or Redis refused.
        """
        return await self.attempt(lambda: self._execute(name, *arguments))

    async def attempt(
        self, make_call: Callable[[], Awaitable[Any]], deadline: float | None = None
    ) -> Any:
        """Await a call, anew while the server is away, until the deadline.

        Raises:
            RunStoreError: as for `call`.
        """
        from redis.exceptions import RedisError

        if deadline is None:
            deadline = time.monotonic() + self._patience_s
        pause_s = _FIRST_PAUSE_S
        attempts = 0
        while True:
            attempts += 1
            try:
                result = await make_call()
            except RedisError as error:
                if not is_passing(error):
                    raise self._explain(error, attempts) from error
                self._note_away(error)
                if time.monotonic() + pause_s > deadline:
                    raise self._explain(error, attempts) from error
            else:
                if self._is_away:
                    self._is_away = False
                    logger.info("Redis at %s answers again", self.address)
                return result
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()
        await self._client.connection_pool.disconnect()

    def _note_away(self, error: Exception) -> None:
        if not self._is_away:
            self._is_away = True
            logger.warning("Redis at %s does not answer, trying on: %s", self.address, error)

    def _explain(self, error: Exception, attempts: int) -> RunStoreError:
        from redis.exceptions import OutOfMemoryError

        if isinstance(error, OutOfMemoryError):
            return RedisFullError(
                f"Redis at {self.address} is at its maxmemory and takes no more groups; let the "
                "trainer catch up, or give Redis more memory"
            )
        tries = f" after {attempts} attempts" if attempts > 1 else ""
        reason = str(error).rstrip(".")
        return RunStoreError(f"Redis at {self.address} failed{tries}: {reason}")

    async def _warn(self, info: Mapping[str, Any]) -> None:
        """Say in the log what this server's settings put at risk."""
        has_log = int(info.get("aof_enabled", 0))
        if not has_log:
            logger.warning(
                "Redis at %s has appendonly off: what was acknowledged does not survive its crash",
                self.address,
            )
        policy = info.get("maxmemory_policy", "noeviction")
        if int(info.get("maxmemory", 0)) and policy != "noeviction":
            logger.warning(
                "Redis at %s has maxmemory-policy %s and may throw the run away when memory is "
                "short; set it to noeviction",
                self.address,
                policy,
            )
        if has_log and (fsync := await self._fsync()) != "always":
            logger.info(
                "Redis at %s has appendfsync %s: a crash of its machine may lose what it "
                "acknowledged last, and this service then stops with an error",
                self.address,
                fsync,
            )

    async def _fsync(self) -> str:
        from redis.exceptions import ResponseError

        try:
            settings: Mapping[str, str] = await self._execute("CONFIG GET", "appendfsync")
        except ResponseError:  # not every user may ask
            return "unknown"
        return settings.get("appendfsync", "unknown")


def _version(text: str) -> tuple[int, int]:
    major, minor, *_ = [int(part) for part in f"{text}.0".split(".")[:2]]
    return major, minor
