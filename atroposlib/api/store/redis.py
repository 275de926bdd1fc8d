"""A run in Redis, shared by several replicas of the service.

    RedisRunStore ─┬─► RedisLog ───► RedisLink ─► Redis     records, in the same order everywhere
                   ├─ payloads, by id
                   ├─ ids, in blocks
                   └─ a heartbeat at intervals

Connection: a call that fails because the server is unreachable is retried, with growing pauses,
until its deadline. Logs and errors never contain the password.

Log: one task sends one call at a time, so replies arrive in order. Every `poll_s` it reads the
records of other replicas.

    append ─► waiting ─► one script call ─► Redis      many records and payloads in one round trip
    apply ◄── reply: every record from the last known position to the end

Concurrent `append` calls share the next script call. If another replica has replaced unknown
records with a snapshot, the reply contains it, so `restore` may be called at any time.

Keys, which scripts change atomically:

    atropos:{RUN}:meta        hash        base, base_tag, guarded, next_id, format
    atropos:{RUN}:log         list        the records from position `base` on, each after its tag
    atropos:{RUN}:snapshot    string      the state before the record at `base`
    atropos:{RUN}:payloads    hash        group id -> bytes
    atropos:{RUN}:alive       sorted set  replica -> its last heartbeat, in ms of Redis' clock
    atropos:{RUN}:session:ID  hash        the last call of one opened store, its answer, its ids

The braces put all keys of a run on one node of a cluster.

*Tags.* A record starts with eight random bytes of the attempt that wrote it. A replica that knows
the log up to a position also knows the tag there. Every script compares it first, to detect a log
that has lost records and was extended afterwards.

*Sessions.* A store numbers its calls and sends one at a time. A call whose reply was lost is sent
again under its number, and gets the same answer; one that arrives late changes nothing.
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

logger = logging.getLogger(__name__)


_SOCKET_TIMEOUT_S = 10.0
_CONNECT_TIMEOUT_S = 5.0
_MAX_CONNECTIONS = 32


def connect(url: str) -> Redis:
    """Return a client that connects on first use and does not retry by itself.

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
        # The reason may contain the URL with its password, so it is not shown.
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
    """Whether a retry may help: the server is unreachable, starting, or failing over."""
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


_OPEN_S = 5.0
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_OLDEST_VERSION = (7, 0)

Argument = str | bytes | int


class RunLostError(RunStoreError, ConfigError):
    """Redis has lost acknowledged data; continuing would silently lose groups."""


class RedisFullError(StoreFullError):
    """Redis is at its memory limit and rejects payloads."""


