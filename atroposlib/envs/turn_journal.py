"""The turn journal: a file with the turns of running rollouts, so that they survive a kill -9.

    handle_env ─► group(item) ─► rollout() x G ─► play(record.conversation, record.policy)
                     │              │                 │ completion ─► one transaction
                     │              │                 │ reply, state ─► one transaction
                     └── sent ──────┴─────────────────┴─► its rows are deleted

After a restart, an item whose group is in the file takes it over: `play` receives the saved turns
from the file instead of the engine and the conversation, which continues from its saved state. The
engine then reads the same ids as before, so its prefix cache applies.

Invariants:
    - A completion is in the file before the conversation answers it. A turn whose environment is
      killed while a tool runs is not sampled again: the same completion is answered again, with
      the same idempotency key.
    - The rows of a group are deleted after the service has acknowledged it. It is sent under a key
      of the journal, so that a repeated delivery is stored once.
    - A file that cannot be written ends the journal, not the rollouts.

All SQL runs in one thread; turns that are finished at the same time share a transaction.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import sqlite3
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec

from atroposlib.envs.conversation import (
    ChatMessage,
    Conversation,
    Outcome,
    Reply,
    Turn,
    checked_chat,
    checked_reply,
)
from atroposlib.envs.policies import (
    AddedTokens,
    PolicyTurn,
    TokenPolicy,
    TokenSequence,
    Written,
)
from atroposlib.envs.reporting import Reward
from atroposlib.errors import AtroposError, ConfigError
from atroposlib.utils.aio import SideThread, settle
from atroposlib.utils.json_text import to_plain

if TYPE_CHECKING:
    from atroposlib.envs.workspace_archives import RolloutArchive, WorkspaceArchives

__all__ = [
    "JournalIdentity",
    "JournaledGroup",
    "JournaledRollout",
    "TurnJournal",
    "journaled_group",
]

logger = logging.getLogger(__name__)

APPLICATION_ID = 0x41_54_54_4A
FORMAT_VERSION = 1
OWNER_ONLY = 0o600
LOCK_S = 2.0
"""Seconds that opening waits for another process to release the file."""

SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE identity (content BLOB NOT NULL);
CREATE TABLE groups (
    number INTEGER PRIMARY KEY, group_id TEXT NOT NULL UNIQUE, item BLOB NOT NULL,
    step INTEGER NOT NULL
);
CREATE TABLE turns (
    group_id TEXT NOT NULL, rollout INTEGER NOT NULL, turn INTEGER NOT NULL,
    completion BLOB NOT NULL, reply BLOB,
    PRIMARY KEY (group_id, rollout, turn)
) WITHOUT ROWID;
CREATE TABLE endings (
    group_id TEXT NOT NULL, rollout INTEGER NOT NULL, ending BLOB NOT NULL,
    PRIMARY KEY (group_id, rollout)
) WITHOUT ROWID;
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {FORMAT_VERSION};
COMMIT;
"""

JournalIdentity = Mapping[str, str]
"""Digests of what the turns of a journal depend on: environment, tokenizer and settings."""

Operation = tuple[str, tuple[Any, ...]]
"""A statement and its values."""


class SavedCompletion(msgspec.Struct, frozen=True, array_like=True):
    """A turn of the policy."""

    rollout_id: str
    """First part of the idempotency keys of the rollout."""
    text: str
    is_cut: bool
    tokens: AddedTokens
    opening: list[Any] | None = None
    """The first messages; None after the first turn."""
    state: Any = None
    """State of the conversation after its opening; None after the first turn."""


