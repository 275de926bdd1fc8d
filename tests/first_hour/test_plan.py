"""Every code block of the pages has its entry in the plan of the walk."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.first_hour.blocks import Block, blocks_of, blocks_of_pages
from tests.first_hour.plan import STEPS, NotRun, Run, match_blocks

REPOSITORY = Path(__file__).parents[2]


def test_every_block_is_run_or_has_a_reason() -> None:
    pairs = match_blocks(blocks_of_pages(REPOSITORY), STEPS)

    assert all(step.reason for _, step in pairs if isinstance(step, NotRun))


def test_blocks_of_finds_fences_with_their_lines_and_languages() -> None:
    text = "# Page\n\n```bash\nrun-api\n```\n\n- item\n\n  ```\n  indented\n  ```\n"

    assert blocks_of("page.md", text) == [
        Block("page.md", 3, "bash", "run-api\n"),
        Block("page.md", 9, "", "  indented\n"),
    ]


def test_a_block_without_an_entry_is_refused_by_page_and_line() -> None:
    with pytest.raises(ValueError, match=r"page\.md:3 'run-api --new'"):
        match_blocks([Block("page.md", 3, "bash", "run-api --new\n")], [])


def test_an_entry_without_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match=r"page\.md has no block that begins with 'gone'"):
        match_blocks([], [Run("page.md", "gone")])


def test_equal_first_lines_are_taken_in_order() -> None:
    blocks = [Block("p.md", 1, "bash", "a\nfirst\n"), Block("p.md", 9, "bash", "a\nsecond\n")]

    pairs = match_blocks(blocks, [Run("p.md", "a", shows=("1",)), Run("p.md", "a", shows=("2",))])

    assert [block.line for block, _ in pairs] == [1, 9]
