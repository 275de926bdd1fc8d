r"""GSM8K as an evaluation: word problems, the answer in exactly one box.

    problem -> one chat -> the one \boxed{} -> math-verify in a worker process -> right or wrong

    python environments/eval_environments/gsm8k_eval.py evaluate \
        --env.dataset_path environments/data/gsm8k_sample --env.data_dir_to_save_evals results

Metrics: `accuracy`, `total_evaluated`, `total_correct`, `has_boxed_rate`, `multiple_boxed_rate`,
`format_compliance_rate`, `thinking_utilization_rate`, `verification_methods`. To train on GSM8K,
use `gsm8k_server.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.evaluations import BOXED_SOURCES, BoxedEvalEnv

__all__ = ["GSM8KEvalEnv"]

CARD = EnvironmentCard(
    task="grade-school word problems, as an evaluation (GSM8K)",
    turns="1",
    reward="1 right, 0 wrong",
    data="GSM8K from the hub, or `--env.dataset_path`",
    command="evaluate --env.dataset_path environments/data/gsm8k_sample",
)
SAMPLE = Path(__file__).parents[1] / "data" / "gsm8k_sample"


class GSM8KEvalEnv(BoxedEvalEnv):
    """GSM8K; the gold answer is the number after `####`."""

    name = "gsm8k_eval"
    source = BOXED_SOURCES["gsm8k"]
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}


if __name__ == "__main__":
    GSM8KEvalEnv.cli()
