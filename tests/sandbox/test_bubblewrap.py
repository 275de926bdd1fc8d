"""What the default sandbox promises besides: turns, and errors that say why."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from atroposlib.sandbox import SandboxError, SandboxLimits, bubblewrap, run_python
from atroposlib.sandbox.bubblewrap import Bubblewrap, new_gate
from atroposlib.sandbox.interface import PYTHON
from atroposlib.sandbox.limits import ControlGroups
from tests.sandbox.processes import children

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is missing"),
]

LIMITS = SandboxLimits(wall_s=60.0)
OWN_LIMITS = """
import resource
for name in ("AS", "CPU", "NPROC", "FSIZE", "NOFILE", "CORE"):
    print(name, resource.getrlimit(getattr(resource, f"RLIMIT_{name}")))
"""
FORKS = """
import os, signal
signal.alarm(30)
for children in range(32):
    try:
        if os.fork() == 0:
            signal.pause()
    except OSError:
        print(children, "children")
        break
"""
WITHIN = f"""
import asyncio
from atroposlib.sandbox import SandboxLimits, run_python
from atroposlib.sandbox.bubblewrap import Bubblewrap
from atroposlib.sandbox.limits import may_limit_others

async def main():
    limits = SandboxLimits(wall_s=50.0, memory_bytes=2**28, max_processes=5)
    sandbox = Bubblewrap(limits=limits)
    first = (await run_python(sandbox, {OWN_LIMITS!r})).stdout.splitlines()[0]
    second = (await run_python(sandbox, {FORKS!r})).stdout.strip()
    third = (await sandbox.run(["no-such-program"])).exit_code
    print(may_limit_others(), first, second, third)

asyncio.run(main())
"""


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
    sandbox = Bubblewrap(limits=replace(LIMITS, wall_s=600.0), max_parallel=1)
    before = children()
    started = asyncio.Event()
    reading, writing = os.pipe()
    program = "print('first', flush=True); input()"
    first = asyncio.create_task(
        sandbox.run([*PYTHON, "-c", program], stdin=reading, on_output=lambda *_: started.set())
    )
    await started.wait()
    second = asyncio.create_task(run_python(sandbox, "print('second')"))
    await asyncio.sleep(0.3)  # it ends here only if it does not wait
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    os.write(writing, b"\n")

    assert (await first).stdout == "first\n"
    assert children() == before
    for fd in (reading, writing):
        os.close(fd)


async def test_box_that_cannot_be_set_up_says_why() -> None:
    sandbox = Bubblewrap(limits=LIMITS, read_only=["/no/such/folder"])

    with pytest.raises(SandboxError, match="/no/such/folder"):
        await run_python(sandbox, "print('ran')")


async def test_program_is_asked_while_it_runs_and_reads_a_folder_of_tmp() -> None:
    program = """
import sys
for line in sys.stdin:
    print(open(line.strip()).read(), flush=True)
"""
    reading, writing = os.pipe()
    answers: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)  # noqa: PTH101 - pathlib is not for coroutines
        for name in ("one", "two"):
            await asyncio.to_thread(Path(folder, name).write_text, f"text of {name}")
        sandbox = Bubblewrap(limits=LIMITS, read_only=[folder])
        running = asyncio.create_task(
            sandbox.run(
                [*PYTHON, "main.py"],
                files={"main.py": program},
                stdin=reading,
                on_output=lambda stream, piece, _: answers.put_nowait((stream, piece)),
            )
        )
        for name in ("one", "two"):
            os.write(writing, f"{folder}/{name}\n".encode())
            assert await answers.get() == (1, f"text of {name}\n".encode())
        os.close(writing)
        result = await running
    os.close(reading)

    assert result.is_success
    assert result.stdout == "text of one\ntext of two\n"


async def test_program_finds_its_limits() -> None:
    limits = SandboxLimits(
        wall_s=60.0, cpu_s=7, memory_bytes=2**28, max_processes=5, disk_bytes=2**20
    )

    result = await run_python(Bubblewrap(limits=limits), OWN_LIMITS)

    assert result.stdout.split("\n")[:-1] == [
        f"AS ({2**28}, {2**28})",
        "CPU (7, 8)",
        "NPROC (6, 6)",  # and the sandbox's own
        f"FSIZE ({2**20}, {2**20})",
        "NOFILE (256, 256)",
        "CORE (0, 0)",
    ]


async def test_memory_of_all_processes_is_watched_without_a_control_group(tmp_path: Path) -> None:
    limits = replace(LIMITS, memory_bytes=2**27, disk_bytes=2**20, max_processes=20)
    sandbox = Bubblewrap(limits=limits, groups=ControlGroups(tmp_path))
    program = """
import os, time
print('started', flush=True)
for _ in range(8):
    if os.fork() == 0:
        held = b'x' * (60 * 2**20)
        time.sleep(50)
