from __future__ import annotations

from pathlib import Path

import pytest

from atroposlib.envs.dataset_items import hub_rows
from atroposlib.errors import ConfigError
from atroposlib.utils.local_records import read_splits


def test_unreachable_hub_is_an_error_that_names_local_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr("datasets.load_dataset", fail)

    with pytest.raises(ConfigError, match=r"owner/rows .*no route.*--env\.dataset_path"):
        hub_rows("owner/rows", split="train")


def test_rows_of_the_hub_come_shuffled_by_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    table = datasets.Dataset.from_list([{"number": i} for i in range(20)])
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: table)

    rows = hub_rows("owner/rows", split="train")
    first, again = (hub_rows("owner/rows", split="train", shuffle_seed=1) for _ in range(2))

    assert [row["number"] for row in rows] == list(range(20))
    assert first == again != rows
    assert sorted(row["number"] for row in first) == list(range(20))


def test_optional_columns_are_none_where_they_lack(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1, "c": 2}\n{"a": 1, "b": 3}\n')

    train, test = read_splits(path, ("a",), shuffle_seed=0, optional=("b",))

    assert sorted(train + test, key=str) == [{"a": 1, "b": 3}, {"a": 1, "b": None}]
