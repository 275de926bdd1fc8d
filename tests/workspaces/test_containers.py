"""Workspaces in containers: of podman, of the program of docker, and over SSH."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import io
import os
import re
import signal
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

import atroposlib.workspaces
from atroposlib.agent_tasks.folder import load_task
from atroposlib.agent_tasks.runner import TaskRunner
from atroposlib.errors import ConfigError
from atroposlib.sandbox import SandboxLimits
from atroposlib.workspaces import (
    Base,
    EngineOptions,
    Network,
    Output,
    Workspace,
    WorkspaceContentError,
    WorkspaceError,
    Workspaces,
    WorkspaceSpec,
    open_workspaces,
)
from atroposlib.workspaces.container_engine import ContainerEngine, Keeper, new_name
from atroposlib.workspaces.container_saving import unpacked
from atroposlib.workspaces.containers import ContainerBase, ContainerWorkspaces
from tests.workspaces.containers import IMAGE, PLAIN_IMAGE, Engines, open_engines

pytestmark = pytest.mark.slow

LIMITS = SandboxLimits(
    wall_s=120.0, cpu_s=60, memory_bytes=2**28, max_processes=48, disk_bytes=2**26
)
SPEC = WorkspaceSpec("test", image=IMAGE, limits=LIMITS)
OWNER = """
import asyncio, json, os, signal, sys
from atroposlib.workspaces import EngineOptions, WorkspaceSpec, open_workspaces
async def main():
    kind, image, options = sys.argv[1], sys.argv[2], EngineOptions(**json.loads(sys.argv[3]))
    workspaces = open_workspaces(kind, engine_options=options)
    base = await workspaces.prepare(WorkspaceSpec("test", image=image))
    workspace = await base.fork()
    await workspace.run(["true"])
    asyncio.get_running_loop().create_task(workspace.run(["sleep", "1000"]))
    await asyncio.sleep(1)
    print("ready", flush=True)
    await asyncio.sleep(100)
