"""System calls of a program: one list, as BPF for bubblewrap and as rules for OCI runtimes.

    calls of another architecture           the process is killed
    calls newer than this page, clone3      ENOSYS; the C library falls back to an older one
    DENIED, new namespaces by clone         EPERM
    sockets except AF_UNIX, AF_INET(6)      EAFNOSUPPORT, such as AF_VSOCK, without a namespace
    UNCOUNTED, without a control group      EPERM: memory that no limit of a process counts
    extended attributes, without one        EOPNOTSUPP, for the same reason
    buffers of sockets, without one         ignored, with result 0

All other calls are allowed, since programs of many kinds run here. The filter is assembled here:
the Python bindings of libseccomp are unmaintained and need a library that bubblewrap does not have.

Source: the kernel's Documentation/userspace-api/seccomp_filter.rst, and its tables of numbers.
"""

from __future__ import annotations

import errno
import functools
import os
import socket
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = [
    "ATTRIBUTES",
    "DENIED",
    "FAMILIES",
    "UNCOUNTED",
    "call_filter",
    "call_rules",
    "has_filter",
]


class Architecture(NamedTuple):
    """The kernel's constant of an architecture, and the column of its numbers below."""

    audit: int
    column: int


MACHINES = {"x86_64": Architecture(0xC000003E, 0), "aarch64": Architecture(0xC00000B7, 1)}
LAST_CALL = 466
"""removexattrat of Linux 6.13; numbers above 423 mean the same on every architecture."""

DENIED: dict[str, tuple[int, int | None]] = {
    # name: number on x86_64 and on aarch64
    # keyrings, which belong to a user, not to a box
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    # observation of other programs' use of /usr
    "fanotify_init": (300, 262),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    # one program could take all requests that the machine may have (fs.aio-max-nr)
    "io_setup": (206, 0),
    # large parts of the kernel that such programs do not need
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "lookup_dcookie": (212, 18),
    "map_shadow_stack": (453, 453),
    "modify_ldt": (154, None),
    "nfsservctl": (180, 42),
    "remap_file_pages": (216, 234),
    "uselib": (134, None),
    "vmsplice": (278, 75),
    # file systems and namespaces
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "sysfs": (139, None),
    # the machine
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "settimeofday": (164, 170),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "ioperm": (173, None),
    "iopl": (172, None),
    "syslog": (103, 116),
    "vhangup": (153, 58),
}
UNCOUNTED: dict[str, tuple[int, int | None]] = {
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
}
"""Calls whose memory belongs to no process, so that RLIMIT_AS does not count it."""
ATTRIBUTES = ("setxattr", "lsetxattr", "fsetxattr", "setxattrat")
"""Some of these: `sed -i` and `cp -p` fail if they are forbidden, not if they are unsupported."""

FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
PROTOCOLS = (0, socket.IPPROTO_ICMP, socket.IPPROTO_TCP, socket.IPPROTO_UDP)
"""Other protocols would load kernel modules; for AF_UNIX, 1 is PF_UNIX."""
SETSOCKOPT = (54, 208)
BUFFERS = (socket.SO_SNDBUF, socket.SO_RCVBUF)
SOCKETS = {"socket": (41, 198), "socketpair": (53, 199)}
CLONE, CLONE3 = (56, 220), (435, 435)
NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""

LOAD, JUMP_EQUAL, JUMP_ABOVE, JUMP_AT_LEAST, JUMP_SET, RETURN = 0x20, 0x15, 0x25, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
"""Offsets in the kernel's `struct seccomp_data`."""
ALLOW, KILL_PROCESS, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000

PART = 8
"""Numbers compared one by one; the kernel evaluates the filter for each number when it is set."""

Instruction = tuple[int, int, int, int]
"""Operation, jumps if true and if false, and operand."""


def has_filter() -> bool:
    """Whether system calls can be filtered: a known architecture, and a kernel with seccomp."""
    status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
    return os.uname().machine in MACHINES and "\nSeccomp:" in status


@functools.cache
def call_filter(*, is_memory_counted: bool, machine: str | None = None) -> bytes:
    """Return the filter as an array of little-endian `struct sock_filter`.

    Args:
        is_memory_counted: whether a control group bounds the memory of a box.
        machine: `x86_64` or `aarch64`; None for that of this machine.
    """
    architecture = MACHINES[machine or os.uname().machine]
    column = architecture.column
    denied = {**DENIED, **({} if is_memory_counted else UNCOUNTED)}
    program: list[Instruction] = [
        (LOAD, 0, 0, ARCHITECTURE),
        *_return_unless(JUMP_EQUAL, architecture.audit, KILL_PROCESS),
        (LOAD, 0, 0, NUMBER),
        *_return_if(JUMP_ABOVE, LAST_CALL, ERRNO | errno.ENOSYS),  # includes calls of x32
        *_return_if(JUMP_EQUAL, CLONE3[column], ERRNO | errno.ENOSYS),
    ]
    for numbers in SOCKETS.values():
        program += _block(numbers[column], _socket_rules())
    is_new = _return_if(JUMP_SET, NAMESPACES, ERRNO | errno.EPERM)
    program += _block(CLONE[column], [_argument(0), *is_new])
    if not is_memory_counted:
        program += _block(SETSOCKOPT[column], _buffer_rules())
        for name in ATTRIBUTES:
            number = UNCOUNTED[name][column]
            assert number is not None
            program += _return_if(JUMP_EQUAL, number, ERRNO | errno.EOPNOTSUPP)
    refused = sorted(number for each in denied.values() if (number := each[column]) is not None)
    for start in range(0, len(refused), PART):
        program += _part(refused[start : start + PART])
    program.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)


