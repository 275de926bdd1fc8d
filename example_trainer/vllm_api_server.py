"""Serve a model with vLLM under the earlier trainer's routes: `/generate`, `/bridge`, `/lora`.

Runs as a file and with `python -m`, with the flags below and those of vLLM's engine. The trainer
needs a stock vLLM only; this server is for clients that call `/generate`:

    {"prompt": TEXT or {"prompt_token_ids": [P]}, "stream": false, ...sampling parameters}
    {"text": [n], "prompt": TEXT, "finish_reasons": [n],
     "token_ids": [n][C], "logprobs": [n][C][1]{id: logprob}, "prompt_token_ids": [P]}
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

if __package__ in (None, ""):
    # Run as a file: see `grpo`.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import msgspec
import uvicorn
from fastapi import APIRouter, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, Field

from atroposlib.errors import ConfigError, MissingExtraError
from atroposlib.utils.aio import unless_disconnected
from atroposlib.utils.command_parser import end_command, host_name, prepare_command
from atroposlib.utils.request_limits import BodyLimitMiddleware, LimitedHttpProtocol
from atroposlib.utils.text import near_name
from atroposlib.utils.web_pages import (
    JSON_TYPES,
    WebPageMiddleware,
    WebPageRule,
    names_of_address,
)

__all__ = ["app", "create_app", "engine", "main"]

logger = logging.getLogger(__name__)


class EngineTypes(NamedTuple):
    """Types of vLLM that the requests to its engine consist of."""

    sampling_params: Any
    """`SamplingParams`."""
    final_only: Any
    """`RequestOutputKind.FINAL_ONLY`."""
    cumulative: Any
    """`RequestOutputKind.CUMULATIVE`."""
    lora_request: Any
    """`LoRARequest`."""
    client_errors: tuple[type[Exception], ...] = (ValueError,)
    """Errors that an invalid request raises."""


class PlainSamplingParams(msgspec.Struct, kw_only=True):
    """The common fields of vLLM's `SamplingParams`, without its checks."""

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    output_kind: str = "final_only"


def load_engine_types() -> EngineTypes:
    """Import vLLM's types, which takes seconds.

    Without vLLM, return plain ones: `main` starts no engine then, but a program that imports this
    module may set `engine` to one of its own, as tests do.
    """
    try:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind
    except ImportError:
        return EngineTypes(PlainSamplingParams, "final_only", "cumulative", LoadedAdapter)
    try:
        from vllm.exceptions import VLLMClientError
    except ImportError:  # an older vLLM
        client_errors: tuple[type[Exception], ...] = (ValueError,)
    else:
        client_errors = (ValueError, VLLMClientError)
    return EngineTypes(
        SamplingParams,
        RequestOutputKind.FINAL_ONLY,
        RequestOutputKind.CUMULATIVE,
        LoRARequest,
        client_errors,
    )


@dataclass(frozen=True)
class EngineFacts:
    """Properties of the engine that the routes report."""

    model: str | None = None
    dtype: str | None = None
    device: str | None = None
    has_lora: bool = False
    """Whether it was started with `--enable-lora`."""


@dataclass(frozen=True)
class LoadedAdapter:
    """A LoRA adapter loaded in the engine."""

    name: str
    number: int
    """Its id in the engine; each load gets a new one."""
    path: str


@dataclass
class CompanionState:
    """State of the server: its engine and the adapter in use."""

    find_engine: Callable[[], Any]
    """Returns vLLM's `AsyncLLM`, None before it has started."""
    find_types: Callable[[], EngineTypes] = load_engine_types
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables; adapters are listed from `LOGDIR`."""
    facts: EngineFacts = field(default_factory=EngineFacts)
    adapter: LoadedAdapter | None = None
    """Used for every `/generate` request; None: the model without adapter."""
    load_count: int = 0
    adapters_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Serializes loads, so that the last one is in use afterwards."""
    _requests: itertools.count[int] = field(default_factory=itertools.count)

    def engine(self) -> Any:
        """Return the engine; 503 before it has started and after it has died."""
        engine = self.find_engine()
        if engine is None:
            raise HTTPException(503, "the engine has not started")
        if self.is_dead():
            raise HTTPException(503, "the engine has died; see the log, and restart this server")
        return engine

    def is_dead(self) -> bool:
        """Whether the processes of the engine have ended, as vLLM reports it."""
        return getattr(self.find_engine(), "errored", False) is True

    def request_id(self) -> str:
        return f"companion-{next(self._requests)}"


