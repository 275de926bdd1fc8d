"""vLLM over HTTP: sampled token ids and their logprobs, from a stock server or a companion.

Two routes return the sampled ids and their logprobs:

    /v1/completions (stock vLLM)   return_token_ids: choices[i].token_ids
                                   logprobs: choices[i].logprobs.token_logprobs[t]
                                   weight_versions, if the engine reports them:
                                       choices[i].weight_versions, [{version, num_tokens}]
    /generate (companion server)   logprobs: token_ids[i], logprobs[i][t] = [{id: logprob}]
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, Literal

import aiohttp
import msgspec
from typing_extensions import TypedDict

from atroposlib.envs.server_handling.config import (
    APIServerConfig,
    ReasoningConfig,
    resolve_openai_configs,
)
from atroposlib.envs.server_handling.engine_http import list_of, reading_answer
from atroposlib.envs.server_handling.openai_compatible import (
    ROUTE_REFUSED,
    TokenServer,
    check_count,
    check_sequences,
    prompt_logprobs_answer,
    sampling_options,
    tokenizer_name_of,
    top_k_of,
)
from atroposlib.envs.server_handling.retry import EngineStatusError, as_context_overflow
from atroposlib.envs.server_handling.server_baseline import (
    SEND_COST_S,
    SharedSearch,
    TokensAndLogprobs,
    with_spans,
)
from atroposlib.errors import ConfigError, InferenceError, NoTokenIdsError
from atroposlib.scored_data import are_token_ids
from atroposlib.utils.tokenizers.earlier_calls import read_template_file

__all__ = ["AutoTokenizer", "VLLMServer", "aiohttp", "resolve_openai_configs"]

TokenRoute = Literal["/v1/completions", "/generate"]


class _Logprobs(TypedDict, total=False):
    token_logprobs: list[float | None] | None


class _Choice(TypedDict, total=False):
    index: int
    finish_reason: str | None
    token_ids: list[int] | None
    prompt_token_ids: list[int] | None
    logprobs: _Logprobs | None
    prompt_logprobs: Any
    weight_versions: Any


class _CompletionsAnswer(TypedDict, total=False):
    choices: list[_Choice]


COMPLETIONS_DECODER = msgspec.json.Decoder(_CompletionsAnswer)
"""Decodes the needed fields of a `/v1/completions` answer. Most of an answer, the texts and the
candidates of every position, is skipped."""


def completions_body(
    model: str, prompt_ids: list[int], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a request body for `/v1/completions` with ids and sampled logprobs enabled."""
    fixed = {"model": model, "prompt": prompt_ids, "logprobs": 1, "return_token_ids": True}
    return {**fixed, **options}


