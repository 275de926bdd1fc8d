"""The filter of system calls: what it answers, and that programs of all kinds run under it."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import shutil
import socket
import struct
import sys
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import pytest_asyncio

from atroposlib.sandbox import KINDS, Sandbox, SandboxError, SandboxLimits, open_sandbox, run_python
from atroposlib.sandbox.bubblewrap import Bubblewrap
from atroposlib.sandbox.limits import ControlGroups
from atroposlib.sandbox.system_calls import (
    ATTRIBUTES,
    CLONE,
    CLONE3,
    DENIED,
    LAST_CALL,
    MACHINES,
    SETSOCKOPT,
    SOCKETS,
    UNCOUNTED,
    call_filter,
    call_rules,
)

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

LIMITS = SandboxLimits(wall_s=60.0, cpu_s=30)
MNEMONICS = {0x20: "load", 0x15: "equal", 0x25: "above", 0x35: "at_least", 0x45: "set", 0x06: "ret"}
ALLOWED, KILLED = "allowed", "killed"
X32 = 0x40000000
I386, ARM = 0x40000003, 0x40000028
NEW_NAMESPACES = (0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000)
THREAD = 0x3D0F00  # how the C library starts one


class Instruction:
    """One line of a program as the kernel reads it."""

    def __init__(self, code: int, if_true: int, if_false: int, operand: int) -> None:
        self.name = MNEMONICS[code]  # another is none that this filter needs
        self.jumps = (if_false, if_true)
        self.operand = operand


def disassemble(filter_bytes: bytes) -> list[Instruction]:
    return [Instruction(*fields) for fields in struct.iter_unpack("<HBBI", filter_bytes)]


def answer(program: list[Instruction], audit: int, number: int, *arguments: int) -> str | int:
    """What the kernel does with a call: `ALLOWED`, `KILLED` or the number of an error."""
    padded = (*arguments, *(0 for _ in range(6 - len(arguments))))
    data = struct.pack("<IIQ6Q", number, audit, 0, *padded)
    held, place = 0, 0
    while True:
        line = program[place]
        place += 1
        if line.name == "load":
            [held] = struct.unpack_from("<I", data, line.operand)
        elif line.name == "ret":
            verdicts = {0x7FFF0000: ALLOWED, 0x80000000: KILLED}
            return verdicts.get(line.operand) or line.operand - 0x50000
        else:
            is_true = {
                "equal": held == line.operand,
                "above": held > line.operand,
                "at_least": held >= line.operand,
                "set": bool(held & line.operand),
            }[line.name]
            place += line.jumps[is_true]


@pytest.fixture(params=sorted(MACHINES))
def machine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("is_counted", [True, False])
async def test_every_number_gets_the_answer_of_the_list(machine: str, is_counted: bool) -> None:
    program = disassemble(call_filter(is_memory_counted=is_counted, machine=machine))
    audit, column = MACHINES[machine]
    expected: dict[int | None, str | int] = dict.fromkeys(range(LAST_CALL + 1), ALLOWED)
    for numbers in {**DENIED, **({} if is_counted else UNCOUNTED)}.values():
        expected[numbers[column]] = errno.EPERM
    for name in () if is_counted else ATTRIBUTES:
        expected[UNCOUNTED[name][column]] = errno.EOPNOTSUPP
    for numbers in SOCKETS.values():  # of the family 0
        expected[numbers[column]] = errno.EAFNOSUPPORT
    expected[CLONE3[column]] = errno.ENOSYS
    expected.pop(None, None)

    assert {n: answer(program, audit, n) for n in range(LAST_CALL + 1)} == expected
    for number in (LAST_CALL + 1, LAST_CALL + 99, X32, X32 | 41, 2**31, 2**32 - 1):
        assert answer(program, audit, number) == errno.ENOSYS
    for other in {I386, ARM, 0, *(each.audit for each in MACHINES.values())} - {audit}:
        assert answer(program, other, 0) == answer(program, other, LAST_CALL) == KILLED


async def test_jumps_lead_forward_to_a_return(machine: str) -> None:
    program = disassemble(call_filter(is_memory_counted=False, machine=machine))

    assert len(program) < 4096  # what the kernel takes
    assert program[-1].name == "ret"
    for place, line in enumerate(program):
        assert place + 1 + max(line.jumps) < len(program) or line.name == "ret"


async def test_sockets_are_of_the_families_on_the_list(machine: str) -> None:
    program = disassemble(call_filter(is_memory_counted=True, machine=machine))
    audit, column = MACHINES[machine]
    open_families = {socket.AF_UNIX, socket.AF_INET, socket.AF_INET6}

    for numbers in SOCKETS.values():
        for family in (*range(64), 2**31, 2**32 - 1):
            for above in (0, 1 << 32, 0xFFFFFFFF << 32):  # which the kernel ignores
                got = answer(program, audit, numbers[column], family | above, 1, 0)
                assert got == (ALLOWED if family in open_families else errno.EAFNOSUPPORT), family
        for protocol in (0, 1, 6, 17, 33, 58, 132, 136, 255, 262):
            got = answer(program, audit, numbers[column], socket.AF_INET, 1, protocol)
            known = protocol in (0, 1, 6, 17)
            assert got == (ALLOWED if known else errno.EPROTONOSUPPORT), protocol


async def test_buffers_of_sockets_grow_only_where_they_are_counted(machine: str) -> None:
    audit, column = MACHINES[machine]
    for is_counted in (True, False):
        program = disassemble(call_filter(is_memory_counted=is_counted, machine=machine))
        for level in (0, 1, 6):
            for option in (2, 7, 8, 20):
                is_ignored = not is_counted and level == 1 and option in (7, 8)
                got = answer(program, audit, SETSOCKOPT[column], 3, level, option)
                assert got == (0 if is_ignored else ALLOWED), (is_counted, level, option)


async def test_threads_are_started_but_no_namespaces(machine: str) -> None:
    program = disassemble(call_filter(is_memory_counted=True, machine=machine))
    audit, column = MACHINES[machine]

    assert answer(program, audit, CLONE[column], THREAD) == ALLOWED
    for flag in NEW_NAMESPACES:
        assert answer(program, audit, CLONE[column], THREAD | flag) == errno.EPERM, hex(flag)


async def test_numbers_are_those_of_libseccomp(machine: str) -> None:
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        pytest.skip("libseccomp is missing")
    audit, column = MACHINES[machine]
    named = {**DENIED, **UNCOUNTED, **SOCKETS, "clone": CLONE, "clone3": CLONE3}
    named["setsockopt"] = SETSOCKOPT

    for name, numbers in named.items():
        known = library.seccomp_syscall_resolve_name_arch(ctypes.c_uint32(audit), name.encode())
        if known != -1:  # newer than the library
            assert (known if known >= 0 else None) == numbers[column], name


async def test_rules_of_containers_name_the_same_calls() -> None:
    rules = call_rules(is_memory_counted=False)["syscalls"]

    assert {*DENIED, *UNCOUNTED, *SOCKETS, "clone", "clone3"} == {
        name for rule in rules for name in rule["names"]
    }
    families = {
        condition["value"]
        for rule in rules
        if rule["errnoRet"] == errno.EAFNOSUPPORT
        for condition in rule["args"]
    }
    assert families == {0, 3, 4, 5, 6, 7, 8, 9, 10}  # the last: whatever is above


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    try:
        sandbox = open_sandbox(request.param, limits=LIMITS)
        await sandbox.run(["/usr/bin/true"])
    except SandboxError as error:
        pytest.skip(f"{request.param}: {error}")
    return sandbox


@pytest.fixture
def uncounted(tmp_path: Path) -> Bubblewrap:
    """A sandbox as on a machine whose control groups cannot be written."""
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is missing")
    return Bubblewrap(limits=LIMITS, groups=ControlGroups(tmp_path))


CALLS = """
import ctypes, errno, json, os
call = ctypes.CDLL(None, use_errno=True).syscall
answers = {}
for name, number in json.load(open('calls.json')).items():
    ctypes.set_errno(0)
    if call(ctypes.c_long(number), *[ctypes.c_long(-1)] * 6) == -1:
        answers[name] = errno.errorcode[ctypes.get_errno()]
    else:
        answers[name] = 'done'
