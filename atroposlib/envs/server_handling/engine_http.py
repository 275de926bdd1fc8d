"""Talk to an engine's native routes in JSON over HTTP, and check that it matches the settings.

first request -> GET /v1/models                            -> does it list the configured model?
              -> POST /tokenize, else the echo of a prompt -> does it use the same token ids?

A check that cannot be made passes: the route is missing or forbidden, or the answer is too long or
malformed. If the server cannot be reached, the next request repeats the check. Concurrent requests
share one check (`SharedSearch`).
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, Generic, NamedTuple, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from atroposlib.envs.server_handling.retry import EngineStatusError
from atroposlib.errors import EngineSetupError
from atroposlib.utils.aio import LoopTurns
from atroposlib.utils.io import retry_after_s
from atroposlib.utils.json_text import STEP_BYTES, decode_in_steps
from atroposlib.utils.text import inert_block, shown_name, without_secrets

__all__ = [
    "EngineHttp",
    "EngineIdentity",
    "ServedModel",
    "SharedSearch",
    "answer_cost_s",
    "decode_answer",
    "decode_raw",
    "root_of",
    "unknown_model_text",
]

logger = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 10.0
_ERROR_TEXT_LIMIT = 2000
_LONG_BYTES = 2**17

T = TypeVar("T")

TEST_TEXT = "The tokenizer check: 12345 apples, naïve café, x = f(y) + 3;\nzwölf Übungen."
"""Digits, accents, code and a line break, but no text that a tokenizer reads as a special token."""

CHECK_TIMEOUT_S = 10.0
MAX_LISTING_BYTES = 2_000_000
MAX_SERVER_ERRORS = 3
"""Number of answers of 500 and above after which the check is no longer repeated."""
MAX_SHOWN_MODELS = 8
MAX_SHOWN_IDS = 6
UNNAMED_MODELS = frozenset({"default", "unknown"})
"""Model names that mean the settings do not name a model."""

_ROUTE_REFUSED = frozenset({400, 404, 405, 422, 501})


def answer_cost_s(num_bytes: int) -> float:
    """Estimate the seconds to decode, check and record an answer."""
    return 0.0003 + num_bytes * 12e-9


def root_of(base_url: str) -> str:
    """Return the address of the server itself: `base_url` without a trailing `/v1`."""
    return base_url.rstrip("/").removesuffix("/v1").rstrip("/")


class EngineHttp:
    """Requests to one engine over persistent connections, opened on first use.

    Args:
        base_url: URL of the engine, with or without a trailing `/v1`.
        api_key: Sent as a bearer token when not empty.
        timeout_s: Maximum time for a whole request.

    Attributes:
        turns: Limits how many answers are decoded per pass of the event loop; shared by the
            servers on one loop.
    """

    def __init__(self, base_url: str, *, api_key: str | None, timeout_s: float) -> None:
        self.root_url = root_of(base_url)
        self.turns = LoopTurns()
        self._timeout_s = timeout_s
        has_user = urlsplit(self.root_url).username is not None  # sent in place of the key
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key and not has_user else {}
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def shown_url(self) -> str:
        """The URL for messages, without user and password."""
        return without_secrets(self.root_url)

    async def post_json(
        self,
        path: str,
        body: dict[str, Any],
        *,
        timeout_s: float | None = None,
        decoder: msgspec.json.Decoder[Any] | None = None,
    ) -> Any:
        """Return the decoded JSON answer of a POST.

        Args:
            path: Route, from the root of the server.
            body: JSON object to send.
            timeout_s: Maximum time for the request; default: the server's.
            decoder: Decodes only the needed fields of answers of the expected form; others, and
                very long ones, are decoded completely.

        Raises:
            EngineStatusError: the engine answered an error status; its text is quoted.
            aiohttp.ClientError, TimeoutError, json.JSONDecodeError: no usable answer.
        """
        timeout = aiohttp.ClientTimeout(total=timeout_s or self._timeout_s)
        url = f"{self.root_url}{path}"
        async with self._open().post(url, json=body, timeout=timeout) as response:
            raw = await response.read()
        if len(raw) > STEP_BYTES and response.status < 400:
            return await self._decode_long(raw)
        await self.turns.turn(answer_cost_s(len(raw)))
        answer = _decode_with(decoder, response, raw)
        if len(raw) > _LONG_BYTES:  # processing it takes about the same time again
            await asyncio.sleep(0)
        return answer

    async def _decode_long(self, raw: bytes) -> Any:
        try:
            return await decode_in_steps(raw, lambda n: self.turns.turn(answer_cost_s(n)))
        except (msgspec.DecodeError, UnicodeDecodeError):
            return _loads(raw)

    async def get_json(self, path: str) -> Any:
        """Return the decoded JSON answer of a GET; raises like `post_json`."""
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        async with self._open().get(f"{self.root_url}{path}", timeout=timeout) as response:
            return await decode_answer(response)

    async def ask_briefly(
        self, path: str, body: dict[str, Any] | None, *, timeout_s: float, max_bytes: int
    ) -> Any:
        """Return the decoded JSON answer of a GET, or of a POST with a body, if it is short.

        Raises:
            EngineStatusError: the engine answered an error status.
            ValueError: the answer is longer than `max_bytes`, or not JSON.
            aiohttp.ClientError, TimeoutError, OSError: no answer.
        """
        timeout = aiohttp.ClientTimeout(total=min(timeout_s, self._timeout_s))
        method = "GET" if body is None else "POST"
        url = f"{self.root_url}{path}"
        async with self._open().request(method, url, json=body, timeout=timeout) as response:
            raw = bytearray()
            async for chunk in response.content.iter_chunked(2**16):
                raw += chunk
                if len(raw) > max_bytes:
                    raise ValueError(f"{path} answered more than {max_bytes} bytes")
            return decode_raw(response, bytes(raw))

    async def answers(self, path: str = "/health") -> bool:
        """Whether the server is up: any answer below 500 to a GET counts.

        A reverse proxy in front of a dead engine answers 502 to 504; a server that lacks the
        path or requires a key answers 4xx and is up.
        """
        timeout = aiohttp.ClientTimeout(total=min(_PROBE_TIMEOUT_S, self._timeout_s))
        try:
            async with self._open().get(f"{self.root_url}{path}", timeout=timeout) as response:
                return response.status < 500
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
            return False

    async def close(self) -> None:
        """Close the connections; a later request opens new ones."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _open(self) -> aiohttp.ClientSession:
        # A session belongs to the loop it was created on; a second asyncio.run needs a new one.
        loop = asyncio.get_running_loop()
        if self._session is None or self._session.closed or self._loop is not loop:
            self._loop = loop
            # The semaphores of the server bound the number of connections, not the connector.
            self._session = aiohttp.ClientSession(
                headers=self._headers, connector=aiohttp.TCPConnector(limit=0)
            )
        return self._session


