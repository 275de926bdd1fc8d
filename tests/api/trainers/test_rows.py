"""Rows of groups for other trainers: what is carried over, and what is rejected by name."""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from atroposlib.api.client import LeasedBatch
from atroposlib.api.trainers import FaceRules, TrainerRow, groups_of_rows
from atroposlib.api.trainers.skyrl import generator_output
from atroposlib.api.trainers.verl import data_proto
from atroposlib.errors import ConfigError, GroupError, MissingExtraError

PLAIN = FaceRules("the trainer")
GROUP = {
    "tokens": [[1, 2, 7, 9, 8], [1, 2, 6]],
    "masks": [[-100, -100, 7, -100, 8], [-100, -100, 6]],
    "scores": [1, 0.25],
    "inference_logprobs": [[1.0, 1.0, -0.5, 1.0, -0.25], [1.0, 1.0, -2.0]],
}


def rows_of(rules: FaceRules = PLAIN, **fields: Any) -> list[TrainerRow]:
    (rows,) = groups_of_rows(LeasedBatch([{**GROUP, **fields}], "1"), rules)
    return rows


def test_rows_keep_every_span_of_several_turns() -> None:
    first, second = rows_of(policy_version=3, finish_reasons=["stop", "length"])

    assert first.tokens == [1, 2, 7, 9, 8]
    assert first.is_trained == [0, 0, 1, 0, 1]
    assert first.logprobs == [0.0, 0.0, -0.5, 0.0, -0.25]
    assert first.tokens[first.response] == [7, 9, 8]
    assert (first.score, second.score) == (1.0, 0.25)
    assert (first.policy_version, second.finish_reason) == (3, "length")


