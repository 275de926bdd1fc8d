"""An HTTP server of a folder whose responses to chosen paths are hostile."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.trainer.weights.local_server import LocalServer

_ZEROS = bytes(2**16)
MOST_SENT_BYTES = 2**27
"""End of a body without end, so that a client that reads it fails a test instead of a machine."""


class MisbehavingFolder(LocalServer):
    """Serves a folder while used as a context manager.

    Args:
        root: The folder.
        has_ranges: Whether a part of a file can be requested.

    Attributes:
        faults: Kind of response by the start of a path: `gzip` is a body of zeros that decompresses
            to `MOST_SENT_BYTES`, `endless` one of that length, `endless part` one to a range.
        encodings: The `Accept-Encoding` of each request.
    """

    def __init__(self, root: Path, *, has_ranges: bool = True) -> None:
        self.faults: dict[str, str] = {}
        self.encodings: list[str | None] = []
        self._root = root
        self._has_ranges = has_ranges
        super().__init__(self._handler())

    def _fault(self, path: str) -> str | None:
        return next((fault for start, fault in self.faults.items() if path.startswith(start)), None)

    def _answer(self, path: str, wanted: str) -> tuple[int, dict[str, str], Iterator[bytes]]:
        fault = self._fault(path)
        if fault == "gzip":
            return 200, {"Content-Encoding": "gzip"}, _compressed_zeros()
        if fault is not None:
            return 206 if fault == "endless part" else 200, {}, _zeros()
        file = self._root / path
        if not file.is_file():
            return 404, {"Content-Length": "0"}, iter(())
        content, status = file.read_bytes(), 200
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", wanted)
        if found and self._has_ranges:
            content, status = content[int(found[1]) : int(found[2]) + 1], 206
        return status, {"Content-Length": str(len(content))}, iter((content,))

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                owner.encodings.append(self.headers.get("Accept-Encoding"))
                path = unquote(urlsplit(self.path).path).lstrip("/")
                status, headers, body = owner._answer(path, self.headers.get("Range", ""))
                self.close_connection = "Content-Length" not in headers
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                try:
                    self.end_headers()
                    for part in body:
                        self.wfile.write(part)
                except OSError:  # the client has closed the connection
                    self.close_connection = True

        return Handler


def _zeros() -> Iterator[bytes]:
    for _ in range(MOST_SENT_BYTES // len(_ZEROS)):
        yield _ZEROS


def _compressed_zeros() -> Iterator[bytes]:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    for part in _zeros():
        yield packer.compress(part)
    yield packer.flush()
