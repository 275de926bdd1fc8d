"""Workspaces on this machine: preparation and its cache, commands, files, workspaces in advance."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import pytest_asyncio

from atroposlib.errors import ConfigError
from atroposlib.sandbox import SandboxLimits
from atroposlib.workspaces import (
    Base,
    Output,
    Workspace,
    WorkspaceError,
    WorkspaceSpec,
    open_workspaces,
)
from atroposlib.workspaces.cache import BaseCache
from atroposlib.workspaces.local import LocalBase, LocalWorkspaces, memory_of_machine

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

LIMITS = SandboxLimits(wall_s=60.0, cpu_s=30, memory_bytes=2**29, disk_bytes=2**25)
REPOSITORY = Path(__file__).parents[2]


def new_workspaces(folder: Path, **options: Any) -> LocalWorkspaces:
    try:
        return LocalWorkspaces(cache=folder / "cache", **options)
    except WorkspaceError as error:
        pytest.skip(str(error))


@pytest_asyncio.fixture(loop_scope="module")
async def workspaces(tmp_path: Path) -> AsyncIterator[LocalWorkspaces]:
    workspaces = new_workspaces(tmp_path)
    yield workspaces
    await workspaces.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def base(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Base]:
    folder = tmp_path_factory.mktemp("local")
    source = folder / "source"
    (source / "sub").mkdir(parents=True)
    (source / "text.txt").write_text("one\ntwo\n")
    (source / "sub" / "run.sh").write_text("echo hi")
    (source / "binary").write_bytes(bytes(range(256)))
    workspaces = new_workspaces(folder)
    yield await workspaces.prepare(
        WorkspaceSpec("local", source=source, env={"FROM_SPEC": "spec"}, limits=LIMITS)
    )
    await workspaces.close()


@pytest_asyncio.fixture(loop_scope="module")
async def workspace(base: Base) -> AsyncIterator[Workspace]:
    workspace = await base.fork()
    yield workspace
    await workspace.close()


def spec_of(folder: Path, dockerfile: str, **options: object) -> WorkspaceSpec:
    folder.mkdir(exist_ok=True)
    (folder / "Dockerfile").write_text(dockerfile)
    return WorkspaceSpec("built", source=folder, limits=LIMITS, **options)  # type: ignore[arg-type]


async def output(base: Base, command: str) -> str:
    workspace = await base.fork()
    result = await workspace.run(["sh", "-c", command])
    await workspace.close()
    assert result.is_success, result
    return result.text


async def test_program_of_the_readme_runs(tmp_path: Path) -> None:
    new_workspaces(tmp_path)
    readme = REPOSITORY / "atroposlib" / "workspaces" / "README.md"
    program = re.findall(r"```python\n(.*?)```", readme.read_text(encoding="utf-8"), re.DOTALL)[0]
    env = {"PYTHONPATH": str(REPOSITORY), "ATROPOS_WORKSPACES_DIR": str(tmp_path / "cache")}
    words = [sys.executable, "-c", program]

    done = await asyncio.to_thread(
        subprocess.run, words, capture_output=True, text=True, env={**os.environ, **env}
    )

    assert done.stdout == "0 2 sorted.txt\n\nadded /app/sorted.txt 8\ntwo\n\n", done.stderr


async def test_readme_names_every_module() -> None:
    folder = REPOSITORY / "atroposlib" / "workspaces"
    modules = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
    rows = re.findall(r"^\| (`\w+\.py`.*?) \|", (folder / "README.md").read_text(), re.MULTILINE)

    assert modules == set(re.findall(r"`(\w+\.py)`", " ".join(rows)))


async def test_command_has_user_folder_variables_and_input(workspace: Workspace) -> None:
    result = await workspace.run(
        ["sh", "-c", 'id -un; pwd; echo "$HOME $FROM_SPEC $OWN $PYTHONPATH"; cat; hostname'],
        env={"OWN": "a b\n'c"},
        stdin=b"typed\n",
        cwd="/tmp",
    )

    assert result.text == "agent\n/tmp\n/home/agent spec a b\n'c \ntyped\nworkspace\n"
    assert result.is_success


@pytest.mark.parametrize(
    ("command", "exit_code", "ended_by"),
    [
        (["sh", "-c", "exit 7"], 7, "exit"),
        (["no-such-program"], 127, "exit"),
        (["sh", "-c", "kill -9 $$"], 137, "signal"),
        (["sh", "-c", "yes"], None, "output"),
    ],
)
async def test_ending_of_a_command(
    workspace: Workspace, command: list[str], exit_code: int | None, ended_by: str
) -> None:
    result = await workspace.run(command)

    assert (result.exit_code, result.ended_by) == (exit_code, ended_by)


async def test_output_arrives_in_order_while_the_command_runs(workspace: Workspace) -> None:
    pieces: list[Output] = []
    wait = "until [ -e /seen/{} ]; do sleep 0.02; done"
    text = f"echo a; {wait.format(1)}; echo b >&2; {wait.format(2)}; echo c"

    with TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)  # noqa: PTH101 - pathlib is not for coroutines
        seen = Path(folder)

        def note(piece: Output) -> None:
            pieces.append(piece)
            (seen / str(len(pieces))).touch()

        result = await workspace.run(["sh", "-c", text], read_only={"/seen": seen}, on_output=note)

    expected = [("stdout", b"a\n"), ("stderr", b"b\n"), ("stdout", b"c\n")]
    assert [(piece.stream, piece.data) for piece in result.output] == expected
    assert [piece[1:] for piece in pieces] == expected
    assert 0 <= pieces[0].time_s < pieces[1].time_s < pieces[2].time_s <= result.duration_s


async def test_files_stay_between_commands_and_are_not_shared(base: Base) -> None:
    first, second = await base.fork(), await base.fork()
    await first.run(["sh", "-c", "echo new > text.txt; rm -r sub; echo x > /tmp/x"])
    seen = [
        (await each.run(["sh", "-c", "cat text.txt; ls /tmp /app"])).text
        for each in (first, second)
    ]
    await first.close()
    await second.close()

    assert seen[0] == "new\n/app:\nbinary\ntext.txt\n\n/tmp:\nx\n"
    assert seen[1] == "one\ntwo\n/app:\nbinary\nsub\ntext.txt\n\n/tmp:\n"


async def test_changes_are_those_of_the_files(workspace: Workspace) -> None:
    await workspace.run(["sh", "-c", "sed -i s/two/2/ text.txt; touch binary; chmod +x sub/run.sh"])
    await workspace.run(["sh", "-c", "mkdir -p a/empty; echo x > a/x; ln -s text.txt link"])
    await workspace.run(["sh", "-c", "printf 'no end' > z; rm -r /var/log; mkdir /var/log"])

    changes = {change.path: change for change in await workspace.changes()}

    assert {path: change.kind for path, change in changes.items()} == {
        "/app/a/empty/": "added",
        "/app/a/x": "added",
        "/app/link": "added",
        "/app/sub/run.sh": "modified",
        "/app/text.txt": "modified",
        "/app/z": "added",
    }
    assert list(changes) == sorted(changes)
    assert changes["/app/text.txt"].diff == (
        "--- /app/text.txt\n+++ /app/text.txt\n@@ -1,2 +1,2 @@\n one\n-two\n+2\n"
    )
    assert changes["/app/sub/run.sh"].diff == "old mode 644\nnew mode 755\n"
    assert changes["/app/z"].diff == (
        "--- /dev/null\n+++ /app/z\n@@ -0,0 +1 @@\n+no end\n\\ No newline at end of file\n"
    )
    assert changes["/app/a/x"].size == 2


async def test_removed_and_replaced_files_are_changes(workspace: Workspace) -> None:
    await workspace.run(
        ["sh", "-c", "rm -r sub binary; rm text.txt; mkdir text.txt; echo > text.txt/y"]
    )

    changes = [(change.path, change.kind, change.diff) for change in await workspace.changes()]

    assert [change[:2] for change in changes] == [
        ("/app/binary", "removed"),
        ("/app/sub/", "removed"),
        ("/app/sub/run.sh", "removed"),
        ("/app/text.txt", "removed"),
        ("/app/text.txt/y", "added"),
    ]
    assert changes[0][2] is None


async def test_files_go_from_one_workspace_to_another(base: Base, workspace: Workspace) -> None:
    await workspace.run(["sh", "-c", "mkdir -p out; echo 1 > out/x; chmod 750 out/x; rm text.txt"])
    other = await base.fork()

    await other.put(await workspace.collect(["/app/out", "/app/text.txt"], max_bytes=1000))
    result = await other.run(["sh", "-c", "cat out/x text.txt; stat -c '%a %U' out/x"])
    await other.close()

    assert result.text == "1\none\ntwo\n750 agent\n"


async def test_dockerfile_is_executed(workspaces: LocalWorkspaces, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a.sh").write_text("echo $GREETING")
    text = """FROM debian:12
