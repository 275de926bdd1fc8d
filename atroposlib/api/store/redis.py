"""A run in Redis, shared by several replicas of the service.

    RedisRunStore ─┬─► RedisLog ───► RedisLink ─► Redis     records, in the order all replicas see
                   ├─ payloads, by id
                   ├─ ids, in blocks
                   └─ a sign of life every second

`redis_scripts.py` says what is stored under which key.

The client of a Redis server: made from a URL, shown by an address, its errors told apart.

The connection to a Redis server: its address, what it must be able to do, and patience.

A call that fails because the server is away is made again, with growing pauses, until its
deadline. Nothing that leaves this module, to the log or in an error, holds a password.

The log of a run in Redis: what this process writes, and what it reads of others.

    append ─► waiting ─► one script call ─► Redis      many records and payloads in one round trip
    apply ◄── reply: every record from the position known here to the end

One task sends one call at a time, so replies come in order, and a lost reply is asked for again
under the same number. Every `poll_s` it looks for what others wrote. Several `append` calls made
while one is under way go together in the next. Who does not know the log far enough back, because
another has put a snapshot in its place, gets that: `restore` may be called at any time.

What a run is in Redis: its keys, and the scripts that change them in one step each.

    atropos:{RUN}:meta      hash    base, base_tag, guarded, next_id, format
    atropos:{RUN}:log       list    the records from position `base` on, each behind its tag
    atropos:{RUN}:snapshot  string  the state that the records before `base` led to
    atropos:{RUN}:payloads  hash    group id -> bytes
    atropos:{RUN}:alive     sorted set   replica -> when it last said so, in ms of Redis' clock
    atropos:{RUN}:session:ID  hash  what one opened store did last: sequence, answer, ids

The braces put all keys of a run on one node of a cluster.

*Tags.* A record carries eight random bytes of the attempt that wrote it. Who knows the log up to a
position also knows the tag there; every script compares it first, so a log that Redis lost in part,
and that others have grown since, is never taken for the one that was read.

*Sessions.* A store sends one call at a time and numbers them. A call whose answer got lost is sent
again under its number and answered as before; one that arrives late changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, unquote

from atroposlib.api.store.base import (
    Apply,
    Payload,
    PayloadCheck,
    Restore,
    StoreFullError,
    applied,
    check_payloads,
)
from atroposlib.errors import ConfigError, MissingExtraError, RunStoreError
from atroposlib.utils.aio import end_task

if TYPE_CHECKING:
    from redis.asyncio import Redis

__all__ = [
    "APPEND",
    "BEAT",
    "COMPACT",
    "FORMAT",
    "LEAVE",
    "OPEN",
    "READ",
    "RESERVE",
    "TAG_BYTES",
    "Argument",
    "RedisFullError",
    "RedisLink",
    "RedisLog",
    "RedisRunStore",
    "RunKeys",
    "RunLostError",
    "address_of",
    "connect",
    "is_passing",
    "runs_in_redis",
]

_SOCKET_TIMEOUT_S = 10.0
_CONNECT_TIMEOUT_S = 5.0
_MAX_CONNECTIONS = 32


def connect(url: str) -> Redis:
    """Return a client that connects when it is used, and never tries again by itself.

    Raises:
        ConfigError: the URL is malformed.
        MissingExtraError: the client library is not installed.
    """
    try:
        from redis.asyncio import BlockingConnectionPool, Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
    except ImportError as error:
        raise MissingExtraError("redis", extra="redis") from error
    try:
        pool = BlockingConnectionPool.from_url(url, max_connections=_MAX_CONNECTIONS)
    except ValueError:
        # The reason may quote the URL with its password, so nothing of it is passed on.
        raise ConfigError(
            "the Redis URL is malformed; expected redis://[[user]:password@]host[:port][/database]"
            ", rediss://... or unix:///path; percent-encode special characters in the password"
        ) from None
    pool.connection_kwargs.update(
        decode_responses=False,
        protocol=2,
        retry=Retry(NoBackoff(), 0),
        socket_connect_timeout=_CONNECT_TIMEOUT_S,
        socket_timeout=_SOCKET_TIMEOUT_S,
    )
    return Redis(connection_pool=pool)


def address_of(client: Redis) -> str:
    """Return host, port and database, or the path of the socket; never a password."""
    settings = client.connection_pool.connection_kwargs
    if "path" in settings:
        return f"unix://{settings['path']}"
    host, port = settings.get("host", "localhost"), settings.get("port", 6379)
    return f"{host}:{port}/{settings.get('db', 0)}"


def is_passing(error: Exception) -> bool:
    """Whether waiting may help: the server is away, starts, or hands over to another."""
    from redis import exceptions

    refusals = (exceptions.AuthenticationError, exceptions.AuthorizationError)
    if isinstance(error, refusals) or isinstance(error.__cause__, refusals):
        return False
    passing = (
        exceptions.ConnectionError,
        exceptions.TimeoutError,
        exceptions.ReadOnlyError,
        exceptions.ClusterDownError,
        exceptions.MasterDownError,
        exceptions.TryAgainError,
    )
    return isinstance(error, passing) or str(error).startswith(("BUSY ", "LOADING ", "MISCONF "))


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


FORMAT = "1"
"""Version of the layout above; a store refuses a run of another one."""

TAG_BYTES = 8
_SESSION_DAYS = 7


class RunKeys(NamedTuple):
    """The names of a run's keys."""

    meta: str
    log: str
    snapshot: str
    payloads: str
    alive: str
    session: str

    @classmethod
    def of(cls, run_name: str, session: str) -> RunKeys:
        """Return the keys of a run, for one opened store of it."""
        prefix = f"atropos:{{{quote(run_name, safe='')}}}:"
        names = ("meta", "log", "snapshot", "payloads", "alive", f"session:{session}")
        return cls(*(prefix + name for name in names))


