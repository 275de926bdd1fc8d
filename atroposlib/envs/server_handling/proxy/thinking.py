"""Taking the thinking out of a completion, and writing it back; pure.

<think>            thinking: The sum of ...
The sum of ...
</think>           text: It is 4.

It is 4.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Thought", "split_thinking", "with_thinking"]

_OPEN = "<think>"
_CLOSE = "</think>"


class Thought(NamedTuple):
    """A completion in two parts."""

    thinking: str | None
    """What the model thought first, None where it did not."""
    text: str
    """What it says; the completion unchanged where it did not think."""


def split_thinking(completion: str) -> Thought:
    """Split a completion that begins with thinking; the space around both parts is dropped.

    The opening tag may be missing, as templates that open the thinking keep it in the prompt; the
    closing tag is missing where the completion was cut. Tags further inside stay text.
    """
    head, closed, tail = completion.partition(_CLOSE)
    opened = head.lstrip()
    if opened.startswith(_OPEN):
        return Thought(opened[len(_OPEN) :].strip(), tail.strip())
    if closed and _OPEN not in head:
        return Thought(head.strip(), tail.strip())
    return Thought(None, completion)


def with_thinking(thinking: str, text: str) -> str:
    """Return the completion that `split_thinking` would split into these parts."""
    return f"{_OPEN}\n{thinking}\n{_CLOSE}\n\n{text}" if thinking else text
