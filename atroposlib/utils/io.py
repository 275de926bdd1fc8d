"""Reading HTTP replies."""

from __future__ import annotations

import logging
from typing import Any, Protocol

__all__ = ["parse_http_response"]


class HttpResponse(Protocol):
    """The three members of an asynchronous HTTP reply that are used here."""

    def raise_for_status(self) -> Any:
        """Raise when the status says failure."""

    async def json(self) -> Any:
        """Return the decoded body."""

    async def text(self) -> str:
        """Return the body as text."""


async def parse_http_response(resp: HttpResponse, logger: logging.Logger | None = None) -> Any:
    """Return the decoded JSON body of a successful reply.

    Args:
        resp: the reply, its body not read yet.
        logger: receives the failure; defaults to this module's logger.

    Returns:
        Parsed JSON.

    Raises:
        Exception: whatever `resp` raises, after the body the server sent has been logged.
    """
    try:
        resp.raise_for_status()
        return await resp.json()
    except Exception as error:
        body = await resp.text()
        (logger or logging.getLogger(__name__)).error(
            "HTTP reply refused: %s; body: %s", error, body
        )
        raise
