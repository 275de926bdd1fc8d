"""Docstrings of the loss terms name source, formula, denominator and difference."""

from __future__ import annotations

import pytest

from example_trainer.loss import (
    CORRECTION_CLASSES,
    Distillation,
    KlPenalty,
    SupervisedLoss,
)

PARTS = [
    *CORRECTION_CLASSES.values(),
    KlPenalty,
    SupervisedLoss,
    Distillation,
]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_docstring_names_source_formula_denominator_and_difference(part):
    starts = {line.strip().split(" ")[0].rstrip(":,") for line in part.__doc__.splitlines()}

    assert starts >= {"Formula", "Denominator", "Differs"}
    assert starts & {"Paper", "Source"}
