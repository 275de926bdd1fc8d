from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from atroposlib.errors import ConfigError
from atroposlib.utils.writable import (
    cache_folder,
    require_writable_file,
    require_writable_folder,
    unwritable,
)


def test_writable_folder_is_created_and_left_empty(tmp_path: Path) -> None:
    folder = require_writable_folder(tmp_path / "a" / "b", "--save-path")

    assert folder.is_dir()
    assert list(folder.iterdir()) == []


def test_writable_file_is_not_created_and_an_old_one_is_left_as_it_is(tmp_path: Path) -> None:
    old = tmp_path / "old.jsonl"
    old.write_text("{}\n")

    assert not require_writable_file(tmp_path / "a" / "new.jsonl", "--output").exists()
    assert require_writable_file(old, "--output").read_text() == "{}\n"


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/nowhere"])
def test_folder_that_cannot_be_written_is_one_line_with_the_setting(
    tmp_path: Path, place: str
) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError) as refused:
        require_writable_folder(tmp_path / place, "--save-path")

    assert str(tmp_path / place) in str(refused.value)
    assert str(refused.value).endswith("; choose another place with --save-path")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("place", ["folder", "file/below"])
def test_file_that_cannot_be_written_is_one_line_with_the_setting(
    tmp_path: Path, place: str
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()

    with pytest.raises(ConfigError, match="choose another place with --output"):
        require_writable_file(tmp_path / place, "--output")


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("file", "it is a file; expected a folder"),
        ("file/below/it", "FOLDER/file is a file; expected a folder"),
        ("/proc/nowhere/x", "there is no folder /proc/nowhere, and none can be made in /proc"),
    ],
)
@pytest.mark.parametrize("makes", [True, False])
def test_refusal_names_the_part_of_the_path_that_is_at_fault(
    tmp_path: Path, place: str, reason: str, makes: bool
) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError) as refused:
        require_writable_folder(tmp_path / place, "--output", makes=makes)

    assert f" cannot be written: {reason.replace('FOLDER', str(tmp_path))}; " in str(refused.value)


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.EACCES, "no permission to write to FOLDER"),
        (errno.EROFS, "FOLDER is on a read-only file system"),
        (errno.ENOSPC, "No space left on device"),
    ],
)
def test_reason_of_the_system_is_said_with_the_folder(
    tmp_path: Path, number: int, reason: str
) -> None:
    error = OSError(number, os.strerror(number))

    said = str(unwritable(tmp_path / "a" / "b", error, None))

    expected = reason.replace("FOLDER", str(tmp_path))
    assert said == f"{tmp_path / 'a' / 'b'} cannot be written: {expected}; choose another place"


def test_folder_that_is_only_looked_at_is_not_made(tmp_path: Path) -> None:
    require_writable_folder(tmp_path / "a" / "b", "--output", makes=False)

    assert list(tmp_path.iterdir()) == []


def test_user_without_a_home_folder_is_asked_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)

    with pytest.raises(ConfigError, match="set HOME or XDG_CACHE_HOME"):
        cache_folder("weights")

    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_folder("weights") == Path("/caches/atropos/weights")