time.sleep(50)
"""
    result = await run_python(sandbox, program)

    assert (result.stdout, result.ended_by) == ("started\n", "memory")


@pytest.mark.parametrize("kind", ["unix", "tcp"])
async def test_sockets_are_watched_without_a_control_group(tmp_path: Path, kind: str) -> None:
    limits = replace(LIMITS, memory_bytes=2**26, disk_bytes=2**20, cpu_s=60)
    sandbox = Bubblewrap(limits=limits, groups=ControlGroups(tmp_path))
    program = f"""
import os, socket, time
listener = socket.create_server(('127.0.0.1', 0))
def pair():
    if {kind!r} == 'unix':
        return socket.socketpair()
    one = socket.create_connection(listener.getsockname())
    return one, listener.accept()[0]
for _ in range(7):
    if os.fork() == 0:
        break
    listener = socket.create_server(('127.0.0.1', 0))
held = []
try:
    while True:
        for each in pair():
            held.append(each)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**24)
            each.setblocking(False)
            try:
                while True:
                    each.send(bytes(65536))
            except BlockingIOError:
                pass
except OSError:
    time.sleep(50)
"""
    result = await run_python(sandbox, program)

    assert result.ended_by == "memory", result


def test_box_that_waits_ends_with_the_next_sandbox_when_its_process_was_killed(
    tmp_path: Path,
) -> None:
    killed = f"""
import asyncio, os, signal
from pathlib import Path
from atroposlib.sandbox import SandboxLimits
from atroposlib.sandbox.bubblewrap import Bubblewrap, Gate
from atroposlib.sandbox.limits import ControlGroups

num_set_up = 0
wait_for_box = Gate.wait_for_box

async def count(gate):
    global num_set_up
    box = await wait_for_box(gate)
    num_set_up += 1
    return box

async def main():
    Gate.wait_for_box = count
    groups = ControlGroups(Path({str(tmp_path)!r}))
    limits = SandboxLimits(memory_bytes={MARKED_BYTES}, disk_bytes={MARKED_BYTES})
    sandbox = Bubblewrap(limits=limits, max_parallel=1, groups=groups)
    for _ in range(3):
        asyncio.create_task(sandbox.run(["/usr/bin/sleep", "60"]))
    while num_set_up < 3:
        await asyncio.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", killed], timeout=60)
    wait_until(lambda: not any(is_outside(pid) for pid in boxes()))
    assert boxes()

    Bubblewrap(groups=ControlGroups(tmp_path))

    wait_until(lambda: not boxes())


def wait_until(is_so: Callable[[], bool]) -> None:
    """Wait for what the kernel does to processes of which one was killed."""
    for _ in range(1000):
        if is_so():
            return
        time.sleep(0.02)
    pytest.fail("it did not come to be so")


def is_outside(pid: str) -> bool:
    """Whether this is the bubblewrap around a box, which ends with the process that started it."""
    with contextlib.suppress(OSError):
        status = Path("/proc", pid, "status").read_text()
        return re.search(r"^NSpid:\t\d+$", status, re.MULTILINE) is not None
    return False


MARKED_BYTES = 61_440_001 // 4096 * 4096
"""So large are the folders of boxes by which a test finds its own."""


def boxes() -> list[str]:
    """The processes of bubblewrap that are of the test above."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = file.read_bytes().split(b"\0")
            if words[0].endswith(b"bwrap") and str(MARKED_BYTES).encode() in words:
                found.append(file.parent.name)
    return found


async def test_memory_that_processes_share_is_counted_once(tmp_path: Path) -> None:
    limits = replace(LIMITS, memory_bytes=2**27, disk_bytes=2**20)
    sandbox = Bubblewrap(limits=limits, groups=ControlGroups(tmp_path))
    program = """
import os, time
held = b'x' * (60 * 2**20)
for _ in range(6):
    if os.fork() == 0:
        time.sleep(0.4)
        os._exit(held[-1] != ord('x'))
print([os.wait()[1] for _ in range(6)])
"""
    result = await run_python(sandbox, program)

    assert result.stdout == "[0, 0, 0, 0, 0, 0]\n", result


async def test_empty_files_without_end_are_watched_without_a_control_group(tmp_path: Path) -> None:
    limits = replace(LIMITS, memory_bytes=2**26, disk_bytes=2**20, cpu_s=60)
    sandbox = Bubblewrap(limits=limits, groups=ControlGroups(tmp_path))

    result = await run_python(
        sandbox, "import itertools, os\nfor n in itertools.count(): os.mknod(str(n))"
    )

    assert result.ended_by == "memory"


async def test_standard_input_can_be_opened_by_name_and_not_written() -> None:
    program = """
import os, stat
print(open('/dev/stdin').read(), stat.S_ISREG(os.fstat(0).st_mode))
for act in (lambda: os.write(0, b'x'), lambda: open('/proc/self/fd/0', 'r+b', 0).write(b'x')):
    try:
        print(act())
    except OSError as error:
        print('refused')
