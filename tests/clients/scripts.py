"""What the scripted model says, turn by turn, in the manner of a model family.

Thinking models think first. Tool calls are written with spaces that no JSON writer puts there, so
that text which is rendered again differs from what was sampled.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from atroposlib.envs.server_handling.tool_formats import FunctionCall, registry
from tests.templates.make_tokenizers import FAMILIES

__all__ = ["ANSWERS", "PRICES", "SHOPPING", "Call", "Turn", "text_of"]


@dataclass(frozen=True)
class Call:
    """A tool call of the model."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """One reply of the model."""

    text: str = ""
    calls: tuple[Call, ...] = ()
    thought: str = ""
    """Written by families whose models think."""


def text_of(turn: Turn, family: str) -> str:
    """Return a turn as a model of the family writes it, the end of the turn aside."""
    text = turn.text
    if turn.calls:
        tool_format = registry.find(FAMILIES[family].tool_parser)
        assert tool_format is not None
        calls = [FunctionCall(name=c.name, arguments=json.dumps(c.arguments)) for c in turn.calls]
        text += ("\n" if text else "") + tool_format.render(calls).replace('": ', '":  ')
    if turn.thought and "<think>" in FAMILIES[family].marks:
        text = f"<think>\n{turn.thought}\n</think>\n\n{text}"
    return text


PRICES = {"tea": "3.5", "cup": "8.25", "pot": "12.75"}
"""What the tool of the programs answers."""

ANSWERS = ("24.5", "11.75")
"""What the programs must come back with."""


def _price(product: str) -> Call:
    return Call("price", {"product": product})


SHOPPING = (
    Turn("Let me look it up.", (_price("tea"),), thought="Tea first."),
    Turn("", (_price("cup"), _price("pot")), thought="Now both\n\nothers."),
    Turn(f"Together they cost {ANSWERS[0]}.", thought="3.5 + 8.25 + 12.75"),
    Turn("Once more.", (_price("cup"),)),
    Turn(f"Without the pot it is {ANSWERS[1]}.", thought="3.5 + 8.25"),
)
"""Two questions to an agent with the tool `price`: one call, two at a time, an answer; a call, an
answer."""
