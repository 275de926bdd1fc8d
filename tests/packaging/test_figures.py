"""The tools behind the quality figures: mutants of the pure rules, and coverage."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import yaml

from helpers.coverage_figures import Counts, read_report, table
from helpers.mutants.__main__ import EQUIVALENT
from helpers.mutants.changes import find_changes
from helpers.mutants.running import mutants_of
from helpers.mutants.subjects import SUBJECTS, Part, Subject
from helpers.pure_rules import PURE_RULES

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("a < b", ["a < b -> a <= b", "a < b -> a >= b"]),
        ("a == b", ["a == b -> a != b"]),
        ("a + b", ["a + b -> a - b"]),
        ("a and not b", ["a and (not b) -> a or not b", "not b -> b"]),
        ("x = True", ["True -> False"]),
        ("x = 2.5", ["2.5 -> 3.5"]),
        ("x = 'text'", []),
        ("x.y = z", ["x.y = z -> pass"]),
        ("x += y", ["x += y -> x -= y", "x += y -> pass"]),
        ("f(min(a, b))", ["f(min(a, b)) -> pass", "min(a, b) -> max(a, b)"]),
        ("if a: b()", ["if a: b() -> if not a: b()", "b() -> pass"]),
        ("raise ValueError(1 + 2)", ["raise ValueError(1 + 2) -> pass"]),
        ("for x in y:\n  continue", ["continue -> break"]),
        (
            "def f(x: int | None = 1) -> int | None:\n  return x",
            ["1 -> 2", "return x -> return None"],
        ),
        ("where(c, a, b)", ["where(c, a, b) -> pass"]),
        ("x = t.where(c, a, b)", ["t.where(c, a, b) -> t.where(c, b, a)"]),
        ("x = f'{a + b}'", []),
        ("logger.info(a + b)", []),
        ("zip(a, b, strict=True)", ["zip(a, b, strict=True) -> pass"]),
        ("'''A docstring.'''", []),
        ("if TYPE_CHECKING:\n  x = 1", []),
    ],
)
def test_changes_of_a_statement(code: str, expected: list[str]) -> None:
    assert [change.text for change in find_changes(ast.parse(code))] == expected


def test_change_is_named_by_its_place_and_changes_only_that() -> None:
    code = "class A:\n    def f(self):\n        return 1 + 1\n\ndef g():\n    return 2\n"
    names = [change.name for change in find_changes(ast.parse(code))]

    assert names == [
        "A.f: return 1 + 1 -> return None", "A.f: 1 + 1 -> 1 - 1", "A.f: 1 -> 2",
        "A.f: 1 -> 2 (#2)", "g: 2 -> 3",
    ]  # fmt: skip
    tree = ast.parse(code)
    find_changes(tree)[3].apply()
    assert ast.unparse(tree) == ast.unparse(ast.parse(code.replace("1 + 1", "1 + 2")))


def test_order_of_a_change_depends_on_its_name_only() -> None:
    before = find_changes(ast.parse("def f():\n    return a + b"))
    after = find_changes(ast.parse("x = 1\n\n\ndef f():\n    return a + b"))

    assert [change.order for change in before] == [change.order for change in after][1:]


@pytest.mark.parametrize(
    ("part", "held"),
    [
        (Part("m.py"), ["", "A", "A.f", "B"]),
        (Part("m.py", only=("A",)), ["A", "A.f"]),
        (Part("m.py", without=("A",)), ["", "B"]),
        (Part("m.py", only=("A",), without=("A.f",)), ["A"]),
    ],
)
def test_part_of_a_module(part: Part, held: list[str]) -> None:
    assert [where for where in ("", "A", "A.f", "B") if part.holds(where)] == held


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_subject_has_mutants_of_each_part_and_its_tests_exist(subject: Subject) -> None:
    paths = {mutant.path for mutant in mutants_of(subject)}

    assert paths == {part.path for part in subject.parts}
    for part in subject.parts:
        code = (REPOSITORY / part.path).read_text(encoding="utf-8")
        for name in (*part.only, *part.without):
            assert f"def {name}(" in code or f"class {name}" in code, name
    for argument in subject.tests:
        assert (REPOSITORY / argument.removeprefix("--deselect=").partition("::")[0]).exists()


def test_equivalent_mutants_exist_and_have_a_reason() -> None:
    known = {(m.path, m.change.name) for subject in SUBJECTS for m in mutants_of(subject)}

    for path, reasons in yaml.safe_load(EQUIVALENT.read_text(encoding="utf-8")).items():
        for name, reason in reasons.items():
            assert (path, name) in known, f"{path}: {name}: remove the entry, or rename it"
            assert len(reason.split()) > 3, name


def module(num_lines: int, covered: int, num_branches: int, taken: int) -> dict[str, object]:
    return {
        "summary": {
            "num_statements": num_lines,
            "covered_lines": covered,
            "num_branches": num_branches,
            "covered_branches": taken,
        }
    }


@pytest.mark.parametrize(
    ("covered", "taken", "is_met"), [(90, 95, True), (89, 95, False), (90, 94, False)]
)
def test_coverage_is_compared_with_its_goals(covered: int, taken: int, is_met: bool) -> None:
    report = {
        "files": {
            "atroposlib/api/run.py": module(100, covered, 10, 0),  # no pure rule
            "example_trainer/grpo.py": module(100, 0, 10, 0),  # not of the library
            "example_trainer/loss.py": module(100, 0, 100, taken),
        }
    }

    lines, met = table(read_report(report))

    assert met is is_met
    assert lines[2] == f"| atroposlib/api | 100 | {covered:.1f} % | 10 | 0.0 % |  |"
    assert lines[-1] == f"| **pure rules** | 100 | 0.0 % | 100 | {taken:.1f} % | branches >= 95 % |"


def test_coverage_of_nothing_is_complete() -> None:
    assert (Counts().lines, Counts().branches) == (100.0, 100.0)


@pytest.mark.parametrize("name", PURE_RULES)
def test_pure_rules_are_modules(name: str) -> None:
    path = REPOSITORY / name.replace(".", "/")
    assert path.with_suffix(".py").exists() or (path / "__init__.py").exists()
