"""The companion server's door."""

from __future__ import annotations

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
from fastapi.testclient import TestClient

from example_trainer import vllm_api_server
from tests.trainer.companion.scripted import Engine


def test_missing_vllm_is_told_with_the_extra_that_brings_it(monkeypatch, capsys):
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # which the door would set
    monkeypatch.setitem(sys.modules, "vllm", None)

    with pytest.raises(SystemExit) as ended:
        vllm_api_server.main(["--model", "some/model"])

    assert ended.value.code == 2
    assert "pip install '.[vllm]'" in capsys.readouterr().err


def test_engine_set_by_another_program_answers_without_vllm(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr(vllm_api_server, "engine", Engine())
    client = TestClient(vllm_api_server.app)
    body = {"prompt": "hello", "max_tokens": 1, "temperature": 0.0, "logprobs": 1}

    answer = client.post("/generate", json=body)
    refused = client.post("/generate", json={**body, "max_tokns": 1})

    assert answer.status_code == 200
    assert answer.json()["text"] == [" a b"]
    assert answer.json()["prompt_token_ids"] == [1, 2]
    assert refused.status_code == 400
    assert "max_tokens" in refused.text


COMMAND_WITH_A_STAND_IN = """
import argparse, asyncio, sys, types

class Arguments:
    @staticmethod
    def add_cli_args(parser):
        return parser

    @classmethod
    def from_cli_args(cls, args):
        return cls()

class Engine:
    vllm_config = types.SimpleNamespace(
        model_config=types.SimpleNamespace(model="m", dtype="torch.float32"),
        device_config=types.SimpleNamespace(device_type="cpu"),
        lora_config=None,
    )

    @classmethod
    def from_engine_args(cls, args):
        return cls()

    async def generate(self, *args, **options):
        print("the engine generates", flush=True)
        await asyncio.Event().wait()
        yield

    def shutdown(self):
        print("the engine has ended", flush=True)

names = ("vllm", "vllm.utils", "vllm.utils.argparse_utils")
vllm, utils, flags = map(types.ModuleType, names)
vllm.AsyncEngineArgs, vllm.AsyncLLMEngine = Arguments, Engine
flags.FlexibleArgumentParser = argparse.ArgumentParser
sys.modules |= {each.__name__: each for each in (vllm, utils, flags)}

from example_trainer import vllm_api_server

vllm_api_server.main(["--port", sys.argv[1]])
"""


@contextmanager
def serving(port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run the command with a stand-in for vLLM, and wait until it answers."""
    with log.open("wb") as output:
        command = [sys.executable, "-c", COMMAND_WITH_A_STAND_IN, str(port)]
        server = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        transport = httpx.HTTPTransport(retries=20)
        with httpx.Client(transport=transport, timeout=60) as client:
            client.get(f"http://127.0.0.1:{port}/health").raise_for_status()
        yield server
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_ends_the_engine_as_well(
    tmp_path: Path, free_port: int, number: signal.Signals, code: int
):
    log = tmp_path / "server.log"
    with serving(free_port, log) as server:
        server.send_signal(number)
        found = server.wait(60)

    assert found == code, log.read_text()
    assert "the engine has ended" in log.read_text()
    assert "Traceback" not in log.read_text()


@pytest.mark.parametrize("stream", [False, True])
def test_request_that_a_pause_holds_does_not_keep_the_server_alive(
    tmp_path: Path, free_port: int, stream: bool
):
    log = tmp_path / "server.log"
    with serving(free_port, log) as server, ThreadPoolExecutor(1) as pool:
        url = f"http://127.0.0.1:{free_port}/generate"
        held = pool.submit(httpx.post, url, json={"prompt": "a", "stream": stream}, timeout=60)
        while "the engine generates" not in log.read_text():
            time.sleep(0.01)
        server.send_signal(signal.SIGTERM)
        # Answered with an error, or disconnected; not kept until the client gives up.
        assert not isinstance(held.exception(), httpx.TimeoutException)
        assert server.wait(60) == 143

    assert "the engine has ended" in log.read_text()
