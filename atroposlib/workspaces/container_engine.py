"""The commands of podman and docker, on this machine or, over SSH, on another one.

    podman                        podman --runtime ... run ...
    docker+ssh://user@host:22     ssh ... -- user@host 'docker run ...'

Containers and their folders have names with the process that owns them, so that those of a process
that was killed are recognized.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import os
import re
import secrets
import shlex
import shutil
import socket
import stat
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, Protocol

from atroposlib.errors import ConfigError
from atroposlib.sandbox.interface import SandboxLimits
from atroposlib.sandbox.streams import Finished, run_bounded
from atroposlib.workspaces.interface import (
    Network,
    WorkspaceContentError,
    WorkspaceError,
    WorkspaceSpec,
)
from atroposlib.workspaces.network import (
    MOUNTED,
    NetworkGate,
    is_running,
    new_folder,
    process_name,
    remove_abandoned,
)
from atroposlib.workspaces.transfer import tar_of

__all__ = [
    "CAPABILITIES",
    "KEEPER",
    "LABEL",
    "ChangeKind",
    "ContainerEngine",
    "EngineOptions",
    "Keeper",
    "WorkspaceEngine",
    "as_options",
    "message_of",
    "new_name",
    "remote_folder",
]

LABEL = "atropos.workspace"
CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID")
"""Those of package managers and `su`, without those for devices, mounts or raw packets."""
OTHER_PROCESSES = 8
"""Processes of a container in addition to those of a command."""
ChangeKind = Literal["added", "modified", "removed"]
CHANGES: dict[str, ChangeKind] = {"A": "added", "C": "modified", "D": "removed"}
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
    known = [each.name for each in fields(EngineOptions)]
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


class WorkspaceEngine(Protocol):
    """Starts containers for workspaces, and runs commands in them."""

    @property
    def kind(self) -> str: ...

    @property
    def exit_notice(self) -> str:
        """Text that its program adds to standard error, with {} for an exit code other than 0."""

    async def open(self) -> None:
        """Prepare for the first base; remove what killed processes have left."""

    async def image_for(self, spec: WorkspaceSpec) -> str:
        """Return the image of a spec, built or pulled if it is not there.

        Raises:
            ConfigError: the engine cannot build it.
            WorkspaceError: the build failed.
        """

    async def workdir_of(self, image: str) -> str:
        """Return the working directory of an image; empty or `/` if it has none."""

    @property
    def is_full(self) -> bool:
        """Whether another container starts only after one was removed."""

    async def start(
        self,
        name: str,
        image: str,
        spec: WorkspaceSpec,
        workdir: str,
        *,
        is_counted: bool = True,
    ) -> Keeper:
        """Start a container and return its keeper, once it runs.

        Args:
            name: its name.
            image: its image.
            spec: its limits.
            workdir: folder that is created in it.
            is_counted: whether it waits while the engine is full.
        """

    async def remove(self, name: str) -> None:
        """Remove a container whose keeper has ended, or was not started, with its folder."""

    def exec_words(
        self,
        name: str,
        words: Sequence[str],
        *,
        user: str | None = None,
        forwards: Sequence[tuple[str, str]] = (),
    ) -> list[str]:
        """Return the command on this machine that runs one in a container."""

    def carried(
        self, name: str, network: Network, number: int
    ) -> contextlib.AbstractAsyncContextManager[tuple[NetworkGate, list[tuple[str, str]]]]:
        """Serve the network of command `number`; yields its gate and the forwards of its words."""

    async def changed(
        self, name: str, unchanged: Callable[[], Awaitable[str]]
    ) -> dict[str, ChangeKind]:
        """Return the paths that differ from the image; `unchanged` names a container without."""

    async def run(
        self,
        words: Sequence[str],
        *,
        stdin: bytes | int = b"",
        timeout_s: float = TIMEOUT_S,
        max_bytes: int = MESSAGE_BYTES,
    ) -> Finished:
        """Run a command on this machine until it ends, writes too much or takes too long."""

    def env(self) -> dict[str, str]:
        """Return the variables of such commands."""

    async def close(self) -> None:
        """End what `open` has started."""


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
    _folders: dict[str, Path] = field(default_factory=dict, repr=False, compare=False)
    """Folders with sockets on this machine, by container."""

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
    def exit_notice(self) -> str:
        return ""

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

    async def image_for(self, spec: WorkspaceSpec) -> str:
        """Return the id of the image of a spec, built or pulled if it is not there."""
        has_file = spec.source is not None and (spec.source / "Dockerfile").is_file()
        if spec.image is None and not has_file:
            raise ConfigError(
                f"{spec.name}: workspaces of the kind {self.kind} need an image or a Dockerfile in "
                f"{spec.source}"
            )
        if spec.image is not None and (has_file or not _has_files(spec.source)):
            return await self._pulled(spec, spec.image)
        assert spec.source is not None
        digest = await asyncio.to_thread(_digest, spec)
        tag = f"localhost/atropos-workspace:{digest[:32]}"
        found = await self.image_of(tag)
        if found is not None:
            return found
        if spec.image is not None:
            await self._pulled(spec, spec.image)
        with _context(spec) as context:
            await self.build(tag, context, spec.build_network, timeout_s=spec.build_timeout_s)
        return await self._found(tag)

    async def _pulled(self, spec: WorkspaceSpec, image: str) -> str:
        found = await self.image_of(image)
        if found is not None:
            return found
        words = self.words("pull", "--quiet", image)
        finished = await self.run(words, timeout_s=spec.build_timeout_s)
        if finished.returncode != 0:
            raise WorkspaceError(
                f"{spec.name}: the image {image} cannot be pulled: {message_of(finished)}"
            )
        return await self._found(image)

    async def _found(self, image: str) -> str:
        found = await self.image_of(image)
        if found is None:
            raise WorkspaceError(f"the image {image} was built but is not found")
        return found

    async def workdir_of(self, image: str) -> str:
        return await self.call("image", "inspect", "--format", "{{.Config.WorkingDir}}", image)

    @property
    def is_full(self) -> bool:
        return False  # the engine has no maximum

    async def start(
        self,
        name: str,
        image: str,
        spec: WorkspaceSpec,
        workdir: str,
        *,
        is_counted: bool = True,
    ) -> Keeper:
        folder = self._folder(name)
        if self.is_remote:
            made = await self.run(self.shell('mkdir -m 755 "$1"', str(folder)))
            if made.returncode != 0:
                raise WorkspaceError(f"{self.kind}: {message_of(made)}")
        else:
            self._folders[name] = folder = new_folder() / "sockets"
            folder.mkdir(mode=0o755)
            folder.chmod(0o755)
        limits = spec.limits
        words = ["run", "-i", "--rm", "--name", name, "--label", f"{LABEL}=fork"]
        words += ["--network", "none", "--pull", "never", "--hostname", "workspace"]
        words += ["--cap-drop", "ALL", *(f"--cap-add={each}" for each in CAPABILITIES)]
        words += ["--security-opt", "no-new-privileges", "--log-driver", "none"]
        words += ["--memory", str(limits.memory_bytes), "--memory-swap", str(limits.memory_bytes)]
        words += ["--pids-limit", str(limits.max_processes + OTHER_PROCESSES)]
        words += ["--shm-size", str(limits.disk_bytes), "--ulimit", "nofile=1024:1024"]
        words += ["--volume", f"{folder}:{MOUNTED}:ro", *self.options.run]
        words += ["--entrypoint", "sh", image, "-c", KEEPER, "sh", workdir]
        return await Keeper.start(self.words(*words), self.env())

    async def remove(self, name: str) -> None:
        # It removes itself at the end; this waits for that, or ends it where it does not.
        await self.run(self.words("rm", "-f", name))
        if self.is_remote:
            await self.run(self.shell('rm -rf -- "$1"', str(self._folder(name))))
        elif (folder := self._folders.pop(name, None)) is not None:
            await asyncio.to_thread(shutil.rmtree, folder.parent, ignore_errors=True)

    def exec_words(
        self,
        name: str,
        words: Sequence[str],
        *,
        user: str | None = None,
        forwards: Sequence[tuple[str, str]] = (),
    ) -> list[str]:
        as_user = [] if user is None else ["--user", user]
        return self.words("exec", "-i", *as_user, name, *words, forwards=forwards)

    @contextlib.asynccontextmanager
    async def carried(
        self, name: str, network: Network, number: int
    ) -> AsyncIterator[tuple[NetworkGate, list[tuple[str, str]]]]:
        folder = None
        if not self.is_remote:
            folder = self._folder(name) / str(number)
            folder.mkdir(mode=0o755)
            folder.chmod(0o755)
        async with NetworkGate(network, folder=folder, mounted=f"{MOUNTED}/{number}") as gate:
            there = self._folder(name) / str(number)
            yield gate, await self._send_relay(gate, there) if self.is_remote else []

    async def _send_relay(self, gate: NetworkGate, folder: Path) -> list[tuple[str, str]]:
        """Copy the relay to the other machine; return the sockets there and here."""
        (here,) = gate.mounts.values()
        script = 'mkdir -m 755 "$1" && cat > "$1/relay.py" && chmod 644 "$1/relay.py"'
        relay = await asyncio.to_thread((here / "relay.py").read_bytes)
        made = await self.run(self.shell(script, str(folder)), stdin=relay)
        if made.returncode != 0:
            raise WorkspaceError(f"{self.kind}: {message_of(made)}")
        return [(f"{folder}/{port}", f"{here}/{port}") for port in gate.ports]

    def _folder(self, name: str) -> Path:
        """Return the folder with the sockets of a container, on the machine of the engine."""
        return Path(remote_folder(name)) if self.is_remote else self._folders.get(name, Path())

    async def changed(
        self, name: str, unchanged: Callable[[], Awaitable[str]]
    ) -> dict[str, ChangeKind]:
        finished = await self.run(self.words("diff", name), max_bytes=64 * 2**20)
        if finished.returncode != 0 or finished.stopped_for is not None:
            raise WorkspaceContentError(f"changes cannot be listed: {message_of(finished)}")
        lines = finished.stdout.decode("utf-8", "surrogateescape").splitlines()
        found = [re.fullmatch(r"([ACD]) (/.+)", line) for line in lines]
        return {each[2]: CHANGES[each[1]] for each in found if each is not None}

    async def close(self) -> None:
        """Do nothing: containers end with their keepers."""

    async def open(self) -> None:
        """Remove containers and folders of processes of this machine that were killed."""
        remove_abandoned()
        listed = await self.call("ps", "-a", "--filter", f"label={LABEL}", "--format", "{{.Names}}")
        if containers := [name for name in listed.splitlines() if _is_abandoned(name)]:
            await self.run(self.words("rm", "-f", *containers))
        if not self.is_remote:
            return
        found = await self.run(self.shell(f"ls -d {REMOTE_FOLDERS}* 2>/dev/null"))
        folders = [line for line in found.stdout.decode().splitlines() if _is_abandoned(line)]
        if folders:
            await self.run(self.shell('rm -rf -- "$@"', *folders))


def _has_files(folder: Path | None) -> bool:
    return folder is not None and folder.is_dir() and any(folder.iterdir())


@contextlib.contextmanager
def _context(spec: WorkspaceSpec) -> Iterator[Path]:
    """Provide the build context: the source, or one that adds the source to an image."""
    assert spec.source is not None
    if spec.image is None:
        yield spec.source
        return
    with tempfile.TemporaryDirectory(prefix="atropos-context-") as folder:
        shutil.copytree(spec.source, Path(folder, "files"), symlinks=True)
        Path(folder, "Dockerfile").write_text(
            f"FROM {spec.image}\nWORKDIR {spec.workdir}\nCOPY files .\n"
        )
        yield Path(folder)


def _digest(spec: WorkspaceSpec) -> str:
    """Return a digest of all that determines the image."""
    assert spec.source is not None
    digest = hashlib.sha256(f"{spec.image}\n{spec.workdir}\n".encode())
    for path in sorted(spec.source.rglob("*")):
        mode = path.lstat().st_mode
        kind = stat.S_IFMT(mode) | (mode & 0o111)
        name = path.relative_to(spec.source).as_posix()
        content = b""
        if path.is_symlink():
            content = os.fsencode(path.readlink())
        elif path.is_file():
            content = hashlib.sha256(path.read_bytes()).digest()
        digest.update(f"{kind} {name!r} {content.hex()}\n".encode())
    return digest.hexdigest()


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
    async def start(
        cls, words: Sequence[str], env: Mapping[str, str], *, first_line: bytes = b""
    ) -> Keeper:
        """Start the container and wait until its first process runs, which reads `first_line`.

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
                keeper.write(first_line)
                line = await asyncio.wait_for(keeper.read(), READY_S)
                found = re.fullmatch(r"ready:(.*):(.*)", line)
                if found is None:
                    # It may wait for input, after a greeting of a login shell.
                    await keeper.close()
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

    def write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)

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
            self.write(f"{token}\n".encode())
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
