"""The changes that make mutants of a module: one small change of its syntax tree each; pure.

A change replaces one node: a comparison, an arithmetic or boolean operator, a constant, a
condition, a returned value, a minimum or maximum, or a statement. Annotations, decorators, texts,
log calls and the messages of errors are left as they are: tests of behavior need not notice them.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
"""Operator and its replacements: the neighbor at the boundary, and the opposite."""
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
NAMES = {
    "min": "max", "max": "min", "any": "all", "all": "any",
    "minimum": "maximum", "maximum": "minimum", "ceil": "floor", "floor": "ceil",
}  # fmt: skip
"""Function or method and the one that is called in its place."""
LOGGERS = ("logger", "logging", "warnings")
UNREAD_FIELDS = ("annotation", "returns", "decorator_list", "bases", "ctx")


class Change(NamedTuple):
    """One change of a module."""

    where: str
    """Class and function, such as `GroupQueue.remove`; empty at the top of the module."""
    line: int
    text: str
    """The node before and after, such as `a < b -> a <= b`."""
    number: int
    """Which of the changes with the same place and text, counted from 0."""
    apply: Callable[[], None]
    """Changes the tree that the change was found in."""

    @property
    def name(self) -> str:
        """What stays the same when other lines of the module change."""
        return f"{self.where}: {self.text}" + (f" (#{self.number + 1})" if self.number else "")

    @property
    def order(self) -> int:
        """A random number that depends on the name only."""
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:6], "big")


class _Slot(NamedTuple):
    """The place of a node in its parent."""

    parent: ast.AST
    field: str
    position: int | None
    """In the field, if that is a list."""

    def put(self, node: ast.AST) -> None:
        if self.position is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.position] = node


def find_changes(tree: ast.Module) -> list[Change]:
    """Return every change of a module, in the order of its lines.

    `Change.apply` changes this tree.
    """
    counts: Counter[tuple[str, str]] = Counter()
    changes = []
    for where, slot, old, new in _replacements(tree, ""):
        text = f"{_shown(old)} -> {_shown(new)}"
        number = counts[where, text]
        counts[where, text] += 1
        line = getattr(old, "lineno", 0)
        changes.append(Change(where, line, text, number, _putting(slot, old, new)))
    return changes


def _putting(slot: _Slot, old: ast.AST, new: ast.AST) -> Callable[[], None]:
    def put() -> None:
        slot.put(ast.fix_missing_locations(ast.copy_location(new, old)))

    return put


def _shown(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 100 else text[:97] + "..."


_Found = tuple[str, _Slot, ast.AST, ast.AST]


def _replacements(node: ast.AST, where: str) -> Iterator[_Found]:
    """Yield place, slot, node and replacement for each change below `node`."""
    for slot, child in _children(node):
        inner = where
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inner = f"{where}.{child.name}".lstrip(".")
        if _is_unread(child):
            continue
        for new in _alternatives(child):
            yield inner, slot, child, new
        if not isinstance(child, ast.Raise):
            yield from _replacements(child, inner)


def _children(node: ast.AST) -> Iterator[tuple[_Slot, ast.AST]]:
    for field, value in ast.iter_fields(node):
        if field in UNREAD_FIELDS or (field == "keywords" and isinstance(node, ast.ClassDef)):
            continue
        if isinstance(value, ast.AST):
            yield _Slot(node, field, None), value
        elif isinstance(value, list):
            for index, entry in enumerate(value):
                if isinstance(entry, ast.AST):
                    yield _Slot(node, field, index), entry


def _is_unread(node: ast.AST) -> bool:
    """Return whether no test of behavior reads a node: a text, an import, a log call."""
    match node:
        case ast.JoinedStr() | ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant()):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))):
            return name in LOGGERS
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.keyword(arg="strict"):
            return True  # of zip, whose arguments have equal lengths
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name == "__all__"
        case ast.Assign(value=ast.Call(func=ast.Name(id="TypeVar"))):
            return True
        case _:
            return False


def _alternatives(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare():
            yield from _comparisons(node)
        case ast.BinOp(op=op, left=left, right=right) if type(op) in ARITHMETIC:
            if not (_is_text(left) or _is_text(right)):
                yield _with(node, op=ARITHMETIC[type(op)]())
        case ast.AugAssign(op=op) if type(op) in ARITHMETIC:
            yield _with(node, op=ARITHMETIC[type(op)]())
            yield ast.Pass()
        case ast.BoolOp(op=op):
            yield _with(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert(), operand=operand):
            yield operand
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            yield ast.Constant(value + 1)
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            if not isinstance(test, (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Constant)):
                yield _with(node, test=ast.UnaryOp(ast.Not(), test))
        case ast.Call(func=ast.Name(id=name)) if name in NAMES:
            yield _with(node, func=ast.Name(NAMES[name], ast.Load()))
        case ast.Call(func=ast.Attribute(attr=name, value=value)) if name in NAMES:
            yield _with(node, func=ast.Attribute(value, NAMES[name], ast.Load()))
        case ast.Call(func=ast.Attribute(attr="where"), args=[test, yes, no]):
            yield _with(node, args=[test, no, yes])
        case ast.Return(value=value) if value is not None and not isinstance(value, ast.Constant):
            yield ast.Return(ast.Constant(None))
        case ast.Continue():
            yield ast.Break()
        case ast.Expr(value=ast.Call()) | ast.Raise() | ast.Delete() | ast.Break():
            yield ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield ast.Pass()


def _comparisons(node: ast.Compare) -> Iterator[ast.AST]:
    for index, op in enumerate(node.ops):
        for other in COMPARISONS[type(op)]:
            ops = [*node.ops[:index], other(), *node.ops[index + 1 :]]
            yield _with(node, ops=ops)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _with(node: ast.AST, **fields: object) -> ast.AST:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new