"""
    result = await run_python(Bubblewrap(limits=LIMITS), program, stdin="given")

    assert result.stdout == "given True\nrefused\nrefused\n", result


async def test_program_is_first_to_go_when_the_machine_lacks_memory() -> None:
    program = "print(open('/proc/self/oom_score_adj').read().strip())"

    assert (await run_python(Bubblewrap(limits=LIMITS), program)).stdout == "1000\n"


async def test_nothing_in_proc_can_be_written() -> None:
    program = """
import os
for folder in ('/proc/sys', '/proc/self', '/proc/1'):
    for above, _, names in os.walk(folder):
        for name in names:
            try:
                os.close(os.open(f'{above}/{name}', os.O_WRONLY))
                print(f'{above}/{name}')
            except OSError:
                pass
print('tried')
"""
    result = await run_python(Bubblewrap(limits=replace(LIMITS, cpu_s=30)), program)

    written = [path for path in result.stdout.splitlines() if "/fd/" not in path]
    assert written == ["tried"]


async def test_keys_of_the_parent_cannot_be_listed() -> None:
    result = await run_python(Bubblewrap(limits=LIMITS), "print(open('/proc/keys').read())")

    assert "Permission denied" in result.stderr or "No such file" in result.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can become others")
async def test_each_program_has_a_user_of_its_own() -> None:
    sandbox = Bubblewrap(limits=replace(LIMITS, wall_s=600.0), max_parallel=3)
    program = "import os, sys; print(os.getuid(), os.getgid()); sys.stdin.read()"
    reading, writing = os.pipe()
    runs = [
        asyncio.create_task(sandbox.run([*PYTHON, "-c", program], stdin=reading)) for _ in range(3)
    ]
    users: set[int] = set()
    while len(users) < 3 and not any(run.done() for run in runs):
        await asyncio.sleep(0.02)
        users |= {uid for pid in children() for uid in _users_within(pid)}
    os.close(writing)  # which ends the programs
    results = await asyncio.gather(*runs)
    os.close(reading)

    assert len(users) == 3
    assert not users & {0, 65534}
    assert {result.stdout for result in results} == {"65534 65534\n"}


def _users_within(pid: str) -> set[int]:
    """The users of the Python programs among a process's descendants."""
    found: set[int] = set()
    try:
        below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        status = Path(f"/proc/{pid}/status").read_text()
        rows = dict(line.split(":", 1) for line in status.splitlines())
    except OSError:
        return found
    if rows["Name"].strip() == "python3":
        found.add(int(rows["Uid"].split()[0]))
    return found.union(*map(_users_within, below))


async def test_program_may_have_just_as_many_processes() -> None:
    limits = SandboxLimits(wall_s=60.0, max_processes=5)

    result = await run_python(Bubblewrap(limits=limits), FORKS)

    assert result.stdout == "4 children\n", result.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, which becomes others")
@pytest.mark.parametrize(
    ("become", "may"),
    [
        (("--reuid=65534", "--regid=65534", "--clear-groups"), True),
        (("--bounding-set=-sys_resource", "--inh-caps=-sys_resource"), False),
    ],
    ids=["another user", "root without the capability"],
)
def test_limits_hold_whoever_sets_them(become: tuple[str, ...], may: bool) -> None:
    as_other = ["setpriv", *become, sys.executable, "-c"]
    if subprocess.run([*as_other, "import atroposlib.sandbox"], timeout=60).returncode != 0:
        pytest.skip("that user cannot read this interpreter or the package")

    result = subprocess.run([*as_other, WITHIN], capture_output=True, text=True, timeout=60)

    assert result.stdout == f"{may} AS (268435456, 268435456) 4 children 127\n", result.stderr


async def test_wait_for_the_end_of_a_closed_gate_leaves_the_number_of_its_box_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bubblewrap, "SET_UP_S", 1.0)
    sleeping = await asyncio.create_subprocess_exec("sleep", "600")
    with new_gate() as gate:
        number = gate._box = os.pidfd_open(sleeping.pid)
        gate._held.callback(os.close, number)
        waiting = asyncio.ensure_future(gate.wait_for_end())
        await asyncio.sleep(0)  # the caller is cancelled now, and closes the gate
    reading, writing = os.pipe()
    os.dup2(reading, number)
    arrived = asyncio.Event()
    asyncio.get_running_loop().add_reader(number, arrived.set)

    await waiting  # until its time limit
    os.write(writing, b"output")

    await asyncio.wait_for(arrived.wait(), 60)
    asyncio.get_running_loop().remove_reader(number)
    for fd in {reading, writing, number}:
        os.close(fd)
    sleeping.kill()
    await sleeping.wait()


def test_sandbox_is_used_by_one_event_loop_after_the_other() -> None:
    try:
        sandbox = Bubblewrap(limits=SandboxLimits(wall_s=60.0), max_parallel=1)
    except SandboxError as error:
        pytest.skip(str(error))

    async def run_several() -> list[str]:
        runs = (sandbox.run(["echo", "ran"]) for _ in range(5))
        return [result.stdout for result in await asyncio.gather(*runs)]

    assert [asyncio.run(run_several()) for _ in range(2)] == [["ran\n"] * 5] * 2
