"""Base classes of engines: chat and text through the OpenAI client, and prompts of token ids.

    chat, text   OpenAICompatibleServer ─► openai.AsyncClient ─► aiohttp transport ─► engine
    token ids    TokenServer: sampling_options, prompt ids ─► the engine's token route
                     ─► check_count, check_sequences

The client's own HTTP library scans every connection for every request, which takes milliseconds
with a thousand requests in flight. So its transport is replaced by aiohttp; all layers above it
are the client's own.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import math
import re
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp

from atroposlib.envs.server_handling.config import (
    APIServerConfig,
    ReasoningConfig,
    ServerBaseline,
    is_official_openai,
)
from atroposlib.envs.server_handling.engine_http import EngineHttp, EngineIdentity
from atroposlib.envs.server_handling.retry import as_missing_completions, http_status
from atroposlib.envs.server_handling.server_baseline import APIServer
from atroposlib.errors import ConfigError, EngineSetupError, InferenceError
from atroposlib.utils.aio import LoopTurns
from atroposlib.utils.text import hide_secrets_of_requests, without_secrets
from atroposlib.utils.tokenizers.earlier_calls import read_template_file

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion
    from openai.types.completion import Completion

__all__ = [
    "OpenAICompatibleServer",
    "TokenServer",
    "WrongChoiceCountError",
    "append_choices",
    "check_count",
    "check_sequences",
    "drop_double_bos",
    "list_of",
    "load_tokenizer",
    "make_http_client",
    "sampling_options",
    "tokenizer_name_of",
    "top_k_of",
]

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 16

LIMIT_NAMES = ("max_completion_tokens", "max_tokens")
"""Names that chat servers use for the maximum length of a reply."""

ALL_LIMIT_NAMES = (*LIMIT_NAMES, "max_new_tokens")

_UNKNOWN_FIELD = re.compile(
    r"unsupported|not supported|unrecogni[sz]ed|unknown|unexpected|not permitted|not allowed"
    r"|extra[_ ](inputs|fields|forbidden)",
    re.IGNORECASE,
)

AnyCompletion = TypeVar("AnyCompletion", "ChatCompletion", "Completion")
Create = Callable[..., Awaitable[AnyCompletion]]


def make_http_client(base_url: str) -> Any:
    """Return an HTTP client for `openai.AsyncClient`; None keeps the client's default.

    Servers with an `http://` URL are engines in the local network. Others are providers on the
    internet, where certificates and proxies matter more than many concurrent requests.
    """
    hide_secrets_of_requests()
    if not base_url.startswith("http://"):
        return None
    import openai

    library = _library_of(openai.DefaultAsyncHttpxClient)
    transport: Any = _AiohttpTransport(library)
    return openai.DefaultAsyncHttpxClient(transport=transport)


def _library_of(client_type: type[Any]) -> ModuleType:
    """Return the HTTP library of the client, which differs between its versions."""
    base = next(base for base in client_type.__mro__ if base.__name__ == "AsyncClient")
    return importlib.import_module(base.__module__.partition(".")[0])


class _AiohttpTransport:
    """Implements the transport interface of the client's HTTP library."""

    def __init__(self, library: ModuleType) -> None:
        self._library = library
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        # The library accepts only subclasses of its own stream class.
        self._stream_type = type("_Stream", (_Stream, library.AsyncByteStream), {})

    async def __aenter__(self) -> _AiohttpTransport:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def handle_async_request(self, request: Any) -> Any:
        """Send a request; the body of the answer is read lazily."""
        limits = request.extensions.get("timeout") or {}
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=limits.get("connect"), sock_read=limits.get("read")
        )
        try:
            answer = await self._open().request(
                request.method,
                # The client already sends user and password as a header; aiohttp rejects both.
                str(request.url.copy_with(username="", password="")),
                headers=request.headers.multi_items(),
                data=await request.aread(),
                timeout=timeout,
                allow_redirects=False,
            )
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise _translated(self._library, error, request) from error
        return self._library.Response(
            answer.status,
            headers=[(name, value) for name, value in answer.headers.items() if _is_kept(name)],
            stream=self._stream_type(self._library, answer, request),
            request=request,
        )

    def _open(self) -> aiohttp.ClientSession:
        # A session belongs to the loop it was created on; a second asyncio.run needs a new one.
        loop = asyncio.get_running_loop()
        if self._session is None or self._session.closed or self._loop is not loop:
            self._loop = loop
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), trust_env=True
            )
        return self._session


