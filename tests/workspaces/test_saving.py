"""Saved workspaces: what differs from the base, applied to another fork; hostile archives."""

from __future__ import annotations

import asyncio
import gzip
import io
import os
import tarfile
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from atroposlib.sandbox import SandboxLimits
from atroposlib.workspaces import (
    Base,
    LazyWorkspace,
    Workspace,
    WorkspaceContentError,
    WorkspaceError,
    WorkspaceSpec,
    box_tools,
    local,
)
from atroposlib.workspaces.box_tools import opened
from atroposlib.workspaces.container_saving import packed_changes, unpacked
from atroposlib.workspaces.local import LocalWorkspaces

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

LIMITS = SandboxLimits(
    wall_s=60.0, cpu_s=30, memory_bytes=2**29, max_processes=64, disk_bytes=2**24
)
FILES = (
    "text.txt",
    "binary",
    "kept",
    "touched",
    "sub/run.sh",
    "gone/one",
    "gone/two",
    "now_a_file/x",
)
CHANGES = r"""
echo added > new.txt; chmod 755 new.txt; ln -s /etc/passwd link; ln -s nowhere dangling
mkdir -p empty deep/er; echo deep > deep/er/file; chmod 1777 empty
echo more >> text.txt; chmod 600 binary; touch -d '2001-02-03 04:05:06.123456789' touched
rm sub/run.sh; rm -r gone; mkdir gone; echo 3 > gone/three; chmod 555 gone
rm -r now_a_file; echo file > now_a_file; rm /etc/hostname; ln -s text.txt /tmp/elsewhere
mkdir locked; echo hidden > locked/file; chmod 000 locked/file; chmod 100 locked
printf x > "$(printf 'not-utf8-\377')"; ln new.txt hard; mkfifo pipe
"""
# Messages about folders that cannot be read would be anywhere among the output.
LISTING = r"""
exec 2>/dev/null
find / -xdev \( -path /usr -o -path /proc -o -path /dev -o -path /sys \) -prune -o \
    ! -type p \( -type d -printf '%p %m\n' -o -printf '%p %y %m %s %l %T@\n' \) | sort
find / -xdev \( -path /usr -o -path /proc -o -path /dev -o -path /sys \) -prune -o \
    -type f -readable -print0 | sort -z | xargs -0 md5sum
"""

MODES = "stat -c '%n %f' * sub/* 2>/dev/null; true"


def new_workspaces(folder: Path, **options: Any) -> LocalWorkspaces:
    try:
        return LocalWorkspaces(cache=folder / "cache", **options)
    except WorkspaceError as error:
        pytest.skip(str(error))


async def prepare(workspaces: LocalWorkspaces, folder: Path) -> Base:
    source = folder / "source"
    for name in FILES:
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name}\n")
    return await workspaces.prepare(WorkspaceSpec("saved", source=source, limits=LIMITS))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["overlay", "copy"])
async def base_of_kind(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Base]:
    folder = tmp_path_factory.mktemp("saving")
    workspaces = new_workspaces(folder, kind=request.param)
    try:
        base = await prepare(workspaces, folder)
        await (await base.fork()).close()
    except WorkspaceError as error:
        pytest.skip(str(error))
    yield base
    await workspaces.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def base(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Base]:
    folder = tmp_path_factory.mktemp("saving")
    workspaces = new_workspaces(folder)
    yield await prepare(workspaces, folder)
    await workspaces.close()


async def run(workspace: Workspace, command: str) -> str:
    result = await workspace.run(["sh", "-c", command])
    assert result.is_success, result
    return result.text


async def test_saved_files_are_those_of_the_workspace(base_of_kind: Base) -> None:
    first, second = await base_of_kind.fork(), await base_of_kind.fork()
    unchanged = await run(first, LISTING)
    await run(first, CHANGES)
    wanted = await run(first, LISTING)
    archive = await first.save()
    listing_after_save = await run(first, LISTING)

    await second.load(archive)

    found = await run(second, LISTING)
    assert wanted != unchanged
    assert listing_after_save == wanted
    assert found == wanted
    assert await second.save() == archive


