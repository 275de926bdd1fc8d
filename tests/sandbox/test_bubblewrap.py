"""What the default sandbox promises besides: turns, and errors that say why."""

from __future__ import annotations

import asyncio
import itertools
import shutil

import pytest

from atroposlib.sandbox import SandboxError, SandboxLimits, run_python
from atroposlib.sandbox.bubblewrap import Bubblewrap
from tests.sandbox.processes import children

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is missing")

LIMITS = SandboxLimits(wall_s=60.0)


async def test_one_program_at_a_time_is_one() -> None:
    sandbox = Bubblewrap(limits=LIMITS, max_parallel=1)
    program = """
import time
began = time.monotonic()
time.sleep(0.1)
print(began, time.monotonic())
"""
    results = await asyncio.gather(*(run_python(sandbox, program) for _ in range(3)))

    times = sorted(tuple(map(float, result.stdout.split())) for result in results)
    assert all(ended < began for (_, ended), (began, _) in itertools.pairwise(times))


async def test_program_whose_turn_never_comes_does_not_run() -> None:
    sandbox = Bubblewrap(limits=LIMITS, max_parallel=1)
    before = children()
    first = asyncio.create_task(run_python(sandbox, "import time; time.sleep(1); print('first')"))
    await asyncio.sleep(0.3)
    second = asyncio.create_task(run_python(sandbox, "print('second')"))
    await asyncio.sleep(0.3)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second

    assert (await first).stdout == "first\n"
    assert children() == before


async def test_box_that_cannot_be_set_up_says_why() -> None:
    sandbox = Bubblewrap(limits=LIMITS, read_only=["/no/such/folder"])

    with pytest.raises(SandboxError, match="/no/such/folder"):
        await run_python(sandbox, "print('ran')")
