"""Base classes of engines: chat and text through the OpenAI client, and prompts of token ids.

    chat, text   OpenAICompatibleServer ─► openai.AsyncClient ─► aiohttp transport ─► engine
    token ids    TokenServer ─► EngineHttp ─► the engine's token route ─► check_sequences

    first request ─► GET /v1/models                            does it list the configured model?
                  ─► POST /tokenize, else the echo of a prompt does it use the same token ids?

A check that cannot be made passes: the route is missing or forbidden, or the answer is too long or
malformed. If the server cannot be reached, the next request repeats the check.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import re
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import aiohttp

from atroposlib.envs.server_handling.config import (
    APIServerConfig,
    ReasoningConfig,
    is_official_openai,
)
from atroposlib.envs.server_handling.engine_http import EngineHttp, make_http_client
from atroposlib.envs.server_handling.retry import (
    EngineStatusError,
    as_missing_completions,
    http_status,
    with_choices,
)
from atroposlib.envs.server_handling.server_baseline import APIServer, SharedSearch
from atroposlib.errors import ConfigError, EngineSetupError, InferenceError
from atroposlib.scored_data import are_token_ids
from atroposlib.utils.aio import LoopTurns, all_results
from atroposlib.utils.text import shown_name, without_secrets
from atroposlib.utils.tokenizers.earlier_calls import read_template_file

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion
    from openai.types.completion import Completion

logger = logging.getLogger(__name__)

TEST_TEXT = "The tokenizer check: 12345 apples, naïve café, x = f(y) + 3;\nzwölf Übungen."
"""Digits, accents, code and a line break, but no spelling of a special token."""

CHECK_TIMEOUT_S = 10.0
MAX_LISTING_BYTES = 2_000_000
MAX_SERVER_ERRORS = 3
"""Number of answers of 500 and above after which the check is no longer repeated."""
MAX_SHOWN_MODELS = 8
MAX_SHOWN_IDS = 6
UNNAMED_MODELS = frozenset({"default", "unknown"})
"""Model names that mean the settings do not name a model."""

ROUTE_REFUSED = frozenset({400, 404, 405, 422, 501})
"""Statuses of a server that lacks a route, or does not understand a request for it."""


class ServedModel(NamedTuple):
    """One entry of a server's model list."""

    name: str
    root: str | None
    """Source from which it was loaded; None if unknown."""


class _NotReachableError(Exception):
    """The server cannot be reached, or is not ready; the check may succeed later."""


