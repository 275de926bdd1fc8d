"""Files of workspaces next to a turn journal, so that conversations with tools survive a kill -9.

    reply ─► workspace.save ─► new name ─► fsync ─► rename ─► the turn's row ─► older file removed
                                   FILE.workspaces/GROUP/ROLLOUT-TURN.tar.gz

A row has the number of the turn whose archive holds the files after its own turn, so that a turn
that changed nothing needs no archive. A rollout has one archive; two while a turn is written.

Invariants:
    - An archive is complete before a row refers to it, and removed after no row does.
    - An archive of a group that is not in the journal is removed when the journal is opened.

All calls of `WorkspaceArchives` are made in the thread of the journal, one after the other.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path

from atroposlib.utils.aio import SideThread
from atroposlib.utils.writable import flush_to_disk
from atroposlib.workspaces.interface import Workspace

__all__ = ["RolloutArchive", "WorkspaceArchives"]

GROUP_NAME = re.compile(r"[0-9a-f]{32}")
ARCHIVE_SUFFIX = ".tar.gz"
ARCHIVE_NAME = re.compile(r"[0-9]{1,9}-[0-9]{1,9}\.tar\.gz")
OWNER_ONLY = 0o600


class WorkspaceArchives:
    """The folder of the archives of one journal.

    Args:
        folder: created when it is needed.
        thread: that of the journal.
    """

    def __init__(self, folder: Path, thread: SideThread) -> None:
        self.thread = thread
        self._folder = folder

    def of(self, group_id: str, rollout: int) -> RolloutArchive:
        """Return the archive of a rollout."""
        return RolloutArchive(self, group_id, rollout)

    def path(self, group_id: str, rollout: int, turn: int) -> Path:
        return self._folder / group_id / f"{rollout}-{turn}.tar.gz"

    def write(self, path: Path, archive: bytes) -> None:
        """Write an archive; its name appears when it is complete on disk.

        Raises:
            OSError: it cannot be written.
        """
        for folder in (self._folder, path.parent):
            folder.mkdir(mode=0o700, exist_ok=True)
        new = path.with_name(f"{path.name}.new")
        try:
            new.unlink(missing_ok=True)  # of a process that was killed
            new.touch(mode=OWNER_ONLY, exist_ok=False)
            with new.open("wb") as file:
                file.write(archive)
                file.flush()
                os.fsync(file.fileno())
            new.replace(path)
        except OSError:
            new.unlink(missing_ok=True)
            raise
        flush_to_disk(path.parent)

    def sizes(self, group_id: str) -> dict[int, int]:
        """Return the bytes of the archives of each rollout of a group."""
        found: dict[int, int] = {}
        for path in self._of_group(group_id):
            rollout, _ = _numbers(path)
            found[rollout] = found.get(rollout, 0) + path.stat().st_size
        return found

    def delete(
        self, group_id: str, rollout: int | None = None, kept_turn: int | None = None
    ) -> int:
        """Delete the archives of a group or of one of its rollouts; return their bytes.

        Args:
            group_id: the group.
            rollout: number of the rollout; None for all.
            kept_turn: turn whose archive is kept.
        """
        num_bytes = 0
        for path in self._of_group(group_id):
            of_rollout, turn = _numbers(path)
            if rollout in (None, of_rollout) and turn != kept_turn:
                with contextlib.suppress(OSError):  # then the next start removes it
                    size = path.stat().st_size
                    path.unlink()
                    num_bytes += size
        if rollout is None:
            shutil.rmtree(self._folder / group_id, ignore_errors=True)
            with contextlib.suppress(OSError):  # other groups have files, or there was none
                self._folder.rmdir()
        return num_bytes

    def delete_except(self, groups: Collection[str]) -> int:
        """Delete the archives of all other groups; return the bytes of those that are kept."""
        num_bytes = 0
        for folder in list(self._folder.iterdir()) if self._folder.is_dir() else []:
            if GROUP_NAME.fullmatch(folder.name) is None:
                continue  # not ours
            if folder.name not in groups:
                self.delete(folder.name)
                continue
            for unfinished in folder.glob("*.new"):
                unfinished.unlink(missing_ok=True)
            num_bytes += sum(self.sizes(folder.name).values())
        return num_bytes

    def _of_group(self, group_id: str) -> list[Path]:
        folder = self._folder / group_id
        names = os.listdir(folder) if folder.is_dir() else []  # noqa: PTH208 - names only
        return [folder / name for name in names if ARCHIVE_NAME.fullmatch(name)]


def _numbers(path: Path) -> tuple[int, int]:
    """Return rollout and turn of an archive."""
    rollout, turn = path.name.removesuffix(ARCHIVE_SUFFIX).split("-")
    return int(rollout), int(turn)


class RolloutArchive:
    """The archive of the workspace of one rollout.

    Args:
        archives: those of the journal.
        group_id: group of the rollout.
        rollout: its number in the group.

    Attributes:
        turn: turn after which the files were saved; None if they are those of the base.
    """

    def __init__(self, archives: WorkspaceArchives, group_id: str, rollout: int) -> None:
        self.turn: int | None = None
        self._archives = archives
        self._group_id = group_id
        self._rollout = rollout
        self._saved: object = None
        self._revision = 0
        self._digest = b""

    async def load(self, workspace: object, turn: int) -> None:
        """Apply the archive of a turn to a new workspace.

        Raises:
            TypeError: the conversation has no workspace.
            OSError: the archive is missing.
            WorkspaceError: it is damaged, or the workspace has another base.
        """
        if not isinstance(workspace, Workspace):
            raise TypeError(
                f"its workspace is {workspace!r:.80}; expected one, for its saved files"
            )
        archive = await self._archives.thread.run(self._path(turn).read_bytes)
        await workspace.load(archive)
        self.turn, self._digest = turn, _digest(archive)
        self._saved, self._revision = workspace, workspace.revision

    async def pack(self, workspace: object) -> bytes | None:
        """Return an archive of a workspace; None if its files are those of the last one.

        Raises:
            WorkspaceError: it is too large, or of a kind that cannot be saved.
        """
        if not isinstance(workspace, Workspace):
            return None  # an attribute of the same name
        revision = workspace.revision
        if revision == (self._revision if workspace is self._saved else 0):
            return None
        archive = await workspace.save()
        self._saved, self._revision = workspace, revision
        return None if _digest(archive) == self._digest else archive

    async def write(self, archive: bytes, turn: int) -> None:
        """Write the archive of a turn; the one before it is kept.

        Raises:
            OSError: it cannot be written.
        """
        await self._archives.thread.run(self._archives.write, self._path(turn), archive)
        self.turn, self._digest = turn, _digest(archive)

    def _path(self, turn: int) -> Path:
        return self._archives.path(self._group_id, self._rollout, turn)


def _digest(archive: bytes) -> bytes:
    return hashlib.blake2b(archive, digest_size=16).digest()
