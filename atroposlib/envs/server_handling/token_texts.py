"""Between ids and the texts of tracked sequences, for any tokenizer or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atroposlib.envs.server_handling.engine_payloads import drop_double_bos

__all__ = ["encode_added", "encode_prompt", "hidden_tail", "is_hidden", "text_of"]


def encode_prompt(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a whole prompt, with one bos where the tokenizer and the text bring two."""
    ids = tokenizer.encode(text, add_special_tokens=True)
    return drop_double_bos(ids, getattr(tokenizer, "bos_token_id", None))


def encode_added(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of text behind a recorded sequence."""
    return list(tokenizer.encode(text, add_special_tokens=False)) if text else []


def text_of(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return a completion without its special tokens; code points without a tokenizer."""
    if tokenizer is None:
        return "".join(chr(i) for i in ids if 0 <= i < 0x110000 and chr(i).isprintable())
    return str(tokenizer.decode(list(ids), skip_special_tokens=True))


def is_hidden(tokenizer: Any, token_id: int) -> bool:
    """Whether a token is left out of texts; one that decodes to nothing anyway is not."""
    shown = tokenizer.decode([token_id], skip_special_tokens=False)
    return bool(shown) and not text_of(tokenizer, [token_id])


def hidden_tail(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """Return the special tokens at the end of a completion, the end of its turn."""
    start = len(ids)
    while start and is_hidden(tokenizer, ids[start - 1]):
        start -= 1
    return list(ids[start:])
