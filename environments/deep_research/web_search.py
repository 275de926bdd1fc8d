"""The web as a source of pages, through the search service Tavily.

The service fetches the pages; nothing here opens an address the policy wrote.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from atroposlib.errors import ConfigError
from environments.deep_research.search import Hit, Page, SearchError

__all__ = ["KEY_VARIABLE", "TavilySearch"]

KEY_VARIABLE = "TAVILY_API_KEY"
MAX_BODY_BYTES = 4 * 1024 * 1024


class TavilySearch:
    """A search service over HTTP.

    Args:
        environ: where the key is, under `KEY_VARIABLE`; it is sent in a header and shown nowhere.
        base_url: address of the service.
        timeout_s: for one request.
        blocked_domains: their pages are neither found nor opened, nor are those below them.

    Raises:
        ConfigError: there is no key.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        base_url: str,
        timeout_s: float,
        blocked_domains: Sequence[str] = (),
    ) -> None:
        self._key = environ.get(KEY_VARIABLE, "").strip()
        if not self._key:
            raise ConfigError(
                f"the search service needs a key: set the environment variable {KEY_VARIABLE}, or "
                "search the local corpus with --env.search_provider local"
            )
        self._base_url = base_url.rstrip("/")
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._blocked = [domain.lower().strip(".") for domain in blocked_domains]
        self._session: aiohttp.ClientSession | None = None

    async def search(self, query: str, *, num_results: int) -> list[Hit]:
        """Wait for the best pages."""
        answer = await self._post("search", {"query": query, "max_results": num_results})
        hits = [
            Hit(str(r.get("url", "")), str(r.get("title", "")), str(r.get("content", "")))
            for r in _results(answer)
        ]
        return [hit for hit in hits if hit.page and not self._is_blocked(hit.page)][:num_results]

    async def fetch(self, page: str) -> Page:
        """Wait for the text of a page."""
        if self._is_blocked(page):
            raise SearchError(f"the page {page!r} may not be opened")
        for result in _results(await self._post("extract", {"urls": [page]})):
            text = result.get("raw_content")
            if isinstance(text, str) and text:
                return Page(str(result.get("title", page)), text)
        raise SearchError(f"the search service has no text of {page!r}")

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    def _is_blocked(self, address: str) -> bool:
        try:
            host = (urlsplit(address).hostname or "").rstrip(".").lower()
        except ValueError:  # no address at all
            return True
        return any(host == domain or host.endswith(f".{domain}") for domain in self._blocked)

    async def _post(self, route: str, body: dict[str, Any]) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=self._timeout)
        try:
            async with self._session.post(
                f"{self._base_url}/{route}",
                json=body,
                headers={"Authorization": f"Bearer {self._key}"},
                allow_redirects=False,
            ) as response:
                if response.status != 200:
                    raise SearchError(f"the search service answered with status {response.status}")
                return json.loads(await _read_body(response))
        except TimeoutError:
            raise SearchError("the search service gave no answer in time") from None
        except (aiohttp.ClientError, ValueError, RecursionError) as error:
            # The text of the error is left out: it may quote the request.
            raise SearchError(f"the search failed ({type(error).__name__})") from None


async def _read_body(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_chunked(1 << 16):
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise SearchError("the search service answered with too much text")
    return bytes(body)


def _results(answer: Any) -> list[Mapping[str, Any]]:
    found = answer.get("results") if isinstance(answer, dict) else None
    return [r for r in found if isinstance(r, dict)] if isinstance(found, list) else []
