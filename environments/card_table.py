"""Rewrite the tables of `environments/README.md`: `python -m environments.card_table`.

    environments/**/*.py -> CARD = EnvironmentCard(...) -> one row each, between two marks

The modules are parsed, not imported, so their dependencies are not needed.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

from atroposlib.errors import ConfigError
from atroposlib.tasks.card import EnvironmentCard

__all__ = ["card_tables", "find_cards", "page_with_tables"]

FOLDER = Path(__file__).parent
PAGE = FOLDER / "README.md"
BEGIN = "<!-- tables: python -m environments.card_table -->"
END = "<!-- end of tables -->"
SECTIONS = {
    "": "Questions, tools and agents",
    "game_environments/": "Games",
    "multimodal_dpo/": "Questions about images",
    "community/": "Contributed environments",
    "eval_environments/": "Evaluations",
}
"""Heading of the table of each folder; the first one is that of all other places."""
COLUMNS = ("environment", "task", "turns", "reward", "data", "needs", "try it")


def find_cards(folder: Path = FOLDER) -> dict[str, EnvironmentCard]:
    """Return the card of each module below `folder`, by relative path, sorted.

    Raises:
        ConfigError: a card is not a call with plain strings, or lacks a field.
    """
    cards = {}
    for path in sorted(folder.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if "\nCARD = " in source:
            cards[path.relative_to(folder).as_posix()] = _read_card(path, source)
    return cards


def card_tables(cards: dict[str, EnvironmentCard]) -> str:
    """Return a Markdown table with one row per card for each of the `SECTIONS` that has cards."""
    rows: dict[str, list[tuple[str, ...]]] = {section: [] for section in SECTIONS}
    for path, card in cards.items():
        section = next((each for each in SECTIONS if each and path.startswith(each)), "")
        rows[section].append(_row(path, card))
    return "\n\n".join(
        f"## {SECTIONS[section]}\n\n{_table(found)}" for section, found in rows.items() if found
    )


def _table(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (COLUMNS, ("---",) * len(COLUMNS), *rows))


def page_with_tables(page: str, tables: str) -> str:
    """Return a page with the text between its marks replaced.

    Raises:
        ConfigError: the page lacks a mark.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ConfigError(f"the page has no place for the tables, expected {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}"


def _read_card(path: Path, source: str) -> EnvironmentCard:
    values = [
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CARD"
    ]
    if not values or not isinstance(values[0], ast.Call):
        raise ConfigError(f"{path}: expected CARD to be a call of EnvironmentCard")
    try:
        fields = {str(k.arg): ast.literal_eval(k.value) for k in values[0].keywords}
        return EnvironmentCard(**fields)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{path}: CARD cannot be read ({error}); expected EnvironmentCard(...) with plain "
            "strings by name"
        ) from error


def _row(path: str, card: EnvironmentCard) -> tuple[str, ...]:
    cells = (card.task, card.turns, card.reward, card.data, card.needs)
    escaped = (" ".join(cell.replace("|", "\\|").split()) for cell in cells)
    return (f"[`{path}`]({path})", *escaped, f"`python environments/{path} {card.command}`")


def main() -> None:
    """Rewrite the tables of `environments/README.md`."""
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(page_with_tables(page, card_tables(find_cards())), encoding="utf-8")


if __name__ == "__main__":
    main()