ENV GREETING="hello there"
WORKDIR /srv/app
COPY a.sh bin/
RUN sh bin/a.sh > made && mkdir -p /data && git init -q repository
ENV PATH="/srv/app/bin:$PATH"
RUN ln -s made link && chmod 000 made
"""
    base = await workspaces.prepare(spec_of(tmp_path / "source", text, env={"EXTRA": "1"}))

    found = await output(base, "pwd; chmod 600 made; cat link; echo $EXTRA; ls -d repository/.git")

    assert found == "/srv/app\nhello there\n1\nrepository/.git\n"


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("FROM x\nRUN echo some output; exit 3", WorkspaceError, "Dockerfile:2: .*3: some output"),
        ("FROM x\nRUN touch /usr/x", WorkspaceError, "Dockerfile:2: .*Read-only file system"),
        ("FROM x\nRUN head -c 100M /dev/zero > /app", WorkspaceError, "Dockerfile:2: RUN ended"),
        ("FROM x\nRUN curl http://1.1.1.1", WorkspaceError, "Dockerfile:2: RUN ended with exit"),
        ("FROM x\nRUN apk add x", ConfigError, "Dockerfile:2: RUN apk needs root"),
    ],
)
async def test_failed_build_names_the_line_and_leaves_nothing(
    workspaces: LocalWorkspaces, tmp_path: Path, text: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        await workspaces.prepare(spec_of(tmp_path / "source", text))

    cache = tmp_path / "cache"
    assert not cache.exists() or {path.suffix for path in cache.iterdir()} <= {".lock"}


async def test_build_that_takes_too_long_is_ended(
    workspaces: LocalWorkspaces, tmp_path: Path
) -> None:
    spec = spec_of(tmp_path / "source", "FROM x\nRUN sleep 1000", build_timeout_s=1.0)

    with pytest.raises(WorkspaceError, match=r"within 1 s|wall_time"):
        await workspaces.prepare(spec)


async def test_image_is_an_error(workspaces: LocalWorkspaces) -> None:
    with pytest.raises(ConfigError, match="the kind podman"):
        await workspaces.prepare(WorkspaceSpec("x", image="debian:12"))


STAMP = "FROM x\nRUN date +%s%N > /stamp; sleep 0.3"


async def test_same_spec_is_built_once(workspaces: LocalWorkspaces, tmp_path: Path) -> None:
    spec = spec_of(tmp_path / "source", STAMP)

    bases = await asyncio.gather(*(workspaces.prepare(spec) for _ in range(3)))
    stamps = {await output(base, "cat /stamp") for base in bases}
    await workspaces.close()
    later = new_workspaces(tmp_path)
    stamps.add(await output(await later.prepare(spec), "cat /stamp"))
    await later.close()

    assert len(stamps) == 1


BUILDER = """
import asyncio, sys
from pathlib import Path
from typing import Any
from atroposlib.workspaces import WorkspaceSpec, open_workspaces

