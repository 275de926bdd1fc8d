"""uvicorn's HTTP protocol, telling responses what became of their bytes."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from atroposlib.api.connection import EXTENSION, Connection

__all__ = ["ObservedHttpProtocol"]


class ObservedHttpProtocol(HttpToolsProtocol):
    """Puts the `Connection` into the scope of every request it reads."""

    observed: Connection | None = None

    def on_message_begin(self) -> None:
        """Start a request."""
        super().on_message_begin()
        if self.observed is None:
            self.observed = Connection(self.transport)
        self.scope["extensions"] = {EXTENSION: {"connection": self.observed}}

    def eof_received(self) -> None:
        """Take note that the client has closed its side, while the socket can still be asked."""
        if self.observed is not None:
            self.observed.note_end()
        super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Take note that the connection broke."""
        if self.observed is not None:
            self.observed.note_failure()
        super().connection_lost(exc)
