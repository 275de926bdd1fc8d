from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from atroposlib.utils import long_json
from atroposlib.utils.long_json import decode_in_steps

ANSWER = {
    "id": "c",
    "choices": [
        {"index": i, "text": 'a "b" [é {', "ids": list(range(50)), "p": [-0.5, None] * 25}
        for i in range(4)
    ],
    "rows": [[{"7": -0.5, "8": None}, {}] * 9, [], [[1, 2], [3]], {"a": [[]]}, 5, None, "x"],
    "empty": {},
}


@pytest.mark.parametrize("step_bytes", [0, 1, 20, 100, 1 << 18])
@pytest.mark.parametrize("value", [ANSWER, [ANSWER, ANSWER], [[1, 2], 3], [1, 2], "text", None, []])
@pytest.mark.parametrize("indent", [None, 2])
def test_decode_in_steps_gives_what_one_call_would(
    monkeypatch: pytest.MonkeyPatch, step_bytes: int, value: Any, indent: int | None
) -> None:
    monkeypatch.setattr(long_json, "STEP_BYTES", step_bytes)

    assert decode_in_steps(json.dumps(value, indent=indent).encode()) == value


@pytest.mark.parametrize(
    "text", [b"", b"  ", b"[[1, 2], [3", b'{"a": [[1]} ', b'[{"a": nan}]', b"[[1]] x"]
)
def test_decode_in_steps_refuses_what_is_not_json(
    monkeypatch: pytest.MonkeyPatch, text: bytes
) -> None:
    monkeypatch.setattr(long_json, "STEP_BYTES", 1)

    with pytest.raises(msgspec.DecodeError):
        decode_in_steps(text)
