"""Evaluations whose replies are graded by a judge, a model on a server of its own by default.

    item ─► one chat ─► reply ─► request, with quoted texts ─► judge ─► verdict ─► EvalGrade

A reply without text is not sent to the judge. A verdict counts if the judge gives exactly one; a
missing one is the lowest grade, and a metric has their share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from atroposlib.tasks.evaluations import EvalFamilyConfig, EvaluationEnv
from atroposlib.tasks.judge_model import JudgeConfig, JudgeModel, judge_of

__all__ = [
    "HostedJudgeConfig",
    "JudgeModel",
    "JudgedEvalConfig",
    "JudgedEvaluationEnv",
    "judge_of",
]


class JudgedEvalConfig(JudgeConfig, EvalFamilyConfig):
    """Settings of the evaluations with a model as judge."""


class HostedJudgeConfig(JudgedEvalConfig):
    """Settings of the evaluations whose judge is `gpt-4o` at OpenAI by default."""

    judge_model_name: str | None = Field(
        "gpt-4o", description="Model of the judge; None uses the evaluated model."
    )
    judge_base_url: str | None = Field(
        "https://api.openai.com/v1",
        description="URL of the judge's server, ending in /v1; None uses the servers of the "
        "evaluated model, and that model.",
    )


class JudgedEvaluationEnv(EvaluationEnv):
    """An evaluation whose replies are graded by a judge; implement `grade` with `self.judge`.

    Attributes:
        judge: the judge.
    """

    env_config_cls = JudgedEvalConfig
    config: JudgedEvalConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.judge = self.make_judge()

    def make_judge(self) -> JudgeModel:
        return judge_of(self)

    def evaluation_metrics(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        metrics = super().evaluation_metrics(samples)
        del metrics[f"{self.source.prefix}total_correct"]  # scores are not right or wrong
        return metrics

    async def close(self) -> None:
        await self.judge.close()
        await super().close()
