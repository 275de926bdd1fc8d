"""The commands of podman and docker, on this machine or, over SSH, on another one.

    podman                        podman --runtime ... run ...
    docker+ssh://user@host:22     ssh ... -- user@host 'docker run ...'

Containers and their folders have names with the process that owns them, so that those of a process
that was killed are recognized.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from atroposlib.errors import ConfigError
from atroposlib.sandbox.interface import SandboxLimits
from atroposlib.sandbox.streams import Finished, run_bounded
from atroposlib.workspaces.interface import Network, WorkspaceError
from atroposlib.workspaces.network import is_running, process_name
from atroposlib.workspaces.transfer import tar_of

__all__ = [
    "KEEPER",
    "LABEL",
    "ContainerEngine",
    "EngineOptions",
    "Keeper",
    "as_options",
    "message_of",
    "new_name",
    "remote_folder",
]

LABEL = "atropos.workspace"
TIMEOUT_S = 120.0
READY_S = 120.0
END_S = 20.0
MESSAGE_BYTES = 1_000_000
MESSAGE_LINES = 15
KIND = re.compile(r"(podman|docker)(?:\+ssh://((?:[\w.-]+@)?[\w][\w.-]*)(?::([0-9]{1,5}))?/?)?")
VARIABLES = (
    *("HOME", "PATH", "USER", "LOGNAME", "TMPDIR", "XDG_RUNTIME_DIR", "SSH_AUTH_SOCK"),
    *("DBUS_SESSION_BUS_ADDRESS", "CONTAINERS_CONF", "CONTAINERS_STORAGE_CONF"),
    *("DOCKER_HOST", "DOCKER_CONFIG", "DOCKER_CONTEXT", "DOCKER_CERT_PATH", "DOCKER_TLS_VERIFY"),
)
"""Variables of this process that the programs need."""
BUILD = """
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT && tar -x -o -f - -C "$folder" && "$@" "$folder"
"""
KEEPER = """
mkdir -p "$1" 2>/dev/null
for name in dd tar stat; do command -v $name >/dev/null || missing="$missing $name"; done
echo "ready:$(command -v python3):$missing"
while read -r token; do
  while kill -KILL -1 2>/dev/null; do wait; done
  kills=0
  for file in /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control; do
    if [ -r "$file" ]; then
      while read -r name value; do [ "$name" = oom_kill ] && kills=$value; done < "$file"
    fi
  done
  echo "$token $kills"
