from __future__ import annotations

from typing import Any

import pytest

from atroposlib.envs.rollouts import (
    Vocabulary,
    as_pair,
    check_lengths,
    check_signal,
    completion_lengths,
)
from atroposlib.errors import GroupError


def group(**changes: Any) -> dict[str, Any]:
    return {
        "tokens": [[1, 2, 3], [1, 4]],
        "masks": [[-100, 2, 3], [-100, 4]],
        "scores": [1.0, 0.0],
        **changes,
    }


class Tensor:
    """As those of torch: has a length, and refuses to be true or false."""

    def __len__(self) -> int:
        return 2

    def __bool__(self) -> bool:
        raise RuntimeError("ambiguous")


@pytest.mark.parametrize(
    ("candidate", "reason"),
    [
        (group(), None),
        (group(scores=[0.5, 0.5]), "scores_equal"),
        (group(group_overrides=None), None),
        (group(group_overrides={"group_size": 2}), None),
        (group(group_overrides={"group_size": 3}), "wrong_size"),
        (group(scores=[1.0]), "malformed"),
        (group(scores=[[1.0], [0.0]]), "malformed"),
        (group(scores=[float("nan"), 0.0]), "malformed"),
        (group(scores=[1e308, 0.0]), "malformed"),
        (group(scores=[10**400, 0]), "malformed"),
        (group(scores=[1e30, -1e30]), None),
        (group(scores=None), "malformed"),
        (group(masks=[[-100, 2], [-100, 4]]), "malformed"),
        ({"tokens": [[1], [2]], "scores": [1.0, 0.0]}, "malformed"),
        ("not a group", "malformed"),
        (group(tokens=Tensor()), "malformed"),
        (group(masks=Tensor()), "malformed"),
        (group(scores=Tensor()), "malformed"),
        (group(tokens=7), "malformed"),
        (group(group_overrides="sft"), "malformed"),
        (group(group_overrides=[{}]), "malformed"),
        (group(group_overrides=[]), None),
        (group(tokens=((1, 2, 3), (1, 4))), None),
    ],
)
def test_check_signal_table(candidate: Any, reason: str | None) -> None:
    admission = check_signal(candidate, group_size=2, scores_must_differ=True)

    assert admission.reason == reason
    assert admission.is_accepted is (reason is None)


def test_check_signal_names_the_field_that_is_no_list() -> None:
    admission = check_signal(group(tokens=Tensor()), group_size=2, scores_must_differ=True)

    assert admission.detail == "tokens: expected a list of lists, not Tensor"


@pytest.mark.parametrize(
    ("changes", "detail"),
    [
        ({"scores": ["right", 0.0]}, "scores[0] is 'right'; expected a number"),
        ({"scores": [1.0, "1.0"]}, "scores[1] is '1.0'; expected a number"),
        ({"scores": [1.0, None]}, "scores[1] is None; expected a number"),
        ({"scores": [[1.0], [0.0]]}, "scores[0] is [1.0]; expected a number"),
        (
            {"inference_logprobs": [[1.0, -0.1, -0.2], [1.0, "x"]]},
            "inference_logprobs[1][1] is 'x'; expected a number",
        ),
        (
            {"inference_logprobs": [[1.0, -0.1, -0.2], None]},
            "inference_logprobs[1] is None; expected a list with one entry per token",
        ),
        ({"tokens": [5, 6]}, "tokens[0] is 5; expected a list with one entry per token"),
    ],
)
def test_check_signal_names_the_value_that_is_no_number(
    changes: dict[str, Any], detail: str
) -> None:
    admission = check_signal(group(**changes), group_size=2, scores_must_differ=True)

    assert admission == ("malformed", detail)


def test_check_signal_group_of_another_size_names_both_sizes() -> None:
    admission = check_signal(group(), group_size=4, scores_must_differ=True)

    assert admission == ("wrong_size", "2 trajectories, expected 4")


def test_check_signal_group_of_one_is_never_equal() -> None:
    single = {"tokens": [[1]], "masks": [[1]], "scores": [0.0]}

    assert check_signal(single, group_size=1, scores_must_differ=True).is_accepted


def test_check_signal_equal_scores_pass_when_not_asked() -> None:
    equal = group(scores=[0.0, 0.0])

    assert check_signal(equal, group_size=2, scores_must_differ=False).is_accepted


@pytest.mark.parametrize(("limit", "reason"), [(-1, None), (0, None), (4, None), (3, "too_long")])
def test_check_lengths_table(limit: int, reason: str | None) -> None:
    assert check_lengths([[1, 2, 3], [1]], max_token_len=limit).reason == reason


def test_completion_lengths_counts_trained_tokens() -> None:
    assert completion_lengths([[-100, 2, 3], [-100, -100]]) == [2, 0]


class Tokenizer:
    """Knows ten ids, the largest of them 40."""

    def __init__(self) -> None:
        self.num_asked = 0

    def __len__(self) -> int:
        return 10

    def get_vocab(self) -> dict[str, int]:
        self.num_asked += 1
        return {f"w{i}": i for i in range(9)} | {"last": 40}


@pytest.mark.parametrize(
    ("tokens", "detail"),
    [
        ([[1, 2], [9]], None),
        ([[1, 40], []], None),
        ([[1], [2, 41]], "tokens[1] holds the id 41, the environment's tokenizer knows 0 to 40"),
        ([[1, -1], [2]], "tokens[0] holds the id -1, the environment's tokenizer knows 0 to 9"),
    ],
)
def test_vocabulary_drops_ids_that_the_tokenizer_does_not_have(
    tokens: list[list[int]], detail: str | None
) -> None:
    admission = Vocabulary(Tokenizer()).check(tokens)

    assert admission.reason == (detail and "outside_vocabulary")
    assert admission.detail.startswith(detail or "")


def test_vocabulary_is_looked_through_once() -> None:
    tokenizer = Tokenizer()
    vocabulary = Vocabulary(tokenizer)

    for _ in range(3):
        assert not vocabulary.check([[99]]).is_accepted

    assert tokenizer.num_asked == 1


@pytest.mark.parametrize("tokenizer", [None, object(), []])
def test_vocabulary_of_a_tokenizer_that_does_not_say_refuses_nothing(tokenizer: Any) -> None:
    tokens = [[10**9, -5]]

    assert Vocabulary(tokenizer).check(tokens).is_accepted


@pytest.mark.parametrize("token", ["3", None])
def test_vocabulary_names_a_token_that_is_no_number(token: Any) -> None:
    admission = Vocabulary("abcdefgh").check([[1, 2], [1, token]])

    assert admission == ("malformed", f"tokens[1][1] is {token!r}; expected a number")


@pytest.mark.parametrize("backlog", [3, "item", {"question": "?"}])
def test_backlog_that_is_no_list_of_items_is_refused(backlog: Any) -> None:
    with pytest.raises(GroupError, match=r"as second value; expected a list of items"):
        as_pair((group(), backlog))