class SavedReply(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a turn, and the state of the conversation after it."""

    messages: Any
    reward: Any
    is_done: bool
    history: list[Any] | None
    state: Any
    workspace_turn: int | None = None
    """Turn whose archive has the files of the workspace; None if they are those of its base."""


class SavedEnding(msgspec.Struct, frozen=True, array_like=True):
    """The end of a rollout at a limit."""

    outcome: str
    unfinished_reward: Any


class SavedTurn(NamedTuple):
    completion: SavedCompletion
    reply: SavedReply | None
    """None if the environment ended before the conversation had answered."""


class SavedRollout(NamedTuple):
    """The turns of one rollout that an earlier process has finished."""

    turns: list[SavedTurn]
    ending: SavedEnding | None = None
    num_bytes: int = 0
    """Bytes of the saved turns and of the archive of the workspace."""

    @property
    def state(self) -> Any:
        """State of the conversation after its latest reply, or after its opening."""
        reply = self.latest_reply
        return self.turns[0].completion.state if reply is None else reply.state

    @property
    def latest_reply(self) -> SavedReply | None:
        replies = [turn.reply for turn in self.turns if turn.reply is not None]
        return replies[-1] if replies else None

    @property
    def workspace_turn(self) -> int | None:
        """Turn whose archive the conversation continues with; None if it needs none."""
        reply = self.latest_reply
        is_over = self.ending is not None or reply is None or reply.is_done
        return None if is_over or reply is None else reply.workspace_turn


_ENCODER = msgspec.msgpack.Encoder(enc_hook=to_plain)
_COMPLETIONS = msgspec.msgpack.Decoder(SavedCompletion)
_REPLIES = msgspec.msgpack.Decoder(SavedReply)
_ENDINGS = msgspec.msgpack.Decoder(SavedEnding)
_ANY = msgspec.msgpack.Decoder()

_ENCODING_ERRORS = (TypeError, ValueError, OverflowError, RecursionError)


NOT_PLAIN: Any = object()
"""Stands for an item that cannot be stored."""


def is_plain(value: Any) -> bool:
    """Whether a value is read back from a file as it was."""
    try:
        return bool(_ANY.decode(encode_plain(value)) == value)
    except _ENCODING_ERRORS:
        return False


def encode_plain(value: Any) -> bytes:
    """Encode plain values: numbers, texts, lists, mappings with text keys, and None.

    Raises:
        TypeError: a value has another type; so do ValueError and OverflowError for its size.
    """
    return _ENCODER.encode(value)


def state_of(conversation: Conversation) -> Any:
    """Return the state of a conversation; None if it has none.

    Conversations that were written before the journal may have an attribute `state`.
    """
    method: Any = type(conversation).state
    return method(conversation) if inspect.isfunction(method) else None


def open_connection(path: Path, identity: JournalIdentity) -> sqlite3.Connection:
    """Open or create the file; a damaged one is renamed and replaced.

    Raises:
        ConfigError: the file is in use, of another program, version or environment, or cannot be
            written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=OWNER_ONLY)
    except OSError as error:
        raise ConfigError(f"--env.turn_journal {path}: cannot be written: {error}") from error
    try:
        return _checked_connection(path, identity)
    except sqlite3.OperationalError as error:
        raise ConfigError(
            f"--env.turn_journal {path}: {error}; expected a file that no other environment uses"
        ) from error
    except (sqlite3.DatabaseError, msgspec.DecodeError) as error:
        aside = _set_aside(path)
        logger.warning(
            "the turn journal %s is damaged (%s); it is now %s, and rollouts start again",
            path,
            error,
            aside.name,
        )
        return _checked_connection(path, identity)


def _checked_connection(path: Path, identity: JournalIdentity) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path, isolation_level=None, check_same_thread=False, timeout=LOCK_S
    )
    try:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        _check_owner(connection, path)  # before the mode of the file is changed
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")  # a kill -9 loses nothing
        _check_content(connection, path, identity)
    except BaseException:
        connection.close()
        raise
    return connection