asyncio.run(main())
"""


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    # podman refuses to keep its state in a folder whose path has more than 50 characters.
    with (
        TemporaryDirectory(prefix="podman-", ignore_cleanup_errors=True) as folder,
        open_engines(Path(folder)) as engines,
    ):
        yield engines


@pytest.fixture(
    scope="module",
    params=["podman", *(pytest.param(each, marks=pytest.mark.long) for each in ("docker", "ssh"))],
)
def engine(request: pytest.FixtureRequest, engines: Engines) -> Iterator[tuple[str, EngineOptions]]:
    with ExitStack() as held:
        if request.param == "podman":
            yield "podman", engines.options
        else:
            opened = engines.docker() if request.param == "docker" else engines.over_ssh()
            yield held.enter_context(opened)


@pytest.fixture
async def workspace(engine: tuple[str, EngineOptions]) -> AsyncIterator[Workspace]:
    """A workspace of each engine."""
    kind, options = engine
    async for each in _workspace(open_workspaces(kind, engine_options=options)):
        yield each


@pytest.fixture
async def local(engines: Engines) -> AsyncIterator[Workspace]:
    """A workspace of podman on this machine."""
    async for each in _workspace(open_workspaces("podman", engine_options=engines.options)):
        yield each


@pytest.fixture
async def workspaces(engines: Engines) -> AsyncIterator[Workspaces]:
    opened = open_workspaces("podman", engine_options=engines.options)
    yield opened
    await opened.close()
    assert engines.containers() == []


async def _workspace(workspaces: Workspaces) -> AsyncIterator[Workspace]:
    base = await workspaces.prepare(SPEC)
    yield await base.fork()
    await workspaces.close()


def archive_of(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for member, content in members:
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def names_in(archive: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        return members.getnames()


async def test_command_has_its_input_variables_folder_and_exit_code(workspace: Workspace) -> None:
    pieces: list[Output] = []
    result = await workspace.run(
        ["sh", "-c", 'cat; echo "$NAME"; pwd; echo problem >&2; exit 7'],
        env={"NAME": 'it\'s a "value"\n$HOME'},
        cwd="/tmp",
        stdin=b"input\n",
        on_output=pieces.append,
    )

    outputs = {
        stream: b"".join(piece.data for piece in result.output if piece.stream == stream)
        for stream in ("stdout", "stderr")
    }
    assert outputs["stdout"].decode() == 'input\nit\'s a "value"\n$HOME\n/tmp\n'
    assert outputs["stderr"] == b"problem\n"
    assert (result.exit_code, result.ended_by) == (7, "exit")
    assert b"".join(piece.data for piece in pieces if piece.stream == "stderr") == b"problem\n"


async def test_processes_of_a_command_end_with_it(workspace: Workspace) -> None:
    program = "(setsid sleep 1000 &); (setsid sh -c 'trap \"\" TERM; sleep 1000' &); sleep 0.2"
    await workspace.run(["sh", "-c", program])
    listed = await workspace.run(["ps"])

    assert "sleep 1000" not in listed.text


async def test_forward_is_reached_and_nothing_else(workspace: Workspace) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\n\r\nanswered\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        reached = await workspace.run(
            ["wget", "-qO-", "http://127.0.0.1:8000/"],
            network=Network(forwards={8000: f"127.0.0.1:{port}"}),
        )
        others = [
            await workspace.run(["wget", "-qO-", "-T", "2", f"http://{address}/"], network=network)
            for address, network in (
                (f"127.0.0.1:{port}", Network(forwards={8000: f"127.0.0.1:{port}"})),
                ("127.0.0.1:8000", Network()),
                ("169.254.169.254", Network()),
            )
        ]

    assert reached.text == "answered\n"
    assert [(result.exit_code, result.text) for result in others if result.is_success] == []


async def test_folders_are_attached_for_one_command(workspace: Workspace, tmp_path: Path) -> None:
    tests, logs = tmp_path / "tests", tmp_path / "logs"
    (tests / "sub").mkdir(parents=True)
    (tests / "sub" / "test.sh").write_text("echo secret\n")
    (tests / "link").symlink_to("sub/test.sh")
    logs.mkdir()
    (logs / "given").write_text("given\n")
    await workspace.run(["sh", "-c", "mkdir /tests; echo own > /tests/own"])
    program = "sh /tests/link; ls /tests; cat /logs/given; echo 1 > /logs/reward.txt"
    result = await workspace.run(
        ["sh", "-c", f"{program}; ln -s /etc/passwd /logs/passwd"],
        read_only={"/tests": tests},
        writable={"/logs": logs},
    )
    after = await workspace.run(["sh", "-c", "cat /tests/own; ls /tests; ls /logs 2>&1"])

    assert result.text == "secret\nlink\nsub\ngiven\n"
    assert sorted(path.name for path in logs.iterdir()) == ["given", "reward.txt"]
    assert after.text == "own\nown\nls: /logs: No such file or directory\n"


async def test_killed_owner_leaves_no_container_and_no_folder(
    engine: tuple[str, EngineOptions], engines: Engines, tmp_path: Path
) -> None:
    kind, options = engine
    before = _own_folders()
    owner = _start_owner(kind, options)
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"ready\n"
    assert engines.containers()

    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    num_checks = 0  # one that was being made may start and end later
    for _ in range(600):
        num_checks = 0 if engines.containers() else num_checks + 1
        if num_checks == 20:
            break
        await asyncio.sleep(0.05)
    assert num_checks == 20
    other = _start_owner(kind, options)  # removes what is left of the folders
    assert other.stdout is not None
    assert other.stdout.readline() == b"ready\n"
    owned = {folder for folder in _own_folders() - before if f"-{owner.pid}-" in folder}
    other.kill()
    other.wait()
    other.stdout.close()
    assert owned == set()


def _start_owner(kind: str, options: EngineOptions) -> subprocess.Popen[bytes]:
    import json

    words = [sys.executable, "-c", OWNER, kind, IMAGE, json.dumps(vars(options))]
    return subprocess.Popen(words, stdout=subprocess.PIPE)


def _own_folders() -> set[str]:
    return {str(path) for path in Path("/tmp").glob("atropos-*")}


async def test_limits_end_a_command_and_the_workspace_remains(local: Workspace) -> None:
    fork_bomb = "f() { f | f & }; f; exec sleep 1000"
    results = [
        await local.run(["sh", "-c", fork_bomb], limits=replace(LIMITS, wall_s=3.0)),
        await local.run(
            ["sh", "-c", "while :; do :; done"], limits=replace(LIMITS, cpu_s=1, wall_s=100.0)
        ),
        await local.run(["python3", "-c", "bytearray(2**30)"]),
        await local.run(["yes"], limits=replace(LIMITS, output_bytes=10_000)),
        await local.run(["sh", "-c", "kill -TERM $$"]),
        await local.run(["no-such-program"]),
        await local.run(["echo", "works"]),
    ]

    assert [result.ended_by for result in results] == [
        *("wall_time", "cpu_time", "memory", "output", "signal", "exit", "exit")
    ]
    assert [result.exit_code for result in results[4:]] == [128 + 15, 127, 0]
    assert sum(len(piece.data) for piece in results[3].output) == 10_000


async def test_cancelled_command_ends(local: Workspace) -> None:
    started = asyncio.Event()
    command = ["sh", "-c", "echo begun; sleep 1000"]
    running = asyncio.create_task(local.run(command, on_output=lambda _: started.set()))
    await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    listed = await local.run(["ps"])

    assert "sleep 1000" not in listed.text


async def test_program_of_the_engine_that_is_killed_is_an_error_and_not_the_end_of_the_command(
    local: Workspace,
) -> None:
    started = asyncio.Event()
    command = ["sh", "-c", "echo started; sleep 1000"]
    running = asyncio.create_task(local.run(command, on_output=lambda _: started.set()))
    await started.wait()
    _kill_commands_of_the_engine()

    with pytest.raises(WorkspaceError, match="podman, which ran sh, was ended by signal 9"):
        await running

    assert (await local.run(["echo", "again"])).text == "again\n"


def _kill_commands_of_the_engine() -> None:
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text().split():
            if b"\0exec\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(int(pid), signal.SIGKILL)


async def test_command_in_a_missing_folder_is_an_error(local: Workspace) -> None:
    with pytest.raises(WorkspaceError, match=r"echo could not be started: .*/missing"):
        await local.run(["echo"], cwd="/missing")


async def test_collect_returns_regular_files_and_folders_only(local: Workspace) -> None:
    program = """