class _Stream:
    """The body of one answer, as it arrives."""

    def __init__(self, library: ModuleType, answer: aiohttp.ClientResponse, request: Any) -> None:
        self._library, self._answer, self._request = library, answer, request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._answer.content.iter_chunked(_CHUNK_BYTES):
                yield chunk
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise _translated(self._library, error, self._request) from error

    async def aclose(self) -> None:
        """Return the connection to the pool if everything was read, else close it."""
        self._answer.release()


def _is_kept(header: str) -> bool:
    """Whether a header is still valid after aiohttp has decompressed the body."""
    return header.lower() not in ("content-encoding", "content-length", "transfer-encoding")


def _translated(library: ModuleType, error: Exception, request: Any) -> Exception:
    """Return the client library's equivalent of an aiohttp error."""
    if isinstance(error, asyncio.TimeoutError):
        kind = library.ReadTimeout
    elif isinstance(error, aiohttp.ClientConnectorError):
        kind = library.ConnectError
    else:
        kind = library.ReadError
    return kind(str(error) or type(error).__name__, request=request)  # type: ignore[no-any-return]


class WrongChoiceCountError(InferenceError, ValueError):
    """A server returned a different number of choices than requested."""


def append_choices(first: AnyCompletion, others: list[AnyCompletion]) -> AnyCompletion:
    """Append the choices of `others` to `first`, numbered from 0, and return `first`."""
    for other in others:
        first.choices.extend(other.choices)  # type: ignore[arg-type]  # both of the same kind
    for index, choice in enumerate(first.choices):
        choice.index = index
    return first


