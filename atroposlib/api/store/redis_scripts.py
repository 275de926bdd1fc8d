"""What a run is in Redis: its keys, and the scripts that change them in one step each.

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

from typing import NamedTuple
from urllib.parse import quote, unquote

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
    "RunKeys",
]

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
