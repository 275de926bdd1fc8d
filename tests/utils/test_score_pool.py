from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atroposlib.utils.score_pool import ScorePool


def double(number: int) -> int:
    return 2 * number


def stuck_power() -> int:
    # One bytecode that holds the interpreter: no thread or signal could stop it.
    return len(str(9 ** (9**8)))


def refuse(number: int) -> int:
    raise ValueError(f"no {number}")


def own_process() -> int:
    return os.getpid()


async def test_pool_runs_calls_in_other_processes_and_in_order() -> None:
    pool = ScorePool(num_workers=2)

    results = await asyncio.gather(*(pool.run(double, i, on_timeout=-1) for i in range(20)))
    worker = await pool.run(own_process, on_timeout=-1)
    pool.close()

    assert results == [2 * i for i in range(20)]
    assert worker != os.getpid()


async def test_pool_ends_a_call_that_takes_too_long_and_goes_on() -> None:
    pool = ScorePool(num_workers=1, timeout_s=2)
    await pool.run(double, 1, on_timeout=-1)
    started = time.monotonic()

    late = await pool.run(stuck_power, on_timeout=-7)
    after = await pool.run(double, 4, on_timeout=-1)
    pool.close()

    assert (late, after, pool.num_timeouts) == (-7, 8, 1)
    assert time.monotonic() - started < 15


async def test_pool_raises_what_the_function_raises() -> None:
    pool = ScorePool(num_workers=1)

    with pytest.raises(ValueError, match="no 3"):
        await pool.run(refuse, 3, on_timeout=0)
    pool.close()


async def test_pool_without_workers_runs_in_this_process() -> None:
    pool = ScorePool(num_workers=0)

    assert await pool.run(own_process, on_timeout=-1) == os.getpid()
    pool.close()


async def test_pool_leaves_no_process_after_close() -> None:
    pool = ScorePool(num_workers=1)
    worker = await pool.run(own_process, on_timeout=-1)

    pool.close()
    pool.close()

    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)


OWNER = """
import asyncio, os, signal
from tests.utils.test_score_pool import ScorePool, own_process, stuck_power

async def main():
    pool = ScorePool(num_workers=1, timeout_s=600)
    print(await pool.run(own_process, on_timeout=-1), flush=True)
    stuck = asyncio.ensure_future(pool.run(stuck_power, on_timeout=-1))
    await asyncio.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_worker_does_not_outlive_a_killed_owner(tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    root = Path(__file__).parents[2]

    owner = subprocess.run(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(root)},
        timeout=60,
        check=False,
    )

    worker = int(owner.stdout)
    deadline = time.monotonic() + 10
    while is_running(worker) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(worker)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    # A dead process that nobody has asked about yet still has its number.
    return not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] != "Z"