ANY_RUN = "atropos:{*}:meta"
"""Pattern of the keys that every run has one of."""


def run_of_key(key: bytes) -> str:
    """Return the name of the run that a key of `ANY_RUN` belongs to."""
    return unquote(key.decode().partition("{")[2].rpartition("}")[0])


# A memory limit refuses scripts unless they say otherwise: those that free memory, or that must
# work for memory to be freed, do.
_READS = "#!lua flags=no-writes,allow-oom\n"
_FREES = "#!lua flags=allow-oom\n"
_FILLS = "#!lua\n"

# KEYS: meta log ...; ARGV: position and tag up to which the caller knows the log (-1: nothing).
_KNOWN = f"""
local base, base_tag = unpack(redis.call('HMGET', KEYS[1], 'base', 'base_tag'))
if not base then return {{'lost', 'the run is gone'}} end
base = tonumber(base)
local stop = base + redis.call('LLEN', KEYS[2])
local known = tonumber(ARGV[1])
if known > stop then
  return {{'lost', 'its log ends at ' .. stop .. ' but was read up to ' .. known}}
end
if known >= base then
  local tag = base_tag
  if known > base then
    tag = string.sub(redis.call('LINDEX', KEYS[2], known - stop - 1), 1, {TAG_BYTES})
  end
  if tag ~= ARGV[2] then return {{'lost', 'its log holds other records than those read before'}} end
end
"""

# KEYS[3]: snapshot; ARGV[3]: the most records to return. `answer` is set by the script before.
_PAGE = """
local snapshot, from = false, known
if known < base then
  snapshot, from = redis.call('GET', KEYS[3]), base
  if base > 0 and not snapshot then return {'lost', 'its snapshot is gone'} end
end
local records = redis.call('LRANGE', KEYS[2], from - base, from - base + tonumber(ARGV[3]) - 1)
return {'ok', answer, base, base_tag, stop, snapshot, records}
"""

READ = _READS + _KNOWN + "local answer = ''\n" + _PAGE
"""KEYS meta log snapshot; ARGV known, tag, limit."""

_APPEND = """
local seq, done, ids = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local last = redis.call('HMGET', KEYS[4], 'seq', 'ids', 'answer')
if not last[1] or tonumber(last[1]) < done or tonumber(last[2]) < ids then
  return {'lost', 'it no longer knows what this service wrote last'}
end
if tonumber(last[1]) > seq then return {'lost', 'a later call came first'} end
local answer = last[3]
if tonumber(last[1]) < seq then
  local guarded = tonumber(redis.call('HGET', KEYS[1], 'guarded'))
  local positions, at = {}, 9
  for item = 1, tonumber(ARGV[8]) do
    local fence, record, payloads = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2])
    at = at + 3
    if fence ~= '' and guarded > tonumber(fence) then
      positions[item] = -1
    else
      for payload = 0, payloads - 1 do
        redis.call('HSET', KEYS[5], ARGV[at + 2 * payload], ARGV[at + 2 * payload + 1])
      end
      stop = base + redis.call('RPUSH', KEYS[2], ARGV[7] .. record)
      positions[item] = stop - 1
      if fence ~= '' then guarded = redis.call('HINCRBY', KEYS[1], 'guarded', 1) end
    end
    at = at + 2 * payloads
  end
  answer = table.concat(positions, ' ')
  redis.call('HSET', KEYS[4], 'seq', seq, 'answer', answer)
end
"""

