"""Exports from a real `run-api`: looking, consuming, a service that goes away."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from atroposlib.api.client_consumer import InspectionClient
from atroposlib.cli import dpo, sft, view_run, view_run_multimodal
from atroposlib.errors import ConfigError
from atroposlib.exporting.groups import find_run, full_group, read_run, watch_groups
from tests.exporting.conftest import Service
from tests.exporting.samples import make_groups, read_records

pytestmark = pytest.mark.slow

Start = Callable[..., Service]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.long
def test_looking_takes_and_resets_nothing(
    start_service: Start, run_command: Run, tokenizer: Any, tmp_path: Path
) -> None:
    service = start_service("--run", "looked-at", "--data-dir", str(tmp_path / "runs"))
    service.register()
    groups = make_groups(tokenizer, 6)
    service.post(groups)
    taken = httpx.get(f"{service.url}/batch").json()["batch"]
    leased = httpx.get(f"{service.url}/batch?lease=600").json()["batch"]
    assert (len(taken), len(leased)) == (1, 1)
    before = service.status()
    path = tmp_path / "out.jsonl"

    words = ("--api-url", service.url, "--format", "trl-messages", "--all", "--no-wait")
    done = run_command("sft", path, *words)

    assert done.returncode == 0, done.stderr
    assert service.status() == before
    assert "12 examples from 6 groups with 24 trajectories" in done.stdout
    asked = [record["messages"][0]["content"] for record in read_records(path)]
    assert sorted(set(asked)) == [f"What is {i} + {i}?" for i in range(6)]
    # The same groups, from the file of the run while it is served.
    stored = [full_group(raw) for raw in read_run(find_run("looked-at", tmp_path / "runs"))]
    assert [group["tokens"] for group in stored] == [group["tokens"] for group in groups]


def test_export_waits_for_groups_and_stops_at_the_number(
    start_service: Start, tokenizer: Any, tmp_path: Path
) -> None:
    service = start_service("--store", "memory")
    service.register()
    groups = make_groups(tokenizer, 4)
    service.post(groups[:2])
    waits: list[float] = []

    def post_more(delay_s: float) -> None:
        waits.append(delay_s)
        if len(waits) == 2:
            service.post(groups[2:])

    with InspectionClient(service.url) as client:
        source = watch_groups(client, is_endless=True, sleep=post_more)
        found = [full_group(next(source))["tokens"] for _ in range(4)]

    assert found == [group["tokens"] for group in groups]


def test_no_trainer_is_said_when_nothing_comes(start_service: Start) -> None:
    service = start_service("--store", "memory")
    notices: list[str] = []

    class Stop(Exception):
        pass

    def notify(line: str) -> None:
        notices.append(line)
        raise Stop

    with InspectionClient(service.url) as client, contextlib.suppress(Stop):
        next(watch_groups(client, is_endless=True, notify=notify, sleep=lambda _: None))

    assert notices == [
        "no trainer is registered, so environments do not start; start one, or let this command "
        "be the trainer with --consume"
    ]


@pytest.mark.long
def test_service_that_goes_away_leaves_a_valid_file_and_says_how_to_go_on(
    start_service: Start, run_command: Run, tokenizer: Any, tmp_path: Path
) -> None:
    service = start_service("--run", "r", "--data-dir", str(tmp_path))
    service.register()
    service.post(make_groups(tokenizer, 3))
    path = tmp_path / "out.jsonl"
    words = [path, "--api-url", service.url, "--format", "tokens", "--num-seqs-to-save", 8]
    killer = threading.Thread(target=_kill_when, args=(service, path, 6))
    killer.start()

    done = run_command("sft", *words)
    killer.join()

    assert done.returncode == 1, done.stderr
    assert "got no answer" in done.stderr
    assert (
        f"6 records are in {path}; to continue, run the same command with --resume" in done.stderr
    )
    assert len(read_records(path)) == 6

    again = start_service("--run", "r", "--data-dir", str(tmp_path))
    again.post(make_groups(tokenizer, 5)[3:])
    words[2] = again.url
    resumed = run_command("sft", *words, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert len({json.dumps(record) for record in read_records(path)}) == 8


def _kill_when(service: Service, path: Path, num_lines: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if path.exists() and path.read_bytes().count(b"\n") == num_lines:
            break
        time.sleep(0.05)
    service.process.kill()


def test_ctrl_c_keeps_what_is_written(start_service: Start, tokenizer: Any, tmp_path: Path) -> None:
    service = start_service("--store", "memory")
    service.register()
    service.post(make_groups(tokenizer, 3))
    path = tmp_path / "out.parquet"
    words = [str(path), "--api-url", service.url, "--format", "tokens"]
    process = subprocess.Popen(
        [sys.executable, "-m", "atroposlib.cli.sft", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    part = tmp_path / "out.parquet.part.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if part.exists() and part.read_bytes().count(b"\n") == 6:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=120)

    assert process.returncode == 130, errors
    assert "6 examples from 3 groups" in output
    assert "stopped; 6 records are in" in errors
    import datasets

    assert len(datasets.load_dataset("parquet", data_files=str(path), split="train")) == 6


@pytest.mark.long
def test_consuming_says_so_resets_registers_and_stops_exactly(
    start_service: Start, run_command: Run, tokenizer: Any, tmp_path: Path
) -> None:
    service = start_service("--store", "memory")
    service.register()
    path = tmp_path / "out.jsonl"
    poster = threading.Thread(target=_post_when_registered, args=(service, tokenizer))
    poster.start()

    words = ("--consume", "--api-url", service.url, "--group-size", 4, "--tasks-per-step", 1)
    done = run_command("sft", path, *words, "--save-messages", "--num-seqs-to-save", 3)
    poster.join()

    assert done.returncode == 0, done.stderr
    assert f"resetting the run at {service.url} and registering as its trainer" in done.stderr
    assert [set(record) for record in read_records(path)] == [{"messages", "score"}] * 3
    # 64 groups by default, here one; a step count that environments can go by
    assert httpx.get(f"{service.url}/info").json() == {"batch_size": 4, "max_token_len": 2048}


def _post_when_registered(service: Service, tokenizer: Any) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if httpx.get(f"{service.url}/info").json()["max_token_len"] == 2048:
            break
        time.sleep(0.05)
    service.post(make_groups(tokenizer, 3))


@pytest.mark.long
def test_output_is_checked_before_the_service_is_touched(
    start_service: Start, run_command: Run, tokenizer: Any, tmp_path: Path
) -> None:
    service = start_service("--store", "memory")
    service.register()
    service.post(make_groups(tokenizer, 2))
    path = tmp_path / "out.jsonl"
    path.write_text("mine\n")

    for module in ("sft", "dpo"):
        done = run_command(module, path, "--consume", "--api-url", service.url)
        assert done.returncode == 2
        assert "is left as it is" in done.stderr

    assert path.read_text() == "mine\n"
    assert service.status()["queue_size"] == 2


def test_payloads_ask_for_a_token_where_the_service_wants_one(
    start_service: Start, run_command: Run, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("admin of-the-tests-only-1234567890\n")  # pragma: allowlist secret
    tokens.chmod(0o600)
    service = start_service("--store", "memory", "--token-file", str(tokens))
    words = ("--api-url", service.url, "--format", "tokens", "--no-wait")

    refused = run_command("sft", tmp_path / "a", *words)
    secret = "of-the-tests-only-1234567890"  # pragma: allowlist secret
    taken = run_command("sft", tmp_path / "a", *words, ATROPOS_API_TOKEN=secret)

    assert refused.returncode == 2
    assert "set ATROPOS_API_TOKEN" in refused.stderr
    assert taken.returncode == 1, taken.stderr
    assert "nothing was written: there are no groups" in taken.stderr
    assert secret not in refused.stderr + taken.stderr + taken.stdout


def test_no_service_and_no_run_are_said(run_command: Run, free_port: int, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port}"
    away = run_command("dpo", tmp_path / "a", "--api-url", url, "--no-wait")
    unknown = run_command("dpo", tmp_path / "a", "--run", "nope", "--data-dir", tmp_path)

    assert (away.returncode, unknown.returncode) == (2, 2)
    assert "`run-api` starts one" in away.stderr
    assert f"there is no run nope; {tmp_path} has no runs" in unknown.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("module", [sft, dpo])
async def test_grabber_of_the_contract_is_the_trainer(
    module: Any, start_service: Start, tokenizer: Any, tmp_path: Path
) -> None:
    service = start_service("--store", "memory")
    path = tmp_path / "out.jsonl"
    poster = threading.Thread(target=_post_when_registered, args=(service, tokenizer))
    poster.start()
    grab = module.sft_data_grabber if module is sft else module.dpo_data_grabber
    more = {"tasks_per_step": 1} if module is sft else {}
    size = 4 if module is sft else 1  # eight groups of that size make a batch of two of ours

    await grab(
        str(path), service.url, size, 2048, tokenizer.name_or_path, False, 3, 2, False, 0.5, False,
        **more,
    )  # fmt: skip
    poster.join()

    keys = ["prefix", "completion", "score"] if module is sft else ["prefix", "pos", "score", "neg"]
    assert [list(record) for record in read_records(path)] == [keys] * 2
    with pytest.raises(ConfigError, match="left as it is"):
        await grab(str(path), service.url, 4, 2048, "", False, 3, 2, False, 0.5, False)


def test_viewers_of_others_register_and_take_a_batch_as_before(
    start_service: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = start_service()
    monkeypatch.setattr(view_run, "DEFAULT_URL", service.url)

    asyncio.run(view_run.register_to_api(2, 99))
    row = [1, 2]
    service.post([{"tokens": [row] * 8, "masks": [row] * 8, "scores": [1.0] * 8}] * 2)
    groups = asyncio.run(view_run.check_for_batch())

    assert service.ask("/info") == {"batch_size": 16, "max_token_len": 99}
    assert [len(group["tokens"]) for group in groups] == [8, 8]
    assert view_run_multimodal.register_to_api is view_run.register_to_api
