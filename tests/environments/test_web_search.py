from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from atroposlib.errors import ConfigError
from atroposlib.tasks.web_search import KEY_VARIABLE, Hit, SearchError, TavilySearch

KEY = "tvly-not-a-key"  # pragma: allowlist secret


class Service:
    """A search service that answers as it is told and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any, str | None]] = []
        self.answer: Any = {"results": []}
        self.status = 200
        self.delay_s = 0.0

    async def __call__(self, request: web.Request) -> web.Response:
        self.asked.append(
            (request.path, await request.json(), request.headers.get("Authorization"))
        )
        await asyncio.sleep(self.delay_s)
        if isinstance(self.answer, str):
            return web.Response(text=self.answer, status=self.status)
        return web.json_response(self.answer, status=self.status)


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def timeout_s() -> float:
    return 60.0


@pytest.fixture
async def source(service: Service, timeout_s: float) -> Any:
    app = web.Application(client_max_size=1 << 20)
    app.router.add_post("/{route}", service)
    async with TestServer(app) as server:
        search = TavilySearch(
            {KEY_VARIABLE: KEY},
            base_url=str(server.make_url("/")),
            timeout_s=timeout_s,
            blocked_domains=["blocked.example"],
        )
        yield search
        await search.close()


async def test_search_sends_the_key_in_a_header_and_leaves_blocked_pages_out(
    service: Service, source: TavilySearch
) -> None:
    urls = ["https://a.example/1", "https://www.blocked.example/2", "https://notblocked.example/3"]
    urls += ["https://blocked.example./4", "http://[bad", "blocked.example/5"]
    service.answer = {"results": [{"url": url, "title": "t", "content": "c"} for url in urls]}

    hits = await source.search("otters", num_results=5)

    assert hits == [Hit(urls[0], "t", "c"), Hit(urls[2], "t", "c")]
    assert service.asked == [
        ("/search", {"query": "otters", "max_results": 5}, f"Bearer {KEY}"),
    ]


async def test_fetch_gives_the_text_of_a_page(service: Service, source: TavilySearch) -> None:
    service.answer = {"results": [{"url": "https://a.example", "raw_content": "All of it."}]}

    page = await source.fetch("https://a.example")

    assert page.text == "All of it."
    with pytest.raises(SearchError, match="may not be opened"):
        await source.fetch("https://blocked.example/x")
    assert [path for path, *_ in service.asked] == ["/extract"]


@pytest.mark.parametrize(
    ("status", "answer", "message"),
    [
        (401, f"bad key {KEY}", "status 401"),
        (302, "", "status 302"),
        (200, "no json " + KEY, "JSONDecodeError"),
        (200, "x" * (5 << 20), "too much text"),
    ],
)
async def test_failures_tell_what_happened_and_nothing_of_the_key(
    service: Service,
    source: TavilySearch,
    caplog: pytest.LogCaptureFixture,
    status: int,
    answer: str,
    message: str,
) -> None:
    caplog.set_level(logging.DEBUG)
    service.status, service.answer = status, answer

    with pytest.raises(SearchError, match=message) as raised:
        await source.search("otters", num_results=5)

    assert KEY not in str(raised.value)
    assert KEY not in caplog.text
    assert KEY not in repr(source)


@pytest.mark.parametrize("timeout_s", [0.1])
async def test_service_that_does_not_answer_in_time(service: Service, source: TavilySearch) -> None:
    service.delay_s = 5.0

    with pytest.raises(SearchError, match="no answer in time"):
        await source.search("otters", num_results=5)


@pytest.mark.parametrize("answer", [{}, [], {"results": "none"}, {"results": [1, {"url": ""}]}])
async def test_odd_answers_are_no_results(
    service: Service, source: TavilySearch, answer: Any
) -> None:
    service.answer = answer

    assert await source.search("otters", num_results=5) == []
    with pytest.raises(SearchError, match="no text"):
        await source.fetch("https://a.example")


def test_missing_key_is_refused_with_the_name_of_its_variable() -> None:
    with pytest.raises(ConfigError, match=KEY_VARIABLE):
        TavilySearch({}, base_url="http://localhost", timeout_s=1.0)
