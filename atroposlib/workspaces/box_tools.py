"""Programs that read and write the files of a workspace, run in a box as its user.

The box has /usr of the machine read-only, the root folder of the workspace at /merged, and for
`changes` the base at /base and its changes at /upper. Files are untrusted, and so is what is
printed. It is run as a script by the Python of the system and needs only the standard library:

    collect   {"paths": [...], "max_bytes": n} on standard input, a tar archive on standard output
    put       a tar archive on standard input; put-links: which may have symbolic links
    changes   {"max_diff_bytes": n, ...} on standard input, one JSON list per line as output
    save      {"max_bytes": n, "base": key, ...} on standard input, an archive on standard output
    load      {"max_bytes": n, "base": key} in one line, and an archive, on standard input

The archive of `save` is a compressed tar archive; equal workspaces have equal archives:

    base           name of the base
    removed/PATH   an empty file for each file or folder of the base that is missing
    files/PATH     files, folders and links that are new or not as in the base
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import gzip
import io
import itertools
import json
import os
import shutil
import signal
import stat
import sys
import tarfile
import zlib
from collections.abc import Iterator
from types import FrameType
from typing import Any, BinaryIO

BASE, UPPER, MERGED = "/base", "/upper", "/merged"
MAX_LINKS = 40
MAX_FILES = 100_000
MAX_CHANGES = 1000
MAX_DIFF_LINES = 5000
MAX_ALL_DIFFS = 4 * 2**20
DIFF_S = 1.0
PIECE_BYTES = 1 << 20
SAVED_MODE = 0o1777
"""Permissions that are saved: without setuid and setgid."""
REFUSED = 3
"""Exit code for a reason that is printed to standard error."""


READING_ERRORS = (
    *(OSError, tarfile.TarError, RecursionError),
    *(EOFError, zlib.error, ValueError, KeyError, OverflowError),  # of archives
)


class ContentError(Exception):
    """The files cannot be read or written; the message has the reason."""


def resolve(path: str, *, follow_last: bool = False) -> str:
    """Return a path in which links, or all but one as the last name, are followed within it."""
    rest = [name for name in reversed(path.split("/")) if name not in ("", ".")]
    found: list[str] = []
    num_links = 0
    while rest:
        name = rest.pop()
        if name == "..":
            found = found[:-1]
            continue
        place = "/".join([MERGED, *found, name])
        if (rest or follow_last) and os.path.islink(place):  # noqa: PTH114 - bytes that are not UTF-8
            num_links += 1
            if num_links > MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            target = os.readlink(place)  # noqa: PTH115
            if target.startswith("/"):
                found = []
            rest += [word for word in reversed(target.split("/")) if word not in ("", ".")]
        else:
            found.append(name)
    return "/".join([MERGED, *found])


CHANGED_MODES: list[tuple[str, int, int]] = []
"""Files and folders that were made accessible: path, inode, and permissions before."""


def make_accessible(path: str, mode: int) -> None:
    """Change the permissions of a file or folder until `restore_modes`."""
    before = stat.S_IMODE(os.lstat(path).st_mode)
    os.chmod(path, mode)  # noqa: PTH101
    CHANGED_MODES.append((path, os.lstat(path).st_ino, before))


def make_writable(folder: str) -> None:
    """Make a folder writable, until `restore_modes`, for its owner: files of it are replaced."""
    if not os.access(folder, os.W_OK | os.X_OK):
        make_accessible(folder, 0o700)


def restore_modes() -> None:
    """Restore the permissions that `make_accessible` changed, except of what was replaced since."""
    while CHANGED_MODES:
        path, inode, mode = CHANGED_MODES.pop()
        with contextlib.suppress(OSError):  # it was removed
            if os.lstat(path).st_ino == inode:
                os.chmod(path, mode)  # noqa: PTH101


def entries(folder: str) -> list[str]:
    """Return the names in a folder, which is made accessible if needed, in the order of paths."""
    if not os.access(folder, os.R_OK | os.X_OK):
        make_accessible(folder, 0o700)
    return sorted(os.listdir(folder))  # noqa: PTH208


def open_file(path: str) -> BinaryIO:
    """Open a regular file, which is made readable if needed."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.fdopen(os.open(path, flags), "rb")
    except PermissionError:
        make_accessible(path, 0o600)
        return os.fdopen(os.open(path, flags), "rb")


