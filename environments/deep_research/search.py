"""Where pages come from: what a source must offer, and a corpus on disk that offers it.

    corpus.jsonl (id, title, text) ─► LocalCorpus: BM25 over titles and texts ─► hits, pages

Whatever a page says is data: `inert` makes it harmless before anybody reads it.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from atroposlib.errors import ConfigError, MissingExtraError
from atroposlib.utils.inert_text import inert_block
from atroposlib.utils.local_records import read_records

__all__ = ["Hit", "LocalCorpus", "Page", "SearchError", "SearchSource", "inert"]

SNIPPET_CHARACTERS = 160
LOOK_ALIKES = str.maketrans({"<": "\u2039", ">": "\u203a"})


class SearchError(RuntimeError):
    """A source cannot answer; the message is shown to the policy and holds no secret."""


class Hit(NamedTuple):
    """One result of a search."""

    page: str
    """Name by which the page is opened: an id, or an address."""
    title: str
    snippet: str
    """The beginning of the page, or what the source thinks fits."""


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
    """Return text without control characters and without tags.

    Angle brackets become look-alikes, so that no page can close the frame it is shown in, write a
    call or an answer, or hold a special token of a tokenizer.
    """
    return inert_block(text).translate(LOOK_ALIKES)


class LocalCorpus:
    """Pages of a file, ranked by BM25; made by `load`.

    Source: Robertson et al. 1995, "Okapi at TREC-3", in the form of the bm25s package.
    """

    def __init__(self, pages: dict[str, Page], index: Any, tokenize: Any) -> None:
        self._pages = pages
        self._names = list(pages)
        self._index = index  # bm25s.BM25
        self._tokenize = tokenize

    @classmethod
    def load(cls, path: Path) -> LocalCorpus:
        """Read and index the pages of a file; blocks.

        Args:
            path: JSONL, JSON or Parquet with the columns id, title, text.

        Raises:
            ConfigError: the file cannot be read, or an id occurs twice.
            MissingExtraError: bm25s is not installed.
        """
        try:
            import bm25s
        except ImportError as error:
            raise MissingExtraError("bm25s", extra="examples") from error
        # On import it gives its logger a level that lets through what nobody asked for.
        logging.getLogger("bm25s").setLevel(logging.NOTSET)
        rows = read_records(path, ["id", "title", "text"])
        pages = {str(row["id"]): Page(str(row["title"]), str(row["text"])) for row in rows}
        if len(pages) != len(rows):
            raise ConfigError(f"{path}: {len(rows) - len(pages)} ids occur more than once")
        index = bm25s.BM25()
        texts = [f"{page.title}\n{page.title}\n{page.text}" for page in pages.values()]
        index.index(bm25s.tokenize(texts, show_progress=False), show_progress=False)

        def tokenize(query: str) -> list[list[str]]:
            tokens: list[list[str]] = bm25s.tokenize([query], return_ids=False, show_progress=False)
            return tokens

        return cls(pages, index, tokenize)

    async def search(self, query: str, *, num_results: int) -> list[Hit]:
        """Wait for the best pages that share a word with the query."""
        return await asyncio.to_thread(self._search, query, num_results)

    async def fetch(self, page: str) -> Page:
        """Return a page."""
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
