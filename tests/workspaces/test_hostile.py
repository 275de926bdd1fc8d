"""Programs that try to leave a workspace, to outlive it, to forge what is read, or to fill it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import os
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from atroposlib.sandbox import SandboxLimits
from atroposlib.workspaces import (
    Base,
    CommandResult,
    Workspace,
    WorkspaceContentError,
    WorkspaceError,
    WorkspaceSpec,
)
from atroposlib.workspaces.local import LocalBase, LocalWorkspaces

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

LIMITS = SandboxLimits(
    wall_s=60.0, cpu_s=30, memory_bytes=2**28, max_processes=24, disk_bytes=2**24
)
REPOSITORY = Path(__file__).parents[2]
SECONDS = 100_000 + os.getpid()
MARK = "atropos-hostile-test"


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["overlay", "copy"])
async def base(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Base]:
    folder = tmp_path_factory.mktemp("workspaces")
    (folder / "source").mkdir()
    (folder / "source" / "kept.txt").write_text("kept\n")
    try:
        workspaces = LocalWorkspaces(cache=folder / "cache", kind=request.param)
        base = await workspaces.prepare(
            WorkspaceSpec("hostile", source=folder / "source", limits=LIMITS)
        )
    except WorkspaceError as error:
        pytest.skip(str(error))
    yield base
    await workspaces.close()  # which finds the base unchanged


@pytest_asyncio.fixture(loop_scope="module")
async def workspace(base: Base) -> AsyncIterator[Workspace]:
    workspace = await base.fork()
    yield workspace
    await workspace.close()


async def shell(workspace: Workspace, text: str, **options: object) -> CommandResult:
    return await workspace.run(["bash", "-c", text], **options)  # type: ignore[arg-type]


async def python(workspace: Workspace, text: str, **options: object) -> CommandResult:
    return await workspace.run(["python3", "-c", text], **options)  # type: ignore[arg-type]


def names(archive: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        return members.getnames()


def archive_of(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for member, content in members:
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


async def test_there_is_no_network(workspace: Workspace) -> None:
    program = """
import socket
print(open('/proc/net/dev').read().count(':'))
for address in ('1.1.1.1', '169.254.169.254', '10.0.0.1'):
    try:
        socket.create_connection((address, 80), timeout=5)
        print('connected')
    except OSError:
        print('refused')
"""
    result = await python(workspace, program)

    assert result.text.split() == ["1", "refused", "refused", "refused"]


async def test_machine_and_other_workspaces_are_not_visible(
    base: Base, workspace: Workspace, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    other = await base.fork()
    await shell(other, "echo other > /tmp/other; echo other > /app/other")

    result = await shell(
        workspace,
        f"cat {secret} /tmp/other /app/other /etc/shadow; ls /home /sys /boot /oldroot /newroot "
        "/usr/../sys; find / -name secret -not -path '/proc/*'; "
        "ls -d /proc/[0-9]* | wc -l",
    )
    await other.close()

    output = b"".join(piece.data for piece in result.output if piece.stream == "stdout").split()
    assert output[:2] == [b"/home:", b"agent"]
    assert int(output[2]) < 6


async def test_only_the_workspace_is_writable(base: Base, workspace: Workspace) -> None:
    result = await shell(
        workspace,
        "touch /usr/x /usr/bin/x /dev/x /proc/sys/kernel/hostname && echo written; "
        "echo 1 > /proc/sys/kernel/ns_last_pid && echo written;"
        "mount -t tmpfs none /mnt && echo mounted; umount -l /usr && echo unmounted;"
        "mv /usr /usr2 && echo moved; unshare -Ur true && echo unshared; "
        "chroot / true && echo chrooted; mknod /app/sda b 8 0 && echo made;"
        "rm -rf /app /etc /tmp/* /home; echo changed > /kept.txt",
    )
    other = await base.fork()
    kept = await shell(other, "cat /app/kept.txt /etc/hostname; ls /home /kept.txt")
    await other.close()

    assert b"".join(piece.data for piece in result.output if piece.stream == "stdout") == b""
    assert kept.text.startswith("kept\nworkspace\n/home:\nagent\n") or "kept\n" in kept.text
    assert "No such file" in kept.text


async def test_background_processes_end_with_the_command(workspace: Workspace) -> None:
    daemon = f"""
