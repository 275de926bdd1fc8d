"""Selects and opens the store of a run by URL; validates, lists and generates names of runs."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from atroposlib.api.store.base import MemoryRunStore, RunStore
from atroposlib.errors import ConfigError
from atroposlib.utils.text import without_secrets

REDIS_SCHEMES = ("redis://", "rediss://", "unix://")
MAX_RUN_NAME = 100
SEPARATORS = re.compile(r"[-_.+]+")
MIN_SLIP_LETTERS = 4
"""Words with fewer letters, such as `a` and `b`, never count as misspellings."""
RUN_NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9_.+-]{{0,{MAX_RUN_NAME - 1}}}")
WORDS = (
    "aspen birch cedar coral delta fern grove hazel ivory maple meadow moss "
    "olive opal pine quartz reed sage slate tide topaz wren"
)


def fresh_run_name(now: datetime | None = None) -> str:
    """Return a unique name with the local time, such as `2026-11-21-2239-maple-3f9a1c`."""
    moment = now or datetime.now()
    return f"{moment:%Y-%m-%d-%H%M}-{secrets.choice(WORDS.split())}-{secrets.token_hex(3)}"


def check_run_name(name: str) -> str:
    """Return the name if it is valid as a file name and a key.

    Raises:
        ConfigError: it is empty, too long, starts with a dot, or has invalid characters.
    """
    if RUN_NAME.fullmatch(name) is None:
        raise ConfigError(
            f"run name {name!r} cannot be used; expected 1 to {MAX_RUN_NAME} letters, digits or "
            "any of . _ + -, and no . + - at the beginning"
        )
    return name


def check_store_url(url: str) -> str:
    """Return the URL if it names a known store; ConfigError otherwise."""
    if url in ("memory", "sqlite") or url.startswith(REDIS_SCHEMES):
        return url
    raise ConfigError(
        f"store {without_secrets(url)!r} is unknown; expected memory, sqlite or redis://HOST:PORT/DATABASE"
    )


def similar_run(name: str, known: Iterable[str]) -> str | None:
    """Return an existing run of which a new name may be a misspelling; None without one.

    Misspellings differ only in case or in `-_.+`, or by one letter that is missing, added, changed
    or swapped. Names of a series are new: `math-2` after `math-1`, `exp-b` after `exp-a`,
    `sft-qwen` after `rft-qwen`.
    """
    for other in sorted(known):
        if _plain(name) == _plain(other):
            return other
    words = SEPARATORS.split(name.lower())
    for other in sorted(known):
        others = SEPARATORS.split(other.lower())
        pairs = [pair for pair in zip(words, others) if pair[0] != pair[1]]  # noqa: B905
        if len(words) == len(others) and len(pairs) == 1 and _is_slip(*pairs[0]):
            return other
    return None


def _plain(name: str) -> str:
    return SEPARATORS.sub("", name.lower())


def _is_slip(word: str, other: str) -> bool:
    """Whether one word of a name is a misspelling of another; digits never are."""
    short, long = sorted((word, other), key=len)
    if re.sub(r"\d", "", word) == re.sub(r"\d", "", other) or len(long) < MIN_SLIP_LETTERS:
        return False
    if len(short) + 1 == len(long):
        return any(long[:i] + long[i + 1 :] == short for i in range(len(long)))
    if len(short) != len(long):
        return False
    apart = [i for i in range(len(word)) if word[i] != other[i]]
    if len(apart) == 1:
        return len(word) > MIN_SLIP_LETTERS
    is_swap = len(apart) == 2 and apart[0] + 1 == apart[1]
    return is_swap and word[apart[0]] == other[apart[1]] and word[apart[1]] == other[apart[0]]


def stored_runs(data_dir: Path) -> list[str]:
    """Return the names of the sqlite runs in a directory."""
    return sorted(path.name.removesuffix(".sqlite3") for path in data_dir.glob("*.sqlite3"))


async def known_runs(url: str, data_dir: Path) -> list[str]:
    """Return the sorted names of the runs in a store; empty for a store in memory.

    Arguments and errors are those of `open_store`.
    """
    if check_store_url(url) == "memory":
        return []
    if url == "sqlite":
        return stored_runs(data_dir)
    from atroposlib.api.store.redis import runs_in_redis

    return await runs_in_redis(url)


def run_file(data_dir: Path, run_name: str) -> Path:
    """Return the file in which the sqlite store keeps a run."""
    return data_dir / f"{check_run_name(run_name)}.sqlite3"


def open_store(
    url: str, *, data_dir: Path, run_name: str, fsync: bool = False, replica: str = ""
) -> RunStore:
    """Return the store of a run; its `open` loads the run, or creates it.

    Args:
        url: `memory`, `sqlite` or the URL of a Redis server.
        data_dir: directory of the files of `sqlite`; created if missing.
        run_name: a new name creates a run, an existing one resumes it.
        fsync: `sqlite` only: Whether every write waits for the disk, so that a power failure loses
            nothing.
        replica: `redis` only: name of this process among those that serve the run.

    Raises:
        ConfigError: the URL or the name is invalid.
        MissingExtraError: the client library of Redis is not installed.
    """
    check_run_name(run_name)
    if check_store_url(url) == "memory":
        return MemoryRunStore()
    if url == "sqlite":
        from atroposlib.api.store.sqlite import SqliteRunStore

        return SqliteRunStore(run_file(data_dir, run_name), fsync=fsync)
    from atroposlib.api.store.redis import RedisRunStore

    return RedisRunStore(url, run_name, replica=replica)