done
"""
REMOTE_FOLDERS = "/tmp/atropos-container-"

_numbers = itertools.count()


@dataclass(frozen=True)
class EngineOptions:
    """Further options for the program of a container engine."""

    common: tuple[str, ...] = ()
    """Before each command, such as `--storage-driver`."""
    build: tuple[str, ...] = ()
    run: tuple[str, ...] = ()
    """Such as `--runtime NAME` or `--storage-opt size=10G`."""
    ssh: tuple[str, ...] = ()
    """Such as `-i FILE`."""


def as_options(options: EngineOptions | Mapping[str, Sequence[str]] | None) -> EngineOptions:
    """Return options from their fields, as configuration files have them.

    Raises:
        ConfigError: a field is unknown, or is not a list of strings.
    """
    if isinstance(options, EngineOptions):
        return options
    known = [field.name for field in fields(EngineOptions)]
    for name, words in (options or {}).items():
        if (
            name not in known
            or isinstance(words, str)
            or not all(isinstance(w, str) for w in words)
        ):
            raise ConfigError(
                f"options of a container engine: expected lists of strings named "
                f"{', '.join(known)}, got {name}: {words!r}"
            )
    return EngineOptions(**{name: tuple(words) for name, words in (options or {}).items()})


@dataclass(frozen=True)
class ContainerEngine:
    """Runs the program of a container engine.

    Args:
        kind: `podman`, `docker`, or either of them with `+ssh://[user@]host[:port]`.
        options: its options.

    Raises:
        ConfigError: the kind is unknown.
        WorkspaceError: the program is not installed here.
    """

    kind: str
    options: EngineOptions = EngineOptions()

    def __post_init__(self) -> None:
        found = KIND.fullmatch(self.kind)
        if found is None:
            raise ConfigError(
                f"expected podman, docker, podman+ssh://user@host or docker+ssh://user@host as the "
                f"kind of workspace, got {self.kind!r}"
            )
        here = "ssh" if found[2] else found[1]
        if shutil.which(here) is None:
            package = "openssh-client" if here == "ssh" else here
            raise WorkspaceError(
                f"{here} is not installed; on Debian and Ubuntu: apt-get install {package}"
            )

    @property
    def program(self) -> str:
        return self.kind.partition("+")[0]

    @property
    def is_remote(self) -> bool:
        return "+" in self.kind

    def words(self, *arguments: str, forwards: Sequence[tuple[str, str]] = ()) -> list[str]:
        """Return the command of a call of the engine.

        Args:
            arguments: command of the engine and its arguments.
            forwards: over SSH, sockets of the other machine that lead to sockets of this one.
        """
        words = [self.program, *self.options.common, *arguments]
        if not forwards:
            return self.shell("", *words) if self.is_remote else words
        opened = shlex.join(path for path, _ in forwards)
        return self.shell(f'chmod 666 {opened} && exec "$@"', *words, forwards=forwards)

    def shell(
        self, script: str, *arguments: str, forwards: Sequence[tuple[str, str]] = ()
    ) -> list[str]:
        """Return the command that runs a shell script on the machine of the engine.

        Args:
            script: the script; empty to run the arguments themselves.
            arguments: its arguments.
            forwards: see `words`.
        """
        words = ["sh", "-c", script, "sh", *arguments] if script else list(arguments)
        if not self.is_remote:
            return words
        found = KIND.fullmatch(self.kind)
        assert found is not None
        ssh = ["ssh", "-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15"]
        if forwards:  # a shared connection would keep them
            ssh += ["-o", "ExitOnForwardFailure=yes", "-o", "ControlPath=none"]
        for there, here in forwards:
            ssh += ["-R", f"{there}:{here}"]
        if found[3]:
            ssh += ["-p", found[3]]
        return [*ssh, *self.options.ssh, "--", found[2], shlex.join(words)]

    async def run(
        self,
        words: Sequence[str],
        *,
        stdin: bytes | int = b"",
        timeout_s: float = TIMEOUT_S,
        max_bytes: int = MESSAGE_BYTES,
    ) -> Finished:
        """Run a command of `words` or `shell` until it ends, writes too much or takes too long.

        Raises:
            WorkspaceError: it cannot be started or takes longer than `timeout_s`.
        """
        limits = SandboxLimits(wall_s=timeout_s, output_bytes=max_bytes)
        try:
            finished = await run_bounded(words, stdin=stdin, limits=limits, env=self.env())
        except OSError as error:
            raise WorkspaceError(f"{words[0]} cannot be started: {error}") from error
        if finished.stopped_for == "wall_time":
            raise WorkspaceError(f"{self.kind} did not end within {timeout_s:g} s")
        return finished

    async def call(self, *arguments: str, stdin: bytes | int = b"") -> str:
        """Run a command of the engine and return its output.

        Raises:
            WorkspaceError: it failed; the message has the end of its output.
        """
        finished = await self.run(self.words(*arguments), stdin=stdin)
        if finished.returncode != 0:
            raise WorkspaceError(f"{self.kind} {arguments[0]} failed: {message_of(finished)}")
        return finished.stdout.decode("utf-8", "replace").strip()

    def env(self) -> dict[str, str]:
        return {name: os.environ[name] for name in VARIABLES if name in os.environ}

    async def image_of(self, name: str) -> str | None:
        """Return the id of an image on the machine of the engine; None if it is not there."""
        finished = await self.run(self.words("image", "inspect", "--format", "{{.Id}}", name))
        return finished.stdout.decode().strip() if finished.returncode == 0 else None

    async def build(self, tag: str, context: Path, network: Network, *, timeout_s: float) -> None:
        """Build an image from a folder with a Dockerfile.

        Raises:
            ConfigError: the network of the build is an allowlist, which engines do not have.
            WorkspaceError: the build failed; the message has the end of its output.
        """
        if network.mode == "allowlist" or network.forwards:
            raise ConfigError(
                f"{context}: a build by {self.program} has the network `none` or `public`, not an "
                "allowlist and no forwards"
            )
        words = [self.program, *self.options.common, "build", "--force-rm", "--tag", tag]
        words += ["--label", f"{LABEL}=base"]
        words += ["--network", "none"] if network.mode == "none" else []
        words += self.options.build
        if not self.is_remote:
            finished = await self.run([*words, str(context)], timeout_s=timeout_s)
        else:
            with tar_of({"/": context}) as archive:
                command = self.shell(BUILD, *words)
                finished = await self.run(command, stdin=archive, timeout_s=timeout_s)
        if finished.returncode != 0:
            raise WorkspaceError(f"{context / 'Dockerfile'}: build failed: {message_of(finished)}")

    async def remove_abandoned(self) -> None:
        """Remove containers and folders of processes of this machine that were killed."""
        listed = await self.call("ps", "-a", "--filter", f"label={LABEL}", "--format", "{{.Names}}")
        if containers := [name for name in listed.splitlines() if _is_abandoned(name)]:
            await self.run(self.words("rm", "-f", *containers))
        if not self.is_remote:
            return
        found = await self.run(self.shell(f"ls -d {REMOTE_FOLDERS}* 2>/dev/null"))
        folders = [line for line in found.stdout.decode().splitlines() if _is_abandoned(line)]
        if folders:
            await self.run(self.shell('rm -rf -- "$@"', *folders))


def message_of(finished: Finished) -> str:
    """Return the last lines of the output of a command that failed, its errors last."""
    text = (finished.stdout[-20_000:] + b"\n" + finished.stderr[-20_000:]).decode(
        "utf-8", "replace"
    )
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-MESSAGE_LINES:]) or f"exit code {finished.returncode}"


def new_name() -> str:
    """Return a name for a container of this process."""
    return f"{_machine()}-{process_name(os.getpid())}-{next(_numbers)}"


def _machine() -> str:
    """Return a name of this machine, and of the time since it was started."""
    host = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
    return f"atropos-{host}-{boot}"


def _is_abandoned(name: str) -> bool:
    """Whether a container or folder is that of a process of this machine that has ended."""
    found = re.fullmatch(r".*(atropos-[0-9a-f]{8})-([0-9a-f]{8})-([0-9]+-[0-9]+)-[0-9]+", name)
    if found is None or not _machine().startswith(found[1]):
        return False
    return not _machine().endswith(found[2]) or not is_running(found[3])


def remote_folder(name: str) -> str:
    """Return the folder of a container on another machine."""
    return f"{REMOTE_FOLDERS}{name}"


class Keeper:
    """The process on this machine whose standard input keeps a container running."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.python = ""
        """Path of the Python interpreter of the image; empty if it has none."""
        self.num_memory_kills = 0

    @classmethod
    async def start(cls, words: Sequence[str], env: Mapping[str, str]) -> Keeper:
        """Start the container and wait until its first process runs.

        Raises:
            WorkspaceError: it does not start, or the image lacks a program.
        """
        with tempfile.TemporaryFile() as errors:
            process = await asyncio.create_subprocess_exec(
                *words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=env,
                start_new_session=True,
            )
            keeper = cls(process)
            try:
                line = await asyncio.wait_for(keeper.read(), READY_S)
                found = re.fullmatch(r"ready:(.*):(.*)", line)
                if found is None:
                    await process.wait()
                    errors.seek(0)
                    text = errors.read(2000).decode("utf-8", "replace").strip()
                    raise WorkspaceError(f"a container did not start: {text or line}")
            except asyncio.TimeoutError as error:
                await keeper.close()
                raise WorkspaceError(f"a container did not start in {READY_S:g} s") from error
            except BaseException:
                await keeper.close()
                raise
        keeper.python = found[1]
        if found[2]:
            await keeper.close()
            raise WorkspaceError(
                f"the image of a workspace lacks{found[2]}: add the packages to its Dockerfile"
            )
        return keeper

    @property
    def is_running(self) -> bool:
        return self._process.returncode is None

    async def read(self) -> str:
        assert self._process.stdout is not None
        return (await self._process.stdout.readline()).decode("utf-8", "replace").strip()

    async def end_processes(self) -> None:
        """End all processes of the container except the first one, and wait for their end.

        Raises:
            WorkspaceError: the container has ended, or its first process does not answer.
        """
        token = secrets.token_hex(8)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{token}\n".encode())
            await self._process.stdin.drain()
            line = await asyncio.wait_for(self._answer(token), END_S)
        except (OSError, asyncio.TimeoutError, ValueError) as error:
            await self.close()
            raise WorkspaceError("the container of a workspace has ended") from error
        self.num_memory_kills = int(line) if line.isdigit() else 0

    async def _answer(self, token: str) -> str:
        while line := await self.read():
            if line.startswith(token):
                return line.removeprefix(token).strip()
        raise ConnectionResetError

    async def close(self) -> None:
        """End the container: its first process reads the end of its input."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), END_S)
        except asyncio.TimeoutError:
            self._process.kill()
            await self._process.wait()
