"""A stand-in for `python -m vllm.entrypoints.openai.api_server`; found first on PYTHONPATH.

Serves what the trainer's in-place sync asks of an engine, prints its command line and exits with
3 when the model is called `broken`.
"""

import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LACKS = os.environ.get("FAKE_VLLM_LACKS")
"""Feature that an older vLLM lacks: the `route` for updates, or the `reload` itself."""


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._reply(200 if self.path == "/health" else 404)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        print(self.path, body.decode(), flush=True)
        if self.path == "/collective_rpc" and LACKS:
            self._reply(404 if LACKS == "route" else (400 if body == b"{}" else 500))
        else:
            self._reply(400 if body == b"{}" else 200)

    def _reply(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        pass


def option(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


print("arguments:", *sys.argv[1:], flush=True)
print("devices:", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
print("development mode:", os.environ.get("VLLM_SERVER_DEV_MODE"), flush=True)
if option("--model") == "broken":
    sys.exit("no such model")
ThreadingHTTPServer((option("--host"), int(option("--port"))), Handler).serve_forever()