print(json.dumps(answers))
"""


async def refused(sandbox: Sandbox, calls: dict[str, tuple[int, int | None]]) -> dict[str, str]:
    column = MACHINES[platform.machine()].column
    numbers = {name: each[column] for name, each in calls.items() if each[column] is not None}
    result = await run_python(sandbox, CALLS, files={"calls.json": json.dumps(numbers)})
    assert result.is_success, result
    answers: dict[str, str] = json.loads(result.stdout)
    assert answers.keys() == numbers.keys()
    return answers


async def test_denied_calls_are_refused_within(sandbox: Sandbox) -> None:
    answers = await refused(sandbox, DENIED)

    refusals = {"EPERM", "ENOSYS"} if sandbox.name == "gvisor" else {"EPERM"}
    assert {name: error for name, error in answers.items() if error not in refusals} == {}


async def test_requests_of_the_machine_cannot_be_reserved_within(sandbox: Sandbox) -> None:
    """One program could leave no asynchronous requests to the databases of the machine."""
    assert await refused(sandbox, {"io_setup": (206, 0)}) == {"io_setup": "EPERM"}


async def test_memory_that_no_limit_counts_is_refused_without_a_control_group(
    uncounted: Bubblewrap,
) -> None:
    answers = await refused(uncounted, UNCOUNTED)

    unsupported = errno.errorcode[errno.EOPNOTSUPP]
    expected = {name: unsupported if name in ATTRIBUTES else "EPERM" for name in answers}
    assert answers == expected


async def test_sockets_of_other_families_are_refused_within(sandbox: Sandbox) -> None:
    program = """
