"""Text of completions while they grow, and the stop texts in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

INCOMPLETE = "\ufffd"
"""Written by tokenizers for a character whose last bytes are missing."""

_MAX_UNDECODED = 64


class GrowingText:
    """Decodes the tokens of one completion as they arrive; a token is decoded a few times only.

    A character whose bytes are split over several tokens appears with its last token.
    """

    def __init__(self, tokenizer: Any, *, skips_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skips_special = skips_special
        self._first = 0
        self._read = 0
        self.text = ""

    def add(self, tokens: Sequence[int]) -> str:
        """Return the text of the whole completion, given all tokens so far."""
        before = self._decode(tokens[self._first : self._read])
        now = self._decode(tokens[self._first :])
        # Decoded with the tokens before it, since spaces and bytes depend on them.
        is_whole = len(now) > len(before) and not now.endswith(INCOMPLETE)
        # Invalid bytes and skipped tokens could go on without end.
        if is_whole or len(tokens) - self._first > _MAX_UNDECODED:
            self.text += now[len(before) :]
            self._first, self._read = self._read, len(tokens)
        return self.text

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=self._skips_special))


class StopFinder:
    """Finds the first stop text in a completion as it grows, after `min_tokens` tokens."""

    def __init__(self, text: GrowingText, stops: Sequence[str], *, min_tokens: int = 0) -> None:
        self._text = text
        self._stops = stops
        self._min_tokens = min_tokens

    def find(self, tokens: Sequence[int]) -> str | None:
        """Return the stop text that begins first, given all tokens so far."""
        searched = len(self._text.text)
        text = self._text.add(tokens)
        if len(tokens) <= self._min_tokens:
            return None
        found = [(find_stop(text, stop, searched), stop) for stop in self._stops]
        return min((each for each in found if each[0] >= 0), default=(0, None))[1]


def find_stop(text: str, stop: str, searched: int) -> int:
    """Return the position of `stop`, -1 if it does not end after `searched` characters."""
    return text.find(stop, max(0, searched - len(stop) + 1))