class OpenAICompatibleServer(APIServer):
    """A server reached through the OpenAI client for chat and text completions.

    Attributes:
        openai: The client; its retries are disabled because the pipeline retries.
        lists_every_model: Whether a model that the server does not list is refused before the
            first request. Providers accept names that they do not list.
        identity: Model list and tokenizer check of the server.
    """

    lists_every_model = False

    def __init__(
        self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None
    ) -> None:
        import openai  # here, since it takes a second and `--help` makes no client

        super().__init__(config, reasoning_config)
        if not (config.known_base_url or "http://").startswith(("http://", "https://")):
            raise ConfigError(
                f"base_url is {without_secrets(config.base_url or '')!r}; expected an address "
                "such as http://localhost:9001/v1"
            )
        try:
            self.openai = openai.AsyncClient(
                api_key=config.key_for_client,
                base_url=config.known_base_url,
                timeout=config.timeout,
                max_retries=0,
                http_client=make_http_client(config.known_base_url or ""),
            )
        except openai.OpenAIError as error:
            raise ConfigError(
                f"no usable API key for model {config.model_name!r} at the official OpenAI "
                "endpoint; set api_key, or OPENAI_API_KEY, or base_url for another server "
                f"({error})"
            ) from error
        self.http = EngineHttp(
            str(self.openai.base_url), api_key=config.api_key, timeout_s=config.timeout
        )
        self.identity = EngineIdentity(self.http, model_name=config.model_name)
        self._limit_name: str | None = None
        self.share_turns(self._turns)

    async def _check_identity(self, *, gives_tokens: bool) -> None:
        if not self._is_engine_near_by:
            return
        await self.identity.ask_for_models()
        if self.lists_every_model and self.identity.unknown_model is not None:
            raise EngineSetupError(self.identity.unknown_model)

    @property
    def _is_engine_near_by(self) -> bool:
        """Whether checks are cheap; internet providers are checked only after a refusal."""
        return (self.config.known_base_url or "").startswith("http://")

    def _note_first_answer(self) -> None:
        if self.identity.unknown_model is not None:
            logger.warning("%s. It answers requests nevertheless", self.identity.unknown_model)

    async def _explain(self, error: Exception) -> EngineSetupError | None:
        is_about_model = http_status(error) == 404 or (
            http_status(error) in (400, 422) and "model" in str(error).lower()
        )
        if not is_about_model or self.config.known_base_url is None:
            return None
        await self.identity.ask_for_models()
        unknown = self.identity.unknown_model
        return None if unknown is None else EngineSetupError(unknown)

    async def check_server_status_task(self, chat_completion: bool = True) -> None:
        """Probe until the server answers, then return; a failed request starts it again."""
        while not await self.health.confirm(self._probe):  # noqa: ASYNC110 - asks a server
            await asyncio.sleep(self.health_poll_s)

    async def close(self) -> None:
        """End the health check and close every connection."""
        await super().close()
        await self.http.close()
        await self.openai.close()

    def share_turns(self, turns: LoopTurns) -> None:
        """Use `turns` for the HTTP requests too; see `APIServer`."""
        super().share_turns(turns)
        self.http.turns = turns

    async def _probe(self) -> bool:
        return await self.http.answers("/health")

    def _request_url(self) -> str | None:
        return str(self.openai.base_url)

    async def _chat_completion_wrapper(self, **kwargs: Any) -> ChatCompletion:
        import openai

        _require(kwargs, "model", "messages")
        create: Create[ChatCompletion] = self.openai.chat.completions.create
        kwargs = self._with_one_limit(kwargs, name=self._chat_limit_name(kwargs))
        try:
            return await self._with_n_choices(create, kwargs)
        except openai.APIStatusError as error:
            other = other_limit_name(error, kwargs)
            if other is None:
                raise
        answer = await self._with_n_choices(create, self._with_one_limit(kwargs, name=other))
        self._limit_name = other  # from now on
        return answer

    def _chat_limit_name(self, kwargs: Mapping[str, Any]) -> str:
        """Return the server's name for the maximum length of a reply, as far as it is known.

        Every compatible server accepts `max_tokens`. OpenAI itself receives the caller's name, as
        its models differ.
        """
        if self._limit_name is None and is_official_openai(self._request_url()):
            return next(
                (name for name in LIMIT_NAMES if kwargs.get(name) is not None), "max_tokens"
            )
        return self._limit_name or "max_tokens"

    @staticmethod
    def _with_one_limit(kwargs: dict[str, Any], *, name: str) -> dict[str, Any]:
        """Return a request with its limit under one name; None and -1 are dropped."""
        given = {known: kwargs[known] for known in ALL_LIMIT_NAMES if known in kwargs}
        if not given:
            return kwargs
        limits = [limit for limit in given.values() if limit not in (None, -1)]
        rest = {known: value for known, value in kwargs.items() if known not in given}
        return {**rest, name: limits[0]} if limits else rest

    async def _completion_wrapper(self, **kwargs: Any) -> Completion:
        import openai

        _require(kwargs, "model", "prompt")
        kwargs = self._with_one_limit(kwargs, name="max_tokens")
        create: Create[Completion] = self.openai.completions.create
        try:
            return await self._with_n_choices(create, kwargs)
        except openai.APIStatusError as error:
            missing = as_missing_completions(
                error,
                url=without_secrets(str(self.openai.base_url)),
                model=self.config.model_name,
                api_key=self.config.api_key,
            )
            if missing is None:
                raise
            wrong_model = await self._explain(error) if self.lists_every_model else None
            raise (wrong_model or missing) from None  # the original may repeat the key

    async def _with_n_choices(
        self, create: Create[AnyCompletion], kwargs: dict[str, Any]
    ) -> AnyCompletion:
        """Call `create` until `n` choices are returned, even by a server that ignores `n`."""
        kwargs = _as_client_options(create, kwargs)
        wanted = kwargs.get("n") or 1
        single = {name: value for name, value in kwargs.items() if name != "n"}
        if self.config.n_kwarg_is_ignored:
            answers = await asyncio.gather(*(create(**single) for _ in range(wanted)))
            return append_choices(answers[0], list(answers[1:]))
        answer = await create(**kwargs)
        received = len(answer.choices)
        if received == wanted:
            return answer
        if received != 1:
            raise WrongChoiceCountError(
                f"inference server {self.health.name} answered {received} choices, "
                f"expected {wanted}"
            )
        warnings.warn(
            f"inference server {self.health.name} ignores n: asked for {wanted} choices, got 1; "
            "sending one request per choice from now on (set n_kwarg_is_ignored to skip the test)",
            stacklevel=2,
        )
        self.config.n_kwarg_is_ignored = True
        others = await asyncio.gather(*(create(**single) for _ in range(wanted - 1)))
        return append_choices(answer, list(others))


