"""The door `run-api`, as a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from atroposlib.cli.run_api import main
from tests.api.helpers import REGISTRATION, make_group

START = [sys.executable, "-m", "atroposlib.cli.run_api"]
IN_MEMORY = ("--store", "memory")


@contextmanager
def running(port: int, *flags: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*START, "--host", "localhost", "--port", str(port), *(flags or IN_MEMORY)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_until_up(port: int) -> str:
    url = f"http://localhost:{port}"
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/info").status_code == 200:
                return url
        except httpx.TransportError:
            time.sleep(0.05)
    raise AssertionError("the service did not start")


def test_run_api_says_little_and_ends_on_sigterm(free_port):
    with running(free_port) as process:
        url = wait_until_up(free_port)
        with httpx.Client(base_url=url) as client:
            for _ in range(50):
                client.get("/reset_data")
                client.post("/register", json=REGISTRATION)
                client.post("/scored_data", json=make_group(1))
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=10)

    assert time.monotonic() - started < 5
    assert f"http://localhost:{free_port}" in output
    assert "--host 0.0.0.0" in output
    assert len(output) < 1000


def test_run_api_answers_who_waits_for_a_batch_when_it_is_stopped(free_port):
    with running(free_port) as process, ThreadPoolExecutor() as threads:
        url = wait_until_up(free_port)
        httpx.post(f"{url}/register", json=REGISTRATION)
        asking = [threads.submit(httpx.get, f"{url}/batch?wait=60", timeout=70) for _ in range(2)]
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        started = time.monotonic()
        answers = [asked.result() for asked in asking]
        process.communicate(timeout=10)

    assert [(answer.status_code, answer.json()) for answer in answers] == [
        (200, {"batch": None})
    ] * 2
    assert time.monotonic() - started < 2


def test_run_api_port_in_use_fails_at_once_and_says_so(free_port):
    with running(free_port):
        wait_until_up(free_port)
        with running(free_port) as second:
            output, _ = second.communicate(timeout=30)

        assert httpx.get(f"http://localhost:{free_port}/info").status_code == 200
    assert second.returncode == 1
    assert "address already in use" in output
    assert "--port" in output
    assert "trajectory API: http" not in output


def test_run_api_help_names_every_flag_with_its_default():
    result = subprocess.run(
        [*START, "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )

    for text in ("--host", "127.0.0.1", "--port", "8000", "--reload", "--run", "--token-file"):
        assert text in result.stdout


@pytest.mark.parametrize("port", ["70000", "-1", "eighty"])
def test_run_api_wrong_port_is_a_usage_error_that_names_the_range(monkeypatch, capsys, port):
    monkeypatch.setattr(sys, "argv", ["run-api", f"--port={port}"])

    with pytest.raises(SystemExit) as stop:
        main()

    assert stop.value.code == 2
    assert f"argument --port: '{port}' is no port; expected" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--store", "postgres", "argument --store: store 'postgres' is unknown; expected memory"),
        ("--run", "../up", "argument --run: run name '../up' cannot be used; expected 1 to 100"),
        ("--max-queue-sequences", "-1", "argument --max-queue-sequences: input should be greater"),
        ("--log-format", "xml", "argument --log-format: input should be 'text' or 'json'"),
    ],
)
def test_run_api_wrong_value_is_one_line_that_names_the_flag_and_the_value_once(
    monkeypatch, capsys, flag, value, said
):
    monkeypatch.setattr(sys, "argv", ["run-api", f"{flag}={value}"])

    with pytest.raises(SystemExit) as stop:
        main()

    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2
    assert line.startswith(f"run-api: error: {said}")
    assert line.count(repr(value)) == 1


@pytest.mark.parametrize(
    "url",
    [
        "http://me:s3cret@host:6379",  # pragma: allowlist secret
        "http://:s3cret@host",
        "redis:/:s3cret@h",
        "me:s3cret@h",
    ],
)
def test_run_api_never_shows_the_password_of_a_store(monkeypatch, capsys, url):
    monkeypatch.setattr(sys, "argv", ["run-api", "--store", url])

    with pytest.raises(SystemExit) as stop:
        main()

    said = capsys.readouterr()
    assert stop.value.code == 2
    assert "is unknown; expected memory, sqlite or redis://" in said.err
    assert "s3cret" not in said.err + said.out


def test_run_api_without_the_library_of_its_store_ends_with_one_line(monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["run-api", "--store", "redis://:s3cret@host", "--run", "mine"]
    )
    for name in ("redis", "redis.asyncio"):
        monkeypatch.setitem(sys.modules, name, None)

    with pytest.raises(SystemExit) as stop:
        main()

    assert str(stop.value).startswith("run-api: ")
    assert "atroposlib[redis]" in str(stop.value)
    assert "s3cret" not in str(stop.value)
    assert "\n" not in str(stop.value)


def test_run_api_goes_on_with_a_named_run_after_it_was_killed(free_port, tmp_path):
    flags = ("--data-dir", str(tmp_path / "runs"), "--run", "mine", "--cors-origin", "http://a")
    with running(free_port, *flags), httpx.Client(base_url=wait_until_up(free_port)) as client:
        client.post("/register", json={**REGISTRATION, "batch_size": 1})
        first = client.post(
            "/scored_data", json=make_group(1, score=7), headers={"Idempotency-Key": "one"}
        )
        assert first.json() == {"status": "received"}

    with running(free_port, *flags) as process:
        with httpx.Client(base_url=wait_until_up(free_port)) as client:
            assert client.get("/info").json()["batch_size"] == 1
            assert client.get("/batch").json()["batch"][0]["scores"] == [7]
        process.terminate()
        output, _ = process.communicate(timeout=10)

    assert process.returncode in (0, -signal.SIGTERM)
    assert f"run mine in {tmp_path / 'runs' / 'mine.sqlite3'}" in output
    assert "--run mine" in output


def test_run_api_without_a_name_starts_a_fresh_run_each_time(free_port, tmp_path):
    for count in (1, 2):
        with running(free_port, "--data-dir", str(tmp_path)) as process:
            wait_until_up(free_port)
            process.terminate()
            output, _ = process.communicate(timeout=10)
        files = list(tmp_path.glob("*.sqlite3"))
        assert len(files) == count
        assert any(file.stem in output for file in files)


def test_run_api_store_that_cannot_be_used_ends_it_with_one_line(free_port, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with running(free_port, "--data-dir", str(tmp_path / "file")) as process:
        output, _ = process.communicate(timeout=30)

    assert process.returncode == 1
    assert output.startswith("run-api: ")
    assert "--data-dir" in output
    assert len(output.splitlines()) == 1


def test_run_api_reload_serves_with_its_settings(free_port, tmp_path):
    flags = ("--reload", "--data-dir", str(tmp_path), "--run", "mine")
    with running(free_port, *flags) as process:
        wait_until_up(free_port)
        process.terminate()
        output, _ = process.communicate(timeout=10)

    assert (tmp_path / "mine.sqlite3").exists()
    assert "run mine in" in output
