"""Programs that try to get out of the sandbox, to see others, or to use up the machine."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from atroposlib.sandbox import (
    KINDS,
    Sandbox,
    SandboxError,
    SandboxLimits,
    SandboxResult,
    open_sandbox,
    run_python,
)
from tests.sandbox.processes import children

LIMITS = SandboxLimits(wall_s=60.0, cpu_s=2, disk_bytes=2**20, output_bytes=10_000)


pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    """Every kind that can be used here; some find out by trials before the first program."""
    try:
        sandbox = open_sandbox(request.param, limits=LIMITS)
        await sandbox.run(["/usr/bin/true"])
    except SandboxError as error:
        pytest.skip(f"{request.param}: {error}")
    return sandbox


async def test_program_reads_its_input_and_its_files(sandbox: Sandbox) -> None:
    result = await run_python(
        sandbox,
        "print(input() + open('data/x.txt').read())",
        stdin="in",
        files={"data/x.txt": " file"},
    )

    assert (result.stdout, result.exit_code, result.ended_by) == ("in file\n", 0, "exit")


async def test_files_are_readable_whatever_the_umask_is(sandbox: Sandbox) -> None:
    before = os.umask(0o077)
    try:
        result = await sandbox.run(["cat", "data/x.txt"], files={"data/x.txt": "read"})
    finally:
        os.umask(before)

    assert result.stdout == "read"


async def test_exit_code_and_both_outputs_come_back(sandbox: Sandbox) -> None:
    result = await run_python(sandbox, "import sys; print('a'); sys.stderr.write('b'); sys.exit(7)")

    assert (result.stdout, result.stderr, result.exit_code) == ("a\n", "b", 7)
    assert not result.is_success


@pytest.mark.parametrize(
    ("program", "ending"),
    [
        ("while True: pass", "cpu_time"),
        ("import time; time.sleep(60)", "wall_time"),
        ("while True: print('x' * 1000)", "output"),
        ("import os, sys\nwhile True: os.write(2, b'x' * 1000)", "output"),
        ("import os; os.kill(os.getpid(), 11)", "signal"),
    ],
)
async def test_endless_program_is_ended(sandbox: Sandbox, program: str, ending: str) -> None:
    wall_s = 1.0 if ending == "wall_time" else LIMITS.wall_s
    result = await run_python(sandbox, program, limits=replace(LIMITS, wall_s=wall_s))

    assert result.ended_by == ending
    assert len(result.stdout) <= LIMITS.output_bytes


async def test_fork_bomb_stays_within_its_processes(sandbox: Sandbox) -> None:
    program = """
import os, time
started = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(30)
        started += 1
except OSError:
    print(started)
"""
    result = await run_python(sandbox, program)

    assert 0 < int(result.stdout) < LIMITS.max_processes


async def test_memory_bomb_gets_an_error_or_is_ended(sandbox: Sandbox) -> None:
    result = await run_python(
        sandbox,
        "held = []\nwhile True: held.append(bytearray(10**7))",
        limits=replace(LIMITS, memory_bytes=128 * 2**20, cpu_s=20),
    )

    assert "MemoryError" in result.stderr or result.ended_by == "memory"


@pytest.mark.parametrize("folder", ["/box", "/tmp", "/dev/shm"])
async def test_disk_is_bounded(sandbox: Sandbox, folder: str) -> None:
    program = f"""
for number in range(5):
    open('{folder}/' + str(number), 'wb').write(bytes(600_000))
"""
    result = await run_python(sandbox, program)

    assert "No space left on device" in result.stderr


@pytest.mark.parametrize(
    "path", ["/x", "/usr/x", "/usr/bin/python3", "/dev/x", "/proc/sys/kernel/hostname", "/etc/x"]
)
async def test_nothing_else_can_be_written(sandbox: Sandbox, path: str) -> None:
    result = await run_python(sandbox, f"open({path!r}, 'w').write('x')")

    assert result.exit_code == 1
    assert any(word in result.stderr for word in ("Read-only", "Permission", "No such file"))


async def test_files_of_the_machine_are_not_there(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    for path in (str(secret), "/etc/passwd", "/root", "/home", str(Path.home())):
        result = await run_python(sandbox, f"import os; print(os.path.exists({path!r}))")
        assert result.stdout == "False\n", path


async def test_links_lead_nowhere(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    program = f"""
import os
for target in ({str(secret)!r}, '/proc/1/root{secret}', '/proc/self/fd/../../../{secret}'):
    os.symlink(target, 'link')
    try:
        print(open('link').read())
    except OSError:
        print('closed')
    os.remove('link')
"""
    result = await run_python(sandbox, program)

    assert result.stdout == "closed\n" * 3


async def test_network_of_the_machine_is_not_there(sandbox: Sandbox) -> None:
    server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        result = await run_python(
            sandbox, f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)"
        )

    assert "ConnectionRefusedError" in result.stderr or "unreachable" in result.stderr


async def test_environment_of_the_parent_is_not_there(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_SECRET", "hidden")
    program = """
import glob, os
print(dict(os.environ))
for path in glob.glob('/proc/[0-9]*/environ'):
    try:
        print(open(path, 'rb').read())
    except OSError:
        pass