mkdir -p d/e; echo a > d/a; ln d/a d/hard; ln -s /etc/passwd d/soft; mkfifo d/fifo
echo b > "d/new
line"; chmod 4755 d/a
"""
    await local.run(["sh", "-c", program])
    archive = await local.collect(["/app/d", "/app/missing", "/etc/group"], max_bytes=1000)

    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        modes = {member.name: member.mode for member in members}
        hard = members.extractfile("app/d/hard")
        assert hard is not None
        assert hard.read() == b"a\n"
    assert sorted(modes) == [
        *("app/d", "app/d/a", "app/d/e", "app/d/hard", "app/d/new\nline", "etc/group")
    ]
    assert modes["app/d/a"] == 0o755


async def test_collect_over_its_limit_is_an_error(local: Workspace) -> None:
    await local.run(["sh", "-c", "dd if=/dev/zero of=x bs=1 count=0 seek=60000000"])
    with pytest.raises(WorkspaceContentError, match="exceed 1000 bytes"):
        await local.collect(["/app/x"], max_bytes=1000)
    with pytest.raises(WorkspaceContentError, match="'/' cannot be collected"):
        await local.collect(["/"], max_bytes=1000)


async def test_put_writes_what_was_collected(workspaces: Workspaces) -> None:
    base = await workspaces.prepare(SPEC)
    first, second = await base.fork(), await base.fork()
    await first.run(["sh", "-c", "mkdir d; echo a > d/a; chmod 700 d/a; echo b > /root/b"])
    await second.put(await first.collect(["/app", "/root"], max_bytes=1000))
    listed = await second.run(["sh", "-c", "cat d/a /root/b; stat -c %a d/a"])

    assert listed.text == "a\nb\n700\n"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("../x", tarfile.REGTYPE),
        ("/etc/x", tarfile.REGTYPE),
        ("x", tarfile.SYMTYPE),
        ("x", tarfile.LNKTYPE),
        ("x", tarfile.CHRTYPE),
    ],
)
async def test_put_refuses_links_devices_and_other_paths(
    local: Workspace, name: str, kind: bytes
) -> None:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, "/etc/passwd"
    with pytest.raises(WorkspaceContentError, match="expected regular files and folders"):
        await local.put(archive_of((member, b"")))


async def test_changes_name_files_with_their_diffs(local: Workspace) -> None:
    program = """
