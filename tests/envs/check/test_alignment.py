"""Laying trajectories over what the model wrote; 1 is bos, 2 eos, letters their code points."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from atroposlib.envs.checks.group_checks import align, shape_problem
from atroposlib.envs.checks.scripted_model import CharTokenizer, ScriptedSample, known_logprob

PROMPT = [1, ord("Q"), ord("?")]
IDS = [ord("y"), ord("e"), ord("s"), 2]
KNOWN = [known_logprob(token, i) for i, token in enumerate(IDS)]
REPLY = ScriptedSample("gold", "<s>Q?", PROMPT, IDS, KNOWN)
TOKENS = PROMPT + IDS
MASKS = [-100, -100, -100, *IDS]
LOGPROBS = [1.0, 1.0, 1.0, *KNOWN]


def problems(tokens: Any = TOKENS, masks: Any = MASKS, logprobs: Any = LOGPROBS) -> list[str]:
    found = align("[0]", tokens, masks, logprobs, [REPLY], CharTokenizer())
    texts = (found.mask_problem, found.logprob_problem, found.context_problem)
    return [text for text in texts if text]


def test_align_exact_trajectory_has_no_problem_and_one_span() -> None:
    found = align("[0]", TOKENS, MASKS, LOGPROBS, [REPLY], CharTokenizer())

    assert problems() == []
    assert [(span.start, span.end, span.is_exact) for span in found.spans] == [(3, 7, True)]


@pytest.mark.parametrize(
    ("tokens", "masks", "logprobs"),
    [
        (TOKENS[:-1], MASKS[:-1], LOGPROBS[:-1]),  # the end of turn left out
        ([*TOKENS, 10], [*MASKS, 10], None),  # the template's newline trained too
        (TOKENS, [-100] * 5 + IDS[2:], [1.0] * 5 + KNOWN[2:]),  # only the end trained
        (TOKENS, [-100] * 7, [1.0] * 7),  # masked
        (TOKENS, MASKS, None),
    ],
)
def test_align_harmless_variant_has_no_problem(tokens: Any, masks: Any, logprobs: Any) -> None:
    assert problems(tokens, masks, logprobs) == []


@pytest.mark.parametrize(
    ("tokens", "masks", "omits_end"),
    [
        (TOKENS[:-1], MASKS[:-1], True),
        (TOKENS, [*MASKS[:-1], -100], True),
        (TOKENS, MASKS, False),
        ([*TOKENS, 10], [*MASKS, 10], False),
        (TOKENS, [-100] * 6 + IDS[-1:], False),
        (TOKENS, [-100] * 7, False),
    ],
)
def test_align_reply_without_its_end_of_turn(tokens: Any, masks: Any, omits_end: bool) -> None:
    truncated = dataclasses.replace(REPLY, ids=IDS[:-1], logprobs=KNOWN[:-1])

    assert (
        align("[0]", tokens, masks, None, [REPLY], CharTokenizer()).omits_end,
        align("[0]", tokens, masks, None, [truncated], CharTokenizer()).omits_end,
    ) == (omits_end, False)


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ([-100, -100, -100, 1, 1, 1, 1], "masks[0][3] is 1; expected -100 or the token, 121 ('y')"),
        (TOKENS, "trains on 2 tokens that the model did not generate, from position 1: 'Q?yes'"),
    ],
)
def test_align_wrong_mask_names_position_and_text(masks: Any, message: str) -> None:
    (problem,) = problems(masks=masks)

    assert message in problem


@pytest.mark.parametrize(
    ("logprobs", "message"),
    [
        ([*LOGPROBS[1:], 1.0], "shifted: each is 1 position too early"),
        ([1.0, *LOGPROBS[:-1]], "shifted: each is 1 position too late"),
        ([1.0] * 3 + [0.0] * 4, "inference_logprobs[0][3] is 0; the engine reported"),
        ([0.0, *LOGPROBS[1:]], "is 0 where the mask is -100; expected 1.0"),
    ],
)
def test_align_wrong_logprobs_say_how(logprobs: Any, message: str) -> None:
    (problem,) = problems(logprobs=logprobs)

    assert message in problem


def test_align_other_context_names_the_first_difference() -> None:
    other = [1, ord("Q"), ord("!"), ord("?")]

    (problem,) = problems([*other, *IDS], [-100] * 4 + IDS, None)

    assert "the model received 3; the first difference is at 2: '!?'" in problem


def test_known_logprob_of_neighbours_differs() -> None:
    values = [known_logprob(97, i) for i in range(50)]

    assert all(a != b for a, b in itertools.pairwise(values))
    assert max(values) < 0


def test_align_demonstration_may_train_on_tokens_of_a_data_set() -> None:
    found = align("[0]", TOKENS, TOKENS, None, [], CharTokenizer(), is_demonstration=True)
    wrong = align(
        "[0]", TOKENS, [*TOKENS[:-1], 9], None, [], CharTokenizer(), is_demonstration=True
    )

    assert found.mask_problem is None
    assert "masks[0][6] is 9" in (wrong.mask_problem or "")


def test_advantages_that_a_trainer_ignores_may_have_any_length() -> None:
    group: dict[str, Any] = {
        "tokens": [[1, 2], [1, 2]],
        "masks": [[-100, 2], [-100, 2]],
        "scores": [1.0, 0.0],
        "advantages": [[0.5], 0.0],
    }

    assert "advantages[0]: 1 entries, tokens[0] has 2" in str(shape_problem(group, group_size=2))
    for overrides in ([{"set_advantage_to_zero": True}, {}], [{"sft": True}, {}]):
        assert shape_problem({**group, "overrides": overrides}, group_size=2) is None


@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        ("ref_logprobs", [[-1.0, -1.0], [-1.0]], "ref_logprobs[1]: 1 entries, tokens[1] has 2"),
        ("distill_token_ids", [[[7], [7]], [[7]]], "distill_token_ids[1]: 1 entries"),
        ("advantages", [0.5], "advantages: 1 entries; expected one for each of 2"),
        ("messages", [[{"role": "user", "content": "x"}]], "messages: 1 entries"),
        ("overrides", [{}, {}, {}], "overrides: 3 entries"),
        ("finish_reasons", ["stop"], "finish_reasons: 1 entries"),
    ],
)
def test_fields_of_each_trajectory_have_the_counts_of_the_tokens(
    field: str, values: Any, message: str
) -> None:
    group: dict[str, Any] = {
        "tokens": [[1, 2], [1, 2]], "masks": [[-100, 2], [-100, 2]], "scores": [1.0, 0.0]
    }  # fmt: skip

    assert message in str(shape_problem({**group, field: values}, group_size=2))
    assert shape_problem({**group, field: []}, group_size=2) is None
    assert shape_problem({**group, field: None}, group_size=2) is None