_LOWEST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot represent."""

_OWN_KEYS = frozenset({"prompt", "stream"})
_INTERNAL = frozenset({"output_kind", "flat_logprobs", "skip_clone", "output_text_buffer_length"})


class RequestError(ValueError):
    """An invalid request; answered with status 400."""


class GenerateRequest(NamedTuple):
    """A parsed body of `/generate`."""

    prompt: str | dict[str, list[int]]
    """Text, or `{"prompt_token_ids": [P]}`."""
    stream: bool
    sampling: dict[str, Any]
    """Arguments of vLLM's `SamplingParams`."""

    @property
    def wants_logprobs(self) -> bool:
        """Whether logprobs are requested; 0 requests those of the sampled tokens."""
        return self.sampling.get("logprobs") is not None

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.sampling.get("prompt_logprobs") is not None


class _Logprob(Protocol):
    logprob: float


def read_request(body: Any) -> GenerateRequest:
    """Parse the body of `POST /generate`.

    Raises:
        RequestError: it is not an object, has no valid prompt, or `stream` is not a boolean.
    """
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object with a prompt")
    stream = body.get("stream", False)
    if not isinstance(stream, bool):
        raise RequestError(f"stream: expected true or false, got {stream!r:.40}")
    sampling = {name: value for name, value in body.items() if name not in _OWN_KEYS}
    return GenerateRequest(_read_prompt(body.get("prompt")), stream, sampling)


def _read_prompt(prompt: Any) -> str | dict[str, list[int]]:
    if isinstance(prompt, str) and prompt:
        return prompt
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
    if not isinstance(ids, list) or not ids:
        raise RequestError('prompt: expected a non-empty text or {"prompt_token_ids": [...]}')
    for t, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise RequestError(f"prompt.prompt_token_ids[{t}]: {token!r:.40} is not a token id")
    return {"prompt_token_ids": ids}


def sampling_params(kind: Any, given: Mapping[str, Any], **fixed: Any) -> Any:
    """Create vLLM's sampling parameters; a value of a wrong type would end the engine.

    Raises:
        RequestError: a name is unknown, or a value has the wrong type or is out of range.
    """
    known = {name for name in kind.__struct_fields__ if not name.startswith("_")} - _INTERNAL
    for name in given:
        if name not in known:
            raise RequestError(
                f"{name}: not a sampling parameter of this engine{near_name(name, known)}"
            )
    try:
        params = msgspec.convert(dict(given), kind, str_keys=True)
    except (ValueError, TypeError) as error:
        raise RequestError(f"sampling parameters: {error}") from error
    for name, value in fixed.items():
        setattr(params, name, value)
    return params


def generate_answer(output: Any, request: GenerateRequest) -> dict[str, Any]:
    """Return the response to one request from vLLM's finished `RequestOutput`."""
    answer: dict[str, Any] = {
        "text": [choice.text for choice in output.outputs],
        "prompt": output.prompt,
        "finish_reasons": [choice.finish_reason for choice in output.outputs],
    }
    if answer["prompt"] is None and isinstance(request.prompt, str):
        answer["prompt"] = request.prompt
    if request.wants_logprobs:
        answer["logprobs"] = [_positions(choice.logprobs or ()) for choice in output.outputs]
        answer["token_ids"] = [list(choice.token_ids) for choice in output.outputs]
    if request.wants_prompt_logprobs:
        answer["prompt_logprobs"] = _positions(output.prompt_logprobs or ())
    if request.wants_logprobs or request.wants_prompt_logprobs:
        answer["prompt_token_ids"] = list(output.prompt_token_ids or ())
    return answer


def _positions(entries: Iterable[Mapping[int, _Logprob] | None]) -> list[Any]:
    """Return for each position a list with one mapping, null where the engine has none."""
    return [
        None
        if entry is None
        else [{str(token): max(value.logprob, _LOWEST_LOGPROB) for token, value in entry.items()}]
        for entry in entries
    ]


_CLIENT_CLOSED = 499

Result = TypeVar("Result")


