"""Base class of engines that return token ids, with their shared sampling options and checks.

kwargs ─► sampling_options, prompt ids ─► the engine's token route ─► check_count, check_sequences
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from atroposlib.envs.server_handling.config import ServerBaseline
from atroposlib.envs.server_handling.openai_compatible import OpenAICompatibleServer
from atroposlib.errors import InferenceError
from atroposlib.utils.tokenizers.earlier_calls import read_template_file

__all__ = [
    "TokenServer",
    "check_count",
    "check_sequences",
    "drop_double_bos",
    "list_of",
    "load_tokenizer",
    "sampling_options",
    "tokenizer_name_of",
    "top_k_of",
]

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
