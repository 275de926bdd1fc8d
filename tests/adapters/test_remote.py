"""Requests to servers: answers that lead elsewhere, or have another form."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web

from atroposlib.adapters.remote import HttpAnswer, HttpSession, numbers_of, split_names
from atroposlib.errors import ConfigError, EpisodeFailedError


@contextlib.asynccontextmanager
async def asking(
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]],
) -> AsyncIterator[HttpSession]:
    """Open a session with a server that answers every request in the same way."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    session = HttpSession(f"http://{host}:{port}", headers={}, timeout_s=10)
    try:
        yield session
    finally:
        await session.close()
        await runner.cleanup()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirection_is_not_followed(status: int) -> None:
    paths = []

    async def redirect(request: web.Request) -> web.Response:
        paths.append(request.path)
        return web.Response(status=status, headers={"Location": "/internal"})

    async with asking(redirect) as session:
        answer = await session.post("/verify", {})
        with pytest.raises(EpisodeFailedError, match="redirects to /internal, which is not"):
            answer.json()

    assert paths == ["/verify"]


@pytest.mark.parametrize("text", ["{", "[" * 100_000])
def test_answer_that_is_not_json_is_refused(text: str) -> None:
    with pytest.raises(EpisodeFailedError, match="expected JSON"):
        HttpAnswer(200, text, "GET /x").json()


def test_numbers_that_are_not_finite_are_left_out() -> None:
    values = {"a": 1, "b": 10**400, "c": float("nan"), "d": -float("inf"), "e": "1", "f": True}

    assert numbers_of(values) == {"a": 1.0, "f": 1.0}


@pytest.mark.parametrize(
    "text", ["null", "{}", '["train"]', '[{"title": "train"}]', '[{"name": 1}]']
)
def test_splits_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="GET /splits: expected a list of objects"):
        split_names(HttpAnswer(200, text, "GET /splits"))

    assert split_names(HttpAnswer(200, '[{"name": "train"}]', "GET /splits")) == ["train"]
