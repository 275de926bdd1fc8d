"""Tokens of chosen trajectories as text, whole batches at a time.

The text of a prompt is what its tokens decode to; the completion is the rest of the whole text, cut
by length. Where a boundary falls inside a character, or the tokenizer writes the parts differently
from the whole, both sides are decoded on their own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from atroposlib.errors import ConfigError
from atroposlib.utils.model_paths import missing_folder

__all__ = ["Decoder", "TextPair", "Tokenizer", "decoder_of", "load_tokenizer", "split_texts"]

Decoder = Callable[[Sequence[Sequence[int]]], list[str]]
"""Turns rows of ids into texts, special tokens included."""


class Tokenizer(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, ids: Sequence[int], /) -> str:
        """Return the text of ids, special tokens included."""


class TextPair(NamedTuple):
    """The text of one trajectory, or of one side of a pair."""

    prompt: str
    completion: str


def load_tokenizer(name: str) -> Any:
    """Load a tokenizer by name or from a folder.

    Raises:
        ConfigError: there is none; the message says how to name one on this machine.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        reason = missing_folder(name) or reason
        raise ConfigError(
            f"the tokenizer {name} cannot be loaded ({reason}); --tokenizer takes the name or the "
            "folder of the one the groups were made with"
        ) from error


def decoder_of(tokenizer: Any) -> Decoder:
    """Return the fastest way to decode many rows with a tokenizer, any kind of it."""
    transformers = sys.modules.get("transformers")
    if transformers is not None and isinstance(tokenizer, transformers.PreTrainedTokenizerFast):
        backend = tokenizer.backend_tokenizer

        def decode_together(rows: Sequence[Sequence[int]]) -> list[str]:
            return list(backend.decode_batch(list(rows), skip_special_tokens=False))

        return decode_together

    def decode_singly(rows: Sequence[Sequence[int]]) -> list[str]:
        return [str(tokenizer.decode(list(ids))) for ids in rows]

    return decode_singly


def split_texts(parts: Sequence[tuple[Sequence[int], int]], decode: Decoder) -> list[TextPair]:
    """Decode trajectories, each cut at the end of its prompt.

    Args:
        parts: ids [L] of each trajectory and the tokens of its prompt.
        decode: of the tokenizer.
    """
    prompts: dict[tuple[int, ...], int] = {}
    places = [prompts.setdefault(tuple(ids[:length]), len(prompts)) for ids, length in parts]
    texts = decode([*(ids for ids, _ in parts), *prompts])
    wholes, prompt_texts = texts[: len(parts)], texts[len(parts) :]
    pairs = [_cut(whole, prompt_texts[place]) for whole, place in zip(wholes, places, strict=True)]
    apart = [i for i, pair in enumerate(pairs) if pair is None]
    rests = decode([parts[i][0][parts[i][1] :] for i in apart]) if apart else []
    again = dict(zip(apart, rests, strict=True))
    return [
        pair if pair is not None else TextPair(prompt_texts[places[i]], again[i])
        for i, pair in enumerate(pairs)
    ]


def _cut(whole: str, prompt: str) -> TextPair | None:
    if whole.startswith(prompt):
        return TextPair(prompt, whole[len(prompt) :])
    return None
