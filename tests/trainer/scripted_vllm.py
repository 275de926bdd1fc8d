"""A stand-in for a vLLM server: answers its health and development routes from a thread."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


class ScriptedVllm:
    """Listens on a free loopback port while used as a context manager.

    Attributes:
        requests: (path, query, body) of every POST, in order.
        answers: Status and body by path; other POST routes answer 200 `{}`, `/health` 200.
    """

    def __init__(self, answers: Mapping[str, tuple[int, Any]] | None = None) -> None:
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.answers = {"/health": (200, {}), **(answers or {})}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    @property
    def paths(self) -> list[str]:
        return [path for path, _, _ in self.requests]

    def __enter__(self) -> ScriptedVllm:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path in self.answers:
            return self.answers[path]
        if path == "/collective_rpc" and "method" not in body:
            return 400, {"detail": "Missing 'method' in request body"}
        return 200, {}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = urlsplit(self.path).path
                self._reply(*owner.answers.get(path, (404, {})))

            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                body = json.loads(content) if content else None
                parts = urlsplit(self.path)
                query = {name: values[0] for name, values in parse_qs(parts.query).items()}
                owner.requests.append((parts.path, query, body))
                self._reply(*owner._answer(parts.path, body))

            def _reply(self, status: int, body: Any) -> None:
                content = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        return Handler
