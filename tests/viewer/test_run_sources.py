"""Stored runs and live services: what is shown of them, and that looking changes nothing."""

from __future__ import annotations

import resource
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from atroposlib.api.journal import snapshot
from atroposlib.api.records import decode_record
from atroposlib.api.server import create_app
from atroposlib.api.settings import ApiSettings
from atroposlib.api.state import RunState
from atroposlib.api.store.sqlite_file import open_reader
from atroposlib.errors import ConfigError
from atroposlib.viewer.index import GroupIndex
from atroposlib.viewer.rollouts import group_of
from atroposlib.viewer.sources import GroupGoneError, LiveSource, StoredRunSource
from atroposlib.viewer.timeline import timeline_page
from atroposlib.wire import encode_group
from tests.api.helpers import REGISTRATION, serve
from tests.exporting.traced_groups import shipped_group
from tests.viewer.groups import make_group
from tests.viewer.waiting import wait_until

pytestmark = pytest.mark.slow

TOKENS = {"trainer": "trainer-token-for-tests", "admin": "admin-token-for-tests"}
UNSTEADY = ("age_s", "silent_s", "last_seen")


@pytest.fixture
def settings(tmp_path: Path) -> ApiSettings:
    return ApiSettings(store="sqlite", data_dir=tmp_path, run_name="maths")


@pytest.fixture
def url(settings: ApiSettings, free_port: int) -> Iterator[str]:
    """A service with a trainer, an environment and three groups, one in the binary format."""
    with serve(create_app(settings), free_port) as url:
        start(url)
        yield url


def start(url: str, **headers: str) -> None:
    def post(path: str, **body: Any) -> None:
        httpx.post(url + path, headers=headers, **body).raise_for_status()

    post("/register", json={**REGISTRATION, "batch_size": 2})
    httpx.get(url + "/batch", headers=headers).raise_for_status()
    post("/register-env", json={"max_token_length": 1000, "desired_name": "sums", "weight": 1.0})
    for i in range(3):
        group = make_group(f"question {i}", ["right", "wrong"], [i + 1.0, -1.0], env_id=0)
        if i == 1:
            kind = {"content-type": "application/msgpack"}
            httpx.post(
                url + "/scored_data",
                content=encode_group(group, "msgpack"),
                headers={**headers, **kind},
            ).raise_for_status()
        else:
            post("/scored_data", json=group)


def read(source: Any, index: GroupIndex, count: int) -> None:
    deadline = time.monotonic() + 60
    while source.advance(index, 1.0) or len(index) < count:
        assert time.monotonic() < deadline, f"{len(index)} groups after 60 s"


def told(url: str) -> list[Any]:
    """What a run tells of itself."""
    return [
        httpx.get(url + path).json()
        for path in ("/status", "/info", "/groups?state=queued", "/envs", "/latest_example")
    ]


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            k: without_times(v)
            for k, v in value.items()
            if k not in ("age_s", "silent_s", "last_seen")
        }
    return [without_times(v) for v in value] if isinstance(value, list) else value


def test_looking_at_a_live_service_changes_nothing(url: str) -> None:
    before = without_times(told(url))
    source, index = LiveSource(url), GroupIndex()

    read(source, index, 3)
    for position in range(3):
        source.load(position)
    figures = source.figures()

    assert without_times(told(url)) == before
    assert [index[i].label for i in range(3)] == ["group 0", "group 1", "group 2"]
    assert {index[i].environment for i in range(3)} == {"sums_0"}
    assert index[1].scores == (2.0, -1.0)
    assert index[2].excerpt == "question 2"
    assert figures.current["groups waiting"] == 3
    assert index.texts.search("QUESTION 1").advance(1.0)
    source.close()


def test_groups_that_left_the_service_stay_readable(url: str) -> None:
    source, index = LiveSource(url), GroupIndex()
    read(source, index, 3)

    assert httpx.get(url + "/batch").json()["batch"] is not None
    httpx.get(url + "/reset_data").raise_for_status()

    assert source.load(0)["scores"] == [1.0, -1.0]
    source.close()


