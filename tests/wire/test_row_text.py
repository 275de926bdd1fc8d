from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from atroposlib.wire.json_format import write_row


@pytest.mark.parametrize(
    "row",
    [
        [],
        [1],
        list(range(16 * 1024 + 1)),
        [0.5] * 40_000,
        [[7, 8]] * 20_000,
        [[]] * 20_000,
        0.5,
        None,
        "text",
        {"a": 1},
    ],
)
def test_write_row_gives_what_one_call_would(row: Any) -> None:
    calls: list[int] = []

    def encode(part: Any) -> bytes:
        calls.append(len(part) if isinstance(part, list) else 0)
        return msgspec.json.encode(part)

    assert write_row(row, encode) == msgspec.json.encode(row)
    assert max(calls) <= 16 * 1024


def test_write_row_takes_arrays() -> None:
    row = np.arange(50_000)

    text = write_row(row, lambda part: msgspec.json.encode(part.tolist()))

    assert text == msgspec.json.encode(row.tolist())
