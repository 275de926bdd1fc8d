"""SGLang over HTTP: sampled token ids and their logprobs from its native `/generate` route.

request   input_ids, sampling_params, return_logprob
answer    one object, or a list with one per completion:
          output_ids                      [C]
          meta_info.output_token_logprobs [C] of [logprob, token id, ...]
          meta_info.input_token_logprobs  [P] of [logprob or null, token id, ...]
          meta_info.input_top_logprobs    [P] of null or [K] of [logprob, token id, ...]
          meta_info.finish_reason         {"type": "stop"} or null
          meta_info.weight_version        text
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from atroposlib.envs.server_handling.config import resolve_openai_configs
from atroposlib.envs.server_handling.engine_http import list_of, reading_answer
from atroposlib.envs.server_handling.openai_compatible import (
    TokenServer,
    check_count,
    check_sequences,
    prompt_logprobs_answer,
    sampling_options,
    top_k_of,
)
from atroposlib.envs.server_handling.retry import EngineStatusError
from atroposlib.envs.server_handling.server_baseline import TokensAndLogprobs, VersionedTokens
from atroposlib.errors import InferenceError, NoTokenIdsError

__all__ = ["SGLangServer", "resolve_openai_configs"]

_NAMES: Mapping[str, str] = {"max_tokens": "max_new_tokens", "seed": "sampling_seed"}
"""SGLang's names of options; it refuses unknown names."""

_FORMS = ("structured_outputs", "response_format")
"""vLLM's and OpenAI's names of structured-output options."""

_FORM_NAMES: Mapping[str, str] = {
    "json": "json_schema",
    "regex": "regex",
    "grammar": "ebnf",
    "structural_tag": "structural_tag",
}


