"""The HTTP connection to an engine that gets new weights while it runs."""

from __future__ import annotations

from typing import Any

import httpx

from atroposlib.errors import InferenceError
from atroposlib.utils.text import hide_secrets_of_requests, inert_block, without_secrets

__all__ = ["EngineConnection"]

_MAX_QUOTED_CHARS = 500


class EngineConnection:
    """Requests to one engine; what goes wrong is an `InferenceError` that names the request.

    Args:
        base_url: Address without `/v1`.
        timeout_s: Seconds one request may take; a large model reloads for minutes.
    """

    def __init__(self, base_url: str, *, timeout_s: float = 600.0) -> None:
        self.base_url = base_url
        # The engine is a neighbour: proxy settings of the environment do not concern it.
        hide_secrets_of_requests()
        self._http = httpx.Client(base_url=base_url, timeout=timeout_s, trust_env=False)

    @property
    def shown_url(self) -> str:
        """The address for messages, without user and password."""
        return without_secrets(self.base_url)

    def close(self) -> None:
        """Close the connection; the engine runs on."""
        self._http.close()

    def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Return the engine's answer, whatever its status.

        Args:
            method: Of the request.
            path: From the first slash.
            **options: Of `httpx.Client.request`, e.g. `json` and `params`.

        Raises:
            InferenceError: There is none.
        """
        try:
            return self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise InferenceError(f"{method} {self.shown_url}{path} failed: {error!r}") from error

    def post(self, path: str, **options: Any) -> httpx.Response:
        """Return the answer to a POST; arguments as for `send`.

        Raises:
            InferenceError: There is none, or its status is not 200.
        """
        answer = self.send("POST", path, **options)
        if answer.status_code != 200:
            raise InferenceError(
                f"POST {self.shown_url}{path} answered {answer.status_code}: "
                f"{inert_block(answer.text[:_MAX_QUOTED_CHARS])}"
            )
        return answer