def generate_body(prompt_ids: list[int], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request body for `/generate` with ids and sampled logprobs enabled."""
    return {"prompt": {"prompt_token_ids": prompt_ids}, "logprobs": 0, **options}


def parse_completions(
    answer: Mapping[str, Any], prompt_ids: list[int], *, num_choices: int
) -> TokensAndLogprobs:
    """Read an answer of `/v1/completions`.

    The engine's own prompt ids take precedence over those that were sent, `prompt_ids` [P].

    Raises:
        InferenceError: choices, ids or logprobs are missing or do not line up.
    """
    choices = sorted(list_of(answer, "choices"), key=lambda choice: choice.get("index", 0))
    check_count(choices, num_choices)
    ids = [list_of(choice, "token_ids") for choice in choices]
    logprobs = [list_of(choice.get("logprobs") or {}, "token_logprobs") for choice in choices]
    finish_reasons = [choice.get("finish_reason") for choice in choices]
    check_sequences(ids, logprobs, finish_reasons)
    read_ids = _prompt_ids_in(choices[0], prompt_ids)
    return with_spans(
        (read_ids, ids, logprobs, finish_reasons),
        [choice.get("weight_versions") for choice in choices],
    )


def parse_generate(
    answer: Mapping[str, Any], prompt_ids: list[int], *, num_choices: int
) -> TokensAndLogprobs:
    """Read an answer of `/generate`; arguments and errors as in `parse_completions`.

    The ids come from `token_ids` if the server sends them, else from the logprob entries, whose
    first one belongs to the sampled token.
    """
    rows = [[_entries_of(position) for position in row] for row in list_of(answer, "logprobs")]
    check_count(rows, num_choices)
    ids = answer.get("token_ids") or [[next(iter(entry), None) for entry in row] for row in rows]
    finish_reasons = answer.get("finish_reasons") or [None] * num_choices
    if [len(row) for row in ids] != [len(row) for row in rows]:
        raise InferenceError("the engine's token_ids and logprobs differ in length")
    logprobs: list[list[Any]] = [
        [entry.get(token_id) for token_id, entry in zip(ids_row, row, strict=True)]
        for ids_row, row in zip(ids, rows, strict=True)
    ]
    check_sequences(ids, logprobs, finish_reasons)
    return _prompt_ids_in(answer, prompt_ids), ids, logprobs, finish_reasons


def _prompt_ids_in(answer: Mapping[str, Any], sent_ids: list[int]) -> list[int]:
    ids: list[int] = answer.get("prompt_token_ids") or sent_ids
    if not are_token_ids(ids):
        raise InferenceError("the engine's prompt_token_ids are not integers from 0")
    return ids


def prompt_rows(value: Any, num_positions: int) -> list[Any]:
    """Return one entry per prompt position, without an outer list around all of them.

    Entries may be lists themselves, so only a single list with the length of the prompt counts as
    an outer one. For one position, `[[{...}]]` is the entry `[{...}]`.
    """
    if not isinstance(value, list):
        raise ValueError("the engine's answer has no prompt_logprobs")
    inner = value[0] if len(value) == 1 else None
    is_whole = isinstance(inner, list) and len(inner) == num_positions
    if inner is not None and is_whole and (num_positions > 1 or isinstance(inner[0], list)):
        return list(inner)
    if len(value) != num_positions:
        raise InferenceError(
            f"the engine answered {len(value)} prompt logprobs for {num_positions} tokens"
        )
    return value


def normalize_topk_entry(entry: Any) -> tuple[list[int], list[float]]:
    """Convert one position's logprobs to parallel lists of ids and logprobs.

    Accepts `{id: logprob}`, the engine's `{id: {"logprob": ...}}`, or a list of either. Other
    values, such as null at the first position, give two empty lists.
    """
    entries = _entries_of(entry)
    return list(entries), list(entries.values())


def _entries_of(entry: Any) -> dict[int, float]:
    """Return {token id: logprob} of one position, in the engine's order."""
    mappings = entry if isinstance(entry, list) else [entry]
    found: dict[int, float] = {}
    for mapping in mappings:
        if not isinstance(mapping, Mapping):
            continue
        for token_id, value in mapping.items():
            logprob = value.get("logprob") if isinstance(value, Mapping) else value
            if logprob is None:
                continue
            if not math.isfinite(logprob):
                raise InferenceError(f"the logprob of token {token_id} is not finite")
            found.setdefault(int(token_id), float(logprob))
    return found


class AutoTokenizer:
    """Stand-in for the class of transformers, whose import takes seconds."""

    @staticmethod
    def from_pretrained(name: str, **options: Any) -> Any:
        from transformers import AutoTokenizer as RealAutoTokenizer

        return RealAutoTokenizer.from_pretrained(name, **options)


class VLLMServer(TokenServer):
    """A vLLM server, accessed over HTTP only.

    The first token request detects which route returns tokens. The logprobs are those of the
    engine's `--logprobs-mode`: by default *raw*, the log-softmax of the model's logits before
    temperature, top-p and penalties. At temperature 1 without truncation they equal those of the
    sampling distribution.
    """

    lists_every_model = True

    context_max_age_s = 60.0
    """Seconds after which the context length is asked again: an engine may have been restarted."""

    _token_route: TokenRoute | None = None
    _context_length: int | None = None
    _context_asked_at = -math.inf

    def __init__(
        self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None
    ) -> None:
        super().__init__(config, reasoning_config)
        self._route_search: SharedSearch[TokenRoute] = SharedSearch()
        self._context_search: SharedSearch[None] = SharedSearch()
        # Users may replace the class during construction only, so its method is read here.
        self._from_pretrained = AutoTokenizer.from_pretrained

    _normalize_topk_entry = staticmethod(normalize_topk_entry)

    @property
    def takes_structural_tags(self) -> bool:
        # True until another route was detected.
        return self._token_route != "/generate"

    def _load_tokenizer(self) -> Any:
        return read_template_file(self._from_pretrained(tokenizer_name_of(self.config)))

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> TokensAndLogprobs:
        prompt_ids = self._ids_to_continue(kwargs)
        options = sampling_options(kwargs)
        answer = await self._post_tokens(prompt_ids, options, kwargs.get("timeout"))
        parse = parse_generate if self._token_route == "/generate" else parse_completions
        with reading_answer():
            return parse(answer, prompt_ids, num_choices=options.get("n", 1))

    async def _get_logprobs_wrapper(self, **kwargs: Any) -> dict[str, Any]:
        top_k = top_k_of(kwargs)
        prompt_ids = self._ids_to_score(kwargs)
        options = {
            "max_tokens": 1,
            **sampling_options(kwargs),
            "prompt_logprobs": top_k,
            "n": 1,
            "temperature": 0.0,
            "top_p": 1.0,
        }
        answer = await self._post_tokens(prompt_ids, options, kwargs.get("timeout"))
        with reading_answer():
            holder = answer if self._token_route == "/generate" else answer["choices"][0]
            found = holder.get("prompt_logprobs")
        rows = prompt_rows(found, len(prompt_ids))
        with reading_answer():
            return prompt_logprobs_answer(prompt_ids, [_entries_of(entry) for entry in rows])

    async def _post_tokens(
        self, prompt_ids: list[int], options: dict[str, Any], timeout_s: float | None
    ) -> Any:
        if self._token_route is None:
            search = self._route_search
            self._token_route = await search.result(lambda: self._find_route(prompt_ids[:1]))
            await self._turns.turn(SEND_COST_S)  # all waiting requests resume at the same time
        if self._token_route == "/generate":
            body = generate_body(prompt_ids, options)
            return await self.http.post_json("/generate", body, timeout_s=timeout_s)
        limited = await self._with_limit(options, num_prompt_ids=len(prompt_ids))
        try:
            return await self._post_completions(prompt_ids, limited, timeout_s)
        except EngineStatusError as error:
            if limited is options or as_context_overflow(error) is None:
                raise
            # Maybe the engine was restarted with a shorter context.
            self._context_asked_at = -math.inf
            asked_again = await self._with_limit(options, num_prompt_ids=len(prompt_ids))
            if asked_again == limited:
                raise
        return await self._post_completions(prompt_ids, asked_again, timeout_s)

    async def _post_completions(
        self, prompt_ids: list[int], options: dict[str, Any], timeout_s: float | None
    ) -> Any:
        body = completions_body(self.config.model_name, prompt_ids, options)
        return await self.http.post_json(
            "/v1/completions", body, timeout_s=timeout_s, decoder=COMPLETIONS_DECODER
        )

    async def _with_limit(self, options: dict[str, Any], *, num_prompt_ids: int) -> dict[str, Any]:
        """Replace a limit of None by the rest of the context: the engine reads null as 16."""
        if "max_tokens" not in options or options["max_tokens"] is not None:
            return options
        if time.monotonic() - self._context_asked_at > self.context_max_age_s:
            await self._context_search.result(self._ask_for_context)
        if self._context_length is None:
            raise ConfigError(
                f"server {self.http.shown_url} does not report the context length of model "
                f"{self.config.model_name!r}; give max_tokens"
            )
        # At least 1, so that the engine itself refuses a prompt that is too long.
        return {**options, "max_tokens": max(1, self._context_length - num_prompt_ids)}

    async def _ask_for_context(self) -> None:
        listing = await self.http.get_json("/v1/models")
        models = {model["id"]: model for model in listing["data"]}
        own = models.get(self.config.model_name, {})
        # vLLM lists the length of an adapter with its base model only.
        base = models.get(own.get("parent"), {})
        self._context_length = own.get("max_model_len") or base.get("max_model_len")
        self._context_asked_at = time.monotonic()

    async def _find_route(self, some_ids: list[int]) -> TokenRoute:
        options = {"max_tokens": 1}
        body = completions_body(self.config.model_name, some_ids, options)
        try:
            answer = await self.http.post_json("/v1/completions", body)
            with reading_answer():
                if answer["choices"][0].get("token_ids") is not None:
                    return "/v1/completions"
            reason = "/v1/completions returns no token_ids"
        except EngineStatusError as error:
            if error.status not in ROUTE_REFUSED:
                raise
            reason = str(error)
        try:
            await self.http.post_json("/generate", generate_body(some_ids, options))
        except EngineStatusError as error:
            if not error.is_route_missing:
                raise
            raise NoTokenIdsError(
                f"server {self.http.shown_url} gives no token ids: {reason}; and it has no "
                "/generate. Check base_url (--openai.base_url) and model_name, or serve the model "
                "with vLLM 0.10.2 or newer"
            ) from error
        return "/generate"
