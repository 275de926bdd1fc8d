"""The program that makes the mounts of workspaces, each in a mount namespace of its own.

It is run as a script, needs only the standard library, and forks a child for each request. When its
client is killed, it ends the programs that the client has started in workspaces:

    control socket ─► request, reply socket ─► child ─► new namespace, mounts ─► reply, descriptors

A workspace is a descriptor of its namespace: when the last process in it has ended and the last
descriptor is closed, the kernel removes mounts and files, however the owner ended. Within the
namespace, a file system in memory covers /sys, which no workspace uses and every user can traverse:

    /sys/base      the base, read-only
    /sys/upper     what the workspace has changed, on top of the base
    /sys/merged    the root folder of the workspace
    /sys/binds     files and folders of the machine for one command
    /sys/network   sockets that lead out of the workspace, created by the client
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND = 1, 2, 4, 32, 4096
MS_REC, MS_PRIVATE = 16384, 1 << 18
MNT_DETACH, UMOUNT_NOFOLLOW = 2, 8
PR_SET_PDEATHSIG = 1
MAX_REQUEST_BYTES = 180_000
END = b"end"
"""Message of a client that ends in order."""
CLEAN_SCANS = 10
SCAN_PAUSE_S = 0.05
ROOT = "/sys"
COVERED = ("usr", "proc", "dev")
"""Folders of a workspace that are mounts of every command."""

libc = ctypes.CDLL(None, use_errno=True)


class MountError(Exception):
    """A request cannot be fulfilled; the message is sent to the client."""


def check(result: int, action: str) -> None:
    """Raise an error with the reason of the kernel unless the result of a call is 0."""
    if result != 0:
        raise MountError(f"{action}: {os.strerror(ctypes.get_errno())}")


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Call `mount` of the kernel."""
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind)]
    options = None if data is None else os.fsencode(data)
    check(libc.mount(*words, ctypes.c_ulong(flags), options), f"cannot mount {source}")


