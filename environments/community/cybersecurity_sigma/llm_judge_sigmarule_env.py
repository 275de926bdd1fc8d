r"""Sigma rules, scored by a judge: `cybersecurity_sigma_env.py` with a model's rating.

    request -> [system, user] -> G completions -> \boxed{YAML} -> judge -> \boxed{0 to 1}

The judge is the environment's own model, or that of `--env.judge_base_url`:

    python environments/community/cybersecurity_sigma/llm_judge_sigmarule_env.py process \
        --env.dataset_path environments/community/cybersecurity_sigma/sample --env.total_steps 4
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from atroposlib.envs.conversation import visible_text
from atroposlib.tasks.answers import boxed_answer
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.judge import quotations, quoted_parts
from atroposlib.tasks.judge_model import JudgeConfig, NoVerdictError, judge_of
from atroposlib.tasks.siblings import sibling_imports

if TYPE_CHECKING or __package__:
    from environments.community.cybersecurity_sigma import cybersecurity_sigma_env as by_similarity
else:
    with sibling_imports(__file__):
        import cybersecurity_sigma_env as by_similarity

__all__ = ["JudgedSigmaRuleConfig", "SigmaRuleEnv", "read_rating"]

CARD = EnvironmentCard(
    task="write a Sigma detection rule, rated by a judge",
    turns="1",
    reward="0 to 1, the judge's number; 0 without a readable rule",
    data="Sigma rules from the hub, or `--env.dataset_path`",
    command="process --env.dataset_path environments/community/cybersecurity_sigma/sample "
    "--env.total_steps 4",
)

RATING = re.compile(r"0(?:\.\d{1,4})?|1(?:\.0{1,4})?|\.\d{1,4}")
REQUEST = (
    "An analyst has asked for a Sigma detection rule. Compare a rule with the reference rule: does "
    "it detect the same events, from the same log source, with no more false alarms? Other names "
    "and another order do not matter, if the rule means the same. 1 is a rule that means the same "
    "as the reference, 0 one that detects nothing of what was asked for.\n\n{quotations}\n\n"
    "End with your rating, a number from 0 to 1, in the form \\boxed{{0.5}}."
)


class JudgedSigmaRuleConfig(JudgeConfig, by_similarity.SigmaRuleConfig):
    """Settings of the requests and of the judge."""


def read_rating(verdict: str) -> float | None:
    """Return the number in the last box after the thinking; None unless it is from 0 to 1."""
    number = boxed_answer(visible_text(verdict))
    return float(number) if number and RATING.fullmatch(number) else None


class SigmaRuleEnv(by_similarity.SigmaRuleEnv):
    """Requests for detection rules that a judge rates.

    Attributes:
        judge: rates rules.
    """

    name = "llm_judge_sigmarule"
    env_config_cls = JudgedSigmaRuleConfig
    config: JudgedSigmaRuleConfig
    default_settings: ClassVar[dict[str, Any]] = {
        **by_similarity.SigmaRuleEnv.default_settings,
        "wandb_name": "llm_judge_sigmarule",
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.judge = judge_of(self, split="train")

    async def score(self, item: by_similarity.Row, answer: str) -> float:
        """Return the rating of the boxed rule; 0.0 without a readable one, which is not judged.

        Raises:
            NoVerdictError: the judge gave no number from 0 to 1.
        """
        rule = by_similarity.boxed_rule(answer) or ""
        is_readable: bool = await self.score_pool.run(_is_rule, rule, default=False)
        if not is_readable:
            return 0.0
        parts = {
            "request": str(item[self.config.prompt_column]),
            "reference": str(item[self.config.rule_column]),
            "rule": rule,
        }
        verdict = await self.judge.reply(REQUEST.format(quotations=quotations(parts)))
        rating = read_rating(verdict)
        if rating is None:
            raise NoVerdictError(f"the judge gave no number from 0 to 1: {verdict[-80:]!r}")
        return rating

    async def close(self) -> None:
        await self.judge.close()
        await super().close()

    def check_judge_reply(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        parts = quoted_parts(str(messages[-1].get("content")))
        if not parts:
            return None
        is_gold = parts["rule"].split() == parts["reference"].split()
        return f"\\boxed{{{float(is_gold)}}}"


def _is_rule(text: str) -> bool:
    return by_similarity.read_rule(text) is not None


if __name__ == "__main__":
    SigmaRuleEnv.cli()
