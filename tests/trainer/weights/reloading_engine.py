"""A process with vLLM's routes for updates: it reads the weights it is told to load.

`python -m tests.trainer.weights.reloading_engine` prints its port. `GET /loaded` returns the
digest of each version that was loaded, and whether requests were paused meanwhile.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from example_trainer.weights.local import file_digest

LOADED: list[dict[str, object]] = []
PAUSED: list[bool] = [False]


class ReloadRoutes(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self._reply(200, LOADED if path == "/loaded" else {})

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = json.loads(content) if content else {}
        path = urlsplit(self.path).path
        if path in ("/pause", "/resume"):
            PAUSED[0] = path == "/pause"
        elif path == "/collective_rpc":
            if "method" not in body:
                self._reply(400, {"detail": "Missing 'method' in request body"})
                return
            weights = Path(body["kwargs"]["weights_path"]) / "model.safetensors"
            LOADED.append({"sha256": file_digest(weights), "paused": PAUSED[0]})
        self._reply(200, {})

    def _reply(self, status: int, body: object) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), ReloadRoutes)
    sys.stdout.write(f"{server.server_address[1]}\n")
    sys.stdout.flush()
    server.serve_forever()
