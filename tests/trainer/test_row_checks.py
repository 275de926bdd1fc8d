"""Groups with odd values: right, known to be empty, or refused naming the path."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from atroposlib.errors import ConfigError, GroupError
from example_trainer.data import pad_data_to_good_offset
from example_trainer.rows import RowRules, rows_from_group
from tests.trainer.tiny import group

L = 5  # tokens of each trajectory
NAN = math.nan
RULES = RowRules(seq_len=64)
REFERENCE = RowRules(seq_len=64, uses_reference=True)
TEACHER = RowRules(seq_len=64, uses_teacher=True)


def pair(**extra):
    """Two trajectories of five tokens, three of them the prompt."""
    return group([[7, 8], [9, 9]], [1.0, 0.0]) | extra


def teacher(ids, logprobs):
    return {"distill_token_ids": [[ids] * L] * 2, "distill_logprobs": [[logprobs] * L] * 2}


@pytest.mark.parametrize(
    ("extra", "path"),
    [
        ({"scores": [NAN, 0.0]}, r"scores\[0\]: nan"),
        ({"scores": [1e308, -1e308]}, r"scores\[0\]: 1e\+308; expected a score within"),
        ({"advantages": [[0.0] * L, [1e308] * L]}, r"advantages\[1\]\[0\]: 1e\+308 is beyond"),
        ({"advantages": [10**400, 0]}, "arithmetic with its numbers .* too large"),
        ({"group_overrides": {"temperature": 10**400}}, r"group_overrides\.temperature: 1000"),
        ({"overrides": [{"temperature": 1e308}, {}]}, r"overrides\[0\]\.temperature: 1e\+308"),
        ({"scores": [1.0]}, "scores: 1 entries, tokens has 2"),
        ({"inference_logprobs": [[1.0, 1.0, 1.0, NAN, -1.0]] * 2}, r"inference_logprobs\[0\]\[3\]"),
        ({"inference_logprobs": [[1.0, 1.0, 1.0, -1.0]] * 2}, r"inference_logprobs\[0\]: 4"),
        ({"advantages": [[0.0] * L, [0.0, NAN, 0.0, 0.0, 0.0]]}, r"advantages\[1\]\[1\]: nan"),
        ({"advantages": [0.5, math.inf]}, r"advantages\[1\]\[0\]: inf"),
        ({"advantages": [[0.0] * L]}, "advantages: 1 entries, tokens has 2"),
        ({"advantages": [["a"] * L] * 2}, r"advantages\[0\]\[0\]: 'a'"),
        ({"overrides": [{"set_advantage_to_zero": True}]}, "overrides: 1 entries, tokens has 2"),
        ({"overrides": [{}] * 3}, "overrides: 3 entries, tokens has 2"),
        ({"overrides": {"sft": True}}, "overrides: expected a list"),
        ({"overrides": ["sft", {}]}, r"overrides\[0\]: expected an object, got 'sft'"),
        ({"overrides": [{"temperature": "hot"}, {}]}, r"overrides\[0\]\.temperature: 'hot'"),
        ({"group_overrides": {"temperature": NAN}}, r"group_overrides\.temperature: nan"),
        ({"group_overrides": ["sft"]}, "group_overrides: expected an object"),
        ({"generation_params": "hot"}, "generation_params: expected an object"),
        ({"generation_params": {"temperature": math.inf}}, r"generation_params\.temperature: inf"),
        ({"generation_params": {"top_p": "0.9"}}, r"generation_params\.top_p: '0\.9'"),
        # Zeros and ones would be trained as the tokens 0 and 1.
        ({"masks": [[0, 0, 0, 1, 1]] * 2}, r"masks\[0\]\[0\]: 0; expected the token, 1"),
        ({"masks": [[-100, -100, -100, 7, -1], [-100] * L]}, r"masks\[0\]\[4\]: -1"),
        ({"tokens": [[1, 2, -3, 7, 8], [1] * L]}, r"tokens\[0\]\[2\]: -3 is not a token id"),
    ],
)
def test_odd_value_is_refused_with_its_path(extra, path):
    with pytest.raises(GroupError, match=f"group 4: {path}"):
        rows_from_group(pair(**extra), RULES, name="group 4")


def rows_with(value, *, of=1.0):
    """Two rows of L entries; the fourth of the first is the value."""
    return [[of, of, of, value, of], [of] * L]


@pytest.mark.parametrize(
    ("extra", "path"),
    [
        ({"tokens": "ab"}, "tokens: expected a list, got 'ab'"),
        ({"tokens": [5, 5]}, r"tokens\[0\]: expected a list, got 5"),
        ({"tokens": rows_with("a", of=1)}, r"tokens\[0\]\[3\]: expected an integer, got 'a'"),
        ({"tokens": rows_with(7.0, of=1)}, r"tokens\[0\]\[3\]: expected an integer, got 7\.0"),
        ({"tokens": rows_with(None, of=1)}, r"tokens\[0\]\[3\]: expected an integer, got None"),
        ({"masks": 3}, "masks: expected a list, got 3"),
        ({"masks": [[-100] * L, 3]}, r"masks\[1\]: expected a list, got 3"),
        ({"masks": rows_with("7", of=-100)}, r"masks\[0\]\[3\]: expected an integer, got '7'"),
        ({"scores": 1.0}, r"scores: expected a list, got 1\.0"),
        ({"scores": [1.0, "2"]}, r"scores\[1\]: expected a number, got '2'"),
        ({"inference_logprobs": True}, "inference_logprobs: expected a list, got True"),
        ({"inference_logprobs": rows_with("x")}, r"inference_logprobs\[0\]\[3\]: expected a num"),
        ({"advantages": 1.5}, r"advantages: expected a list, got 1\.5"),
        ({"advantages": [None, 1.0]}, r"advantages\[0\]: expected a list, got None"),
        ({"policy_version": "x"}, "policy_version: expected an integer or null, got 'x'"),
        ({"policy_version": -(10**400)}, "policy_version: expected an integer or null"),
        ({"token_versions": 5}, "token_versions: expected a list of runs"),
        ({"token_versions": [5, None]}, r"token_versions\[0\]: expected a list of runs"),
        ({"token_versions": [[5], None]}, r"token_versions\[0\]\[0\]: expected \[version"),
        ({"token_versions": [[["a", L]], None]}, r"token_versions\[0\]\[0\]: expected \[version"),
        ({"token_versions": [[[3, 5.0]], None]}, r"token_versions\[0\]\[0\]: expected \[version"),
    ],
)
def test_rows_of_a_group_with_wrong_types_are_refused_with_their_path(extra, path):
    with pytest.raises(GroupError, match=f"group 4: {path}"):
        rows_from_group(pair(**extra), RULES, name="group 4")


@pytest.mark.parametrize(
    ("rules", "extra", "path"),
    [
        (REFERENCE, {"ref_logprobs": 1}, "ref_logprobs: expected a list, got 1"),
        (REFERENCE, {"ref_logprobs": [1, 1]}, r"ref_logprobs\[0\]: expected a list, got 1"),
        (REFERENCE, {"ref_logprobs": rows_with("x")}, r"ref_logprobs\[0\]\[3\]: 'x'"),
        (TEACHER, teacher(4, [-1.0]), r"distill_token_ids\[0\]\[0\]: expected a list, got 4"),
        (TEACHER, teacher(["x"], [-1.0]), r"distill_token_ids\[0\]\[0\]\[0\]: expected an int"),
        (TEACHER, teacher([4], -1.0), r"distill_logprobs\[0\]\[0\]: expected a list"),
        (TEACHER, teacher([4], ["x"]), r"distill_logprobs\[0\]\[0\]\[0\]: expected a number"),
        (TEACHER, teacher([4], [-1.0]) | {"distill_logprobs": "ab"}, "distill_logprobs: expected"),
    ],
)
def test_rows_of_optional_fields_with_wrong_types_are_refused_with_their_path(rules, extra, path):
    with pytest.raises(GroupError, match=path):
        rows_from_group(pair(**extra), rules)


@pytest.mark.parametrize(
    ("extra", "path"),
    [
        # 0 in float32: the logits become nan.
        ({"overrides": [{"temperature": 1e-320}, {}]}, r"overrides\[0\]\.temperature: 1e-320; exp"),
        ({"generation_params": {"temperature": 1e-30}}, r"generation_params\.temperature: 1e-30"),
        ({"group_overrides": {"temperature": 1e30}}, r"group_overrides\.temperature: 1e\+30"),
        (
            {"advantages": [[1e30] * L, [0.0] * L]},
            r"advantages\[0\]\[0\]: 1e\+30 is beyond ±1e\+06",
        ),
        ({"advantages": [0.0, -1e30]}, r"advantages\[1\]\[0\]: -1e\+30 is beyond ±1e\+06"),
        (
            {"inference_logprobs": rows_with(-1e300)},
            r"inference_logprobs\[0\]\[3\]: -1e\+300 is bey",
        ),
        (
            {"inference_logprobs": rows_with(500.0)},
            r"inference_logprobs\[0\]\[3\]: 500\.0; expected",
        ),
        ({"inference_logprobs": rows_with(0.5)}, r"inference_logprobs\[0\]\[3\]: 0\.5; expected"),
        ({"inference_logprobs": rows_with(-1e20)}, r"inference_logprobs\[0\]\[3\]: -1e\+20; exp"),
    ],
)
def test_rows_of_a_group_that_would_cancel_the_step_are_refused_with_their_path(extra, path):
    with pytest.raises(GroupError, match=f"group 4: {path}"):
        rows_from_group(pair(**extra), RULES, name="group 4")


def test_rows_with_a_huge_score_and_without_a_deviation_are_refused():
    given = group([[7, 8], [9, 9]], [1e30, -1e30])

    with pytest.raises(GroupError, match=r"advantages\[0\]\[0\]: 1e\+30 is beyond"):
        rows_from_group(given, replace(RULES, advantage_std="none"))


@pytest.mark.parametrize("logprob", [1.0, 1e-3, 0.0, -0.0, -9999.0])
def test_rows_with_logprobs_that_engines_report_are_taken(logprob):
    rows = rows_from_group(pair(inference_logprobs=rows_with(logprob)), RULES)

    assert rows[0].inference_logprobs == [1.0, 1.0, 1.0, logprob, 1.0]


def test_rows_with_a_positive_logprob_of_a_masked_token_are_taken():
    rows = rows_from_group(pair(inference_logprobs=[[5.0, 1.0, 1.0, -1.0, -1.0]] * 2), RULES)

    assert len(rows) == 2


@pytest.mark.parametrize(
    ("temperature", "used"), [(0, 1.0), (-1, 1.0), (1e-4, 1e-4), (1, 1.0), (1e4, 1e4)]
)
def test_rows_with_a_temperature_that_engines_use_are_taken(temperature, used):
    rows = rows_from_group(pair(generation_params={"temperature": temperature}), RULES)

    assert rows[0].temperature == used


def test_token_of_another_vocabulary_is_refused():
    rules = RowRules(seq_len=64, vocabulary=9)

    with pytest.raises(GroupError, match=r"tokens\[1\]\[3\]: id 9, .* must use one tokenizer"):
        rows_from_group(pair(), rules)


@pytest.mark.parametrize(
    ("rules", "extra", "path"),
    [
        (REFERENCE, {"ref_logprobs": [[NAN] * L] * 2}, r"ref_logprobs\[0\]\[0\]: nan"),
        (REFERENCE, {"ref_logprobs": [[-1.0] * L]}, "ref_logprobs: 1 entries"),
        (TEACHER, teacher([4], [NAN]), r"distill_logprobs\[0\]\[0\]\[0\]: nan"),
        # Only -1 pads; another negative id would be taken for the token 0.
        (
            replace(TEACHER, vocabulary=10),
            teacher([10], [-1.0]),
            r"distill_token_ids.*: id 10, the",
        ),
        (TEACHER, teacher([4], [-1e308]), r"distill_logprobs\[0\]\[0\]\[0\]: -1e\+308 is beyond"),
        (TEACHER, teacher([-2], [-1.0]), r"distill_token_ids\[0\]\[0\]: -2 is neither"),
    ],
)
def test_odd_value_of_what_stands_beside_the_policy_loss_is_refused(rules, extra, path):
    with pytest.raises(GroupError, match=path):
        rows_from_group(pair(**extra), rules)


OPTIONAL = [
    "advantages", "ref_logprobs", "messages", "inference_logprobs", "overrides", "images",
    "distill_token_ids", "distill_logprobs",
]  # fmt: skip


@pytest.mark.parametrize("empty", [[], [None, None], [[], []]], ids=["none", "nulls", "lists"])
@pytest.mark.parametrize("name", OPTIONAL)
def test_field_that_was_never_filled_counts_as_absent(name, empty):
    assert rows_from_group(pair(**{name: empty}), RULES) == rows_from_group(pair(), RULES)


def test_group_is_not_changed_by_being_read():
    given = pair(images=[None, None], advantages=[])

    rows_from_group(given, RULES)

    assert (given["images"], given["advantages"]) == ([None, None], [])


@pytest.mark.parametrize("nothing", [None, []])
def test_contract_door_says_that_there_is_no_batch(nothing):
    with pytest.raises(GroupError, match="batch: no groups"):
        pad_data_to_good_offset({"batch": nothing}, 2)


SFT = {"group_overrides": {"sft": True}}
SILENCED = {"overrides": [{"set_advantage_to_zero": True}] * 2}


def test_policy_loss_refuses_tokens_made_from_text_in_one_line():
    with pytest.raises(ConfigError) as refused:
        rows_from_group(pair(tokenized_from_text=True), RULES)

    assert "tokenized_from_text" in str(refused.value)
    assert "--allow-tokenized-from-text" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("extra", "rules"),
    [
        ({}, RowRules(seq_len=64, allow_tokenized_from_text=True)),
        ({}, RowRules(seq_len=64, uses_rewards=False, uses_teacher=True)),
        (SFT, RULES),
        (SILENCED, RULES),
    ],
)
def test_tokens_made_from_text_are_taken_without_a_policy_gradient_or_where_allowed(extra, rules):
    rows = rows_from_group(pair(tokenized_from_text=True, **extra), rules)

    assert len(rows) == 2


def test_placeholder_tokens_are_refused_whatever_is_allowed():
    tokens = list(range(128))
    given = {"tokens": [tokens], "masks": [[-100, *tokens[1:]]], "scores": [1.0]}

    with pytest.raises(ConfigError, match="ATROPOS_ALLOW_DUMMY_MANAGED_SERVER"):
        rows_from_group(given, RowRules(seq_len=256, allow_tokenized_from_text=True))
