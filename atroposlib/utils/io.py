"""Reading HTTP responses."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

__all__ = ["parse_http_response", "retry_after_s"]


class HttpResponse(Protocol):
    """The members of an asynchronous HTTP response that are used here."""

    def raise_for_status(self) -> Any: ...

    async def json(self) -> Any: ...

    async def text(self) -> str: ...


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds in `Retry-After`, at least 0; None if it is missing or a date."""
    try:
        return max(0.0, float(headers.get("Retry-After", "")))
    except ValueError:
        return None


async def parse_http_response(resp: HttpResponse, logger: logging.Logger | None = None) -> Any:
    """Return the decoded JSON body of a successful response, which was not read yet.

    Raises:
        Exception: any exception of `resp`; status and body are logged first.
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
