"""Single tool calling on its sample; the player writes well-formed calls, more than half wrong.

What is measured is the twelve requests of the sample's training file themselves, each many times:
a model of this size learns what is asked of it there, not to read a request it has never seen.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from atroposlib.tasks.single_turn_parts import DEEP_THINKING
from atroposlib.tasks.tool_calls import CLOSE, OPEN, read_calls
from atroposlib.utils.local_records import read_records
from benchmarks.environment_training_parts.lesson import Lesson, Messages, WarmUp
from environments.tool_calling_server import SAMPLE, request_of
from example_trainer.demo.settings import DemoSettings, TinyModelShape
from example_trainer.launch.report import SHARE_RIGHT

__all__ = ["spoiled", "tool_calling"]

DOOR = Path("environments/tool_calling_server.py")
SPOILED_SHARE = 0.6
NUM_REPEATS = 40
MAX_TOKENS = 384
Call = dict[str, Any]


def tool_calling(folder: Path, seed: int) -> Lesson:
    """Return the lesson; the sample, its training requests repeated, is written to `folder`."""
    rows = read_records(SAMPLE / "train.jsonl", ["conversations"])
    lines = [json.dumps(row) + "\n" for row in rows]
    (folder / "train.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "test.jsonl").write_text("".join(lines * NUM_REPEATS), encoding="utf-8")
    requests = [request for request in map(request_of, rows) if request is not None]
    expected = [read_calls(request["expected"]).calls for request in requests]

    def conversations(count: int) -> Iterator[Messages]:
        rng = random.Random(seed)
        for number in range(count):
            request = requests[number % len(requests)]
            calls = expected[number % len(requests)]
            if rng.random() < SPOILED_SHARE:
                calls = spoiled(calls, expected, rng)
            yield [
                {"role": "system", "content": f"{DEEP_THINKING}\n\n{request['tools']}"},
                {"role": "user", "content": request["request"]},
                {"role": "assistant", "content": written(calls)},
            ]

    return Lesson(
        settings=DemoSettings(
            seed=seed,
            steps=40,
            groups_per_step=12,
            group_size=8,
            max_tokens=MAX_TOKENS,
            shape=TinyModelShape(max_length=MAX_TOKENS, max_vocabulary=860),
            task=None,
            environment_door=DOOR,
            environment_sections={"env": {"dataset_path": str(folder)}},
        ),
        evaluation={"eval_temperature": 1.0},
        warm_up=WarmUp(steps=120, num_conversations=2_000, batch_size=32),
        conversations=conversations,
        measure=f"accuracy on the sample's {len(requests)} requests, {NUM_REPEATS} tries each",
        value=lambda score: float(score > 0),
        reward=SHARE_RIGHT,
    )


def written(calls: Sequence[Call]) -> str:
    """Return calls in the form the environment asks for."""
    return "\n".join(f"{OPEN}\n{json.dumps(call)}\n{CLOSE}" for call in calls)


def spoiled(
    calls: Sequence[Call], known: Sequence[Sequence[Call]], rng: random.Random
) -> list[Call]:
    """Return calls of which one has another tool or another value, or is left out.

    Args:
        calls: The right ones.
        known: Right calls of all requests, where the other names and values come from.
        rng: Chooses.
    """
    others = [call for group in known for call in group]
    wrong = [json.loads(json.dumps(call)) for call in calls]
    place = rng.randrange(len(wrong))
    kind = rng.choice(["tool", "value", "value", "value", "fewer"])
    if kind == "fewer" and len(wrong) > 1:
        del wrong[place]
    elif kind == "tool":
        names = sorted({call["name"] for call in others} - {wrong[place]["name"]})
        wrong[place]["name"] = rng.choice(names)
    else:
        arguments = wrong[place]["arguments"]
        key = rng.choice(sorted(arguments))
        values = [v for call in others for v in call["arguments"].values() if v != arguments[key]]
        arguments[key] = rng.choice(values)
    return wrong
