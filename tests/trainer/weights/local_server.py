"""An HTTP server on this machine, which runs while used as a context manager."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from typing_extensions import Self


class LocalServer:
    """Serves with a handler whose requests are not logged."""

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        quiet = type("Handler", (handler,), {"log_message": lambda *_: None})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), quiet)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
