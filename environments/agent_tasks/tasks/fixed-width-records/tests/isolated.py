"""Run code of an agent so that it reaches neither the files of the verifier nor its process.

`run_script` and `run_program` run Python code in a child that first imports what the code names,
then keeps only the system calls that computing needs (seccomp). The child cannot open a file, start
a program or send a signal; it returns data through its output. `run_command` runs any program in a
folder: it and its children send no signals, and where the kernel has Landlock they see the system's
programs and that folder only.
"""

import ast
import contextlib
import ctypes
import importlib
import importlib.abc
import importlib.util
import io
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

MAX_OUTPUT_BYTES = 1_000_000
MEMORY_BYTES = 1_000_000_000
# Modules that the standard library imports when a function is first called.
LAZY_MODULES = (
    *(
        "_strptime",
        "calendar",
        "collections.abc",
        "datetime",
        "decimal",
        "difflib",
        "encodings.ascii",
    ),
    *("encodings.cp1252", "encodings.latin_1", "encodings.utf_16", "encodings.utf_8_sig"),
    *("fractions", "io", "json", "linecache", "locale", "math", "re", "statistics", "string"),
    *("traceback", "typing", "unicodedata", "unittest", "unittest.case", "unittest.result"),
    *("unittest.suite", "unittest.util", "wsgiref.util", "zoneinfo"),
)
NOT_IMPORTED = {"antigravity", "idlelib", "test", "this", "tkinter", "turtle", "turtledemo"}

MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
COMPUTING = {
    # name: number on x86_64 and on aarch64
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "lseek": (8, 62),
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "writev": (20, 66), "sched_yield": (24, 124), "mremap": (25, 216), "madvise": (28, 233),
    "getpid": (39, 172), "exit": (60, 93), "gettimeofday": (96, 169), "getuid": (102, 174),
    "sigaltstack": (131, 132), "gettid": (186, 178), "futex": (202, 98),
    "restart_syscall": (219, 128), "clock_gettime": (228, 113), "clock_nanosleep": (230, 115),
    "exit_group": (231, 94), "getrandom": (318, 278),
}  # fmt: skip
REACHING_OTHERS = {
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "prlimit64": (302, 261), "io_uring_setup": (425, 425),
}  # fmt: skip
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 4, 22, 36, 38
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050001, 0x80000000
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
LANDLOCK_READ, LANDLOCK_ALL = 0b1101, 0x1FFF  # execute, read file, read folder; all of ABI 1
SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc", "/dev")

libc = ctypes.CDLL(None, use_errno=True)


class Instruction(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8),
        ("value", ctypes.c_uint32),
    ]  # fmt: skip


class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("start", ctypes.POINTER(Instruction))]


class Ruleset(ctypes.Structure):
    _fields_ = [("handled", ctypes.c_uint64)]


class PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32)]


def run_script(source, stdin="", *, timeout_s=5.0):
    """Return what a Python program prints, or None if it fails."""
    return _run_child({"sources": {}, "script": source, "stdin": stdin}, timeout_s)


def run_program(program, sources, data, *, timeout_s=10.0):
    """Return `result` of a program of the verifier that imports modules of the agent.

    Args:
        program: code that finds `data` and sets `result`.
        sources: the modules, by dotted name.
        data: values of JSON.
        timeout_s: seconds of processor time; the wall time is four times as long.
    """
    job = {"sources": sources, "program": program, "data": data}
    printed = _run_child(job, timeout_s)
    try:
        return None if printed is None else json.loads(printed.splitlines()[-1])
    except (ValueError, IndexError, RecursionError):
        return None


def run_command(command, folder, *, timeout_s=20.0):
    """Return the exit code and the output of a command in a folder, or None and text."""
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    job = json.dumps({"command": command, "folder": str(folder)})
    code, printed = _spawn(job, timeout_s)
    _end_descendants()
    return code, printed


def _run_child(job, timeout_s):
    sources = [*job["sources"].values(), job.get("script", "")]
    job["preload"] = [*LAZY_MODULES, *sorted(set(_imports(sources)))]
    job["timeout_s"] = timeout_s
    code, printed = _spawn(json.dumps(job), timeout_s)
    return printed if code == 0 else None


