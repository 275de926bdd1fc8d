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
from pathlib import Path

import httpx
import pytest

from atroposlib.api.store.open import similar_run
from atroposlib.cli.run_api import main
from tests.api.helpers import REGISTRATION, make_group

pytestmark = pytest.mark.slow

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
    deadline = time.monotonic() + 120
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
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)

    assert f"http://localhost:{free_port}" in output
    assert "--host 0.0.0.0" in output
    assert len(output) < 1000


def wait_for_requests(url: str, number: int) -> None:
    """Wait until so many requests for a batch are being answered."""
    sample = f'atropos_http_requests_in_flight{{method="GET",route="/batch"}} {number}.0'
    deadline = time.monotonic() + 60
    while sample not in httpx.get(f"{url}/metrics").text:
        assert time.monotonic() < deadline, httpx.get(f"{url}/metrics").text
        time.sleep(0.05)


def test_run_api_answers_who_waits_for_a_batch_when_it_is_stopped(free_port):
    with running(free_port) as process, ThreadPoolExecutor() as threads:
        url = wait_until_up(free_port)
        httpx.post(f"{url}/register", json=REGISTRATION)
        asking = [threads.submit(httpx.get, f"{url}/batch?wait=60", timeout=70) for _ in range(2)]
        wait_for_requests(url, 2)
        process.send_signal(signal.SIGTERM)
        answers = [asked.result() for asked in asking]
        process.communicate(timeout=60)

    assert [(answer.status_code, answer.json()) for answer in answers] == [
        (200, {"batch": None})
    ] * 2


def test_run_api_port_in_use_fails_at_once_and_says_so(free_port):
    with running(free_port):
        wait_until_up(free_port)
        with running(free_port) as second:
            output, _ = second.communicate(timeout=120)

        assert httpx.get(f"http://localhost:{free_port}/info").status_code == 200
    assert second.returncode == 2
    assert output == f"run-api: port {free_port} is in use; choose another with --port\n"


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
    assert (
        f"argument --port: expected a port from 0 to 65535 (0: any free port), got '{port}'"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--store", "postgres", "argument --store: store 'postgres' is unknown; expected memory"),
        ("--run", "../up", "argument --run: run name '../up' cannot be used; expected 1 to 100"),
        ("--max-queue-sequences", "-1", "argument --max-queue-sequences: input should be greater"),
        ("--allowed-host", "a/b", "argument --allowed-host: 'a/b' is not a host name; expected"),
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


def test_run_api_without_the_library_of_its_store_ends_with_one_line(monkeypatch, capsys):
    words = ["--port", "0", "--store", "redis://:s3cret@host", "--run", "mine"]
    monkeypatch.setattr(sys, "argv", ["run-api", *words])
    for name in ("redis", "redis.asyncio"):
        monkeypatch.setitem(sys.modules, name, None)

    with pytest.raises(SystemExit) as stop:
        main()

    [line] = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2
    assert line.startswith("run-api: ")
    assert ".[redis]" in line
    assert "s3cret" not in line


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
        output, _ = process.communicate(timeout=60)

    assert process.returncode in (0, -signal.SIGTERM)
    assert f"run mine in {tmp_path / 'runs' / 'mine.sqlite3'}" in output
    assert "--run mine" in output


@pytest.mark.long
def test_run_api_without_a_name_starts_a_fresh_run_each_time(free_port, tmp_path):
    for count in (1, 2):
        with running(free_port, "--data-dir", str(tmp_path)) as process:
            wait_until_up(free_port)
            process.terminate()
            output, _ = process.communicate(timeout=60)
        files = list(tmp_path.glob("*.sqlite3"))
        assert len(files) == count
        assert any(file.stem in output for file in files)


def test_run_api_store_that_cannot_be_used_ends_it_with_one_line(free_port, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with running(free_port, "--data-dir", str(tmp_path / "file")) as process:
        output, _ = process.communicate(timeout=120)

    assert process.returncode == 2
    assert output.startswith("run-api: ")
    assert "--data-dir" in output
    assert len(output.splitlines()) == 1


@pytest.mark.long
def test_run_api_reload_serves_with_its_settings(free_port, tmp_path):
    flags = ("--reload", "--data-dir", str(tmp_path), "--run", "mine")
    with running(free_port, *flags) as process:
        wait_until_up(free_port)
        process.terminate()
        output, _ = process.communicate(timeout=60)

    assert (tmp_path / "mine.sqlite3").exists()
    assert "run mine in" in output


def test_run_api_says_new_or_resuming_and_how_to_continue_after_ctrl_c(free_port, tmp_path):
    flags = ("--data-dir", str(tmp_path), "--run", "mine")
    outputs = []
    for _ in range(2):
        with running(free_port, *flags) as process:
            with httpx.Client(base_url=wait_until_up(free_port)) as client:
                client.post("/register", json=REGISTRATION)
                client.post("/scored_data", json=make_group(1))
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=120)
        outputs.append(output)
        assert process.returncode == 130
        assert output.splitlines()[-1] == (
            f"stopped; continue with: run-api --run mine --data-dir {tmp_path} "
            f"--host localhost --port {free_port}"
        )
        assert "Traceback" not in output

    assert f"new run mine in {tmp_path / 'mine.sqlite3'}" in outputs[0]
    assert "resuming mine: step 0, 1 group waiting" in outputs[1]


def test_run_api_continues_with_the_flags_of_its_start(free_port, tmp_path):
    flags = (
        *("--data-dir", str(tmp_path), "--run", "mine", "--fsync", "--max-queue-sequences", "64"),
        *("--engine", "http://127.0.0.1:1", "--allowed-host", "runs.example.org"),
    )
    with running(free_port, *flags) as process:
        wait_until_up(free_port)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=120)

    assert output.splitlines()[-1] == (
        f"stopped; continue with: run-api --run mine --data-dir {tmp_path} "
        f"--host localhost --port {free_port} --fsync --max-queue-sequences 64 "
        "--engine http://127.0.0.1:1 --allowed-host runs.example.org"
    )


