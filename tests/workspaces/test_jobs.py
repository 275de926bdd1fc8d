"""Workspaces as Jobs of a fake Kubernetes, whose pods are local processes; kubectl is real."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest
from aiohttp import web

from atroposlib.errors import ConfigError
from atroposlib.sandbox import SandboxLimits
from atroposlib.workspaces import (
    JobOptions,
    Network,
    Workspace,
    WorkspaceError,
    Workspaces,
    WorkspaceSpec,
    open_workspaces,
)
from atroposlib.workspaces.jobs import JobEngine, as_job_options, is_expired
from tests.cluster import fake_kubernetes as fake_cluster
from tests.cluster.fake_kubernetes import (
    Container,
    FakeKubernetes,
    fake_kubernetes,
    feed,
    require_cluster,
    send_stream,
)
from tests.workspaces.containers import write_root

pytestmark = pytest.mark.slow

IMAGE = "registry.example/python:1"
LIMITS = SandboxLimits(wall_s=60.0, cpu_s=60, memory_bytes=2**28, disk_bytes=2**26)
SPEC = WorkspaceSpec("test", image=IMAGE, limits=LIMITS)
OPTIONS = JobOptions(per_minute=6000, ttl_s=1, lease_s=4)
OWNER = """
import asyncio, sys
from atroposlib.workspaces import JobOptions, WorkspaceSpec, open_workspaces
async def main():
    options = JobOptions(per_minute=6000, ttl_s=1000, lease_s=3)
    workspaces = open_workspaces("kubernetes", engine_options=options, warm=0)
    base = await workspaces.prepare(WorkspaceSpec("test", image=sys.argv[1]))
    workspace = await base.fork()
    print("ready", flush=True)
    await workspace.run(["sleep", "1000"])
asyncio.run(main())
"""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    require_cluster("nsenter", "busybox", "/usr/bin/python3")
    if os.geteuid() != 0:
        pytest.skip("entering the containers of the fake cluster needs root")
    root = tmp_path_factory.mktemp("image") / "root"
    write_root(root, has_python=True)
    yield root
    shutil.rmtree(root)


@pytest.fixture
async def cluster(
    image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[FakeKubernetes]:
    async with fake_kubernetes(tmp_path / "cluster", images={IMAGE: image}) as server:
        monkeypatch.setenv("KUBECONFIG", str(server.write_kubeconfig()))
        monkeypatch.setenv("KUBECACHEDIR", str(tmp_path / "cache"))
        yield server
        assert server.cluster.failures == []


@pytest.fixture
async def workspaces(cluster: FakeKubernetes) -> AsyncIterator[Workspaces]:
    opened = open_workspaces("kubernetes", engine_options=OPTIONS, warm=0)
    yield opened
    await opened.close()
    await until(lambda: not cluster.store.list("Job"))
    assert cluster.store.list("Lease") == []


@pytest.fixture
async def workspace(workspaces: Workspaces) -> Workspace:
    return await (await workspaces.prepare(SPEC)).fork()


async def until(is_true: Callable[[], bool]) -> None:
    for _ in range(600):
        if is_true():
            return
        await asyncio.sleep(0.05)
    raise TimeoutError


def archive_of(name: str, content: bytes) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


async def test_command_has_its_input_variables_folder_and_exit_code(workspace: Workspace) -> None:
    result = await workspace.run(
        ["sh", "-c", 'cat; echo "$NAME"; pwd; echo problem >&2; exit 7'],
        env={"NAME": 'it\'s a "value"'},
        cwd="/tmp",
        stdin=b"input\n",
    )

    outputs = {
        stream: b"".join(piece.data for piece in result.output if piece.stream == stream)
        for stream in ("stdout", "stderr")
    }
    assert outputs == {"stdout": b'input\nit\'s a "value"\n/tmp\n', "stderr": b"problem\n"}
    assert (result.exit_code, result.ended_by) == (7, "exit")


async def test_exit_code_of_three_digits_adds_nothing_to_the_output(workspace: Workspace) -> None:
    result = await workspace.run(["sh", "-c", "echo problem >&2; exit 137"])

    assert (result.exit_code, result.text) == (137, "problem\n")


async def test_connection_that_is_lost_is_an_error_and_not_the_end_of_the_command(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(socket: web.WebSocketResponse, container: Container, words: list[str]) -> None:
        process = await container.execute(words)
        assert process.stdin is not None
        reading = asyncio.create_task(feed(socket, process.stdin))
        copying = asyncio.create_task(send_stream(socket, 2, process.stderr))
        assert process.stdout is not None
        await socket.send_bytes(b"\x01" + await process.stdout.readline())
        reading.cancel()
        copying.cancel()
        process.kill()
        assert socket._req is not None
        assert socket._req.transport is not None
        socket._req.transport.abort()

    with monkeypatch.context() as patched:
        patched.setattr(fake_cluster, "serve_exec", lost)
        with pytest.raises(
            WorkspaceError, match=r"kubectl lost the connection to sh: error: .*1006"
        ):
            await workspace.run(["sh", "-c", "echo started; sleep 1000"])

    assert (await workspace.run(["echo", "again"])).text == "again\n"


@pytest.mark.long
async def test_time_limit_ends_the_command_and_what_it_started(workspace: Workspace) -> None:
    limits = replace(LIMITS, wall_s=1.0)

    result = await workspace.run(["sh", "-c", "sleep 1000 & sleep 1000"], limits=limits)
    left = await workspace.run(["sh", "-c", "ps | grep -c '[s]leep 1000'"])

    assert result.ended_by == "wall_time"
    assert left.text.strip() == "0"


async def test_files_are_put_collected_and_listed_as_changes(workspace: Workspace) -> None:
    await workspace.put(archive_of("app/one.txt", b"one\n"))
    await workspace.run(["sh", "-c", "rm /etc/group; echo more >> /etc/passwd"])

    changes = {each.path: each for each in await workspace.changes()}
    archive = await workspace.collect(["/app"], max_bytes=10_000)

    assert changes["/app/one.txt"].kind == "added"
    assert changes["/etc/group"].kind == "removed"
    assert "+more" in (changes["/etc/passwd"].diff or "")
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        assert "app/one.txt" in members.getnames()


async def test_saved_files_are_loaded_into_another_job(workspaces: Workspaces) -> None:
    base = await workspaces.prepare(SPEC)
    first, second = await asyncio.gather(base.fork(), base.fork())
    change = (
        "mkdir -p /work/sub; echo 1 > /work/sub/file; ln -s file /work/sub/link; rm /etc/passwd"
    )
    listing = "cd /; stat -c '%A %n' work work/sub work/sub/*; cat work/sub/link; ls etc"
    done = await first.run(["sh", "-c", f"{change} && chmod 750 /work/sub/file"])
    assert done.is_success, done
    wanted = (await first.run(["sh", "-c", listing])).text

    await second.load(await first.save())

    assert (await second.run(["sh", "-c", listing])).text == wanted


async def test_command_reaches_its_forwards_over_exec(workspace: Workspace) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"%d\n" % len(await reader.read()))
        writer.close()

    program = """
