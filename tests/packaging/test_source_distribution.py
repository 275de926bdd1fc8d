"""The sdist is a whole clone: what is unpacked from it builds, and its tests run."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.packaging.installed import REPOSITORY, build

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SAMPLE_OF_TESTS = (
    "tests/contract/test_architecture.py",
    "tests/environments/test_card_table.py",
    "tests/environments/test_word_clues.py",
    "tests/cli/test_new_env.py",
)


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build("sdist", source=REPOSITORY, out=folder)) as archive:
        if sys.version_info >= (3, 12):
            archive.extractall(folder, filter="data")
        else:
            archive.extractall(folder)
    [root] = (path for path in folder.iterdir() if path.is_dir())
    return root


def test_sdist_has_every_file_of_the_clone(unpacked: Path) -> None:
    if not (REPOSITORY / ".git").exists():
        pytest.skip("not a clone")
    listed = subprocess.run(
        ["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.splitlines()

    missing = [name for name in listed if (REPOSITORY / name).exists()]
    missing = [name for name in missing if not (unpacked / name).exists()]

    assert missing == []


def test_wheel_of_the_sdist_is_the_wheel_of_the_clone(
    unpacked: Path, wheel: Path, tmp_path: Path
) -> None:
    from zipfile import ZipFile

    again = build("wheel", source=unpacked, out=tmp_path)

    with ZipFile(wheel) as first, ZipFile(again) as second:
        assert sorted(first.namelist()) == sorted(second.namelist())


@pytest.mark.long
def test_tests_of_the_sdist_pass(unpacked: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SAMPLE_OF_TESTS],
        cwd=unpacked,
        env={**os.environ, "PYTHONPATH": str(unpacked)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )

    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
