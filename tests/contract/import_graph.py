"""The import graph of the repository, read from the source without running it."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("atroposlib", "example_trainer", "environments")


def module_name(path: Path) -> str:
    """Return the dotted name of a source file, relative to the repository."""
    parts = list(path.relative_to(REPOSITORY).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def source_files() -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted((REPOSITORY / package).rglob("*.py"))


def _statements(tree: ast.AST, *, lazy: bool) -> Iterator[ast.stmt]:
    """Yield import statements; those inside functions only when `lazy`, type-only ones never."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not lazy:
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        yield from _statements(node, lazy=lazy)


def _targets(node: ast.stmt, importer: str, is_package: bool, known: Collection[str]) -> set[str]:
    """Modules of ours that a statement imports; a package only where a name of its own is."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names} & set(known)
    assert isinstance(node, ast.ImportFrom)
    base = node.module or ""
    if node.level:
        parents = importer.split(".") if is_package else importer.split(".")[:-1]
        parents = parents[: len(parents) - node.level + 1]
        base = ".".join([*parents, base] if base else parents)
    members = {f"{base}.{alias.name}" for alias in node.names} & set(known)
    return members if len(members) == len(node.names) else (members | {base}) & set(known)


def _named_imports(tree: ast.AST) -> Iterator[str]:
    """Yield the modules of calls of `import_module` with a literal name."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func
        name = called.id if isinstance(called, ast.Name) else called
        argument = node.args[0]
        if name == "import_module" and isinstance(argument, ast.Constant):
            yield str(argument.value)


def import_graph(*, lazy: bool) -> dict[str, set[str]]:
    """Map every module of ours to the modules of ours it imports.

    Args:
        lazy: Count imports inside functions and calls of `import_module` too.
    """
    files = {module_name(path): path for path in source_files()}
    graph: dict[str, set[str]] = {}
    for name, path in files.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        is_package = path.name == "__init__.py"
        found: set[str] = set()
        for node in _statements(tree, lazy=lazy):
            found |= _targets(node, name, is_package, files)
        if lazy:
            found |= set(_named_imports(tree)) & files.keys()
        graph[name] = found - {name}
    return graph


def find_circle(graph: dict[str, set[str]]) -> list[str] | None:
    """Return one circle of imports as a path that ends where it began, or None."""
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> list[str] | None:
        if name in trail:
            return [*trail[trail.index(name) :], name]
        if name in done:
            return None
        for target in sorted(graph.get(name, ())):
            circle = visit(target, [*trail, name])
            if circle:
                return circle
        done.add(name)
        return None

    for name in sorted(graph):
        circle = visit(name, [])
        if circle:
            return circle
    return None
