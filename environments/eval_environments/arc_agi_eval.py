"""ARC-AGI-2: grids of digits and a rule to find from a few solved examples.

    examples, grid -> one chat -> <answer>[[0, 1], [1, 0]]</answer> -> equal in every cell?

    python environments/eval_environments/arc_agi_eval.py evaluate \
        --env.dataset_path environments/data/arc_agi_sample --env.data_dir_to_save_evals results

A row with several test grids is several questions, each with the same examples. An answer is a list
of rows, or lines of digits with spaces or commas between them; an answer with several grids is
wrong.
Metrics: `accuracy`, `total_evaluated`, `total_correct`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.evaluations import EvalGrade, EvalQuestion
from atroposlib.tasks.text_evaluations import TEXT_SOURCES, TextEvalEnv, list_of_mappings

__all__ = ["ARCAGIEvalEnv", "read_grid"]

CARD = EnvironmentCard(
    task="a rule for grids of digits, from examples (ARC-AGI-2)",
    turns="1",
    reward="1 if every cell is right, else 0",
    data="ARC-AGI-2 from the hub, or `--env.dataset_path`",
    command="evaluate --env.dataset_path environments/data/arc_agi_sample",
)
SAMPLE = Path(__file__).parents[1] / "data" / "arc_agi_sample"

Grid = tuple[tuple[int, ...], ...]
MAX_ANSWER_CHARACTERS = 20_000
"""Longer answers are not searched; a grid has at most 30 rows of 30 digits."""
_GAP = r"\s{0,40}"
_END = rf"(?:{_GAP},)?{_GAP}[\])]"
_ROW = rf"[\[(]{_GAP}[0-9](?:{_GAP},{_GAP}[0-9]){{0,29}}{_END}"
_ROWS = re.compile(rf"[\[(]{_GAP}(?P<rows>{_ROW}(?:{_GAP},{_GAP}{_ROW}){{0,29}}){_END}")
"""A list of lists, as JSON or Python write it; a text matches in at most one way."""
_LINE = re.compile(r"[\[(|]?\s{0,5}[0-9](?:[\s,|]{1,5}[0-9]){0,29}\s{0,5}[\])|]?,?")


class ARCAGIEvalEnv(TextEvalEnv):
    """ARC-AGI-2; the gold answer is a grid."""

    name = "arc_agi_eval"
    source = TEXT_SOURCES["arc_agi"]
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}
    answer_request: ClassVar[str] = (
        "Find the rule and apply it to the input of the test. Give the output as a list of rows of "
        "digits between <answer> and </answer>, as in <answer>[[0, 1], [1, 0]]</answer>."
    )

    def read_rows(self, rows: Sequence[Mapping[str, Any]]) -> list[EvalQuestion]:
        """Convert rows; each pair of grids that is asked for is a question."""
        pairs = [
            {**row, "question": pair} for row in rows for pair in list_of_mappings(row["question"])
        ]
        return super().read_rows(pairs)

    async def grade_text(self, item: EvalQuestion, answer: str | None, method: str) -> EvalGrade:
        grid = None if answer is None else read_grid(answer)
        if answer is not None and grid is None:
            method = "answer_tag_no_grid"
        text = None if grid is None else _grid_text(grid)
        return EvalGrade(float(grid == item.gold), text, method, grid is not None)

    def gold_text(self, item: EvalQuestion) -> str:
        return _grid_text(item.gold)

    def check_gold_answer(self, item: EvalQuestion) -> str:
        return f"<think>I compare the examples.</think><answer>{_grid_text(item.gold)}</answer>"


def read_grid(text: str) -> Grid | None:
    """Return the one grid of a text; None without one, or if its rows differ in length."""
    if len(text) > MAX_ANSWER_CHARACTERS:
        return None
    grids = {
        tuple(_digits(row) for row in re.findall(r"[\[(][^\])]*", match["rows"]))
        for match in _ROWS.finditer(text)
    }
    if not grids:
        lines = [line.strip() for line in text.splitlines()]
        rows = [line for line in lines if line and not line.startswith("```")]
        if rows and all(_LINE.fullmatch(row) for row in rows):
            grids = {tuple(_digits(row) for row in rows)}
    grid = grids.pop() if len(grids) == 1 else ()
    return grid if len({len(row) for row in grid}) == 1 else None


def _digits(row: str) -> tuple[int, ...]:
    return tuple(int(digit) for digit in re.findall("[0-9]", row))


def _grid_text(grid: Grid) -> str:
    return str([list(row) for row in grid])


if __name__ == "__main__":
    ARCAGIEvalEnv.cli()
