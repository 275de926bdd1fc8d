"""What an agent and its model do in a conversation of the tests, as data drawn by chance."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Literal, get_args

__all__ = [
    "TEXTS",
    "THINKING",
    "WAYS_BACK",
    "Path",
    "Plan",
    "Reply",
    "Step",
    "WayBack",
    "random_plan",
]

WayBack = Literal[
    "as given",
    "other spacing",
    "object",
    "no ids",
    "no content",
    "no thinking",
    "parts",
    "trimmed",
]
"""How the agent writes an answer back."""

WAYS_BACK: tuple[WayBack, ...] = get_args(WayBack)

Path = Literal["on", "again", "edit", "back"]
"""Goes on; asks the same again; changes an earlier message; returns to an earlier reply."""

TEXTS = (
    *(
        "",
        " ",
        "ok",
        "The answer is 12.",
        "  spaced \n\n",
        "1",
        "10",
        "\n",
        "naïve 🐈‍⬛ ünïcode",
        "日本",
    ),
    *(
        "a\u0301\u200d",
        "<|im_end|>",
        "</s>[INST] x [/INST]",
        "<|eot_id|>",
        "half <|im_",
        "{}",
        '"q',
    ),
    *("<think>", "x</think>y", "\ud7ff\ue000", "[TOOL_CALLS]", "<tool_call>", "\t\r\n", "&amp;<b>"),
)
THINKING = ("", "<think>\nwhy\n</think>\n\n", "<think></think>", "because</think>\n")


@dataclass(frozen=True)
class Reply:
    """What the engine samples."""

    text: str
    calls: tuple[tuple[str, str], ...] = ()
    """Name and JSON arguments of each call behind the text."""
    is_broken: bool = False
    """Whether the last call lacks its end."""
    cut: int | None = None
    """Tokens after which `max_tokens` ends it; None lets it end itself."""
    end: int = 0
    """Which special token ends it."""
    seed: int = 0
    """Chooses one of its tokenisations."""


@dataclass(frozen=True)
class Step:
    """One request of the agent."""

    user: str
    replies: tuple[Reply, ...]
    """[n] completions."""
    follow: int = 0
    """The reply it goes on from."""
    way_back: WayBack = "as given"
    path: Path = "on"
    result: str = "42"
    """What tools answer."""


@dataclass(frozen=True)
class Plan:
    """A conversation."""

    steps: tuple[Step, ...]
    system: str | None = None
    has_tools: bool = True


def random_plan(chance: random.Random, *, num_steps: int = 3) -> Plan:
    """Draw a conversation of a few turns."""
    steps = tuple(_random_step(chance) for _ in range(num_steps + chance.randrange(3)))
    system = chance.choice([None, "Be kind.", "<|im_end|> ü"])
    return Plan(steps, system=system, has_tools=chance.random() < 0.8)


def _random_step(chance: random.Random) -> Step:
    path: Path = chance.choices(["on", "again", "edit", "back"], [20, 2, 1, 2])[0]
    return Step(
        user=chance.choice(TEXTS) + chance.choice(TEXTS),
        replies=tuple(_random_reply(chance) for _ in range(chance.choice([1, 1, 1, 2, 3]))),
        follow=chance.randrange(3),
        way_back=chance.choice(WAYS_BACK),
        path=path,
        result=chance.choice(TEXTS),
    )


def _random_reply(chance: random.Random) -> Reply:
    calls = tuple(
        (chance.choice(["search", "get_time"]), _random_arguments(chance))
        for _ in range(chance.choice([0, 0, 1, 1, 2, 3]))
    )
    return Reply(
        text=chance.choice(THINKING) + chance.choice(TEXTS),
        calls=calls,
        is_broken=bool(calls) and chance.random() < 0.15,
        cut=chance.choice([0, 1, 3, 9, 25]) if chance.random() < 0.15 else None,
        end=chance.choice([0, 0, 0, 0, 0, 1]),
        seed=chance.randrange(1 << 30),
    )


def _random_arguments(chance: random.Random) -> str:
    values = [1, 2.5, 3.0, None, True, "cats", "日本", "a</think>b", [1, {"x": []}], ""]
    names = chance.sample(["query", "b", "a b", "limit"], chance.randrange(4))
    return json.dumps({name: chance.choice(values) for name in names}, ensure_ascii=False)