class EngineIdentity:
    """Model list and tokenizer of one server, fetched once and compared with the settings.

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
        self._tokenizer, self._tokenizer_name = tokenizer, name
        self._is_tokenizer_asked = False

    @property
    def unknown_model(self) -> str | None:
        """Error message if the server does not list the configured model; None if it does."""
        if not self.served or self._model_name in UNNAMED_MODELS:
            return None
        if any(model.name == self._model_name for model in self.served):
            return None
        return unknown_model_text(
            self._http.shown_url, self._model_name, [model.name for model in self.served]
        )

    async def ask_for_models(self) -> None:
        if not self._are_models_asked:
            await self._models_search.result(self._find_models)

    async def check_tokenizer(self) -> None:
        """Compare the ids of a test text, once; EngineSetupError if the engine's differ."""
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
        """Return an answer; None if it is unusable. Raises `_NotReachableError`."""
        try:
            return await self._http.ask_briefly(
                path, body, timeout_s=CHECK_TIMEOUT_S, max_bytes=MAX_LISTING_BYTES
            )
        except EngineStatusError as error:
            if error.status >= 500 and error.status not in ROUTE_REFUSED:
                self._num_server_errors += 1
                if self._num_server_errors <= MAX_SERVER_ERRORS:
                    raise _NotReachableError from error
            logger.debug("no answer to compare with the settings: %s", error)
        except asyncio.TimeoutError as error:  # a subclass of OSError from Python 3.11 on
            logger.debug("%s%s took too long: %r", self._http.shown_url, path, error)
        except (aiohttp.ClientConnectionError, OSError) as error:
            raise _NotReachableError from error
        except (aiohttp.ClientError, InferenceError, ValueError) as error:
            logger.debug("%s%s cannot be read: %r", self._http.shown_url, path, error)
        except (AttributeError, TypeError) as error:
            # Of a session that a test replaced by one that only posts: nothing to compare.
            logger.debug("%s%s cannot be asked: %r", self._http.shown_url, path, error)
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
    """Return the message for a model that a server does not list, with a suggestion."""
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
        takes_no_limit: Whether a `max_tokens` of None lets a completion fill the context.
        identity: Model list and tokenizer check of the server.
    """

    lists_every_model = False
    takes_no_limit = True

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
        # Checks are fast there; internet providers are checked only after a refusal.
        self._is_in_local_network = (config.known_base_url or "").startswith("http://")
        self.share_turns(self._turns)

    async def _check_identity(self, *, gives_tokens: bool) -> None:
        if not self._is_in_local_network:
            return
        await self.identity.ask_for_models()
        if self.lists_every_model and self.identity.unknown_model is not None:
            raise EngineSetupError(self.identity.unknown_model)

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
        """Probe until the server answers; a failed request starts the task again."""
        while not await self.health.confirm(self.probe):  # noqa: ASYNC110 - asks a server
            await asyncio.sleep(self.health_poll_s)

    async def close(self) -> None:
        await super().close()
        await self.http.close()
        await self.openai.close()

    def share_turns(self, turns: LoopTurns) -> None:
        super().share_turns(turns)
        self.http.turns = turns

    async def probe(self) -> bool:
        return await self.http.answers("/health")

    def _request_url(self) -> str:
        # Users may assign a client of their own.
        return str(getattr(self.openai, "base_url", "") or self.config.known_base_url or "")

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
        """Return the server's name for the maximum length of a reply.

        Compatible servers accept `max_tokens`. OpenAI itself receives the caller's name, since its
        models differ.
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
                url=without_secrets(self._request_url()),
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
        ask = with_choices(
            create,
            server_name=self.health.name,
            timeout_s=kwargs.get("timeout", self.config.timeout),
            api_key=self.config.api_key,
        )
        if self.config.n_kwarg_is_ignored:
            answers = await all_results(ask(**_seeded(single, i)) for i in range(wanted))
            return append_choices(answers[0], answers[1:])
        answer = await ask(**kwargs)
        received = len(answer.choices)
        if received == wanted:
            return answer
        if received != 1:
            raise WrongChoiceCountError(
                f"inference server {self.health.name} answered {received} choices, "
                f"expected {wanted}"
            )
        self.config.n_kwarg_is_ignored = True  # first: the warning may be raised as an error
        warnings.warn(
            f"inference server {self.health.name} ignores n: asked for {wanted} choices, got 1; "
            "sending one request per choice from now on (set n_kwarg_is_ignored to skip the test)",
            stacklevel=2,
        )
        others = await all_results(ask(**_seeded(single, i)) for i in range(1, wanted))
        return append_choices(answer, others)


def _seeded(kwargs: dict[str, Any], index: int) -> dict[str, Any]:
    """Return the request for one choice: with the same seed, all choices would be equal."""
    seed = kwargs.get("seed")
    return kwargs if seed is None else {**kwargs, "seed": seed + index}


def other_limit_name(error: Exception, kwargs: Mapping[str, Any]) -> str | None:
    """Return the other name of the reply limit if a server refused the one that was sent."""
    sent = next((name for name in LIMIT_NAMES if name in kwargs), None)
    text = str(error)
    if sent is None or http_status(error) not in (400, 422) or not _UNKNOWN_FIELD.search(text):
        return None
    if re.search(rf"\b{sent}\b", text) is None:
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

    Unset values (None) are left out, `extra_body` is merged in, and older names of `max_tokens` are
    translated. `logprobs` is dropped, since the request body always requests the logprob of the
    sampled token.

    `max_tokens` given as None or -1 lets the completion fill the context and becomes None. If it is
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
    """Return `ids` with a single bos, also if both the template and the tokenizer added one."""
    doubled = len(ids) > 1 and ids[0] == ids[1] == bos_token_id
    return list(ids[1:] if doubled else ids)


def check_count(choices: Sequence[Any], expected: int) -> None:
    """Raise `InferenceError` unless the engine returned the requested number of completions."""
    if len(choices) != expected:
        raise InferenceError(f"the engine answered {len(choices)} completions, not {expected}")


