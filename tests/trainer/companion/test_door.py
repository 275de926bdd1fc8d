"""The companion server's door."""

from __future__ import annotations

import signal
import subprocess
import sys
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
import argparse, sys, types

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


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_ends_the_engine_as_well(
    tmp_path: Path, free_port: int, number: signal.Signals, code: int
):
    log = tmp_path / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-c", COMMAND_WITH_A_STAND_IN, str(free_port)],
            stdout=output,
            stderr=output,
        )
    try:
        transport = httpx.HTTPTransport(retries=20)
        with httpx.Client(transport=transport, timeout=60) as client:
            client.get(f"http://127.0.0.1:{free_port}/health").raise_for_status()
        server.send_signal(number)
        found = server.wait(60)
    finally:
        server.kill()
        server.wait()

    assert found == code, log.read_text()
    assert "the engine has ended" in log.read_text()
    assert "Traceback" not in log.read_text()