def generation_routes(state: CompanionState) -> APIRouter:
    """Return the routes that generate text."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        return Response(status_code=503 if state.is_dead() else 200)

    @router.get("/health_generate")
    async def health_generate(request: Request) -> Response:
        engine = state.engine()
        probe = GenerateRequest({"prompt_token_ids": [0]}, False, {"max_tokens": 1})
        try:
            output = await unless_disconnected(request.receive, _finish(engine, state, probe))
        except asyncio.CancelledError:  # by the engine, or as this server stops
            return Response(status_code=_CLIENT_CLOSED)
        except Exception:
            logger.exception("the engine cannot generate")
            return JSONResponse({"detail": "the engine cannot generate"}, status_code=500)
        return Response(status_code=_CLIENT_CLOSED if output is None else 200)

    @router.post("/generate")
    async def generate(request: Request) -> Response:
        engine = state.engine()
        parsed = read_request(await _json_of(request))
        if parsed.stream:
            outputs = _outputs(engine, state, parsed)
            # Before the response starts: errors of the engine precede the status 200.
            first = await unless_disconnected(request.receive, _first_of(outputs))
            if first is None:
                return Response(status_code=_CLIENT_CLOSED)
            lines = _lines(first, outputs, parsed)
            return StreamingResponse(lines, media_type="application/x-ndjson")
        output = await unless_disconnected(request.receive, _finish(engine, state, parsed))
        if output is None:
            return Response(status_code=_CLIENT_CLOSED)
        return JSONResponse(generate_answer(output, parsed))

    return router


async def _json_of(request: Request) -> Any:
    try:
        return await request.json()
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from error


async def _outputs(
    engine: Any, state: CompanionState, parsed: GenerateRequest
) -> AsyncGenerator[Any, None]:
    """Yield the outputs of the engine; closing the generator aborts the request."""
    types, adapter = state.find_types(), state.adapter
    kind = types.cumulative if parsed.stream else types.final_only
    try:
        params = sampling_params(types.sampling_params, parsed.sampling, output_kind=kind)
    except types.client_errors as error:
        raise RequestError(str(error)) from error
    more = {}
    if adapter is not None:
        more["lora_request"] = types.lora_request(adapter.name, adapter.number, adapter.path)
    try:
        async for output in engine.generate(parsed.prompt, params, state.request_id(), **more):
            yield output
    except types.client_errors as error:  # a prompt that is too long, an id outside the vocabulary
        raise RequestError(str(error)) from error


async def _first_of(outputs: AsyncIterator[Any]) -> Any:
    async for output in outputs:
        return output
    raise RuntimeError("the engine ended without an answer")


async def _finish(engine: Any, state: CompanionState, parsed: GenerateRequest) -> Any:
    final = None
    async for output in _outputs(engine, state, parsed):
        final = output
    if final is None:
        raise RuntimeError("the engine ended without an answer")
    return final


async def _lines(
    first: Any, rest: AsyncGenerator[Any, None], parsed: GenerateRequest
) -> AsyncIterator[bytes]:
    async with contextlib.aclosing(rest):
        yield _line(first, parsed)
        async for output in rest:
            yield _line(output, parsed)


def _line(output: Any, parsed: GenerateRequest) -> bytes:
    """Return one line of a stream: the prompt and the text so far of each choice."""
    prompt = output.prompt
    if prompt is None and isinstance(parsed.prompt, str):
        prompt = parsed.prompt
    texts = [(prompt or "") + choice.text for choice in output.outputs]
    return (json.dumps({"text": texts}) + "\n").encode()


_SHOWN_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "LOGDIR",
    "NUM_INFERENCE_NODES",
    "VLLM_BRIDGE_CONFIG_PATH",
    "VLLM_ENABLE_SHARED_WEIGHTS",
    "VLLM_WORKER_MULTIPROC_METHOD",
)
"""Environment variables that `/bridge/debug` shows; others may contain keys."""


def bridge_routes(state: CompanionState, app: FastAPI) -> APIRouter:
    """Return the routes under `/bridge`; memory is not shared with a trainer."""
    router = APIRouter(prefix="/bridge")

    @router.get("/info")
    async def info() -> dict[str, Any]:
        state.engine()
        return {
            "enabled": False,
            "shared_weights": False,
            "update_count": 0,
            "last_update_time": None,
            "model_name": state.facts.model,
            "device": state.facts.device,
        }

    @router.get("/state_dict_info")
    async def state_dict_info() -> dict[str, Any]:
        state.engine()
        facts = state.facts
        return {"model": facts.model, "dtype": facts.dtype, "shared_weights_enabled": False}

    _add_pausing(router, state)
    _add_sleeping(router, state)

    @router.get("/debug")
    async def debug() -> dict[str, Any]:
        engine = state.find_engine()
        return {
            "engine_type": None if engine is None else type(engine).__name__,
            "vllm_version": _vllm_version(),
            "patch_applied": False,
            "env_vars": {
                name: state.environment[name]
                for name in _SHOWN_VARIABLES
                if name in state.environment
            },
            "model_config": {"model": state.facts.model, "dtype": state.facts.dtype},
        }

    @router.get("/list_endpoints")
    async def list_endpoints() -> dict[str, Any]:
        return {
            "endpoints": [
                {"path": path, "methods": sorted(method.upper() for method in operations)}
                for path, operations in app.openapi()["paths"].items()
            ]
        }

    return router


def _add_pausing(router: APIRouter, state: CompanionState) -> None:
    @router.post("/pause")
    async def pause() -> dict[str, str]:
        engine = state.engine()
        if not _can(engine, "pause_generation"):
            return {"status": "not_supported"}
        await engine.pause_generation(mode="keep")
        return {"status": "paused"}

    @router.post("/resume")
    async def resume() -> dict[str, str]:
        engine = state.engine()
        if not _can(engine, "resume_generation"):
            return {"status": "not_supported"}
        await engine.resume_generation()
        return {"status": "resumed"}

    @router.get("/is_paused")
    async def is_paused() -> dict[str, bool]:
        engine = state.engine()
        return {"paused": _can(engine, "is_paused") and bool(await engine.is_paused())}


def _add_sleeping(router: APIRouter, state: CompanionState) -> None:
    @router.post("/sleep")
    async def sleep() -> dict[str, str]:
        await state.engine().sleep()
        return {"status": "sleeping"}

    @router.post("/wake_up")
    async def wake_up() -> dict[str, str]:
        await state.engine().wake_up()
        return {"status": "awake"}

    @router.get("/is_sleeping")
    async def is_sleeping() -> dict[str, bool]:
        return {"sleeping": bool(await state.engine().is_sleeping())}


def _can(engine: Any, method: str) -> bool:
    # Versions of vLLM before 0.12 cannot pause.
    return callable(getattr(type(engine), method, None))


def _vllm_version() -> str | None:
    try:
        import vllm
    except ImportError:
        return None
    return str(vllm.__version__)


_CONFIG_NAME = "adapter_config.json"


class LoadRequest(BaseModel):
    """Body of `POST /lora/load`."""

    adapter_path: str = Field(min_length=1)
    adapter_name: str | None = Field(default=None, min_length=1)


def adapter_routes(state: CompanionState) -> APIRouter:
    """Return the routes under `/lora`."""
    router = APIRouter(prefix="/lora")

    @router.get("/status")
    async def status() -> dict[str, Any]:
        adapter = state.adapter
        return {
            "lora_available": state.facts.has_lora,
            "active_adapter_path": None if adapter is None else adapter.path,
            "active_adapter_name": None if adapter is None else adapter.name,
            "active_adapter_id": None if adapter is None else adapter.number,
            "load_count": state.load_count,
            "available_adapters": _available_adapters(state.environment.get("LOGDIR")),
        }

    @router.post("/load")
    async def load(request: LoadRequest) -> dict[str, Any]:
        async with state.adapters_lock:
            return await _load(state, request)

    @router.post("/unload")
    async def unload() -> dict[str, Any]:
        async with state.adapters_lock:
            engine, adapter = state.engine(), state.adapter
            state.adapter = None
            if adapter is not None:
                await engine.remove_lora(adapter.number)
        return {
            "status": "unloaded",
            "previous_adapter": None if adapter is None else adapter.path,
            "previous_name": None if adapter is None else adapter.name,
        }

    return router


async def _load(state: CompanionState, request: LoadRequest) -> dict[str, Any]:
    engine, path = state.engine(), Path(request.adapter_path)
    config = await asyncio.to_thread(_read_config, path)
    if not state.facts.has_lora:
        raise RequestError("this engine does not support adapters; start it with --enable-lora")
    number = state.load_count + 1
    adapter = LoadedAdapter(request.adapter_name or f"adapter_{number}", number, str(path))
    await _add_to_engine(engine, state.find_types().lora_request(adapter.name, number, str(path)))
    previous, state.adapter, state.load_count = state.adapter, adapter, number
    if previous is not None:
        await engine.remove_lora(previous.number)
    return {
        "status": "loaded",
        "adapter_path": adapter.path,
        "adapter_name": adapter.name,
        "adapter_id": adapter.number,
        "load_count": state.load_count,
        "adapter_config": {
            "r": config.get("r"),
            "lora_alpha": config.get("lora_alpha"),
            "target_modules": config.get("target_modules"),
            "base_model": config.get("base_model_name_or_path"),
        },
    }


async def _add_to_engine(engine: Any, lora_request: Any) -> None:
    try:
        added = await engine.add_lora(lora_request)
    except Exception as error:
        # The engine's process reports an invalid adapter as a plain exception.
        raise RequestError(f"the engine rejected the adapter: {error}") from error
    if not added:
        raise RequestError("the engine rejected the adapter; see its log")


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise HTTPException(404, f"adapter_path: no directory {path}")
    file = path / _CONFIG_NAME
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(f"adapter_path: {file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise RequestError(f"adapter_path: {file} is not a JSON object")
    return config


def _available_adapters(folder: str | None) -> list[str]:
    if not folder:
        return []
    return sorted(str(file.parent) for file in Path(folder).glob(f"*/{_CONFIG_NAME}"))


_MAX_BODY_BYTES = 64 * 2**20
_MEDIA_TYPES = JSON_TYPES | {
    "application/octet-stream",
    "application/x-www-form-urlencoded",
    "text/plain",
}
"""Programs that set no type send JSON under these names; curl sends the second."""


def web_page_rule(*, allowed_hosts: Iterable[str] = (), has_proxy: bool = False) -> WebPageRule:
    """Return the rule for requests of browsers.

    Args:
        allowed_hosts: Further names of this machine.
        has_proxy: Whether a proxy passes requests on, which may have been sent to any name.
    """
    return WebPageRule(
        allowed_hosts=frozenset(allowed_hosts),
        machine_name=socket.gethostname(),
        media_types=_MEDIA_TYPES,
        checks_host=not has_proxy,
        host_remedy="start this server with --allowed-host {}",
    )


def create_app(state: CompanionState, rule: WebPageRule | None = None) -> FastAPI:
    """Return the application; the engine is looked up at every request.

    `rule`: The requests of browsers that it accepts; None: those of programs and its own ones.
    """
    app = FastAPI(title="vLLM companion server")
    app.add_middleware(BodyLimitMiddleware, max_body_bytes=_MAX_BODY_BYTES)
    # A page in a browser of this host could load an adapter, or put the engine to sleep.
    app.add_middleware(WebPageMiddleware, rule=rule or web_page_rule())

    @app.exception_handler(RequestError)
    async def refuse(_: Request, error: RequestError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, status_code=400)

    app.include_router(generation_routes(state))
    app.include_router(bridge_routes(state, app))
    app.include_router(adapter_routes(state))
    return app


_REFRESH_INTERVAL_S = 10.0
_SHUTDOWN_S = 2
"""Time for running requests after a signal to end."""

engine: Any = None
"""vLLM's engine; None until `main` has started it."""

