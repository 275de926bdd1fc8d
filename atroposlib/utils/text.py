"""Sanitizing text for display: untrusted text, secrets, scores, misspelled names; pure.

Models write any characters, and errors quote them: escape codes that clear the screen, move the
cursor or set the window's title, characters that reverse the writing direction, lone surrogates.
"""

from __future__ import annotations

import html
import logging
import os.path
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any

__all__ = [
    "InertFormatter",
    "encodable_texts",
    "find_common_prefix",
    "hide_secrets",
    "hide_secrets_of_requests",
    "inert_block",
    "inert_line",
    "inert_markup",
    "is_masked",
    "is_milestone",
    "mask_secrets",
    "near_name",
    "short_score",
    "shown_name",
    "texts_in_tag",
    "without_lone_surrogates",
    "without_secrets",
]

CONTROL_PICTURES = 0x2400  # U+2400 + n is the symbol of control character n
REPLACEMENT = "\ufffd"
MAX_NAME_CHARACTERS = 100
USUAL_NAME = re.compile(rf"[\w./:@+-]{{1,{MAX_NAME_CHARACTERS}}}")
UNPRINTABLE = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def inert_line(text: str, *, max_characters: int) -> str:
    """Return the beginning of a text as one line of visible characters.

    Args:
        text: the text.
        max_characters: maximum length of the result; longer text is cut and ends in `…`.
    """
    start = " ".join(text[: 4 * max_characters].split())
    cut = len(start) > max_characters or len(text) > 4 * max_characters
    shown = start[: max_characters - 1] + "…" if cut else start
    return inert_block(shown)


def shown_name(name: str) -> str:
    """Return an untrusted name for a message: quoted by `repr` and cut, unless it is harmless."""
    if USUAL_NAME.fullmatch(name):
        return name
    return repr(inert_line(name, max_characters=MAX_NAME_CHARACTERS))


def inert_block(text: str) -> str:
    """Return text with unprintable characters made visible, except line ends and tabs."""
    if text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(c if c in "\n\t" or c.isprintable() else _visible(c) for c in text)


class InertFormatter(logging.Formatter):
    """Formats records for terminals: messages and tracebacks quote untrusted text."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return inert_block(super().format(record))


def without_lone_surrogates(text: str) -> str:
    """Return a text with surrogate pairs joined and lone surrogates replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def encodable_texts(value: Any) -> Any:
    """Return a value with surrogate pairs joined and lone surrogates replaced."""
    if isinstance(value, str):
        return without_lone_surrogates(value)
    if isinstance(value, Mapping):
        return {encodable_texts(k): encodable_texts(v) for k, v in value.items()}
    if isinstance(value, list):
        return [encodable_texts(entry) for entry in value]
    return value


def inert_markup(text: str) -> str:
    """Return text escaped for HTML content and attributes."""
    return html.escape(inert_block(text), quote=True)