def test_group_for_which_the_disk_has_no_room_is_shown(url: str) -> None:
    source, index = LiveSource(url), GroupIndex()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    source._poll(index)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        scores = [source.load(position)["scores"] for position in (0, 1, 0)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    source.close()

    assert scores == [[1.0, -1.0], [2.0, -1.0], [1.0, -1.0]]


def test_groups_of_a_service_that_restarted_without_a_store_are_shown(
    free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atroposlib.viewer.sources._POLL_S", 0.0)
    index = GroupIndex()
    with serve(create_app(ApiSettings()), free_port) as url:
        source = LiveSource(url)
        start(url)
        source._poll(index)  # lists the groups, and reads none of them
        assert source.load(0)["scores"] == [1.0, -1.0]

    with serve(create_app(ApiSettings()), int(url.rpartition(":")[2])) as again:
        assert again == url
        start(url)
        httpx.post(url + "/scored_data", json=make_group("new", ["a"], [7.0])).raise_for_status()
        source._poll(index)
        source._poll(index)

        labels = [index[i].label for i in range(len(index))]
        assert labels == [f"group {i}" for i in (0, 1, 2, 0, 1, 2, 3)]
        assert source.load(6)["scores"] == [7.0]
        assert source.load(0)["scores"] == [1.0, -1.0]
        with pytest.raises(GroupGoneError, match="group 1 was lost when the service restarted"):
            source.load(1)
    source.close()


def test_a_service_that_is_away_is_said(free_port: int) -> None:
    source, index = LiveSource(f"http://127.0.0.1:{free_port}"), GroupIndex()

    assert not source.advance(index, 0.1)

    assert "does not answer" in source.figures().notes[0]
    source.close()


def test_refused_requests_are_counted_by_reason(url: str) -> None:
    httpx.post(url + "/scored_data", json={"tokens": [[1]], "masks": [[]], "scores": [1.0]})
    source, index = LiveSource(url), GroupIndex()

    read(source, index, 3)

    assert list(source.figures().drops.values()) == [1.0]
    assert next(iter(source.figures().drops)).startswith("refused: ")
    source.close()


def test_a_service_with_tokens_says_which_one_it_wants(tmp_path: Path, free_port: int) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("".join(f"{role} {token}\n" for role, token in TOKENS.items()))
    tokens.chmod(0o600)
    settings = ApiSettings(token_file=tokens)
    with serve(create_app(settings), free_port) as url:
        start(url, Authorization=f"Bearer {TOKENS['admin']}")
        seen = {}
        for name in ("nobody", "trainer", "admin"):
            token = TOKENS.get(name)
            source, index = LiveSource(url, token=token), GroupIndex()
            source.advance(index, 1.0)
            seen[name] = (len(index), source.figures().notes)
            source.close()

    assert seen["nobody"][0] == 0
    assert "requires a token" in seen["nobody"][1][0]
    assert seen["trainer"][0] == 3
    assert "to admins only" in seen["trainer"][1][0]
    assert seen["admin"] == (3, [])


def test_a_stored_run_is_read_beside_its_service(url: str, settings: ApiSettings) -> None:
    before = without_times(told(url))
    source, index = StoredRunSource(settings.data_dir / "maths.sqlite3"), GroupIndex()

    read(source, index, 3)
    fields = source.load(1)

    assert without_times(told(url)) == before
    assert [index[i].label for i in range(3)] == ["group 0", "group 1", "group 2"]
    assert index[1].environment == "sums_0"
    assert index[1].step == 0
    assert fields["messages"][0][0]["content"] == "question 1"
    assert source.figures().current["groups received"] == 3
    source.close()


def test_a_stored_run_shows_what_comes_while_it_is_open(
    url: str, settings: ApiSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atroposlib.viewer.sources._REFRESH_S", 0.0)
    source, index = StoredRunSource(settings.data_dir / "maths.sqlite3"), GroupIndex()
    read(source, index, 3)

    group = make_group("later", ["a", "b"], [5.0, 0.0], env_id=0)
    httpx.post(url + "/scored_data", json=group).raise_for_status()
    read(source, index, 4)

    assert index[3].excerpt == "later"
    assert source.figures().current["groups received"] == 4
    source.close()


def test_a_group_that_cannot_be_read_is_counted_once(
    url: str, settings: ApiSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atroposlib.viewer.sources._REFRESH_S", 0.0)
    path = settings.data_dir / "maths.sqlite3"
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE payload SET content = x'00' WHERE group_id = 2")
    connection.close()
    source, index = StoredRunSource(path), GroupIndex()

    for _ in range(3):
        source.advance(index, 1.0)

    assert (len(index), source.problems.count) == (2, 1)
    source.close()


def test_a_damaged_record_is_counted_and_the_rest_is_read(url: str, settings: ApiSettings) -> None:
    path = settings.data_dir / "maths.sqlite3"
    with sqlite3.connect(path) as connection:
        (last,) = connection.execute("SELECT max(position) FROM log").fetchone()
        (record,) = connection.execute(
            "SELECT record FROM log WHERE position = ?", (last - 1,)
        ).fetchone()
        connection.execute("UPDATE log SET record = ? WHERE position = ?", (record[:-3], last - 1))
    connection.close()
    source, index = StoredRunSource(path), GroupIndex()

    read(source, index, 3)

    assert source.figures().current["groups received"] == 2
    assert source.problems.messages[0].startswith(f"record {last - 1}: ")
    source.close()


class CompactedMeanwhile:
    """A connection to the file of a run whose log is replaced just before it is read."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self._path = path

    def execute(self, query: str, *values: Any) -> sqlite3.Cursor:
        """Run a query; the service compacts before the log is read."""
        if "FROM log" in query:
            with sqlite3.connect(self._path) as service:
                state = RunState()
                log = service.execute("SELECT record FROM log ORDER BY position").fetchall()
                for (record,) in log:
                    state.apply(decode_record(record))
                service.execute(
                    "UPDATE snapshot SET position = ?, content = ?", (len(log), snapshot(state))
                )
                service.execute("DELETE FROM log")
            service.close()
        return self._connection.execute(query, *values)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def test_a_log_that_is_compacted_while_it_is_read_is_read_whole(
    url: str, settings: ApiSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = settings.data_dir / "maths.sqlite3"
    monkeypatch.setattr(
        "atroposlib.viewer.sources.open_reader",
        lambda path: CompactedMeanwhile(open_reader(path), path),
    )

    source = StoredRunSource(path)

    assert source.figures().current["groups received"] == 3
    source.close()


def test_a_group_that_is_discarded_is_said_to_be_gone(url: str, settings: ApiSettings) -> None:
    source, index = StoredRunSource(settings.data_dir / "maths.sqlite3"), GroupIndex()
    read(source, index, 3)

    httpx.get(url + "/reset_data").raise_for_status()
    wait_until(lambda: source._content(2) is None)
    with pytest.raises(GroupGoneError, match="no longer kept"):
        source.load(2)
    source.close()


def test_a_run_that_is_not_there_names_those_that_are(url: str, settings: ApiSettings) -> None:
    with pytest.raises(ConfigError, match=r"no stored run .*other\.sqlite3; runs there: maths"):
        StoredRunSource(settings.data_dir / "other.sqlite3")


def test_another_file_is_no_run(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite3"
    path.write_text("words" * 1000)

    with pytest.raises(ConfigError, match="is not the file of a run"):
        StoredRunSource(path)


@pytest.mark.parametrize("kind", ["json", "msgpack"])
def test_traces_of_agents_pass_the_service_and_its_store(
    kind: Any, url: str, settings: ApiSettings
) -> None:
    group = shipped_group()
    content = encode_group({**group, "env_id": 0}, kind)
    headers = {"content-type": f"application/{kind}"}
    httpx.post(url + "/scored_data", content=content, headers=headers).raise_for_status()
    live, stored = LiveSource(url), StoredRunSource(settings.data_dir / "maths.sqlite3")

    for source in (live, stored):
        read(source, GroupIndex(), 4)

        fields = source.load(3)
        assert fields["traces"] == group["traces"]
        assert "status.txt" in timeline_page(group_of(fields), group_of(fields).rollouts[1])
        source.close()