"""
    result = await run_python(sandbox, program)

    assert "HOME" in result.stdout
    assert "hidden" not in result.stdout


async def test_other_processes_are_not_there(sandbox: Sandbox) -> None:
    program = f"""
import os
print(sorted(int(name) for name in os.listdir('/proc') if name.isdigit()))
for pid in ({os.getpid()}, {os.getppid()}):
    try:
        os.kill(pid, 0)
        print('alive')
    except ProcessLookupError:
        print('unknown')
"""
    result = await run_python(sandbox, program)

    pids, *answers = result.stdout.splitlines()
    assert max(map(int, pids.strip("[]").split(","))) < 20
    assert answers == ["unknown", "unknown"]


async def test_signals_reach_only_its_own(sandbox: Sandbox) -> None:
    received: list[int] = []
    for number in (signal.SIGUSR1, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, received.append, number)
    try:
        result = await run_python(
            sandbox,
            "import os, signal\nfor s in (signal.SIGTERM, signal.SIGUSR1):\n"
            "    os.kill(1, s)\nprint('done')",
        )
    finally:
        for number in (signal.SIGUSR1, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(number)

    assert result.stdout in ("done\n", "")
    assert received == []


async def test_new_namespaces_are_refused(sandbox: Sandbox) -> None:
    result = await sandbox.run(["/usr/bin/unshare", "--user", "--map-root-user", "/usr/bin/id"])

    assert result.exit_code != 0
    assert "uid=0" not in result.stdout


async def test_program_has_no_capability_and_no_group_of_the_parent(sandbox: Sandbox) -> None:
    program = """
import os
rows = dict(line.split(':', 1) for line in open('/proc/self/status'))
print(rows['CapEff'].strip(), rows['CapPrm'].strip(), rows['CapBnd'].strip(), os.getgroups())
"""
    result = await run_python(sandbox, program)

    none = "0" * 16
    assert result.stdout in (f"{none} {none} {none} []\n", f"{none} {none} {none} [65534]\n")


async def test_what_tcp_holds_is_bounded(sandbox: Sandbox) -> None:
    program = """
import socket
listener, held, sent = socket.create_server(('127.0.0.1', 0)), [], 0
for _ in range(100):
    held += [socket.create_connection(listener.getsockname()), listener.accept()[0]]
    for each in held[-2:]:
        each.settimeout(0.01)
        try:
            while True:
                sent += each.send(bytes(65536))
        except OSError:
            pass
print(sent)
"""
    limits = replace(LIMITS, memory_bytes=2**26, cpu_s=30)
    result = await run_python(sandbox, program, limits=limits)

    assert result.ended_by in ("memory", "signal") or int(result.stdout) < 2**27


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can become others")
async def test_containers_have_users_of_their_own(sandbox: Sandbox) -> None:
    if sandbox.name == "bubblewrap":
        pytest.skip("it hides the user from the program")
    results = [await run_python(sandbox, "import os; print(os.getuid())") for _ in range(2)]

    users = {int(result.stdout) for result in results}
    assert len(users) == 2
    assert not users & {0, 65534}


async def test_children_end_with_the_program(sandbox: Sandbox, tmp_path: Path) -> None:
    before = children()
    result = await run_python(
        sandbox, "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\n"
    )

    assert result.ended_by == "exit"
    assert children() == before


async def test_cancelling_kills_the_program(sandbox: Sandbox) -> None:
    before = children()
    run = asyncio.create_task(run_python(sandbox, "import time; time.sleep(60)"))
    await asyncio.sleep(0.1)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run

    assert children() == before


@pytest.mark.parametrize("path", ["../x", "/etc/x", "", "a/../../x", "a\0b"])
async def test_file_outside_the_folder_is_refused(sandbox: Sandbox, path: str) -> None:
    with pytest.raises(ValueError, match="relative path"):
        await sandbox.run(["/usr/bin/true"], files={path: "x"})


async def test_unknown_program_says_so(sandbox: Sandbox) -> None:
    result = await sandbox.run(["no-such-program"])

    assert result.exit_code == 127
    assert "no-such-program" in result.stderr


async def test_programs_at_the_same_time_do_not_meet(sandbox: Sandbox) -> None:
    program = "import os, time; open('x', 'x'); time.sleep(0.05); print(os.listdir('/box'))"
    results: list[SandboxResult] = await asyncio.gather(
        *(run_python(sandbox, program) for _ in range(6))
    )

    assert all(result.is_success for result in results)


@pytest.fixture(scope="module", autouse=True)
def earlier_children() -> set[int]:
    """Processes that tests of other files have started, such as a cluster of this session."""
    return set(children())


async def test_nothing_is_left_behind(sandbox: Sandbox, earlier_children: set[int]) -> None:
    """The last test: neither the programs before nor these leave a group or a process."""
    for program in ("import os; os.fork()", "while True: print('x' * 1000)"):
        await run_python(sandbox, program)

    assert _groups() == []
    assert "bwrap" not in _programs(set(children()) - earlier_children)


def _groups() -> list[Path]:
    return list(Path("/sys/fs/cgroup").glob(f"**/atropos-sandbox/{os.getpid()}-*"))


def _programs(pids: set[int]) -> set[str]:
    files = [Path(f"/proc/{pid}/comm") for pid in pids]
    return {file.read_text().strip() for file in files if file.exists()}
