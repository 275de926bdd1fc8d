from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest

from atroposlib.errors import MissingExtraError
from atroposlib.utils.score_pool import ScoreCrashError, ScorePool, ScoreTimeoutError

pytestmark = pytest.mark.slow


def double(number: int) -> int:
    return 2 * number


def stuck_power() -> int:
    # One bytecode that holds the interpreter: no thread or signal could stop it.
    return len(str(9 ** (9**8)))


def refuse(number: int) -> int:
    raise ValueError(f"no {number}")


class OwnError(Exception):
    def __init__(self, place: str, number: int) -> None:
        super().__init__(f"{place}: {number}")


def refuse_with_own_error() -> int:
    raise OwnError("unit", 3)


def wait_and_double(number: int) -> int:
    time.sleep(0.5)
    return 2 * number


def give_a_closure() -> object:
    return lambda: 1


def die() -> int:
    os._exit(1)


def time_out_itself() -> int:
    raise TimeoutError("no answer")


def own_process() -> int:
    return os.getpid()


async def test_pool_runs_calls_in_other_processes_and_in_order() -> None:
    pool = ScorePool(num_workers=2)

    results = await asyncio.gather(*(pool.run(double, i, default=-1) for i in range(20)))
    worker = await pool.run(own_process, default=-1)
    pool.close()

    assert results == [2 * i for i in range(20)]
    assert worker != os.getpid()


async def test_pool_ends_a_call_that_takes_too_long_and_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = ScorePool(num_workers=1, timeout_s=2)
    await pool.run(double, 1, default=-1)

    late = await pool.run(stuck_power, default=-7)
    after = await pool.run(double, 4, default=-1)
    pool.close()

    assert (late, after, pool.num_timeouts) == (-7, 8, 1)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "scoring given up: stuck_power: ended after 2 s; it counts as -7 (1 so far)"
    ]


async def test_pool_raises_what_the_function_raises() -> None:
    pool = ScorePool(num_workers=1)

    with pytest.raises(ValueError, match="no 3"):
        await pool.run(refuse, 3, default=0)
    pool.close()


async def test_pool_error_that_cannot_be_rebuilt_costs_no_other_call() -> None:
    pool = ScorePool(num_workers=2)

    *results, error = await asyncio.gather(
        *(pool.run(wait_and_double, i) for i in range(3)),
        pool.run(refuse_with_own_error, default=0),
        return_exceptions=True,
    )
    with pytest.raises(TypeError, match="the result cannot be sent"):
        await pool.run(give_a_closure, default=None)
    pool.close()

    assert results == [0, 2, 4]
    assert isinstance(error, RuntimeError)
    assert str(error).endswith("OwnError: unit: 3")


async def test_pool_time_limit_of_one_call_goes_before_the_pools() -> None:
    pool = ScorePool(num_workers=1)
    await pool.run(double, 1)

    with pytest.raises(ScoreTimeoutError, match=r"after 0\.2 s"):
        await pool.run(time.sleep, 600, timeout=0.2)
    pool.close()

    assert pool.counts == {"calls": 2, "timeouts": 1}


async def test_pool_crash_of_a_worker_costs_one_score() -> None:
    pool = ScorePool(num_workers=1)

    scores = await asyncio.gather(
        pool.run(double, 1, default=-1),
        pool.run(die, default=-1),
        pool.run(double, 3, default=-1),
    )
    with pytest.raises(ScoreCrashError, match="died"):
        await pool.run(die)
    pool.close()

    assert scores == [2, -1, 6]
    assert pool.counts == {"calls": 4, "crashes": 2}


@pytest.mark.parametrize("num_losses", [1, 100])
async def test_pool_lost_by_a_crash_runs_the_other_calls_again(
    monkeypatch: pytest.MonkeyPatch, num_losses: int
) -> None:
    from pebble.pool.process import PoolManager

    lost: list[int] = []
    find = PoolManager.find_expired_task

    def find_later(manager: Any, worker_id: int) -> Any:
        """Not know what a worker ran that died at once, as happens now and then."""
        if len(lost) < num_losses:
            lost.append(worker_id)
            raise BrokenProcessPool("All workers expired")
        return find(manager, worker_id)

    monkeypatch.setattr(PoolManager, "find_expired_task", find_later)
    pool = ScorePool(num_workers=1)
    long = "x" * 100_000  # does not fit into the pipe to the worker

    scores = await asyncio.gather(
        pool.run(die, default=-1), *(pool.run(len, long, default=-1) for _ in range(4))
    )
    again = await pool.run(double, 4)
    pool.close()

    assert scores[0] == -1
    assert set(scores[1:]) <= ({100_000} if num_losses == 1 else {100_000, -1})
    assert again == 8