def walk(place: str, shown: str) -> Iterator[tuple[str, str, os.stat_result]]:
    """Yield path, path in the archive and state of a file or folder and of all below it."""
    waiting = [(place, shown)]
    while waiting:
        place, shown = waiting.pop()
        try:
            state = os.lstat(place)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise ContentError(f"a path has more than 4096 bytes: {shown[:80]}...") from error
            continue
        yield place, shown, state
        if stat.S_ISDIR(state.st_mode):
            names = reversed(entries(place))
            waiting += [(f"{place}/{name}", f"{shown}/{name}".lstrip("/")) for name in names]


def collect(request: dict[str, Any], output: BinaryIO) -> None:
    """Write the regular files and folders of some paths as an archive."""
    left, done = request["max_bytes"], set()
    with tarfile.open(fileobj=output, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for path in request["paths"]:
            try:
                place = resolve(path)
            except OSError:
                continue  # as if it did not exist
            for found, name, state in walk(place, os.path.normpath(path).strip("/")):
                is_folder = stat.S_ISDIR(state.st_mode)
                if (
                    name in done
                    or name in ("", ".")
                    or not (is_folder or stat.S_ISREG(state.st_mode))
                ):
                    continue
                done.add(name)
                left -= 0 if is_folder else state.st_size
                if left < 0:
                    raise ContentError(f"the files exceed {request['max_bytes']} bytes")
                if len(done) > MAX_FILES:
                    raise ContentError(f"there are more than {MAX_FILES} files")
                add(archive, found, name, state)


def add(archive: tarfile.TarFile, path: str, name: str, state: os.stat_result) -> None:
    """Add one file or folder to an archive, without owner and special permissions."""
    member = tarfile.TarInfo(name)
    member.mode = state.st_mode & 0o777
    member.mtime = int(state.st_mtime)
    if stat.S_ISDIR(state.st_mode):
        member.type = tarfile.DIRTYPE
        archive.addfile(member)
        return
    member.size = state.st_size
    with open_file(path) as content:
        archive.addfile(member, content)


def put(archive_file: BinaryIO, *, has_links: bool) -> None:
    """Extract an archive, after a check of all of its members."""
    with tarfile.open(fileobj=archive_file, mode="r:") as archive:
        members = list(itertools.islice(archive, MAX_FILES + 1))
        if len(members) > MAX_FILES:
            raise ContentError(f"the archive has more than {MAX_FILES} files")
        for member in members:
            check(member, has_links=has_links)
        folders = [member for member in members if member.isdir()]
        places: dict[str, str] = {}
        for member in members:
            extract(archive, member, places)
        restore_modes()
        for member in reversed(folders):  # last, since a folder may be read-only
            place = places["/".join(names_of(member))]
            os.chmod(place, member.mode & 0o777)  # noqa: PTH101
            os.utime(place, (member.mtime, member.mtime))


def check(member: tarfile.TarInfo, *, has_links: bool) -> None:
    """Raise an error if a member is not a file or folder within the workspace."""
    name = member.name
    if name.startswith("/") or ".." in name.split("/") or "\0" in name or not name:
        raise ContentError(f"the archive has the path {name!r}: expected a path relative to /")
    if member.issym() and has_links:
        return
    if not (member.isdir() or (member.isreg() and not member.issparse())):
        raise ContentError(f"{name!r} in the archive is neither a regular file nor a folder")


def names_of(member: tarfile.TarInfo) -> list[str]:
    """Return the names in the path of a member."""
    return [name for name in member.name.split("/") if name not in ("", ".")]


def make_folder(names: list[str], places: dict[str, str]) -> str:
    """Return the real path of a folder, which is created with those above it.

    Args:
        names: the names in its path.
        places: the real paths of the folders that are known, by path.
    """
    shown, place = "", MERGED
    for name in names:
        shown = f"{shown}/{name}" if shown else name
        if shown not in places:
            inner = f"{place}/{name}"
            if os.path.islink(inner):  # noqa: PTH114
                inner = resolve(inner[len(MERGED) :], follow_last=True)
            if not os.path.isdir(inner):  # noqa: PTH112
                make_writable(place)
                os.mkdir(inner)  # noqa: PTH102
            places[shown] = inner
        place = places[shown]
    return place


def extract(archive: tarfile.TarFile, member: tarfile.TarInfo, places: dict[str, str]) -> None:
    """Write one member; a file or link in its place is replaced."""
    names = names_of(member)
    if member.isdir() or not names:
        places["/".join(names)] = make_folder(names, places)
        return
    folder = make_folder(names[:-1], places)
    make_writable(folder)
    place = f"{folder}/{names[-1]}"
    if os.path.lexists(place):
        os.unlink(place)  # noqa: PTH108 - a link is replaced, not followed
    if member.issym():
        os.symlink(member.linkname, place)  # noqa: PTH211
        return
    write_file(archive, member, place)
    os.chmod(place, member.mode & 0o777)  # noqa: PTH101
    os.utime(place, (member.mtime, member.mtime))


def write_file(archive: tarfile.TarFile, member: tarfile.TarInfo, place: str) -> None:
    """Write the content of a member to a new file."""
    content = archive.extractfile(member)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with os.fdopen(os.open(place, flags, 0o600), "wb") as file:
        while piece := content.read(PIECE_BYTES) if content is not None else b"":
            file.write(piece)


class Changes:
    """The differences between base and workspace, by path.

    Folders of the base to which nothing was written are not visited.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        self._max_diff_bytes = request["max_diff_bytes"]
        self._hidden = set(request["hidden"])
        self._diffs_left = max(MAX_ALL_DIFFS, self._max_diff_bytes)

    def within(self, folder: str) -> Iterator[list[Any]]:
        """Yield `path, kind, size, diff` of all changes below a folder that both have."""
        with contextlib.suppress(
            ContentError
        ):  # the rest of the folder has paths that are too long
            yield from self._within(folder)

    def _within(self, folder: str) -> Iterator[list[Any]]:
        old, new = set(entries(BASE + folder)), set(entries(MERGED + folder))
        for name in sorted(old | new):
            path = f"{folder}/{name}"
            if name not in new:
                yield from self._all(BASE, path, "removed")
            elif name not in old:
                yield from self._all(MERGED, path, "added")
            elif os.path.lexists(UPPER + path):
                yield from self._both(path)

    def _both(self, path: str) -> Iterator[list[Any]]:
        old, new = os.lstat(BASE + path), os.lstat(MERGED + path)
        if stat.S_ISDIR(old.st_mode) and stat.S_ISDIR(new.st_mode):
            yield from self.within(path)
        elif stat.S_ISDIR(old.st_mode) or stat.S_ISDIR(new.st_mode):
            yield from self._all(BASE, path, "removed")
            yield from self._all(MERGED, path, "added")
        elif _differ(path, old, new):
            yield [path, "modified", new.st_size, self._diff(path, old, new)]

    def _all(self, root: str, path: str, kind: str) -> Iterator[list[Any]]:
        """Yield a file, or the files of a folder and folders that are empty.

        A folder that was removed is yielded before its files.
        """
        for place, _, state in walk(root + path, ""):
            found = place[len(root) :]
            if stat.S_ISDIR(state.st_mode):
                is_gone = kind == "removed" and found == path
                if (is_gone or not entries(place)) and found not in self._hidden:
                    yield [found + "/", kind, 0, None]
            elif found not in self._hidden or state.st_size:
                pair = (state, None) if kind == "removed" else (None, state)
                size = 0 if kind == "removed" else state.st_size
                yield [found, kind, size, self._diff(found, *pair)]

    def _diff(
        self, path: str, old: os.stat_result | None, new: os.stat_result | None
    ) -> str | None:
        if any(state and state.st_size > self._max_diff_bytes for state in (old, new)):
            return None
        try:
            before, after = _lines(BASE + path, old), _lines(MERGED + path, new)
        except (UnicodeDecodeError, OSError):
            return None
        if max(len(before), len(after)) > MAX_DIFF_LINES:
            return None
        first, second = ("/dev/null" if state is None else path for state in (old, new))
        lines = list(_modes(old, new))
        signal.setitimer(signal.ITIMER_REAL, DIFF_S)
        try:
            for line in difflib.unified_diff(before, after, first, second):
                lines += (
                    [line] if line.endswith("\n") else [line, "\n\\ No newline at end of file\n"]
                )
        except TimeoutError:
            return None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        diff = "".join(lines)
        self._diffs_left -= len(diff)
        return diff if self._diffs_left >= 0 else None


def _lines(path: str, state: os.stat_result | None) -> list[str]:
    if state is None:
        return []
    if stat.S_ISLNK(state.st_mode):
        return [os.fsencode(os.readlink(path)).decode() + "\n"]  # noqa: PTH115
    if not stat.S_ISREG(state.st_mode):
        return []
    with open_file(path) as file:
        text = file.read().decode()
    if "\0" in text:
        raise OSError(errno.EINVAL, "not a text")
    return list(io.StringIO(text, newline="\n"))


def _modes(old: os.stat_result | None, new: os.stat_result | None) -> Iterator[str]:
    if old and new and (old.st_mode ^ new.st_mode) & 0o111:
        yield f"old mode {old.st_mode & 0o777:o}\nnew mode {new.st_mode & 0o777:o}\n"


def _differ(path: str, old: os.stat_result, new: os.stat_result) -> bool:
    if stat.S_IFMT(old.st_mode) != stat.S_IFMT(new.st_mode) or old.st_size != new.st_size:
        return True
    if stat.S_ISLNK(new.st_mode):
        return os.readlink(BASE + path) != os.readlink(MERGED + path)  # noqa: PTH115
    if not stat.S_ISREG(new.st_mode):
        return False
    if (old.st_mode ^ new.st_mode) & 0o111:
        return True
    with open_file(BASE + path) as first, open_file(MERGED + path) as second:
        while piece := first.read(PIECE_BYTES):
            if piece != second.read(PIECE_BYTES):
                return True
    return False


def differences(folder: str) -> Iterator[tuple[str, os.stat_result | None]]:
    """Yield path and state of what differs from the base below a folder that both have.

    The state of what is missing is None. A folder comes before what is in it.
    """
    old, new = set(entries(BASE + folder)), set(entries(MERGED + folder))
    for name in sorted(old | new):
        path = f"{folder}/{name}"
        if name not in new:
            yield path, None
        elif name not in old:
            yield from everything(path)
        elif os.path.lexists(UPPER + path):
            before, after = os.lstat(BASE + path), os.lstat(MERGED + path)
            if stat.S_IFMT(before.st_mode) != stat.S_IFMT(after.st_mode):
                yield path, None
                yield from everything(path)
            elif stat.S_ISDIR(after.st_mode):
                if stat.S_IMODE(before.st_mode) != stat.S_IMODE(after.st_mode):
                    yield path, after
                yield from differences(path)
            elif (
                before.st_mtime_ns != after.st_mtime_ns
                or stat.S_IMODE(before.st_mode) != stat.S_IMODE(after.st_mode)
                or _differ(path, before, after)
            ):
                yield path, after


def everything(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield path and state of a file or folder and of all below it, without special files."""
    for place, _, state in walk(MERGED + path, ""):
        if stat.S_IFMT(state.st_mode) in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
            yield place[len(MERGED) :], state


def save(request: dict[str, Any], output: BinaryIO) -> None:
    """Write what differs from the base as an archive."""
    hidden, left, num_files = set(request["hidden"]), request["max_bytes"], 0
    with (
        gzip.GzipFile("", "wb", 1, output, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as archive,
    ):
        key = request["base"].encode()
        member = tarfile.TarInfo("base")
        member.size = len(key)
        archive.addfile(member, io.BytesIO(key))
        for path, state in differences(""):
            if state is None:
                archive.addfile(tarfile.TarInfo(f"removed{path}"))
            elif path in hidden and is_empty(MERGED + path, state):
                continue
            else:
                left -= state.st_size if stat.S_ISREG(state.st_mode) else 0
                check_bounds(left, num_files + 1, request)
                add_saved(archive, path, state)
            num_files += 1
            check_bounds(left, num_files, request)


def is_empty(place: str, state: os.stat_result) -> bool:
    """Whether a file or folder has no content, as the place of a mount."""
    return not (entries(place) if stat.S_ISDIR(state.st_mode) else state.st_size)


def check_bounds(left: int, num_files: int, request: dict[str, Any]) -> None:
    """Raise an error if the changed files exceed a limit."""
    if left < 0:
        raise ContentError(f"the changed files exceed max_bytes, {request['max_bytes']} bytes")
    if num_files > MAX_FILES:
        raise ContentError(f"more than {MAX_FILES} files were changed")


def add_saved(archive: tarfile.TarFile, path: str, state: os.stat_result) -> None:
    """Add a file, folder or link to the archive of `save`."""
    member = tarfile.TarInfo(f"files{path}")
    member.mode = state.st_mode & SAVED_MODE
    if stat.S_ISDIR(state.st_mode):
        member.type = tarfile.DIRTYPE
        archive.addfile(member)
        return
    seconds, fraction = divmod(state.st_mtime_ns, 10**9)
    member.pax_headers = {"mtime": f"{seconds}.{fraction:09d}"}
    if stat.S_ISLNK(state.st_mode):
        member.type = tarfile.SYMTYPE
        member.linkname = os.readlink(MERGED + path)  # noqa: PTH115
        archive.addfile(member)
        return
    member.size = state.st_size
    with open_file(MERGED + path) as content:
        archive.addfile(member, content)


@contextlib.contextmanager
def opened(packed: bytes) -> Iterator[tarfile.TarFile]:
    """Open the archive of `save`; its end is checked."""
    with gzip.GzipFile(fileobj=io.BytesIO(packed)) as content:
        with tarfile.open(fileobj=content, mode="r|") as archive:
            yield archive
        # The end, two blocks of zeros, may be in two records, of which tarfile reads the first.
        rest = content.read(tarfile.RECORDSIZE + 1)
        if len(rest) > tarfile.RECORDSIZE or rest.strip(b"\0"):
            raise ContentError("the archive is followed by other data")


def load(request: dict[str, Any], packed: bytes) -> None:
    """Make the files of a workspace those of an archive of `save`, after a check of all of it."""
    with opened(packed) as archive:
        names = check_saved(archive, request)
    reset(names)
    folders = []
    known: set[str] = set()
    with opened(packed) as archive:
        for member in archive:
            kind, _, path = member.name.partition("/")
            if not path:
                continue
            place = place_of(path, known)
            if not member.isdir() or not is_folder(place):
                if is_folder(place):
                    known.clear()  # it, or a folder in it, may become a link
                remove(place)
            if kind == "removed":
                continue
            if member.isdir():
                folders.append((place, member.mode & SAVED_MODE))
                with contextlib.suppress(FileExistsError):
                    os.mkdir(place, 0o700)  # noqa: PTH102
            else:
                load_file(archive, member, place)
    # Last, since a folder may be read-only; the deepest first, while those above are accessible.
    CHANGED_MODES[:0] = [(place, os.lstat(place).st_ino, mode) for place, mode in folders]
    CHANGED_MODES.sort(key=lambda changed: changed[0].count("/"))
    restore_modes()


def reset(names: set[str]) -> None:
    """Make what differs from the base and is not in an archive as in the base."""
    found = [path for path, _ in differences("")]
    restore_modes()  # before they are changed below
    for path in found:
        place, original = MERGED + path, BASE + path
        if f"removed{path}" in names or not (exists(path) or os.path.lexists(original)):
            continue
        is_saved = f"files{path}" in names
        if is_folder(original):  # with what is in it, of which the archive has the changes only
            if not is_folder(place):
                remove(place_of(path))
                shutil.copytree(original, place, symlinks=True)
            elif not is_saved:
                os.chmod(place_of(path), stat.S_IMODE(os.lstat(original).st_mode))  # noqa: PTH101
        elif not is_saved:
            remove(place_of(path))
            if os.path.lexists(original):
                shutil.copy2(original, place, follow_symlinks=False)


def load_file(archive: tarfile.TarFile, member: tarfile.TarInfo, place: str) -> None:
    """Write a file or link with its permissions and its time."""
    if member.issym():
        os.symlink(member.linkname, place)  # noqa: PTH211
    else:
        write_file(archive, member, place)
        os.chmod(place, member.mode & SAVED_MODE)  # noqa: PTH101
    seconds, _, fraction = member.pax_headers["mtime"].partition(".")
    time_ns = int(seconds) * 10**9 + int(fraction[:9].ljust(9, "0"))
    os.utime(place, ns=(time_ns, time_ns), follow_symlinks=False)


def check_saved(archive: tarfile.TarFile, request: dict[str, Any]) -> set[str]:
    """Return the names in an archive of `save`.

    Raises:
        ContentError: it is of another base or cannot be from `save`.
    """
    left, seen = request["max_bytes"], {"base"}
    first = archive.next()
    key = archive.extractfile(first) if first is not None and first.name == "base" else None
    if key is None or key.read(PIECE_BYTES) != request["base"].encode():
        raise ContentError("the archive is of another base, or is not from `save`")
    while (member := archive.next()) is not None:
        kind, *names = member.name.split("/")
        is_known = member.isdir() or member.issym() or (member.isreg() and not member.issparse())
        is_inside = kind in ("files", "removed") and names and not {"", ".", ".."} & {*names}
        if not (is_known and is_inside and "\0" not in member.name):
            raise ContentError(f"{member.name!r} in the archive is not a file of the workspace")
        if member.name in seen:
            raise ContentError(f"{member.name!r} is in the archive twice")
        seen.add(member.name)
        left -= member.size
        check_bounds(left, len(seen) - 1, request)
    return seen


def place_of(path: str, known: set[str] | None = None) -> str:
    """Return the place of a path, whose folders are made accessible and must not be links.

    Args:
        path: a path in the workspace.
        known: places of folders that were checked, to which those of the path are added: to check
            all of them for each of many nested folders takes minutes.
    """
    known = set() if known is None else known
    place = f"{MERGED}/{path.strip('/')}"
    unknown, above = [], os.path.dirname(place)  # noqa: PTH120
    while above not in known:
        unknown.append(above)
        if above == MERGED:
            break
        above = os.path.dirname(above)  # noqa: PTH120
    for folder in reversed(unknown):
        state = os.lstat(folder)
        if not stat.S_ISDIR(state.st_mode):
            raise ContentError(f"{path!r} in the archive leads through a link or a file")
        if state.st_mode & 0o700 != 0o700:
            make_accessible(folder, 0o700)
        known.add(folder)
    return place


def exists(path: str) -> bool:
    """Whether a path exists, also below folders that are not accessible, which are made so."""
    try:
        return os.path.lexists(place_of(path))
    except (FileNotFoundError, ContentError):  # a folder above it is missing
        return False


def is_folder(place: str) -> bool:
    """Whether there is a folder, and not a link to one."""
    return os.path.lexists(place) and stat.S_ISDIR(os.lstat(place).st_mode)


def remove(place: str) -> None:
    """Remove a file or folder, if there is one."""
    if not is_folder(place):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(place)  # noqa: PTH108
        return
    for folder, _, state in walk(place, ""):
        if stat.S_ISDIR(state.st_mode) and state.st_mode & 0o700 != 0o700:
            os.chmod(folder, 0o700)  # noqa: PTH101
    shutil.rmtree(place)


def stop_diff(_signal: int, _frame: FrameType | None) -> None:
    """Interrupt a comparison that takes too long."""
    raise TimeoutError


def main(action: str) -> int:
    """Return 0, or `REFUSED` with the reason as standard error."""
    signal.signal(signal.SIGALRM, stop_diff)
    try:
        if action.startswith("put"):
            put(sys.stdin.buffer, has_links=action == "put-links")
        elif action == "collect":
            collect(json.load(sys.stdin), sys.stdout.buffer)
        elif action == "save":
            save(json.load(sys.stdin), sys.stdout.buffer)
        elif action == "load":
            load(json.loads(sys.stdin.buffer.readline()), sys.stdin.buffer.read())
        else:
            found = Changes(json.load(sys.stdin)).within("")
            for change in itertools.islice(found, MAX_CHANGES):
                print(json.dumps(change))  # noqa: T201 - read by the workspace
    except (ContentError, *READING_ERRORS) as error:
        with contextlib.suppress(OSError):
            os.write(2, ascii(str(error) or type(error).__name__)[1:-1][-300:].encode())
        return REFUSED
    finally:
        restore_modes()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
