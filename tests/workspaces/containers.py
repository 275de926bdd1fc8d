"""A container engine with an image made of programs of this machine, and an SSH server."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from atroposlib.workspaces import EngineOptions
from example_trainer.processes import find_free_port

__all__ = ["IMAGE", "PLAIN_IMAGE", "Engines", "open_engines", "write_root"]

IMAGE, PLAIN_IMAGE = "localhost/atropos-test:python", "localhost/atropos-test:plain"
LIMITS = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024")
MODULES = """
import __future__, asyncio, encodings.idna, http.client, sys, urllib.request
for module in list(sys.modules.values()):
    print(getattr(module, "__file__", None) or "")
"""
NEEDED = {
    "podman": "podman", "runc": "runc", "busybox": "busybox-static", "/usr/bin/python3": "python3"
}  # fmt: skip


@dataclass
class Engines:
    """The engine of a test session, whose images and containers are in a folder of their own."""

    folder: Path

    @property
    def podman(self) -> list[str]:
        return ["podman", *self.options.common]

    @property
    def options(self) -> EngineOptions:
        common = (
            *("--root", str(self.folder / "storage"), "--runroot", str(self.folder / "running")),
            *("--runtime", str(shutil.which("runc")), "--cgroup-manager", "cgroupfs"),
            *("--storage-driver", "vfs"),
        )
        return EngineOptions(common=common, build=LIMITS, run=LIMITS)

    def containers(self) -> list[str]:
        """Return the names of all containers."""
        listed = self.call("ps", "-a", "--format", "{{.Names}}")
        return listed.split()

    def call(self, *arguments: str) -> str:
        done = subprocess.run(
            [*self.podman, *arguments], capture_output=True, text=True, check=True, timeout=120
        )
        return done.stdout

    @contextmanager
    def docker(self) -> Iterator[tuple[str, EngineOptions]]:
        """Serve the API of podman to the program of docker."""
        if shutil.which("docker") is None:
            pytest.skip("docker is not installed")
        address = f"unix://{self.folder}/api.sock"
        server = subprocess.Popen([*self.podman, "system", "service", "-t", "0", address])
        try:
            _wait_for(lambda: (self.folder / "api.sock").exists())
            # podman refuses the limits of a build as docker's program sends them.
            yield "docker", EngineOptions(common=("--host", address), run=LIMITS)
        finally:
            _end(server)

    @contextmanager
    def over_ssh(self) -> Iterator[tuple[str, EngineOptions]]:
        """Serve SSH on this machine, with a key of its own."""
        sshd = shutil.which("sshd", path="/usr/sbin")
        if sshd is None or shutil.which("ssh") is None:
            pytest.skip("openssh-server and openssh-client are not installed")
        folder = self.folder / "ssh"
        folder.mkdir(exist_ok=True)
        for name in ("host", "key"):
            if not (folder / name).exists():
                words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
                subprocess.run(words, check=True)
        Path("/run/sshd").mkdir(exist_ok=True)
        port = find_free_port()
        settings = {
            "ListenAddress": f"127.0.0.1:{port}", "HostKey": folder / "host",
            "AuthorizedKeysFile": folder / "key.pub", "PidFile": "none", "StrictModes": "no",
            "PasswordAuthentication": "no", "UsePAM": "no", "PermitRootLogin": "yes",
        }  # fmt: skip
        words = [f"-o{name}={value}" for name, value in settings.items()]
        server = subprocess.Popen(
            [sshd, "-D", "-f", "/dev/null", *words], stderr=subprocess.DEVNULL
        )
        known = f"UserKnownHostsFile={folder / 'known'}"
        ssh = ["-i", str(folder / "key"), "-o", "StrictHostKeyChecking=no", "-o", known]
        ssh += ["-o", "IdentitiesOnly=yes", "-o", "LogLevel=ERROR", "-F", "/dev/null"]
        try:
            _wait_for(lambda: _accepts(port))
            options = self.options
            yield (
                f"podman+ssh://root@127.0.0.1:{port}",
                EngineOptions(options.common, build=LIMITS, run=LIMITS, ssh=tuple(ssh)),
            )
        finally:
            _end(server)


@contextmanager
def open_engines(folder: Path) -> Iterator[Engines]:
    """Provide podman with both images, or skip the test with the reason."""
    for program, package in NEEDED.items():
        if shutil.which(program) is None:
            pytest.skip(f"{package} is not installed")
    engines = Engines(folder)
    try:
        for name, has_python in ((IMAGE, True), (PLAIN_IMAGE, False)):
            root = folder / "root"
            write_root(root, has_python=has_python)
            subprocess.run(["tar", "-C", root, "-cf", folder / "root.tar", "."], check=True)
            engines.call("import", "-q", str(folder / "root.tar"), name)
            shutil.rmtree(root)
        engines.call("run", "--rm", "--network", "none", *LIMITS, PLAIN_IMAGE, "true")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"podman cannot run containers here: {error.stderr.strip()[-300:]}")
    try:
        yield engines
    finally:
        for name in engines.containers():
            engines.call("rm", "-f", name)


def write_root(root: Path, *, has_python: bool) -> None:
    """Write the files of an image: busybox, and Python with what the relay needs."""
    for name in ("bin", "tmp", "etc", "root", "home", "proc", "sys", "dev", "run", "usr/lib"):
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "lib").symlink_to("usr/lib")
    shutil.copy(str(shutil.which("busybox")), root / "bin/busybox")
    listed = subprocess.run(["busybox", "--list"], capture_output=True, text=True, check=True)
    for name in listed.stdout.split():
        if name != "busybox":
            (root / "bin" / name).symlink_to("busybox")
    for name in ("passwd", "group"):
        (root / "etc" / name).write_text("root:x:0:0:root:/root:/bin/sh\n")
    if has_python:
        _add_programs(root)


def _add_programs(root: Path) -> None:
    """Add Python with the modules that the relay needs, and bash."""
    words = ["/usr/bin/python3", "-I", "-S", "-c", MODULES]
    modules = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    programs = [
        "/usr/bin/python3",
        "/usr/bin/bash",
        *(each for each in modules if each.endswith(".so")),
    ]
    needed = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=True).stdout
    libraries = re.findall(r"(/\S+) \(", needed)
    for path in {*modules, *programs, *libraries}:
        place = root / path.lstrip("/").replace("lib/", "usr/lib/", 1).replace("usr/usr/", "usr/")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)
    (root / "bin/bash").symlink_to("../usr/bin/bash")


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _wait_for(is_true: Callable[[], bool]) -> None:
    for _ in range(600):
        if is_true():
            return
        time.sleep(0.05)
    raise TimeoutError


def _end(server: subprocess.Popen[bytes]) -> None:
    server.send_signal(signal.SIGTERM)
    server.wait(timeout=30)