def _decode_with(
    decoder: msgspec.json.Decoder[Any] | None, response: aiohttp.ClientResponse, raw: bytes
) -> Any:
    if decoder is not None and response.status < 400:
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            return decoder.decode(raw)
    return decode_raw(response, raw)


def _loads(raw: bytes) -> Any:
    """Decode an answer; `msgspec` is eight times faster, `json` also accepts NaN."""
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return json.loads(raw)


async def decode_answer(response: aiohttp.ClientResponse) -> Any:
    """Return the JSON of an answer; an error status raises `EngineStatusError` with its text."""
    return decode_raw(response, await response.read())


def decode_raw(response: aiohttp.ClientResponse, raw: bytes) -> Any:
    """Return the JSON of an answer whose body was read; raises like `decode_answer`."""
    if response.status < 400:
        return _loads(raw)
    text = inert_block(raw.decode(errors="replace")[:_ERROR_TEXT_LIMIT])
    raise EngineStatusError(
        f"{response.url.path} answered {response.status}: {text}",
        status=response.status,
        wait_s=retry_after_s(response.headers),
    )


class SharedSearch(Generic[T]):
    """Lets concurrent callers share one running search; a failed one is repeated on the next call.

    The caller stores the result.
    """

    def __init__(self) -> None:
        self._running: asyncio.Task[T] | None = None

    async def result(self, find: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of the running or a new search; cancelling does not stop the search."""
        running = self._running
        # A task of a closed loop never finishes, so it does not count.
        if (
            running is None
            or running.done()
            or running.get_loop() is not asyncio.get_running_loop()
        ):
            running = self._running = asyncio.create_task(find())
        return await asyncio.shield(running)


class ServedModel(NamedTuple):
    """One entry of a server's model list."""

    name: str
    root: str | None
    """Source it was loaded from; None if the server does not say."""


class _NotReachableError(Exception):
    """The server gave no answer; the check may succeed later."""


class EngineIdentity:
    """Model list and tokenizer of one server, fetched once and compared with the settings.

    Args:
        http: Connection to the server.
        model_name: Model named in requests.

    Attributes:
        served: The server's models; None while they are unknown.
    """

    def __init__(self, http: EngineHttp, *, model_name: str) -> None:
        self.served: tuple[ServedModel, ...] | None = None
        self._http = http
        self._model_name = model_name
        self._are_models_asked = False
        self._is_tokenizer_asked = False
        self._tokenizer: Any = None  # transformers has no useful type for it
        self._tokenizer_name = ""
        self._num_server_errors = 0
        self._models_search: SharedSearch[None] = SharedSearch()
        self._tokenizer_search: SharedSearch[None] = SharedSearch()

    def expect_tokenizer(self, tokenizer: Any, *, name: str) -> None:
        """Compare the engine's ids with those of a tokenizer, from the next check on."""
        self._tokenizer, self._tokenizer_name = tokenizer, name
        self._is_tokenizer_asked = False

    @property
    def unknown_model(self) -> str | None:
        """The message if the server does not list the configured model; None if it does."""
        if not self.served or self._model_name in UNNAMED_MODELS:
            return None
        if any(model.name == self._model_name for model in self.served):
            return None
        return unknown_model_text(
            self._http.shown_url, self._model_name, [model.name for model in self.served]
        )

    async def ask_for_models(self) -> None:
        """Fetch the model list, once; later calls return at once."""
        if not self._are_models_asked:
            await self._models_search.result(self._find_models)

    async def check_tokenizer(self) -> None:
        """Compare the engine's ids for a test text with those of the expected tokenizer, once.

        Raises:
            EngineSetupError: They differ.
        """
        if self._tokenizer is not None and not self._is_tokenizer_asked:
            await self._tokenizer_search.result(self._compare_tokenizers)

    async def _find_models(self) -> None:
        try:
            listing = await self._answer("/v1/models", None)
        except _NotReachableError:
            return
        self._are_models_asked = True
        self.served = _models_of(listing)

    async def _compare_tokenizers(self) -> None:
        own = _own_ids(self._tokenizer)
        if own is None:
            self._is_tokenizer_asked = True
            return
        try:
            engine_ids = await self._engine_ids()
        except _NotReachableError:
            return
        if engine_ids is not None and engine_ids not in own:
            raise EngineSetupError(self._wrong_tokenizer_text(own[0], engine_ids))
        self._is_tokenizer_asked = True

    async def _engine_ids(self) -> list[int] | None:
        question = {"model": self._model_name, "prompt": TEST_TEXT, "add_special_tokens": False}
        answer = await self._answer("/tokenize", question)
        if answer is not None:
            return _ids(answer.get("tokens") if isinstance(answer, dict) else None)
        echo = {
            "model": self._model_name,
            "prompt": TEST_TEXT,
            "max_tokens": 1,
            "return_token_ids": True,
        }
        answer = await self._answer("/v1/completions", echo)
        try:
            return _ids(answer["choices"][0].get("prompt_token_ids"))
        except (TypeError, KeyError, IndexError, AttributeError):
            return None

    async def _answer(self, path: str, body: dict[str, Any] | None) -> Any:
        """Return an answer; None if the server gives no usable one.

        Raises:
            _NotReachableError: the server cannot be reached, or is not ready.
        """
        try:
            return await self._http.ask_briefly(
                path, body, timeout_s=CHECK_TIMEOUT_S, max_bytes=MAX_LISTING_BYTES
            )
        except EngineStatusError as error:
            if error.status >= 500 and error.status not in _ROUTE_REFUSED:
                self._num_server_errors += 1
                if self._num_server_errors <= MAX_SERVER_ERRORS:
                    raise _NotReachableError from error
            logger.debug("no answer to compare with the settings: %s", error)
        except asyncio.TimeoutError as error:  # a subclass of OSError from Python 3.11 on
            logger.debug("%s%s took too long: %r", self._http.shown_url, path, error)
        except (aiohttp.ClientConnectionError, OSError) as error:
            raise _NotReachableError from error
        except (aiohttp.ClientError, ValueError) as error:
            logger.debug("%s%s cannot be read: %r", self._http.shown_url, path, error)
        return None

    def _wrong_tokenizer_text(self, own: Sequence[int], engine_ids: Sequence[int]) -> str:
        listed = [model for model in self.served or () if model.name == self._model_name]
        source = (listed[0].root or listed[0].name) if listed else None
        remedy = shown_name(source) if source else f"the tokenizer of {self._model_name}"
        first = next(
            (i for i, pair in enumerate(zip(own, engine_ids, strict=False)) if pair[0] != pair[1]),
            min(len(own), len(engine_ids)),
        )
        return (
            f"the tokenizer {self._tokenizer_name} is not the engine's: inference server "
            f"{self._http.shown_url} encodes a test text as {_shown(engine_ids, first)}, "
            f"{self._tokenizer_name} as {_shown(own, first)}. Use --env.tokenizer_name {remedy}"
        )


def unknown_model_text(url: str, wanted: str, served: Sequence[str]) -> str:
    """Return the message for a model that a server does not list, with a suggestion.

    Args:
        url: URL of the server.
        wanted: The requested model.
        served: Models the server lists, at least one.
    """
    nearest = [*get_close_matches(wanted, served, n=MAX_SHOWN_MODELS, cutoff=0.6), *served]
    ordered = list(dict.fromkeys(nearest))
    shown = ", ".join(map(shown_name, ordered[:MAX_SHOWN_MODELS]))
    left_out = len(ordered) - MAX_SHOWN_MODELS
    more = f" and {left_out} more" if left_out > 0 else ""
    return (
        f"inference server {without_secrets(url)} serves no model {wanted!r}; "
        f"it serves: {shown}{more}. "
        f"Use --openai.model_name {shown_name(ordered[0])}"
    )


def _models_of(listing: Any) -> tuple[ServedModel, ...] | None:
    entries = listing.get("data") if isinstance(listing, dict) else None
    if not isinstance(entries, list):
        return None
    models = []
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("id"), str):
            return None
        root = entry.get("root")
        models.append(ServedModel(entry["id"], root if isinstance(root, str) and root else None))
    return tuple(models)


def _own_ids(tokenizer: Any) -> tuple[list[int], list[int]] | None:
    """Return the ids of the test text without and with special tokens; None if unsupported."""
    try:
        plain = list(tokenizer.encode(TEST_TEXT, add_special_tokens=False))
        return plain, list(tokenizer.encode(TEST_TEXT))
    except Exception as error:  # noqa: BLE001 - any object may stand in for a tokenizer
        logger.debug("the tokenizer cannot be compared with the engine's: %r", error)
        return None


def _ids(value: Any) -> list[int] | None:
    is_list = isinstance(value, list) and all(isinstance(token_id, int) for token_id in value)
    return value if is_list and value else None


def _shown(ids: Sequence[int], first: int) -> str:
    """Format a few ids from index `first` on, and the number of ids."""
    before = "..., " if first else ""
    after = ", ..." if len(ids) > first + MAX_SHOWN_IDS else ""
    shown = ", ".join(map(str, ids[first : first + MAX_SHOWN_IDS]))
    return f"[{before}{shown}{after}] ({len(ids)} ids)"
