"""The users that programs run as."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atroposlib.sandbox import limits as process_limits
from atroposlib.sandbox.limits import NOBODY, next_user


@pytest.fixture
def users_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Put other maps of users in the place of this process's own."""

    def given(rows: str) -> None:
        for kind in ("uid", "gid"):
            (tmp_path / f"{kind}_map").write_text(rows)
        monkeypatch.setattr(process_limits, "OWN_LIMITS", tmp_path)
        process_limits._unused_users.cache_clear()

    yield given
    process_limits._unused_users.cache_clear()


def test_programs_in_turn_have_users_of_their_own() -> None:
    users = [next_user() for _ in range(5000)]

    assert len(set(users)) == 5000
    assert not {0, NOBODY, os.getuid()} & set(users)


@pytest.mark.parametrize(
    ("maps", "first", "last"),
    [
        ("0 0 4294967295\n", 1_879_048_192, 2_147_352_575),  # no user namespace
        ("0 1000 1\n1 100000 65536\n", 60_578, 61_183),  # a container without root
        ("0 1000 1\n", NOBODY, NOBODY),  # a namespace with one user
    ],
)
def test_users_are_among_those_of_the_namespace(
    users_of: Callable[[str], None], maps: str, first: int, last: int
) -> None:
    users_of(maps)

    assert all(first <= next_user() <= last for _ in range(2000))
