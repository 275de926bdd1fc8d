r"""The part of a completion that is the answer: a `\boxed{...}`, tags, a fenced program. Pure.

Every search takes time in proportion to the text: a pattern such as `<a>(.*?)</a>` would search for
the closing tag again after each of a thousand opening ones.
"""

from __future__ import annotations

import re
import textwrap

__all__ = ["boxed_answer", "last_code_block", "only_tagged", "tagged_answer"]

_OPENED = re.compile("<answer>", re.IGNORECASE | re.ASCII)
_CLOSED = re.compile("</answer>", re.IGNORECASE | re.ASCII)
_BOX = "\\boxed{"


def boxed_answer(text: str) -> str | None:
    r"""Return the text after the last `\boxed{` as far as the next brace, stripped.

    None when there is no box, or the last one is not closed.
    """
    _, box, rest = text.rpartition(_BOX)
    inside, brace, _ = rest.partition("}")
    return inside.strip() if box and brace else None


def tagged_answer(text: str) -> str | None:
    """Return what stands in the first pair of tags on one line, stripped; None without a pair."""
    for line in text.split("\n"):
        opened = _OPENED.search(line)
        closed = _CLOSED.search(line, opened.end()) if opened else None
        if opened and closed:
            return line[opened.end() : closed.start()].strip()
    return None


def only_tagged(text: str, tag: str) -> str | None:
    """Return what stands between the tags, stripped; None unless there is exactly one such pair."""
    _, opened, rest = text.partition(f"<{tag}>")
    inside, closed, behind = rest.partition(f"</{tag}>")
    if not (opened and closed):
        return None
    is_second = f"</{tag}>" in behind.partition(f"<{tag}>")[2]
    return None if is_second else inside.strip()


FENCE = "```"


def last_code_block(answer: str) -> str | None:
    """Return the content of the last fenced block that was closed, None when there is none.

    Takes time in proportion to the length of the answer.
    """
    block: list[str] | None = None
    found = None
    for line in answer.split("\n"):  # and at no other character: a text of the program may hold it
        text = line.strip()
        if not text.startswith(FENCE) or (block is None and FENCE in text[len(FENCE) :]):
            if block is not None:
                block.append(line.removesuffix("\r"))
        elif block is None:
            block = []
        else:
            # A list item's block is indented as a whole.
            found, block = textwrap.dedent("\n".join(block)), None
    return found