def _check_content(connection: sqlite3.Connection, path: Path, identity: JournalIdentity) -> None:
    connection.execute("BEGIN IMMEDIATE")  # takes the lock
    connection.execute("COMMIT")
    [found] = connection.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise sqlite3.DatabaseError(found)
    [version] = connection.execute("PRAGMA user_version").fetchone()
    if not _table_names(connection):
        connection.executescript(SCHEMA)
        content = encode_plain(identity)
        connection.execute("INSERT INTO identity VALUES (?)", (content,))
        return
    if version != FORMAT_VERSION:
        raise ConfigError(
            f"--env.turn_journal {path} has format {version}, this version writes "
            f"{FORMAT_VERSION}; give another path"
        )
    _check_rows(connection)
    _check_identity(connection, path, identity)


def _check_owner(connection: sqlite3.Connection, path: Path) -> None:
    [application] = connection.execute("PRAGMA application_id").fetchone()
    if application != APPLICATION_ID and _table_names(connection):
        raise ConfigError(f"--env.turn_journal {path}: expected a turn journal or no file")


def _table_names(connection: sqlite3.Connection) -> set[str]:
    return {name for [name] in connection.execute("SELECT name FROM sqlite_master")}


def _check_rows(connection: sqlite3.Connection) -> None:
    """Raise `sqlite3.DatabaseError` if the journal cannot be read; turns are read later."""
    missing = {"identity", *TABLES} - _table_names(connection)
    if missing:
        raise sqlite3.DatabaseError(f"no table {min(missing)}")
    try:
        for (content,) in connection.execute("SELECT content FROM identity"):
            if not isinstance(_ANY.decode(content), dict):
                raise TypeError("its identity is not a mapping")
        for item, step in connection.execute("SELECT item, step FROM groups"):
            _ANY.decode(item)
            if not isinstance(step, int):
                raise TypeError("a step is not a number")
    except (TypeError, ValueError, RecursionError) as error:
        raise sqlite3.DatabaseError(f"{error}") from error


def _check_identity(connection: sqlite3.Connection, path: Path, identity: JournalIdentity) -> None:
    row = connection.execute("SELECT content FROM identity").fetchone()
    known = _ANY.decode(row[0]) if row is not None else {}
    wanted = _ANY.decode(encode_plain(identity))
    for name in {**wanted, **known}:
        if known.get(name) != wanted.get(name):
            raise ConfigError(
                f"--env.turn_journal {path} is of a run with another {name}; environment, "
                "tokenizer and settings must be the same. Give another path, or delete the file"
            )


def _set_aside(path: Path) -> Path:
    number = 0
    while (aside := path.with_name(f"{path.name}.damaged{number or ''}")).exists():
        number += 1
    path.rename(aside)
    for suffix in ("-wal", "-shm", "-journal"):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(aside.with_name(aside.name + suffix))
    path.touch(mode=OWNER_ONLY)
    return aside