class RedisLink:
    """Calls to one Redis server, retried while it is unreachable.

    Attributes:
        address: host, port and database, or the path of the socket; never a password.
    """

    def __init__(self, url: str, *, patience_s: float) -> None:
        self._client = connect(url)
        self._execute: Callable[..., Awaitable[Any]] = self._client.execute_command
        self._patience_s = patience_s
        self._is_unreachable = False
        self.address = address_of(self._client)

    async def open(self) -> None:
        """Check the server; wait for it up to a few seconds.

        Raises:
            ConfigError: it cannot be reached, rejects the user, or is too old.
        """
        try:
            deadline = time.monotonic() + min(_OPEN_S, self._patience_s)
            info = await self.attempt(lambda: self._execute("INFO"), deadline)
        except RunStoreError as error:
            raise ConfigError(f"{error}; is --store right, and is Redis running?") from error
        except TypeError as error:  # a query parameter unknown to the client
            raise ConfigError(f"{self.address}: the URL has an unknown parameter") from error
        major, minor, *_ = map(int, f"{info['redis_version']}.0".split(".")[:2])
        if (major, minor) < _OLDEST_VERSION:
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
    ) -> Any:  # the result of the script
        """Run a script, loading it into Redis on first use.

        It is not retried after `deadline`, of `time.monotonic()`; None: `patience_s` from now.

        Raises:
            RunLostError: the script found that Redis lost data of the run.
            RunStoreError: no reply before the deadline, or Redis rejected the call.
        """
        return await self.attempt(lambda: self.call_once(script, keys, arguments), deadline)

    async def call_once(
        self, script: str, keys: Sequence[str], arguments: Sequence[Argument]
    ) -> Any:  # the result of the script
        """Run a script without retries; errors are those of the client library."""
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
                f"Redis at {self.address} lost data of this run: {reply[1].decode()}; restore its "
                "append-only file, or start another run with --run"
            )
        return reply

    async def command(self, name: str, *arguments: Argument) -> Any:  # the reply of Redis
        return await self.attempt(lambda: self._execute(name, *arguments))

    async def attempt(
        self, make_call: Callable[[], Awaitable[Any]], deadline: float | None = None
    ) -> Any:
        """Await a call, and retry while the server is unreachable; arguments as for `call`."""
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
                if not self._is_unreachable:
                    self._is_unreachable = True
                    logger.warning(
                        "Redis at %s does not respond, retrying: %s", self.address, error
                    )
                if time.monotonic() + pause_s > deadline:
                    raise self._explain(error, attempts) from error
            else:
                if self._is_unreachable:
                    self._is_unreachable = False
                    logger.info("Redis at %s responds again", self.address)
                return result
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def close(self) -> None:
        await self._client.aclose()
        await self._client.connection_pool.disconnect()

    def _explain(self, error: Exception, attempts: int) -> RunStoreError:
        from redis.exceptions import OutOfMemoryError

        if isinstance(error, OutOfMemoryError):
            return RedisFullError(
                f"Redis at {self.address} is at its maxmemory and accepts no more groups; let the "
                "trainer catch up, or give Redis more memory"
            )
        tries = f" after {attempts} attempts" if attempts > 1 else ""
        reason = str(error).rstrip(".")
        return RunStoreError(f"Redis at {self.address} failed{tries}: {reason}")

    async def _warn(self, info: Mapping[str, Any]) -> None:
        has_log = int(info.get("aof_enabled", 0))
        if not has_log:
            logger.warning(
                "Redis at %s has appendonly off: acknowledged data is lost if it crashes",
                self.address,
            )
        policy = info.get("maxmemory_policy", "noeviction")
        if int(info.get("maxmemory", 0)) and policy != "noeviction":
            logger.warning(
                "Redis at %s has maxmemory-policy %s and may evict the run when memory is "
                "short; set it to noeviction",
                self.address,
                policy,
            )
        if has_log and (fsync := await self._fsync()) != "always":
            logger.info(
                "Redis at %s has appendfsync %s: if its machine crashes, the latest "
                "acknowledged data may be lost, and this service then stops with an error",
                self.address,
                fsync,
            )

    async def _fsync(self) -> str:
        from redis.exceptions import ResponseError

        try:
            settings: Mapping[str, str] = await self._execute("CONFIG GET", "appendfsync")
        except ResponseError:  # some users lack the permission
            return "unknown"
        return settings.get("appendfsync", "unknown")


FORMAT = "1"
"""Version of the layout of keys; a store rejects a run of another version."""

TAG_BYTES = 8
_SESSION_DAYS = 7


class RunKeys(NamedTuple):
    """The keys of one run."""

    meta: str
    log: str
    snapshot: str
    payloads: str
    alive: str
    session: str

    @classmethod
    def of(cls, run_name: str, session: str) -> RunKeys:
        """Return the keys of a run, for one opened store."""
        prefix = f"atropos:{{{quote(run_name, safe='')}}}:"
        names = ("meta", "log", "snapshot", "payloads", "alive", f"session:{session}")
        return cls(*(prefix + name for name in names))


ANY_RUN = "atropos:{*}:meta"
"""Pattern that matches exactly one key of every run."""


def run_of_key(key: bytes) -> str:
    """Return the name of the run that a key of `ANY_RUN` belongs to."""
    return unquote(key.decode().partition("{")[2].rpartition("}")[0])


# At its memory limit Redis rejects scripts without `allow-oom`. It is set for scripts that free
# memory, or that must run before memory can be freed.
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
    """An append that waits to be sent; without a record, a request to read the log."""

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
    """The reply of a script that reads the log."""

    status: bytes
    answer: bytes
    base: int
    base_tag: bytes
    stop: int
    snapshot: bytes | None
    records: list[bytes]


