"""What the six environments read from completions and rows, and how they compare it. Pure."""

from __future__ import annotations

from typing import Any

from environments.shared.marked_answers import boxed_answer, tagged_answer

__all__ = ["RIGHT", "WRONG", "answer_boxed", "answer_tagged", "score_text", "usable"]

RIGHT, WRONG = 1.0, -1.0


def answer_boxed(answer: str) -> str:
    r"""Return the text of the last `\boxed{}`; empty without one."""
    return boxed_answer(answer) or ""


def answer_tagged(answer: str) -> str:
    """Return the text of the first `<answer>` pair, or the whole answer when there is none."""
    tagged = tagged_answer(answer)
    return answer.strip() if tagged is None else tagged


def score_text(answer: str, gold: str) -> float:
    """Return 1.0 when two texts are equal but for upper and lower case, else -1.0."""
    is_right = answer != "" and answer.casefold() == gold.strip().casefold()
    return RIGHT if is_right else WRONG


def usable(text: Any) -> str:
    """Return the text of a row's field, or of the first entry where it is a list.

    Raises:
        ValueError: it is empty, so the row cannot be asked or scored.
    """
    first = (text[0] if len(text) else "") if isinstance(text, list | tuple) else text
    shown = str("" if first is None else first).strip()
    if not shown:
        raise ValueError("a field of the row is empty")
    return shown