def _spawn(job, timeout_s):
    """Run this file as a child; its output goes to a file, whose size is limited."""
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            [sys.executable, "-I", "-B", "-X", "utf8", __file__],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT if '"command"' in job[:12] else subprocess.DEVNULL,
            env={"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8"},
            cwd="/",
            start_new_session=True,
        )
        try:
            child.communicate(job.encode(), timeout=4 * timeout_s)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        output.seek(0)
        printed = output.read(MAX_OUTPUT_BYTES).decode("utf-8", "replace")
    return child.returncode, printed


def _imports(sources):
    for source in sources:
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.Import):
                    yield from (alias.name for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    yield node.module
                    yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _end_descendants():
    while True:
        children = []
        for status in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                if int(status.read_text("latin-1").rpartition(")")[2].split()[1]) == os.getpid():
                    children.append(int(status.parent.name))
        if not children:
            return
        for child in children:
            with contextlib.suppress(OSError):
                os.kill(child, 9)
                os.waitpid(child, 0)


class SourceFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports modules from texts."""

    def __init__(self, sources):
        self.sources = sources

    def find_spec(self, name, path=None, target=None):
        if name not in self.sources:
            return None
        is_package = any(other.startswith(f"{name}.") for other in self.sources)
        return importlib.util.spec_from_loader(name, self, is_package=is_package)

    def exec_module(self, module):
        code = compile(self.sources[module.__name__], f"{module.__name__}.py", "exec")
        exec(code, module.__dict__)


def _child():
    job = json.loads(sys.stdin.buffer.read())
    if "command" in job:
        os.chdir(job["folder"])
        _hide_files(job["folder"])
        _limit(60)
        _filter_calls(REACHING_OTHERS, are_allowed=False)
        os.execvp(job["command"][0], job["command"])
    for name in job["preload"]:
        top = name.partition(".")[0]
        if top in sys.stdlib_module_names and top not in NOT_IMPORTED | job["sources"].keys():
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    sys.meta_path.insert(0, SourceFinder(job["sources"]))
    _limit(int(job["timeout_s"]) + 1)
    _filter_calls(COMPUTING, are_allowed=True)
    if "script" in job:
        sys.argv = ["program.py"]
        sys.stdin = io.TextIOWrapper(io.BytesIO(job["stdin"].encode()), encoding="utf-8")
        exec(compile(job["script"], "program.py", "exec"), {"__name__": "__main__"})
        return
    printed, sys.stdout = sys.stdout, io.StringIO()
    scope = {"data": job["data"], "__name__": "verifier"}
    exec(compile(job["program"], "verifier.py", "exec"), scope)
    printed.write(f"\n{json.dumps(scope['result'])}\n")
    printed.flush()


def _limit(cpu_s):
    for what, most in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, MAX_OUTPUT_BYTES),
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))


def _filter_calls(calls, *, are_allowed):
    audit, column = MACHINES[platform.machine()]
    listed, other = (ALLOW, REFUSE) if are_allowed else (REFUSE, ALLOW)
    code = [
        (0x20, 0, 0, 4), (0x15, 1, 0, audit), (0x06, 0, 0, KILL),  # the architecture
        (0x20, 0, 0, 0), (0x35, 0, 1, 0x40000000), (0x06, 0, 0, REFUSE),  # the call
    ]  # fmt: skip
    for numbers in calls.values():
        code += [(0x15, 0, 1, numbers[column]), (0x06, 0, 0, listed)]
    code.append((0x06, 0, 0, other))
    program = Program(len(code), (Instruction * len(code))(*code))
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "seccomp is not available")


def _hide_files(folder):
    """Leave the programs of the system and one folder, where the kernel has Landlock."""
    ruleset = Ruleset(LANDLOCK_ALL)
    rules = libc.syscall(LANDLOCK_CREATE, ctypes.byref(ruleset), ctypes.sizeof(ruleset), 0)
    if rules < 0:
        return
    for path, allowed in [*((path, LANDLOCK_READ) for path in SYSTEM), (folder, LANDLOCK_ALL)]:
        if path == "/dev":
            allowed |= 0b10  # /dev/null is written to
        if Path(path).is_dir():
            rule = PathRule(allowed, os.open(path, os.O_PATH))
            libc.syscall(LANDLOCK_ADD, rules, 1, ctypes.byref(rule), 0)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.syscall(LANDLOCK_RESTRICT, rules, 0) != 0:
        raise OSError(ctypes.get_errno(), "Landlock refused its rules")


if __name__ == "__main__":
    _child()
