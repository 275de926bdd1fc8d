"""Tools that stand in for a trainer: real services, environments and commands as processes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from atroposlib.api.client_consumer import Consumer, consumer_registration
from tests.api.may_2025_service import May2025Service
from tests.api.scripted_service import scripted
from tests.exporting.conftest import Service
from tests.exporting.samples import make_groups, read_records
from tests.scripted_engine import ScriptedEngine

REPOSITORY = Path(__file__).parents[2]
REPLIES = ["<think>x</think>\\boxed{1}", "<think>y</think>\\boxed{72}", "I do not know", "72"]
pytestmark = pytest.mark.timeout(900)  # several processes start, on a machine that may be busy
PATIENCE_S = 280.0

Start = Callable[..., Service]


class Command:
    """A command line as a process; its output goes to a file."""

    def __init__(self, words: list[str], log: Path) -> None:
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, *words],
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=log.parent,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, sys.path)]),
                    "HF_HUB_OFFLINE": "1",
                    "WANDB_MODE": "disabled",
                },
            )

    @property
    def output(self) -> str:
        return self.log.read_text()

    async def end(self) -> int:
        return await asyncio.wait_for(asyncio.to_thread(self.process.wait), PATIENCE_S)

    async def says(self, text: str) -> None:
        await until(lambda: text in self.output, lambda: f"no {text!r} in:\n{self.output}")


async def until(holds: Callable[[], bool], complaint: Callable[[], str]) -> None:
    for _ in range(int(PATIENCE_S / 0.1)):
        if holds():
            return
        await asyncio.sleep(0.1)
    raise AssertionError(complaint())


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    with ExitStack() as ending:
        count = 0

        def start_command(*words: object) -> Command:
            nonlocal count
            count += 1
            command = Command([str(word) for word in words], tmp_path / f"log{count}.txt")
            ending.callback(command.process.wait)
            ending.callback(command.process.kill)
            return command

        yield start_command


@pytest.fixture
async def engine(tokenizer: Any) -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(REPLIES, tokenizer=tokenizer) as running:
        yield running


@pytest.fixture
def service(start_service: Start) -> Service:
    return start_service("--store", "memory")


@pytest.fixture
def serve(
    start: Callable[..., Command], engine: ScriptedEngine, service: Service, tokenizer: Any
) -> Callable[[], Command]:
    """Starts GSM8K with the flags of the quick start, and where its parts are in this test."""

    def start_environment() -> Command:
        return start(
            REPOSITORY / "environments" / "gsm8k_server.py", "serve",
            f"--tokenizer_name={tokenizer.name_or_path}", f"--model_name={engine.model}",
            "--base_url", engine.base_url, "--rollout_server_url", service.url,
            "--dataset_path", REPOSITORY / "environments" / "data" / "gsm8k_sample",
            "--group_size", 4,
            "--ensure_scores_are_not_same", "false", "--quiet",
        )  # fmt: skip

    return start_environment


@pytest.mark.long
async def test_export_without_trainer_makes_environments_start_and_go_on(
    serve: Any, start: Any, service: Service, tokenizer: Any, tmp_path: Path
) -> None:
    path = tmp_path / "out.jsonl"
    environment = serve()
    words = ("-m", "atroposlib.cli.sft", path, "--tokenizer", tokenizer.name_or_path)
    # Batches of 64 sequences: more than three would stop an environment that nothing is taken from.
    export = start(
        *words, "--api-url", service.url, "--allow-negative-scores", "--group-size", 1,
        "--num-seqs-to-save", 240, "--keep-duplicates",
    )  # fmt: skip

    assert await export.end() == 0, export.output

    records = read_records(path)
    assert len(records) == 240
    assert {record["completion"].removesuffix(tokenizer.eos_token) for record in records} <= set(
        REPLIES
    )
    assert "atropos-sft-gen stands in and takes the groups" in export.output
    assert service.status()["current_step"] >= 1
    assert "consumer" not in service.status()  # the place is free for the next
    assert environment.process.poll() is None, environment.output


def num_lines(path: Path) -> int:
    """Return the number of whole lines; the export may be writing another one."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


async def next_batch(trainer: httpx.AsyncClient, environment: Command) -> Any:
    for _ in range(int(PATIENCE_S / 20)):
        batch = (await trainer.get("/batch?wait=20&lease=60")).json()
        if batch["batch"] is not None:
            return batch
    raise AssertionError(f"no batch; the environment wrote:\n{environment.output}")


