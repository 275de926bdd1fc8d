from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from atroposlib.utils.text import short_score


@pytest.mark.parametrize(
    ("score", "shown"),
    [
        (-1.7999999999999998, "-1.8"),
        (1.0, "1.0"),
        (True, "True"),
        (0.22547386273360412, "0.225474"),
        (1e-9, "1e-09"),
        (float("nan"), "nan"),
        (3, "3"),
        (None, "None"),
        ("0.1000000001", "0.1000000001"),
    ],
)
def test_short_score_drops_digits_of_floats_only(score: Any, shown: str) -> None:
    assert str(short_score(score)) == shown


def test_short_score_of_numpy_is_written_like_that_of_python() -> None:
    scores = [np.float32(0.0462842), np.float64(0.25)]

    assert str([short_score(score) for score in scores]) == "[0.0462842, 0.25]"
