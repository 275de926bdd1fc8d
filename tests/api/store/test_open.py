from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from atroposlib.api.store.base import MemoryRunStore
from atroposlib.api.store.open import check_run_name, fresh_run_name, open_store, run_file
from atroposlib.api.store.sqlite import SqliteRunStore
from atroposlib.errors import ConfigError


def test_fresh_run_name_tells_the_moment_and_can_be_used() -> None:
    name = fresh_run_name(datetime(2026, 3, 9, 7, 5))

    assert name.startswith("2026-03-09-0705-")
    assert check_run_name(name) == name


def test_fresh_run_names_of_one_moment_differ() -> None:
    moment = datetime(2026, 3, 9, 7, 5)

    assert len({fresh_run_name(moment) for _ in range(500)}) == 500


@pytest.mark.parametrize("name", ["a", "run_1", "gsm8k-7B.v2+kl", "2026", "x" * 100])
def test_run_names_that_can_be_used(name: str) -> None:
    assert check_run_name(name) == name


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "a/b", "a\\b", "../a", "a b", "-x", "x\n", "é", "x" * 101]
)
def test_run_names_that_cannot_be_used_say_what_is_expected(name: str) -> None:
    with pytest.raises(ConfigError, match="expected 1 to 100 letters, digits"):
        check_run_name(name)


def test_open_store_gives_the_kind_asked_for(tmp_path: Path) -> None:
    stores = [open_store(url, data_dir=tmp_path, run_name="run") for url in ("memory", "sqlite")]

    assert [type(store) for store in stores] == [MemoryRunStore, SqliteRunStore]
    assert run_file(tmp_path, "run") == tmp_path / "run.sqlite3"


@pytest.mark.parametrize("url", ["", "sqlit", "sqlite:///a", "postgres://host", "Memory"])
def test_open_store_refuses_an_unknown_kind(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected memory, sqlite or redis://"):
        open_store(url, data_dir=tmp_path, run_name="run")


def test_open_store_refuses_a_name_that_leaves_the_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run name"):
        open_store("sqlite", data_dir=tmp_path, run_name="../run")
