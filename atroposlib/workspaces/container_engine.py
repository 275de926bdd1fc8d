"""The commands of podman and docker, on this machine or, over SSH, on another one.

    podman                        podman --runtime ... run ...
    docker+ssh://user@host:22     ssh ... -- user@host 'docker run ...'

Containers and their folders have names with the process that owns them, so that those of a process
that was killed are recognized.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import shlex
import shutil
import socket
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from atroposlib.errors import ConfigError
from atroposlib.sandbox.interface import SandboxLimits
from atroposlib.sandbox.streams import Finished, run_bounded
from atroposlib.workspaces.interface import Network, WorkspaceError
from atroposlib.workspaces.network import is_running, process_name

__all__ = ["LABEL", "ContainerEngine", "message_of", "new_name", "remote_folder", "tar_of"]

LABEL = "atropos.workspace"
TIMEOUT_S = 120.0
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
REMOTE_FOLDERS = "/tmp/atropos-container-"

_numbers = itertools.count()


@dataclass(frozen=True)
class ContainerEngine:
    """Runs the program of a container engine.

    Args:
        kind: `podman`, `docker`, or either of them with `+ssh://[user@]host[:port]`.
        options: options before the command, such as `--runtime`.
        build_options: options of `build`.
        run_options: options of `run`.
        ssh_options: options of `ssh`, such as `-i FILE`.

    Raises:
        ConfigError: the kind is unknown.
        WorkspaceError: the program is not installed here.
    """

    kind: str
    options: tuple[str, ...] = ()
    build_options: tuple[str, ...] = ()
    run_options: tuple[str, ...] = ()
    ssh_options: tuple[str, ...] = ()

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
        words = [self.program, *self.options, *arguments]
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
        return [*ssh, *self.ssh_options, "--", found[2], shlex.join(words)]

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
        words = [self.program, *self.options, "build", "--force-rm", "--tag", tag]
        words += ["--label", f"{LABEL}=base"]
        words += ["--network", "none"] if network.mode == "none" else []
        words += self.build_options
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
    return f"{REMOTE_FOLDERS}{name}"


@contextlib.contextmanager
def tar_of(sources: Mapping[str, Path | None]) -> Iterator[int]:
    """Provide a tar archive of files and folders of this machine, links included.

    Args:
        sources: the files and folders by absolute path in the archive; None for an empty folder
            that everyone may write to.

    Returns:
        Descriptor of a temporary file.
    """
    with tempfile.TemporaryFile() as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as archive:
            for inside, source in sources.items():
                if source is None:
                    folder = tarfile.TarInfo(inside.strip("/"))
                    folder.type, folder.mode = tarfile.DIRTYPE, 0o777
                    archive.addfile(folder)
                else:
                    archive.add(source, inside.strip("/") or ".", filter=_of_root)
        file.seek(0)
        yield file.fileno()


def _of_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member