mkdir empty sub; echo new > sub/new; sed -i s/root/changed/ /etc/group; rm /bin/vi
printf '\\377' > binary; ln -s sub link; touch /etc/passwd
"""
    await local.run(["sh", "-c", program])
    changes = {change.path: change for change in await local.changes()}

    assert {path: (change.kind, change.size) for path, change in changes.items()} == {
        "/app/binary": ("added", 1),
        "/app/empty/": ("added", 0),
        "/app/link": ("added", 3),
        "/app/sub/new": ("added", 4),
        "/bin/vi": ("removed", 0),
        "/etc/group": ("modified", 33),
    }
    assert changes["/app/sub/new"].diff == "--- /dev/null\n+++ /app/sub/new\n@@ -0,0 +1 @@\n+new\n"
    assert "-root:x:0:0" in str(changes["/etc/group"].diff)
    assert changes["/app/binary"].diff is None


SAVED_CHANGES = """
cd /app; mkdir -p new/empty; echo added > new/file; chmod 751 new/file; ln -s /etc/passwd new/link
ln new/file new/hard; rm /etc/gone; rm -r /etc/folder; chmod 1777 new/empty; mkfifo new/pipe
rm -f /etc/kind; mkdir /etc/kind; echo 1 > /etc/kind/inner; touch -d '2001-02-03 04:05:06' new/old
"""
SAVED_LISTING = """
cd /; for path in $(find app etc/gone etc/folder etc/kind ! -type p 2>/dev/null | sort); do
  if [ -d "$path" ] || [ -L "$path" ]; then stat -c '%N %a' "$path"
  else stat -c '%n %a %s %Y' "$path"; md5sum < "$path"; fi
