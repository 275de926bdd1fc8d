"""Stored runs read from their files, and what a client looks at to find new groups."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from atroposlib.api.client_consumer import GroupKey, InspectionClient
from atroposlib.api.store.sqlite_file import open_writer
from atroposlib.errors import ConfigError
from atroposlib.exporting.groups import export_group, find_run, read_run
from atroposlib.wire import encode_group


def test_run_at_rest_is_read_without_touching_its_folder(groups: list[Any], tmp_path: Path) -> None:
    connection = open_writer(tmp_path / "old.sqlite3", fsync=False)
    rows = [
        (i, encode_group(groups[i], wire_format))
        for i, wire_format in enumerate(("json", "msgpack") * 2)
    ]
    connection.executemany("INSERT INTO payload VALUES (?, ?)", rows)
    connection.execute("INSERT INTO garbage VALUES (1)")
    connection.close()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    found = list(read_run(find_run("old", tmp_path)))

    assert [raw.where for raw in found] == ["group 0", "group 2", "group 3"]
    assert [export_group(raw).tokens for raw in found] == [groups[i]["tokens"] for i in (0, 2, 3)]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert find_run(str(tmp_path / "old.sqlite3"), Path("elsewhere")).name == "old.sqlite3"


def test_what_is_no_run_is_said(tmp_path: Path) -> None:
    sqlite3.connect(tmp_path / "other.sqlite3").execute("CREATE TABLE t (x)").connection.close()
    (tmp_path / "text.sqlite3").write_text("not a database, " * 100)

    with pytest.raises(ConfigError, match="database of another program"):
        find_run("other", tmp_path)
    with pytest.raises(ConfigError, match="is not the file of a run"):
        find_run("text", tmp_path)
    with pytest.raises(ConfigError, match=r"there is no run none; .* has (other|text), "):
        find_run("none", tmp_path)


class Listing(InspectionClient):
    """A service with so many groups in a state; counts the pages that were asked for."""

    def __init__(self, ids: list[int]) -> None:
        super().__init__("http://nowhere")
        self.ids = ids
        self.num_pages = 0

    def groups(self, state: str, *, offset: int = 0, limit: int = 1000) -> dict[str, Any]:
        self.num_pages += 1
        page = self.ids[offset : offset + limit]
        return {"groups": [{"id": i} for i in page], "total": len(self.ids)}


def ids_of(entries: list[dict[str, Any]]) -> list[int]:
    return [entry["id"] for entry in entries]


def test_long_queue_is_walked_once_and_then_from_its_end() -> None:
    client = Listing(list(range(5500)))

    first = ids_of(client.new_groups("queued", frozenset()))
    pages_of_first, client.num_pages = client.num_pages, 0
    client.ids += [5500, 5501]
    second = ids_of(client.new_groups("queued", {GroupKey(i, None) for i in first}))

    assert first == list(range(5500))
    assert second == [5500, 5501]
    assert (pages_of_first, client.num_pages) == (7, 3)


def test_past_groups_are_looked_at_whole_because_the_newest_come_first() -> None:
    client = Listing([9, 8, 7, 1])

    assert ids_of(client.new_groups("past", {GroupKey(9, None), GroupKey(7, None)})) == [1, 8]
