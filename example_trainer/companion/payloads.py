"""What `/generate` is asked and what it answers, without any network.

{"prompt": TEXT or {"prompt_token_ids": [P]}, "stream": false, ...sampling parameters}
{"text": [n], "prompt": TEXT, "finish_reasons": [n],
 "token_ids": [n][C], "logprobs": [n][C][1]{id: logprob}, "prompt_token_ids": [P]}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from atroposlib.utils.text import near_name

__all__ = ["GenerateRequest", "RequestError", "generate_answer", "read_request", "sampling_params"]

_LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON has no word for."""

_OWN_KEYS = frozenset({"prompt", "stream"})
_INTERNAL = frozenset({"output_kind", "flat_logprobs", "skip_clone", "output_text_buffer_length"})


class RequestError(ValueError):
    """A request that cannot be answered; the message says what to change."""


class GenerateRequest(NamedTuple):
    """A body of `/generate`, taken apart."""

    prompt: str | dict[str, list[int]]
    """Text, or `{"prompt_token_ids": [P]}`."""
    stream: bool
    sampling: dict[str, Any]
    """What goes to vLLM's `SamplingParams`."""

    @property
    def wants_logprobs(self) -> bool:
        """Whether logprobs were asked for; 0 asks for those of the sampled tokens."""
        return self.sampling.get("logprobs") is not None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether logprobs of the prompt were asked for."""
        return self.sampling.get("prompt_logprobs") is not None


class _Logprob(Protocol):
    logprob: float


def read_request(body: Any) -> GenerateRequest:
    """Take the body of `POST /generate` apart.

    Raises:
        RequestError: it is no object, has no usable prompt, or `stream` is no boolean.
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
        raise RequestError(
            'prompt: expected a text or {"prompt_token_ids": [...]}, neither of them empty'
        )
    for t, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise RequestError(f"prompt.prompt_token_ids[{t}]: {token!r:.40} is not a token id")
    return {"prompt_token_ids": ids}


def sampling_params(kind: Any, given: Mapping[str, Any], **fixed: Any) -> Any:
    """Make vLLM's sampling parameters; a wrong type must not reach the engine, which it would end.

    Args:
        kind: vLLM's `SamplingParams`.
        given: Names and values of the request.
        **fixed: Values the caller sets.

    Raises:
        RequestError: a name is unknown, or a value has the wrong type or is out of range.
    """
    known = {name for name in kind.__struct_fields__ if not name.startswith("_")} - _INTERNAL
    for name in given:
        if name not in known:
            raise RequestError(
                f"{name}: no sampling parameter of this engine{near_name(name, known)}"
            )
    try:
        params = msgspec.convert(dict(given), kind, str_keys=True)
    except (ValueError, TypeError) as error:
        raise RequestError(f"sampling parameters: {error}") from error
    for name, value in fixed.items():
        setattr(params, name, value)
    return params


def generate_answer(output: Any, request: GenerateRequest) -> dict[str, Any]:
    """Return the answer to one request.

    Args:
        output: vLLM's finished `RequestOutput`.
        request: What was asked.
    """
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
    """Return one list with one mapping per position; null where the engine has none."""
    return [None if entry is None else [_by_id(entry)] for entry in entries]


def _by_id(entry: Mapping[int, _Logprob]) -> dict[str, float]:
    return {str(token): max(value.logprob, _LOWEST_LOGPROB) for token, value in entry.items()}


def streamed_texts(output: Any, prompt: str | None) -> dict[str, Sequence[str]]:
    """Return one line of a stream: prompt and text so far of each choice."""
    return {"text": [(prompt or "") + choice.text for choice in output.outputs]}
