"""The quick look at the layout of a group against the checks that name what is wrong."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from atroposlib.errors import GroupError
from atroposlib.scored_data import MAX_SCORE, check_group
from atroposlib.wire.json_format import check_layout

LENGTHS = st.lists(st.integers(0, 2), max_size=3)
ODD_SCORES = (0, 1.5, float("nan"), float("inf"), -float("inf"), MAX_SCORE, -2 * MAX_SCORE, 10**400)


@given(
    st.fixed_dictionaries(
        {}, optional={"tokens": LENGTHS, "masks": LENGTHS, "inference_logprobs": LENGTHS}
    ),
    st.lists(st.sampled_from(ODD_SCORES), max_size=3),
)
@example({"tokens": [2, 1], "masks": [2, 1]}, [0, 1.5])
@example({"tokens": [2, 1], "masks": [2, 1], "inference_logprobs": []}, [0, 1.5])
@example({"tokens": [2], "masks": [2]}, [float("nan")])
def test_layout_is_right_when_the_group_is(lengths, scores):
    group = {name: [[0] * length for length in rows] for name, rows in lengths.items()}

    assert refusal_of(check_layout, lengths, scores) == refusal_of(
        check_group, {**group, "scores": scores}
    )


def refusal_of(check, *args):
    try:
        check(*args)
    except GroupError as error:
        return str(error)
    return None
