"""The HTTP server of the torch engine: routes of vLLM for completions and weight updates.

/v1/completions, /v1/chat/completions, /v1/models, /tokenize, /detokenize
/health, /version, /metrics, /server_info
/pause, /resume, /is_paused, /reset_prefix_cache, /collective_rpc (weight updates)
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import logging
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Scope

from atroposlib.errors import ConfigError, InferenceError, MissingExtraError
from atroposlib.utils.aio import unless_disconnected
from atroposlib.utils.request_limits import BodyLimitMiddleware
from atroposlib.utils.web_pages import WebPageMiddleware, WebPageRefusal, WebPageRule
from example_trainer.torch_engine.answers import AnswerWriter, error_body
from example_trainer.torch_engine.generation import PAUSE_MODES, TorchEngine
from example_trainer.torch_engine.grammars import (
    Grammar,
    GrammarCompiler,
    GrammarError,
    GrammarSource,
)
from example_trainer.torch_engine.images import PromptImages
from example_trainer.torch_engine.jobs import Completion, Job, PromptRequest
from example_trainer.torch_engine.protocol import (
    MAX_BODY_BYTES,
    ChatFields,
    DetokenizeFields,
    EngineRefusal,
    ServedTorchModel,
    TextFields,
    TokenizeFields,
    UpdateFields,
    check_ids,
    encode_text,
    grammar_source,
    parse_body,
    prompt_requests,
    read_images,
    render_chat,
    text_prompts,
)
from example_trainer.torch_engine.texts import GrowingText, StopFinder

logger = logging.getLogger(__name__)

_MAX_WAITING = 65536
_CLIENT_CLOSED = 499

Result = TypeVar("Result")
Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class EngineState:
    """The state that the routes share."""

    engine: TorchEngine
    served: ServedTorchModel
    info: Mapping[str, Any]
    """Answer of `/server_info`."""


def create_app(
    state: EngineState, *, has_update_routes: bool, allowed_hosts: Iterable[str] = ()
) -> FastAPI:
    """Return the application.

    Args:
        state: What the routes share.
        has_update_routes: Whether to offer the routes that pause the engine and load files.
        allowed_hosts: Further names of this machine; see `WebPageRule`.
    """
    routes = CompletionRoutes(state)

    @contextlib.asynccontextmanager
    async def closed_at_the_end(_: FastAPI) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            routes.close()

    app = FastAPI(title="torch engine", openapi_url=None, lifespan=closed_at_the_end)
    app.add_middleware(BodyLimitMiddleware, max_body_bytes=MAX_BODY_BYTES)
    # A page in a browser of this host could load other weights.
    rule = WebPageRule(
        allowed_hosts=frozenset(allowed_hosts),
        machine_name=socket.gethostname(),
        host_remedy="start the engine with --allowed-host {}",
    )
    app.add_middleware(WebPageMiddleware, rule=rule, answer=_refuse_web_page)
    facts = FactRoutes(state)
    table: list[tuple[str, str, Endpoint]] = [
        ("POST", "/v1/completions", routes.text),
        ("POST", "/v1/chat/completions", routes.chat),
        ("GET", "/v1/models", facts.models),
        ("POST", "/tokenize", facts.tokenize),
        ("POST", "/detokenize", facts.detokenize),
        ("GET", "/health", facts.health),
        ("GET", "/ping", facts.health),
        ("GET", "/version", facts.version),
        ("GET", "/metrics", facts.metrics),
        ("GET", "/server_info", facts.server_info),
    ]
    if has_update_routes:
        updates = UpdateRoutes(state)
        table += [
            ("POST", "/pause", updates.pause),
            ("POST", "/resume", updates.resume),
            ("GET", "/is_paused", updates.is_paused),
            ("POST", "/reset_prefix_cache", updates.reset_prefix_cache),
            ("POST", "/collective_rpc", updates.collective_rpc),
        ]
    for method, path, endpoint in table:
        app.add_api_route(path, _answered(endpoint), methods=[method], response_model=None)
    return app


def _refuse_web_page(_: Scope, refusal: WebPageRefusal) -> Response:
    return _json(error_body(refusal.text, status=refusal.status), status=refusal.status)


def _answered(endpoint: Endpoint) -> Endpoint:
    """Wrap an endpoint so that exceptions become answers in the shape of OpenAI's errors."""

    async def guarded(request: Request) -> Response:
        try:
            return await endpoint(request)
        except EngineRefusal as error:
            status, param, message = error.status, error.param, str(error)
        except ConfigError as error:
            status, param, message = 400, None, str(error)
        except HTTPException as error:  # of `BodyLimitMiddleware`
            body = error_body(error.detail, status=error.status_code)
            return _json(body, status=error.status_code, headers=error.headers)
        except ClientDisconnect:  # while it sent its body
            return Response(status_code=_CLIENT_CLOSED)
        except Exception as error:
            logger.exception("%s %s failed", request.method, request.url.path)
            status, param, message = 500, None, f"{type(error).__name__}: {error}"
        return _json(error_body(message, status=status, param=param), status=status)

    return guarded


