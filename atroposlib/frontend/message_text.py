r"""Texts of messages as safe HTML that still shows each of their characters: pure.

Markdown makes long answers readable, and hides what a reward may hang on: the backslash of `\{`,
the `#` of a board, a row of `_ _ _`, the stars of `2*3*4`. So rules that swallow such characters
are off, the page's style puts back the marks of headings and stress, and spaces stay as they are.
Raw HTML is text, links and images are not made.
"""

from __future__ import annotations

import html
import logging
import re
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from atroposlib.utils.inert_text import inert_block

if TYPE_CHECKING:
    from collections.abc import Callable

    from markdown_it.rules_inline import StateInline

__all__ = ["render_markdown"]

logger = logging.getLogger(__name__)

MAX_MARKDOWN_CHARACTERS = 200_000
"""Longer texts are shown as they are: Markdown's cost grows faster than the text."""

KEPT_TEXTS = 256
"""Prompts repeat within a group: rendering them once halves the time of a page."""

ACTIVE_RULES = ["link", "image", "autolink", "reference", "html_inline", "html_block", "entity"]
SWALLOWING_RULES = ["escape", "hr", "lheading"]
WORDED_HEADING = re.compile(r" {0,3}#{1,6}[ \t]+[^\W_].*(?<![#\s])\s*")
"""A heading with words, not a row of a board such as `# # _`."""


@lru_cache(maxsize=KEPT_TEXTS)
def render_markdown(text: str) -> str:
    """Return Markdown text as safe HTML; raw HTML in it appears as text, control codes as signs."""
    if len(text) > MAX_MARKDOWN_CHARACTERS:
        return _as_is(text)
    try:
        rendered: str = _converter().render(inert_block(text))
        return rendered
    except (RecursionError, ValueError, IndexError) as error:
        logger.debug("shown without Markdown: %s", error)
        return _as_is(text)


@cache
def _converter() -> Any:
    from markdown_it import MarkdownIt
    from markdown_it.rules_block import heading
    from markdown_it.rules_inline import emphasis

    # Raw HTML is ordinary text and gets escaped. Links stay text as well: a reader sees the
    # address, and nobody is led anywhere.
    converter = MarkdownIt("commonmark", {"html": False, "breaks": True}).enable("table")
    converter.disable([*ACTIVE_RULES, *SWALLOWING_RULES])
    converter.block.ruler.at(
        "heading", _only_worded(heading), {"alt": ["paragraph", "reference", "blockquote"]}
    )
    converter.inline.ruler.at("emphasis", _only_stars(emphasis.tokenize))
    converter.inline.ruler.at("newline", _break_line)
    # The language a fence names would become an attribute; nothing on the page uses it.
    converter.add_render_rule("fence", lambda _, tokens, i, *__: _code_block(tokens[i].content))
    # The style keeps line ends, so a second one in the markup would be an empty line.
    converter.add_render_rule("softbreak", lambda *_: "<br>")
    return converter


def _only_worded(heading: Callable[..., bool]) -> Callable[..., bool]:
    def rule(state: Any, start: int, end: int, silent: bool) -> bool:
        line = state.src[state.bMarks[start] : state.eMarks[start]]
        return bool(WORDED_HEADING.fullmatch(line)) and heading(state, start, end, silent)

    return rule


def _only_stars(tokenize: Callable[..., bool]) -> Callable[..., bool]:
    """Leave `__init__` and `_ _` alone."""

    def rule(state: StateInline, silent: bool) -> bool:
        return state.src[state.pos] != "_" and tokenize(state, silent)

    return rule


def _break_line(state: StateInline, silent: bool) -> bool:
    """End a line as Markdown's own rule does, but keep the spaces on both sides."""
    if state.src[state.pos] != "\n":
        return False
    if not silent:
        state.push("softbreak", "br", 0)
    state.pos += 1
    return True


def _code_block(text: str) -> str:
    return f"<pre><code>{html.escape(text, quote=False)}</code></pre>\n"


def _as_is(text: str) -> str:
    return f"<pre>{html.escape(inert_block(text), quote=False)}</pre>"