@pytest.mark.long
async def test_trainer_takes_over_from_an_export_that_goes_on_by_looking(
    serve: Any, start: Any, service: Service, tokenizer: Any, tmp_path: Path
) -> None:
    path = tmp_path / "out.jsonl"
    environment = serve()
    words = ("-m", "atroposlib.cli.sft", path, "--tokenizer", tokenizer.name_or_path)
    export = start(
        *words, "--api-url", service.url, "--allow-negative-scores", "--all", "--keep-duplicates"
    )
    await until(lambda: num_lines(path) > 8, lambda: export.output)

    service.register(batch_size=8, starting_step=5, num_steps=1000, max_token_len=1000)

    await export.says("a trainer has registered and takes the groups from here on")
    assert service.ask("/info") == {"batch_size": 8, "max_token_len": 1000}
    before = num_lines(path)
    num_taken = 0
    async with httpx.AsyncClient(base_url=service.url, timeout=60) as trainer:
        # The trainer alone takes batches, of its own size; the export sees new groups all the same.
        while num_taken < 12 or (num_lines(path) == before and num_taken < 200):
            batch = await next_batch(trainer, environment)
            assert sum(len(group["scores"]) for group in batch["batch"]) == 8
            await trainer.post(f"/batch/{batch['batch_id']}/ack")
            num_taken += 1
    assert service.status()["current_step"] == 5 + num_taken
    assert "consumer" not in service.status()
    assert num_lines(path) > before
    (env,) = service.ask("/envs")["envs"]  # under the id it had
    assert env["name"] == "gsm8k_0"
    assert export.process.poll() is None
    await until(
        lambda: environment.output.count("registered as gsm8k_0") == 2, lambda: environment.output
    )


@pytest.mark.long
async def test_second_export_says_who_takes_the_groups_and_looks(
    serve: Any, start: Any, service: Service, tokenizer: Any, tmp_path: Path
) -> None:
    serve()
    common = ("--tokenizer", tokenizer.name_or_path, "--api-url", service.url)
    first = start(
        "-m",
        "atroposlib.cli.sft",
        tmp_path / "a.jsonl",
        *common,
        "--allow-negative-scores",
        "--all",
    )
    await first.says("atropos-sft-gen stands in")
    second = start(
        "-m", "atroposlib.cli.sft", tmp_path / "b.jsonl", *common, "--allow-negative-scores",
        "--num-seqs-to-save", 3,
    )  # fmt: skip

    assert await second.end() == 0, second.output

    name = f"atropos-sft-gen (process {first.process.pid} on {socket.gethostname()})"
    assert (
        f"{name} already takes the groups of this run, so that environments go on; this command "
        "looks at the same groups and takes none" in second.output
    )
    assert len(read_records(tmp_path / "b.jsonl")) == 3


@pytest.mark.long
async def test_view_run_without_trainer_makes_environments_start_and_takes_nothing(
    serve: Any, start: Any, service: Service, tokenizer: Any
) -> None:
    pytest.importorskip("gradio")
    serve()
    view = start(
        "-m", "atroposlib.cli.view_run", "--api-url", service.url, "--port", 0,
        "--tokenizer", tokenizer.name_or_path,
    )  # fmt: skip

    await view.says("view-run stands in, so that environments start")
    await until(lambda: service.status()["queue_size"] >= 8, lambda: view.output)

    assert service.status()["current_step"] == 0
    name = f"view-run (process {view.process.pid} on {socket.gethostname()})"
    assert service.status()["consumer"] == {"name": name, "idle_s": None}
    service.register(batch_size=8)  # a trainer is not refused
    assert "consumer" not in service.status()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.long
async def test_view_run_that_is_stopped_frees_the_place_of_the_trainer(
    start: Any, service: Service, tokenizer: Any, signum: signal.Signals
) -> None:
    pytest.importorskip("gradio")
    view = start(
        "-m", "atroposlib.cli.view_run", "--api-url", service.url, "--port", 0,
        "--tokenizer", tokenizer.name_or_path,
    )  # fmt: skip
    await view.says("view-run stands in")
    await view.says("Ctrl-C stops it")

    view.process.send_signal(signum)
    await view.end()

    assert "Traceback" not in view.output
    assert "consumer" not in service.status()
    assert service.ask("/info")["batch_size"] == -1


@pytest.mark.long
async def test_export_of_an_older_service_takes_its_batches_and_says_what_it_cannot_do(
    start: Any, tokenizer: Any, tmp_path: Path, free_port: int
) -> None:
    service = May2025Service()
    path = tmp_path / "out.jsonl"
    async with scripted(service, free_port) as url:
        export = start(
            "-m", "atroposlib.cli.sft", path, "--tokenizer", tokenizer.name_or_path,
            "--api-url", url, "--group-size", 1, "--num-seqs-to-save", 10,
        )  # fmt: skip
        await until(lambda: service.is_started, lambda: export.output)
        async with httpx.AsyncClient(base_url=url) as environment:
            for group in make_groups(tokenizer, 16):  # a batch of 64 sequences
                await environment.post("/scored_data", json=group)

        assert await export.end() == 0, export.output

    assert len(read_records(path)) == 10
    assert "atropos-sft-gen registers as one, so that environments start" in export.output
    assert "cannot hand over" in export.output


@pytest.mark.long
async def test_consumer_that_takes_nothing_starts_a_service_that_cannot_hand_over(
    free_port: int,
) -> None:
    service = May2025Service()
    notices: list[str] = []
    settings = consumer_registration("viewer", group_size=2, max_token_len=0)
    async with scripted(service, free_port) as url:
        with Consumer(url, settings, notices.append, takes=False) as consumer:
            for _ in range(2):
                await asyncio.to_thread(consumer.attend)

    assert service.is_started
    assert len(notices) == 1
    assert "reset it, by GET /reset_data, before a trainer starts" in notices[0]
