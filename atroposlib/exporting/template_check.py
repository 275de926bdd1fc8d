r"""Whether special tokens stand in groups where the chat template of a tokenizer writes them.

Two tokenizers may share all tokens of plain text and differ in special tokens only. Text decoded
with the wrong one of the two holds every message, behind the wrong tokens:

    right one    <|im_start|>user\nHow much is it?<|im_end|>
    wrong one    <|begin_of_text|>user\nHow much is it?<|eot_id|>

So of each message the nearest special token before it is compared with what the template writes.
Nothing is concluded from a tokenizer without a template, nor from text without special tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from atroposlib.envs.server_handling.chat_rendering import render_messages
from atroposlib.exporting.message_texts import find_text, message_texts

__all__ = ["TemplateReader"]

_QUESTION = ({"role": "user", "content": "?"},)


class _Opening(NamedTuple):
    """What stands between the end of one message and the beginning of the next."""

    nearest: str
    """The special token nearest to the message."""
    others: frozenset[str]
    """The special tokens before that one."""


class TemplateReader:
    """Compares texts with what the chat template of a tokenizer writes.

    Args:
        tokenizer: of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", None) or {}  # some kinds have none
        names = {*tokenizer.all_special_tokens, *(str(token) for token in added.values())}
        longest_first = sorted(filter(None, names), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._end = tokenizer.eos_token
        self._has_template = bool(getattr(tokenizer, "chat_template", None))

    def openings_match(self, text: str, chat: Any) -> list[bool]:
        """Tell of each message whether the template opens it with what stands before it in a text.

        Args:
            text: of a whole trajectory, special tokens included.
            chat: its messages.

        Returns:
            One entry per message that can be judged; fewer than there are messages, or none.
        """
        written = self._rendered(chat)
        if written is None:
            return []
        known = frozenset(self._special.findall(written))
        wanted_texts = message_texts(chat)
        matches = []
        for found, wanted in zip(
            self._openings(text, wanted_texts), self._openings(written, wanted_texts), strict=True
        ):
            if found is not None and wanted is not None:
                matches.append(_is_same(found, wanted, known))
        return matches

    def opens_answer(self, prompt: str) -> bool | None:
        """Tell whether a prompt ends with what the template opens an answer with.

        None where the prompt holds no special tokens, or the template gives nothing to compare.
        """
        written = self._rendered(_QUESTION)
        if written is None:
            return None
        found = self._opening(prompt, 0, len(prompt))
        wanted = self._opening(written, 0, len(written))
        if found is None or wanted is None:
            return None
        return _is_same(found, wanted, frozenset(self._special.findall(written)))

    def _rendered(self, chat: Any) -> str | None:
        if not self._has_template:
            return None
        try:
            return render_messages(self._tokenizer, chat)
        except Exception:  # noqa: BLE001 - a template is a program and may refuse in any way
            return None

    def _openings(self, text: str, wanted_texts: Sequence[Sequence[str]]) -> list[_Opening | None]:
        """Return what stands before each message; None for one of which nothing can be said."""
        openings: list[_Opening | None] = []
        end = 0
        for forms in wanted_texts:
            place = find_text(text, forms, end)
            openings.append(None if place is None else self._opening(text, end, place.start))
            end = end if place is None else place.end
        return openings

    def _opening(self, text: str, start: int, end: int) -> _Opening | None:
        specials = [
            match[0]
            for match in self._special.finditer(text, start, end)
            if match.start() > 0  # also a text that no template wrote begins with such a token
        ]
        if not specials or specials[-1] == self._end:  # which a bare text has between turns, too
            return None
        return _Opening(specials[-1], frozenset(specials[:-1]))


def _is_same(found: _Opening, wanted: _Opening, known: frozenset[str]) -> bool:
    """Whether a message is opened as the template does it, which writes the `known` tokens.

    Tokens of an image or of thinking may follow in a text; the template, which is given the
    message alone, does not write them.
    """
    is_followed = wanted.nearest in found.others and found.nearest not in known
    return found.nearest == wanted.nearest or is_followed
