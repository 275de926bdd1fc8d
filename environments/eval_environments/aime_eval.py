r"""AIME: problems of an olympiad qualifier whose answers are integers from 0 to 999.

    problem -> one chat -> the one \boxed{} -> math-verify in a worker process -> right or wrong

    python environments/eval_environments/aime_eval.py evaluate \
        --env.dataset_path environments/data/aime_sample --env.data_dir_to_save_evals results

Metrics: those of `gsm8k_eval.py`, and `aime_{year}_accuracy`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from atroposlib.envs.dataset_items import hub_rows
from atroposlib.errors import ConfigError
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.evaluations import (
    BOXED_SOURCES,
    BoxedEvalConfig,
    BoxedEvalEnv,
    EvalQuestion,
)

__all__ = ["AIMEEvalConfig", "AIMEEvalEnv"]

CARD = EnvironmentCard(
    task="problems of an olympiad qualifier (AIME 2024, 2025)",
    turns="1",
    reward="1 right, 0 wrong",
    data="AIME from the hub, or `--env.dataset_path`",
    command="evaluate --env.dataset_path environments/data/aime_sample",
)
SAMPLE = Path(__file__).parents[1] / "data" / "aime_sample"

YEARS = {"2024": "HuggingFaceH4/aime_2024", "2025": "yentinglin/aime_2025"}
"""Year to its data set on the hub."""


class AIMEEvalConfig(BoxedEvalConfig):
    """Settings of AIME."""

    years: list[str] = Field(["2024", "2025"], min_length=1, description="Years to evaluate.")


class AIMEEvalEnv(BoxedEvalEnv):
    """AIME; an item has the group `year`. Local files may have a column `year`."""

    name = "aime_eval"
    source = BOXED_SOURCES["aime"]
    env_config_cls = AIMEEvalConfig
    config: AIMEEvalConfig
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}

    @classmethod
    def check_inputs(cls, config: Any) -> None:
        super().check_inputs(config)
        unknown = sorted(set(config.years) - YEARS.keys())
        if unknown and not (config.dataset_path or config.dataset_name):
            raise ConfigError(
                f"env.years: no data set is known for {', '.join(unknown)}; expected "
                f"{' or '.join(YEARS)}, or another data set in --env.dataset_path"
            )

    def load_questions(self) -> list[EvalQuestion]:
        """Read the problems of the chosen years; rows without a year belong to all of them."""
        config = self.config
        if config.dataset_path or config.dataset_name:
            questions = super().load_questions()
            known = {("year", year) for year in config.years}
            return [each for each in questions if not each.groups or known & {*each.groups}]
        return self.read_rows(
            [
                {**row, "year": year}
                for year in config.years
                for row in hub_rows(YEARS[year], split=self.split, subset=config.dataset_subset)
            ]
        )


if __name__ == "__main__":
    AIMEEvalEnv.cli()
