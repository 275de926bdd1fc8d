"""Decode long sequences without holding up what else runs on the event loop.

A tokenizer keeps the interpreter to itself while it decodes, also in a thread: tens of thousands of
tokens take it longer than other rollouts should wait. In pieces, others run in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

__all__ = ["decode_long"]

PIECE_TOKENS = 512
CONTEXT_TOKENS = 8
"""Tokens decoded again in front of a piece, so that spaces and letters join as in the whole."""

UNFINISHED_LETTER = "\ufffd"


async def decode_long(tokenizer: Any, ids: Sequence[int], **options: Any) -> str:
    """Return `tokenizer.decode(ids, **options)`, decoded in pieces where that gives the same text.

    A piece ends where a letter does. A tokenizer whose texts cannot be joined decodes everything
    at once.
    """
    ids = list(ids)
    pieces: list[str] = []
    start = 0
    while start < len(ids):
        end = min(start + PIECE_TOKENS, len(ids))
        context = ids[max(0, start - CONTEXT_TOKENS) : start]
        before = tokenizer.decode(context, **options) if context else ""
        for end in range(end, min(end + CONTEXT_TOKENS, len(ids)) + 1):  # noqa: B020
            text = str(tokenizer.decode(context + ids[start:end], **options))
            if end == len(ids) or not text.endswith(UNFINISHED_LETTER):
                break
        if not text.startswith(before):
            return str(tokenizer.decode(ids, **options))
        pieces.append(text[len(before) :])
        start = end
        if start < len(ids):
            await asyncio.sleep(0)
    return "".join(pieces)
