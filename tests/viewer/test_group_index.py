from __future__ import annotations

import resource

import pytest

from atroposlib.viewer.index import GroupIndex, GroupSummary, Order, RowFilter, TextStore
from atroposlib.viewer.viewer import filter_of

ROWS = [  # environment, step, longest, scores
    ("maths", 0, 10, (0.0, 1.0)),
    ("code", 1, 30, (0.5, 0.5)),
    ("maths", 2, 20, (-1.0, -1.0, 2.0)),
    ("maths", None, 5, ()),
]


@pytest.fixture
def index() -> GroupIndex:
    index = GroupIndex()
    for i, (environment, step, longest, scores) in enumerate(ROWS):
        index.add(
            GroupSummary(f"line {i}", environment, step, len(scores), longest, longest, scores, "")
        )
    return index


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (RowFilter(), [0, 1, 2, 3]),
        (RowFilter(environment="maths"), [0, 2, 3]),
        (RowFilter(environment="none"), []),
        (RowFilter(min_score=1.0), [0, 2]),  # one score at least so high
        (RowFilter(max_score=0.0), [0, 2]),  # one score at least so low
        (RowFilter(min_tokens=10, max_tokens=20), [0, 2]),
        (RowFilter(min_step=1), [1, 2]),
        (RowFilter(min_step=0, max_step=0), [0]),
        (RowFilter(signal="equal"), [1, 3]),
        (RowFilter(signal="differ"), [0, 2]),
    ],
)
def test_filters(index: GroupIndex, wanted: RowFilter, expected: list[int]) -> None:
    assert index.match(wanted).positions.tolist() == expected


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("oldest", [0, 1, 2, 3]),
        ("newest", [3, 2, 1, 0]),
        ("best", [2, 0, 1, 3]),  # highest score 2, 1, 0.5, none
        ("worst", [2, 0, 1, 3]),  # lowest -1, 0, 0.5, none
        ("spread", [2, 0, 1, 3]),  # 3, 1, 0, none
        ("mean", [0, 1, 2, 3]),  # 0.5, 0.5 in their order, 0, none
        ("longest", [1, 2, 0, 3]),
    ],
)
def test_orders(index: GroupIndex, order: Order, expected: list[int]) -> None:
    assert index.match(RowFilter(), order).positions.tolist() == expected


def test_a_row_that_is_replaced_or_added_counts_from_then_on(index: GroupIndex) -> None:
    assert index.match(RowFilter(min_score=5.0)).positions.tolist() == []

    index.replace(1, index[1]._replace(scores=(9.0,), environment="new"))
    index.add(index[0]._replace(scores=(7.0,)))

    assert index.match(RowFilter(min_score=5.0)).positions.tolist() == [1, 4]
    assert index.environments == ["maths", "code", "new"]


def test_text_is_found_whatever_the_size_of_its_letters(index: GroupIndex) -> None:
    for position, text in enumerate(("Äpfel und Birnen", "birnen", "nichts")):
        index.texts.add(position, text)

    matches = index.match(RowFilter(text="BIRNEN"))
    both = index.match(RowFilter(text="birnen", environment="maths"))

    assert (matches.positions.tolist(), matches.is_complete, matches.num_searched) == (
        [0, 1],
        True,
        3,
    )
    assert both.positions.tolist() == [0]
    assert index.match(RowFilter(text="äpfel")).positions.tolist() == [0]


def test_text_does_not_match_across_two_groups(index: GroupIndex) -> None:
    index.texts.add(0, "one")
    index.texts.add(1, "two")

    assert index.match(RowFilter(text="one\ntwo")).positions.tolist() == []


def test_a_search_goes_on_where_it_stopped_and_over_what_came_since() -> None:
    store = TextStore()
    for position in range(50):
        store.add(position, "x" * 200_000 + (" needle" if position % 10 == 0 else ""))
    search = store.search("needle")

    is_done = search.advance(0.0)  # one window
    first = set(search.found)
    while not is_done:
        is_done = search.advance(0.0)
    store.add(50, "needle")
    search.advance(1.0)

    assert len(first) < 5
    assert search.found == {0, 10, 20, 30, 40, 50}


def test_text_without_room_on_the_disk_is_left_out_of_searches() -> None:
    store = TextStore()
    store.add(0, "needle")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, limits[1]))
    try:
        for text in ("needle " * 20, "needle " * 2000):
            with pytest.raises(OSError, match="No space left"):
                store.add(1, text)
        store.add(2, "needle")
        search = store.search("needle")
        is_complete = search.advance(1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert (is_complete, search.found) == (True, {0, 2})


def test_what_is_typed_becomes_a_filter() -> None:
    typed = filter_of(" word ", "maths", "best", "all equal", "0,5", "x", "10", "", "-1", None)

    assert typed == (
        RowFilter(
            environment="maths",
            min_score=0.5,
            min_tokens=10,
            min_step=-1,
            text="word",
            signal="equal",
        ),
        "best",
    )
    assert filter_of("", "all", "nonsense", "nonsense") == (RowFilter(), "oldest")


def test_tokens_and_steps_may_be_typed_as_they_are_shown() -> None:
    typed, _ = filter_of("", "all", "oldest", "any", "", "", "1,234", "1,234,567", "1,000", "2,5")

    assert typed == RowFilter(min_tokens=1234, max_tokens=1_234_567, min_step=1000, max_step=2)