import os, signal, time
for number in signal.Signals:
    try:
        signal.signal(number, signal.SIG_IGN)
    except OSError:
        pass
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open('/tmp/started', 'w')
        while True:
            open('/tmp/{MARK}', 'a').write('x')
            time.sleep(0.01)
    os._exit(0)
while not os.path.exists('/tmp/started'):
    time.sleep(0.01)
"""
    result = await python(workspace, daemon)
    before = await shell(workspace, f"stat -c %s /tmp/{MARK}")
    after = await shell(workspace, f"sleep 0.2; stat -c %s /tmp/{MARK}")

    assert result.is_success, result
    assert before.text == after.text


async def test_time_limit_ends_all_processes_before_the_next_command(workspace: Workspace) -> None:
    writer = "while true; do echo x >> /tmp/ticks; sleep 0.01; done"
    await shell(workspace, "touch /tmp/ticks")

    for wall_s in (0.5, 30.0):  # the first may end before a busy machine has started the writers
        limits = replace(LIMITS, wall_s=wall_s)
        result = await shell(workspace, f"({writer}) & setsid bash -c '{writer}'", limits=limits)
        sizes = await shell(workspace, "stat -c %s /tmp/ticks; sleep 0.2; stat -c %s /tmp/ticks")
        first, second = map(int, sizes.text.split())
        if first:
            break

    assert result.ended_by == "wall_time"
    assert first == second > 0


async def test_fork_bomb_is_bounded(workspace: Workspace) -> None:
    program = """
import os, time
children = 0
try:
    while children < 1000:
        if os.fork() == 0:
            time.sleep(30)
        children += 1
except OSError:
    print(children)
"""
    result = await python(workspace, program)

    assert 0 < int(result.text) <= LIMITS.max_processes


async def test_memory_is_bounded(workspace: Workspace) -> None:
    program = """
import os
for _ in range(8):
    if os.fork() == 0:
        break
block = []
while True:
    block.append(bytearray(2**20))
    for page in range(0, 2**20, 4096):
        block[-1][page] = 1
"""
    result = await python(workspace, program)

    assert result.ended_by == "memory" or "MemoryError" in result.text


async def test_disk_is_bounded_over_several_commands(workspace: Workspace) -> None:
    fill = "import os\nf = open('/app/{}', 'wb')\nwhile True: f.write(bytes(2**16)); f.flush()"

    for name in "abc":
        result = await python(workspace, fill.format(name))
        assert not result.is_success
    many = await python(
        workspace, "import itertools\nfor n in itertools.count(): open(f'/tmp/{n}', 'w')"
    )
    used = await shell(workspace, "rm -rf /app/[abc]; du -sx --apparent-size -B1 / 2>/dev/null")

    assert "No space left" in many.text
    assert int(used.text.split()[0]) < 2 * LIMITS.disk_bytes


async def test_workspace_full_of_files_can_be_read(workspace: Workspace) -> None:
    await shell(workspace, "for i in $(seq 50); do head -c 1M /dev/zero > /app/f$i || exit; done")

    archive = await workspace.collect(["/app/kept.txt"], max_bytes=2**20)
    changes = await workspace.changes()

    assert names(archive) == ["app/kept.txt"]
    assert len(changes) >= 10


async def test_other_processes_cannot_be_traced(workspace: Workspace) -> None:
    program = """
import ctypes, os, signal
call = ctypes.CDLL(None, use_errno=True).ptrace
child = os.fork()
if child == 0:
    signal.pause()
print(call(16, child, 0, 0), ctypes.get_errno())
try:
    open(f'/proc/{child}/mem', 'r+b')
    print('own child')
except OSError:
    print('refused')
os.kill(child, 9)
try:
    print(open('/proc/1/environ').read(), os.listdir('/proc/1/fd'))
except OSError as error:
    print('hidden')
"""
    result = await python(workspace, program)

    assert result.text.startswith("-1 1\n")
    assert "hidden" in result.text or MARK not in result.text


async def test_program_inherits_only_its_input_and_output(workspace: Workspace) -> None:
    program = """
