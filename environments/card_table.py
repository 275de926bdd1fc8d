"""Rewrite the table of `environments/README.md`: `python -m environments.card_table`.

    environments/**/*.py -> CARD = EnvironmentCard(...) -> one row each, between two marks

The modules are parsed, not imported, so their dependencies are not needed.
"""

from __future__ import annotations

import ast
from pathlib import Path

from atroposlib.errors import ConfigError
from atroposlib.tasks.card import EnvironmentCard

__all__ = ["card_table", "find_cards", "page_with_table"]

FOLDER = Path(__file__).parent
PAGE = FOLDER / "README.md"
BEGIN = "<!-- table: python -m environments.card_table -->"
END = "<!-- end of table -->"
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


def card_table(cards: dict[str, EnvironmentCard]) -> str:
    """Return a Markdown table with one row per card."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *(_row(path, card) for path, card in cards.items())]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def page_with_table(page: str, table: str) -> str:
    """Return a page with the text between its marks replaced.

    Raises:
        ConfigError: the page lacks a mark.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ConfigError(f"the page has no place for the table, expected {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


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
    """Rewrite the table of `environments/README.md`."""
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(page_with_table(page, card_table(find_cards())), encoding="utf-8")


if __name__ == "__main__":
    main()
