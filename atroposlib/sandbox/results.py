"""The result of a program, from how the processes around it ended."""

from __future__ import annotations

from atroposlib.sandbox.interface import Ending, SandboxError, SandboxResult
from atroposlib.sandbox.streams import Finished

__all__ = ["result_of"]

SIGXCPU_EXIT = 128 + 24
FIRST_SIGNAL_EXIT = 128 + 1
MAX_MESSAGE_CHARACTERS = 300


def result_of(
    finished: Finished, *, exit_code: int | None, ran_out_of_memory: bool, around: str
) -> SandboxResult:
    """Return how a program ended.

    Args:
        finished: what ran around it.
        exit_code: of the program; None when it was stopped, or never ran.
        ran_out_of_memory: whether the kernel killed one of its processes for that.
        around: name of what ran around it.

    Raises:
        SandboxError: the program never ran.
    """
    stderr = finished.stderr.decode("utf-8", "replace")
    ended_by: Ending
    if finished.stopped_for is not None:
        ended_by, exit_code = finished.stopped_for, None
    elif ran_out_of_memory:
        ended_by = "memory"
    elif exit_code is None:
        raise SandboxError(
            f"{around} ended with {finished.returncode} before the program did: "
            f"{stderr[:MAX_MESSAGE_CHARACTERS].strip() or 'no message'}"
        )
    elif exit_code == SIGXCPU_EXIT:
        ended_by = "cpu_time"
    else:
        ended_by = "signal" if exit_code >= FIRST_SIGNAL_EXIT else "exit"
    return SandboxResult(
        exit_code=exit_code,
        stdout=finished.stdout.decode("utf-8", "replace"),
        stderr=stderr,
        ended_by=ended_by,
        duration_s=finished.duration_s,
    )