import errno, socket
for family in range(46):
    try:
        socket.socket(family, socket.SOCK_DGRAM).close()
        print(family, 'open')
    except OSError as error:
        print(family, errno.errorcode[error.errno])
for kind, protocol in ((socket.SOCK_STREAM, 132), (socket.SOCK_STREAM, 262), (socket.SOCK_RAW, 1)):
    try:
        socket.socket(socket.AF_INET, kind, protocol)
        print('open')
    except OSError as error:
        pass
"""
    result = await run_python(sandbox, program)

    answers = dict(line.split() for line in result.stdout.splitlines())
    others = {answers.pop(str(family)) for family in range(46) if family not in (1, 2, 10)}
    assert answers == {"1": "open", "2": "open", "10": "open"}
    assert others == {"EPERM" if sandbox.name == "gvisor" else "EAFNOSUPPORT"}


async def test_namespaces_are_refused_within(sandbox: Sandbox) -> None:
    program = """
import ctypes, errno, os, platform
call = ctypes.CDLL(None, use_errno=True).syscall
clone = {'x86_64': 56, 'aarch64': 220}[platform.machine()]
for flag in (0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
    pid = call(ctypes.c_long(clone), ctypes.c_long(flag | 17), *[ctypes.c_long(0)] * 4)
    if pid == 0:
        os._exit(0)
    print(errno.errorcode[ctypes.get_errno()] if pid == -1 else 'started')
"""
    result = await run_python(sandbox, program)

    assert result.stdout == "EPERM\n" * 7


@pytest.mark.skipif(platform.machine() != "x86_64", reason="of x86_64")
async def test_calls_of_another_architecture_end_the_program(sandbox: Sandbox) -> None:
    if sandbox.name == "gvisor":
        pytest.skip("gVisor takes it for the call of x86_64 with that number, and filters it")
    program = r"""
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(b'\x53\xb8\x14\x00\x00\x00\xcd\x80\x5b\xc3')  # push rbx; getpid of i386; pop rbx; ret
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
print(ctypes.CFUNCTYPE(ctypes.c_int)(address)())
"""
    result = await run_python(sandbox, program)

    assert (result.stdout, result.ended_by) == ("", "signal")


PROGRAMS = {
    "threads": """
import concurrent.futures, threading
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    print(sum(pool.map(abs, range(5))))
""",
    "processes": """
import multiprocessing
if __name__ == '__main__':
    for method in ('fork', 'spawn', 'forkserver'):
        context = multiprocessing.get_context(method)
        with context.Pool(2) as pool:
            assert pool.map(abs, range(5)) == [0, 1, 2, 3, 4], method
    queue = multiprocessing.Queue()
    child = multiprocessing.Process(target=queue.put, args=(10,))
    child.start()
    print(queue.get())
    child.join()
""",
    "shared memory": """
from multiprocessing import shared_memory
shared = shared_memory.SharedMemory(create=True, size=100)
shared.buf[0] = 10
other = shared_memory.SharedMemory(shared.name)
print(other.buf[0])
other.close()
shared.unlink()
""",
    "asyncio": """
import asyncio
async def main():
    server = await asyncio.start_server(lambda r, w: (w.write(b'10'), w.close()), '127.0.0.1', 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    child = await asyncio.create_subprocess_exec('/usr/bin/echo', stdout=asyncio.subprocess.PIPE)
    await child.communicate()
    await asyncio.to_thread(abs, 1)
    print((await reader.read()).decode())
asyncio.run(main())
""",
    "names of hosts": """
import socket
socket.getaddrinfo('127.0.0.1', 80, type=socket.SOCK_STREAM)
a, b = socket.socketpair()
a.send(b'10')
print(b.recv(9).decode())
""",
    "subprocess": """
import subprocess
print(subprocess.run('echo 10 | cat', shell=True, capture_output=True, text=True).stdout.strip())
""",
    "sqlite": """
import sqlite3
for place in (':memory:', 'x.sqlite'):
    with sqlite3.connect(place) as base:
        base.execute('pragma journal_mode = wal')
        base.execute('create table t (x)')
        base.executemany('insert into t values (?)', [(1,), (9,)])
        [(total,)] = base.execute('select sum(x) from t')
print(total)
""",
    "files": """
import mmap, os, shutil, tempfile
with tempfile.TemporaryDirectory() as folder:
    open(f'{folder}/a', 'w').write('10')
    shutil.copytree(folder, 'copy')
    shutil.copy2('copy/a', 'b')
    with open('b', 'r+b') as file, mmap.mmap(file.fileno(), 0) as mapped:
        print(mapped[:].decode())
""",
    "signals": """
import select, signal, time
signal.signal(signal.SIGALRM, lambda *_: print(10))
signal.setitimer(signal.ITIMER_REAL, 0.05)
select.select([], [], [], 0.3)
select.epoll().close()
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
async def test_usual_programs_run(sandbox: Sandbox, name: str) -> None:
    result = await run_python(sandbox, PROGRAMS[name])

    assert (result.stdout, result.exit_code) == ("10\n", 0), result.stderr


@pytest.mark.parametrize("name", PROGRAMS)
async def test_usual_programs_run_without_a_control_group(uncounted: Bubblewrap, name: str) -> None:
    result = await run_python(uncounted, PROGRAMS[name])

    assert (result.stdout, result.exit_code) == ("10\n", 0), result.stderr


@pytest.mark.skipif(not Path("/usr/bin/gcc").exists(), reason="gcc is missing")
async def test_compiled_program_runs(sandbox: Sandbox) -> None:
    source = (
        '#include <stdio.h>\nint main(void) { int x; scanf("%d", &x); printf("%d\\n", x + 1); }'
    )
    command = "/usr/bin/gcc -B /usr/bin -O1 -o /tmp/x x.c && exec /tmp/x"
    limits = replace(LIMITS, memory_bytes=2**30)

    result = await sandbox.run(
        ["/bin/sh", "-c", command], files={"x.c": source}, stdin="9", limits=limits
    )

    assert result.stdout == "10\n", result.stderr


async def test_installed_packages_run() -> None:
    """Numpy's threads and pytest, from the folder of packages of this interpreter."""
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is missing")
    packages = Path(numpy.__file__).parents[1]
    if packages.is_relative_to("/tmp"):
        pytest.skip("the packages are below /tmp, which is another folder within")
    sandbox = Bubblewrap(limits=replace(LIMITS, memory_bytes=2**32), read_only=[str(packages)])
    head = f"import sys\nsys.path.insert(0, {str(packages)!r})\n"
    try:
        version = await run_python(sandbox, "import sys; print(*sys.version_info[:2])")
    except SandboxError as error:
        pytest.skip(f"the packages cannot be read within: {error}")
    if version.stdout.split() != [str(part) for part in sys.version_info[:2]]:
        pytest.skip("the interpreter in the sandbox cannot load the packages of this one")
    program = """
import numpy
a = numpy.arange(250_000.0).reshape(500, 500) % 7
assert (a @ a).shape == (500, 500)
import pytest
raise SystemExit(pytest.main(['-q', '-p', 'no:cacheprovider', 'test_it.py']))
"""
    tests = (
        "import subprocess\ndef test_it(tmp_path): subprocess.run(['/usr/bin/true'], check=True)"
    )

    result = await run_python(sandbox, head + program, files={"test_it.py": tests})

    assert result.is_success, result
    assert "1 passed" in result.stdout


async def test_filter_is_on_for_every_process(sandbox: Sandbox) -> None:
    program = "print([line for line in open('/proc/self/status') if line.startswith('Seccomp:')])"

    result = await run_python(sandbox, program)

    assert "2" in result.stdout
    assert os.uname().machine in MACHINES