def test_rows_keep_the_text_of_earlier_environments_whole() -> None:
    first, second = rows_of(messages=["a whole text", [{"role": "user", "content": "hello"}]])

    assert first.messages == ["a whole text"]
    assert second.messages == [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("name", ["uid", "rm_scores", "__num_turns__"])
def test_reward_parts_with_the_name_of_another_column_of_verl_are_rejected(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    verl = SimpleNamespace(DataProto=SimpleNamespace(from_dict=lambda **made: made))
    monkeypatch.setitem(sys.modules, "verl", verl)

    def made_of(part: str) -> Any:
        group = {**GROUP, "reward_parts": [{part: 1.0}, {part: 2.0}]}
        return data_proto(LeasedBatch([group], "1"), pad_token_id=0)

    with pytest.raises(GroupError, match=f"reward_parts: '{name}' is the name of another column"):
        made_of(name)
    assert list(made_of("exact")["non_tensors"]["exact"]) == [1.0, 2.0]


def test_rows_of_a_masked_trajectory_have_a_prompt_of_one_token() -> None:
    first, _ = rows_of(masks=[[-100] * 5, [-100, -100, 6]])

    assert (first.num_trained_tokens, first.num_prompt_tokens) == (0, 1)


def test_rows_have_advantages_and_overrides_where_the_trainer_takes_them() -> None:
    rules = FaceRules("the trainer", takes_advantages=True)

    first, second = rows_of(
        rules,
        advantages=[[9.0, 9.0, 1.5, 9.0, 2.5], -1.0],  # an earlier environment: one number
        overrides=[{}, {"set_advantage_to_zero": True}],
    )

    assert first.advantages == [0.0, 0.0, 1.5, 0.0, 2.5]
    assert second.advantages == [0.0, 0.0, -1.0]
    assert (first.has_zeroed_advantage, second.has_zeroed_advantage) == (False, True)


def test_rows_of_unknown_logprobs_have_none_if_the_trainer_does_without() -> None:
    unknown = {"inference_logprobs": [[1.0] * 5, [1.0, 1.0, -2.0]]}
    ignored = ("inference_logprobs",)

    rows = rows_of(FaceRules("the trainer", ignored_fields=ignored), **unknown)

    assert [row.logprobs for row in rows] == [None, None]
    with pytest.raises(GroupError, match="unknown, at a trained token"):
        rows_of(FaceRules("it", needs_logprobs=True, ignored_fields=ignored), **unknown)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"images": ["x"]}, "group 0: images: not supported by the trainer"),
        ({"ref_logprobs": [[0.0] * 5, [0.0] * 3]}, "ref_logprobs: not supported"),
        ({"distill_token_ids": [[[1]]]}, "distill_token_ids: not supported"),
        ({"advantages": [[0.0] * 5, [0.0] * 3]}, "advantages: the trainer computes its own"),
        ({"overrides": [{"set_advantage_to_zero": True}, {}]}, r"overrides\[0\].set_advantage"),
        ({"overrides": [{"sft": True}, {}]}, "sft of trajectory 0"),
        ({"overrides": [{"clip": 1}, {}]}, r"overrides\[0\].clip: not supported"),
        ({"overrides": [{}]}, "overrides: 1 entries, tokens has 2"),
        ({"overrides": {"sft": True}}, "overrides: expected a list"),
        ({"overrides": [3, {}]}, r"overrides\[0\]: expected an object"),
        ({"group_overrides": {"clip": 1}}, "group_overrides.clip: not supported"),
        ({"masks": [[-100, -100, 1, -100, 1], [-100, -100, 6]]}, r"masks\[0\]\[2\]: 1; expected"),
        ({"masks": [[1, 2, 7, 9, 8], [-100, -100, 6]]}, r"masks\[0\]: a trajectory needs a prompt"),
        ({"tokens": [[1, 2, 7, 9, 8], [1, -2, 6]]}, r"tokens\[1\]\[1\]: -2 is not a token id"),
        ({"scores": [1.0]}, "scores: 1 entries"),
        (
            {"inference_logprobs": [[1.0, 1.0, -0.5, 1.0, 1.0], [1.0, 1.0, -2.0]]},
            r"inference_logprobs\[0\]\[4\]: 1, unknown, at a trained token",
        ),
    ],
)
def test_rows_reject_what_the_trainer_cannot_use(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(GroupError, match=message):
        rows_of(**fields)


@pytest.mark.parametrize(
    ("rules", "fields", "message"),
    [
        (FaceRules("X", temperature=0.5), {}, "sampled at temperature 1, that of X is 0.5"),
        (FaceRules("X", group_size=4), {}, "2 trajectories, X expects 4"),
        (PLAIN, {"tokenized_from_text": True}, "tokenized_from_text"),
        (
            PLAIN,
            {
                "tokens": [list(range(128))],
                "masks": [[-100, *range(1, 128)]],
                "scores": [1.0],
                "inference_logprobs": None,
            },
            "placeholder tokens",
        ),
    ],
)
def test_rows_reject_settings_that_differ(
    rules: FaceRules, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        rows_of(rules, **fields)


def test_rows_without_logprobs_are_rejected_where_they_are_needed() -> None:
    with pytest.raises(GroupError, match="inference_logprobs: missing, and X needs them"):
        rows_of(FaceRules("X", needs_logprobs=True), inference_logprobs=None)

    assert rows_of(inference_logprobs=None)[0].logprobs is None


def test_rows_leave_out_the_fields_that_are_ignored() -> None:
    rules = FaceRules("X", ignored_fields=("images", "advantages", "set_advantage_to_zero"))

    rows = rows_of(
        rules,
        images=["x"],
        advantages=[[1.0] * 5, [1.0] * 3],
        overrides=[{"set_advantage_to_zero": True}, {}],
    )

    assert [row.advantages for row in rows] == [None, None]


@pytest.mark.parametrize("name", ["skyrl", "verl"])
def test_a_trainer_that_is_not_installed_is_named_with_its_extra(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    group = LeasedBatch([GROUP], "1")
    convert = {"skyrl": generator_output, "verl": partial(data_proto, pad_token_id=0)}[name]

    with pytest.raises(MissingExtraError, match=rf"{name} is not installed; .*'\.\[{name}\]'"):
        convert(group)
