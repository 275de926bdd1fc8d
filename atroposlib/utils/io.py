"""Reading HTTP replies."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

__all__ = ["parse_http_response", "retry_after_s"]


class HttpResponse(Protocol):
    """The three members of an asynchronous HTTP reply that are used here."""

    def raise_for_status(self) -> Any:
        """Raise when the status says failure."""

    async def json(self) -> Any:
        """Return the decoded body."""

    async def text(self) -> str:
        """Return the body as text."""


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds a refusal asks to wait, at least 0.

    None when it does not say, or says it as a date, which is not worth a parser.

    Args:
        headers: headers of the reply; looked up without regard to case by all HTTP clients.
    """
    try:
        return max(0.0, float(headers.get("Retry-After", "")))
    except ValueError:
        return None


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