def new_namespace(user: int | None) -> list[int]:
    """Enter a new mount namespace, as root of a new user namespace if this is not root.

    Args:
        user: user of the files of the workspace; None if this is not root.
    """
    flags = CLONE_NEWNS | (CLONE_NEWUSER if user is None else 0)
    uid, gid = os.geteuid(), os.getegid()
    check(libc.unshare(flags), "cannot create a mount namespace")
    if user is None:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"0 {uid} 1"),
            ("gid_map", f"0 {gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123 - starts faster
                file.write(text)
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    names = ["mnt"] if user is not None else ["mnt", "user"]
    return [os.open(f"/proc/self/ns/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in names]


def fork(request: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """Create a workspace; reply with descriptors of its folder for sockets and its namespaces."""
    user = request["user"]
    namespaces = new_namespace(user)
    size = f"size={request['size']},nr_inodes={request['inodes']},mode=755"
    mount("atropos", ROOT, "tmpfs", MS_NOSUID | MS_NODEV, size)
    for name in ("base", "upper", "work", "merged", "binds", "network"):
        os.mkdir(f"{ROOT}/{name}", 0o755)  # noqa: PTH102 - starts faster
    mount(request["base"], f"{ROOT}/base", None, MS_BIND | MS_REC)
    with_flags = MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV
    libc.mount(None, f"{ROOT}/base".encode(), None, ctypes.c_ulong(with_flags), None)
    if user is not None:
        for name in ("upper", "merged"):
            os.chown(f"{ROOT}/{name}", user, user)
    network = os.open(f"{ROOT}/network", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fds = [network, *namespaces]
    kind = request["kind"]
    if kind in ("overlay", "any"):
        try:
            overlay(own_user=user is None)
            return {"kind": "overlay"}, fds
        except MountError:
            if kind == "overlay":
                raise
    copy(f"{ROOT}/base", f"{ROOT}/merged")
    return {"kind": "copy"}, fds


def overlay(*, own_user: bool) -> None:
    """Mount base and changes as one folder."""
    options = (
        f"lowerdir={ROOT}/base,upperdir={ROOT}/upper,workdir={ROOT}/work"
        ",redirect_dir=nofollow,metacopy=off,index=off"
    )
    kind_of_attributes = ",userxattr" if own_user else ""
    mount(
        "atropos", f"{ROOT}/merged", "overlay", MS_NOSUID | MS_NODEV, options + kind_of_attributes
    )


def copy(source: str, target: str) -> None:
    """Copy the files of a folder with owners and permissions."""
    words = ["cp", "-a", "--reflink=auto", "--", f"{source}/.", target]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        raise MountError(f"cannot copy the files: {done.stderr.strip()[-300:]}")


def enter(namespaces: list[int]) -> None:
    """Enter the namespaces of a workspace: mount, or mount and user."""
    for fd in reversed(namespaces):
        check(libc.setns(fd, 0), "cannot enter the workspace")


def attach(request: dict[str, Any]) -> None:
    """Mount files and folders of the machine at /sys/binds/0, 1, ... in place of earlier ones.

    Their places in the workspace are created, as the user of the workspace.
    """
    for name in sorted(os.listdir(f"{ROOT}/binds")):  # noqa: PTH208 - starts faster
        libc.umount2(f"{ROOT}/binds/{name}".encode(), MNT_DETACH | UMOUNT_NOFOLLOW)
    are_folders = []
    for number, (source, _) in enumerate(request["binds"]):
        place = f"{ROOT}/binds/{number}"
        are_folders.append(os.path.isdir(source))  # noqa: PTH112 - starts faster
        make_place(place, is_folder=are_folders[-1])
        mount(source, place, None, MS_BIND | MS_REC)
    if request["user"] is not None:
        os.setegid(request["user"])
        os.seteuid(request["user"])
    for (_, inside), is_folder in zip(request["binds"], are_folders, strict=True):
        make_inside(inside, is_folder=is_folder)


def make_place(place: str, *, is_folder: bool) -> None:
    """Create the place of a mount, which may be left from an earlier command of another kind."""
    if os.path.lexists(place):
        os.rmdir(place) if os.path.isdir(place) else os.unlink(place)  # noqa: PTH106, PTH108, PTH112
    if is_folder:
        os.mkdir(place, 0o755)  # noqa: PTH102 - starts faster
    else:
        os.close(os.open(place, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))


def make_inside(path: str, *, is_folder: bool) -> None:
    """Create a file or folder of the workspace without following its links."""
    *above, last = path.strip("/").split("/")
    if not last or ".." in path.split("/") or [*above, last][0] in COVERED:
        raise MountError(f"cannot mount at {path}: expected a path outside /usr, /proc and /dev")
    folder = os.open(f"{ROOT}/merged", os.O_RDONLY | os.O_DIRECTORY)
    try:
        for name in [*above, last] if is_folder else above:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o755, dir_fd=folder)
            within = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = within
        if not is_folder:
            flags = os.O_CREAT | os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            os.close(os.open(last, flags, 0o644, dir_fd=folder))
    except OSError as error:
        reason = f"cannot mount at {path}: {error.strerror or error}"
        raise MountError(f"{reason}; the workspace has a link or a file there") from error
    finally:
        os.close(folder)


def export(request: dict[str, Any]) -> None:
    """Copy the files of a workspace to a new folder of the machine."""
    copy(f"{ROOT}/merged", request["target"])


def answer(request: dict[str, Any], reply: socket.socket, namespaces: list[int]) -> None:
    """Fulfil one request and reply; without an answer the client sees the end of the socket."""
    fds: list[int] = []
    try:
        if request["do"] == "fork":
            answered, fds = fork(request)
        else:
            enter(namespaces)
            {"attach": attach, "export": export}[request["do"]](request)
            answered = {}
    except (MountError, OSError) as error:
        answered = {"error": str(error)}
    socket.send_fds(reply, [json.dumps(answered).encode()], fds)


def serve(control: socket.socket) -> bool:
    """Fork a child for each request; return whether the client ended without saying so."""
    while True:
        text, fds, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, 3)
        if not text or text == END:
            return not text
        if os.fork() == 0:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            with socket.socket(fileno=fds[0]) as reply:
                answer(json.loads(text), reply, fds[1:])
            os._exit(0)
        for fd in fds:
            os.close(fd)


def remove_groups(client: str) -> None:
    """Remove the control groups of a client, which are empty now."""
    for parent in ("atropos-sandbox", "*/atropos-sandbox"):
        for folder in Path("/sys/fs/cgroup").glob(f"{parent}/{client}-*"):
            with contextlib.suppress(OSError):
                folder.rmdir()


def end_boxes(mark: str) -> None:
    """End the boxes of a client that was killed, also those that were about to start.

    bubblewrap ends with its parent, except for the moments before it has asked the kernel to.
    """
    word = mark.encode()
    num_clean = 0
    while num_clean < CLEAN_SCANS:
        num_clean += 1
        for name in os.listdir("/proc"):  # noqa: PTH208 - starts faster
            if name.isdigit() and int(name) != os.getpid():
                with contextlib.suppress(OSError):
                    with open(f"/proc/{name}/cmdline", "rb") as file:  # noqa: PTH123
                        if word not in file.read().split(b"\0"):
                            continue
                    os.kill(int(name), signal.SIGKILL)
                    num_clean = 0
        time.sleep(SCAN_PAUSE_S)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.umask(0o022)
    if serve(socket.socket(fileno=0)):
        end_boxes(sys.argv[1])
        remove_groups(sys.argv[2])
