"""Groups on their way through the service into rows: nothing a sender filled is lost on it."""

from __future__ import annotations

from typing import Any

import pytest

from atroposlib.errors import GroupError
from example_trainer.rows import Row, RowRules, rows_from_group
from tests.api.helpers import Service
from tests.trainer.tiny import group

L = 5  # tokens of each trajectory
RULES = RowRules(seq_len=64, uses_reference=True, uses_teacher=True)
REFERENCE = {"ref_logprobs": [[-2.0] * L, [-3.0] * L]}


def pair(**extra: Any) -> dict[str, Any]:
    return group([[7, 8], [9, 9]], [1.0, 0.0]) | REFERENCE | extra


def through_the_service(posted: dict[str, Any]) -> dict[str, Any]:
    """Post one group and take it out again as the batch of a step."""
    service = Service()
    service.start(batch_size=2)
    answer = service.post("/scored_data", json=posted)
    assert answer.status_code == 200, answer.text
    (taken,) = service.get("/batch").json()["batch"]
    return dict(taken)


def read(given: dict[str, Any]) -> list[Row]:
    return rows_from_group(given, RULES)


HONOURED: dict[str, Any] = {
    "advantages": [[0.25] * L, [-0.5] * L],
    "ref_logprobs": [[-0.5] * L, [-1.5] * L],
    "inference_logprobs": [[1.0, 1.0, 1.0, -0.1, -0.2], [1.0, 1.0, 1.0, -0.3, -0.4]],
    "generation_params": {"temperature": 0.5, "top_p": 0.9},
    "group_overrides": {"sft": True},
    "overrides": [{"set_advantage_to_zero": True}, {"temperature": 0.7}],
}


@pytest.mark.parametrize("name", HONOURED)
def test_field_comes_out_of_the_service_as_it_went_in(name):
    posted = pair(**{name: HONOURED[name]})

    rows = read(through_the_service(posted))

    assert rows == read(posted)
    assert rows != read(pair())


def test_teacher_arrays_come_out_as_they_went_in():
    posted = pair(
        distill_token_ids=[[[3, 4]] * L, [[5, 6]] * L],
        distill_logprobs=[[[-0.5, -1.5]] * L, [[-0.25, -2.5]] * L],
    )

    assert read(through_the_service(posted)) == read(posted)


@pytest.mark.parametrize(
    ("extra", "path"),
    [
        ({"images": [["data:image/png;base64,AA=="], []]}, "images: the model is text only"),
        ({"overrides": [{}, {"weight": 2}]}, r"overrides\[1\]\.weight"),
        ({"overrides": [{"sft": True}]}, "overrides: 1 entries, tokens has 2"),
        ({"group_overrides": {"clip_eps": 0.1}}, r"group_overrides\.clip_eps"),
        ({"advantages": [[0.1], [0.2]]}, r"advantages\[0\]: 1 entries, tokens\[0\] has 5"),
        ({"ref_logprobs": [[-1.0]]}, "ref_logprobs: 1 entries, tokens has 2"),
        ({"distill_token_ids": [[[3]] * L] * 2}, "distill_logprobs: missing"),
        ({"generation_params": {"temperature": "hot"}}, r"generation_params\.temperature: 'hot'"),
    ],
)
def test_what_the_service_lets_pass_and_no_row_can_hold_is_refused(extra, path):
    taken = through_the_service(pair(**extra))

    with pytest.raises(GroupError, match=path):
        read(taken)
