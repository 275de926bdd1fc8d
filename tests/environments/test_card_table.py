from __future__ import annotations

import re
from pathlib import Path

import pytest

from atroposlib.errors import ConfigError
from atroposlib.tasks.card import EnvironmentCard
from environments.card_table import PAGE, card_tables, find_cards, page_with_tables

CARD = 'CARD = EnvironmentCard(task="sums", turns="1", reward="0 | 1", data="made", command="{}")'


def write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"import no_such_package\n{text}\n")


def test_table_of_the_page_is_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")

    assert page == page_with_tables(page, card_tables(find_cards())), (
        "environments/README.md is out of date; run: python -m environments.card_table"
    )


def test_every_environment_with_a_command_line_has_a_card() -> None:
    doors = {
        path.relative_to(PAGE.parent).as_posix()
        for path in PAGE.parent.rglob("*.py")
        if ".cli()" in path.read_text(encoding="utf-8")
    }

    assert doors - set(find_cards()) == set()


def test_commands_of_cards_end_after_a_few_groups() -> None:
    endless = [
        path
        for path, card in find_cards().items()
        if not card.command.startswith("evaluate ")
        and not re.search(r"--env\.total_steps [1-9]\b", card.command)
    ]

    assert endless == [], "without --env.total_steps, `process` makes all groups of a training run"


def test_cards_are_read_without_importing(tmp_path: Path) -> None:
    write(tmp_path / "folder" / "sums.py", CARD.format("process"))
    write(tmp_path / "helper.py", "")

    heading, *_, row = card_tables(find_cards(tmp_path)).splitlines()

    assert heading == "## Questions, tools and agents"
    assert row == (
        "| [`folder/sums.py`](folder/sums.py) | sums | 1 | 0 \\| 1 | made | core install | "
        "`python environments/folder/sums.py process` |"
    )


def test_folders_have_tables_of_their_own() -> None:
    card = EnvironmentCard(task="t", turns="1", reward="r", data="d", command="process")

    lines = card_tables(dict.fromkeys(["community/a.py", "b.py", "communal.py"], card)).splitlines()

    assert [line.split("`")[1] for line in lines if "](" in line] == [
        "b.py",
        "communal.py",
        "community/a.py",
    ]
    assert [line for line in lines if line.startswith("## ")] == [
        "## Questions, tools and agents",
        "## Contributed environments",
    ]


@pytest.mark.parametrize("card", ['CARD = EnvironmentCard(task="sums")', "CARD = make_card()"])
def test_incomplete_card_is_an_error(tmp_path: Path, card: str) -> None:
    write(tmp_path / "sums.py", card)

    with pytest.raises(ConfigError, match="CARD"):
        find_cards(tmp_path)


def test_page_without_marks_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no place for the tables"):
        page_with_tables("text", "table")
