"""A trajectory service whose answers the test writes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

OFFER = {"Accept-Post": "application/json, application/msgpack"}


@asynccontextmanager
async def scripted(handler: Handler, port: int) -> AsyncIterator[str]:
    """Serve every request by one function; bodies arrive as they were sent."""
    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{tail:.*}", handler)
    runner = web.AppRunner(app, auto_decompress=False)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


class ScriptedService:
    """Plays back one answer per post; `/info` makes the offer of the binary format, or not.

    Args:
        answers: statuses, or responses, one for each post; the last one repeats.
        is_current: whether the service has the binary format and honours keys.
    """

    def __init__(self, *answers: int | web.Response, is_current: bool = True) -> None:
        self.answers = list(answers)
        self.is_current = is_current
        self.posts: list[web.Request] = []
        self.bodies: list[bytes] = []

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            info = {"batch_size": -1, "max_token_len": -1}
            return web.json_response(info, headers=OFFER if self.is_current else {})
        self.posts.append(request)
        self.bodies.append(await request.read())
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, web.Response):
            return answer
        return web.json_response({"status": "received"}, status=answer)

    def sent(self, header: str) -> list[str | None]:
        """Return what each post had in one header."""
        return [request.headers.get(header) for request in self.posts]