def _json(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


async def _read_body(request: Request) -> dict[str, Any]:
    """Return the JSON object in a body; an empty one is an empty object."""
    content = bytearray()  # not `body`, which the request would keep while it is answered
    async for piece in request.stream():
        content += piece
    try:
        # Unlike `json`, it refuses lone surrogates and NaN.
        value = msgspec.json.decode(content) if content.strip() else {}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EngineRefusal(f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise EngineRefusal("the body must be a JSON object")
    return value


class CompletionRoutes:
    """The routes that generate."""

    def __init__(self, state: EngineState) -> None:
        self._engine = state.engine
        self._served = state.served
        # Threads only decode, with a tokenizer of their own: one that encodes may change.
        self._decoding = replace(state.served, tokenizer=copy.deepcopy(state.served.tokenizer))
        self._grammars = GrammarCompiler(
            self._decoding.tokenizer, self._served.vocabulary_size, self._served.end_ids
        )

    def close(self) -> None:
        """End the process that compiles grammars, and the thread that reads images."""
        self._grammars.close()
        if self._served.image_reader is not None:
            self._served.image_reader.close()

    async def text(self, request: Request) -> Response:
        fields = parse_body(TextFields, await _read_body(request))
        require_model(fields.model, self._served)
        if fields.stream and fields.echo:
            raise EngineRefusal("echo cannot be streamed by the torch engine", param="echo")
        return await self._answer(request, fields, text_prompts(fields, self._served))

    async def chat(self, request: Request) -> Response:
        fields = parse_body(ChatFields, await _read_body(request))
        require_model(fields.model, self._served)
        chat = render_chat(fields, self._served)
        if not chat.images:
            return await self._answer(request, fields, [chat.ids])
        read = await unless_disconnected(request.receive, read_images(chat, self._served))
        if read is None:
            return Response(status_code=_CLIENT_CLOSED)
        ids, images = read
        return await self._answer(request, fields, [ids], images)

    async def _answer(
        self,
        request: Request,
        fields: TextFields | ChatFields,
        prompts: Iterable[list[int]],
        images: PromptImages | None = None,
    ) -> Response:
        source, grammar = grammar_source(fields), None
        if source is not None:
            grammar = await unless_disconnected(request.receive, self._compile(fields, source))
            if grammar is None:
                return Response(status_code=_CLIENT_CLOSED)
        requests = prompt_requests(fields, prompts, self._served, grammar, images)
        if self._engine.counts().waiting + len(requests) * fields.n > _MAX_WAITING:
            raise EngineRefusal(f"{_MAX_WAITING} completions are waiting; try later", status=503)
        writer = AnswerWriter(fields, self._decoding)
        if fields.stream:
            lines = self._lines(writer, fields, requests)
            return StreamingResponse(lines, media_type="text/event-stream")
        jobs = await unless_disconnected(request.receive, self._finish(fields, requests))
        if jobs is None:
            return Response(status_code=_CLIENT_CLOSED)
        if writer.is_large(jobs):
            return await asyncio.to_thread(lambda: _json(writer.whole(jobs)))
        return _json(writer.whole(jobs))

    async def _compile(self, fields: TextFields | ChatFields, source: GrammarSource) -> Grammar:
        try:
            return await self._grammars.compile(source)
        except (GrammarError, MissingExtraError) as error:
            name = "structured_outputs" if fields.structured_outputs else "response_format"
            raise EngineRefusal(f"{name}: {error}", param=name) from error

    async def _finish(
        self, fields: TextFields | ChatFields, requests: Sequence[PromptRequest]
    ) -> list[Job]:
        """Generate all completions; cancelling this frees their slots."""
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[None]] = [loop.create_future() for _ in requests]

        def done(future: asyncio.Future[None], _: Job) -> None:
            _call_in(loop, partial(_resolve, future))

        jobs = [
            self._job(fields, request, on_done=partial(done, future))
            for request, future in zip(requests, futures, strict=True)
        ]
        try:
            for job in jobs:
                self._engine.submit(job)
            await asyncio.gather(*futures)
        except BaseException:
            self._engine.abort(jobs)
            raise
        for job in jobs:
            if job.error is not None:
                raise InferenceError(f"generation failed: {job.error}") from job.error
        return jobs

    def _job(
        self,
        fields: TextFields | ChatFields,
        request: PromptRequest,
        *,
        on_done: Callable[[Job], None],
        on_token: Callable[[Completion], None] | None = None,
    ) -> Job:
        finders: dict[int, StopFinder] = {}

        def find_stop(completion: Completion) -> str | None:
            if completion.index not in finders:
                text = GrowingText(
                    self._decoding.tokenizer, skips_special=fields.skip_special_tokens
                )
                finders[completion.index] = StopFinder(
                    text, request.stop_texts, min_tokens=request.sampling.min_tokens
                )
            return finders[completion.index].find(completion.tokens)

        return Job(
            request,
            on_done=on_done,
            on_token=on_token,
            find_stop=find_stop if request.stop_texts else None,
        )

    async def _lines(
        self,
        writer: AnswerWriter,
        fields: TextFields | ChatFields,
        requests: Sequence[PromptRequest],
    ) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream; closing the generator frees the slots."""
        loop = asyncio.get_running_loop()
        events = _StreamEvents()

        def progress(position: int, completion: Completion) -> None:
            event = _Progress(
                position, completion, len(completion.tokens), completion.finish_reason is not None
            )
            _call_in(loop, partial(events.put, event))

        jobs = [
            self._job(
                fields, request,
                on_done=lambda job: _call_in(loop, partial(events.put, job)),
                on_token=partial(progress, position),
            )
            for position, request in enumerate(requests)
        ]  # fmt: skip
        try:
            for job in jobs:
                self._engine.submit(job)
            async for chunk in self._chunks(writer, fields, jobs, events):
                yield b"data: " + msgspec.json.encode(chunk) + b"\n\n"
            yield b"data: [DONE]\n\n"
        finally:
            self._engine.abort(job for job in jobs if job.num_open and job.error is None)

    async def _chunks(
        self,
        writer: AnswerWriter,
        fields: TextFields | ChatFields,
        jobs: Sequence[Job],
        events: _StreamEvents,
    ) -> AsyncGenerator[dict[str, Any], None]:
        streams: dict[int, _ChoiceStream] = {}
        num_open = len(jobs)
        while num_open:
            event = await events.get()
            if isinstance(event, Job):
                num_open -= 1
                if event.error is not None:
                    yield error_body(f"generation failed: {event.error}", status=500)
                    return
                continue
            job, index = jobs[event.position], event.position * fields.n + event.completion.index
            if index not in streams:
                streams[index] = _ChoiceStream(writer, fields, self._served, job, index)
                opening = writer.opening_chunk(job, index)
                if opening is not None:
                    yield opening
            yield streams[index].chunk(event)
        if fields.includes_usage:
            yield writer.usage_chunk(jobs)


class _Progress(NamedTuple):
    """A completion after one of its tokens."""

    position: int
    """Of its job."""
    completion: Completion
    num_tokens: int
    is_finished: bool


class _StreamEvents:
    """Queue of a stream; of each completion, only the last progress waits for a slow client."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[int, int] | Job] = asyncio.Queue()
        self._waiting: dict[tuple[int, int], _Progress] = {}

    def put(self, event: _Progress | Job) -> None:
        if isinstance(event, Job):
            self._queue.put_nowait(event)
            return
        key = event.position, event.completion.index
        if key not in self._waiting:
            self._queue.put_nowait(key)
        self._waiting[key] = event

    async def get(self) -> _Progress | Job:
        found = await self._queue.get()
        return found if isinstance(found, Job) else self._waiting.pop(found)


class _ChoiceStream:
    """The part of one choice that has been sent."""

    def __init__(
        self,
        writer: AnswerWriter,
        fields: TextFields | ChatFields,
        served: ServedTorchModel,
        job: Job,
        index: int,
    ) -> None:
        self._writer = writer
        self._job = job
        self._index = index
        self._text = GrowingText(served.tokenizer, skips_special=fields.skip_special_tokens)
        # Text that may be the beginning of a stop text is not sent yet.
        self._held_chars = max(map(len, fields.stop_texts), default=1) - 1
        self._sent_chars = 0
        self._sent_tokens = 0

    def chunk(self, event: _Progress) -> dict[str, Any]:
        """Return the chunk with what is new."""
        completion = event.completion
        if event.is_finished:
            text = self._writer.text_of(completion)
        else:
            text = self._text.add(completion.tokens[: event.num_tokens])
            text = text[: max(self._sent_chars, len(text) - self._held_chars)]
        new = text[self._sent_chars :]
        tokens = slice(self._sent_tokens, event.num_tokens)
        self._sent_chars = max(self._sent_chars, len(text))
        self._sent_tokens = event.num_tokens
        return self._writer.chunk(
            self._job, completion, self._index, text=new, tokens=tokens, is_last=event.is_finished
        )


def _call_in(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    # The server may have ended before the generation thread.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def require_model(name: str | None, served: ServedTorchModel) -> None:
    """Raise `EngineRefusal` if a request names another model than the served one."""
    if name is not None and name != served.name:
        raise EngineRefusal(f"The model `{name[:200]}` does not exist.", status=404, param="model")


class FactRoutes:
    """The routes that neither generate nor change anything."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._served = state.served

    async def models(self, _: Request) -> Response:
        model = {
            "id": self._served.name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "torch_engine",
            "root": self._served.path,
            "parent": None,
            "max_model_len": self._served.limits.max_model_len,
        }
        return _json({"object": "list", "data": [model]})

    async def tokenize(self, request: Request) -> Response:
        fields = parse_body(TokenizeFields, await _read_body(request))
        require_model(fields.model, self._served)
        if (fields.prompt is None) == (fields.messages is None):
            raise EngineRefusal("expected either prompt or messages")
        if fields.prompt is None:
            ids = render_chat(fields, self._served).ids
        else:
            special = fields.add_special_tokens
            ids = encode_text(self._served, fields.prompt, add_special_tokens=special)
        tokenizer = self._served.tokenizer
        return _json(
            {
                "count": len(ids),
                "max_model_len": self._served.limits.max_model_len,
                "tokens": ids,
                "token_strs": tokenizer.convert_ids_to_tokens(ids)
                if fields.return_token_strs
                else None,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        fields = parse_body(DetokenizeFields, await _read_body(request))
        require_model(fields.model, self._served)
        ids = check_ids(fields.tokens, self._served, param="tokens") if fields.tokens else []
        return _json({"prompt": self._served.tokenizer.decode(ids)})

    async def health(self, _: Request) -> Response:
        return Response(status_code=200 if self._state.engine.is_alive else 503)

    async def version(self, _: Request) -> Response:
        return _json({"version": self._state.info["torch_engine"]["version"]})

    async def server_info(self, _: Request) -> Response:
        version = self._state.engine.weight_version
        engine = {**self._state.info["torch_engine"], "weight_version": version}
        return _json({**self._state.info, "torch_engine": engine})

    async def metrics(self, _: Request) -> Response:
        counts = self._state.engine.counts()
        label = json.dumps(self._served.name)
        lines = []
        for name, kind, value in (
            ("num_requests_running", "gauge", counts.running),
            ("num_requests_waiting", "gauge", counts.waiting),
            ("kv_cache_usage_perc", "gauge", min(1.0, counts.cache_use)),
            ("num_preemptions_total", "counter", counts.preemptions),
            ("prompt_tokens_total", "counter", counts.prompt_tokens),
            ("prefix_cache_hits_total", "counter", counts.cached_tokens),
            ("generation_tokens_total", "counter", counts.generated_tokens),
        ):
            lines.append(f"# TYPE vllm:{name} {kind}")
            lines.append(f"vllm:{name}{{model_name={label}}} {value}")
        return Response("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")


class UpdateRoutes:
    """The routes for weight updates; clients can load files of this host by them."""

    def __init__(self, state: EngineState) -> None:
        self._engine = state.engine

    async def pause(self, request: Request) -> Response:
        given = request.query_params.get("mode", "abort")
        mode = next((each for each in PAUSE_MODES if each == given), None)
        if mode is None:
            raise EngineRefusal(
                f"mode: expected one of {', '.join(PAUSE_MODES)}, got {given[:40]!r}", param="mode"
            )
        await asyncio.wrap_future(self._engine.pause(mode))
        return _json({"status": "paused"})

    async def resume(self, _: Request) -> Response:
        await asyncio.wrap_future(self._engine.resume())
        return _json({"status": "resumed"})

    async def is_paused(self, _: Request) -> Response:
        return _json({"is_paused": self._engine.is_paused})

    async def reset_prefix_cache(self, _: Request) -> Response:
        await asyncio.wrap_future(self._engine.reset_caches())
        return _json({"success": True})

    async def collective_rpc(self, request: Request) -> Response:
        body = await _read_body(request)
        if body.get("method") != "reload_weights":
            raise EngineRefusal("method: expected 'reload_weights'", param="method")
        given = body.get("kwargs")
        if not isinstance(given, dict):
            raise EngineRefusal("kwargs: expected an object with weights_path", param="kwargs")
        fields = parse_body(UpdateFields, given)
        folder = Path(fields.weights_path)
        await asyncio.wrap_future(self._engine.reload(folder, version=fields.weight_version))
        return _json({"results": [None]})
