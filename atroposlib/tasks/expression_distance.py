r"""Scores of formulas that are nearly right: the distance between expression trees.

    LaTeX ─► symbolic expression ─► simplified ─► equal? 100
                                              └─► tree ─► edit distance ─► 0 to 60

Call `eed_score` through a score pool: simplifying the formula of a model can take unbounded time.

Source: Qiu et al. 2025, "PHYBench", arXiv:2504.16074; Zhang and Shasha 1989, "Simple fast
algorithms for the editing distance between trees", SIAM J. Comput. 18(6), with the removal and
insertion of whole subtrees added.
"""

from __future__ import annotations

import logging
import multiprocessing
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = [
    "NOT_COMPUTED",
    "EEDScore",
    "ExpressionTree",
    "eed_score",
    "subtree_cost",
    "tree_distance",
]

logger = logging.getLogger(__name__)

MAX_LENGTH_RATIO = 3
"""A formula that is longer than the reference by this factor scores 0."""
MAX_NODES = 250
"""Larger trees are not compared: the work grows with up to the fourth power of their size."""
MAX_CHARACTERS = 2000
"""Longer formulas are not read: the parser is slow on them."""


class EEDScore(NamedTuple):
    """The result of one comparison; unpacks as `(score, relative_distance, tree_size, distance)`.

    The last three are -1 where they were not computed.
    """

    score: float
    """100 if equal, 0 to 60 otherwise."""
    relative_distance: float
    """Distance divided by the size of the reference."""
    tree_size: int
    """Nodes of the reference."""
    distance: float
    """Cost of the cheapest edits from the formula to the reference."""


NOT_COMPUTED = EEDScore(0.0, -1, -1, -1)


def eed_score(gold: str, answer: str) -> EEDScore:
    """Return how close a formula is to the reference.

    Args:
        gold: the reference, as LaTeX; of an equation, its last side counts.
        answer: the formula of a model, likewise.
    """
    gold, answer = _last_side(gold), _last_side(answer)
    if not gold or not answer or len(answer) > MAX_LENGTH_RATIO * len(gold):
        return NOT_COMPUTED
    if re.search(r"\\(?:(?:i{0,2}|o)int|sum)(?![a-z])", f"{gold} {answer}"):
        return NOT_COMPUTED
    try:
        wanted, given = _simplified(gold), _simplified(answer)
        is_equal = _is_equal(wanted, given)
        wanted_tree, given_tree = _tree(wanted), _tree(given)
        size, given_size = wanted_tree.size, given_tree.size
    except Exception as error:  # noqa: BLE001 - the parser fails in many ways on unusual text
        logger.debug("not comparable: %s", error)
        return NOT_COMPUTED
    if is_equal:
        return EEDScore(100.0, 0.0, size, 0.0)
    if max(size, given_size) > MAX_NODES:
        return NOT_COMPUTED
    distance = tree_distance(given_tree, wanted_tree)
    return EEDScore(max(0.0, 60 - 100 * distance / size), distance / size, size, distance)


_SPACING = re.compile(r"\\(?:[,;:!\[\]() ]|quad|qquad)(?![a-z])|\$")


def _last_side(text: str) -> str:
    """Return the text after the last equality sign, without spacing; empty if it is too long."""
    if len(text) > MAX_CHARACTERS:
        return ""
    text = _SPACING.sub(" ", text)
    return re.split(r"(?<![<>!])=|\\approx(?![a-z])", text)[-1].strip(" \t\r\n.,;")


def _simplified(latex: str) -> Any:
    import sympy
    from latex2sympy2_extended import NormalizationConfig, latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig

    expression = latex2sympy(
        latex,
        normalization_config=NormalizationConfig(malformed_operators=True),
        # The time t and the temperature T differ; 2\frac{1}{2} is a product.
        conversion_config=ConversionConfig(
            lowercase_symbols=False, interpret_as_mixed_fractions=False
        ),
    )
    positive = {each: sympy.Symbol(each.name, positive=True) for each in expression.free_symbols}
    return sympy.simplify(expression.xreplace(positive))


def _is_equal(first: Any, second: Any) -> bool:
    import sympy

    if first == second:
        return True
    return bool(sympy.simplify(first - second) == 0)


