from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from atroposlib.utils import json_text as long_json
from atroposlib.utils.json_text import decode_in_steps

ANSWER = {
    "id": "c",
    "choices": [
        {"index": i, "text": 'a "b" [é {', "ids": list(range(50)), "p": [-0.5, None] * 25}
        for i in range(4)
    ],
    "rows": [[{"7": -0.5, "8": None}, {}] * 9, [], [[1, 2], [3]], {"a": [[]]}, 5, None, "x"],
    "empty": {},
}


async def no_pause(num_bytes: int) -> None:
    """Let the decoder go on at once."""


@pytest.mark.parametrize("step_bytes", [0, 1, 20, 100, 1 << 18])
@pytest.mark.parametrize("value", [ANSWER, [ANSWER, ANSWER], [[1, 2], 3], [1, 2], "text", None, []])
@pytest.mark.parametrize("indent", [None, 2])
async def test_decode_in_steps_gives_what_one_call_would(
    monkeypatch: pytest.MonkeyPatch, step_bytes: int, value: Any, indent: int | None
) -> None:
    monkeypatch.setattr(long_json, "STEP_BYTES", step_bytes)

    text = json.dumps(value, indent=indent).encode()

    assert await decode_in_steps(text, no_pause) == value


@pytest.mark.parametrize(
    "text", [b"", b"  ", b"[[1, 2], [3", b'{"a": [[1]} ', b'[{"a": nan}]', b"[[1]] x"]
)
async def test_decode_in_steps_refuses_what_is_not_json(
    monkeypatch: pytest.MonkeyPatch, text: bytes
) -> None:
    monkeypatch.setattr(long_json, "STEP_BYTES", 1)

    with pytest.raises(msgspec.DecodeError):
        await decode_in_steps(text, no_pause)


async def test_decode_in_steps_pauses_before_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_json, "STEP_BYTES", 100)
    paused: list[int] = []

    async def pause(num_bytes: int) -> None:
        paused.append(num_bytes)

    # the object and the list in it are taken apart; each row of 80 digits and commas is one step
    await decode_in_steps(json.dumps({"a": [[1] * 27] * 3}).encode(), pause)

    assert paused == [256, 249, 81, 81, 81]
