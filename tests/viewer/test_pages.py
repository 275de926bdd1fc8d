from __future__ import annotations

from pathlib import Path
from typing import Any

from atroposlib.viewer.index import ORDERS, GroupIndex, RowFilter, summarize
from atroposlib.viewer.pages import (
    block,
    conversation_page,
    difference,
    listing_page,
    number,
    overview_page,
    side_by_side_page,
    sparkline,
)
from atroposlib.viewer.rollouts import group_of
from atroposlib.viewer.sources import FigureLog, JsonlSource, Problems, ServiceFigures
from atroposlib.viewer.token_reader import RolloutText, TokenReader
from tests.viewer.groups import ATTACKS, chat, make_group, write_groups


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


def test_numbers_beyond_the_range_of_floats_are_shown(tmp_path: Path) -> None:
    largest = 1.7e308
    odd = {"step": 10**400, "inference_logprobs": [[10**400, -0.5]] * 2}
    groups = [
        make_group("q", ["a", "b"], scores, **fields)
        for scores in ([largest, largest], [-largest, largest], [1.0, 0.0])
        for fields in ({"step": 1}, {"step": 2}, odd)
    ]
    source = JsonlSource(write_groups(tmp_path / "groups.jsonl", groups))
    index = GroupIndex()

    while source.advance(index, 1.0):
        pass
    page = overview(index)
    listing = listing_page(list(enumerate(map(index.__getitem__, range(9)))), selected=None)
    orders = [index.match(RowFilter(signal="differ"), order).positions.size for order in ORDERS]

    assert "nan" not in page
    assert [index[i].step for i in range(3)] == [1, 2, None]
    assert orders == [6] * len(ORDERS)
    assert listing.count("<tr data-group") == 9
    assert group_of(groups[2]).rollouts[0].logprobs == ()
    source.close()


def test_parts_of_a_reward_are_shown_with_their_rollout() -> None:
    parts = [{"answer": 1.0, "<b>": 0.5, "odd": "text"}]
    group = group_of({"scores": [1.5], "messages": [chat("q", "a")], "reward_parts": parts})
    [rollout] = group.rollouts
    texts = [RolloutText("q", "a")]

    pages = [
        side_by_side_page(group, texts, selected=0),
        conversation_page(rollout, TokenReader("none", lambda name: None)),
    ]

    assert rollout.reward_parts == {"answer": 1.0, "<b>": 0.5}
    for page in pages:
        assert ">answer 1</span>" in page
        assert "&lt;b&gt; 0.5" in page


def test_a_group_is_linked_to_its_trace() -> None:
    traceparent = f"00-{'a' * 32}-{'b' * 16}-01"
    texts = [RolloutText("q", "a")]
    fields = {"scores": [1.5], "messages": [chat("q", "a")]}
    url = 'https://t/trace/{trace_id}?"><script>'

    def page(traceparent: Any, trace_url: str | None) -> str:
        group = group_of({**fields, "traceparent": traceparent})
        return side_by_side_page(group, texts, selected=0, trace_url=trace_url)

    linked = page(traceparent, url)
    assert f'href="https://t/trace/{"a" * 32}?&quot;&gt;&lt;script&gt;"' in linked
    assert "<script" not in linked
    assert f">trace {'a' * 32}</span>" in page(traceparent, None)
    unrecorded = page(f"{traceparent[:-2]}00", url)
    assert ">trace not recorded</span>" in unrecorded
    assert "href" not in unrecorded
    for malformed in (None, '"><script>', 5, ["x"]):
        assert "trace" not in page(malformed, url)


def overview(index: GroupIndex, figures: ServiceFigures | None = None) -> str:
    return overview_page(
        figures or ServiceFigures(),
        Problems(),
        index.scores_by_environment(),
        rewards=index.rewards_by_step(),
        num_groups=len(index),
        num_equal=0,
        metric_drops={},
    )


def test_overview_draws_the_reward_over_steps_of_each_environment() -> None:
    index = GroupIndex()
    for step, scores in ((2, [1, 0]), (0, [0, 0]), (2, [1, 1]), (None, [9, 9])):
        fields: dict[str, Any] = {"scores": scores, "messages": [[], []]}
        index.add(summarize(fields, label="group", environment="sums", step=step))

    page = overview(index)

    # at step 2 three of four are right
    assert index.rewards_by_step() == {"sums": [(0, 0.0), (2, 0.75)]}
    assert "sums, step 0 to 2" in page
    assert "0 → 0.75" in page
    assert [step for step, _ in index.rewards_by_step(max_points=1)["sums"]] == [2]


def test_overview_says_why_it_is_empty(tmp_path: Path) -> None:
    source = JsonlSource(write_groups(tmp_path / "none.jsonl", []))
    service = FigureLog()
    service.note_metrics('atropos_environments{state="connected"} 0\n')

    pages = [
        overview(GroupIndex(), source.figures()),
        overview(GroupIndex(), service.figures(None)),
        overview(GroupIndex(), service.figures("does not answer")),
    ]

    for page, reason in zip(
        pages,
        ("The file is empty so far", "No environment is connected: start one", "could not be read"),
        strict=True,
    ):
        assert f"No groups yet. {reason}" in page or f"No groups yet. The service {reason}" in page


def test_groups_of_a_file_are_named_after_it_where_they_do_not_say(tmp_path: Path) -> None:
    groups = [make_group("q", ["a"], [1.0]), make_group("q", ["a"], [1.0], env_name="sums")]
    source = JsonlSource(write_groups(tmp_path / "gsm8k.jsonl", groups))
    index = GroupIndex()

    while source.advance(index, 1.0):
        pass

    assert index.environments == ["gsm8k", "sums"]
    source.close()


def test_lazy_tokenizer_is_loaded_when_tokens_are_read() -> None:
    loaded: list[str] = []

    def load(name: str) -> Any:
        loaded.append(name)
        raise OSError("no such tokenizer")

    reader = TokenReader("some/name", load, is_lazy=True)
    before = list(loaded)
    reader.text([])
    reader.text([1, 2])
    reader.text([3])
    reader.wait(120)

    assert (before, loaded) == ([], ["some/name"])
    assert reader.problem is not None