import os
for number in range(300):
    try:
        os.fstat(number)
        print(number)
    except OSError:
        pass
"""
    result = await python(workspace, program, stdin=b"x")

    assert result.text.split() == ["0", "1", "2"]


async def test_collect_takes_regular_files_only(workspace: Workspace) -> None:
    program = r"""
import os, socket
os.chdir('/app')
os.symlink('/etc/passwd', 'link')
os.symlink('/', 'root')
os.symlink('loop', 'loop')
os.mkfifo('fifo')
socket.socket(socket.AF_UNIX).bind('socket')
os.link('kept.txt', 'hard')
open('new\nline', 'w').write('x')
open(b'bytes\xff', 'w').write('x')
open('closed', 'w').write('x'); os.chmod('closed', 0)
os.mkdir('closed-folder'); open('closed-folder/x', 'w'); os.chmod('closed-folder', 0)
os.chmod('hard', 0o4755)
os.truncate(os.open('sparse', os.O_CREAT | os.O_RDWR), 2**20)
"""
    made = await python(workspace, program)
    archive = await workspace.collect(
        ["/app", "/app/link", "/app/root/etc/passwd", "/app/loop/x", "/gone", "/app/../etc/hosts"],
        max_bytes=2**24,
    )

    assert made.is_success, made.text
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        found = {member.name: member for member in members}
        assert members.extractfile("app/hard").read() == b"kept\n"  # type: ignore[union-attr]
    assert set(found) >= {
        *("app", "app/kept.txt", "app/hard", "app/new\nline", "app/bytes\udcff", "app/closed"),
        *("app/closed-folder/x", "app/sparse", "etc/hosts"),
    }
    assert not {"app/link", "app/root", "app/fifo", "app/socket", "app/loop"} & set(found)
    assert all(member.isreg() or member.isdir() for member in found.values())
    assert all(member.mode & 0o7000 == 0 for member in found.values())


@pytest.mark.parametrize(
    "program",
    [
        "truncate -s 9M a b c d",
        "python3 -c \"[open(f'{n}', 'w').write('x' * 9000) for n in range(1000)]\"",
        "python3 -c \"import os\nfor n in range(1100): os.mkdir('a' * 200); os.chdir('a' * 200)\"",
    ],
)
async def test_collect_of_too_much_is_an_error_of_the_content(
    workspace: Workspace, program: str
) -> None:
    await shell(workspace, program)

    with pytest.raises(WorkspaceContentError):
        await workspace.collect(["/app"], max_bytes=2**20)
    await workspace.changes()  # still possible


async def test_links_in_a_workspace_lead_nowhere_else(
    base: Base, workspace: Workspace, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    target.write_text("untouched")
    await shell(
        workspace,
        f"ln -s {target} /app/out; ln -s {tmp_path} /app/folder; rm /app/kept.txt; "
        "ln -s /etc/passwd /app/kept.txt; ln -s ../../../../../etc /app/up",
    )
    files = [tarfile.TarInfo(name) for name in ("app/out", "app/folder/new", "app/up/new")]

    with pytest.raises(WorkspaceContentError):
        await workspace.put(archive_of((files[1], b"forged")))  # its folder is not in the workspace
    await workspace.put(archive_of((files[0], b"forged"), (files[2], b"forged")))
    await workspace.put(archive_of((tarfile.TarInfo("app/kept.txt"), b"replaced")))
    result = await shell(workspace, "cat /etc/new /app/kept.txt; head -1 /etc/passwd; cat /app/out")

    assert result.text == "forgedreplacedroot:x:0:0:root:/root:/bin/bash\nforged"
    assert target.read_text() == "untouched"
    assert os.listdir(tmp_path) == ["target"]  # noqa: PTH208


def _member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


@pytest.mark.parametrize(
    "member",
    [
        _member("../../escaped"),
        _member("app/../../escaped"),
        _member("/tmp/absolute"),
        _member("app/link", tarfile.SYMTYPE, "/etc"),
        _member("app/hard", tarfile.LNKTYPE, "etc/passwd"),
        _member("app/device", tarfile.CHRTYPE),
        _member("app/fifo", tarfile.FIFOTYPE),
    ],
    ids=lambda member: member.name,
)
async def test_put_refuses_an_archive_with(workspace: Workspace, member: tarfile.TarInfo) -> None:
    archive = archive_of((tarfile.TarInfo("app/first"), b"x"), (member, b""))

    with pytest.raises(WorkspaceContentError, match=r"archive"):
        await workspace.put(archive)
    first = await shell(workspace, "ls /app/first")

    assert not first.is_success  # nothing was extracted


@pytest.mark.parametrize("archive", [b"", b"not a tar archive" * 100])
async def test_put_refuses_what_is_not_an_archive(workspace: Workspace, archive: bytes) -> None:
    with pytest.raises(WorkspaceContentError):
        await workspace.put(archive)


async def test_put_of_more_than_the_disk_is_an_error(workspace: Workspace) -> None:
    with pytest.raises(WorkspaceContentError, match=r"No space left|File too large"):
        await workspace.put(archive_of((tarfile.TarInfo("app/x"), bytes(2 * LIMITS.disk_bytes))))


async def test_settings_of_the_workspace_do_not_change_how_it_is_read(workspace: Workspace) -> None:
    program = (
        "mkdir -p /lib2; echo /tmp/evil.so > /etc/ld.so.preload; echo 'exit 0' > /etc/profile; "
        "echo 'import os; os._exit(0)' > /app/tarfile.py; rm -f /etc/ld.so.cache /etc/passwd"
    )
    await shell(workspace, program)

    archive = await workspace.collect(["/app/kept.txt"], max_bytes=2**20)

    assert names(archive) == ["app/kept.txt"]


async def test_mounts_are_not_placed_through_links(workspace: Workspace, tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    tests.mkdir(mode=0o755)
    await shell(workspace, "ln -s /app /tests; mkdir /other; ln -s /etc /other/place")

    for inside in ("/tests", "/other/place/tests", "/usr/tests", "/proc/tests", "/", "relative"):
        with pytest.raises(WorkspaceError, match=r"mount"):
            await workspace.run(["true"], read_only={inside: tests})
    result = await workspace.run(["true"])

    assert result.is_success


async def test_mount_that_is_not_readable_is_an_error(workspace: Workspace, tmp_path: Path) -> None:
    (tmp_path / "private").mkdir(mode=0o700)

    with pytest.raises(WorkspaceError, match="No such file"):
        await workspace.run(["true"], read_only={"/tests": tmp_path / "missing"})
    if os.geteuid() == 0:
        with pytest.raises(WorkspaceError, match=r"chmod -R o\+rX"):
            await workspace.run(["true"], read_only={"/tests": tmp_path / "private"})


async def test_mounted_folder_is_visible_to_its_command_only_and_read_only(
    workspace: Workspace, tmp_path: Path
) -> None:
    tests = tmp_path / "tests"
    tests.mkdir(mode=0o755)
    (tests / "test.sh").write_text("echo real")

    first = await shell(
        workspace, "cat /tests/test.sh; echo x > /tests/test.sh", read_only={"/tests": tests}
    )
    second = await shell(workspace, "ls -A /tests; grep -c tests /proc/self/mountinfo")

    assert first.text.startswith("echo real")
    assert "Read-only" in first.text
    assert second.text == "0\n"
    assert await workspace.changes() == []


async def test_writable_folder_receives_files_but_no_links(
    workspace: Workspace, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    logs = tmp_path / "logs"
    logs.mkdir()

    await shell(
        workspace,
        f"cd /logs/verifier; echo 1 > reward.txt; ln -s {victim} link; mkdir sub; echo 2 > sub/x; "
        "mkfifo fifo",
        writable={"/logs/verifier": logs},
    )
    await shell(workspace, f"rm -r /logs/verifier; ln -s {tmp_path} /logs/verifier")

    assert (logs / "reward.txt").read_text() == "1\n"
    assert (logs / "sub" / "x").read_text() == "2\n"
    assert sorted(path.name for path in logs.iterdir()) == ["reward.txt", "sub"]
    assert victim.read_text() == "untouched"


@pytest.mark.parametrize("program", ["rm file; mkdir file", "rmdir folder; echo > folder"])
async def test_writable_folder_with_other_kinds_of_files_is_an_error_of_content(
    workspace: Workspace, tmp_path: Path, program: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()

    with pytest.raises(WorkspaceContentError, match="cannot be copied to this machine"):
        await shell(workspace, f"cd /logs; {program}", writable={"/logs": tmp_path})


async def test_variables_of_a_command_are_hidden_from_other_users(workspace: Workspace) -> None:
    key = "key-" + os.urandom(8).hex()
    started = asyncio.Event()
    program = "echo begun; sleep 2; echo $KEY"
    running = asyncio.create_task(
        shell(workspace, program, env={"KEY": key}, on_output=lambda _: started.set())
    )
    await started.wait()
    lines = _command_lines()
    result = await running

    assert result.text.split() == ["begun", key]
    assert not any(key.encode() in line for line in lines)


def _command_lines() -> list[bytes]:
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(path.read_bytes())
    return lines


OWNER = f"""
import asyncio, sys
from pathlib import Path
from atroposlib.sandbox import SandboxLimits
from atroposlib.workspaces import WorkspaceSpec
from atroposlib.workspaces.local import LocalWorkspaces

