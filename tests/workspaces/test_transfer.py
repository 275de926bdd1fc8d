"""Archives that hostile programs of a container wrote: read within bounds, or refused."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from atroposlib.workspaces import WorkspaceContentError
from atroposlib.workspaces.container_saving import packed_changes
from atroposlib.workspaces.transfer import UntrustedTar, extract, regular_files

MAX_BYTES = 100_000


def member(
    name: str, *, kind: bytes = tarfile.REGTYPE, link: str = "", **headers: str
) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.pax_headers = kind, link, headers
    return made


def archive_of(*members: tarfile.TarInfo, contents: Mapping[str, bytes] | None = None) -> bytes:
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for each in members:
            content = (contents or {}).get(each.name, b"")
            each.size = len(content)
            archive.addfile(each, io.BytesIO(content))
    return output.getvalue()


def collected(archive: bytes) -> bytes:
    return regular_files(archive, max_bytes=MAX_BYTES)


def saved(archive: bytes) -> bytes:
    return packed_changes("image", [], {"/app/b": 0o100644}, [archive], max_bytes=MAX_BYTES)


def names_in(archive: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        return members.getnames()


@pytest.mark.parametrize("read", [collected, saved])
@pytest.mark.parametrize("kind", [b"Z", tarfile.REGTYPE])
def test_archive_whose_headers_lead_back_is_refused_instead_of_read_for_ever(
    read: Callable[[bytes], bytes], kind: bytes
) -> None:
    back = member("app/a", kind=kind, size="-1536")
    link = member("app/c", kind=tarfile.LNKTYPE, link="app/b")

    with pytest.raises(WorkspaceContentError, match="negative size"):
        read(archive_of(member("app/b"), link, back))


def old_sparse_file_of_negative_size() -> bytes:
    block = bytearray(member("app/a", kind=tarfile.GNUTYPE_SPARSE).tobuf(tarfile.GNU_FORMAT))
    block[124:136] = b"\xff" * 10 + b"\xfe\x00"  # -512
    block[148:156] = b" " * 8
    block[148:156] = f"{sum(block[:512]):06o}\0 ".encode()
    return bytes(block)


def test_sparse_file_whose_header_leads_back_is_refused_although_its_size_is_replaced() -> None:
    archive = archive_of(member("app/b"))[:512] + old_sparse_file_of_negative_size() + bytes(1024)

    with pytest.raises(WorkspaceContentError, match="negative size"):
        collected(archive)


@pytest.mark.parametrize("headers", [{"mtime": "inf"}, {"mtime": "nan"}, {"GNU.sparse.map": "x"}])
@pytest.mark.parametrize("read", [collected, saved])
def test_archive_with_impossible_numbers_is_refused_as_content(
    read: Callable[[bytes], bytes], headers: dict[str, Any]
) -> None:
    with pytest.raises(WorkspaceContentError, match="malformed"):
        read(archive_of(member("app/b", **headers)))


def test_archive_with_many_nested_headers_is_refused_as_content() -> None:
    one = archive_of(member("app/b", comment="x"))[:1024]

    with pytest.raises(WorkspaceContentError, match="malformed"):
        collected(one * 3000 + archive_of(member("app/b")))


def test_sparse_file_is_left_out_however_large_it_claims_to_be() -> None:
    headers: dict[str, Any] = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(2**50), "size": "0"}
    archive = archive_of(member("app/a", **headers), member("app/b"))

    assert names_in(collected(archive)) == ["app/b"]
    with pytest.raises(WorkspaceContentError, match="expected regular files"):
        regular_files(archive, strict=True)


def test_hard_links_become_files_and_are_found_in_one_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[UntrustedTar] = []
    listed = UntrustedTar.getmembers

    def counted(self: UntrustedTar) -> list[tarfile.TarInfo]:
        calls.append(self)
        return listed(self)

    monkeypatch.setattr(UntrustedTar, "getmembers", counted)
    links = [member(f"app/{n}", kind=tarfile.LNKTYPE, link="app/b") for n in range(50)]
    lost = member("app/lost", kind=tarfile.LNKTYPE, link="app/missing")
    archive = archive_of(member("app/b"), *links, lost, contents={"app/b": b"text"})

    kept = collected(archive)

    assert len(calls) == 1
    with tarfile.open(fileobj=io.BytesIO(kept)) as members:
        assert len(members.getnames()) == 51
        content = members.extractfile("app/7")
        assert content is not None
        assert content.read() == b"text"


@pytest.mark.parametrize("name", ["x" * 300, "x/" * 3000 + "x"])
def test_name_that_this_machine_does_not_allow_is_an_error_of_content(
    tmp_path: Path, name: str
) -> None:
    archive = collected(archive_of(member(f"out/{name}", path=f"out/{name}")))

    with pytest.raises(WorkspaceContentError, match="cannot be copied to this machine"):
        extract(archive, "/out", tmp_path)