@dataclass(frozen=True)
class ExpressionTree:
    """A node: an operator with its arguments, a symbol or a number."""

    label: str
    children: tuple[ExpressionTree, ...] = ()

    @property
    def size(self) -> int:
        return 1 + sum(child.size for child in self.children)


def _tree(expression: Any) -> ExpressionTree:
    if not expression.args:
        return ExpressionTree(str(expression))
    children = tuple(_tree(argument) for argument in expression.args)
    return ExpressionTree(type(expression).__name__, children)


def subtree_cost(size: int) -> float:
    """Return the cost of removing or inserting a whole subtree: less than 1 per node beyond 5."""
    return min(size, 0.6 * (size - 5) + 5)


class _Nodes(NamedTuple):
    """The nodes of a tree in postorder, numbered from 1."""

    labels: list[str]
    leftmost: list[int]
    """Number of the leftmost leaf below each node."""
    keyroots: list[int]
    """The highest node for each leftmost leaf, ascending."""


def _nodes_of(tree: ExpressionTree) -> _Nodes:
    labels, leftmost = [""], [0]

    def visit(node: ExpressionTree) -> int:
        leaves = [visit(child) for child in node.children]
        labels.append(node.label)
        leftmost.append(leaves[0] if leaves else len(labels) - 1)
        return leftmost[-1]

    visit(tree)
    highest = {leaf: number for number, leaf in enumerate(leftmost) if number}
    return _Nodes(labels, leftmost, sorted(highest.values()))


def tree_distance(first: ExpressionTree, second: ExpressionTree) -> float:
    """Return the cost of the cheapest edits from one tree to the other.

    Removing, inserting or relabeling a node costs 1; a subtree costs `subtree_cost`.
    """
    one, two = _nodes_of(first), _nodes_of(second)
    distances = [[0.0] * len(two.labels) for _ in one.labels]  # of the subtrees of two nodes
    for root_one in one.keyroots:
        for root_two in two.keyroots:
            _compare_forests(one, two, root_one, root_two, distances)
    return distances[-1][-1]


def _compare_forests(
    one: _Nodes, two: _Nodes, root_one: int, root_two: int, distances: list[list[float]]
) -> None:
    """Fill in the distances of all subtrees with the leftmost leaves of the two roots."""
    start_one, start_two = one.leftmost[root_one], two.leftmost[root_two]
    # costs[i, k]: distance of the forests from the starts up to the nodes i and k; an index one
    # below the start stands for no node.
    costs = {(start_one - 1, start_two - 1): 0.0}
    for i in range(start_one, root_one + 1):
        left = one.leftmost[i]
        removed = costs[left - 1, start_two - 1] + subtree_cost(i - left + 1)
        costs[i, start_two - 1] = min(costs[i - 1, start_two - 1] + 1, removed)
    for k in range(start_two, root_two + 1):
        left = two.leftmost[k]
        inserted = costs[start_one - 1, left - 1] + subtree_cost(k - left + 1)
        costs[start_one - 1, k] = min(costs[start_one - 1, k - 1] + 1, inserted)
    for i in range(start_one, root_one + 1):
        for k in range(start_two, root_two + 1):
            left_one, left_two = one.leftmost[i], two.leftmost[k]
            cheapest = min(
                costs[i - 1, k] + 1,
                costs[i, k - 1] + 1,
                costs[left_one - 1, k] + subtree_cost(i - left_one + 1),
                costs[i, left_two - 1] + subtree_cost(k - left_two + 1),
            )
            if (left_one, left_two) == (start_one, start_two):
                relabeled = costs[i - 1, k - 1] + (one.labels[i] != two.labels[k])
                distances[i][k] = costs[i, k] = min(cheapest, relabeled)
            else:
                replaced = costs[left_one - 1, left_two - 1] + distances[i][k]
                costs[i, k] = min(cheapest, replaced)


if multiprocessing.parent_process() is not None:
    # In a scoring worker, import the parser together with this module: it takes seconds, which
    # would count towards the time limit of the first call.
    import latex2sympy2_extended  # noqa: F401 - kept in sys.modules for the calls
