from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from atroposlib.errors import ConfigError
from atroposlib.viewer.index import GroupIndex, RowFilter, TextStore
from atroposlib.viewer.sources import GroupGoneError, JsonlSource
from atroposlib.viewer.viewer import Viewer
from tests.viewer.groups import hostile_group, make_group, write_groups


def read_all(source: JsonlSource, index: GroupIndex) -> None:
    while source.advance(index, 10.0):
        pass


def test_broken_lines_are_told_by_number_and_the_rest_is_used(tmp_path: Path) -> None:
    good = make_group("one", ["a", "b"], [1.0, 0.0])
    path = write_groups(
        tmp_path / "g.jsonl",
        [good, "{broken", "[1]", {"scores": [1]}, {"tokens": [[1]]}, "", good, "null"],
    )
    source, index = JsonlSource(path), GroupIndex()

    read_all(source, index)

    assert [row.label for row in (index[0], index[1])] == ["line 1", "line 7"]
    assert len(index) == 2
    assert [message.partition(":")[0] for message in source.problems.messages] == [
        "line 2",
        "line 3",
        "line 4",
        "line 5",
        "line 8",
    ]
    assert source.load(1)["scores"] == [1.0, 0.0]
    source.close()


class FullStore(TextStore):
    """Has no room for the texts of its first group."""

    def add(self, position: int, text: str) -> None:
        if position == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().add(position, text)


def test_group_whose_text_finds_no_room_moves_no_other(tmp_path: Path) -> None:
    groups = [make_group(name, ["a"], [float(i)]) for i, name in enumerate(("one", "two"))]
    source, index = JsonlSource(write_groups(tmp_path / "g.jsonl", groups)), GroupIndex()
    index.texts = FullStore()

    with pytest.raises(OSError, match="No space left"):
        read_all(source, index)
    read_all(source, index)

    assert [index[i].label for i in range(len(index))] == ["line 1", "line 2"]
    assert [source.load(i)["scores"] for i in range(len(index))] == [[0.0], [1.0]]
    assert index.match(RowFilter(text="two")).positions.tolist() == [1]
    source.close()


def test_group_that_cannot_be_summarized_moves_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd, good = (make_group(name, ["a"], [1.0]) for name in ("odd", "good"))
    path = write_groups(tmp_path / "g.jsonl", [odd, good])
    source, index = JsonlSource(path), GroupIndex()

    def fail(*_: object, **__: object) -> None:
        raise TypeError("an odd value")

    with monkeypatch.context() as patched:
        patched.setattr("atroposlib.viewer.sources.summarize", fail)
        with pytest.raises(TypeError):
            source.advance(index, 10.0)
    read_all(source, index)

    assert [index[i].label for i in range(len(index))] == ["line 2"]
    assert source.load(0)["messages"] == good["messages"]
    assert index.match(RowFilter(text="good")).positions.tolist() == [0]
    source.close()


def test_a_file_that_grows_is_read_on_and_half_a_line_waits(tmp_path: Path) -> None:
    line = json.dumps(make_group("one", ["a"], [1.0])).encode()
    path = tmp_path / "g.jsonl"
    path.write_bytes(line + b"\n" + line[:50])
    source, index = JsonlSource(path), GroupIndex()

    read_all(source, index)
    notes = source.figures().notes
    with path.open("ab") as file:
        file.write(line[50:] + b"\n" + line)
    read_all(source, index)

    assert "line 2 is incomplete" in notes[0]
    assert [index[i].label for i in range(len(index))] == ["line 1", "line 2", "line 3"]
    assert source.problems.count == 0
    assert source.figures().notes == []
    source.close()


def test_a_file_that_was_cut_is_said_and_not_misread(tmp_path: Path) -> None:
    path = write_groups(tmp_path / "g.jsonl", [make_group("one", ["a"], [1.0])])
    source, index = JsonlSource(path), GroupIndex()
    read_all(source, index)

    path.write_text("")
    read_all(source, index)

    assert "was truncated" in source.problems.messages[0]
    with pytest.raises(GroupGoneError, match="was changed"):
        source.load(0)
    source.close()


def test_odd_numbers_and_bytes_are_read(tmp_path: Path) -> None:
    path = tmp_path / "g.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf"  # as Windows programs write it
        b'{"messages": ["t\xe9", "\\ud800"], "scores": [NaN, "1"], "tokens": [[1, "x"], 3]}\n'
    )
    source, index = JsonlSource(path), GroupIndex()

    read_all(source, index)

    assert (index[0].num_rollouts, index[0].scores, index[0].longest) == (2, (), 0)
    source.close()


def test_a_missing_file_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.jsonl cannot be read .*as `process` writes"):
        JsonlSource(tmp_path / "none.jsonl")


def test_groups_of_tokens_only_are_searched_by_their_text(
    tmp_path: Path, read_file: Callable[..., Viewer]
) -> None:
    from tests.viewer.waiting import wait_until

    groups = [make_group("one", ["needle in hay"], [1.0]), make_group("two", ["hay"], [1.0])]
    for group in groups:
        del group["messages"]
    viewer = read_file(write_groups(tmp_path / "g.jsonl", groups))
    wait_until(lambda: len(viewer.index.texts) == 2)

    search = viewer.index.texts.search("NEEDLE")

    assert search.advance(1.0)
    assert search.found == {0}
    assert viewer.row(0).excerpt.startswith("[user]one</s>[assistant]needle")


def test_a_hostile_group_is_summarized_as_one_harmless_line(tmp_path: Path) -> None:
    source, index = JsonlSource(write_groups(tmp_path / "g.jsonl", [hostile_group()])), GroupIndex()

    read_all(source, index)

    assert index[0].excerpt.isprintable()
    assert index[0].environment.isprintable()
    source.close()