APPEND = {
    True: _FILLS + _KNOWN + _APPEND + _PAGE,
    False: _FREES + _KNOWN + _APPEND + _PAGE,
}
"""By whether payloads come along.

KEYS meta log snapshot session payloads; ARGV known, tag, limit, sequence number, last number
answered, end of the ids reserved, tag of this attempt, number of items, and per item: fence or '',
record, number of payloads, then id and bytes of each. Answers the position of each, -1: refused.
"""

COMPACT = (
    _FREES
    + _KNOWN
    + f"""
local at = tonumber(ARGV[4])
if at >= base then
  if at > base then
    base_tag = string.sub(redis.call('LINDEX', KEYS[2], at - stop - 1), 1, {TAG_BYTES})
  end
  redis.call('LTRIM', KEYS[2], at - base, -1)
  redis.call('HSET', KEYS[1], 'base', at, 'base_tag', base_tag)
  redis.call('SET', KEYS[3], ARGV[3])
end
return {{'ok'}}
"""
)
"""KEYS meta log snapshot; ARGV known, tag, snapshot, its position. An older one changes nothing."""

OPEN = (
    _FILLS
    + f"""
local format = redis.call('HGET', KEYS[1], 'format')
if not format then
  redis.call('HSET', KEYS[1], 'format', ARGV[1], 'base', 0, 'base_tag', '', 'guarded', 0,
    'next_id', ARGV[2])
elseif format ~= ARGV[1] then
  return {{'format', format}}
end
redis.call('HSET', KEYS[2], 'seq', 0, 'ids', 0, 'answer', '')
redis.call('EXPIRE', KEYS[2], {_SESSION_DAYS * 86400})
return {{'ok'}}
"""
)
"""KEYS meta session; ARGV format, first group id."""

RESERVE = (
    _FREES
    + """
if redis.call('HEXISTS', KEYS[1], 'base') == 0 then return {'lost', 'the run is gone'} end
local stop = redis.call('HINCRBY', KEYS[1], 'next_id', ARGV[1])
redis.call('HSET', KEYS[2], 'ids', stop)
return {'ok', stop}
"""
)
"""KEYS meta session; ARGV count. Answers the end of the ids reserved."""

BEAT = (
    _FREES
    + f"""
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('EXPIRE', KEYS[2], {_SESSION_DAYS * 86400})
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - 3600000)
local since = ARGV[2]
if since ~= '-inf' then since = now - tonumber(since) end
return {{'ok', redis.call('ZRANGEBYSCORE', KEYS[1], since, '+inf')}}
"""
)
"""KEYS alive session; ARGV replica, the age in ms up to which a replica is alive, or -inf."""

LEAVE = (
    _FREES
    + """
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('DEL', KEYS[2])
return {'ok'}
"""
)
"""KEYS alive session; ARGV replica."""


_PAGE_RECORDS = 512
_CALL_ITEMS = 256
_CALL_BYTES = 4 * 2**20
_CLOSE_S = 5.0
_FULL_COUNTS_S = 30.0


