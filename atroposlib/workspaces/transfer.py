"""Files and output on their way into and out of workspaces."""

from __future__ import annotations

import contextlib
import difflib
import errno
import functools
import io
import logging
import posixpath
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from atroposlib.workspaces.box_tools import READING_ERRORS
from atroposlib.workspaces.interface import Output, WorkspaceContentError

__all__ = [
    "MAX_FILES",
    "MEMBER_BYTES",
    "OutputRecord",
    "UntrustedTar",
    "extract",
    "regular_files",
    "tar_of",
    "unified_diff",
]

logger = logging.getLogger(__name__)

MERGE_S = 0.05
"""Pieces of output of one stream within this time become one."""
MAX_PIECES = 20_000
MAX_FILES = 100_000
MEMBER_BYTES = 16_384
"""Bound of the headers of one file in an archive."""
MAX_DIFF_LINES = 2000
NAME_ERRORS = (errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EILSEQ)
"""Errors of writing a file for which its path is the cause, and not this machine."""


class OutputRecord:
    """The output of a command as it arrives; pieces in quick succession become one.

    After `MAX_PIECES`, output is added to the last piece of its stream, since a program that writes
    single bytes to both streams in turn would make a piece of each.
    """

    def __init__(self, on_output: Callable[[Output], None] | None) -> None:
        self._on_output = on_output
        self._pieces: list[tuple[float, Literal["stdout", "stderr"], bytearray]] = []
        self._last: dict[str, bytearray] = {}

    def add(self, fd: int, data: bytes, time_s: float) -> None:
        stream: Literal["stdout", "stderr"] = "stdout" if fd == 1 else "stderr"
        last = self._pieces[-1] if self._pieces else None
        of_stream = self._last.get(stream)
        if last is not None and last[1] == stream and time_s - last[0] < MERGE_S:
            last[2].extend(data)
        elif of_stream is not None and len(self._pieces) >= MAX_PIECES:
            of_stream.extend(data)
        else:
            self._last[stream] = bytearray(data)
            self._pieces.append((time_s, stream, self._last[stream]))
        if self._on_output is not None:
            try:
                self._on_output(Output(time_s, stream, data))
            except Exception:
                logger.exception("the output of a workspace could not be passed on")

    def output(self) -> tuple[Output, ...]:
        return tuple(Output(time_s, stream, bytes(data)) for time_s, stream, data in self._pieces)


