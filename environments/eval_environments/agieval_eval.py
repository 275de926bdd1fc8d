"""AGIEval: questions of admission and qualification examinations.

    question, A. B. C. D. -> one chat -> <answer>B</answer> -> right or wrong

    python environments/eval_environments/agieval_eval.py evaluate \
        --env.dataset_path environments/data/agieval_sample --env.data_dir_to_save_evals results

Each examination is a data set of its own on the hub; `--env.dataset_subset lsat-lr` takes one, and
`--env.english_only false` adds those in Chinese. Where the data set has several correct options,
each of them is right.
Metrics: `eval/overall_accuracy`, `eval/subset_{k}_accuracy`, `eval/extraction_{method}_count`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from atroposlib.envs.dataset_items import hub_rows
from atroposlib.errors import ConfigError
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.choice_evaluations import (
    AGIEVAL_ENGLISH,
    AGIEVAL_GAOKAO,
    CHOICE_SOURCES,
    ChoiceEvalConfig,
    ChoiceEvalEnv,
)
from atroposlib.utils.text import near_name

__all__ = ["AGIEvalConfig", "AGIEvalEnv"]

CARD = EnvironmentCard(
    task="questions of examinations (AGIEval)",
    turns="1",
    reward="1 right, 0 wrong",
    data="AGIEval from the hub, or `--env.dataset_path`",
    command="evaluate --env.dataset_path environments/data/agieval_sample",
)
SAMPLE = Path(__file__).parents[1] / "data" / "agieval_sample"


class AGIEvalConfig(ChoiceEvalConfig):
    """Settings of AGIEval."""

    english_only: bool = Field(
        True, description="Whether the examinations in Chinese are left out of those of the hub."
    )


class AGIEvalEnv(ChoiceEvalEnv):
    """AGIEval; an item has the group `subset`. Local files may have a column `subset`."""

    name = "agieval_eval"
    source = CHOICE_SOURCES["agieval"]
    env_config_cls = AGIEvalConfig
    config: AGIEvalConfig
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}

    @classmethod
    def check_inputs(cls, config: Any) -> None:
        super().check_inputs(config)
        known = AGIEVAL_ENGLISH + AGIEVAL_GAOKAO
        subset = config.dataset_subset
        is_usual = not (config.dataset_path or config.dataset_name)
        if is_usual and subset and subset not in known:
            raise ConfigError(f"env.dataset_subset: unknown {subset!r}{near_name(subset, known)}")

    def rows(self, split: str, files: Sequence[str]) -> list[dict[str, Any]]:
        config = self.config
        if config.dataset_path or config.dataset_name:
            return super().rows(split, files)
        names = AGIEVAL_ENGLISH if config.english_only else AGIEVAL_ENGLISH + AGIEVAL_GAOKAO
        return [
            {"subset": name, **row}
            for name in ([config.dataset_subset] if config.dataset_subset else names)
            for row in hub_rows(self.source.path.format(name), split=split)
        ]

    def evaluation_metrics(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        methods = Counter(sample["extraction_method"] for sample in samples)
        counts = {f"eval/extraction_{name}_count": methods[name] for name in sorted(methods)}
        return {**super().evaluation_metrics(samples), **counts}


if __name__ == "__main__":
    AGIEvalEnv.cli()
