"""A planted mistake ends a command with one line that says what to do; see `planted_mistakes`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.planted_mistakes import Row, Stage, problem_of, rows, table_line

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    opened = Stage(Path(tmp_path_factory.mktemp("mistakes")))
    yield opened
    opened.close()


@pytest.mark.parametrize("row", rows(), ids=[f"{row.name}-{i}" for i, row in enumerate(rows())])
def test_planted_mistake_ends_in_one_line_that_says_what_to_do(stage: Stage, row: Row) -> None:
    code, lines = stage.run(row)

    print(table_line(row, code, lines, stage.folder))  # shown by `-rA`
    assert not problem_of(row, code, lines), "\n".join(lines[-20:])
