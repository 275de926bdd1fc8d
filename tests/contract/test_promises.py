"""The pages of promises name tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["reliability.md", "threat_model.md"])
def test_page_names_tests_that_exist(page: str) -> None:
    lines = (ROOT / "docs" / page).read_text().splitlines()
    named = [re.findall(r"`(tests/[\w/]+\.py)`", line) for line in lines]

    rows = [line for table in tables_of(lines) if "test" in table[0] for line in table[2:]]
    assert len(rows) > 10
    assert [row for row in rows if "`tests/" not in row] == []
    assert [path for paths in named for path in paths if not (ROOT / path).is_file()] == []


def tables_of(lines: list[str]) -> list[list[str]]:
    """Return the tables of a page: header, rule and rows; measurements have no column of tests."""
    text = "\n".join(line if line.startswith("|") else "" for line in lines)
    return [table.splitlines() for table in re.split(r"\n{2,}", text.strip())]