import socket, sys
for size in (10, 3_000_000):
    with socket.create_connection(("127.0.0.1", 8080)) as far:
        far.sendall(b"x" * size)
        far.shutdown(socket.SHUT_WR)
        print(far.makefile().read().strip())
"""
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        result = await workspace.run(
            ["python3", "-c", program], network=Network(forwards={8080: f"127.0.0.1:{port}"})
        )
        closed = await workspace.run(
            ["python3", "-c", program], network=Network(forwards={8080: "127.0.0.1:1"})
        )

    assert result.text.split() == ["10", "3000000"], result.text
    assert not {"10", "3000000"} & set(closed.text.split())


async def test_jobs_are_restricted_and_bounded_by_time(
    cluster: FakeKubernetes, workspace: Workspace
) -> None:
    (job,) = cluster.store.list("Job", None, "atropos.workspace=fork")
    spec = job["spec"]
    container = spec["template"]["spec"]["containers"][0]

    assert (spec["backoffLimit"], spec["ttlSecondsAfterFinished"]) == (0, 1)
    assert spec["activeDeadlineSeconds"] == OPTIONS.deadline_s
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["resources"]["limits"]["memory"] == str(LIMITS.memory_bytes)
    assert not spec["template"]["spec"]["automountServiceAccountToken"]
    (policy,) = cluster.store.list("NetworkPolicy")
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert "egress" not in policy["spec"]


@pytest.mark.long
async def test_template_is_kept_around_the_workspace(
    cluster: FakeKubernetes, tmp_path: Path
) -> None:
    template = tmp_path / "job.yaml"
    template.write_text("spec: {template: {spec: {runtimeClassName: gvisor}}}")
    options = replace(OPTIONS, template=template)
    workspaces = open_workspaces("kubernetes", engine_options=options, warm=0)

    await (await workspaces.prepare(SPEC)).fork()

    (job,) = cluster.store.list("Job")
    assert job["spec"]["template"]["spec"]["runtimeClassName"] == "gvisor"
    await workspaces.close()


@pytest.mark.parametrize(
    ("pod", "message"),
    [
        ("{hostNetwork: true}", "hostNetwork would end"),
        ("{containers: [{securityContext: {privileged: true}}]}", "privileged would end"),
        ("{initContainers: [{securityContext: {privileged: true}}]}", "privileged would end"),
        ("{containers: [{securityContext: null}]}", "the fields of a Job"),
        ("{nodeSelector: {since: 2026-01-01}}", "the fields of a Job"),
        ("[]", "the fields of a Job"),
    ],
)
def test_template_that_ends_the_isolation_is_refused(
    pod: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: "kubectl")
    template = tmp_path / "job.yaml"
    template.write_text(f"spec: {{template: {{spec: {pod}}}}}")

    with pytest.raises(ConfigError, match=message):
        JobEngine(replace(OPTIONS, template=template))


@pytest.mark.parametrize(
    "spec",
    [
        {"renewTime": "2026-01-01", "leaseDurationSeconds": 10**9},
        {"renewTime": "soon"},
        {"renewTime": "2026-01-01T00:00:00Z", "leaseDurationSeconds": 10**30},
        {},
    ],
)
def test_lease_that_is_malformed_has_expired(spec: dict[str, object]) -> None:
    """An error would end the renewal of our own."""
    now = datetime(2026, 1, 1, tzinfo=timezone.utc)

    assert is_expired({"metadata": {"name": "x"}, "spec": spec}, now)


@pytest.mark.long
async def test_number_of_jobs_is_bounded_and_a_close_makes_room(cluster: FakeKubernetes) -> None:
    options = replace(OPTIONS, max_jobs=1)
    workspaces = open_workspaces("kubernetes", engine_options=options, warm=0)
    base = await workspaces.prepare(SPEC)
    first = await base.fork()

    second = asyncio.create_task(base.fork())
    await asyncio.sleep(0)
    assert len(cluster.store.list("Job")) == 1
    await first.close()
    await (await second).run(["true"])

    await workspaces.close()


@pytest.mark.long
async def test_workspaces_in_advance_leave_room_for_forks(cluster: FakeKubernetes) -> None:
    options = replace(OPTIONS, max_jobs=2, start_s=60)
    workspaces = open_workspaces("kubernetes", engine_options=options, warm=1)
    base, other = await workspaces.prepare(SPEC), await workspaces.prepare(SPEC)
    first = await base.fork()
    await until(lambda: len(cluster.store.list("Job")) == 2)

    second = await other.fork()
    third = asyncio.create_task(base.fork())
    await first.run(["touch", "/new"])
    changed = [change.path for change in await first.changes()]
    await first.close()

    for workspace in (second, await third):
        await workspace.run(["true"])
    assert changed == ["/new"]
    await workspaces.close()


@pytest.mark.long
async def test_fork_that_waits_too_long_is_an_error(cluster: FakeKubernetes) -> None:
    options = replace(OPTIONS, max_jobs=1, start_s=10)
    workspaces = open_workspaces("kubernetes", engine_options=options)
    base = await workspaces.prepare(SPEC)
    await base.fork()

    with pytest.raises(WorkspaceError, match="no workspace was closed in 10 s, and max_jobs, 1,"):
        await base.fork()

    await workspaces.close()


@pytest.mark.long
async def test_requests_that_the_server_refuses_for_now_are_repeated(
    cluster: FakeKubernetes, workspaces: Workspaces
) -> None:
    base = await workspaces.prepare(SPEC)
    cluster.refuse(2, "POST")

    workspace = await base.fork()

    assert (await workspace.run(["echo", "ready"])).text == "ready\n"


@pytest.mark.long
async def test_workspace_whose_pod_was_killed_is_an_error(
    cluster: FakeKubernetes, workspace: Workspace
) -> None:
    running = asyncio.create_task(workspace.run(["sleep", "1000"]))
    await until(lambda: any("exec" in path for _, path in cluster.requests))

    cluster.cluster.kill("atropos.workspace=fork")

    with pytest.raises(WorkspaceError):
        await running


@pytest.mark.long
async def test_jobs_of_a_killed_owner_end_and_are_removed_by_another(
    cluster: FakeKubernetes,
) -> None:
    owner = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", OWNER, IMAGE), stdout=subprocess.PIPE
    )
    assert owner.stdout is not None
    assert await owner.stdout.readline() == b"ready\n"
    (pod,) = cluster.store.list("Pod")

    owner.send_signal(signal.SIGKILL)
    await owner.wait()
    await until(lambda: pod["status"]["phase"] == "Succeeded")
    assert len(cluster.store.list("Job")) == 1
    other = JobEngine(OPTIONS)
    await other.open()
    # The lease of a lost owner is deleted after its Jobs.
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(until(lambda: len(cluster.store.list("Lease")) == 1), 60)

    assert cluster.store.list("Job") == []
    assert len(cluster.store.list("Lease")) == 1
    await other.close()


async def test_task_without_an_image_is_refused(workspaces: Workspaces, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="need an image of a registry"):
        await workspaces.prepare(WorkspaceSpec("test", source=tmp_path))


def test_options_are_read_from_lists_of_strings() -> None:
    options = as_job_options({"kubectl": ["--context=one"], "max_jobs": ["7"]})

    assert options == JobOptions(kubectl=("--context=one",), max_jobs=7)


@pytest.mark.parametrize("given", [{"max_jobs": ["0"]}, {"jobs": ["1"]}, {"ttl_s": ["1", "2"]}])
def test_unknown_options_are_refused(given: dict[str, list[str]]) -> None:
    with pytest.raises(ConfigError, match=json.dumps(next(iter(given)))[1:-1]):
        as_job_options(given)
