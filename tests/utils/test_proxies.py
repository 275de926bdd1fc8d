"""Proxies of the environment variables are not used for requests to this machine."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import openai
import pytest

from atroposlib.envs.server_handling.engine_http import make_http_client
from atroposlib.utils.proxies import exempt_this_machine, may_use_proxy
from example_trainer.vllm_manager import check_vllm_health

MODELS = b'{"object": "list", "data": [{"id": "m", "object": "model"}]}'
VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


class Engine(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(MODELS)))
        self.end_headers()
        self.wfile.write(MODELS)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # also restores what the code under test sets
        monkeypatch.setenv(name.upper(), "")
        monkeypatch.delenv(name)
        monkeypatch.delenv(name.upper())
    return monkeypatch


@pytest.fixture
def port() -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), Engine)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ("", "localhost,127.0.0.1,::1"),
        ("corp.example, localhost", "corp.example,localhost,127.0.0.1,::1"),
        ("*", "*"),
    ],
)
def test_this_machine_is_added_to_the_exceptions(
    environ: pytest.MonkeyPatch, listed: str, expected: str
) -> None:
    environ.setenv("HTTPS_PROXY", "http://proxy.example:3128")
    environ.setenv("NO_PROXY", listed)

    exempt_this_machine()

    assert os.environ["NO_PROXY"] == expected


def test_nothing_is_set_without_a_proxy(environ: pytest.MonkeyPatch) -> None:
    exempt_this_machine()

    assert "no_proxy" not in os.environ


def test_only_other_machines_use_the_proxy(environ: pytest.MonkeyPatch) -> None:
    assert not may_use_proxy("http://engine.example:8000")
    environ.setenv("http_proxy", "http://proxy.example:3128")

    assert may_use_proxy("http://engine.example:8000")
    assert not may_use_proxy("http://localhost:8000")
    assert not may_use_proxy("http://[::1]:8000/v1")


@pytest.mark.parametrize("scheme", ["http", "socks5"])
async def test_engine_of_this_machine_answers_despite_a_proxy(
    environ: pytest.MonkeyPatch, port: int, free_port: int, scheme: str
) -> None:
    """A SOCKS proxy needs a package that is missing: a client that reads it cannot be created."""
    for name in ("http_proxy", "all_proxy"):
        environ.setenv(name, f"{scheme}://127.0.0.1:{free_port}")
    url = f"http://127.0.0.1:{port}/v1"

    async with openai.AsyncOpenAI(
        api_key="x", base_url=url, max_retries=0, http_client=make_http_client(url)
    ) as client:
        models = await client.models.list()

    assert [model.id for model in models.data] == ["m"]
    assert check_vllm_health(port)
