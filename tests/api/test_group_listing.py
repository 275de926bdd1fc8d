"""Looking at groups without taking any."""

from __future__ import annotations

import pytest

from atroposlib.api import records
from atroposlib.api.inspection import GroupFilter, GroupPage, GroupState, find_group, list_groups
from tests.api.fake_run import FakeRun

pytestmark = pytest.mark.slow


@pytest.fixture
def run() -> FakeRun:
    run = FakeRun()
    run.start(batch_size=4)
    run.add_env("maths")
    run.add_env("code", group_size=8)
    return run


def look(
    run: FakeRun, where: str, *, offset: int = 0, limit: int = 100, **wanted: float
) -> GroupPage:
    return list_groups(
        run.state,
        GroupState(where),
        GroupFilter(**wanted),  # type: ignore[arg-type]
        offset=offset,
        limit=limit,
        now=run.now,
    )


def ids(page: GroupPage) -> list[int]:
    return [group["id"] for group in page.groups]


def test_group_is_described_without_its_tokens(run: FakeRun) -> None:
    run.admit(2, env_id=0, age_s=30, version=1, scores=(-1.0, 0.5))
    run.state.apply(records.PolicyVersionSet(0, 4))

    (group,) = look(run, "queued").groups

    assert group == {
        "position": 0,
        "id": 0,
        "state": "queued",
        "env_id": 0,
        "env_name": "maths_0",
        "num_sequences": 2,
        "num_tokens": 20,
        "num_bytes": 200,
        "lane": "json",
        "policy_version": 1,
        "staleness": 3,
        "received_at": run.now - 30,
        "age_s": 30.0,
        "min_score": -1.0,
        "max_score": 0.5,
    }


def test_listing_goes_on_where_it_stopped(run: FakeRun) -> None:
    run.admit(*[1] * 5)

    first = look(run, "queued", limit=2)
    last = look(run, "queued", offset=4, limit=2)

    assert (ids(first), first.total, first.next_offset) == ([0, 1], 5, 2)
    assert (ids(last), last.total, last.next_offset) == ([4], 5, None)
    assert look(run, "queued", offset=9) == GroupPage([], 5, None)


def test_every_group_is_in_the_listing_of_its_state(run: FakeRun) -> None:
    run.admit(4, 4, 4)
    run.acknowledge(run.form())
    run.form()
    run.admit(2, env_id=1)

    found = {where.value: ids(look(run, where.value)) for where in GroupState}

    assert found == {"queued": [2], "buffered": [3], "in_flight": [1], "past": [0]}
    for where, (group_id,) in found.items():
        sought = find_group(run.state, group_id)
        assert sought is not None
        assert (sought[0].group_id, sought[1].value) == (group_id, where)
    assert find_group(run.state, 99) is None


def test_past_groups_are_listed_last_delivered_first(run: FakeRun) -> None:
    run.admit(4, 4)
    run.acknowledge(run.form())
    run.acknowledge(run.form())

    assert ids(look(run, "past")) == [1, 0]


def test_filters_choose_by_environment_and_score(run: FakeRun) -> None:
    run.admit(1, env_id=0, scores=(0.0, 0.2))
    run.admit(1, env_id=0, scores=(0.8, 1.0))
    run.admit(1, scores=(0.4, 0.6))

    assert ids(look(run, "queued", env_id=0)) == [0, 1]
    assert ids(look(run, "queued", min_score=0.5)) == [1, 2]
    assert ids(look(run, "queued", max_score=0.5)) == [0, 2]
    assert ids(look(run, "queued", min_score=0.3, max_score=0.7)) == [2]
    assert look(run, "queued", env_id=0).total is None


def test_filter_that_finds_nothing_stops_and_says_where_to_go_on(run: FakeRun) -> None:
    run.admit(*[1] * 100_000)
    run.admit(1, env_id=0)

    offset, pages = 0, 0
    found: list[int] = []
    while offset is not None:
        page = look(run, "queued", offset=offset, env_id=0)
        found += ids(page)
        offset, pages = page.next_offset, pages + 1  # type: ignore[assignment]

    assert (found, pages) == ([100_000], 11)  # each page looks at 10,000 groups at most


def test_filtered_page_that_is_full_goes_on_behind_its_last_group(run: FakeRun) -> None:
    run.admit(1, env_id=0)
    run.admit(1)
    run.admit(1, 1, env_id=0)

    page = look(run, "queued", env_id=0, limit=2)

    assert (ids(page), page.next_offset) == ([0, 2], 3)
    assert ids(look(run, "queued", env_id=0, limit=2, offset=3)) == [3]
