"""Distances between formulas, and the score for one that is nearly right."""

from __future__ import annotations

import pytest

from atroposlib.tasks.expression_distance import (
    NOT_COMPUTED,
    ExpressionTree,
    eed_score,
    subtree_cost,
    tree_distance,
)


def tree(label: str, *children: ExpressionTree | str) -> ExpressionTree:
    nodes = (ExpressionTree(each) if isinstance(each, str) else each for each in children)
    return ExpressionTree(label, tuple(nodes))


CLUSTER = tree("f", *"uvwxyz")  # 7 nodes: 0.6 * 2 + 5 = 6.2
LEFT = tree("f", tree("d", "a", tree("c", "b")), "e")
RIGHT = tree("f", tree("c", tree("d", "a", "b")), "e")


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (tree("a"), tree("a"), 0.0),
        (tree("a"), tree("b"), 1.0),
        (LEFT, RIGHT, 2.0),  # c is removed and inserted, as in Zhang and Shasha 1989
        (tree("r", "a", CLUSTER), tree("r", "a"), 6.2),
        (tree("r", "a"), tree("r", "a", CLUSTER), 6.2),
        (tree("r", "a", tree("g", "b")), tree("r", "a"), 2.0),
        (tree("r", "a", "b"), tree("r", "b", "a"), 2.0),
    ],
)
def test_distance_of_trees(first: ExpressionTree, second: ExpressionTree, expected: float) -> None:
    assert tree_distance(first, second) == pytest.approx(expected)
    assert tree_distance(second, first) == pytest.approx(expected)


@pytest.mark.parametrize(("size", "cost"), [(1, 1), (5, 5), (6, 5.6), (15, 11)])
def test_large_subtrees_cost_less_than_their_nodes(size: int, cost: float) -> None:
    assert subtree_cost(size) == pytest.approx(cost)


@pytest.mark.parametrize(
    ("gold", "answer", "expected"),
    [
        ("\\frac{1}{2} m v^2", "E = \\frac{m v^{2}}{2}", (100.0, 0.0, 6, 0.0)),
        ("\\sin^2 x+\\cos^2 x", "1", (100.0, 0.0, 1, 0.0)),
        ("\\sqrt{x^2}", "x", (100.0, 0.0, 1, 0.0)),  # symbols are positive
        # Mul(1/2, g, h, m) has 5 nodes, of which one is missing: 60 - 100 / 5
        ("m g h/2", "m g h", (40.0, 0.2, 5, 1.0)),
        ("T", "t", (0.0, 1.0, 1, 1.0)),
        ("a+b", "c", (0.0, 1.0, 3, 3.0)),
    ],
)
def test_score_of_formulas(gold: str, answer: str, expected: tuple[float, ...]) -> None:
    assert tuple(eed_score(gold, answer)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("x", ""),
        ("", "x"),
        ("x", "\\int x dx"),
        ("\\sum_n n", "x"),
        ("x", "y+y+y"),  # more than three times as long
        ("a+b", "}{"),
        ("x" * 4000, "x" * 4000),
        ("x+y+z+w", "[" * 10),
        ("x+y+z", "x<y"),
    ],
)
def test_formula_that_cannot_be_compared_scores_zero(gold: str, answer: str) -> None:
    assert eed_score(gold, answer) == NOT_COMPUTED
