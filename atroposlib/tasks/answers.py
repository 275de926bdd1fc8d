r"""The answer in a completion: in `\boxed{...}`, in tags, or as a fenced program. Pure.

All searches are linear in the text. A pattern such as `<a>(.*?)</a>` would search for the closing
tag again after each of a thousand opening tags.
"""

from __future__ import annotations

import re
import textwrap

__all__ = ["boxed_answer", "last_code_block", "only_tagged", "tagged_answer"]

_OPENED = re.compile("<answer>", re.IGNORECASE | re.ASCII)
_CLOSED = re.compile("</answer>", re.IGNORECASE | re.ASCII)
_BOX = "\\boxed{"


def boxed_answer(text: str) -> str | None:
    r"""Return the stripped text from the last `\boxed{` to the next brace; None if not closed."""
    _, box, rest = text.rpartition(_BOX)
    inside, brace, _ = rest.partition("}")
    return inside.strip() if box and brace else None


def tagged_answer(text: str) -> str | None:
    """Return the stripped text in the first pair of tags on one line; None without a pair."""
    for line in text.split("\n"):
        opened = _OPENED.search(line)
        closed = _CLOSED.search(line, opened.end()) if opened else None
        if opened and closed:
            return line[opened.end() : closed.start()].strip()
    return None


def only_tagged(text: str, tag: str) -> str | None:
    """Return the stripped text between the tags; None unless there is exactly one pair."""
    _, opened, rest = text.partition(f"<{tag}>")
    inside, closed, after = rest.partition(f"</{tag}>")
    if not (opened and closed):
        return None
    is_second = f"</{tag}>" in after.partition(f"<{tag}>")[2]
    return None if is_second else inside.strip()


FENCE = "```"


def last_code_block(answer: str) -> str | None:
    """Return the content of the last closed fenced block; None without one."""
    block: list[str] | None = None
    found = None
    for line in answer.split("\n"):  # unlike splitlines: strings may contain other separators
        text = line.strip()
        if not text.startswith(FENCE) or (block is None and FENCE in text[len(FENCE) :]):
            if block is not None:
                block.append(line.removesuffix("\r"))
        elif block is None:
            block = []
        else:
            # A block in a list item is indented as a whole.
            found, block = textwrap.dedent("\n".join(block)), None
    return found