async def test_earlier_changes_do_not_remain(base_of_kind: Base) -> None:
    first, second = await base_of_kind.fork(), await base_of_kind.fork()
    await run(first, "echo one > text.txt; rm binary")
    wanted = await run(first, LISTING)
    await run(second, "rm -r sub kept text.txt; mkdir text.txt; ln -s kept binary; mkdir -p a/b")

    await second.load(await first.save())

    assert await run(second, LISTING.replace("%T@", "")) == await run(
        first, LISTING.replace("%T@", "")
    )
    assert "text.txt" in wanted


@pytest.mark.parametrize(
    ("saved", "earlier"),
    [
        ("chmod 750 sub", "rm -r sub"),
        ("chmod 750 sub", "rm -r sub; touch sub"),
        ("chmod 750 sub; rm sub/*", "rm -r sub; mkdir sub; chmod 0 sub"),
        ("touch sub/new", "chmod 400 sub"),
        ("touch sub/new", "mkdir sub/new; chmod 0 sub/new sub"),
        ("rm -r sub; touch sub", "chmod 0 sub"),
        ("chmod 0 sub", "chmod 700 sub; rm sub/*"),
        (
            "mkdir -p a/b/c; chmod 0 a/b/c a/b a",
            "mkdir -p a/b/c; touch a/b/c/x; chmod 0 a/b/c a/b a",
        ),
        (
            "mkdir -p a/b/c; touch a/b/c/x; chmod 0 a/b/c a/b a",
            "mkdir -p a/b/c; chmod 0 a/b/c a/b a",
        ),
    ],
)
async def test_folders_become_the_saved_ones(base_of_kind: Base, saved: str, earlier: str) -> None:
    first, second = await base_of_kind.fork(), await base_of_kind.fork()
    await run(first, saved)
    await run(second, earlier)
    archive = await first.save()

    await second.load(archive)

    assert await second.save() == archive
    assert await run(second, MODES) == await run(first, MODES)


async def test_each_of_many_nested_folders_is_checked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []
    folder_state = os.lstat(tmp_path)

    def note(path: str) -> os.stat_result:
        checked.append(path)
        return folder_state

    monkeypatch.setattr(os, "lstat", note)
    known: set[str] = set()
    for depth in range(1, 101):
        box_tools.place_of("/".join(["d"] * depth), known)

    assert len(checked) == len(set(checked)) == 100


async def test_unchanged_workspace_gives_an_archive_without_files(base: Base) -> None:
    first, second = await base.fork(), await base.fork()
    await run(first, "cat text.txt; ls -R /app")

    archive = await first.save()

    assert first.revision > second.revision == 0
    assert archive == await second.save()
    assert names_in(archive) == ["base"]


async def test_places_of_mounts_are_not_saved(base: Base) -> None:
    workspace = await base.fork()
    await workspace.run(["ls"], read_only={"/given": Path("/usr/share")})

    assert names_in(await workspace.save()) == ["base"]