async def main():
    workspaces = open_workspaces(cache=Path(sys.argv[1]) / "cache")
    base = await workspaces.prepare(WorkspaceSpec("built", source=Path(sys.argv[1]) / "source"))
    workspace = await base.fork()
    print((await workspace.run(["cat", "/stamp"])).text, end="", flush=True)
    await workspaces.close()

asyncio.run(main())
"""


def builder(folder: Path) -> subprocess.Popen[str]:
    env = {"PYTHONPATH": str(REPOSITORY), "PATH": os.environ["PATH"]}
    words = [sys.executable, "-c", BUILDER, str(folder)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env)


async def test_processes_build_once(workspaces: LocalWorkspaces, tmp_path: Path) -> None:
    spec_of(tmp_path / "source", STAMP)

    builders = [builder(tmp_path) for _ in range(2)]
    stamps = [(await asyncio.to_thread(each.communicate))[0] for each in builders]

    assert stamps[0] == stamps[1] != ""


async def test_killed_build_is_not_taken_for_a_base(
    workspaces: LocalWorkspaces, tmp_path: Path
) -> None:
    spec = spec_of(tmp_path / "source", "FROM x\nRUN date +%s%N > /stamp; sleep 3")
    killed = builder(tmp_path)
    for _ in range(6000):
        if list((tmp_path / "cache").glob("*.building/root")):
            break
        await asyncio.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()

    stamp = await output(await workspaces.prepare(spec), "cat /stamp")

    assert stamp.strip().isdigit()
    kinds = sorted(path.suffix or "base" for path in (tmp_path / "cache").iterdir())
    assert kinds == [".lock", "base"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda base: (base / "base.json").unlink(),
        lambda base: (base / "base.json").write_text(""),
        lambda base: shutil.rmtree(base / "root"),
        lambda base: [(base / name).write_text("") for name in ("files.json", "root/stamp")],
    ],
)
async def test_base_that_a_crash_left_in_part_is_built_again(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    async def build(root: Path) -> dict[str, Any]:
        (root / "stamp").write_text("built")
        return {"name": "task"}

    cache = BaseCache(tmp_path, max_bytes=2**30)
    (await cache.get("key", build)).release()
    damage(tmp_path / "key")

    again = await cache.get("key", build)

    assert (again.root / "stamp").read_text() == "built"
    assert again.settings["name"] == "task"
    again.release()


async def test_cache_removes_bases_that_were_not_used_lately(tmp_path: Path) -> None:
    workspaces = new_workspaces(tmp_path, cache_bytes=8 * 2**20)
    text = "FROM x\nRUN head -c 3M /dev/zero > /{}"
    in_use = await workspaces.prepare(spec_of(tmp_path / "a", text.format("a")))
    for name in "bcd":
        base = await workspaces.prepare(spec_of(tmp_path / name, text.format(name)))
        await base.close()
    names = [path.name for path in (tmp_path / "cache").glob("*/root/[a-d]")]
    kept = await output(in_use, "ls /a")
    await workspaces.close()

    assert sorted(names) == ["a", "d"]
    assert kept == "/a\n"


async def test_forks_that_wait_while_the_base_is_closed_leave_no_workspace(tmp_path: Path) -> None:
    workspaces = new_workspaces(tmp_path, warm=1)
    source = tmp_path / "source"
    source.mkdir()
    base = await workspaces.prepare(WorkspaceSpec("local", source=source, limits=LIMITS))
    assert isinstance(base, LocalBase)
    forks = [asyncio.create_task(base.fork()) for _ in range(3)]
    await asyncio.sleep(0)

    await base.close()
    results = await asyncio.gather(*forks, return_exceptions=True)

    assert [str(result) for result in results] == ["the base of local is closed"] * 3
    assert base.num_warm == 0
    await workspaces.close()


async def test_workspaces_are_made_in_advance_up_to_a_limit(tmp_path: Path) -> None:
    workspaces = new_workspaces(tmp_path, warm=3, max_warm=4)
    bases = [
        await workspaces.prepare(WorkspaceSpec("x", env={"N": str(number)})) for number in range(2)
    ]
    forks = [await base.fork() for base in bases]
    for _ in range(6000):
        warm = [base.num_warm for base in bases if isinstance(base, LocalBase)]
        if sum(warm) == 4:
            break
        await asyncio.sleep(0.02)
    await workspaces.close()

    assert sum(warm) == 4
    assert max(warm) <= 3
    for fork in forks:
        with pytest.raises(WorkspaceError, match="closed"):
            await fork.run(["true"])
    with pytest.raises(WorkspaceError, match="closed"):
        await bases[0].fork()


async def test_folder_of_the_cache_is_set_by_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATROPOS_WORKSPACES_DIR", str(tmp_path / "elsewhere"))
    new_workspaces(tmp_path)
    workspaces = open_workspaces()
    await workspaces.prepare(WorkspaceSpec("x"))
    await workspaces.close()

    assert list((tmp_path / "elsewhere").glob("*/base.json"))
    with pytest.raises(ConfigError, match="known: bubblewrap"):
        open_workspaces("other")


async def test_large_trees_are_read_and_written(base: Base, workspace: Workspace) -> None:
    made = "import os\nfor n in range(3000): open(f'/tmp/{n}', 'w').write(str(n))"
    await workspace.run(["python3", "-c", made])
    archive = await workspace.collect(["/tmp"], max_bytes=2**20)
    other = await base.fork()
    await other.put(archive)
    counted = await other.run(["sh", "-c", "ls /tmp | wc -l; cat /tmp/2999"])
    await other.close()

    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        assert len(members.getnames()) == 3001
    assert counted.text == "3000\n2999"
    assert len(await workspace.changes()) == 1000


async def test_program_that_ends_the_mount_server_is_answered_by_a_new_one(tmp_path: Path) -> None:
    workspaces = new_workspaces(tmp_path, warm=0)
    base = await workspaces.prepare(WorkspaceSpec("x"))
    first = await base.fork()
    server = workspaces.mounts._server
    assert server is not None
    server.process.kill()
    server.process.wait()

    with contextlib.suppress(WorkspaceError):  # if it ended after the request was sent
        await (await base.fork()).close()
    second = await base.fork()
    results = [await each.run(["echo", "x"]) for each in (first, second)]
    await workspaces.close()

    assert [result.text for result in results] == ["x\n", "x\n"]


async def test_fork_without_memory_left_is_refused(tmp_path: Path) -> None:
    spec = WorkspaceSpec("empty", source=tmp_path / "source")
    (tmp_path / "source").mkdir()
    owner = new_workspaces(tmp_path, reserve_bytes=2**60, memory_wait_s=0)
    base = await owner.prepare(spec)

    with pytest.raises(WorkspaceError, match="no memory for a workspace of empty"):
        await base.fork()

    await owner.close()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        shutil.Error([("/a", "/b", "No space left on device"), ("/c", "/d", "other")]),
    ],
)
async def test_full_disk_of_the_cache_is_an_error_with_the_folder_and_the_remedy(
    tmp_path: Path, error: OSError
) -> None:
    async def build(root: Path) -> dict[str, Any]:
        raise error

    cache = BaseCache(tmp_path / "cache", max_bytes=2**30)

    with pytest.raises(WorkspaceError) as refused:
        await cache.get("key", build)

    assert re.fullmatch(
        r"prepared workspaces cannot be written to .*/cache: (\[Errno 28\] )?No space left on "
        "device; free space there, or set ATROPOS_WORKSPACES_DIR to another folder on a local disk",
        str(refused.value),
    )
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["key.lock"]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (2**30, 2**29)),
        ({"memory.max": "max\n", "memory.current": "5\n"}, (2**30, 2**29)),
        (
            {
                "memory.max": "1000\n",
                "memory.current": "900\n",
                "memory.stat": "anon 1\ninactive_file 50\n",
            },
            (1000, 150),
        ),
        (
            {
                "memory/memory.limit_in_bytes": "1000\n",
                "memory/memory.usage_in_bytes": "900\n",
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 50\n",
            },
            (1000, 150),
        ),
    ],
)
async def test_memory_is_that_of_the_container(
    tmp_path: Path, files: dict[str, str], expected: tuple[int, int]
) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "meminfo").write_text(f"MemTotal: {2**20} kB\nMemAvailable: {2**19} kB\nX: 0\n")
    for name, text in files.items():
        (tmp_path / name).write_text(text)

    assert memory_of_machine(tmp_path / "meminfo", tmp_path) == expected
