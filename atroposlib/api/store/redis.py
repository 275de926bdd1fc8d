"""A run in Redis, shared by several replicas of the service.

    RedisRunStore ─┬─► RedisLog ───► RedisLink ─► Redis     records, in the order all replicas see
                   ├─ payloads, by id
                   ├─ ids, in blocks
                   └─ a sign of life every second

`redis_scripts.py` says what is stored under which key.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Collection, Sequence

from atroposlib.api.store import redis_scripts as scripts
from atroposlib.api.store.base import Apply, Payload, PayloadCheck, Restore, check_payloads
from atroposlib.api.store.redis_client import connect
from atroposlib.api.store.redis_link import RedisLink
from atroposlib.api.store.redis_log import RedisLog
from atroposlib.errors import ConfigError, RunStoreError
from atroposlib.utils.awaiting import end_task

__all__ = ["RedisRunStore", "runs_in_redis"]

_FIRST_GROUP_ID = 0
_ID_BLOCK = 1024
_FETCH_GROUPS = 16
_DISCARD_GROUPS = 1024
_SCANNED_KEYS = 1000
_BEATS_PER_EXPIRY = 6


async def runs_in_redis(url: str) -> list[str]:
    """Return the names of the runs that a Redis holds, in order.

    Looks at every key of the database, in about a second per million. A Redis that does not answer,
    or does not let this user look, gives none: opening the run says what is wrong.

    Args:
        url: as for `RedisRunStore`; raises as that does.
    """
    client = connect(url)
    from redis.exceptions import RedisError

    try:
        keys = [key async for key in client.scan_iter(scripts.ANY_RUN, count=_SCANNED_KEYS)]
    except (RedisError, TypeError):  # TypeError: a query parameter that the client does not know
        return []
    finally:
        await client.aclose()
        await client.connection_pool.disconnect()
    return sorted({scripts.run_of_key(key) for key in keys})


class RedisRunStore:
    """A `RunStore` in Redis 7 or later; any replica may die at any time.

    Calls wait for a Redis that is away up to `outage_s`. When `append` raises, its record was not
    acknowledged; whether it was written shows in the log, as after a cancellation.

    Args:
        url: `redis://`, `rediss://` or `unix://`, with password and database where needed.
        run_name: Names the run; replicas of one run give the same.
        replica: Names this process among them; a random name when empty.
        outage_s: Seconds that calls wait for a Redis that is away.
        poll_s: Seconds between two looks at what others wrote.
        expiry_s: Seconds of silence after which a replica is taken for dead.

    Raises:
        ConfigError: the URL is malformed, or the name empty.
        MissingExtraError: the client library is not installed.
    """

    def __init__(
        self,
        url: str,
        run_name: str,
        *,
        replica: str = "",
        outage_s: float = 30.0,
        poll_s: float = 0.1,
        expiry_s: float = 6.0,
    ) -> None:
        if not run_name:
            raise ConfigError("a run in Redis needs a name; give --run NAME")
        self.replica = replica or uuid.uuid4().hex
        self._keys = scripts.RunKeys.of(run_name, uuid.uuid4().hex)
        self._link = RedisLink(url, patience_s=outage_s)
        self._log = RedisLog(self._link, self._keys, outage_s=outage_s, poll_s=poll_s)
        self._expiry_s = expiry_s
        self._ids = range(0)
        self._reserving = asyncio.Lock()  # callers that come together share a block
        self._heart: asyncio.Task[None] | None = None
        self._last_beat = self._beats_since = float("-inf")

    @property
    def full_reason(self) -> str | None:
        """Why Redis has no memory for new groups; None while it has."""
        return self._log.full_reason

    async def open(self, apply: Apply, restore: Restore) -> None:
        """Load the run, or begin it, and follow what other replicas write.

        Records of others are applied as they are seen, between any two steps of this process; a
        replica that was away for long is given a snapshot again.

        Raises:
            ConfigError: Redis cannot be reached, is older than 7.0, or holds another format.
        """
        await self._link.open()
        keys = (self._keys.meta, self._keys.session)
        status, *found = await self._link.call(
            scripts.OPEN, keys, (scripts.FORMAT, _FIRST_GROUP_ID)
        )
        if status != b"ok":
            raise ConfigError(
                f"the run at {self._link.address} has format {found[0].decode()}, this version "
                f"reads {scripts.FORMAT}; use the version that wrote it, or another --run"
            )
        await self._log.open(apply, restore)
        await self._beat("-inf")
        self._heart = asyncio.create_task(self._keep_alive())

    async def append(
        self, record: bytes, payloads: Sequence[Payload] = (), *, fence: int | None = None
    ) -> bool:
        """Write a record with its payloads, all or nothing, and apply the log up to it.

        Returns:
            True once Redis has it and it has been applied; False when the fence has moved.

        Raises:
            RunLostError: Redis lost data of the run; nothing works any more.
            RunStoreError: Redis is away, out of memory, or refuses; the message names it.
        """
        return await self._log.append(record, payloads, fence)

    async def sync(self) -> None:
        """Apply what other replicas appended before this call; raises as `append`."""
        await self._log.sync()

    async def new_group_ids(self, count: int) -> range:
        """Reserve ids that no replica has used or will use; asks Redis once in 1,024."""
        async with self._reserving:
            if len(self._ids) < count:
                size = max(count, _ID_BLOCK)
                keys = (self._keys.meta, self._keys.session)
                _, stop = await self._link.call(scripts.RESERVE, keys, (size,))
                self._log.ids_end = max(self._log.ids_end, stop)
                self._ids = range(stop - size, stop)
            taken, self._ids = self._ids[:count], self._ids[count:]
            return taken

    async def fetch(
        self, group_ids: Sequence[int], checks: Sequence[PayloadCheck] = ()
    ) -> list[bytes]:
        """Return payloads in the order asked for, a few per call; KeyError: one is not there."""
        contents: list[bytes | None] = []
        for start in range(0, len(group_ids), _FETCH_GROUPS):
            asked = group_ids[start : start + _FETCH_GROUPS]
            contents += await self._link.command("HMGET", self._keys.payloads, *asked)
        found = [content for content in contents if content is not None]
        if len(found) < len(contents):
            raise KeyError(group_ids[contents.index(None)])
        check_payloads(group_ids, found, checks)
        return found

    async def discard(self, group_ids: Collection[int]) -> None:
        """Forget payloads; ids that are not there are skipped."""
        ids = list(group_ids)
        for start in range(0, len(ids), _DISCARD_GROUPS):
            chosen = ids[start : start + _DISCARD_GROUPS]
            await self._link.command("HDEL", self._keys.payloads, *chosen)

    async def compact(self, snapshot: bytes, *, position: int) -> None:
        """Replace the records before `position` by a snapshot, unless a newer one is there."""
        await self._log.compact(snapshot, position)

    async def alive_replicas(self) -> frozenset[str] | None:
        """Return the replicas that Redis heard of lately.

        Silence counts only while this replica itself could be heard: for `expiry_s` after opening
        and after an outage, every replica that was there in the last hour is taken for alive.
        """
        now = time.monotonic()
        is_sure = now - self._last_beat <= self._expiry_s < now - self._beats_since
        names = await self._beat(int(self._expiry_s * 1000) if is_sure else "-inf")
        return frozenset(name.decode() for name in names)

    async def close(self) -> None:
        """Send what waits, leave the run, and close the connections."""
        await self._log.close()
        if self._heart is not None:
            await end_task(self._heart)
            keys = (self._keys.alive, self._keys.session)
            with contextlib.suppress(RunStoreError):
                await self._link.call(scripts.LEAVE, keys, (self.replica,), deadline=0.0)
        await self._link.close()

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(self._expiry_s / _BEATS_PER_EXPIRY)
            with contextlib.suppress(RunStoreError):  # the link has logged it
                await self._beat("-inf", deadline=0.0)

    async def _beat(self, max_age_ms: int | str, deadline: float | None = None) -> list[bytes]:
        """Say that this replica lives; return the replicas that were heard within that age."""
        keys = (self._keys.alive, self._keys.session)
        _, names = await self._link.call(
            scripts.BEAT, keys, (self.replica, max_age_ms), deadline=deadline
        )
        now = time.monotonic()
        if now - self._last_beat > self._expiry_s:
            self._beats_since = now
        self._last_beat = now
        return list(names)