@pytest.mark.parametrize(
    ("command", "limit"),
    [
        ("head -c 2000 /dev/zero > large", "max_bytes, 1000 bytes"),
        ("truncate -s 4M sparse", "max_bytes, 1000 bytes"),
        ("touch 1 2 3 4", "more than 3 files"),
        ("rm -r text.txt binary sub kept", "more than 3 files"),
    ],
)
async def test_limit_of_a_saved_workspace_is_named(
    base: Base, command: str, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounded = local.TOOLS.replace("MAX_FILES = 100_000", "MAX_FILES = 3")
    monkeypatch.setattr(local, "TOOLS", bounded)
    workspace = await base.fork()
    await run(workspace, command)

    with pytest.raises(WorkspaceContentError, match=limit):
        await workspace.save(max_bytes=1000)

    await workspace.close()


def names_in(archive: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as members:
        return members.getnames()


def member_of(name: str, kind: bytes = tarfile.REGTYPE, *, link: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.mode = kind, link, 0o6777
    member.pax_headers = {"mtime": "1.5"}
    if kind == tarfile.REGTYPE and not name.startswith("removed"):
        member.size = 4
    return member


async def archive_of(base: Base, members: Sequence[tarfile.TarInfo]) -> bytes:
    """Return an archive of a base as `save` writes it, with these members."""
    workspace = await base.fork()
    saved = await workspace.save()
    await workspace.close()
    with tarfile.open(fileobj=io.BytesIO(saved), mode="r:gz") as archive:
        content = archive.extractfile("base")
        assert content is not None
        return archive_with(content.read(), members)


def archive_with(key: bytes, members: Sequence[tarfile.TarInfo]) -> bytes:
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w:gz", format=tarfile.PAX_FORMAT) as made:
        first = tarfile.TarInfo("base")
        first.size = len(key)
        made.addfile(first, io.BytesIO(key))
        for member in members:
            made.addfile(member, io.BytesIO(b"evil"[: member.size].ljust(member.size, b"x")))
    return output.getvalue()


LINK, FOLDER = tarfile.SYMTYPE, tarfile.DIRTYPE
HOSTILE = {
    "parent": [member_of("files/../outside")],
    "inner parent": [member_of("files/app/../../outside")],
    "absolute": [member_of("/outside")],
    "double slash": [member_of("files//outside")],
    "no folder": [member_of("outside")],
    "root": [member_of("files", FOLDER)],
    "removed parent": [member_of("removed/../base")],
    "through a link": [member_of("files/out", LINK, link="/base"), member_of("files/out/x")],
    "through a link in place of a folder that was written to": [
        member_of("files/app/sub/new"),
        member_of("files/app/sub", LINK, link="/tmp"),
        member_of("files/app/sub/x"),
    ],
    "through a link to itself": [
        member_of("files/out", LINK, link="app"),
        member_of("files/out/x"),
    ],
    "removed through a link": [
        member_of("files/out", LINK, link="/app"),
        member_of("removed/out/text.txt"),
    ],
    "through a file": [member_of("files/app/text.txt/x")],
    "no such folder": [member_of("files/app/missing/x")],
    "folder, then link": [
        member_of("files/app/a", FOLDER),
        member_of("files/app/a", LINK, link="/base"),
    ],
    "hard link": [member_of("files/app/x", tarfile.LNKTYPE, link="files/app/text.txt")],
    "device": [member_of("files/app/x", tarfile.CHRTYPE)],
    "pipe": [member_of("files/app/x", tarfile.FIFOTYPE)],
    "no time": [tarfile.TarInfo("files/app/x")],
}


@pytest.mark.parametrize("members", HOSTILE.values(), ids=HOSTILE)
async def test_archive_is_refused_with(base: Base, members: list[tarfile.TarInfo]) -> None:
    workspace = await base.fork()
    archive = await archive_of(base, members)

    with pytest.raises(WorkspaceContentError, match="cannot be written"):
        await workspace.load(archive)

    outside = "/outside /app/outside /base/x /app/a/x /app/x/x"
    assert (await workspace.run(["sh", "-c", f"ls {outside}; cat /app/text.txt"])).text.endswith(
        "text.txt\n"
    )
    await workspace.close()


async def test_special_permissions_are_left_out(base: Base) -> None:
    workspace = await base.fork()

    await workspace.load(await archive_of(base, [member_of("files/app/x")]))

    assert await run(workspace, "stat -c %a x; cat x") == "777\nevil"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda archive: archive[:-20], "end-of-stream|ended before"),
        (lambda archive: archive[:-6] + bytes(6), "CRC|incorrect length|Incorrect"),
        (lambda archive: archive + gzip.compress(b"more"), "followed by other data"),
        (lambda _: b"", "not from `save`|empty|header"),
        (lambda _: b"not an archive" * 100, "gzip"),
    ],
)
async def test_damaged_archive_is_refused(
    base: Base, change: Callable[[bytes], bytes], reason: str
) -> None:
    first, second = await base.fork(), await base.fork()
    await run(first, "echo 1 > text.txt")
    archive = await first.save()

    with pytest.raises(WorkspaceContentError, match=reason):
        await second.load(change(archive))

    assert await run(second, "cat text.txt") == "text.txt\n"


@pytest.mark.parametrize("num_blocks", range(20))
async def test_archive_may_end_anywhere_in_a_record(num_blocks: int) -> None:
    members = [tarfile.TarInfo(f"files/{number}") for number in range(num_blocks)]

    with opened(archive_with(b"key", members)) as archive:
        names = [member.name for member in archive]

    assert names == ["base", *(member.name for member in members)]


async def test_archive_that_unpacks_to_too_much_is_refused(base: Base) -> None:
    bomb = member_of("files/app/bomb")
    bomb.size = 2**22
    workspace = await base.fork()
    archive = await archive_of(base, [bomb])

    with pytest.raises(WorkspaceContentError, match="max_bytes, 1000000 bytes"):
        await workspace.load(archive, max_bytes=1_000_000)


