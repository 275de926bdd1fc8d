"""The guard ends the open sessions of a process that was killed, on a real server."""

from __future__ import annotations

import http.server
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atroposlib.adapters.session_guard import EndRequest, SessionGuard, end_sessions

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

REPOSITORY = Path(__file__).parents[2]
KEY = "key-of-a-user"


class EndServer(http.server.ThreadingHTTPServer):
    """Notes requests; those to /hang wait until the test ends."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), EndHandler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.requests: list[tuple[str, str, str | None]] = []
        self.is_over = threading.Event()

    def paths(self) -> list[str]:
        return sorted(path for _, path, _ in self.requests)


class EndHandler(http.server.BaseHTTPRequestHandler):
    server: EndServer

    def do_POST(self) -> None:
        self.server.requests.append((self.command, self.path, self.headers["X-API-Key"]))
        if self.path == "/hang":
            self.server.is_over.wait(60)
            return
        self.send_response(307 if self.path == "/moved" else 200)
        self.send_header("Location", self.server.url + "/elsewhere")
        self.end_headers()

    do_DELETE = do_POST

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[EndServer]:
    with EndServer() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.is_over.set()
        server.shutdown()
        thread.join()


def post(server: EndServer, path: str) -> EndRequest:
    return EndRequest("POST", server.url + path, {"X-API-Key": KEY})


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met"
        time.sleep(0.02)


def read_of(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text()


def ignores_sigterm(pid: int) -> bool:
    ignored = read_of(pid, "status").partition("SigIgn:")[2].split()[0]
    return bool(int(ignored, 16) >> (signal.SIGTERM - 1) & 1)


def is_running(pid: int) -> bool:
    try:
        state = read_of(pid, "stat").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


HOLD = """
import asyncio, multiprocessing, os, subprocess, sys, time
from atroposlib.adapters.session_guard import EndRequest, SessionGuard

url, key, child = sys.argv[1], sys.stdin.readline().strip(), sys.argv[2]
guard = SessionGuard()
for name in "abc":
    guard.opened(name, [EndRequest("DELETE", f"{url}/{name}", {"X-API-Key": key})])
guard.ended("b")
others = []
if child == "fork":
    other = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    other.start()
    others.append(other.pid)
elif child == "spawn":
    others.append(subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL).pid)
print(guard._process.pid, *others, flush=True)
if child == "end":
    asyncio.run(guard.close())
else:
    time.sleep(600)
"""


def hold(server: EndServer, child: str) -> tuple[subprocess.Popen[bytes], int, list[int]]:
    """Start a process with open sessions; return it, its guard, and its other children."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, server.url, child],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(KEY.encode() + b"\n")
    process.stdin.close()
    guard, *others = map(int, process.stdout.readline().split())
    process.stdout.close()
    return process, guard, others


@pytest.mark.parametrize("child", ["none", "spawn", "fork"])
def test_killed_process_ends_its_open_sessions_once(server: EndServer, child: str) -> None:
    process, guard, others = hold(server, child)
    try:
        wait_until(lambda: ignores_sigterm(guard))
        os.kill(guard, signal.SIGTERM)  # as a service manager does
        assert server.paths() == []

        process.kill()
        process.wait()

        wait_until(lambda: not is_running(guard))
        assert all(is_running(pid) for pid in others)
    finally:
        for pid in others:
            os.kill(pid, signal.SIGKILL)
    assert sorted(server.requests) == [("DELETE", "/a", KEY), ("DELETE", "/c", KEY)]


def test_process_that_ends_takes_its_guard_along(server: EndServer) -> None:
    process, guard, _ = hold(server, "end")

    assert process.wait(120) == 0

    assert not is_running(guard)
    assert server.paths() == ["/a", "/c"]


async def test_guard_has_a_session_of_its_own_and_shows_no_key(server: EndServer) -> None:
    guard = SessionGuard()
    guard.opened("a", [post(server, "/a")])
    assert guard._process is not None
    pid = guard._process.pid

    seen = [read_of(pid, name) for name in ("cmdline", "environ")]
    group = os.getpgid(pid)
    guard.ended("a")
    await guard.close()

    assert all(KEY not in text for text in seen)
    assert group == pid != os.getpgid(0)
    assert server.requests == []


async def test_session_with_two_requests_sends_both_in_order(server: EndServer) -> None:
    guard = SessionGuard()
    guard.opened("a", [post(server, "/old")])
    guard.opened("a", [post(server, "/delete"), post(server, "/delete_session")])

    await guard.close()

    assert [path for _, path, _ in server.requests] == ["/delete", "/delete_session"]


