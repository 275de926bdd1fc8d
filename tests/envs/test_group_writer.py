from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest

from atroposlib.envs.reporting import GroupWriter
from atroposlib.errors import GroupError

GROUP = {"tokens": [[1, 2]], "masks": [[-100, 2]], "scores": [1.0]}


def test_group_is_readable_before_the_file_is_closed(tmp_path: Path) -> None:
    writer = GroupWriter(tmp_path / "new" / "groups.jsonl")

    writer.write(GROUP)
    writer.write({**GROUP, "scores": [0.5]})

    lines = writer.path.read_text().splitlines()
    assert [json.loads(line)["scores"] for line in lines] == [[1.0], [0.5]]
    writer.close()


def test_taken_names_are_counted_on_the_original_stem(tmp_path: Path) -> None:
    writers = [GroupWriter(tmp_path / "groups.jsonl") for _ in range(3)]

    assert [writer.path.name for writer in writers] == [
        "groups.jsonl",
        "groups_1.jsonl",
        "groups_2.jsonl",
    ]
    for writer in writers:
        writer.close()


def test_numpy_values_are_converted(tmp_path: Path) -> None:
    writer = GroupWriter(str(tmp_path / "g.jsonl"))

    writer.write({**GROUP, "scores": np.array([0.25], dtype=np.float32), "n": np.int64(3)})
    writer.close()

    assert json.loads(writer.path.read_text()) == {**GROUP, "scores": [0.25], "n": 3}


@pytest.mark.parametrize(("key", "value"), [("images", {1, 2}), ("scores", [float("nan")])])
def test_refused_group_names_the_key_and_leaves_no_half_line(
    key: str, value: object, tmp_path: Path
) -> None:
    writer = GroupWriter(tmp_path / "g.jsonl")

    with pytest.raises(GroupError, match=f"{key}: "):
        writer.write({**GROUP, key: value})
    writer.write(GROUP)
    writer.close()

    assert json.loads(writer.path.read_text()) == GROUP


def test_lines_of_several_threads_stay_whole(tmp_path: Path) -> None:
    writer = GroupWriter(tmp_path / "g.jsonl")
    big = {**GROUP, "tokens": [list(range(5000))]}
    threads = [
        threading.Thread(target=lambda: [writer.write(big) for _ in range(10)]) for _ in range(4)
    ]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()

    lines = writer.path.read_text().splitlines()
    assert len(lines) == 40
    assert all(json.loads(line) == big for line in lines)


def test_closing_twice_is_harmless(tmp_path: Path) -> None:
    writer = GroupWriter(tmp_path / "g.jsonl")

    writer.close()
    writer.close()