def test_run_api_in_memory_says_that_its_run_is_lost(free_port):
    with running(free_port) as process:
        wait_until_up(free_port)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=120)

    assert output.splitlines()[-1] == "stopped; the run was in memory and is lost"


def test_ctrl_c_ends_with_130_under_a_parent_that_ignores_interrupts(free_port):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as `nohup` and scripts of CI do
    try:
        with running(free_port) as process:
            wait_until_up(free_port)
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
    finally:
        signal.signal(signal.SIGINT, before)

    assert process.returncode == 130


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("mien", ["mine"], "mine"),
        ("gsm8k-qwne", ["gsm8k-qwen"], "gsm8k-qwen"),
        ("GSM8K_qwen", ["gsm8k-qwen"], "gsm8k-qwen"),
        ("gsm8kqwen", ["gsm8k-qwen"], "gsm8k-qwen"),
        ("math-7b-tarin", ["math-7b-train", "other"], "math-7b-train"),
        ("baselin", ["baseline"], "baseline"),
        ("baseline", ["baselime"], "baselime"),
        ("baseline2", ["baseline"], None),
        ("run-2", ["run-1"], None),
        ("exp-b", ["exp-a"], None),
        ("sft-qwen", ["rft-qwen"], None),
        ("maths", ["physics"], None),
        ("gsm8k-qwen-lora", ["gsm8k-qwen"], None),
        ("anything", [], None),
    ],
)
def test_similar_run_finds_slips_and_leaves_a_series_alone(name, known, meant):
    assert similar_run(name, known) == meant


def test_run_api_refuses_a_misspelt_run_without_a_terminal(free_port, tmp_path):
    (tmp_path / "mine.sqlite3").write_bytes(b"")
    flags = ("--data-dir", str(tmp_path), "--run", "mien")
    with running(free_port, *flags) as process:
        output, _ = process.communicate(timeout=120)

    assert process.returncode == 2
    assert output.splitlines() == [
        f"run-api: {tmp_path} has the run mine, but not mien; continue it with --run mine, or "
        f"create a new one with: run-api --run mien --data-dir {tmp_path} --host localhost "
        f"--port {free_port} --new-run"
    ]
    assert not (tmp_path / "mien.sqlite3").exists()

    with running(free_port, *flags, "--new-run"):
        wait_until_up(free_port)
    assert (tmp_path / "mien.sqlite3").exists()


@pytest.mark.long
def test_run_api_refuses_a_misspelt_run_in_redis_too(free_port, redis_server):
    command = ("--store", redis_server.url, "--run")
    with running(free_port, *command, "math-7b-train") as process:
        wait_until_up(free_port)
        process.terminate()
        process.communicate(timeout=120)
    with running(free_port, *command, "math-7b-tarin") as process:
        output, _ = process.communicate(timeout=120)

    assert process.returncode == 2
    (line,) = output.splitlines()
    assert f"{redis_server.url} has the run math-7b-train, but not math-7b-tarin" in line
    assert "--new-run" in line
    with running(free_port, *command, "math-7b-tarin", "--new-run"):
        wait_until_up(free_port)
    with running(free_port, *command, "math-7b-tarin"):
        assert wait_until_up(free_port)


def test_run_api_asks_nothing_in_memory_and_says_that_a_name_continues_nothing(free_port):
    with running(free_port, "--store", "memory", "--run", "mine") as process:
        wait_until_up(free_port)
        process.terminate()
        output, _ = process.communicate(timeout=120)

    assert "the run is in memory: it is lost when this process ends" in output
    assert "--run mine cannot continue it" in output


@pytest.mark.parametrize(("answer", "is_made"), [("y", True), ("", False), ("no", False)])
def test_run_api_asks_at_a_terminal_before_a_misspelt_run_is_made(
    monkeypatch, capsys, tmp_path, answer, is_made
):
    (tmp_path / "mine.sqlite3").write_bytes(b"")
    served = []
    words = ["--port", "0", "--data-dir", str(tmp_path), "--run", "mien"]
    monkeypatch.setattr(sys, "argv", ["run-api", *words])
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: answer)
    monkeypatch.setattr("atroposlib.cli.run_api._serve", lambda *_, **__: served.append(1))

    if is_made:
        main()
    else:
        with pytest.raises(SystemExit, match="2"):
            main()
        assert "continue it with --run mine" in capsys.readouterr().err

    assert bool(served) is is_made


def test_run_api_stops_quietly_if_nobody_reads_its_output(free_port, tmp_path):
    errors = tmp_path / "errors"
    with errors.open("w") as stream:
        process = subprocess.Popen(
            [*START, "--host", "localhost", "--port", str(free_port), *IN_MEMORY],
            stdout=subprocess.PIPE,
            stderr=stream,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()  # as `| head -1` does
        process.send_signal(signal.SIGINT)
        code = process.wait(timeout=120)

    assert (code, errors.read_text()) == (130, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
def test_run_api_serves_and_stops_if_the_disk_of_its_output_is_full(free_port):
    with Path("/dev/full").open("w") as full:
        process = subprocess.Popen(
            [*START, "--host", "localhost", "--port", str(free_port), *IN_MEMORY], stdout=full
        )
    try:
        wait_until_up(free_port)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
        process.wait()