def other_limit_name(error: Exception, kwargs: Mapping[str, Any]) -> str | None:
    """Return the other name of the reply limit if a server refused the one that was sent.

    Args:
        error: Error of the chat request.
        kwargs: Arguments of the chat request.
    """
    sent = next((name for name in LIMIT_NAMES if name in kwargs), None)
    said = str(error)
    if sent is None or http_status(error) not in (400, 422) or not _UNKNOWN_FIELD.search(said):
        return None
    if re.search(rf"\b{sent}\b", said) is None:
        return None
    return next(name for name in LIMIT_NAMES if name != sent)


def _as_client_options(create: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Move options unknown to the client, such as `top_k`, into `extra_body`."""
    parameters = inspect.signature(create).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return kwargs
    foreign = {name: value for name, value in kwargs.items() if name not in parameters}
    if not foreign:
        return kwargs
    known = {name: value for name, value in kwargs.items() if name in parameters}
    return {**known, "extra_body": {**foreign, **(kwargs.get("extra_body") or {})}}


def _require(kwargs: dict[str, Any], *names: str) -> None:
    for name in names:
        assert name in kwargs, f"the request has no {name!r}"


_UNFINISHED = frozenset({"abort", "error"})
"""Finish reasons of a completion the engine aborted: a fragment that must not be scored."""


def sampling_options(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request options to send to the engine, under the engine's names.

    Unset values (None) are left out, `extra_body` is merged in, and the older names of
    `max_tokens` are translated. `logprobs` is dropped: the request body always asks for the sampled
    token's logprob.

    `max_tokens` given as None or -1 lets the completion fill the context and becomes None; if it is
    left out, the engine stops after its default of 16 tokens.
    """
    options = {name: value for name, value in kwargs.items() if value is not None}
    options.update(options.pop("extra_body", {}))
    for name in ("model", "prompt", "input_ids", "timeout", "extra_headers", "logprobs"):
        options.pop(name, None)
    for old_name in ("max_new_tokens", "max_completion_tokens"):
        if old_name in options:
            options["max_tokens"] = options.pop(old_name)
    if options.get("max_tokens") == -1 or ("max_tokens" in kwargs and "max_tokens" not in options):
        options["max_tokens"] = None
    return options


def drop_double_bos(ids: Sequence[int], bos_token_id: int | None) -> list[int]:
    """Return `ids` with a single bos if both the template and the tokenizer added one."""
    doubled = len(ids) > 1 and ids[0] == ids[1] == bos_token_id
    return list(ids[1:] if doubled else ids)


def list_of(mapping: Mapping[str, Any], name: str) -> list[Any]:
    """Return a list field of an answer; raises `InferenceError` if it is missing."""
    value = mapping.get(name)
    if not isinstance(value, list):
        raise InferenceError(f"the engine's answer has no {name}")
    return value


def check_count(choices: Sequence[Any], expected: int) -> None:
    """Raise `InferenceError` unless the engine returned the requested number of completions."""
    if len(choices) != expected:
        raise InferenceError(f"the engine answered {len(choices)} completions, not {expected}")


def check_sequences(
    ids: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float | None]],
    finish_reasons: Sequence[Any],
) -> None:
    """Raise `InferenceError` for an aborted completion, or one without one logprob per id.

    Args:
        ids: [n][C] sampled ids.
        logprobs: [n][C] logprobs as the engine sent them.
        finish_reasons: [n] text, an object with a `type`, or null.
    """
    for i, (row, values, reason) in enumerate(zip(ids, logprobs, finish_reasons, strict=True)):
        kind = reason.get("type") if isinstance(reason, Mapping) else reason
        if kind in _UNFINISHED:
            raise InferenceError(f"the engine aborted completion {i} ({kind})")
        if len(row) != len(values):
            raise InferenceError(f"completion {i} has {len(row)} ids and {len(values)} logprobs")
        if not _are_finite(values):
            raise InferenceError(f"completion {i} has a logprob that is not a finite number")