def check_sequences(
    ids: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float | None]],
    finish_reasons: Sequence[Any],
) -> None:
    """Raise `InferenceError` for an aborted completion, an invalid id, or one without its logprob.

    `ids` and `logprobs` are [n][C]; [n] finish reasons are text, objects with a `type`, or null.
    """
    for i, (row, values, reason) in enumerate(zip(ids, logprobs, finish_reasons, strict=True)):
        kind = reason.get("type") if isinstance(reason, Mapping) else reason
        if kind in _UNFINISHED:
            raise InferenceError(f"the engine aborted completion {i} ({kind})")
        if len(row) != len(values):
            raise InferenceError(f"completion {i} has {len(row)} ids and {len(values)} logprobs")
        if not _are_finite(values):
            raise InferenceError(f"completion {i} has a logprob that is not a finite number")
        if not are_token_ids(row):
            raise InferenceError(f"completion {i} has a token id that is not an integer from 0")


def _are_finite(values: Sequence[float | None]) -> bool:
    # A sum is finite only if all numbers are; `sum` is much faster than a loop.
    try:
        return math.isfinite(sum(values)) or all(map(math.isfinite, values))  # type: ignore[arg-type]
    except TypeError:  # the engine sent null for a missing logprob
        return False


def prompt_logprobs_answer(
    prompt_ids: list[int], rows: Sequence[Mapping[int, float]]
) -> dict[str, Any]:
    """Return the answer of `get_logprobs`.

    The [P] rows are the logprobs of the candidates at each position by id; empty for unknown ones.
    """
    return {
        "prompt_tokens": prompt_ids,
        "prompt_topk_token_ids": [list(row) for row in rows],
        "prompt_topk_logprobs": [list(row.values()) for row in rows],
    }


def tokenizer_name_of(config: Any) -> str:
    """Return the tokenizer's name: `tokenizer_name`, or `model_name` if that is unset."""
    named = getattr(config, "tokenizer_name", None)  # test servers may have only a model name
    return str(config.model_name if named in (None, "", "none") else named)


def load_tokenizer(config: Any) -> Any:
    """Load the tokenizer of a server's model with transformers."""
    from transformers import AutoTokenizer

    return read_template_file(AutoTokenizer.from_pretrained(tokenizer_name_of(config)))


class TokenServer(OpenAICompatibleServer):
    """A server that receives and returns token ids."""

    _tokenizer: Any = None
    _compares_for_all = False

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of the served model, loaded at first use; may be assigned."""
        if self._tokenizer is None:
            self._tokenizer = self._load_tokenizer()
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, value: Any) -> None:
        self._tokenizer = value

    def expect_tokenizer(self, tokenizer: Any, *, name: str, is_for_all: bool = False) -> None:
        self.identity.expect_tokenizer(tokenizer, name=name)
        self._compares_for_all = is_for_all

    async def _check_identity(self, *, gives_tokens: bool) -> None:
        await super()._check_identity(gives_tokens=gives_tokens)
        if gives_tokens or self._compares_for_all:
            await self.identity.check_tokenizer()

    def _load_tokenizer(self) -> Any:
        return load_tokenizer(self.config)

    def _ids_to_continue(self, kwargs: dict[str, Any]) -> list[int]:
        """Return the ids of a prompt, with a single bos also if `input_ids` begin with two."""
        ids = self._ids_to_score(kwargs)
        if ids[:1] != ids[1:2]:
            return ids  # without loading the tokenizer
        return drop_double_bos(ids, self.tokenizer.bos_token_id)

    def _ids_to_score(self, kwargs: dict[str, Any]) -> list[int]:
        """Return `input_ids` unchanged, one logprob each, else the ids of `prompt`."""
        input_ids = kwargs.get("input_ids")
        if input_ids is not None and len(input_ids):  # arrays have no truth value
            return [int(token) for token in input_ids]
        assert kwargs.get("prompt"), "the request has neither prompt nor input_ids"
        ids = self.tokenizer.encode(kwargs["prompt"])
        return drop_double_bos(ids, self.tokenizer.bos_token_id)


def top_k_of(kwargs: dict[str, Any]) -> int:
    """Remove `top_k` (or `top_logprobs`) from `kwargs` and return it; 1 by default."""
    top_k = kwargs.pop("top_k", None)
    top_logprobs = kwargs.pop("top_logprobs", None)
    if top_k is None:
        top_k = 1 if top_logprobs is None else top_logprobs
    return max(0, int(top_k))
