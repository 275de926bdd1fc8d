"""The application: every route over one engine, and errors as JSON that says what to change."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from example_trainer.companion.adapters import adapter_routes
from example_trainer.companion.bridge import bridge_routes
from example_trainer.companion.generation import generation_routes
from example_trainer.companion.payloads import RequestError
from example_trainer.companion.state import CompanionState

__all__ = ["create_app"]


def create_app(state: CompanionState) -> FastAPI:
    """Return the application; the engine is looked up at every request."""
    app = FastAPI(title="vLLM companion server")

    @app.exception_handler(RequestError)
    async def refuse(_: Request, error: RequestError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, status_code=400)

    app.include_router(generation_routes(state))
    app.include_router(bridge_routes(state, app))
    app.include_router(adapter_routes(state))
    return app
