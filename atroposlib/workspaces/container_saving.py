"""Archives of saved containers, in the format of `save` of `box_tools`, packed on this machine.

    save   paths that differ, states, tar archives of the container ─► packed_changes ─► archive
    load   archive ─► unpacked ─► paths to remove, tar archive for the container

The container's programs are untrusted, and so are its archives: only files, links and the listed
paths are taken from them.
"""

from __future__ import annotations

import gzip
import io
import posixpath
import stat
import tarfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from atroposlib.workspaces.box_tools import (
    READING_ERRORS,
    SAVED_MODE,
    ContentError,
    check_bounds,
    check_saved,
)
from atroposlib.workspaces.interface import WorkspaceContentError
from atroposlib.workspaces.transfer import MAX_FILES, MEMBER_BYTES, UntrustedTar

__all__ = ["Unpacked", "packed_changes", "unpacked"]


def packed_changes(
    base: str,
    removed: Collection[str],
    modes: Mapping[str, int],
    raw: Sequence[bytes],
    *,
    max_bytes: int,
) -> bytes:
    """Return the archive of a container.

    Args:
        base: name of its image.
        removed: absolute paths that are missing.
        modes: modes of the paths that are new or not as in the image.
        raw: tar archives of the files and links among them.
        max_bytes: bound of their contents.

    Raises:
        WorkspaceContentError: they exceed a limit, or an archive is malformed.
    """
    request = {"max_bytes": max_bytes}
    found = dict.fromkeys(posixpath.normpath(path) for path in removed)
    members: dict[str, tuple[tarfile.TarInfo, bytes]] = {}
    try:
        check_bounds(0, len(found) + len(modes), request)
        for path in found:
            members[f"removed{path}"] = tarfile.TarInfo(f"removed{path}"), b""
        for path, mode in modes.items():
            if stat.S_ISDIR(mode):
                members[f"files{path}"] = _folder(f"files{path}", mode)
        left = max_bytes
        for member, content in _files(raw):
            path = "/" + posixpath.normpath(member.name).lstrip("/")
            if path in modes and not stat.S_ISDIR(modes[path]):
                left -= len(content)
                check_bounds(left, 0, request)
                members[f"files{path}"] = _file(f"files{path}", member, content)
    except ContentError as error:
        raise WorkspaceContentError(str(error)) from error
    except READING_ERRORS as error:
        raise WorkspaceContentError(f"an archive is malformed: {error}") from error
    return _packed(base, members)


def _packed(base: str, members: Mapping[str, tuple[tarfile.TarInfo, bytes]]) -> bytes:
    output = io.BytesIO()
    with (
        gzip.GzipFile("", "wb", 1, output, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as archive,
    ):
        key = tarfile.TarInfo("base")
        key.size = len(base.encode())
        archive.addfile(key, io.BytesIO(base.encode()))
        for name in sorted(members, key=lambda name: name.partition("/")[2].split("/")):
            member, content = members[name]
            archive.addfile(member, io.BytesIO(content))
    return output.getvalue()


def _folder(name: str, mode: int) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.type, member.mode = tarfile.DIRTYPE, mode & SAVED_MODE
    return member, b""


def _file(name: str, found: tarfile.TarInfo, content: bytes) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.mode = found.mode & SAVED_MODE
    member.pax_headers = {"mtime": f"{max(int(found.mtime), 0)}.000000000"}
    if found.issym():
        member.type, member.linkname = tarfile.SYMTYPE, found.linkname
    member.size = len(content)
    return member, content


def _files(raw: Sequence[bytes]) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    """Yield the regular files and symbolic links of archives; hard links become files."""
    for archive in filter(None, raw):
        with UntrustedTar.open(fileobj=io.BytesIO(archive), mode="r:") as members:
            for member in members:
                source = members.linked_file(member) if member.islnk() else member
                if member.issym():
                    yield member, b""
                elif source is not None and source.isreg() and not source.issparse():
                    content = members.extractfile(source)
                    yield member, b"" if content is None else content.read()


class Unpacked(NamedTuple):
    """The content of an archive, for a container."""

    removed: list[str]
    files: list[str]
    """Absolute paths of files and links."""
    folders: list[str]
    archive: bytes
    """Tar archive of files, links and folders, relative to /."""


def unpacked(archive: bytes, base: str, *, max_bytes: int) -> Unpacked:
    """Return the content of an archive, after a check of all of it.

    Raises:
        WorkspaceContentError: it is of another base, is damaged or cannot be from `save`.
    """
    bound = max_bytes + MAX_FILES * MEMBER_BYTES
    try:
        content = gzip.GzipFile(fileobj=io.BytesIO(archive)).read(bound + 1)
        check_bounds(bound - len(content), 0, {"max_bytes": max_bytes})
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as members:
            check_saved(members, {"max_bytes": max_bytes, "base": base})
        return _sorted_out(content)
    except ContentError as error:
        raise WorkspaceContentError(f"a saved workspace is refused: {error}") from error
    except READING_ERRORS as error:
        raise WorkspaceContentError(f"a saved workspace is damaged: {error}") from error


def _sorted_out(content: bytes) -> Unpacked:
    removed: list[str] = []
    files: dict[str, None] = {}
    folders: list[str] = []
    output = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(content), mode="r:") as members,
        tarfile.open(fileobj=output, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for member in members:
            kind, _, path = member.name.partition("/")
            if not path:
                continue
            above = path.split("/")
            for end in range(1, len(above)):
                if "/" + "/".join(above[:end]) in files:
                    raise ContentError(f"{path!r} in the archive leads through a link or a file")
            if kind == "removed":
                removed.append(f"/{path}")
                continue
            if member.isdir():
                folders.append(f"/{path}")
            else:
                files[f"/{path}"] = None
            copy = tarfile.TarInfo(path)
            copy.type, copy.linkname, copy.size = member.type, member.linkname, member.size
            copy.mode, copy.mtime = member.mode & SAVED_MODE, int(member.mtime)
            archive.addfile(copy, members.extractfile(member) if member.isreg() else None)
    return Unpacked(removed, list(files), folders, output.getvalue())