_state = CompanionState(lambda: engine, environment=os.environ)
app = create_app(_state)


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until interrupted.

    Exits with 2 if flags are invalid or vLLM is missing, 130 after Ctrl-C and 143 after SIGTERM.
    The processes of the engine have ended in each of these cases.
    """
    prepare_command()
    try:
        parser = _parser()
    except MissingExtraError as error:
        end_command(Path(sys.argv[0]).name, error, code=2)
    args = parser.parse_args(argv)
    try:
        _refuse_shared_weights()
    except ConfigError as error:
        parser.error(str(error))
    # By default, the signal would end this process but not those of the engine.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        asyncio.run(_serve(args))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _parser() -> Any:
    # vLLM must not fork a process that has used CUDA.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    try:
        from vllm import AsyncEngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError as error:
        raise MissingExtraError("vllm", extra="vllm") from error
    parser = FlexibleArgumentParser(
        description="Serve a model with vLLM by /generate.", conflict_handler="resolve"
    )
    # The engine's first: the server's flags replace those of the same name, such as --log-level.
    parser = AsyncEngineArgs.add_cli_args(parser)
    parser.add_argument("--host", default=None, help="Address to bind; none: 127.0.0.1.")
    parser.add_argument("--port", type=int, default=9001, help="Port.")
    parser.add_argument("--ssl-keyfile", default=None, help="Key of the certificate.")
    parser.add_argument("--ssl-certfile", default=None, help="Certificate to serve TLS with.")
    parser.add_argument(
        "--ssl-ca-certs", default=None, help="Certificates that may sign those of clients."
    )
    parser.add_argument(
        "--enable-ssl-refresh",
        action="store_true",
        help="Whether to reload the certificates when their files change.",
    )
    parser.add_argument(
        "--ssl-cert-reqs",
        type=int,
        choices=[int(value) for value in ssl.VerifyMode],
        default=int(ssl.CERT_NONE),
        help="Certificates of clients: 0 none, 1 optional, 2 required.",
    )
    parser.add_argument(
        "--allowed-host",
        dest="allowed_hosts",
        action="append",
        default=[],
        type=host_name,
        metavar="NAME",
        help="Further host name of this machine that requests may use; may be repeated.",
    )
    parser.add_argument("--root-path", default=None, help="Path prefix added by a proxy.")
    parser.add_argument(
        "--log-level",
        dest="server_log_level",
        type=str.lower,
        choices=list(uvicorn.config.LOG_LEVELS),
        default="info",
        help="Level of the server's own log.",
    )
    return parser


def _refuse_shared_weights() -> None:
    if os.environ.get("VLLM_ENABLE_SHARED_WEIGHTS") == "1":
        raise ConfigError(
            "VLLM_ENABLE_SHARED_WEIGHTS=1: sharing memory with the trainer is not built; unset it "
            "and train with --weight-bridge-mode in_place and a stock vLLM"
        )


async def _serve(args: Any) -> None:
    global engine  # a name of the contract, which external tests replace
    from vllm import AsyncEngineArgs, AsyncLLMEngine

    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs.from_cli_args(args))
    _state.facts = _facts_of(engine)
    try:
        await _answer_requests(args)
    finally:
        engine.shutdown()
        engine = None  # deleted before the modules that its destructor needs


async def _answer_requests(args: Any) -> None:
    host = args.host or "127.0.0.1"
    rule = web_page_rule(
        allowed_hosts=[*args.allowed_hosts, *names_of_address(host)],
        has_proxy=bool(args.root_path),
    )
    config = uvicorn.Config(
        create_app(_state, rule),
        host=host,
        port=args.port,
        http=LimitedHttpProtocol,
        ws="none",
        log_level=args.server_log_level,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        ssl_ca_certs=args.ssl_ca_certs,
        ssl_cert_reqs=args.ssl_cert_reqs,
        root_path=args.root_path or "",
        # Requests that a pause holds would otherwise keep the process alive.
        timeout_graceful_shutdown=_SHUTDOWN_S,
    )
    config.load()
    refreshing = None
    if args.enable_ssl_refresh and config.ssl is not None:
        refreshing = asyncio.create_task(_refresh_certificates(config.ssl, args))
    try:
        await uvicorn.Server(config).serve()
    finally:
        if refreshing is not None:
            refreshing.cancel()


async def _refresh_certificates(context: ssl.SSLContext, args: Any) -> None:
    """Reload certificate and key whenever one of their files has changed; never returns."""
    files = [Path(args.ssl_certfile), Path(args.ssl_keyfile or args.ssl_certfile)]
    changed_at = [file.stat().st_mtime for file in files]
    while True:
        await asyncio.sleep(_REFRESH_INTERVAL_S)
        try:
            found = [file.stat().st_mtime for file in files]
            if found != changed_at:
                context.load_cert_chain(files[0], args.ssl_keyfile)
                changed_at = found
        except OSError as error:  # not all files replaced yet
            logger.warning("the new certificate cannot be loaded yet: %s", error)


def _facts_of(engine: Any) -> EngineFacts:
    config = engine.vllm_config
    return EngineFacts(
        model=config.model_config.model,
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        device=str(config.device_config.device_type),
        has_lora=config.lora_config is not None,
    )


if __name__ == "__main__":
    main()
