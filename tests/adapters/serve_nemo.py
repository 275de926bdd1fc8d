"""Resource servers that come with NeMo Gym, each under a path, for tests: `python -m ... PORT`.

`counter` has tools as routes, `weather` has tools over MCP, `calls` returns parts of a reward,
`follow` and `cards` are in the style of Gymnasium, `broken` breaks as its task says.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from nemo_gym.base_resources_server import BaseResourcesServerConfig, SimpleResourcesServer
from nemo_gym.server_utils import ServerClient
from resources_servers.blackjack.app import BlackjackEnv
from resources_servers.example_mcp_weather.app import ExampleMCPWeatherResourcesServer
from resources_servers.example_multi_turn_gymnasium.app import ExampleMultiTurnEnv
from resources_servers.example_session_state_mgmt.app import StatefulCounterResourcesServer
from resources_servers.example_tool_call_multireward.app import ToolCallMultiRewardResourcesServer


class BrokenServer(SimpleResourcesServer):
    """Breaks in the way that the field `how` of the task names."""

    async def verify(self, body: dict[str, Any]) -> Response:
        if body["how"] == "raise":
            raise KeyError("unlucky")
        if body["how"] == "hang":
            await asyncio.sleep(12)
        contents = {"none": '{"reward": null}', "nan": '{"reward": NaN}', "text": "sorry"}
        text = contents.get(body["how"], '{"reward": 1.0}')
        return Response(text, media_type="application/json")


SERVERS: dict[str, type[Any]] = {
    "counter": StatefulCounterResourcesServer,
    "weather": ExampleMCPWeatherResourcesServer,
    "calls": ToolCallMultiRewardResourcesServer,
    "follow": ExampleMultiTurnEnv,
    "cards": BlackjackEnv,
    "broken": BrokenServer,
}


def main() -> None:
    servers: dict[str, Any] = {}
    apps: dict[str, FastAPI] = {}
    for name, server_cls in SERVERS.items():
        config = server_cls.model_fields["config"].annotation or BaseResourcesServerConfig
        servers[name] = server_cls(
            config=config(host="127.0.0.1", port=1, entrypoint="app.py", name=name),
            server_client=ServerClient.model_construct(),
        )
        apps[name] = servers[name].setup_webserver()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for app in apps.values():
                await stack.enter_async_context(app.router.lifespan_context(app))
            yield

    root = FastAPI(lifespan=lifespan)

    @root.get("/test/sessions")
    def count_sessions() -> int:
        counter, cards = servers["counter"], servers["cards"]
        return len(counter.session_id_to_counter) + len(cards.session_state)

    @root.exception_handler(KeyError)
    async def failed(_: Any, error: KeyError) -> JSONResponse:
        return JSONResponse(content=repr(error), status_code=500)

    for name, app in apps.items():
        app.add_exception_handler(KeyError, failed)
        root.mount(f"/{name}", app)
    uvicorn.run(root, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")


if __name__ == "__main__":
    main()