async def test_pool_tells_a_time_out_inside_the_function_from_its_own() -> None:
    for kind in ("PROCESS", "THREAD"):
        pool = ScorePool(num_workers=1, backend=kind)  # type: ignore[arg-type]
        with pytest.raises(TimeoutError, match="no answer") as caught:
            await pool.run(time_out_itself, default=0)
        pool.close()
        assert not isinstance(caught.value, ScoreTimeoutError)
        assert pool.counts == {"calls": 1, "errors": 1}


async def test_pool_refuses_what_no_worker_can_import() -> None:
    pool = ScorePool()

    with pytest.raises(TypeError, match="top level of a module"):
        await pool.run(lambda: 1)


async def test_pool_cancelled_call_is_given_up_and_the_worker_goes_on() -> None:
    pool = ScorePool(num_workers=1)
    await pool.run(double, 1)
    stuck = asyncio.ensure_future(pool.run(time.sleep, 600, timeout=600))
    await asyncio.sleep(0.1)

    stuck.cancel()

    assert await asyncio.wait_for(pool.run(double, 2), 300) == 4
    pool.close()


async def test_pool_of_threads_stops_waiting_and_runs_closures() -> None:
    pool = ScorePool(num_workers=2, backend="THREAD")
    over = threading.Event()

    late = await pool.run(lambda: over.wait(10), timeout=0.05, default=False)
    after = await pool.run(lambda: "next")
    over.set()
    pool.close()

    assert (late, after, pool.num_timeouts) == (False, "next", 1)


async def test_pool_of_threads_closes_while_a_call_does_not_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("atroposlib.utils.score_pool.CLOSING_S", 0.1)
    pool = ScorePool(num_workers=0)
    over = threading.Event()
    assert await pool.run(over.wait, timeout=0.05, default=False) is False
    closing = threading.Thread(target=pool.close, daemon=True)

    closing.start()
    closing.join(60)

    is_closed = not closing.is_alive()
    over.set()
    assert is_closed


async def test_pool_on_ray_without_ray_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    pool = ScorePool(backend="RAY")

    with pytest.raises(MissingExtraError, match=r"\.\[ray\]"):
        await pool.run(double, 1)


async def test_pool_without_workers_runs_in_this_process() -> None:
    pool = ScorePool(num_workers=0)

    assert await pool.run(own_process, default=-1) == os.getpid()
    pool.close()


async def test_pool_leaves_no_process_after_close() -> None:
    pool = ScorePool(num_workers=1)
    worker = await pool.run(own_process, default=-1)

    pool.close()
    pool.close()

    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)


OWNER = """
import asyncio, os, signal
from tests.utils.test_score_pool import ScorePool, own_process, stuck_power

async def main():
    pool = ScorePool(num_workers=1, timeout_s=600)
    print(await pool.run(own_process, default=-1), flush=True)
    stuck = asyncio.ensure_future(pool.run(stuck_power, default=-1))
    await asyncio.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    asyncio.run(main())
"""


IMPORTER = """
import asyncio, sys
import scoring
from atroposlib.utils import math_check
from atroposlib.utils.score_pool import ScorePool

async def main():
    pool = ScorePool(num_workers=1)
    print(await pool.run(scoring.imported))
    pool.close()

if __name__ == "__main__":
    asyncio.run(main())
"""
SCORING = """
import sys
WORKER_IMPORTS = ("colorsys", "a_package_that_is_not_installed")

def imported():
    return [name for name in ("colorsys", "math_verify") if name in sys.modules]
"""


def test_worker_imports_what_scoring_needs_before_its_first_call(tmp_path: Path) -> None:
    (tmp_path / "scoring.py").write_text(SCORING, encoding="utf-8")
    (tmp_path / "main.py").write_text(IMPORTER, encoding="utf-8")

    ended = subprocess.run(
        [sys.executable, str(tmp_path / "main.py")],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip

    assert ended.stdout == "['colorsys', 'math_verify']\n", ended.stderr


CLOSED_EARLY = """
import asyncio, os
from atroposlib.utils.score_pool import ScorePool

async def main():
    pool = ScorePool(num_workers=4)
    assert await pool.run(os.getpid, default=None) is not None
    pool.close()

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_pool_closed_while_workers_are_starting_prints_nothing(tmp_path: Path) -> None:
    script = tmp_path / "early.py"
    script.write_text(CLOSED_EARLY)
    root = Path(__file__).parents[2]

    ended = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (ended.returncode, ended.stderr) == (0, "")


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
    deadline = time.monotonic() + 60
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


async def test_pool_tells_of_ever_fewer_calls_that_it_gives_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = ScorePool(num_workers=1, backend="THREAD")

    for _ in range(12):
        await pool.run(time.sleep, 0.02, timeout=0.001, default=None)
    pool.close()

    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [message.rpartition("(")[2] for message in told] == ["1 so far)", "10 so far)"]