async def test_archive_larger_than_the_disk_is_an_error(base: Base) -> None:
    large = member_of("files/app/large")
    large.size = LIMITS.disk_bytes + 1
    workspace = await base.fork()
    archive = await archive_of(base, [large])

    with pytest.raises(WorkspaceContentError, match="cannot be written"):
        await workspace.load(archive)


async def test_archive_of_another_base_is_refused(base: Base, tmp_path: Path) -> None:
    workspaces = new_workspaces(tmp_path)
    (tmp_path / "other").mkdir()
    spec = WorkspaceSpec("other", source=tmp_path / "other", limits=LIMITS)
    other = await (await workspaces.prepare(spec)).fork()
    archive = await (await base.fork()).save()

    with pytest.raises(WorkspaceContentError, match="another base"):
        await other.load(archive)

    await workspaces.close()


async def test_lazy_workspace_is_forked_once_when_it_is_used(base: Base) -> None:
    forks = 0

    async def fork() -> Workspace:
        nonlocal forks
        forks += 1
        return await base.fork()

    workspace, unused = LazyWorkspace(fork), LazyWorkspace(fork)
    before = (workspace.revision, workspace.workdir)
    await asyncio.gather(*(run(workspace, "true") for _ in range(3)))
    await run(workspace, "echo 1 > text.txt")
    copy = LazyWorkspace(base.fork)
    await copy.load(await workspace.save())

    assert (forks, before, workspace.workdir) == (1, (0, ""), "/app")
    assert [change.path for change in await copy.changes()] == ["/app/text.txt"]
    await workspace.put(await copy.collect(["/app/text.txt"], max_bytes=100))
    for each in (workspace, unused, copy):
        await each.close()
        await each.close()
    with pytest.raises(WorkspaceError, match="is closed"):
        await unused.run(["true"])


SEEN_IN_THE_CONTAINER = ("through a file", "no such folder", "no time")


@pytest.mark.parametrize("name", [name for name in HOSTILE if name not in SEEN_IN_THE_CONTAINER])
async def test_archive_of_a_container_is_refused_with(name: str) -> None:
    with pytest.raises(WorkspaceContentError, match="is refused"):
        unpacked(archive_with(b"image", HOSTILE[name]), "image", max_bytes=10_000)


async def test_archive_of_a_container_has_no_special_permissions_and_is_bounded() -> None:
    archive = archive_with(b"image", [member_of("files/app/x"), member_of("removed/etc/y")])
    bomb = member_of("files/app/x")
    bomb.size = 20_000

    found = unpacked(archive, "image", max_bytes=10_000)

    assert (found.removed, found.files, found.folders) == (["/etc/y"], ["/app/x"], [])
    with tarfile.open(fileobj=io.BytesIO(found.archive)) as members:
        assert [(member.name, member.mode) for member in members] == [("app/x", 0o777)]
    with pytest.raises(WorkspaceContentError, match="max_bytes, 10000 bytes"):
        unpacked(archive_with(b"image", [bomb]), "image", max_bytes=10_000)


async def test_untrusted_archive_of_a_container_gives_the_listed_files_only() -> None:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as made:
        for member in (
            member_of("./app/x"),
            member_of("./app/not_listed"),
            member_of("./../outside"),
            member_of("./app/hard", tarfile.LNKTYPE, link="./app/x"),
            member_of("./app/device", tarfile.CHRTYPE),
            member_of("./app/link", LINK, link="/etc/passwd"),
        ):
            made.addfile(member, io.BytesIO(b"evil"))
    modes = {f"/app/{name}": 0o100644 for name in ("x", "hard", "device", "link")}

    saved = packed_changes("image", ["/etc/y"], modes, [raw.getvalue()], max_bytes=100)

    assert names_in(saved) == [
        *("base", "files/app/hard", "files/app/link", "files/app/x", "removed/etc/y")
    ]
    with pytest.raises(WorkspaceContentError, match="max_bytes, 7 bytes"):
        packed_changes("image", [], modes, [raw.getvalue()], max_bytes=7)
    with pytest.raises(WorkspaceContentError, match="malformed"):
        packed_changes("image", [], modes, [b"no archive"], max_bytes=7)
