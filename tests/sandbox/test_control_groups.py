"""Where control groups can be used, and where they are left alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from atroposlib.sandbox.control_groups import PARENT, ControlGroups


@pytest.fixture
def root() -> Iterator[Path]:
    """A tree as of version 1, in which somebody else has made the parents already."""
    with TemporaryDirectory() as folder:
        root = Path(folder)
        root.chmod(0o755)
        for controller in ("memory", "pids"):
            (root / controller / PARENT).mkdir(parents=True)
        yield root


def test_parents_of_ones_own_are_used(root: Path) -> None:
    assert ControlGroups(root).are_usable


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user for a moment")
def test_parents_of_somebody_else_are_not_used(root: Path) -> None:
    os.seteuid(65534)
    try:
        groups = ControlGroups(root)
    finally:
        os.seteuid(0)

    assert not groups.are_usable