class TurnJournal:
    """The journal of one environment; created by `open`.

    Args:
        path: its file.
        connection: the open file.
        max_bytes: limit of all saved turns; rollouts above it start again after a kill.

    Attributes:
        num_bytes: bytes of the saved turns.
        num_resumed_turns: turns of earlier processes that were taken over.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection, *, max_bytes: int) -> None:
        self.path = path
        self.num_bytes = 0
        self.num_resumed_turns = 0
        self._connection = connection
        self._max_bytes = max_bytes
        self._thread = SideThread()
        self._pending: deque[Operation] = deque()
        self._error: sqlite3.Error | None = None
        self._noted: set[str] = set()
        self._waiting: dict[str, bytes] = {}  # group id to item, oldest first
        self._archives: WorkspaceArchives | None = None

    @classmethod
    async def open(cls, path: Path, identity: JournalIdentity, *, max_bytes: int) -> TurnJournal:
        """Open or create a journal.

        Raises:
            ConfigError: see `open_connection`.
        """
        connection = await asyncio.to_thread(open_connection, path, identity)
        journal = cls(path, connection, max_bytes=max_bytes)
        await journal._thread.run(journal._load)
        return journal

    def _load(self) -> None:
        rows = self._connection.execute("SELECT group_id, item FROM groups ORDER BY number")
        self._waiting = dict(rows.fetchall())
        [self.num_bytes] = self._connection.execute(
            "SELECT coalesce(sum(length(completion) + coalesce(length(reply), 0)), 0) FROM turns"
        ).fetchone()
        if self.path.with_name(f"{self.path.name}{WORKSPACES_SUFFIX}").exists():
            self.num_bytes += self.archives().delete_except(self._waiting)

    def archives(self) -> WorkspaceArchives:
        """Return the archives of workspaces, of which most environments have none."""
        if self._archives is None:
            from atroposlib.envs.workspace_archives import WorkspaceArchives

            folder = self.path.with_name(f"{self.path.name}{WORKSPACES_SUFFIX}")
            self._archives = WorkspaceArchives(folder, self._thread)
        return self._archives

    async def delete_archives(self, group_id: str, *of_rollout: int | None) -> int:
        """Delete the archives of a group, or of one of its rollouts; return their bytes.

        Args:
            group_id: the group.
            of_rollout: number of the rollout, and the turn whose archive is kept.
        """
        if self._archives is None:
            return 0
        return await self._thread.run(self._archives.delete, group_id, *of_rollout)

    @property
    def is_usable(self) -> bool:
        """Whether turns are still written; False after an error of the file."""
        return self._error is None

    def waiting_items(self) -> list[Any]:
        """Return the encoded items of the groups that nothing continues yet, oldest first."""
        return [_ANY.decode(item) for item in self._waiting.values()]

    @contextlib.asynccontextmanager
    async def group(
        self, item: Any, *, step: int, is_dropped: Callable[[], bool]
    ) -> AsyncIterator[JournaledGroup | None]:
        """Journal the group of an item while it is rolled out and sent.

        At the end its rows are deleted. If the context is cancelled they are kept, and a later
        group of an equal item takes them over, also in another process.

        Args:
            item: the item as plain values; `NOT_PLAIN` is not journaled.
            step: trainer step. If it is before that of the saved turns, they are of another run
                and deleted.
            is_dropped: called on a cancellation; whether the rows are deleted nevertheless.
        """
        group = await self._take(item, step)
        if group is None:
            yield None
            return
        token = _GROUP.set(group)
        try:
            yield group
        except asyncio.CancelledError:
            if not is_dropped():
                self._waiting[group.group_id] = encode_plain(item)
                raise
            await group.delete()
            raise
        except BaseException:
            await group.delete()
            raise
        else:
            await group.delete()
        finally:
            _GROUP.reset(token)

    async def _take(self, item: Any, step: int) -> JournaledGroup | None:
        if item is NOT_PLAIN:
            self.note_once("items that are not JSON values start again; see `encode_item`")
            return None
        encoded = encode_plain(item)
        known = next((id_ for id_, saved in self._waiting.items() if saved == encoded), None)
        group_id = uuid.uuid4().hex if known is None else known
        self._waiting.pop(group_id, None)
        try:
            if known is not None:
                return await self._take_over(known, step)
            row = "INSERT INTO groups (group_id, item, step) VALUES (?, ?, ?)"
            await self.write((row, (group_id, encoded, step)))
        except asyncio.CancelledError:
            self._waiting[group_id] = encoded  # its row is written nevertheless
            raise
        return JournaledGroup(self, group_id, {})

    async def _take_over(self, group_id: str, step: int) -> JournaledGroup:
        saved_step, rollouts = await self._thread.run(self._read, group_id)
        group = JournaledGroup(self, group_id, rollouts)
        if saved_step > step:
            if saved_step != UNREADABLE_STEP:
                self.note_once(
                    f"turns of step {saved_step} are deleted: the trainer is at step {step} now"
                )
            await group.forget_turns(step)
        return group

    def _read(self, group_id: str) -> tuple[int, dict[int, SavedRollout]]:
        self._flush()
        execute, where = self._connection.execute, (group_id,)
        rollouts: dict[int, SavedRollout] = {}
        try:
            [step] = execute("SELECT step FROM groups WHERE group_id = ?", where).fetchone()
            ends = execute("SELECT rollout, ending FROM endings WHERE group_id = ?", where)
            endings = {number: _ENDINGS.decode(ending) for number, ending in ends}
            archived = {} if self._archives is None else self._archives.sizes(group_id)
            turns = "SELECT rollout, completion, reply FROM turns WHERE group_id = ? "
            for number, completion, reply in execute(f"{turns} ORDER BY rollout, turn", where):
                known = rollouts.get(number) or SavedRollout(
                    [], endings.get(number), archived.get(number, 0)
                )
                answered = None if reply is None else _REPLIES.decode(reply)
                known.turns.append(SavedTurn(_COMPLETIONS.decode(completion), answered))
                size = len(completion) + len(reply or b"")
                rollouts[number] = known._replace(num_bytes=known.num_bytes + size)
        except (msgspec.DecodeError, sqlite3.Error, TypeError) as error:
            logger.warning("saved turns cannot be read (%s); the item starts again", error)
            return UNREADABLE_STEP, {}
        return step, rollouts

    async def write(self, *operations: Operation) -> None:
        """Commit statements, together with those of others that wait; see `is_usable`."""
        if self._error is not None:
            return
        self._pending.extend(operations)
        await self._thread.run(self._flush)
        if self._error is not None:
            self.note_once(f"cannot be written ({self._error}); running rollouts are not saved")

    def _flush(self) -> None:
        operations = []
        while self._pending:
            operations.append(self._pending.popleft())
        if not operations or self._error is not None:
            return
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            for statement, values in operations:
                self._connection.execute(statement, values)
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            self._error = error
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")

    def has_room(self, num_bytes: int) -> bool:
        """Whether more bytes of turns fit below the limit; logs once if not."""
        if self.num_bytes + num_bytes <= self._max_bytes:
            return True
        self.note_once(
            f"is full ({self._max_bytes >> 20} MiB); further rollouts start again after a kill. "
            "--env.turn_journal_mib sets the limit"
        )
        return False

    def note_once(self, text: str) -> None:
        if text not in self._noted and len(self._noted) < MAX_NOTES:
            self._noted.add(text)
            logger.warning("turn journal %s: %s", self.path, text)

    async def clear(self) -> None:
        """Delete all groups: the run is over, and nothing is to be continued."""
        self._waiting = {}
        await self.write(*((f"DELETE FROM {table}", ()) for table in TABLES))
        if self._archives is not None:
            await self._thread.run(self._archives.delete_except, ())

    async def close(self) -> None:
        """Write what is pending and close the file."""
        await asyncio.shield(self._thread.run(self._close))
        self._thread.close()

    def _close(self) -> None:
        self._flush()
        self._connection.close()


MAX_NOTES = 20
WORKSPACES_SUFFIX = ".workspaces"
TIME_IS_UP = "(The time limit of the conversation is reached.)"
UNREADABLE_STEP = 2**62
"""Step of turns that cannot be read, after every step of a trainer."""
TABLES = ("turns", "endings", "groups")

_GROUP: ContextVar[JournaledGroup | None] = ContextVar("journaled_group", default=None)


def journaled_group() -> JournaledGroup | None:
    """Return the group of the `TurnJournal.group` that this task, or its parent, is in."""
    return _GROUP.get()


class JournaledGroup:
    """The rollouts of one item.

    Args:
        journal: its journal.
        group_id: name of the group; part of the keys of its deliveries.
        saved: turns of an earlier process, by number of the rollout.
    """

    def __init__(self, journal: TurnJournal, group_id: str, saved: dict[int, SavedRollout]) -> None:
        self.group_id = group_id
        self.journal = journal
        self._saved = saved
        self._bytes = {number: rollout.num_bytes for number, rollout in saved.items()}
        self._archives: dict[int, RolloutArchive] = {}
        self._taken: set[int] = set()
        self._started: set[int] = set()
        self._num_deliveries = 0

    def delivery_key(self) -> str:
        """Return the idempotency key of the next delivery: the same after a restart."""
        self._num_deliveries += 1
        return f"{self.group_id}-{self._num_deliveries}"

    @contextlib.asynccontextmanager
    async def rollout(
        self, start: Callable[[], Conversation], policy: TokenPolicy
    ) -> AsyncIterator[JournaledRollout]:
        """Journal one rollout; one that was started before continues from its saved turns.

        If the straggler policy starts a rollout again, its turns are deleted.

        Args:
            start: returns a new conversation about the item.
            policy: samples the turns; before its first one.
        """
        number = next(n for n in range(len(self._taken) + 1) if n not in self._taken)
        self._taken.add(number)
        try:
            if number in self._started:
                await self.delete_rollout(number)
            self._started.add(number)
            conversation = start()
            saved = self._saved.pop(number, None)
            if saved is not None and not await self._restore(conversation, saved, number):
                saved, conversation = None, start()
            yield JournaledRollout(self, number, conversation, policy, saved)
        except BaseException:
            self._taken.discard(number)  # a rollout in its place has its number
            raise

    async def _restore(self, conversation: Conversation, saved: SavedRollout, number: int) -> bool:
        name = type(conversation).__name__
        step = f"{name}.restore"
        try:
            type(conversation).restore(conversation, saved.state)
            if saved.workspace_turn is not None:
                step = f"the workspace of {name}"
                await self.archive(number).load(conversation.workspace, saved.workspace_turn)
        except Exception as error:  # noqa: BLE001 - an error of the author; the item starts again
            self.journal.note_once(f"{step} raised {error!r:.300}; it is started again")
            await settle(conversation.close())
            await self.delete_rollout(number)
            return False
        except BaseException:
            await settle(conversation.close())
            raise
        await self.delete_archives(number, except_of=saved.workspace_turn)
        self.journal.num_resumed_turns += len(saved.turns)
        return True

    def archive(self, number: int) -> RolloutArchive:
        """Return the archive of the workspace of a rollout."""
        if number not in self._archives:
            self._archives[number] = self.journal.archives().of(self.group_id, number)
        return self._archives[number]

    async def delete_archives(self, number: int, *, except_of: int | None) -> None:
        """Delete the archives of a rollout to which no row refers.

        Args:
            number: the rollout.
            except_of: turn whose archive is kept; None for none.
        """
        num_bytes = await self.journal.delete_archives(self.group_id, number, except_of)
        self.add_bytes(number, -num_bytes)

    async def write(self, operation: Operation, number: int, num_bytes: int) -> None:
        """Commit a row of a rollout."""
        self.add_bytes(number, num_bytes)
        await self.journal.write(operation)

    def add_bytes(self, number: int, num_bytes: int) -> None:
        """Count bytes of a rollout that are saved, or removed if negative."""
        self._bytes[number] = self._bytes.get(number, 0) + num_bytes
        self.journal.num_bytes += num_bytes

    async def delete_rollout(self, number: int) -> None:
        where = (self.group_id, number)
        self._archives.pop(number, None)
        self.journal.num_bytes -= self._bytes.pop(number, 0)
        await self.journal.write(
            ("DELETE FROM turns WHERE group_id = ? AND rollout = ?", where),
            ("DELETE FROM endings WHERE group_id = ? AND rollout = ?", where),
        )
        await self.journal.delete_archives(self.group_id, number)

    async def forget_turns(self, step: int) -> None:
        """Delete all turns, and start at another step."""
        self._saved = {}
        self._release_bytes()
        await self.journal.write(
            ("DELETE FROM turns WHERE group_id = ?", (self.group_id,)),
            ("DELETE FROM endings WHERE group_id = ?", (self.group_id,)),
            ("UPDATE groups SET step = ? WHERE group_id = ?", (step, self.group_id)),
        )
        await self.journal.delete_archives(self.group_id)

    async def delete(self) -> None:
        self._release_bytes()
        await self.journal.write(
            *((f"DELETE FROM {table} WHERE group_id = ?", (self.group_id,)) for table in TABLES)
        )
        await self.journal.delete_archives(self.group_id)

    def _release_bytes(self) -> None:
        self.journal.num_bytes -= sum(self._bytes.values())
        self._bytes = {}


class JournaledRollout:
    """Saves the turns of one rollout, and repeats those of an earlier process.

    Args:
        group: its group.
        number: its number in the group.
        conversation: a new conversation, or one that has taken over the saved state.
        policy: samples the turns.
        saved: turns of an earlier process; None without any.

    Attributes:
        conversation: to be passed to `play`.
        policy: to be passed to `play`.
        original: the conversation that is played.
        is_saved: Whether turns are saved; False if the conversation has no state.
    """

    def __init__(
        self,
        group: JournaledGroup,
        number: int,
        conversation: Conversation,
        policy: TokenPolicy,
        saved: SavedRollout | None,
    ) -> None:
        self.rollout_id = (
            uuid.uuid4().hex if saved is None else saved.turns[0].completion.rollout_id
        )
        self.saved = SavedRollout([]) if saved is None else saved
        self.opening: list[ChatMessage] | None = None
        self.conversation = JournaledConversation(self, conversation)
        self.policy = JournaledPolicy(self, policy)
        self.is_saved = True
        self.original = conversation
        self._group = group
        self._number = number

    def saved_turn(self, index: int) -> SavedTurn | None:
        return self.saved.turns[index] if index < len(self.saved.turns) else None

    def key_of(self, index: int) -> str:
        """Return the idempotency key of a turn."""
        return f"{self.rollout_id}-{index}"

    async def note_completion(self, index: int, written: Written, tokens: AddedTokens) -> None:
        """Save a turn before the conversation answers it."""
        opening, state = None, None
        if index == 0:
            opening, state = self.opening, state_of(self.original)
            self.is_saved = state is not None
        completion = SavedCompletion(
            self.rollout_id, written.text, written.is_cut, tokens, opening, state
        )
        await self._write(
            "INSERT INTO turns (completion, group_id, rollout, turn) VALUES (?, ?, ?, ?)",
            completion,
            index,
        )

    async def note_reply(self, index: int, reply: Reply) -> None:
        """Save the answer to a turn and the state of the conversation after it."""
        state = state_of(self.original) if self.is_saved else None
        if state is None and self.is_saved:
            await self._give_up()
        workspace_turn = None if reply.is_done else await self._save_workspace(index)
        answered = SavedReply(
            messages=reply.messages if isinstance(reply.messages, str) else list(reply.messages),
            reward=reply.reward,
            is_done=reply.is_done,
            history=None if reply.history is None else list(reply.history),
            state=state,
            workspace_turn=workspace_turn,
        )
        await self._write(
            "UPDATE turns SET reply = ? WHERE group_id = ? AND rollout = ? AND turn = ?",
            answered,
            index,
        )
        if self.original.workspace is not None and self.is_saved:
            await self._group.delete_archives(self._number, except_of=workspace_turn)

    async def note_ending(self, outcome: Outcome) -> Outcome:
        """Save the end of the rollout; return its outcome, which an earlier process may know."""
        if self.saved.ending is not None:
            return cast(Outcome, self.saved.ending.outcome)
        if outcome != "done":
            await self._write(
                "INSERT OR REPLACE INTO endings (ending, group_id, rollout) VALUES (?, ?, ?)",
                SavedEnding(outcome, self.original.unfinished_reward),
            )
            await self._group.delete_archives(self._number, except_of=None)
        return outcome

    async def _save_workspace(self, index: int) -> int | None:
        """Save the files if the turn changed them; return the turn whose archive has them."""
        journal, workspace = self._group.journal, self.original.workspace
        if workspace is None or not (self.is_saved and journal.is_usable):
            return None
        archive = self._group.archive(self._number)
        try:
            packed = await archive.pack(workspace)
            if packed is not None and not journal.has_room(len(packed)):
                await self._give_up()
            elif packed is not None:
                await archive.write(packed, index)
                self._group.add_bytes(self._number, len(packed))
        except (AtroposError, OSError) as error:
            name = type(self.original).__name__
            journal.note_once(f"the workspace of {name} is not saved: {error}")
            await self._give_up()
        return archive.turn

    async def _write(self, statement: str, content: msgspec.Struct, *place: int) -> None:
        journal = self._group.journal
        if not self.is_saved or not journal.is_usable:
            return
        try:
            encoded = encode_plain(content)
        except _ENCODING_ERRORS as error:
            name = type(self.original).__name__
            journal.note_once(f"a turn of {name} is not saved, it has other than JSON: {error}")
            await self._give_up()
            return
        if not journal.has_room(len(encoded)):
            await self._give_up()
            return
        where = (self._group.group_id, self._number, *place)
        await self._group.write((statement, (encoded, *where)), self._number, len(encoded))

    async def _give_up(self) -> None:
        """Delete the turns, without which the rollout would continue from a wrong one."""
        self.is_saved = False
        await self._group.delete_rollout(self._number)


class JournaledPolicy:
    """Repeats the saved turns of a rollout; then samples, and saves each turn."""

    def __init__(self, record: JournaledRollout, policy: TokenPolicy) -> None:
        self._record = record
        self._policy = policy
        self._index = 0

    def budget(self, chat: Sequence[ChatMessage], *, max_tokens: int) -> int:
        if self._record.saved_turn(self._index) is not None:
            return max_tokens
        if self._record.saved.ending is not None:
            return 0
        return self._policy.budget(chat, max_tokens=max_tokens)

    async def write(self, chat: Sequence[ChatMessage], *, max_tokens: int) -> Written:
        index, self._index = self._index, self._index + 1
        saved = self._record.saved_turn(index)
        if saved is not None:
            known = saved.completion
            self._policy.restore_turn(known.tokens, chat, known.text)
            return PolicyTurn(known.text, known.is_cut)
        written = await self._policy.write(chat, max_tokens=max_tokens)
        await self._record.note_completion(index, written, self._policy.added_tokens())
        return written

    def sequences(self) -> list[TokenSequence]:
        return self._policy.sequences()


class JournaledConversation(Conversation):
    """Repeats the saved replies of a rollout; then asks the conversation, and saves each reply."""

    def __init__(self, record: JournaledRollout, conversation: Conversation) -> None:
        self._record = record
        self._conversation = conversation

    @property
    def unfinished_reward(self) -> Reward:  # type: ignore[override]
        ending = self._record.saved.ending
        if ending is not None:
            return cast(Reward, ending.unfinished_reward)
        return self._conversation.unfinished_reward

    def opening(self) -> Sequence[ChatMessage]:
        first = self._record.saved_turn(0)
        if first is not None and first.completion.opening is not None:
            return first.completion.opening
        name = type(self._conversation).__name__
        opening = checked_chat(
            self._conversation.opening(), f"{name}.opening", signature="def opening(self)"
        )
        self._record.opening = list(opening)
        return opening

    async def reply(self, turn: Turn) -> Reply:
        saved = self._record.saved_turn(turn.index)
        if saved is not None and saved.reply is not None:
            known = saved.reply
            return Reply(known.messages, known.reward, known.is_done, known.history)
        if saved is not None and self._record.saved.ending is not None:
            return Reply(TIME_IS_UP)  # it had ended before the conversation answered
        keyed = replace(turn, key=self._record.key_of(turn.index))
        reply = await checked_reply(self._conversation, keyed)
        await self._record.note_reply(turn.index, reply)
        return reply

    async def close(self) -> None:
        await settle(self._conversation.close())