class _Item:
    """An append that waits to be sent; without a record it only waits for news."""

    def __init__(
        self, record: bytes | None, payloads: Sequence[Payload] = (), fence: int | None = None
    ) -> None:
        self.record = record
        self.payloads = payloads
        self.fence = fence
        self.since = time.monotonic()
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    @property
    def num_bytes(self) -> int:
        return sum(len(payload.content) for payload in self.payloads)

    def arguments(self) -> list[Argument]:
        fence = "" if self.fence is None else str(self.fence)
        flat: list[Argument] = [fence, self.record or b"", len(self.payloads)]
        for payload in self.payloads:
            flat += payload
        return flat

    def resolve(self, is_written: bool) -> None:
        if not self.done.done():
            self.done.set_result(is_written)

    def fail(self, error: RunStoreError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class _Page(NamedTuple):
    """What a reading script answers."""

    status: bytes
    answer: bytes
    base: int
    base_tag: bytes
    stop: int
    snapshot: bytes | None
    records: list[bytes]


class RedisLog:
    """Appends to the log of one run and follows it.

    Attributes:
        ids_end: End of the group ids this session has reserved; Redis must know as many.
    """

    def __init__(self, link: RedisLink, keys: RunKeys, *, outage_s: float, poll_s: float) -> None:
        self.ids_end = 0
        self._link = link
        self._keys = keys
        self._outage_s = outage_s
        self._poll_s = poll_s
        self._apply: Apply
        self._restore: Restore
        self._position, self._tag = -1, b""
        self._sequence = self._answered = 0
        self._waiting: deque[_Item] = deque()
        self._is_wanted = asyncio.Event()
        self._is_closing = False
        self._failure: RunStoreError | None = None
        self._task: asyncio.Task[None] | None = None
        self._refused: tuple[float, str] | None = None
        """Time and text of the last rejection for lack of memory; None after a success."""

    async def open(self, apply: Apply, restore: Restore) -> None:
        """Read the log from its snapshot on, and follow it from then on."""
        self._apply, self._restore = apply, restore
        await self._read_on(await self._read(None), None)
        self._task = asyncio.create_task(self._work())

    @property
    def full_reason(self) -> str | None:
        """Why Redis rejected payloads in the last 30 s; None if it has accepted some since."""
        if self._refused is None or time.monotonic() - self._refused[0] > _FULL_COUNTS_S:
            return None
        return self._refused[1]

    async def append(self, record: bytes, payloads: Sequence[Payload], fence: int | None) -> bool:
        """Write a record with its payloads and apply the log up to it; False: the fence moved."""
        return await self._enqueue(_Item(record, payloads, fence))

    async def sync(self) -> None:
        """Apply what others appended before this call."""
        await self._enqueue(_Item(None))

    async def compact(self, snapshot: bytes, position: int) -> None:
        """Replace the records before a position by a snapshot, unless another's is newer."""
        arguments = (self._position, self._tag, snapshot, position)
        await self._link.call(COMPACT, self._keys[:3], arguments)

    async def close(self) -> None:
        """Send what waits, a few seconds at most, and stop following."""
        self._is_closing = True
        self._is_wanted.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=_CLOSE_S)
            await end_task(self._task)
        for item in self._waiting:
            item.fail(RunStoreError("the store is closed"))

    async def _enqueue(self, item: _Item) -> bool:
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)
        if self._is_closing:
            raise RunStoreError("the store is closed")
        self._waiting.append(item)
        self._is_wanted.set()
        return await item.done

    async def _work(self) -> None:
        """Send what waits, or look for news every `poll_s`, until the log closes or is lost."""
        batch: list[_Item] = []
        try:
            while not (self._is_closing and not self._waiting):
                if not self._waiting:
                    with contextlib.suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(self._is_wanted.wait(), self._poll_s)
                self._is_wanted.clear()
                batch = self._take_batch()
                await self._exchange(batch)
        except RunLostError as error:
            self._stop(error, batch)
        except asyncio.CancelledError:
            self._stop(RunStoreError("the store is closed"), batch)
            raise
        except Exception as error:  # a task boundary: callers must not wait for ever
            logger.exception("following the run in Redis failed")
            self._stop(RunStoreError(f"following the run in Redis failed: {error!r}"), batch)

    def _stop(self, failure: RunStoreError, batch: Collection[_Item]) -> None:
        if not self._is_closing:
            logger.error("%s", failure)
        self._failure = failure
        for item in (*batch, *self._waiting):
            item.fail(failure)
        self._waiting.clear()

    def _take_batch(self) -> list[_Item]:
        """Take what waits, up to the size of one call; what its caller gave up on is skipped."""
        batch: list[_Item] = []
        num_bytes = 0
        while self._waiting and len(batch) < _CALL_ITEMS and num_bytes < _CALL_BYTES:
            item = self._waiting.popleft()
            if not item.done.done():
                batch.append(item)
                num_bytes += item.num_bytes
        return batch

    async def _exchange(self, batch: list[_Item]) -> None:
        """Send a batch, apply what comes back, and tell the callers."""
        writing = [item for item in batch if item.record is not None]
        # A look that nobody waits for is made once; the next is due soon anyway.
        deadline = min(item.since for item in batch) + self._outage_s if batch else 0.0
        try:
            page = await (self._write(writing, deadline) if writing else self._read(deadline))
            await self._read_on(page, deadline)
        except RunLostError:
            raise
        except RunStoreError as error:
            await self._refuse(batch, error)
            return
        if any(item.payloads for item in writing):
            self._refused = None
        for item, position in zip(writing, page.answer.split(), strict=True):
            item.resolve(position != b"-1")
        for item in batch:
            item.resolve(True)

    async def _refuse(self, batch: Collection[_Item], error: RunStoreError) -> None:
        """Fail a batch; when memory is short, only what brings payloads: the rest frees some."""
        light = [item for item in batch if not item.payloads]
        is_full = isinstance(error, RedisFullError) and len(light) < len(batch)
        if is_full:
            self._refused = time.monotonic(), str(error)
        for item in batch:
            if item.payloads or not is_full:
                item.fail(error)
        if is_full and light:
            await self._exchange(light)

    async def _write(self, items: Sequence[_Item], deadline: float) -> _Page:
        self._sequence += 1
        sequence = self._sequence
        script = APPEND[any(item.payloads for item in items)]
        keys = (*self._keys[:3], self._keys.session, self._keys.payloads)
        body = [argument for item in items for argument in item.arguments()]

        async def attempt() -> _Page:
            head: list[Argument] = [self._position, self._tag, _PAGE_RECORDS]
            head += [sequence, self._answered, self.ids_end, os.urandom(TAG_BYTES)]
            reply = await self._link.call_once(script, keys, [*head, len(items), *body])
            return _Page(*reply)

        page: _Page = await self._link.attempt(attempt, deadline)
        self._answered = sequence
        return page

    async def _read(self, deadline: float | None) -> _Page:
        arguments = (self._position, self._tag, _PAGE_RECORDS)
        reply = await self._link.call(READ, self._keys[:3], arguments, deadline=deadline)
        return _Page(*reply)

    async def _read_on(self, page: _Page, deadline: float | None) -> None:
        """Apply a page and those behind it, up to where the log ended at the first one."""
        self._take(page)
        stop = page.stop
        while self._position < stop:
            self._take(await self._read(deadline))

    def _take(self, page: _Page) -> None:
        """Apply a page; it begins where the last one ended, or with a snapshot."""
        if self._position < page.base:
            if page.snapshot is not None:
                self._restore(page.snapshot)
            self._position, self._tag = page.base, page.base_tag
        for entry in page.records:
            applied(self._apply, self._position, entry[TAG_BYTES:])
            self._position += 1
            self._tag = entry[:TAG_BYTES]


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
        keys = [key async for key in client.scan_iter(ANY_RUN, count=_SCANNED_KEYS)]
    except (RedisError, TypeError):  # TypeError: a query parameter that the client does not know
        return []
    finally:
        await client.aclose()
        await client.connection_pool.disconnect()
    return sorted({run_of_key(key) for key in keys})


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
        self._keys = RunKeys.of(run_name, uuid.uuid4().hex)
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
        status, *found = await self._link.call(OPEN, keys, (FORMAT, _FIRST_GROUP_ID))
        if status != b"ok":
            raise ConfigError(
                f"the run at {self._link.address} has format {found[0].decode()}, this version "
                f"reads {FORMAT}; use the version that wrote it, or another --run"
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
                _, stop = await self._link.call(RESERVE, keys, (size,))
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
                await self._link.call(LEAVE, keys, (self.replica,), deadline=0.0)
        await self._link.close()

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(self._expiry_s / _BEATS_PER_EXPIRY)
            with contextlib.suppress(RunStoreError):  # the link has logged it
                await self._beat("-inf", deadline=0.0)

    async def _beat(self, max_age_ms: int | str, deadline: float | None = None) -> list[bytes]:
        """Say that this replica lives; return the replicas that were heard within that age."""
        keys = (self._keys.alive, self._keys.session)
        _, names = await self._link.call(BEAT, keys, (self.replica, max_age_ms), deadline=deadline)
        now = time.monotonic()
        if now - self._last_beat > self._expiry_s:
            self._beats_since = now
        self._last_beat = now
        return list(names)
