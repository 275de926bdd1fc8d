"""`EpisodeThreads`: calls of a synchronous library that may hang."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from atroposlib.adapters.interface import EpisodeThreads
from atroposlib.errors import EpisodeTimeoutError


class HeldLock:
    """The lock of a thread that never returns; `meanwhile` runs while the first one waits."""

    def __init__(self, meanwhile: Any) -> None:
        self._meanwhile = meanwhile

    def acquire(self, timeout: float) -> bool:
        meanwhile, self._meanwhile = self._meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return False


def test_thread_that_hangs_is_given_up_once_by_all_that_wait_for_it() -> None:
    threads = EpisodeThreads("lib")
    inside = contextlib.ExitStack()

    def another_gives_up_and_the_next_enters() -> None:
        with pytest.raises(EpisodeTimeoutError), threads.alone(0):
            pass
        inside.enter_context(threads.alone(0))

    threads._alone = HeldLock(another_gives_up_and_the_next_enters)  # type: ignore[assignment]
    with pytest.raises(EpisodeTimeoutError), threads.alone(0):
        pass

    gives_up = threads.alone(0)
    with inside, pytest.raises(EpisodeTimeoutError, match="lib: the call of another episode"):
        gives_up.__enter__()
