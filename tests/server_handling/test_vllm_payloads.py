from __future__ import annotations

from typing import Any

import pytest

from atroposlib.envs.server_handling.openai_compatible import drop_double_bos, sampling_options
from atroposlib.envs.server_handling.vllm_server import (
    normalize_topk_entry,
    parse_completions,
    parse_generate,
    prompt_rows,
)
from atroposlib.errors import InferenceError


def choice(index: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "index": index,
        "token_ids": [10 + index, 2],
        "logprobs": {"token_logprobs": [-0.5, -0.25]},
        "finish_reason": "stop",
        "prompt_token_ids": [1, 5],
        **changes,
    }


def test_options_use_the_engines_names_and_leave_ours_out() -> None:
    options = sampling_options(
        {
            "model": "m",
            "prompt": "hi",
            "input_ids": [1],
            "timeout": 3,
            "logprobs": True,
            "max_new_tokens": 7,
            "stop": None,
            "temperature": 0.0,
            "extra_body": {"min_p": 0.1},
        }
    )

    assert options == {"max_tokens": 7, "temperature": 0.0, "min_p": 0.1}
    assert sampling_options({"max_completion_tokens": 8}) == {"max_tokens": 8}


@pytest.mark.parametrize("no_limit", [None, -1])
def test_no_limit_is_one_value_however_it_is_written(no_limit: int | None) -> None:
    assert sampling_options({"max_tokens": no_limit}) == {"max_tokens": None}
    assert sampling_options({"max_tokens": None, "max_new_tokens": 3}) == {"max_tokens": 3}
    assert sampling_options({}) == {}


@pytest.mark.parametrize(
    ("ids", "expected"),
    [([1, 1, 5], [1, 5]), ([1, 5], [1, 5]), ([5, 5], [5, 5]), ([1], [1]), ([], [])],
)
def test_doubled_bos_is_dropped_once(ids: list[int], expected: list[int]) -> None:
    assert drop_double_bos(ids, 1) == expected


def test_missing_bos_drops_nothing() -> None:
    assert drop_double_bos([5, 5], None) == [5, 5]


def test_completions_are_read_in_the_order_of_their_index() -> None:
    answer = {"choices": [choice(1), choice(0, finish_reason="length")]}

    parsed = parse_completions(answer, [1], num_choices=2)

    assert parsed == ([1, 5], [[10, 2], [11, 2]], [[-0.5, -0.25]] * 2, ["length", "stop"])


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({}, "no choices"),
        ({"choices": [choice(token_ids=None)]}, "no token_ids"),
        ({"choices": [choice(logprobs=None)]}, "no token_logprobs"),
        ({"choices": [choice(), choice(1)]}, "2 completions, not 1"),
        ({"choices": [choice(logprobs={"token_logprobs": [-1.0]})]}, "2 ids and 1 logprobs"),
        ({"choices": [choice(logprobs={"token_logprobs": [None, -1.0]})]}, "not a finite number"),
        ({"choices": [choice(finish_reason="abort")]}, "aborted completion 0"),
        ({"choices": [choice(token_ids=[10, -5])]}, "not an integer from 0"),
        ({"choices": [choice(token_ids=[10, 2**31])]}, "not an integer from 0"),
        ({"choices": [choice(token_ids=[10, 1.5])]}, "not an integer from 0"),
        ({"choices": [choice(token_ids=[10, "2"])]}, "not an integer from 0"),
        ({"choices": [choice(prompt_token_ids=[-1])]}, "prompt_token_ids are not integers"),
        (None, "no choices"),
        ([], "no choices"),
    ],
)
def test_unusable_completions_are_refused(answer: Any, message: str) -> None:
    with pytest.raises(InferenceError, match=message):
        parse_completions(answer, [1], num_choices=1)


def test_generate_prefers_token_ids_over_the_first_logprob_entry() -> None:
    answer = {
        "token_ids": [[7]],
        "logprobs": [[[{"9": -3.0, "7": -0.1}]]],
        "finish_reasons": ["stop"],
        "prompt_token_ids": [1, 4],
    }

    assert parse_generate(answer, [1], num_choices=1) == ([1, 4], [[7]], [[-0.1]], ["stop"])


def test_generate_without_token_ids_takes_the_first_entry() -> None:
    answer = {"logprobs": [[[{"9": -3.0}], [{"2": -0.5}]]], "finish_reasons": ["stop"]}

    assert parse_generate(answer, [1], num_choices=1) == ([1], [[9, 2]], [[-3.0, -0.5]], ["stop"])


def test_generate_with_an_id_that_has_no_logprob_is_refused() -> None:
    answer = {"token_ids": [[7]], "logprobs": [[[{"9": -3.0}]]]}

    with pytest.raises(InferenceError, match="not a finite number"):
        parse_generate(answer, [1], num_choices=1)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"5": -0.5, "6": -1.0}, ([5, 6], [-0.5, -1.0])),
        ([{"5": -0.5}, {"6": -1.0}], ([5, 6], [-0.5, -1.0])),
        ({"5": {"logprob": -0.5, "rank": 1}}, ([5], [-0.5])),
        ({5: -0.5}, ([5], [-0.5])),
        (None, ([], [])),
        ([None], ([], [])),
        ("odd", ([], [])),
    ],
)
def test_topk_entry_is_read_in_every_form(
    entry: Any, expected: tuple[list[int], list[float]]
) -> None:
    assert normalize_topk_entry(entry) == expected


@pytest.mark.parametrize(
    ("value", "num_positions", "expected"),
    [
        ([None, {"5": -1.0}], 2, [None, {"5": -1.0}]),
        ([[None, {"5": -1.0}]], 2, [None, {"5": -1.0}]),
        ([[{"5": -1.0}], [{"6": -1.0}]], 2, [[{"5": -1.0}], [{"6": -1.0}]]),
        ([[[{"5": -1.0}], [{"6": -1.0}]]], 2, [[{"5": -1.0}], [{"6": -1.0}]]),
        ([[{"5": -1.0}]], 1, [[{"5": -1.0}]]),
        ([[[{"5": -1.0}]]], 1, [[{"5": -1.0}]]),
        ([None], 1, [None]),
    ],
)
def test_prompt_rows_accept_both_nestings(
    value: Any, num_positions: int, expected: list[Any]
) -> None:
    assert prompt_rows(value, num_positions) == expected


def test_missing_or_misaligned_prompt_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="no prompt_logprobs"):
        prompt_rows(None, 2)
    with pytest.raises(InferenceError, match="3 prompt logprobs for 2 tokens"):
        prompt_rows([None, {}, {}], 2)
