"""Bodies and answers of vLLM's token routes, without any network.

Two routes give the sampled ids and their logprobs:

    /v1/completions (stock vLLM)   return_token_ids: choices[i].token_ids
                                   logprobs: choices[i].logprobs.token_logprobs[t]
    /generate (companion server)   logprobs: token_ids[i], logprobs[i][t] = [{id: logprob}]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from typing_extensions import TypedDict

from atroposlib.envs.server_handling.engine_payloads import (
    check_count,
    check_sequences,
    drop_double_bos,
    list_of,
)
from atroposlib.envs.server_handling.server_baseline import TokensAndLogprobs
from atroposlib.errors import InferenceError

__all__ = [
    "COMPLETIONS_DECODER",
    "completions_body",
    "drop_double_bos",
    "generate_body",
    "normalize_topk_entry",
    "parse_completions",
    "parse_generate",
    "prompt_rows",
]


class _Logprobs(TypedDict, total=False):
    token_logprobs: list[float | None] | None


class _Choice(TypedDict, total=False):
    index: int
    finish_reason: str | None
    token_ids: list[int] | None
    prompt_token_ids: list[int] | None
    logprobs: _Logprobs | None
    prompt_logprobs: Any


class _CompletionsAnswer(TypedDict, total=False):
    choices: list[_Choice]


COMPLETIONS_DECODER = msgspec.json.Decoder(_CompletionsAnswer)
"""Reads what is of use in an answer of `/v1/completions`, and passes over the texts and the
candidates of every position, which are most of it."""


def completions_body(
    model: str, prompt_ids: list[int], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a body for `/v1/completions` that brings back ids and the sampled logprobs."""
    return {
        "model": model,
        "prompt": prompt_ids,
        "logprobs": 1,
        "return_token_ids": True,
        **options,
    }


def generate_body(prompt_ids: list[int], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body for `/generate` that brings back ids and the sampled logprobs."""
    return {"prompt": {"prompt_token_ids": prompt_ids}, "logprobs": 0, **options}


def parse_completions(
    answer: Mapping[str, Any], prompt_ids: list[int], *, num_choices: int
) -> TokensAndLogprobs:
    """Read an answer of `/v1/completions`.

    Args:
        answer: Decoded JSON.
        prompt_ids: [P] what was sent; the engine's own record wins when it has one.
        num_choices: Completions asked for.

    Raises:
        InferenceError: choices, ids or logprobs are missing or do not line up.
    """
    choices = sorted(list_of(answer, "choices"), key=lambda choice: choice.get("index", 0))
    check_count(choices, num_choices)
    ids = [list_of(choice, "token_ids") for choice in choices]
    logprobs = [list_of(choice.get("logprobs") or {}, "token_logprobs") for choice in choices]
    finish_reasons = [choice.get("finish_reason") for choice in choices]
    check_sequences(ids, logprobs, finish_reasons)
    return choices[0].get("prompt_token_ids") or prompt_ids, ids, logprobs, finish_reasons


def parse_generate(
    answer: Mapping[str, Any], prompt_ids: list[int], *, num_choices: int
) -> TokensAndLogprobs:
    """Read an answer of `/generate`; arguments and errors as of `parse_completions`.

    The ids come from `token_ids` where the server sends them, else from the logprob entries,
    whose first one belongs to the sampled token.
    """
    rows = [[_entries_of(position) for position in row] for row in list_of(answer, "logprobs")]
    check_count(rows, num_choices)
    ids = answer.get("token_ids") or [[next(iter(entry)) for entry in row] for row in rows]
    finish_reasons = answer.get("finish_reasons") or [None] * num_choices
    if [len(row) for row in ids] != [len(row) for row in rows]:
        raise InferenceError("the engine's token_ids and logprobs differ in length")
    logprobs: list[list[Any]] = [
        [entry.get(token_id) for token_id, entry in zip(ids_row, row, strict=True)]
        for ids_row, row in zip(ids, rows, strict=True)
    ]
    check_sequences(ids, logprobs, finish_reasons)
    return answer.get("prompt_token_ids") or prompt_ids, ids, logprobs, finish_reasons


def prompt_rows(value: Any, num_positions: int) -> list[Any]:
    """Return one entry per prompt position, removing an outer list around all of them.

    Entries may themselves be lists, so only a lone list as long as the prompt is an outer one.
    """
    if not isinstance(value, list):
        raise ValueError("the engine's answer has no prompt_logprobs")
    if _is_outer_list(value, num_positions):
        return list(value[0])
    if len(value) != num_positions:
        raise InferenceError(
            f"the engine answered {len(value)} prompt logprobs for {num_positions} tokens"
        )
    return value


def _is_outer_list(value: list[Any], num_positions: int) -> bool:
    if len(value) != 1 or not isinstance(value[0], list) or len(value[0]) != num_positions:
        return False
    # One position: `[[{...}]]` reads the same either way, only a third level tells.
    return num_positions > 1 or isinstance(value[0][0], list)


def normalize_topk_entry(entry: Any) -> tuple[list[int], list[float]]:
    """Turn one position's logprobs into parallel lists of ids and logprobs.

    Accepts `{id: logprob}`, the engine's `{id: {"logprob": ...}}`, or a list of either; anything
    else, such as null at the first position, gives two empty lists.
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
            if logprob is not None:
                found.setdefault(int(token_id), float(logprob))
    return found
