"""Text from anywhere, made harmless for a terminal or a page: pure.

A model may write anything, and errors quote it: codes that clear the screen, move the cursor or set
the window's title, characters that turn the writing direction, half a surrogate pair.
"""

from __future__ import annotations

import html
import re
import unicodedata

__all__ = ["inert_block", "inert_line", "inert_markup", "shown_name"]

CONTROL_PICTURES = 0x2400  # U+2400 + n is the visible sign of control character n
REPLACEMENT = "\ufffd"
MAX_NAME_CHARACTERS = 100
USUAL_NAME = re.compile(rf"[\w./:@+-]{{1,{MAX_NAME_CHARACTERS}}}")
UNPRINTABLE = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def inert_line(text: str, *, max_characters: int) -> str:
    """Return text as one line of visible characters.

    Args:
        text: may be long; only its beginning is looked at.
        max_characters: longest result; a longer one ends in `…`.
    """
    start = " ".join(text[: 4 * max_characters].split())
    cut = len(start) > max_characters or len(text) > 4 * max_characters
    shown = start[: max_characters - 1] + "…" if cut else start
    return inert_block(shown)


def shown_name(name: str) -> str:
    """Return a name that another program chose as a message may quote it.

    One of the usual characters stays as it is, so that it can be copied. Any other is quoted as
    Python does, and a long one is cut.
    """
    if USUAL_NAME.fullmatch(name):
        return name
    return repr(inert_line(name, max_characters=MAX_NAME_CHARACTERS))


def inert_block(text: str) -> str:
    """Return text with its lines and tabs kept and all else that is no glyph made visible."""
    if text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(c if c in "\n\t" or c.isprintable() else _visible(c) for c in text)


def inert_markup(text: str) -> str:
    """Return text as HTML that shows it and does nothing: fit for content and for attributes."""
    return html.escape(inert_block(text), quote=True)


def _visible(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return chr(CONTROL_PICTURES + code)
    is_glyph = unicodedata.category(character) not in UNPRINTABLE
    return character if is_glyph else REPLACEMENT