done
"""


async def test_saved_container_is_loaded_into_another(
    workspaces: Workspaces, tmp_path: Path
) -> None:
    (tmp_path / "Dockerfile").write_text(
        f"FROM {PLAIN_IMAGE}\nWORKDIR /app\nRUN mkdir -p /etc/folder /app; touch /etc/folder/x; "
        "touch /etc/kind /etc/gone; echo kept > /app/kept\n"
    )
    spec = WorkspaceSpec("saved", source=tmp_path, limits=LIMITS)
    base = await workspaces.prepare(spec)
    first, second = await base.fork(), await base.fork()
    done = await first.run(["sh", "-c", SAVED_CHANGES])
    assert done.is_success, done
    wanted = (await first.run(["sh", "-c", SAVED_LISTING])).text
    archive = await first.save()
    mess = "rm -r /app/* /etc/gone; mkdir -p /app/kept /etc/gone; ln -s /etc /app/new"
    await second.run(["sh", "-c", f"{mess}; echo more > /app/more"])

    await second.load(archive)

    assert (await second.run(["sh", "-c", SAVED_LISTING])).text == wanted
    assert "new/hard" in wanted
    assert names_in(gzip.decompress(await second.save())) == names_in(gzip.decompress(archive))


@pytest.mark.parametrize(
    ("saved", "earlier"),
    [
        ("chmod 750 sub", "rm -r sub"),
        ("touch sub/new", "rm -r sub; touch sub"),
        ("rm -r sub; touch sub", "chmod 700 sub"),
        ("touch other", "chmod 700 sub; rm sub/x"),
    ],
)
async def test_folders_of_a_container_become_the_saved_ones(
    workspaces: Workspaces, tmp_path: Path, saved: str, earlier: str
) -> None:
    (tmp_path / "Dockerfile").write_text(
        f"FROM {PLAIN_IMAGE}\nWORKDIR /app\nRUN mkdir -p /app/sub; echo x > /app/sub/x\n"
    )
    base = await workspaces.prepare(WorkspaceSpec("folders", source=tmp_path, limits=LIMITS))
    first, second = await base.fork(), await base.fork()
    await first.run(["sh", "-c", saved])
    await second.run(["sh", "-c", earlier])

    await second.load(await first.save())

    listing = [
        "sh",
        "-c",
        "cd /app; find . -type f -exec cat {} +; find . | sort | xargs stat -c '%n %f'",
    ]
    assert (await second.run(listing)).text == (await first.run(listing)).text


async def test_archive_of_a_container_is_checked(local: Workspace) -> None:
    await local.run(["sh", "-c", "head -c 5000 /dev/zero > /tmp/large; ln -s /etc /tmp/link"])
    archive = await local.save()

    with pytest.raises(WorkspaceContentError, match="max_bytes, 4000 bytes"):
        await local.save(max_bytes=4000)
    with pytest.raises(WorkspaceContentError, match="max_bytes, 4000 bytes"):
        await local.load(archive, max_bytes=4000)
    with pytest.raises(WorkspaceContentError, match="another base"):
        unpacked(archive, "another", max_bytes=10_000)
    with pytest.raises(WorkspaceContentError, match="damaged"):
        await local.load(archive[:-9])


async def test_forks_are_made_in_advance_and_have_their_own_files(workspaces: Workspaces) -> None:
    base = await workspaces.prepare(SPEC)
    first = await base.fork()
    await first.run(["sh", "-c", "echo x > /app/x"])
    second = await base.fork()
    listed = await second.run(["ls", "/app"])

    assert listed.text == ""


async def test_dockerfile_is_built_once(workspaces: Workspaces, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(
        f"FROM {PLAIN_IMAGE}\nWORKDIR /work\nCOPY data .\nRUN date +%N > built\n"
    )
    (tmp_path / "data").write_text("data\n")
    spec = WorkspaceSpec("built", source=tmp_path, limits=LIMITS)
    texts = []
    for _ in range(2):
        base = await workspaces.prepare(spec)
        texts.append((await (await base.fork()).run(["sh", "-c", "pwd; cat data built"])).text)

    assert texts[0].startswith("/work\ndata\n")
    assert texts[0] == texts[1]


async def test_folder_without_dockerfile_is_added_to_the_image(
    workspaces: Workspaces, tmp_path: Path
) -> None:
    (tmp_path / "data").write_text("data\n")
    spec = WorkspaceSpec("added", source=tmp_path, image=PLAIN_IMAGE, limits=LIMITS)
    base = await workspaces.prepare(spec)
    result = await (await base.fork()).run(["sh", "-c", "pwd; cat data"])

    assert result.text == "/app\ndata\n"


async def test_failed_build_names_the_file_and_its_output(
    workspaces: Workspaces, tmp_path: Path
) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM {PLAIN_IMAGE}\nRUN echo reason && exit 3\n")
    with pytest.raises(WorkspaceError, match=r"Dockerfile: build failed: [^$]*reason"):
        await workspaces.prepare(WorkspaceSpec("failing", source=tmp_path))


async def test_network_without_python_is_an_error_with_the_remedy(workspaces: Workspaces) -> None:
    base = await workspaces.prepare(replace(SPEC, image=PLAIN_IMAGE))
    workspace = await base.fork()
    with pytest.raises(WorkspaceError, match=r"no python3.*add it to the Dockerfile"):
        await workspace.run(["true"], network=Network(forwards={8000: "127.0.0.1:1"}))


async def test_containers_of_killed_processes_are_removed_by_the_next_start(
    engines: Engines, workspaces: Workspaces
) -> None:
    ended = await asyncio.create_subprocess_exec("true")
    await ended.wait()
    own = new_name()
    names = [own.replace(f"-{os.getpid()}-", f"-{ended.pid}-"), own, "of-another-program"]
    for name in names:
        label = [] if name == names[-1] else ["--label", "atropos.workspace=fork"]
        engines.call("create", "--network", "none", "--name", name, *label, PLAIN_IMAGE, "true")

    await workspaces.prepare(SPEC)

    assert sorted(engines.containers()) == sorted(names[1:])
    engines.call("rm", *names[1:])


async def test_settings_that_cannot_work_are_errors(engines: Engines, tmp_path: Path) -> None:
    workspaces = open_workspaces("podman", engine_options=engines.options)
    with pytest.raises(ConfigError, match="need an image or a Dockerfile"):
        await workspaces.prepare(WorkspaceSpec("empty", source=tmp_path))
    (tmp_path / "Dockerfile").write_text(f"FROM {PLAIN_IMAGE}\n")
    network = Network("allowlist", allowed_hosts=("pypi.org",))
    with pytest.raises(ConfigError, match="not an allowlist"):
        await workspaces.prepare(WorkspaceSpec("allowlist", source=tmp_path, build_network=network))


@pytest.mark.parametrize("options", [{"other": ["--x"]}, {"run": "--x"}, {"run": [1]}])
def test_unknown_options_are_an_error(options: dict[str, list[str]]) -> None:
    with pytest.raises(ConfigError, match="named common, build, run, ssh, got"):
        open_workspaces("podman", engine_options=options)


@pytest.mark.parametrize("kind", ["podman+http://host", "docker+ssh://a b", "docker+ssh://-oX"])
def test_unknown_kind_is_an_error(kind: str) -> None:
    with pytest.raises(ConfigError, match="as the kind of workspace"):
        open_workspaces(kind)


def test_program_of_the_readme_runs(engines: Engines) -> None:
    readme = Path(atroposlib.workspaces.__file__).with_name("README.md").read_text(encoding="utf-8")
    programs = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    [program] = [program for program in programs if "EngineOptions" in program]

    subprocess.run([sys.executable, "-c", program], check=True)


async def test_program_has_no_rights_over_the_machine(local: Workspace) -> None:
    program = """