def _visible(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return chr(CONTROL_PICTURES + code)
    is_glyph = unicodedata.category(character) not in UNPRINTABLE
    return character if is_glyph else REPLACEMENT


def texts_in_tag(text: str, tag: str) -> list[str]:
    """Return the texts between pairs of a tag, such as `action`, in any case of its letters.

    The time is linear in the length of the text; that of `<action>(.*?)</action>` is not, if a
    tag is opened again and again.
    """
    opening = re.compile(f"<{re.escape(tag)}>", re.IGNORECASE)
    closing = re.compile(f"</{re.escape(tag)}>", re.IGNORECASE)
    found: list[str] = []
    position = 0
    while (start := opening.search(text, position)) is not None:
        end = closing.search(text, start.end())
        if end is None:
            break
        found.append(text[start.end() : end.start()])
        position = end.end()
    return found


def is_milestone(count: int, *, added: int = 1) -> bool:
    """Whether a count reached 1, 10, 100, ... with the last addition.

    Example:
        [n for n in range(1, 200) if is_milestone(n)] == [1, 10, 100]
    """
    before = count - added
    return count > 0 and (before <= 0 or len(str(count)) > len(str(before)))


def short_score(score: Any) -> Any:
    """Return a float, of NumPy too, rounded to six significant digits; others are unchanged."""
    is_float = isinstance(score, Real) and not isinstance(score, Integral)
    return float(f"{float(score):.6g}") if is_float else score


MASK = "***"
"""Replacement for a secret."""

SECRET_NAME = re.compile(
    r"(api_?key|secret|password|passwd|authorization|credentials?|(access|auth|hf|hub|api)_token)$",
    re.IGNORECASE,
)
HTTP_CLIENT_LOGGERS = ("httpx", "httpx2", "fsspec.http")
USER_INFO = re.compile(r"(?:\w+://)?[^/]*@")
URL_PASSWORD = re.compile(r"(?<=://)[^/\s]+@")
URL_KEY = re.compile(
    r"(?<=[?&])((?:[\w.-]*[-_.])?(?:(?:api)?key|token|passw(?:or)?d|secret|sig(?:nature)?|credentials?"
    r"|auth))=[^&\s\"']+",
    re.IGNORECASE,
)


def mask_secrets(settings: Any) -> Any:
    """Return a copy of nested settings with secrets replaced by `MASK`.

    Secrets are values of keys such as `api_key`, `password` or `hf_token`, and users, passwords and
    keys in URLs. Empty values are kept, to show that they are not set.
    """
    if isinstance(settings, Mapping):
        return {
            key: MASK if value and SECRET_NAME.search(str(key)) else mask_secrets(value)
            for key, value in settings.items()
        }
    if isinstance(settings, list | tuple):
        return [mask_secrets(value) for value in settings]
    if isinstance(settings, str):
        return hide_secrets(settings)
    return settings


def is_masked(value: Any) -> bool:
    """Whether a saved setting was masked by `mask_secrets`."""
    return value == MASK or (isinstance(value, str) and f"://{MASK}@" in value)


def hide_secrets(text: str) -> str:
    """Return a text with users, passwords and keys in URLs masked."""
    return URL_KEY.sub(rf"\1={MASK}", URL_PASSWORD.sub(f"{MASK}@", text))


def hide_secrets_of_requests() -> None:
    """Mask secrets in URLs that HTTP clients log; further calls have no effect."""
    for name in HTTP_CLIENT_LOGGERS:
        client = logging.getLogger(name)
        if _hides_secrets not in client.filters:
            client.addFilter(_hides_secrets)


def _hides_secrets(record: logging.LogRecord) -> bool:
    record.msg, record.args = hide_secrets(record.getMessage()), ()
    return True


def without_secrets(url: str) -> str:
    """Return a URL for messages, without user, password and query."""
    # A password may hold an unescaped question mark.
    user = USER_INFO.match(url)
    start = user.end() if user else 0
    address = url[:start] + url[start:].partition("?")[0]
    access, at, place = address.rpartition("@")
    scheme = re.match(r"\w+://", access)
    return f"{scheme.group() if scheme else ''}{MASK}@{place}" if at else address


def find_common_prefix(strings: Sequence[str]) -> str:
    """Return the longest common prefix; empty without strings."""
    return os.path.commonprefix(strings)  # noqa: RUF071 - not for paths


def near_name(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?` with the most similar known name, or an empty string.

    A name without its prefix suggests the full name: `env.group_size` for `group_size`.
    """
    choices = list(known)
    close = get_close_matches(name, choices, n=1, cutoff=0.75)
    if not close:
        by_last_part = {choice.rpartition(".")[2]: choice for choice in reversed(choices)}
        last_parts = get_close_matches(name.rpartition(".")[2], by_last_part, n=1, cutoff=0.6)
        close = [by_last_part[part] for part in last_parts]
    return f"; did you mean {close[0]}?" if close else ""
