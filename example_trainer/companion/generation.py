"""`/generate`, `/health`, `/health_generate`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from example_trainer.companion.payloads import (
    GenerateRequest,
    RequestError,
    generate_answer,
    read_request,
    sampling_params,
    streamed_texts,
)
from example_trainer.companion.state import CompanionState

__all__ = ["generation_routes"]

logger = logging.getLogger(__name__)

_CLIENT_CLOSED = 499

Result = TypeVar("Result")


def generation_routes(state: CompanionState) -> APIRouter:
    """Return the routes that make the engine write."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        return Response()

    @router.get("/health_generate")
    async def health_generate(request: Request) -> Response:
        engine = state.engine()
        probe = GenerateRequest({"prompt_token_ids": [0]}, False, {"max_tokens": 1})
        try:
            output = await _unless_gone(request, _finish(engine, state, probe))
        except Exception:
            logger.exception("the engine does not generate")
            return JSONResponse({"detail": "the engine does not generate"}, status_code=500)
        return Response(status_code=_CLIENT_CLOSED if output is None else 200)

    @router.post("/generate")
    async def generate(request: Request) -> Response:
        engine = state.engine()
        asked = read_request(await _json_of(request))
        if asked.stream:
            outputs = _outputs(engine, state, asked)
            first = await anext(outputs)  # what the engine refuses is said before the 200
            lines = _lines(first, outputs, asked)
            return StreamingResponse(lines, media_type="application/x-ndjson")
        output = await _unless_gone(request, _finish(engine, state, asked))
        if output is None:
            return Response(status_code=_CLIENT_CLOSED)
        return JSONResponse(generate_answer(output, asked))

    return router


async def _json_of(request: Request) -> Any:
    try:
        return await request.json()
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from error


async def _outputs(
    engine: Any, state: CompanionState, asked: GenerateRequest
) -> AsyncGenerator[Any, None]:
    """Yield what the engine has so far; closing this ends the request in the engine."""
    types, adapter = state.find_types(), state.adapter
    kind = types.cumulative if asked.stream else types.final_only
    try:
        params = sampling_params(types.sampling_params, asked.sampling, output_kind=kind)
    except types.client_errors as error:
        raise RequestError(str(error)) from error
    more = {}
    if adapter is not None:
        more["lora_request"] = types.lora_request(adapter.name, adapter.number, adapter.path)
    try:
        async for output in engine.generate(asked.prompt, params, state.request_id(), **more):
            yield output
    except types.client_errors as error:  # a prompt that is too long, an id outside the vocabulary
        raise RequestError(str(error)) from error


async def _finish(engine: Any, state: CompanionState, asked: GenerateRequest) -> Any:
    final = None
    async for output in _outputs(engine, state, asked):
        final = output
    if final is None:
        raise RuntimeError("the engine ended without an answer")
    return final


async def _lines(
    first: Any, rest: AsyncGenerator[Any, None], asked: GenerateRequest
) -> AsyncIterator[bytes]:
    async with contextlib.aclosing(rest):
        yield _line(first, asked)
        async for output in rest:
            yield _line(output, asked)


def _line(output: Any, asked: GenerateRequest) -> bytes:
    given = asked.prompt if isinstance(asked.prompt, str) else None
    texts = streamed_texts(output, given if output.prompt is None else output.prompt)
    return (json.dumps(texts) + "\n").encode()


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result | None:
    """Wait for work, or give it up when the client closes the connection; None then."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_wait_until_gone(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _wait_until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
