"""Merging and checking of groups; every expected value is worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.errors import GroupError
from atroposlib.scored_data import (
    GROUP_FIELDS,
    IGNORE_INDEX,
    MASKED_LOGPROB,
    ScoredDataGroup,
    ScoredDataItem,
    check_group,
    merge_items,
    num_sequences,
)


def make_group(**changes: Any) -> dict[str, Any]:
    return {
        "tokens": [[1, 15, 2], [1, 15, 17, 2]],
        "masks": [[-100, 15, 2], [-100, -100, 17, 2]],
        "scores": [1.0, -1.0],
        "inference_logprobs": [[1.0, -0.1, -0.3], [1.0, 1.0, -2.4, -0.2]],
        **changes,
    }


def test_group_fields_are_fourteen_and_the_notes_as_in_the_types() -> None:
    names = [field.name for field in GROUP_FIELDS]

    assert len([field for field in GROUP_FIELDS if not field.is_note]) == 14
    assert set(names) == set(ScoredDataGroup.__annotations__)
    # The sender and the trace are those of a whole group.
    assert set(names) - {"env_id", "traceparent"} == set(ScoredDataItem.__annotations__)


def test_constants_match_the_wire_convention() -> None:
    assert (IGNORE_INDEX, MASKED_LOGPROB) == (-100, 1.0)


def test_check_group_well_formed_passes() -> None:
    check_group(make_group())
    check_group(make_group(inference_logprobs=None, advantages=[[0.5]]))
    check_group(make_group(inference_logprobs=[]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": []}, "tokens: empty"),
        ({"masks": None}, "masks: missing"),
        ({"masks": []}, "masks: 0 entries, tokens has 2"),
        ({"masks": [[-100, 15, 2]]}, "masks: 1 entries, tokens has 2"),
        ({"masks": [[-100, 15, 2], [-100, 2]]}, r"masks\[1\]: 2 entries, tokens\[1\] has 4"),
        ({"scores": [1.0]}, "scores: 1 entries, tokens has 2"),
        ({"scores": [1.0, math.nan]}, r"scores\[1\]: nan is not a finite number"),
        ({"scores": [1.0, [1.0]]}, r"scores\[1\] is \[1.0\]; expected a number"),
        ({"scores": [1.0, "1"]}, r"scores\[1\] is '1'; expected a number"),
        ({"scores": [1.0, 1e308]}, r"scores\[1\]: 1e\+308; expected a score within ±1e\+30"),
        ({"scores": [-1.01e30, 0.0]}, r"scores\[0\]: -1.01e\+30; expected"),
        ({"scores": [1.0, 10**400]}, r"scores\[1\]: an integer too large"),
        (
            {"inference_logprobs": [[1.0, -0.1, -math.inf], [1.0, 1.0, -2.4, -0.2]]},
            r"inference_logprobs\[0\]\[2\]: -inf is not a finite number",
        ),
        (
            {"inference_logprobs": [[1.0, -0.1, -0.3], [1.0]]},
            r"inference_logprobs\[1\]: 1 entries, tokens\[1\] has 4",
        ),
    ],
)
def test_check_group_malformed_names_the_path(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(GroupError, match=message):
        check_group(make_group(**changes))


def test_merge_items_keeps_every_field_items_carry() -> None:
    item = {
        "tokens": [1, 2],
        "masks": [-100, 2],
        "scores": 1.0,
        "inference_logprobs": [1.0, -0.5],
        "messages": [{"role": "user", "content": "hi"}],
        "overrides": {"set_advantage_to_zero": True},
        "generation_params": {"temperature": 0.7},
        "distill_token_ids": [[4], [5]],
        "group_overrides": {"sft": True},
    }
    other = {**item, "scores": 0.0, "group_overrides": {"sft": False}}

    group, dropped = merge_items([item, other])

    assert dropped == []
    assert group["scores"] == [1.0, 0.0]
    assert group["inference_logprobs"] == [[1.0, -0.5], [1.0, -0.5]]
    assert group["distill_token_ids"] == [[[4], [5]], [[4], [5]]]
    assert group["generation_params"] == {"temperature": 0.7}
    assert group["group_overrides"] == {"sft": False}
    assert group["advantages"] is None
    assert num_sequences(group) == 2


def test_merge_items_field_in_some_items_only_is_dropped_and_named() -> None:
    plain = {"tokens": [1], "masks": [1], "scores": 0.0}

    group, dropped = merge_items([plain, {**plain, "advantages": [0.5]}])

    assert group["advantages"] is None
    assert dropped == ["advantages"]


def test_merge_items_missing_required_field_names_the_item() -> None:
    with pytest.raises(GroupError, match="item 1 of 2 has no 'masks'"):
        merge_items([{"tokens": [1], "masks": [1], "scores": 0.0}, {"tokens": [1], "scores": 0.0}])


@given(st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=8), min_size=1, max_size=6))
def test_merge_items_then_check_group_accepts_aligned_items(rows: list[list[int]]) -> None:
    items = [
        {"tokens": row, "masks": row, "scores": 0.0, "inference_logprobs": [-0.5] * len(row)}
        for row in rows
    ]

    group, _ = merge_items(items)

    check_group(group)
    assert group["tokens"] == rows
