from __future__ import annotations

from atroposlib.viewer.pages.compare import difference
from atroposlib.viewer.pages.markup import block, number, sparkline
from atroposlib.viewer.rollouts import group_of
from tests.viewer.groups import ATTACKS, chat


def test_difference_gives_both_texts_back_and_marks_what_only_one_has() -> None:
    start, pairs, end = difference("so it is 31441816.0 parts", "so it is 31441816 parts")

    assert (start, end) == ("so it is 31441816", " parts")
    assert pairs == [(False, (".0", ""))]


def test_difference_of_long_texts_compares_lines() -> None:
    lines = [f"line {i}\n" for i in range(2000)]
    left, right = "a\n" + "".join(lines) + "b", "c\n" + "".join(lines) + "d"

    start, pairs, end = difference(left, right)

    assert start + "".join(texts[0] for _, texts in pairs) + end == left
    assert start + "".join(texts[1] for _, texts in pairs) + end == right
    assert max(len(texts[0]) for is_same, texts in pairs if is_same) > 10_000


def test_advantage_is_the_distance_from_the_mean_in_deviations() -> None:
    group = group_of({"scores": [1.0, 0.0, 0.0, 1.0], "messages": [[], [], [], []]})
    equal = group_of({"scores": [1.0, 1.0], "messages": [[], []]})

    # mean 0.5, deviation 0.5
    assert [group.advantage(rollout) for rollout in group.rollouts] == [1.0, -1.0, -1.0, 1.0]
    assert [equal.advantage(rollout) for rollout in equal.rollouts] == [0.0, 0.0]


def test_shared_messages_end_before_the_first_answer() -> None:
    same = chat("question", "answer")

    group = group_of({"scores": [1, 1], "messages": [same, same]})
    other = group_of({"scores": [1, 1], "messages": [same, chat("another", "answer")]})

    assert group.num_shared_messages == 1
    assert other.num_shared_messages == 0


def test_blocks_escape_every_attack_and_fold_what_is_long() -> None:
    markup = block("".join(ATTACKS) + "x" * 30_000)

    assert "<script" not in markup
    assert "<img" not in markup
    assert "\x1b" not in markup
    assert "\u202e" not in markup
    assert "more characters</summary>" in markup
    markup.encode()


def test_numbers_are_short() -> None:
    written = [number(value) for value in (None, 0, 1.0, -0.1, 0.123456, 12345, 1234.56)]

    assert written == ["-", "0", "1", "-0.1", "0.123", "12,345", "1,234.6"]
    assert sparkline([1.0]) == ""