class RedisLog:
    """Appends to the log of one run and applies the records of all replicas.

    Attributes:
        ids_end: End of the group ids this session has reserved; checked against Redis.
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
        """Time and message of the last rejection for lack of memory; None after a success."""

    async def open(self, apply: Apply, restore: Restore) -> None:
        """Read the snapshot and the log, and start to follow the log."""
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
        return await self._enqueue(_Item(record, payloads, fence))

    async def sync(self) -> None:
        await self._enqueue(_Item(None))

    async def compact(self, snapshot: bytes, position: int) -> None:
        arguments = (self._position, self._tag, snapshot, position)
        await self._link.call(COMPACT, self._keys[:3], arguments)

    async def close(self) -> None:
        """Send waiting records, for at most a few seconds, and stop following the log."""
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
        """Send waiting records, or poll every `poll_s`, until the log is closed or lost."""
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
        except Exception as error:  # task boundary: callers must not wait forever
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
        """Take waiting items up to the size of one call; cancelled ones are skipped."""
        batch: list[_Item] = []
        num_bytes = 0
        while self._waiting and len(batch) < _CALL_ITEMS and num_bytes < _CALL_BYTES:
            item = self._waiting.popleft()
            if not item.done.done():
                batch.append(item)
                num_bytes += item.num_bytes
        return batch

    async def _exchange(self, batch: list[_Item]) -> None:
        """Send a batch, apply the reply, and resolve the items."""
        writing = [item for item in batch if item.record is not None]
        # A poll without waiting callers is not retried, since the next one is due soon.
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
        """Fail a batch; at the memory limit only items with payloads, as others free memory."""
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
        """Apply a page and the following ones, up to the end of the log at the first one."""
        self._take(page)
        stop = page.stop
        while self._position < stop:
            self._take(await self._read(deadline))

    def _take(self, page: _Page) -> None:
        """Apply a page, which starts at the end of the last one or with a snapshot."""
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
    """Return the sorted names of the runs in a Redis database.

    Scans every key, about a second per million. Returns an empty list if Redis does not respond or
    denies permission, since opening the run reports the error.
    """
    client = connect(url)
    from redis.exceptions import RedisError

    try:
        keys = [key async for key in client.scan_iter(ANY_RUN, count=_SCANNED_KEYS)]
    except (RedisError, TypeError):  # TypeError: a query parameter unknown to the client
        return []
    finally:
        await client.aclose()
        await client.connection_pool.disconnect()
    return sorted({run_of_key(key) for key in keys})


class RedisRunStore:
    """A `RunStore` in Redis 7 or later; any replica may fail at any time.

    If `append` raises, its record was not acknowledged, but may have been written.

    Args:
        url: `redis://`, `rediss://` or `unix://`, with password and database if needed.
        run_name: name of the run, the same for all its replicas.
        replica: name of this process among the replicas; empty: a random name.
        outage_s: maximum wait of a call for an unreachable Redis, in seconds.
        poll_s: interval of polling for records of other replicas, in seconds.
        expiry_s: seconds without a heartbeat after which a replica counts as stopped.

    Raises:
        ConfigError: the URL is malformed, or the name is empty.
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
        self._reserving = asyncio.Lock()  # concurrent callers share a block
        self._heart: asyncio.Task[None] | None = None
        self._last_beat = self._beats_since = float("-inf")

    @property
    def full_reason(self) -> str | None:
        return self._log.full_reason

    async def open(self, apply: Apply, restore: Restore) -> None:
        """Load or create the run, and follow the records of other replicas.

        Records of other replicas are applied when they are read, at any await of this process. A
        replica that missed compacted records loads a snapshot.

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
        return await self._log.append(record, payloads, fence)

    async def sync(self) -> None:
        await self._log.sync()

    async def new_group_ids(self, count: int) -> range:
        """Reserve unused ids, in blocks of 1,024 from Redis."""
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
        ids = list(group_ids)
        for start in range(0, len(ids), _DISCARD_GROUPS):
            chosen = ids[start : start + _DISCARD_GROUPS]
            await self._link.command("HDEL", self._keys.payloads, *chosen)

    async def compact(self, snapshot: bytes, *, position: int) -> None:
        await self._log.compact(snapshot, position)

    async def alive_replicas(self) -> frozenset[str] | None:
        """Return the replicas with a recent heartbeat.

        For `expiry_s` after opening and after an outage of Redis, every replica with a heartbeat in
        the last hour counts as alive.
        """
        now = time.monotonic()
        is_sure = now - self._last_beat <= self._expiry_s < now - self._beats_since
        names = await self._beat(int(self._expiry_s * 1000) if is_sure else "-inf")
        return frozenset(name.decode() for name in names)

    async def close(self) -> None:
        """Send waiting records, remove this replica, and close the connections."""
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
        """Send a heartbeat; return the replicas with a heartbeat within that age."""
        keys = (self._keys.alive, self._keys.session)
        _, names = await self._link.call(BEAT, keys, (self.replica, max_age_ms), deadline=deadline)
        now = time.monotonic()
        if now - self._last_beat > self._expiry_s:
            self._beats_since = now
        self._last_beat = now
        return list(names)