mount -t tmpfs none /mnt && echo mounted
mknod /dev/disk b 8 0 && echo device
echo 1 > /proc/sys/kernel/panic && echo kernel
rm -rf /run/atropos/network/* && touch /run/atropos/network/x && echo sockets
hostname other && echo hostname
ping -c 1 127.0.0.1 >/dev/null && echo raw
kill -9 1; sleep 0.1; echo remains
"""
    result = await local.run(["sh", "-c", program])
    stdout = b"".join(piece.data for piece in result.output if piece.stream == "stdout")

    assert stdout.decode().split() == ["remains"]


async def test_program_that_writes_to_the_keeper_does_not_stop_the_workspace(
    local: Workspace,
) -> None:
    program = "echo junk > /proc/1/fd/1; echo junk > /proc/1/fd/0; (setsid sleep 1000 &); sleep 0.2"
    await local.run(["sh", "-c", program])
    listed = await local.run(["ps"])

    assert listed.is_success
    assert "sleep 1000" not in listed.text


async def test_many_forks_leave_nothing(engines: Engines) -> None:
    workspaces = ContainerWorkspaces(ContainerEngine("podman", engines.options), warm=0)
    base = await workspaces.prepare(SPEC)
    await (await base.fork()).close()
    num_files_before, *before = _left(engines)
    for _ in range(5):
        workspace = await base.fork()
        await workspace.run(["true"], network=Network(forwards={8000: "127.0.0.1:1"}))
        await workspace.close()
    num_files, *after = _left(engines)
    await workspaces.close()

    assert after == before
    assert num_files <= num_files_before


def _left(engines: Engines) -> tuple[int, list[str], set[str]]:
    """Return the number of open files, without those that are garbage of earlier tests."""
    gc.collect()
    num_files = len(list(Path("/proc/self/fd").iterdir()))
    own = {path for path in _own_folders() if f"-{os.getpid()}-" in path}
    return num_files, engines.containers(), own


async def test_task_runs_in_containers(engine: tuple[str, EngineOptions], tmp_path: Path) -> None:
    kind, options = engine
    task = load_task(_task_folder(tmp_path))
    workspaces = open_workspaces(kind, engine_options=options)
    runner = TaskRunner(workspaces)
    oracle = await runner.run(task, "oracle")
    nothing = await runner.run(task, "nothing")
    await runner.close()
    await workspaces.close()

    assert (oracle.outcome, oracle.reward, oracle.error) == ("done", 1.0, "")
    assert (nothing.outcome, nothing.reward, nothing.error) == ("done", 0.0, "")
    assert [(change.path, change.kind) for change in oracle.changes] == [
        ("/work/answer.txt", "added"),
        ("/work/question.txt", "modified"),
    ]


def _task_folder(folder: Path) -> Path:
    files = {
        "task.toml": """
schema_version = "1.3"
[task]
name = "test/containers"
[environment]
network_mode = "no-network"
""",
        "instruction.md": "Write the answer.",
        "environment/Dockerfile": f"FROM {IMAGE}\nWORKDIR /work\nCOPY question.txt .\n",
        "environment/question.txt": "6 times 7?\n",
        "solution/solve.sh": "echo 42 > answer.txt; echo answered >> question.txt\n",
        "tests/test.sh": """
cd /work
if [ "$(cat answer.txt)" = 42 ] && grep -q answered question.txt; then reward=1; else reward=0; fi
echo $reward > /logs/verifier/reward.txt
""",
    }
    for name, text in files.items():
        path = folder / "task" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "task"


class _StandIn:
    """A workspace that is made when `ready` is set, and the owner of its base."""

    engine = None

    def __init__(self) -> None:
        self.ready = asyncio.Event()
        self.is_closed = False

    def forget(self, base: Base) -> None:
        return

    def making_room(self) -> contextlib.AbstractAsyncContextManager[None]:
        return contextlib.nullcontext()

    async def close(self) -> None:
        self.is_closed = True


class _SlowBase(ContainerBase):
    _owner: Any

    async def _new(self, *, is_counted: bool = True) -> Any:
        await self._owner.ready.wait()
        return self._owner


async def test_fork_that_starts_while_the_base_is_closed_leaves_no_container() -> None:
    made: Any = _StandIn()
    base = _SlowBase(made, WorkspaceSpec("slow"), "image", "/app")
    fork = asyncio.create_task(base.fork())
    await asyncio.sleep(0)

    await base.close()
    made.ready.set()

    with pytest.raises(WorkspaceError, match="the base of slow is closed"):
        await fork
    assert made.is_closed


async def test_greeting_before_a_container_is_an_error_that_shows_it() -> None:
    # As of a login shell of another machine; the program goes on reading its input.
    words = ["sh", "-c", "echo Welcome; cat > /dev/null"]

    with pytest.raises(WorkspaceError, match="did not start: Welcome"):
        await Keeper.start(words, dict(os.environ))
