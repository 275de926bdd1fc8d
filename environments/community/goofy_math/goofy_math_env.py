r"""Goofy math: word problems whose right solutions are compared for their goofiness.

    problem -> [system, user] -> G completions -> boxed answer: right or wrong
        -> right ones: pairs around a circle, judged in both orders -> 1 + 0.5 x share of wins

Problems come from GSM8K on the hub or from local files:

    python environments/community/goofy_math/goofy_math_env.py process --env.dataset_path \
        environments/community/goofy_math/sample --env.total_steps 4
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from atroposlib.envs.base import Item, ScoredDataGroup
from atroposlib.envs.conversation import visible_text
from atroposlib.envs.dataset_items import DatasetItems, HubItemsConfig
from atroposlib.envs.single_turn_env import SingleTurnEnv, SingleTurnEnvConfig
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.judge import Case, quoted_answers
from atroposlib.tasks.judge_model import JudgeConfig, NoVerdictError, judge_of
from atroposlib.tasks.math_problems import math_verdict
from atroposlib.utils.aio import all_results

__all__ = ["GoofyMathConfig", "GoofyMathEnv", "circle_pairs", "goofy_scores"]

CARD = EnvironmentCard(
    task="grade-school word problems, solved in a goofy way",
    turns="1",
    reward="-1 wrong; right 1, and up to 0.5 for comparisons won by goofiness",
    data="GSM8K from the hub, or `--env.dataset_path`",
    command="process --env.dataset_path environments/community/goofy_math/sample "
    "--env.total_steps 4",
)

SAMPLE = Path(__file__).with_name("sample")
WRONG, RIGHT, BONUS = -1.0, 1.0, 0.5
CRITERION = (
    "Both answers solve the problem. The goofier one is better: it amuses by playful pictures, "
    "silly characters, puns or mock drama that grow out of this problem. Its steps must still be "
    "right and easy to follow. Text that is only random, a joke that has nothing to do with the "
    "problem, and strings of exclamation marks or emoji are not goofy."
)
SYSTEM_PROMPT = (
    "You solve word problems rightly, and in as goofy a way as you can: invent silly characters, "
    "puns and absurd little scenes around the numbers of the problem, while each step stays "
    "correct. You may reason first between <think> and </think>; only what follows is shown. End "
    "with the answer, once, as a plain number in the form \\boxed{number}."
)
Problem = Mapping[str, str]
"""One row: `question`, and `answer`, a worked solution with the gold answer after its last `#`."""


class GoofyMathConfig(HubItemsConfig, JudgeConfig, SingleTurnEnvConfig):
    """Settings of the problems, and of the judge of goofiness."""

    num_opponents: int = Field(
        2,
        ge=1,
        description="Number of following right answers that each right answer of a group is "
        "compared with; each comparison takes two requests to the judge.",
    )


def circle_pairs(members: Sequence[int], *, num_opponents: int) -> list[tuple[int, int]]:
    """Return pairs of each member and the next ones around a circle; no pair occurs twice."""
    size = len(members)
    pairs = dict.fromkeys(
        tuple(sorted((members[i], members[(i + step) % size])))
        for step in range(1, min(num_opponents, size - 1) + 1)
        for i in range(size)
    )
    return [(first, second) for first, second in pairs]


def goofy_scores(
    is_right: Sequence[bool], wins: Mapping[tuple[int, int], int]
) -> list[float] | None:
    """Return [G] scores: -1 for a wrong answer, 1 to 1.5 for a right one.

    Args:
        is_right: [G] whether an answer is right.
        wins: wins of the first answer of a pair of right ones in two verdicts, one in each order;
            without the pairs that the judge gave no verdict on.

    Returns:
        None if a right answer has no comparison.
    """
    won = [0] * len(is_right)
    asked = [0] * len(is_right)
    for (first, second), count in wins.items():
        won[first] += count
        won[second] += 2 - count
        asked[first] += 2
        asked[second] += 2
    if any(right and not number for right, number in zip(is_right, asked, strict=True)):
        return None
    return [
        RIGHT + BONUS * won[i] / asked[i] if right else WRONG for i, right in enumerate(is_right)
    ]


class GoofyMathEnv(DatasetItems, SingleTurnEnv):
    """Word problems with a judge of their solutions; an item is a `Problem`.

    Attributes:
        judge: compares right answers.
    """

    name = "goofy_math"
    hub_dataset = "gsm8k"
    hub_subset = "main"
    hub_test_split = "test"
    env_config_cls = GoofyMathConfig
    config: GoofyMathConfig
    columns = ("question", "answer")
    scores_thinking = True  # the check of the number skips the thinking, also an unfinished one
    logs_percent_correct = True
    default_model = "Qwen/Qwen3-1.7B"
    default_settings: ClassVar[dict[str, Any]] = {
        "group_size": 8,
        "max_token_length": 4096,
        "wandb_name": "goofy_math",
    }
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE), "num_score_workers": 1}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.judge = judge_of(self, split="train")

    def prompt(self, item: Problem) -> list[dict[str, str]]:
        return [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": item["question"]},
        ]

    async def score(self, item: Problem, answer: str) -> float:
        """Return 1.0 for the gold answer, -1.0 otherwise."""
        verdict = await math_verdict(self.score_pool, answer, gold_answer(item))
        return RIGHT if verdict.is_correct else WRONG

    async def score_all(self, item: Problem, answers: Sequence[str]) -> Sequence[float]:
        """Compare the right answers if there are two or more; otherwise nothing is judged.

        Raises:
            NoVerdictError: the judge gave no verdict on any comparison of a right answer.
        """
        scores = await all_results(self.score(item, answer) for answer in answers)
        right = [i for i, score in enumerate(scores) if score > 0]
        if len(right) < 2:
            return scores
        pairs = circle_pairs(right, num_opponents=self.config.num_opponents)
        texts = [visible_text(answer) for answer in answers]
        chat = self.prompt(item)[1:]
        wins = await all_results(
            self.judge.wins(Case(chat, texts[i], texts[j], CRITERION)) for i, j in pairs
        )
        counted = {p: w for p, w in zip(pairs, wins, strict=True) if w is not None}
        compared = goofy_scores([score > 0 for score in scores], counted)
        if compared is None:
            raise NoVerdictError("a right answer has no comparison with a verdict in both orders")
        return compared

    async def collect_trajectories(
        self, item: Problem
    ) -> tuple[ScoredDataGroup | None, list[Item]]:
        """Sample and score a group; None with fewer than two right answers."""
        group, backlog = await super().collect_trajectories(item)
        if group is not None and sum(score > 0 for score in group["scores"]) < 2:
            return None, backlog
        return group, backlog

    async def close(self) -> None:
        await self.judge.close()
        await super().close()

    def check_gold_answer(self, item: Problem) -> str:
        return f"<think>?</think>The penguins have counted: \\boxed{{{gold_answer(item)}}}."

    def check_judge_reply(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        return None if quoted_answers(messages) is None else "\\boxed{A}"


def gold_answer(item: Problem) -> str:
    """Return the number after the last `#` of the worked solution, without thousands commas."""
    return item["answer"].rsplit("#", 1)[-1].strip().replace(",", "")


if __name__ == "__main__":
    GoofyMathEnv.cli()
