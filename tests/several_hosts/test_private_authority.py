"""Clients reach servers with TLS whose certificate a private authority has signed."""

from __future__ import annotations

import contextlib
import os
import shutil
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from atroposlib.api.client import RetryRule, TrainerClient
from atroposlib.errors import InferenceError, TrajectoryApiError
from example_trainer.engine import EngineConnection
from tests.several_hosts.cluster import make_certificates

ONCE = RetryRule(attempts=1)


class StatusAnswers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        content = b'{"current_step": 3, "queue_size": 0}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


class QuietServer(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Ignore handshakes that clients end."""


@contextlib.contextmanager
def tls_server(folder: Path) -> Iterator[str]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "proxy.pem", folder / "proxy.key")
    server = QuietServer(("127.0.0.1", 0), StatusAnswers)
    server.socket = context.wrap_socket(
        server.socket, server_side=True, do_handshake_on_connect=False
    )
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"https://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl; apt-get install openssl")
    folder = tmp_path_factory.mktemp("authority")
    make_certificates(folder, ["127.0.0.1"])
    return folder


def test_every_client_trusts_the_authority_of_ssl_cert_file(authority):
    variables = {**os.environ, "SSL_CERT_FILE": str(authority / "ca.pem")}

    with tls_server(authority) as url:
        command = [sys.executable, "-m", "tests.several_hosts.tls_clients", url]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)

    assert (done.stdout, done.stderr) == ("[3, 3, 3, 3]\n", "")


def test_unknown_authority_is_rejected(authority, monkeypatch):
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)

    with tls_server(authority) as url:
        with (
            TrainerClient(url, retry=ONCE) as trainer,
            pytest.raises(TrajectoryApiError, match="CERTIFICATE"),
        ):
            trainer.status()
        engine = EngineConnection(url)
        with pytest.raises(InferenceError, match="CERTIFICATE"):
            engine.send("GET", "/status")
        engine.close()
