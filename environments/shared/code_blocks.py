"""Finding the program in an answer."""

from __future__ import annotations

__all__ = ["last_code_block"]

FENCE = "```"


def last_code_block(answer: str) -> str | None:
    """Return the content of the last fenced block that was closed, None when there is none.

    Takes time in proportion to the length of the answer.
    """
    block: list[str] | None = None
    found = None
    for line in answer.splitlines():
        if not line.lstrip().startswith(FENCE):
            if block is not None:
                block.append(line)
        elif block is None:
            block = []
        else:
            found, block = "\n".join(block), None
    return found
