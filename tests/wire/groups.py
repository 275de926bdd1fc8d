"""Groups for the tests of the wire, by hand and by hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from atroposlib.scored_data import MAX_SCORE

FULL_GROUP: dict[str, Any] = {
    "tokens": [[1, 2, 70_000], [4]],
    "masks": [[-100, 2, 70_000], [4]],
    "scores": [1.0, -0.1],
    "advantages": [[0.1, 0.2, 0.3], [-1.5]],
    "ref_logprobs": [[-0.5, -0.25, -1e-5], [-0.1]],
    "messages": [[{"role": "user", "content": "ü🙂", "reward": None}], ["plain"]],
    "generation_params": {"temperature": 0.7},
    "inference_logprobs": [[1.0, -0.30000000000000004, -2.5], [-0.1]],
    "overrides": [{"set_advantage_to_zero": True}, {}],
    "group_overrides": {"a": [1.10, True, None]},
    "images": [{"big": 2**60, "tiny": 5e-324, "text": "</script>"}],
    "env_id": 3,
    "distill_token_ids": [[[1, 2], [3, 4], [5, 6]], [[7]]],
    "distill_logprobs": [[[-0.5, -1.0], [0.0, -2.0], [-0.1, -0.2]], [[-3.0]]],
    "reward_parts": [{"format": 1, "answer": -0.5}, {}],
    "finish_reasons": ["stop", "length"],
    "tokenized_from_text": False,
    "traces": [
        {"version": 1, "events": [{"at": 0.5, "kind": "output", "text": "ü\u001b[1m"}]},
        None,
    ],
}

_INT64 = st.integers(-(2**63), 2**63 - 1)
_TOKEN = st.integers(0, 255) | st.integers(0, 200_000) | _INT64


def _is_score(value: float) -> bool:
    return abs(value) <= MAX_SCORE


_DOUBLE = st.floats(allow_nan=False, allow_infinity=False)
_SINGLE = st.floats(allow_nan=False, allow_infinity=False, width=32)
_JSON = st.recursive(
    st.none() | st.booleans() | _INT64 | _DOUBLE | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3)
    ),
    max_leaves=6,
)
_OBJECT = st.dictionaries(st.text("abc"), _JSON, max_size=2)


@st.composite
def groups(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a well-formed group with any of the optional fields, ragged ones included."""
    tokens = draw(st.lists(st.lists(_TOKEN, max_size=6), min_size=1, max_size=3))
    number = draw(st.sampled_from([_SINGLE, _DOUBLE]))

    def rows(entry: st.SearchStrategy[Any]) -> list[Any]:
        return [draw(st.lists(entry, min_size=len(row), max_size=len(row))) for row in tokens]

    ragged = st.lists(st.lists(number, max_size=4), max_size=4)
    masks = st.just(rows(_INT64)) | st.just(
        [[token if draw(st.booleans()) else -100 for token in row] for row in tokens]
    )
    optional = {
        "advantages": st.lists(number | st.lists(number, max_size=3), max_size=3) | ragged,
        "ref_logprobs": ragged,
        "messages": st.lists(st.lists(st.text("ab") | st.just({"role": "x", "content": 1}))),
        "generation_params": _OBJECT,
        "inference_logprobs": st.just(rows(number)) | st.just([]),
        "overrides": st.lists(_OBJECT, max_size=2),
        "group_overrides": _OBJECT,
        "images": _JSON,
        "env_id": _INT64,
        "distill_token_ids": st.lists(st.lists(st.lists(_TOKEN, max_size=3), max_size=3)),
        "distill_logprobs": st.lists(ragged, max_size=2),
        "policy_version": st.integers(0, 2**40),
    }
    required = {
        "tokens": tokens,
        "masks": draw(masks),
        "scores": [draw(number.filter(_is_score)) for _ in tokens],
    }
    return {**required, **draw(st.fixed_dictionaries({}, optional=optional))}