async def main():
    folder = Path(sys.argv[1])
    limits = SandboxLimits(wall_s=600, max_processes=24)
    workspaces = LocalWorkspaces(cache=folder / "cache")
    base = await workspaces.prepare(WorkspaceSpec("killed", limits=limits))
    forks = [await base.fork() for _ in range(3)]
    daemon = "(setsid sleep {SECONDS} &) ; echo x > /tmp/x; echo ready; sleep {SECONDS}"
    seen = asyncio.Event()
    runs = [
        asyncio.create_task(f.run(["bash", "-c", daemon], on_output=lambda _: seen.set()))
        for f in forks
    ]
    await seen.wait()
    print("ready", flush=True)
    await asyncio.gather(*runs)

asyncio.run(main())
"""


def leftovers(folder: Path) -> list[str]:
    """Return processes of the owner, and processes with mounts of its folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (
                (process / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            )
            mounts = (process / "mountinfo").read_text()
        except OSError:
            continue
        if f"sleep {SECONDS}" in line or str(folder) in line or str(folder) in mounts:
            found.append(f"{process.name} {line}")
    return found


@pytest.mark.parametrize("is_root", [True, False])
async def test_nothing_is_left_after_the_owner_is_killed(tmp_path: Path, is_root: bool) -> None:
    prefix = _prefix(tmp_path, is_root=is_root)
    assert leftovers(tmp_path) == []
    python_path = {"PYTHONPATH": str(REPOSITORY), "PATH": os.environ["PATH"]}
    owner = subprocess.Popen(  # noqa: ASYNC220 - is killed, not awaited
        [*prefix, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, env=python_path, text=True,
        start_new_session=True, cwd=tmp_path,
    )  # fmt: skip
    try:
        assert owner.stdout is not None
        assert await asyncio.to_thread(owner.stdout.readline) == "ready\n"
        assert len(leftovers(tmp_path)) > 3
    finally:
        owner.kill()  # the process only, not its group
        owner.wait()

    for _ in range(600):
        left = leftovers(tmp_path)
        if not left:
            break
        await asyncio.sleep(0.05)

    assert left == []
    kinds = sorted(path.suffix or "base" for path in (tmp_path / "cache").iterdir())
    assert kinds == [".lock", "base"]


def _prefix(folder: Path, *, is_root: bool) -> list[str]:
    """Return the command prefix of a Python that runs as this user, or as an ordinary one."""
    if is_root or os.geteuid() != 0:
        if is_root and os.geteuid() != 0:
            pytest.skip("needs root")
        return [sys.executable]
    os.chown(folder, 65534, 65534)
    for above in [folder, *folder.parents][:4]:
        if above.stat().st_uid in (0, 65534) and "pytest" in str(above):
            above.chmod(above.stat().st_mode | 0o111)
    words = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/python3"]
    probe = "import sys; sys.path.insert(0, sys.argv[1]); import atroposlib.workspaces"
    done = subprocess.run([*words, "-I", "-c", probe, str(REPOSITORY)], capture_output=True)
    if done.returncode != 0:
        pytest.skip(f"an ordinary user cannot run this: {done.stderr.decode()[-200:]}")
    return words


def counts() -> tuple[int, int, int]:
    """Return the numbers of open files, of children, and of mounts of workspaces."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    files = len(list(Path("/proc/self/fd").iterdir()))
    return files, len(children), Path("/proc/self/mountinfo").read_text().count("atropos")


async def _rollouts(base: Base, number: int) -> None:
    for count in range(number):
        workspace = await base.fork()
        result = await shell(workspace, f"head -c 2M /dev/zero > /app/x{count}; (sleep 99 &)")
        assert result.is_success, result
        assert len(await workspace.changes()) == 1
        await workspace.close()


@pytest.mark.parametrize("number", [pytest.param(30), pytest.param(500, marks=pytest.mark.long)])
async def test_rollouts_in_a_row_leave_no_growth(base: Base, number: int) -> None:
    await _rollouts(base, 5)
    before = await _settled_counts(base)
    growth = 0
    for _ in range(3):  # other programs of this machine have files in memory too
        memory = _shared_memory()
        await _rollouts(base, number)
        after = await _settled_counts(base, most=before)
        assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)
        growth = _shared_memory() - memory
        if growth < number * 2**20:  # half of what the rollouts wrote
            break

    assert growth < number * 2**20


async def _settled_counts(
    base: Base, *, most: tuple[int, int, int] | None = None
) -> tuple[int, int, int]:
    """Wait until the workspaces made in advance are there again, and the others have ended.

    These have once no count is above `most`; by default, once they do not change. What earlier
    tests of this process left open, such as an event loop, is closed when it is collected.
    """
    assert isinstance(base, LocalBase)
    assert base._refill is not None
    await base._refill
    gc.collect()
    found = [counts()]
    for _ in range(1200):
        if most is None:
            is_settled = len(found) >= 10 and len(set(found[-10:])) == 1
        else:
            is_settled = all(now <= then for now, then in zip(found[-1], most, strict=True))
        if is_settled:
            break
        await asyncio.sleep(0.05)
        found.append(counts())
    return found[-1]


def _shared_memory() -> int:
    rows = dict(row.split(":") for row in Path("/proc/meminfo").read_text().splitlines())
    return int(rows["Shmem"].split()[0]) * 1024


async def test_changed_base_is_noticed_and_built_again(tmp_path: Path) -> None:
    workspaces = LocalWorkspaces(cache=tmp_path / "cache", warm=0, check_every=1)
    base = await workspaces.prepare(WorkspaceSpec("changed", limits=LIMITS))
    first = await base.fork()
    await first.close()
    root = next((tmp_path / "cache").glob("*/root"))
    (root / "etc" / "hosts").write_text("6.6.6.6 localhost\n")

    with pytest.raises(WorkspaceError, match="/etc/hosts"):
        await base.fork()
    again = await base.fork()
    hosts = await shell(again, "cat /etc/hosts")
    await workspaces.close()

    assert hosts.text == "127.0.0.1 localhost workspace\n"


async def test_killed_command_by_cancelling_leaves_the_workspace_usable(
    workspace: Workspace,
) -> None:
    started = asyncio.Event()
    task = asyncio.create_task(
        shell(workspace, "echo x; sleep 1000", on_output=lambda _: started.set())
    )
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert (await shell(workspace, "echo alive")).text == "alive\n"


async def test_closing_ends_the_running_command(base: Base) -> None:
    workspace = await base.fork()
    started = asyncio.Event()
    task = asyncio.create_task(
        shell(workspace, "echo x; sleep 1000", on_output=lambda _: started.set())
    )
    await started.wait()
    await workspace.close()

    with pytest.raises(WorkspaceError, match="closed"):
        await task
    with pytest.raises(WorkspaceError, match="closed"):
        await workspace.run(["true"])
    await workspace.close()