async def test_session_that_is_being_created_is_ended_again(server: EndServer) -> None:
    guard = SessionGuard()
    guard.opened("a", [post(server, "/a")], repeat_s=5.0)
    guard.opened("b", [post(server, "/b")])

    await guard.close()

    assert server.paths().count("/a") >= 2
    assert server.paths().count("/b") == 1


def test_end_of_an_unknown_session_starts_no_guard() -> None:
    guard = SessionGuard()

    guard.ended("a")

    assert guard._process is None


async def test_redirect_is_not_followed(server: EndServer) -> None:
    guard = SessionGuard()
    guard.opened("a", [EndRequest("DELETE", server.url + "/moved", {"X-API-Key": KEY})])

    await guard.close()

    assert server.paths() == ["/moved"]


def test_servers_that_hang_or_are_gone_do_not_hold_up_the_others(
    server: EndServer, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atroposlib.adapters.session_guard.REQUEST_S", 1.0)
    gone = EndRequest("POST", f"http://127.0.0.1:{free_port}/", {})
    wrong = EndRequest("POST", "no url", {"X": "a\nb"})
    sessions = [[post(server, "/hang")]] * 70 + [[gone], [wrong], [post(server, "/last")]]

    end_sessions([{"requests": [r._asdict() for r in each], "repeat_s": 0} for each in sessions])

    wait_until(lambda: server.paths() == ["/hang"] * 70 + ["/last"])


def test_all_requests_have_one_time_limit(
    server: EndServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atroposlib.adapters.session_guard.TOTAL_S", 0.2)
    monkeypatch.setattr("atroposlib.adapters.session_guard.REQUEST_S", 60.0)
    session = {"requests": [post(server, "/hang")._asdict()], "repeat_s": 0}

    end_sessions([session] * 3)

    wait_until(lambda: server.paths() == ["/hang"] * 3)
    assert any(thread.name.endswith("(_work)") for thread in threading.enumerate())
    server.is_over.set()
    wait_until(lambda: not any("(_work)" in thread.name for thread in threading.enumerate()))


async def test_guard_that_cannot_be_started_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sys.executable", "/no/such/program")
    guard = SessionGuard()

    with caplog.at_level(logging.WARNING):
        guard.opened("a", [EndRequest("POST", "http://127.0.0.1:1", {"X-API-Key": KEY})])
        guard.opened("b", [])
        guard.ended("a")
    await guard.close()

    [record] = caplog.records
    assert "FileNotFoundError: No such file" in record.getMessage()
    assert KEY not in caplog.text


async def test_guard_that_was_killed_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    guard = SessionGuard()
    guard.opened("a", [])
    assert guard._process is not None
    guard._process.kill()
    guard._process.wait()

    with caplog.at_level(logging.WARNING):
        guard.opened("b", [])
        guard.ended("b")
    await guard.close()

    [record] = caplog.records
    assert "BrokenPipeError" in record.getMessage()


async def test_guard_that_does_not_read_is_ended_without_requests(
    server: EndServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atroposlib.adapters.session_guard.MAX_UNSENT_BYTES", 65536)
    guard = SessionGuard()
    guard.opened("a", [post(server, "/a")])
    assert guard._process is not None
    guard._process.send_signal(signal.SIGSTOP)

    with caplog.at_level(logging.WARNING):
        for number in range(2000):  # 64 KiB fit into the pipe
            guard.opened(str(number), [post(server, "/full")])
    await guard.close()

    [record] = caplog.records
    assert "does not read its pipe" in record.getMessage()
    assert server.requests == []


async def test_sessions_that_begin_while_the_guard_starts_do_not_fill_its_pipe(
    server: EndServer, caplog: pytest.LogCaptureFixture
) -> None:
    guard = SessionGuard()
    guard.opened("a", [post(server, "/a")])
    assert guard._process is not None
    guard._process.send_signal(signal.SIGSTOP)

    with caplog.at_level(logging.WARNING):
        for number in range(1000):  # 64 KiB fit into the pipe
            guard.opened(str(number), [post(server, "/ended")])
        for number in range(1000):
            guard.ended(str(number))
        guard.opened("z", [post(server, "/z")])
        guard._process.send_signal(signal.SIGCONT)
        await guard.close()

    assert caplog.records == []
    assert server.paths() == ["/a", "/z"]


def test_module_imports_no_package_of_others() -> None:
    script = (
        "import json, sys; before = {*sys.modules}; import atroposlib.adapters.session_guard; "
        "print(json.dumps(sorted({n.split('.')[0] for n in {*sys.modules} - before})))"
    )

    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    )

    assert {*json.loads(done.stdout)} - sys.stdlib_module_names == {"atroposlib"}
