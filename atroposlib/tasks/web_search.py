"""Sources of pages: a corpus on disk, or the web through a search service.

    corpus.jsonl (id, title, text) ─► LocalCorpus: BM25 over titles and texts ─► hits, pages
    search service ─► TavilySearch ─► hits, pages

The text of a page is untrusted: `inert` sanitizes it before the policy reads it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import aiohttp

from atroposlib.errors import ConfigError, MissingExtraError
from atroposlib.utils.local_records import read_records
from atroposlib.utils.text import inert_block

__all__ = [
    "KEY_VARIABLE",
    "Hit",
    "LocalCorpus",
    "Page",
    "SearchError",
    "SearchSource",
    "TavilySearch",
    "inert",
]

SNIPPET_CHARACTERS = 160
LOOK_ALIKES = str.maketrans({"<": "\u2039", ">": "\u203a"})


class SearchError(RuntimeError):
    """A source cannot answer; the message is shown to the policy and contains no secrets."""


class Hit(NamedTuple):
    """One result of a search."""

    page: str
    """Id or URL with which the page is opened."""
    title: str
    snippet: str
    """Beginning of the page, or an excerpt chosen by the source."""


class Page(NamedTuple):
    """One page."""

    title: str
    text: str


class SearchSource(Protocol):
    """A corpus or a search service."""

    async def search(self, query: str, *, num_results: int) -> list[Hit]:
        """Wait for the best pages, best first; raises `SearchError`."""

    async def fetch(self, page: str) -> Page:
        """Wait for a page; raises `SearchError`."""

    async def close(self) -> None:
        """Release connections."""


def inert(text: str) -> str:
    """Return text without control characters, with angle brackets replaced by similar characters.

    So a page cannot contain tags, tool calls, answers or special tokens of a tokenizer.
    """
    return inert_block(text).translate(LOOK_ALIKES)


class LocalCorpus:
    """Pages of a file, ranked by BM25; created by `load`.

    Source: Robertson et al. 1995, "Okapi at TREC-3", as implemented by the bm25s package.
    """

    def __init__(self, pages: dict[str, Page], index: Any, tokenize: Any) -> None:
        self._pages = pages
        self._names = list(pages)
        self._index = index  # bm25s.BM25
        self._tokenize = tokenize

    @classmethod
    def load(cls, path: Path) -> LocalCorpus:
        """Read and index the pages of a file; blocks.

        Raises:
            ConfigError: the file cannot be read, an id occurs twice, or no page has a word.
            MissingExtraError: bm25s is not installed.
        """
        try:
            import bm25s
        except ImportError as error:
            raise MissingExtraError("bm25s", extra="examples") from error
        # On import the package sets a level on its logger.
        logging.getLogger("bm25s").setLevel(logging.NOTSET)
        rows = read_records(path, ["id", "title", "text"])
        pages = {str(row["id"]): Page(str(row["title"]), str(row["text"])) for row in rows}
        if len(pages) != len(rows):
            raise ConfigError(f"{path}: {len(rows) - len(pages)} ids occur more than once")
        index = bm25s.BM25()
        texts = [f"{page.title}\n{page.title}\n{page.text}" for page in pages.values()]
        words = bm25s.tokenize(texts, show_progress=False)
        if not any(map(len, words.ids)):
            raise ConfigError(f"{path}: no page has a word that can be searched")
        index.index(words, show_progress=False)

        def tokenize(query: str) -> list[list[str]]:
            tokens: list[list[str]] = bm25s.tokenize([query], return_ids=False, show_progress=False)
            return tokens

        return cls(pages, index, tokenize)

    async def search(self, query: str, *, num_results: int) -> list[Hit]:
        """Wait for the best pages that share a word with the query."""
        return await asyncio.to_thread(self._search, query, num_results)

    async def fetch(self, page: str) -> Page:
        if page not in self._pages:
            raise SearchError(f"there is no page {page!r}")
        return self._pages[page]

    async def close(self) -> None:
        """Do nothing: there is no connection."""

    def _search(self, query: str, num_results: int) -> list[Hit]:
        known = self._index.vocab_dict
        tokens = [token for token in self._tokenize(query)[0] if token in known]
        if not tokens:
            return []
        found, scores = self._index.retrieve(
            [tokens], k=min(num_results, len(self._names)), show_progress=False
        )
        names = [self._names[i] for i, score in zip(found[0], scores[0], strict=True) if score > 0]
        return [
            Hit(name, self._pages[name].title, self._pages[name].text[:SNIPPET_CHARACTERS])
            for name in names
        ]


KEY_VARIABLE = "TAVILY_API_KEY"
MAX_BODY_BYTES = 4 * 1024 * 1024


class TavilySearch:
    """A search service over HTTP.

    Args:
        environ: variables with the API key, under `KEY_VARIABLE`; it is never logged.
        base_url: URL of the service.
        timeout_s: timeout of one request.
        blocked_domains: domains whose pages, subdomains included, are neither found nor opened.

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
        answer = await self._post("search", {"query": query, "max_results": num_results})
        hits = [
            Hit(str(r.get("url", "")), str(r.get("title", "")), str(r.get("content", "")))
            for r in _results(answer)
        ]
        return [hit for hit in hits if hit.page and not self._is_blocked(hit.page)][:num_results]

    async def fetch(self, page: str) -> Page:
        if self._is_blocked(page):
            raise SearchError(f"the page {page!r} may not be opened")
        for result in _results(await self._post("extract", {"urls": [page]})):
            text = result.get("raw_content")
            if isinstance(text, str) and text:
                return Page(str(result.get("title", page)), text)
        raise SearchError(f"the search service has no text of {page!r}")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _is_blocked(self, address: str) -> bool:
        try:
            host = (urlsplit(address).hostname or "").rstrip(".").lower()
        except ValueError:  # not a URL
            return True
        if not host:  # such as wikipedia.org/wiki/Otter, without a scheme
            return bool(self._blocked)
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
        except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
            raise SearchError("the search service gave no answer in time") from None
        except (aiohttp.ClientError, ValueError, RecursionError) as error:
            # Without the error's text, which may quote the request.
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
