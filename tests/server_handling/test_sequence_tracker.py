from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from atroposlib.envs.server_handling.turn_recording import SequenceNode, continue_ids, make_node
from atroposlib.scored_data import IGNORE_INDEX, MASKED_LOGPROB

EOS = 2
WORDS = st.integers(min_value=3, max_value=9)
REPLIES = st.lists(WORDS, max_size=5)
PROMPTS = st.lists(WORDS, min_size=1, max_size=5)  # a turn always brings at least its role


def node_of(
    prompt: Sequence[int], completion: Sequence[int], parent: SequenceNode | None = None
) -> SequenceNode:
    return make_node(
        full_text="",
        prompt_ids=prompt,
        completion_ids=completion,
        completion_logprobs=[-0.5] * len(completion),
        finish_reason="stop",
        parent=parent,
    )


def with_text(text: str) -> SequenceNode:
    return SequenceNode(full_text=text, tokens=[], masked_tokens=[], logprobs=[])


def is_eos(token_id: int) -> bool:
    return token_id == EOS


def test_fresh_node_masks_the_prompt_only() -> None:
    node = node_of([1, 72], [105, 2])

    assert node.tokens == [1, 72, 105, 2]
    assert node.masked_tokens == [IGNORE_INDEX, IGNORE_INDEX, 105, 2]
    assert node.logprobs == [MASKED_LOGPROB, MASKED_LOGPROB, -0.5, -0.5]
    assert node.metadata == {"finish_reason": "stop"}


def test_continued_node_keeps_what_was_sampled_before() -> None:
    parent = node_of([1, 5], [6, EOS])

    node = node_of([1, 5, 6, EOS, 7], [8], parent)

    assert node.masked_tokens == [IGNORE_INDEX, IGNORE_INDEX, 6, EOS, IGNORE_INDEX, 8]
    assert node.logprobs == [1.0, 1.0, -0.5, -0.5, 1.0, -0.5]


def test_masks_are_carried_only_as_far_as_the_engine_read_the_same_tokens() -> None:
    parent = node_of([1, 5], [6, 7])

    node = node_of([1, 5, 6, 9, 9], [8], parent)

    assert node.masked_tokens == [IGNORE_INDEX, IGNORE_INDEX, 6, IGNORE_INDEX, IGNORE_INDEX, 8]


def test_shorter_prompt_than_the_parent_is_aligned() -> None:
    parent = node_of([1, 5], [6, 7])

    assert node_of([1, 5, 6], [8], parent).masked_tokens == [IGNORE_INDEX, IGNORE_INDEX, 6, 8]


@pytest.mark.parametrize(
    ("logprobs", "expected"), [([-0.5], [-0.5, 1.0]), ([-0.5, -0.1, -0.2], [-0.5, -0.1])]
)
def test_logprobs_are_padded_or_cut_to_the_completion(
    logprobs: list[float], expected: list[float]
) -> None:
    node = make_node(
        full_text="x",
        prompt_ids=[1],
        completion_ids=[5, 6],
        completion_logprobs=logprobs,
        finish_reason="stop",
        parent=None,
    )

    assert node.logprobs == [1.0, *expected]


@pytest.mark.parametrize(
    ("completion", "added", "expected"),
    [
        ([6, EOS], [EOS, 7], [1, 5, 6, EOS, 7]),  # the template repeats the sampled end
        ([6], [EOS, 7], [1, 5, 6, EOS, 7]),  # cut by length: the end is new
        ([6, EOS], [7], [1, 5, 6, EOS, 7]),  # the template writes no end
        ([6, EOS, EOS], [EOS, EOS, 7], [1, 5, 6, EOS, EOS, 7]),
        ([6, EOS], [EOS, EOS, 7], [1, 5, 6, EOS, EOS, 7]),
        ([6, 7], [7, 8], [1, 5, 6, 7, 7, 8]),  # a visible token is never taken for an end
        ([6, EOS], [], [1, 5, 6, EOS]),
    ],
)
def test_shared_end_of_turn_is_kept_once(
    completion: list[int], added: list[int], expected: list[int]
) -> None:
    assert continue_ids(node_of([1, 5], completion), added, is_eos) == expected


def test_end_of_turn_written_by_a_prompt_is_not_an_overlap() -> None:
    node = node_of([1, EOS], [])

    assert continue_ids(node, [EOS, 7], is_eos) == [1, EOS, EOS, 7]


@given(st.lists(st.tuples(PROMPTS, REPLIES), min_size=1, max_size=5), st.data())
def test_conversation_of_any_length_loses_and_doubles_nothing(
    turns: list[tuple[list[int], list[int]]], data: st.DataObject
) -> None:
    """Rebuild a conversation turn by turn and compare it with the one written in one piece."""
    node: SequenceNode | None = None
    expected: list[int] = []
    expected_masks: list[int] = []
    owes_end = False
    for prompt, reply in turns:
        ends = data.draw(st.booleans())
        completion = [*reply, EOS] if ends else reply
        added = [EOS, *prompt] if node is not None else prompt
        ids = prompt if node is None else continue_ids(node, added, is_eos)
        node = node_of(ids, completion, node)
        new = [EOS, *prompt] if owes_end else prompt
        expected += new + completion
        expected_masks += [IGNORE_INDEX] * len(new) + completion
        owes_end = not ends

    assert node is not None
    assert node.tokens == expected
    assert node.masked_tokens == expected_masks
    assert [value != MASKED_LOGPROB for value in node.logprobs] == [
        mask != IGNORE_INDEX for mask in expected_masks
    ]


def test_make_node_turns_numbers_of_another_kind_into_those_of_the_fields() -> None:
    node = make_node(
        full_text="ab",
        prompt_ids=[1, 72],
        completion_ids=[True, 2.0],  # type: ignore[list-item]
        completion_logprobs=[0, -1],
        finish_reason="stop",
        parent=None,
    )

    assert [type(token) for token in node.tokens] == [int] * 4
    assert [type(value) for value in node.logprobs] == [float] * 4


def test_make_node_ids_that_are_no_numbers_raise() -> None:
    with pytest.raises(ValidationError):
        make_node(
            full_text="a",
            prompt_ids=[1],
            completion_ids=["a"],  # type: ignore[list-item]
            completion_logprobs=[-0.1],
            finish_reason="stop",
            parent=None,
        )
