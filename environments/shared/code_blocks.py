"""Finding the program in an answer."""

from __future__ import annotations

import textwrap

__all__ = ["last_code_block"]

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
