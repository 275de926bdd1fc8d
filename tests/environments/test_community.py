"""The contributed environments: layout of each folder, `check` of each environment."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.base import BaseEnv
from atroposlib.envs.check import check_environment
from atroposlib.errors import MissingExtraError
from environments.card_table import find_cards
from environments.community.roman_numerals.roman_numerals_env import (
    Numeral,
    score_numeral,
    to_roman,
)

FOLDER = Path(__file__).parents[2] / "environments" / "community"
NAMES = sorted(path.name for path in FOLDER.iterdir() if path.is_dir() and path.name[0] not in "._")
FILES = sorted(path.stem for path in FOLDER.glob("*.py"))
"""Environments at a path of an earlier version, without a folder."""
MAX_FOLDER_BYTES = 200_000
EARLIER_MODULES = {
    "cat_behavior_env": ["cat_server.py", "catbot_arena.py"],
    "dynastai": ["dynastai_server.py"],
    "wikipedia_research": ["wikipedia_article_creator.py"],
}
"""Modules of folders that keep their paths of earlier versions."""
IMPORT = re.compile(r"^\s*(?:from|import)\s+environments\b(?:\.community\.(\w+)\b)?", re.MULTILINE)
"""An import of a file of `environments/`; the group is its folder, if it is a contributed one."""
EXTENDING = 'with sibling_imports(__file__, "../.."):'
"""The module extends an environment of the folder above."""


def module_of(name: str) -> str:
    return name if name.endswith("_env") else f"{name}_env"


def modules_of(name: str) -> list[str]:
    """Return the modules of a folder: its own, and others for the same data."""
    return sorted(path.stem for path in (FOLDER / name).glob("*.py"))


PATHS = [f"{name}.{module}" for name in NAMES for module in modules_of(name)] + FILES


def files_of(name: str) -> list[Path]:
    return [
        path
        for path in (FOLDER / name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]


def environment_of(path: str) -> type[Any]:
    """Return the class of a contributed environment; skips if a package is missing."""
    try:
        module = importlib.import_module(f"environments.community.{path}")
    except MissingExtraError as error:
        pytest.skip(str(error))
    own = [
        member
        for member in vars(module).values()
        # `Mapping[str, str]` is a type in Python 3.10, and `issubclass` raises on it.
        if BaseEnv in getattr(member, "__mro__", ()) and member.__module__ == module.__name__
    ]
    assert len(own) == 1, f"expected one subclass of BaseEnv, found {own}"
    return own[0]


def test_there_is_an_example() -> None:
    assert "roman_numerals" in NAMES


@pytest.mark.parametrize("name", NAMES)
def test_folder_has_the_layout_of_the_page(name: str) -> None:
    files = files_of(name)
    modules = sorted(path.name for path in files if path.suffix == ".py")
    others = {path.relative_to(FOLDER / name).parts[0] for path in files} - set(modules)

    assert re.fullmatch(r"[a-z][a-z0-9_]*", name)
    if name in EARLIER_MODULES:
        assert modules == EARLIER_MODULES[name]
    else:
        assert f"{module_of(name)}.py" in modules
        assert all(re.fullmatch(r"[a-z][a-z0-9_]*_env\.py", module) for module in modules)
    assert "README.md" in others
    assert others <= {"README.md", "sample"}
    assert list(find_cards(FOLDER / name)) == modules
    assert sum(path.stat().st_size for path in files) <= MAX_FOLDER_BYTES
    for module in modules:
        source = (FOLDER / name / module).read_text(encoding="utf-8")
        imported = {found[1] or "" for found in IMPORT.finditer(source)}
        allowed = {name, ""} if EXTENDING in source else {name}
        assert imported <= allowed, "it imports another file of environments/"


@pytest.mark.parametrize("name", FILES)
def test_file_without_a_folder_has_a_card(name: str) -> None:
    source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")

    assert f"{name}.py" in find_cards(FOLDER)
    assert not IMPORT.search(source), "it imports another file of environments/"


@pytest.mark.parametrize("path", PATHS)
def test_environment_passes_the_check(path: str) -> None:
    report = check_environment(environment_of(path))

    if any("is not installed; run in a clone" in failure.detail for failure in report.failures):
        pytest.skip(report.text)
    assert report.passed, report.text


@pytest.mark.parametrize(
    ("number", "numeral"),
    [(1, "I"), (4, "IV"), (9, "IX"), (48, "XLVIII"), (1994, "MCMXCIV"), (3999, "MMMCMXCIX")],
)
def test_roman_numeral(number: int, numeral: str) -> None:
    assert to_roman(number) == numeral


@pytest.mark.parametrize(
    ("answer", "item", "total"),
    [
        ("<answer>IV</answer>", Numeral(4, True), 1.0),
        ("It is <answer> 4 </answer>.", Numeral(4, False), 1.0),
        ("<answer>1,994</answer>", Numeral(1994, False), 1.0),
        ("<answer>19,94</answer>", Numeral(1994, False), 0.1),
        ("<answer>IIII</answer>", Numeral(4, True), 0.1),
        ("<answer>iv</answer>", Numeral(4, True), 0.1),
        ("<answer>IV</answer><answer>IV</answer>", Numeral(4, True), 0.0),
        ("<answer></answer>", Numeral(4, True), 0.0),
        ("IV", Numeral(4, True), 0.0),
        ("", Numeral(4, True), 0.0),
    ],
)
def test_roman_answer(answer: str, item: Numeral, total: float) -> None:
    assert sum(score_numeral(answer, item).values()) == pytest.approx(total)
