"""A command in a box without network reaches what its gate allows, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import pytest
from aiohttp import web

from atroposlib.errors import ConfigError
from atroposlib.workspaces.interface import NO_NETWORK, Network, WorkspaceSpec
from atroposlib.workspaces.local import LocalWorkspaces
from atroposlib.workspaces.network import NetworkGate, process_name

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is missing"),
]

PORT = 8000
LARGE_BYTES = 20_000_000
LIMITED = ("/usr/bin/prlimit", "--nofile=256", "--nproc=200", "--as=2147483648")
HTTP = """
import http.client, sys
def ask(path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", 8000, timeout=120)
    connection.request("POST" if body is not None else "GET", path, body)
    return connection.getresponse().read()
"""


async def _events(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for number in range(3):
        await response.write(f"data: {number}\n\n".encode())
        await asyncio.sleep(0.01)
    return response


async def _digest(request: web.Request) -> web.Response:
    digest = hashlib.sha256()
    async for piece in request.content.iter_any():
        digest.update(piece)
    return web.Response(text=digest.hexdigest())


async def _seen(request: web.Request) -> web.Response:
    return web.json_response({"path": request.path_qs, "headers": dict(request.headers)})


async def _large(_: web.Request) -> web.Response:
    return web.Response(body=b"x" * LARGE_BYTES)


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """A server on 127.0.0.1 of the machine."""
    app = web.Application(client_max_size=2 * LARGE_BYTES)
    app.router.add_get("/events", _events)
    app.router.add_get("/large", _large)
    app.router.add_post("/digest", _digest)
    app.router.add_get("/seen", _seen)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield runner.addresses[0][1]
    await runner.cleanup()


@contextlib.asynccontextmanager
async def box(
    gate: NetworkGate,
    command: Sequence[str],
    *,
    namespaces: Sequence[str] = ("--unshare-all",),
    first: Sequence[str] = (),
) -> AsyncIterator[asyncio.subprocess.Process]:
    words = ["bwrap", *namespaces, "--die-with-parent", "--ro-bind", "/usr", "/usr"]
    for name in ("bin", "lib", "lib64"):
        words += ["--symlink", f"usr/{name}", f"/{name}"]
    for path, folder in gate.mounts.items():
        words += ["--ro-bind", str(folder), path]
    words += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--chdir", "/tmp"]
    process = await asyncio.create_subprocess_exec(
        *words, "--", *first, *gate.words(command),
        env={"PATH": "/usr/bin", "LANG": "C.UTF-8", **gate.env},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def run(gate: NetworkGate, *command: str, stdin: bytes = b"") -> str:
    """Run a command to its end and return its output."""
    async with box(gate, command) as process:
        output, errors = await process.communicate(stdin)
        assert process.returncode == 0, errors.decode()
        return output.decode()


async def run_python(gate: NetworkGate, program: str) -> str:
    return await run(gate, "/usr/bin/python3", "-c", program)


def forward(port: int) -> Network:
    return Network(forwards={PORT: f"127.0.0.1:{port}"})


def proxied(*hosts: str) -> Network:
    return Network("allowlist", allowed_hosts=hosts)


async def ask_proxy(gate: NetworkGate, request: str) -> str:
    """Send bytes to the proxy, without a box, and return all that it answers."""
    (folder,) = gate.mounts.values()
    reader, writer = await asyncio.open_unix_connection(folder / str(gate.ports[-1]))
    writer.write(request.encode("latin-1"))
    answer = (await reader.read()).decode("latin-1")
    writer.close()
    return answer


def lookup(*addresses: str) -> Callable[[str, int], Awaitable[Sequence[str]]]:
    async def resolve(name: str, port: int) -> Sequence[str]:
        return addresses

    return resolve


async def test_gate_without_network_adds_nothing() -> None:
    async with NetworkGate(NO_NETWORK) as gate:
        assert not gate.mounts
        assert not gate.env
        assert gate.words(["true", "x"]) == ["true", "x"]


async def test_forward_streams_events_as_they_arrive(port: int) -> None:
    program = """
import http.client, time
connection = http.client.HTTPConnection("127.0.0.1", 8000, timeout=120)
connection.request("GET", "/events")
response = connection.getresponse()
pieces = []
while piece := response.read1():
    pieces.append(piece.decode())
print(len(pieces) > 1, "".join(pieces).split())
"""
    async with NetworkGate(forward(port)) as gate:
        output = await run_python(gate, program)

    assert output == "True ['data:', '0', 'data:', '1', 'data:', '2']\n"


async def test_forward_carries_large_bodies_both_ways(port: int) -> None:
    body = f'b"ab" * {LARGE_BYTES // 2}'
    async with NetworkGate(forward(port)) as gate:
        sent = await run_python(gate, f"{HTTP}print(ask('/digest', {body}).decode())")
        received = await run_python(gate, f"{HTTP}print(len(ask('/large')))")

    assert sent.strip() == hashlib.sha256(b"ab" * (LARGE_BYTES // 2)).hexdigest()
    assert int(received) == LARGE_BYTES


async def test_forward_answers_after_the_client_ended_its_half() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(str(len(await reader.read())).encode())
        writer.close()

    program = """
import socket
with socket.create_connection(("127.0.0.1", 8000)) as connection:
    connection.sendall(b"x" * 100000)
    connection.shutdown(socket.SHUT_WR)
    print(connection.recv(100), connection.recv(100))
"""
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server, NetworkGate(forward(server.sockets[0].getsockname()[1])) as gate:
        output = await run_python(gate, program)

    assert output == "b'100000' b''\n"


async def test_forward_carries_a_hundred_concurrent_connections(port: int) -> None:
    program = f"""{HTTP}
import hashlib, resource
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(100) as pool:
    texts = [str(number).encode() * 50000 for number in range(100)]
    digests = list(pool.map(lambda text: ask("/digest", text).decode(), texts))
print(digests == [hashlib.sha256(text).hexdigest() for text in texts])
"""
    command = ["python3", "-c", program]
    async with NetworkGate(forward(port)) as gate, box(gate, command, first=LIMITED) as process:
        output, _ = await process.communicate()

    assert output == b"True\n"


async def test_command_reaches_nothing_but_its_forwards(port: int) -> None:
    program = f"""
import socket
for host, other in (("127.0.0.1", {port}), ("169.254.169.254", 80), ("1.1.1.1", 53), ("::1", 80)):
    try:
        socket.create_connection((host, other), timeout=5)
        print("connected to", host)
    except OSError as error:
        pass
try:
    print("resolved", socket.gethostbyname("example.org"))
except OSError:
    pass
print("interfaces", [name for _, name in socket.if_nameindex()])
"""
    async with NetworkGate(forward(port)) as gate:
        output = await run_python(gate, program)

    assert output == "interfaces ['lo']\n"


async def test_sockets_cannot_be_replaced_by_the_command(port: int) -> None:
    program = """
import os
for act in (lambda: os.unlink("/run/atropos/network/8000"),
            lambda: open("/run/atropos/network/9", "w"),
            lambda: os.chmod("/run/atropos/network/relay.py", 0o777)):
    try:
        act()
        print("done")
    except OSError as error:
        print(error.errno)
"""
    async with NetworkGate(forward(port)) as gate:
        output = await run_python(gate, program)

    assert output.split() == ["30"] * 3  # EROFS


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["sh", "-c", "exit 7"], 7),
        (["no-such-program"], 127),
        (["/usr"], 126),
        (["sh", "-c", "kill -TERM $$"], 128 + signal.SIGTERM),
        (["python3", "-c", "import os; os.kill(os.getpid(), 13)"], 0),  # Python ignores SIGPIPE
        (["sh", "-c", "yes | head -n 1; kill -PIPE $$"], 128 + signal.SIGPIPE),
    ],
)
async def test_command_has_its_own_exit_code(command: list[str], code: int) -> None:
    async with NetworkGate(forward(1)) as gate, box(gate, command) as process:
        await process.communicate()

    assert process.returncode == code


async def test_command_has_its_input_variables_and_no_further_child(port: int) -> None:
    program = """
import os, sys
print(sys.stdin.read(), sorted(os.environ))
try:
    os.wait()
except ChildProcessError:
    print("no child")
print(sorted(map(int, os.listdir("/proc/self/fd")))[:4])
"""
    async with NetworkGate(forward(port)) as gate:
        output = await run(gate, "python3", "-c", program, stdin=b"given")

    variables = ["LANG", "PATH", "PWD"]
    assert output == f"given {variables}\nno child\n[0, 1, 2, 3]\n"


async def test_relay_outlives_a_command_that_ends_all_python_programs(port: int) -> None:
    program = f"""{HTTP}
import os
own = os.getpid()
for pid in filter(str.isdigit, os.listdir("/proc")):
    if int(pid) != own and "python" in open(f"/proc/{{pid}}/comm").read():
        os.kill(int(pid), 9)
print(len(ask("/large")))
"""
    async with NetworkGate(forward(port)) as gate:
        first = await run_python(gate, program.replace("import os\n", "import os; ask('/large')\n"))

    assert int(first) == LARGE_BYTES


async def test_relay_ends_with_its_command_where_processes_outlive_it(port: int) -> None:
    """The box of this test shares the processes of the machine."""
    async with NetworkGate(forward(port)) as gate:
        namespaces = ("--unshare-net", "--unshare-user-try")
        async with box(gate, ["sh", "-c", "echo started"], namespaces=namespaces) as process:
            output, _ = await process.communicate()

        assert output == b"started\n"
        (folder,) = gate.mounts.values()
        for _ in range(2400):
            if not _relays(folder):
                break
            await asyncio.sleep(0.05)
        assert not _relays(folder)


async def test_workspace_has_the_network_of_each_command_only(port: int, tmp_path: Path) -> None:
    network = Network("allowlist", (f"127.0.0.1:{port}",), {PORT: f"127.0.0.1:{port}"})
    program = """
import os, urllib.request
for address in ("127.0.0.1:8000", "PORT"):
    request = urllib.request.Request(f"http://{address}/seen")
    if address != "127.0.0.1:8000":
        request.set_proxy(os.environ["http_proxy"].removeprefix("http://"), "http")
    print(urllib.request.urlopen(request, timeout=20).status)
""".replace("PORT", f"127.0.0.1:{port}")
    workspaces = LocalWorkspaces(cache=tmp_path)
    base = await workspaces.prepare(WorkspaceSpec("network"))
    workspace = await base.fork()
    results = [
        await workspace.run(["python3", "-c", program], network=each)
        for each in (network, NO_NETWORK, network)
    ]
    changes = await workspace.changes()
    await workspaces.close()

    assert [result.exit_code for result in results] == [0, 1, 0], results
    assert results[0].text == results[2].text == "200\n200\n"
    assert changes == []


async def test_proxy_reaches_an_address_of_the_allowlist(port: int) -> None:
    program = f"""
import json, urllib.request
answer = urllib.request.urlopen("http://127.0.0.1:{port}/seen?x=1").read()
print(json.dumps(json.loads(answer)))
"""
    async with NetworkGate(proxied(f"127.0.0.1:{port}")) as gate:
        output = await run(
            gate, "env", "-u", "NO_PROXY", "-u", "no_proxy", "python3", "-c", program
        )

    assert gate.env["HTTPS_PROXY"] == "http://127.0.0.1:3128"
    seen = json.loads(output)
    assert seen["path"] == "/seen?x=1"
    assert seen["headers"]["Host"] == f"127.0.0.1:{port}"
    assert seen["headers"]["Connection"] == "close"


async def test_proxy_tunnels_a_name_to_the_address_that_was_checked(port: int) -> None:
    asked = []

    async def resolve(name: str, number: int) -> Sequence[str]:
        asked.append((name, number))
        return ["127.0.0.1"]

    hosts = (f"model.example:{port}", f"127.0.0.1:{port}")
    async with NetworkGate(proxied(*hosts), resolve=resolve) as gate:
        answer = await ask_proxy(
            gate,
            f"CONNECT Model.Example.:{port} HTTP/1.1\r\nHost: x\r\n\r\n"
            "GET /seen HTTP/1.1\r\nHost: inner\r\nConnection: close\r\n\r\n",
        )

    assert answer.startswith("HTTP/1.1 200 Connection established\r\n\r\nHTTP/1.1 200 OK\r\n")
    assert '"Host": "inner"' in answer
    assert asked == [("model.example", port)]


@pytest.mark.parametrize(
    ("addresses", "status"),
    [
        (("127.0.0.1",), 403),
        (("10.0.0.8", "192.0.2.1"), 403),
        (("169.254.169.254",), 403),
        (("::ffff:127.0.0.1",), 403),
        (("64:ff9b::a00:1",), 403),
        (("64:ff9b:1::a00:1",), 403),
        (("::a00:1",), 403),
        (("::ffff:0:a00:1",), 403),
        (("fec0::1",), 403),
        (("2001:4860:4860::5efe:a00:1",), 403),
        (("224.0.0.1",), 403),
        (("168.63.129.16",), 403),
        ((), 502),
    ],
)
async def test_proxy_refuses_a_public_name_with_another_address(
    addresses: tuple[str, ...], status: int
) -> None:
    async with NetworkGate(Network("public"), resolve=lookup(*addresses)) as gate:
        answer = await ask_proxy(gate, "CONNECT evil.example:443 HTTP/1.1\r\n\r\n")

    assert answer.startswith(f"HTTP/1.1 {status} ")


async def test_proxy_resolves_no_name_that_is_not_allowed() -> None:
    async def resolve(name: str, port: int) -> Sequence[str]:
        raise AssertionError(name)

    async with NetworkGate(proxied("pypi.org", "10.0.0.0/8"), resolve=resolve) as gate:
        answer = await ask_proxy(gate, "CONNECT secret.evil.example:443 HTTP/1.1\r\n\r\n")

    assert answer.startswith("HTTP/1.1 403 ")
    assert "does not allow secret.evil.example:443" in answer


HOSTILE = [
    ("", 0),
    ("\r\n\r\n", 400),
    ("GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", 400),
    ("GET https://example.org/ HTTP/1.1\r\n\r\n", 400),
    ("GET http://user@example.org/ HTTP/1.1\r\n\r\n", 400),
    ("GET http://example.org:99999/ HTTP/1.1\r\n\r\n", 400),
    ("GET http://example.org:0/ HTTP/1.1\r\n\r\n", 400),
    ("GET http://2130706433/ HTTP/1.1\r\n\r\n", 403),
    ("GET http://127.1/ HTTP/1.1\r\n\r\n", 403),
    ("GET http://[::1]/ HTTP/1.1\r\n\r\n", 403),
    ("GET http://[::ffff:7f00:1]/ HTTP/1.1\r\n\r\n", 403),
    ("GET http://example.org:22/ HTTP/1.1\r\n\r\n", 403),
    ("GET http://example.org/ HTTP/1.1\r\nX: a\nHost: b\r\n\r\n", 400),
    ("GET http://example.org/ HTTP/1.1\r\nX: a\x00\r\n\r\n", 400),
    ("GET http://example.org/ HTTP/1.1\r\n folded: a\r\n\r\n", 400),
    ("GET http://example.org/\x80 HTTP/1.1\r\n\r\n", 400),
    ("GET http://example.org/ HTTP/2.0\r\n\r\n", 400),
    ("CONNECT example.org HTTP/1.1\r\n\r\n", 400),
    ("CONNECT http://example.org:443 HTTP/1.1\r\n\r\n", 400),
    ("CONNECT example.org:443/x HTTP/1.1\r\n\r\n", 400),
    ("CONNECT example.org:25 HTTP/1.1\r\n\r\n", 403),
    (f"CONNECT {'a' * 300}.org:443 HTTP/1.1\r\n\r\n", 400),
    ("GET http://example.org/ HTTP/1.1\r\n" + "X: y\r\n" * 200 + "\r\n", 400),
    ("GET http://example.org/ HTTP/1.1\r\nX: " + "y" * 100_000, 431),
]


@pytest.mark.parametrize(("request_", "status"), HOSTILE)
async def test_proxy_answers_a_hostile_request_with_an_error(request_: str, status: int) -> None:
    async with NetworkGate(Network("public"), resolve=lookup("127.0.0.1")) as gate:
        (folder,) = gate.mounts.values()
        reader, writer = await asyncio.open_unix_connection(folder / str(gate.ports[0]))
        writer.write(request_.encode("latin-1"))
        writer.write_eof()
        answer = await reader.read()
        writer.close()

    assert answer.startswith(f"HTTP/1.1 {status} ".encode()) if status else answer == b""


async def test_proxy_ends_connections_over_the_maximum() -> None:
    async with NetworkGate(Network("public"), resolve=lookup("127.0.0.1")) as gate:
        (folder,) = gate.mounts.values()
        path = folder / str(gate.ports[0])
        open_ = [await asyncio.open_unix_connection(path) for _ in range(256)]
        await asyncio.sleep(0)
        reader, last = await asyncio.open_unix_connection(path)
        assert await reader.read() == b""
        for _, writer in [*open_, (reader, last)]:
            writer.close()


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (Network(forwards={80: "127.0.0.1:1"}), "from 1024 to 65535, got 80"),
        (Network(forwards={8000: "127.0.0.1"}), "expected host:port for port 8000"),
        (Network("allowlist", allowed_hosts=("a b",)), "'a b' is malformed"),
        (Network("allowlist", allowed_hosts=("*",)), "'\\*' is malformed"),
        (Network("allowlist", allowed_hosts=("https://a.org",)), "is malformed"),
    ],
)
def test_gate_rejects_malformed_addresses(network: Network, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NetworkGate(network)


async def test_folder_may_have_a_long_path(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))

    async with NetworkGate(forward(port)) as gate:
        output = await run_python(gate, f"{HTTP}print(len(ask('/large')))")

    assert int(output) == LARGE_BYTES
    assert not list(folder.iterdir())


async def test_folder_is_private_and_removed_at_the_end(port: int) -> None:
    async with NetworkGate(forward(port)) as gate:
        (folder,) = gate.mounts.values()
        assert folder.parent.stat().st_mode & 0o777 == 0o700

    assert not folder.parent.exists()


def test_folder_of_a_killed_process_is_removed_by_the_next_one(tmp_path: Path) -> None:
    program = """
import asyncio, os, signal
from atroposlib.workspaces.interface import Network
from atroposlib.workspaces.network import NetworkGate
async def main():
    async with NetworkGate(Network(forwards={8000: "127.0.0.1:1"})) as gate:
        if os.environ.get("KILLED"):
            os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    kept = tmp_path / f"atropos-network-{process_name(os.getpid())}-x"
    kept.mkdir()
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], env={**env, "KILLED": "1"}, check=False)
    left = sorted(tmp_path.iterdir())
    subprocess.run([sys.executable, "-c", program], env=env, check=True)

    assert len(left) == 2
    assert list(tmp_path.iterdir()) == [kept]


def _relays(folder: Path) -> list[str]:
    """Return the processes that run the relay of a gate; other tests run relays too."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_relay = b"/run/atropos/network/relay.py" in (process / "cmdline").read_bytes()
            if is_relay and folder.parent.name in (process / "mountinfo").read_text():
                found.append(process.name)
    return found