def call_rules(*, is_memory_counted: bool, has_own_kernel: bool = False) -> dict[str, Any]:
    """Return the same as `linux.seccomp` of the configuration of an OCI runtime.

    The runtime kills processes that call another architecture. Calls unknown to its libseccomp, and
    calls newer than this page, are allowed.

    Args:
        is_memory_counted: whether a control group bounds the memory of a container.
        has_own_kernel: whether the runtime is gVisor. It supports only the error EPERM, with which
            clone3 would prevent threads, and its namespaces are not those of the machine.
    """
    denied = [*DENIED, *(() if is_memory_counted else UNCOUNTED)]
    return {
        "defaultAction": "SCMP_ACT_ALLOW",
        "syscalls": [
            _refused(denied, errno.EPERM),
            *(_refused(["clone"], errno.EPERM, flag) for flag in _flags(NAMESPACES)),
            # its flags are in memory, which a filter cannot read
            *([] if has_own_kernel else [_refused(["clone3"], errno.ENOSYS)]),
            *(_refused(SOCKETS, errno.EAFNOSUPPORT, other) for other in _others(0, FAMILIES)),
            *(_refused(SOCKETS, errno.EPROTONOSUPPORT, other) for other in _others(2, PROTOCOLS)),
        ],
    }


def _return_if(jump: int, operand: int, answer: int) -> list[Instruction]:
    return [(jump, 0, 1, operand), (RETURN, 0, 0, answer)]


def _return_unless(jump: int, operand: int, answer: int) -> list[Instruction]:
    return [(jump, 1, 0, operand), (RETURN, 0, 0, answer)]


def _argument(index: int) -> Instruction:
    """Load the lower half of an argument, which the kernel also reads as a C int."""
    return (LOAD, 0, 0, ARGUMENTS + 8 * index)


def _block(number: int, rules: Sequence[Instruction]) -> list[Instruction]:
    return [(JUMP_EQUAL, 0, len(rules) + 1, number), *rules, (RETURN, 0, 0, ALLOW)]


def _part(numbers: Sequence[int]) -> list[Instruction]:
    """Refuse these numbers, allow others up to the last one, and continue with larger ones."""
    jumps = [(JUMP_EQUAL, len(numbers) - place, 0, each) for place, each in enumerate(numbers)]
    answers = [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, ERRNO | errno.EPERM)]
    return [(JUMP_ABOVE, len(numbers) + 2, 0, numbers[-1]), *jumps, *answers]


def _socket_rules() -> list[Instruction]:
    rules = [_argument(0), *_return_unless_one_of(FAMILIES, ERRNO | errno.EAFNOSUPPORT)]
    return [*rules, _argument(2), *_return_unless_one_of(PROTOCOLS, ERRNO | errno.EPROTONOSUPPORT)]


def _return_unless_one_of(values: Sequence[int], answer: int) -> list[Instruction]:
    jumps = [(JUMP_EQUAL, len(values) - place, 0, value) for place, value in enumerate(values)]
    return [*jumps, (RETURN, 0, 0, answer)]


def _buffer_rules() -> list[Instruction]:
    """Ignore changes of socket buffers with result 0, since many programs request them."""
    ignored = [pair for each in BUFFERS for pair in _return_if(JUMP_EQUAL, each, ERRNO)]
    other = _return_unless(JUMP_EQUAL, socket.SOL_SOCKET, ALLOW)
    return [_argument(1), *other, _argument(2), *ignored]


def _refused(
    names: Iterable[str], number: int, condition: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return a rule with one condition; runtimes combine several conditions differently."""
    rule: dict[str, Any] = {"names": list(names), "action": "SCMP_ACT_ERRNO", "errnoRet": number}
    return rule if condition is None else {**rule, "args": [condition]}


def _flags(mask: int) -> list[dict[str, Any]]:
    flags = [1 << bit for bit in range(32) if mask >> bit & 1]
    return [
        {"index": 0, "value": flag, "valueTwo": flag, "op": "SCMP_CMP_MASKED_EQ"} for flag in flags
    ]


def _others(index: int, allowed: Sequence[int]) -> list[dict[str, Any]]:
    """Return conditions of which one is true if an argument is not one of these values."""
    highest = max(allowed)
    between = [value for value in range(highest) if value not in allowed]
    conditions = [{"index": index, "value": value, "op": "SCMP_CMP_EQ"} for value in between]
    return [*conditions, {"index": index, "value": highest, "op": "SCMP_CMP_GT"}]
