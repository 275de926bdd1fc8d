"""Content that programs of a sandbox read from sealed memory."""

from __future__ import annotations

import errno
import fcntl
import os
from typing import Any

import pytest

from atroposlib.sandbox import interface
from atroposlib.sandbox.interface import SEALS, content_fd


class BusyPages:
    """Stands in for `fcntl.fcntl` while the kernel moves pages, for a number of calls."""

    def __init__(self, number: int, *, code: int = errno.EBUSY) -> None:
        self.left, self.code = number, code
        self.refused: list[int] = []
        self._real = fcntl.fcntl

    def __call__(self, fd: int, *args: Any) -> int:
        if self.left:
            self.left -= 1
            self.refused.append(fd)
            raise OSError(self.code, os.strerror(self.code))
        return int(self._real(fd, *args))


def test_memory_that_cannot_be_sealed_at_once_is_copied_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    busy = BusyPages(3)
    monkeypatch.setattr(interface.fcntl, "fcntl", busy)

    with content_fd("print(1)") as fd:
        assert os.read(fd, 100) == b"print(1)"
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) == SEALS
        with pytest.raises(PermissionError):
            os.write(fd, b"x")

    assert len(busy.refused) == 3
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.parametrize("busy", [BusyPages(99), BusyPages(1, code=errno.EINVAL)])
def test_memory_that_is_never_sealed_is_an_error_and_closed(
    monkeypatch: pytest.MonkeyPatch, busy: BusyPages
) -> None:
    monkeypatch.setattr(interface.fcntl, "fcntl", busy)

    with pytest.raises(OSError, match=r"busy|Invalid"), content_fd("print(1)"):
        pass

    for fd in busy.refused:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
