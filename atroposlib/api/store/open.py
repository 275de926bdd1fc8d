"""Which store serves a run, and what the run is called."""

from __future__ import annotations

import re
import secrets
from datetime import datetime
from pathlib import Path

from atroposlib.api.store.base import RunStore
from atroposlib.api.store.memory import MemoryRunStore
from atroposlib.errors import ConfigError

__all__ = [
    "check_run_name",
    "check_store_url",
    "fresh_run_name",
    "open_store",
    "run_file",
    "without_secrets",
]

REDIS_SCHEMES = ("redis://", "rediss://", "unix://")
MAX_RUN_NAME = 100
RUN_NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9_.+-]{{0,{MAX_RUN_NAME - 1}}}")
WORDS = (
    "aspen",
    "birch",
    "cedar",
    "coral",
    "delta",
    "fern",
    "grove",
    "hazel",
    "ivory",
    "maple",
    "meadow",
    "moss",
    "olive",
    "opal",
    "pine",
    "quartz",
    "reed",
    "sage",
    "slate",
    "tide",
    "topaz",
    "wren",
)


def fresh_run_name(now: datetime | None = None) -> str:
    """Return a name no other run has, such as `2026-11-21-2239-maple-3f9a1c`.

    Args:
        now: Moment to name; the present, in local time, by default.
    """
    moment = now or datetime.now()
    return f"{moment:%Y-%m-%d-%H%M}-{secrets.choice(WORDS)}-{secrets.token_hex(3)}"


def check_run_name(name: str) -> str:
    """Return the name if a file and a key can be called so.

    Raises:
        ConfigError: it is empty, too long, begins with a dot, or holds other characters.
    """
    if RUN_NAME.fullmatch(name) is None:
        raise ConfigError(
            f"run name {name!r} cannot be used; expected 1 to {MAX_RUN_NAME} letters, digits or "
            "any of . _ + -, and no . + - at the beginning"
        )
    return name


def check_store_url(url: str) -> str:
    """Return the URL if it names a kind of store; ConfigError otherwise."""
    if url in ("memory", "sqlite") or url.startswith(REDIS_SCHEMES):
        return url
    raise ConfigError(
        f"store {without_secrets(url)!r} is unknown; expected memory, sqlite or redis://HOST:PORT/DATABASE"
    )


def without_secrets(url: str) -> str:
    """Return what was given as the URL of a store, without user, password and options."""
    address = url.partition("?")[0]
    access, at, place = address.rpartition("@")
    scheme = re.match(r"\w+://", access)
    return f"{scheme.group() if scheme else ''}***@{place}" if at else address


def run_file(data_dir: Path, run_name: str) -> Path:
    """Return the file in which the sqlite store keeps a run."""
    return data_dir / f"{check_run_name(run_name)}.sqlite3"


def open_store(
    url: str, *, data_dir: Path, run_name: str, fsync: bool = False, replica: str = ""
) -> RunStore:
    """Return the store of a run; the run is loaded, or created, by its `open`.

    Args:
        url: `memory`, `sqlite` or the URL of a Redis.
        data_dir: Directory of files, for `sqlite`; created when missing.
        run_name: Name of the run: a new one creates it, that of an earlier run resumes it.
        fsync: `sqlite` only: every acknowledgement waits for the disk, so that a power cut loses
            nothing either.
        replica: `redis` only: name of this process among those that serve the run.

    Raises:
        ConfigError: the URL or the name cannot be used.
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