class UntrustedTar(tarfile.TarFile):
    """A tar archive that programs of a container wrote; `UntrustedTar.open` reads it."""

    def next(self) -> tarfile.TarInfo | None:
        """Return the next member.

        Raises:
            tarfile.ReadError: the member after it would start before it: such archives never end.
        """
        member = super().next()
        if member is not None and self.offset <= member.offset:
            raise tarfile.ReadError(f"{member.name!r} has a negative size")
        return member

    @functools.cached_property
    def _by_name(self) -> dict[str, tarfile.TarInfo]:
        return {member.name: member for member in self.getmembers()}

    def linked_file(self, member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        """Return the regular file that a hard link stands for; None if the archive lacks it."""
        found = self._by_name.get(member.linkname)
        return found if found is not None and _is_plain(found) else None


def _is_plain(member: tarfile.TarInfo) -> bool:
    """Whether a member has all bytes of its content: a sparse file may be larger than memory."""
    return member.isreg() and not member.issparse()


def regular_files(*archives: bytes, max_bytes: int | None = None, strict: bool = False) -> bytes:
    """Return a tar archive with the regular files and folders of others.

    Hard links become files. Other links, devices, sparse files and setuid bits are left out.

    Args:
        archives: archives whose contents are not trusted.
        max_bytes: bound of the contents; None for no bound.
        strict: whether other kinds of files, and paths outside /, are errors.

    Raises:
        WorkspaceContentError: an archive is malformed or exceeds a bound.
    """
    output = io.BytesIO()
    done: dict[str, tuple[int, int]] = {}
    total = 0
    with tarfile.open(fileobj=output, mode="w", format=tarfile.PAX_FORMAT) as kept:
        for archive in filter(None, archives):
            try:
                with UntrustedTar.open(fileobj=io.BytesIO(archive), mode="r:") as members:
                    for member in members:
                        total += _keep(members, member, kept, done, strict=strict)
                        _check_bounds(total, len(done), max_bytes)
            except READING_ERRORS as error:
                raise WorkspaceContentError(f"an archive is malformed: {error}") from error
    return output.getvalue()


def _check_bounds(total: int, num_files: int, max_bytes: int | None) -> None:
    if max_bytes is not None and total > max_bytes:
        raise WorkspaceContentError(f"the files exceed {max_bytes} bytes")
    if num_files > MAX_FILES:
        raise WorkspaceContentError(f"there are more than {MAX_FILES} files")


def _keep(
    members: UntrustedTar,
    member: tarfile.TarInfo,
    kept: tarfile.TarFile,
    done: dict[str, tuple[int, int]],
    *,
    strict: bool,
) -> int:
    """Copy a regular file or folder to another archive; return the size of its content."""
    name = posixpath.normpath(member.name)
    is_outside = name.startswith(("/", "../")) or name == ".."
    if strict and (is_outside or not (member.isdir() or _is_plain(member))):
        raise WorkspaceContentError(
            f"{member.name!r} in an archive: expected regular files and folders with paths "
            "relative to /"
        )
    if is_outside or name in done or name == ".":
        return 0
    copy = tarfile.TarInfo(name)
    copy.mode, copy.mtime = member.mode & 0o777, int(member.mtime)
    if member.isdir():
        copy.type = tarfile.DIRTYPE
        kept.addfile(copy)
        done[name] = (0, 0)
        return 0
    if member.islnk():
        linked = members.linked_file(member)
        if linked is None:
            return 0
        member = linked
    if not _is_plain(member):
        return 0
    copy.size = member.size
    kept.addfile(copy, members.extractfile(member))
    done[name] = (0, member.size)
    return member.size


def extract(archive: bytes, inside: str, folder: Path) -> None:
    """Write files of a workspace to a folder of this machine, to which only this process writes.

    Raises:
        WorkspaceContentError: a file has the path of a folder, a folder that of a file, or a path
            is not possible on this machine.
    """
    start = inside.strip("/")
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as members:
        for member in members:
            if not (member.isdir() or member.isreg()) or ".." in member.name.split("/"):
                raise WorkspaceContentError(f"{member.name!r} is neither a file nor a folder")
            if member.name == start:
                continue
            place = folder / member.name.removeprefix(start + "/")
            try:
                if member.isdir():
                    place.mkdir(parents=True, exist_ok=True)
                elif (content := members.extractfile(member)) is not None:
                    place.parent.mkdir(parents=True, exist_ok=True)
                    place.write_bytes(content.read())
            except OSError as error:
                if error.errno not in NAME_ERRORS:
                    raise
                raise WorkspaceContentError(
                    f"{member.name!r} of a workspace cannot be copied to this machine: {error}"
                ) from error


@contextlib.contextmanager
def tar_of(sources: Mapping[str, Path | None]) -> Iterator[int]:
    """Provide a tar archive of files and folders of this machine, links included.

    Args:
        sources: the files and folders by absolute path in the archive; None for an empty folder
            that everyone may write to.

    Returns:
        Descriptor of a temporary file.
    """
    with tempfile.TemporaryFile() as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as archive:
            for inside, source in sources.items():
                if source is None:
                    folder = tarfile.TarInfo(inside.strip("/"))
                    folder.type, folder.mode = tarfile.DIRTYPE, 0o777
                    archive.addfile(folder)
                else:
                    archive.add(source, inside.strip("/") or ".", filter=_of_root)
        file.seek(0)
        yield file.fileno()


def _of_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def unified_diff(path: str, old: bytes | None, new: bytes) -> str | None:
    """Return a unified diff; None if a content is not text or has too many lines."""
    try:
        texts = [list(io.StringIO((text or b"").decode(), newline="\n")) for text in (old, new)]
    except UnicodeDecodeError:
        return None
    if max(map(len, texts)) > MAX_DIFF_LINES or b"\0" in (old or b"") + new:
        return None
    lines = difflib.unified_diff(texts[0], texts[1], "/dev/null" if old is None else path, path)
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )
