"""Between ids and the texts of tracked sequences, for any tokenizer or none."""

from __future__ import annotations

import asyncio
import copy
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

from atroposlib.envs.server_handling.engine_payloads import drop_double_bos

__all__ = [
    "encode_added",
    "encode_model_text",
    "encode_prompt",
    "has_ids_of_text",
    "hidden_tail",
    "is_hidden",
    "text_of",
    "text_of_end",
]

PIECE_TOKENS = 2048
"""Tokens encoded in one go; more would hold up what else runs on the event loop."""

_WORD_WITHIN = 64
"""How far behind a piece the next word is looked for."""


def encode_prompt(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a whole prompt, with one bos where the tokenizer and the text bring two."""
    ids = tokenizer.encode(text, add_special_tokens=True)
    return drop_double_bos(ids, getattr(tokenizer, "bos_token_id", None))


def encode_added(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of text behind a recorded sequence."""
    return list(tokenizer.encode(text, add_special_tokens=False)) if text else []


def encode_model_text(tokenizer: Any, text: str, *, own_marks: str = "") -> list[int]:
    """Return the ids of a text that a model wrote, in which a special token's spelling is text.

    A model that spells `<|im_end|>` in its answer has not ended its turn, and must not be trained
    as if it had. Tokens that stay in texts, such as `<think>`, are tokens as always.

    Args:
        tokenizer: Any tokenizer. The ids of texts without special tokens are its own; the others
            come from its `split_special_tokens`, or from pieces of the text where it has no such
            option.
        text: What the model wrote, and what was written for it.
        own_marks: What was written for it, without what it may have chosen itself. The special
            tokens of this text are special in `text` too, unless that spells further ones.
    """
    ids = encode_added(tokenizer, text)
    special = _special_ids(tokenizer)
    found = [i for i in ids if i in special]
    if not found or found == [i for i in encode_added(tokenizer, own_marks) if i in special]:
        return ids
    ids = _encode_split(tokenizer, text)
    if special.isdisjoint(ids):
        return ids
    spellings = (str(tokenizer.decode([i], skip_special_tokens=False)).strip() for i in special)
    longest_first = sorted(filter(None, spellings), key=len, reverse=True)
    # A cut behind the first letter of each leaves no special token in any piece.
    pieces = re.split(
        "|".join(f"(?<={re.escape(s[0])})(?={re.escape(s[1:])})" for s in longest_first), text
    )
    ids = [i for piece in pieces for i in encode_added(tokenizer, piece)]
    return [i for i in ids if i not in special]


def _encode_split(tokenizer: Any, text: str) -> list[int]:
    try:
        splitting = _COPIES.get(tokenizer)
        if splitting is None:
            # Fast tokenizers keep the option until their next call, which may be another thread's.
            splitting = copy.deepcopy(tokenizer)
            _COPIES[tokenizer] = splitting
        return list(splitting.encode(text, add_special_tokens=False, split_special_tokens=True))
    except Exception:  # noqa: BLE001 - any object may stand in for a tokenizer
        return encode_added(tokenizer, text)


_COPIES: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""Tokenizers that encode the spelling of special tokens, by the tokenizer they were made of."""


def _special_ids(tokenizer: Any) -> set[int]:
    """Return the ids of special tokens, without the one for text that has no id."""
    # Tokenizers of users may have neither.
    ids = set(getattr(tokenizer, "all_special_ids", None) or ())
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    ids |= {i for i, token in added.items() if getattr(token, "special", False)}
    unknown = getattr(tokenizer, "unk_token_id", None)
    ends = {getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad")}
    return {i for i in ids if i != unknown or i in ends}


def text_of(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return a completion without its special tokens; code points without a tokenizer."""
    if tokenizer is None:
        return "".join(chr(i) for i in ids if 0 <= i < 0x110000 and chr(i).isprintable())
    return str(tokenizer.decode(list(ids), skip_special_tokens=True))


def is_hidden(tokenizer: Any, token_id: int) -> bool:
    """Whether a token is left out of texts; one that decodes to nothing anyway is not."""
    try:
        return _is_hidden_once(tokenizer, token_id)
    except TypeError:  # a tokenizer that cannot be remembered
        return _is_hidden_once.__wrapped__(tokenizer, token_id)


@lru_cache(maxsize=4096)
def _is_hidden_once(tokenizer: Any, token_id: int) -> bool:
    shown = tokenizer.decode([token_id], skip_special_tokens=False)
    return bool(shown) and not text_of(tokenizer, [token_id])


def text_of_end(tokenizer: Any, end_ids: Sequence[int]) -> str:
    """Return the special tokens that end a turn as a template writes them."""
    return "".join(str(tokenizer.decode([i], skip_special_tokens=False)) for i in end_ids)


def hidden_tail(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """Return the special tokens at the end of a completion, the end of its turn."""
    start = len(ids)
    while start and is_hidden(tokenizer, ids[start - 1]):
        start -= 1
    return list(ids[start:])


async def has_ids_of_text(tokenizer: Any, ids: Sequence[int], *, hides_specials: bool) -> bool:
    """Whether the tokenizer gives these ids to their own text; models may sample others.

    Long texts are encoded in pieces that begin with a word, which encode alone as in the whole.

    Args:
        tokenizer: Encodes and decodes.
        ids: [L] tokens.
        hides_specials: Whether special tokens are left out of the text.
    """
    start = 0
    while start < len(ids):
        end = _end_of_piece(tokenizer, ids, start)
        piece = list(ids[start:end])
        text = str(tokenizer.decode(piece, skip_special_tokens=hides_specials))
        if encode_added(tokenizer, text) != piece:
            return False
        start = end
        if start < len(ids):
            await asyncio.sleep(0)
    return True


def _end_of_piece(tokenizer: Any, ids: Sequence[int], start: int) -> int:
    end = start + PIECE_TOKENS
    for word in range(end, min(end + _WORD_WITHIN, len(ids))):
        if str(tokenizer.decode([ids[word]])).startswith(" "):
            return word
    return min(end, len(ids))