def tokens_body(prompt_ids: list[int], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request body for the sampled ids and their logprobs.

    A `max_tokens` of None lets the completion fill the context.
    """
    named = {_NAMES.get(name, name): value for name, value in options.items()}
    sampling_params = {name: named[name] for name in named if name not in _FORMS} | _form_of(named)
    return {
        "input_ids": prompt_ids,
        "sampling_params": sampling_params,
        "return_logprob": True,
        "return_text_in_logprobs": False,
    }


def prompt_logprobs_body(
    prompt_ids: list[int], options: Mapping[str, Any], *, top_k: int
) -> dict[str, Any]:
    """Return a request body for logprobs of every prompt position.

    `top_k` is the number of candidates in addition to the prompt's own token; `n`, `temperature`
    and `top_p` are overridden.
    """
    fixed = {"n": 1, "temperature": 0.0, "top_p": 1.0}
    return {
        **tokens_body(prompt_ids, {"max_tokens": 1, **options, **fixed}),
        "logprob_start_len": 0,
        "top_logprobs_num": top_k,
    }


def parse_tokens(answer: Any, prompt_ids: list[int], *, num_choices: int) -> VersionedTokens:
    """Read an answer to `tokens_body`.

    Id and logprob of a token come from the same entry, so they are always aligned; the finish
    reasons are the engine's objects, unchanged.

    Raises:
        InferenceError: completions or logprobs are missing, or contradict `output_ids`.
    """
    completions = answer if isinstance(answer, list) else [answer]
    check_count(completions, num_choices)
    infos = [_meta_info(completion) for completion in completions]
    entries = [list_of(info, "output_token_logprobs") for info in infos]
    logprobs = [[_entry(entry)[0] for entry in row] for row in entries]
    ids = [[_entry(entry)[1] for entry in row] for row in entries]
    finish_reasons = [info.get("finish_reason") for info in infos]
    check_sequences(ids, logprobs, finish_reasons)
    for i, completion in enumerate(completions):
        _check_output_ids(completion.get("output_ids"), ids[i], completion_index=i)
    return VersionedTokens(
        (prompt_ids, ids, logprobs, finish_reasons),
        [info.get("weight_version") for info in infos],
    )


def parse_prompt_logprobs(answer: Any, prompt_ids: list[int], *, top_k: int) -> dict[str, Any]:
    """Read an answer to `prompt_logprobs_body`.

    Each row holds the prompt's own token first, then the other tokens of the `top_k` likeliest,
    in vLLM's order.

    Raises:
        ValueError: the answer has no prompt logprobs.
        InferenceError: they do not line up with the prompt.
    """
    info = _meta_info(answer[0] if isinstance(answer, list) and answer else answer)
    own = info.get("input_token_logprobs")
    if not isinstance(own, list):
        raise ValueError("the engine's answer has no input_token_logprobs")
    top = (info.get("input_top_logprobs") if top_k else None) or [None] * len(own)
    if len(top) != len(own) or [_entry(entry)[1] for entry in own] != prompt_ids:
        raise InferenceError(
            f"the engine's prompt logprobs do not match the {len(prompt_ids)} tokens sent"
        )
    rows = [_candidates(entry, others) for entry, others in zip(own, top, strict=True)]
    return prompt_logprobs_answer(prompt_ids, rows)


def _form_of(options: Mapping[str, Any]) -> dict[str, Any]:
    wanted = dict(options.get("structured_outputs") or {})
    response_format = options.get("response_format") or {}
    if response_format.get("type") == "json_object":
        wanted.setdefault("json", {"type": "object"})
    elif response_format.get("type") == "json_schema":
        wanted.setdefault("json", (response_format.get("json_schema") or {}).get("schema"))
    return {
        _FORM_NAMES.get(name, name): value if isinstance(value, str) else json.dumps(value)
        for name, value in wanted.items()
        if value is not None
    }


def _candidates(own: Any, others: Sequence[Any] | None) -> dict[int, float]:
    """Return {token id: logprob} of one position; empty if the engine gives no logprob."""
    found: dict[int, float] = {}
    for logprob, token_id in map(_entry, [own, *(others or ())]):
        if logprob is not None:
            found.setdefault(token_id, logprob)
    return found


def _meta_info(completion: Any) -> Mapping[str, Any]:
    info = completion.get("meta_info") if isinstance(completion, Mapping) else None
    if not isinstance(info, Mapping):
        raise InferenceError("the engine's answer has no meta_info")
    return info


def _entry(entry: Any) -> tuple[Any, int]:
    """Return logprob and token id of `[logprob, token id, ...]`."""
    if not isinstance(entry, list) or len(entry) < 2 or not isinstance(entry[1], int):
        raise InferenceError(f"expected [logprob, token id, ...], the engine sent {entry!r:.80}")
    return entry[0], entry[1]


def _check_output_ids(output_ids: Any, ids: Sequence[int], *, completion_index: int) -> None:
    # The engine may leave a matched stop token out of output_ids although it was sampled.
    if output_ids is not None and list(output_ids) != list(ids[: len(output_ids)]):
        raise InferenceError(
            f"completion {completion_index}: output_ids and output_token_logprobs name "
            "different tokens"
        )


class SGLangServer(TokenServer):
    """An SGLang server, accessed over HTTP only.

    Chat and text use its OpenAI routes, tokens use `/generate`. Token answers are
    `VersionedTokens`: they name the weights that sampled each completion.
    """

    @property
    def takes_structural_tags(self) -> bool:
        return True  # sent under SGLang's own names

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> TokensAndLogprobs:
        prompt_ids = self._ids_to_continue(kwargs)
        options = sampling_options(kwargs)
        answer = await self._generate(tokens_body(prompt_ids, options), kwargs)
        with reading_answer():
            return parse_tokens(answer, prompt_ids, num_choices=options.get("n", 1))

    async def _get_logprobs_wrapper(self, **kwargs: Any) -> dict[str, Any]:
        top_k = top_k_of(kwargs)
        prompt_ids = self._ids_to_score(kwargs)
        body = prompt_logprobs_body(prompt_ids, sampling_options(kwargs), top_k=top_k)
        return parse_prompt_logprobs(await self._generate(body, kwargs), prompt_ids, top_k=top_k)

    async def _generate(self, body: dict[str, Any], kwargs: dict[str, Any]) -> Any:
        try:
            return await self.http.post_json("/generate", body, timeout_s=kwargs.get("timeout"))
        except EngineStatusError as error:
            if not error.is_route_missing:
                raise
            raise NoTokenIdsError(
                f"server {self.http.shown_url} has no /generate, so it is not SGLang's; check "
                f"base_url and server_type ({error})"
            ) from error
