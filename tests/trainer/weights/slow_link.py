"""An HTTP server of a folder behind a link of limited speed, which counts the bytes sent."""

from __future__ import annotations

import re
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.trainer.weights.local_server import LocalServer

_CHUNK = 16_384


class TokenBucket:
    """Lets bytes through at a constant rate, shared by all connections."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = time.monotonic()
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> None:
        with self._lock:
            now = time.monotonic()
            starts_at = max(now, self._free_at)
            self._free_at = starts_at + num_bytes / self._bytes_per_s
        time.sleep(self._free_at - now)


class SlowFolder(LocalServer):
    """Serves a folder, with ranges, while used as a context manager.

    Attributes:
        sent_bytes: Of all responses, headers included.
    """

    def __init__(self, root: Path, *, bits_per_s: float) -> None:
        self.sent_bytes = 0
        self._root = root
        self._bucket = TokenBucket(bits_per_s / 8)
        self._lock = threading.Lock()
        super().__init__(self._handler())

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self.sent_bytes += num_bytes
        self._bucket.take(num_bytes)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                path = owner._root / unquote(urlsplit(self.path).path).lstrip("/")
                content = path.read_bytes() if path.is_file() else b""
                status = 200 if path.is_file() else 404
                found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
                headers = {}
                if found and status == 200:
                    start, last = int(found[1]), int(found[2])
                    headers["Content-Range"] = f"bytes {start}-{last}/{len(content)}"
                    content, status = content[start : last + 1], 206
                head = f"HTTP/1.1 {status} -\r\nContent-Length: {len(content)}\r\n"
                head += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
                response = f"{head}\r\n".encode() + content
                for start in range(0, len(response), _CHUNK):
                    part = response[start : start + _CHUNK]
                    owner._count(len(part))
                    self.wfile.write(part)

        return Handler