def _are_finite(values: Sequence[float | None]) -> bool:
    # A sum is finite only if all numbers are; `sum` is much faster than a loop.
    try:
        return math.isfinite(sum(values)) or all(map(math.isfinite, values))  # type: ignore[arg-type]
    except TypeError:  # the engine sent null for a missing logprob
        return False


def tokenizer_name_of(config: ServerBaseline) -> str:
    """Return the tokenizer's name: `tokenizer_name`, or `model_name` if that is unset."""
    return config.model_name if config.tokenizer_name in ("", "none") else config.tokenizer_name


def load_tokenizer(config: ServerBaseline) -> Any:
    """Load the tokenizer of a server's model with transformers."""
    from transformers import AutoTokenizer

    return read_template_file(AutoTokenizer.from_pretrained(tokenizer_name_of(config)))


class TokenServer(OpenAICompatibleServer):
    """A server that receives and returns token ids."""

    _tokenizer: Any = None
    _compares_for_all = False

    @property
    def tokenizer(self) -> Any:
        """The served model's tokenizer, loaded at first use; may be assigned."""
        if self._tokenizer is None:
            self._tokenizer = self._load_tokenizer()
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, value: Any) -> None:
        self._tokenizer = value

    def expect_tokenizer(self, tokenizer: Any, *, name: str, is_for_all: bool = False) -> None:
        """Compare the engine's ids with a tokenizer's at the first request; see `APIServer`."""
        self.identity.expect_tokenizer(tokenizer, name=name)
        self._compares_for_all = is_for_all

    async def _check_identity(self, *, gives_tokens: bool) -> None:
        await super()._check_identity(gives_tokens=gives_tokens)
        if gives_tokens or self._compares_for_all:
            await self.identity.check_tokenizer()

    def _load_tokenizer(self) -> Any:
        return load_tokenizer(self.config)

    def _prompt_ids(self, kwargs: dict[str, Any]) -> list[int]:
        """Return the ids to send: `input_ids` unchanged, else the encoded `prompt`."""
        input_ids = kwargs.get("input_ids")
        if input_ids:
            return list(input_ids)
        assert kwargs.get("prompt"), "the request has neither prompt nor input_ids"
        ids = self.tokenizer.encode(kwargs["prompt"])
        return drop_double_bos(ids, self.tokenizer.bos_token_id)


def top_k_of(kwargs: dict[str, Any]) -> int:
    """Remove `top_k` (or `top_logprobs`) from `kwargs` and return it; default 1.

    0 requests the prompt's own tokens only.
    """
    top_k = kwargs.pop("top_k", None)
    top_logprobs = kwargs.pop("top_logprobs", None)
    if top_k is None:
        top_k = 1 if top_logprobs is None else top_logprobs
    return max(0, int(top_k))
