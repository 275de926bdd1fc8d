"""Math: problems, and the items that follow from them: preferences, judging, self-correction.

    normal: problem -> G solutions -> +1 or -1
      all right -> rlaif: which of the two least similar is better -> +1 and -1
      mixed     -> judge: is this solution right -> +1, -1, or how many retries it helps
                     retries -> selfcorrect: a group of their own

With SGLang on port 9004 (`--openai.server_type vllm` for vLLM), and without the hub:

    python environments/math_server.py process --env.dataset_path environments/data/math_sample \
        --env.total_steps 4 --env.tokenizer_name NAME --openai.model_name NAME
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from atroposlib.envs.base import APIServerConfig, EvalHandlingEnum, ScoredDataGroup
from atroposlib.envs.single_turn_env import (
    Trajectory,
    build_group,
    completion_budget,
    sample_trajectories,
)
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.math_problems import (
    MATH_SETS,
    EvalAnswer,
    KeptGroup,
    KeptGroups,
    MathConfig,
    MathItem,
    MathProblem,
    SolvingEnv,
    boxed_word,
    judge_messages,
    lead_of_first,
    least_similar_pair,
    preference_messages,
    retry_messages,
    score,
    solve_messages,
)
from atroposlib.tasks.single_turn_parts import default_configs
from atroposlib.utils.aio import all_results
from atroposlib.utils.math_check import answer_text

__all__ = ["MathEnv", "RSConfig"]

logger = logging.getLogger(__name__)

CARD = EnvironmentCard(
    task="mathematics; judging solutions; correcting them",
    turns="1",
    reward="+1 right, -1 wrong; a verdict on a wrong solution by the retries it helps",
    data="DeepMath from the hub, or `--env.dataset_path`",
    needs="SGLang; another server with `--openai.server_type vllm`",
    command="process --env.dataset_path environments/data/math_sample --env.total_steps 4",
)

MODEL = "NousResearch/Hermes-4-14B"
SAMPLING = {"temperature": 1.0, "top_p": 0.95}
MIN_BUDGET = 1024
"""An item is skipped if fewer tokens are left for a solution."""
MAX_EVAL_TOKENS = 32765
DIFFERENT = 0.975
"""Similarity below which two correct solutions are compared by a judge."""
NUM_VOTES = 3
"""Votes in each order of the two solutions."""
Messages = Sequence[Mapping[str, Any]]
Rollout = tuple[ScoredDataGroup | None, list[MathItem]]


SAMPLE = Path(__file__).with_name("data") / "math_sample"


class RSConfig(MathConfig):
    """Settings of the environment for chat models."""

    percent_to_judge: float = Field(
        0.3, ge=0, le=1, description="Probability that two solutions of a mixed group are judged."
    )


class MathEnv(SolvingEnv):
    """Problems of competitions and textbooks.

    Attributes:
        kept: trajectories that backlog items refer to.
    """

    env_config_cls = RSConfig
    config: RSConfig
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}
    eval_sets = MATH_SETS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept = KeptGroups()

    @classmethod
    def config_init(cls) -> tuple[RSConfig, list[APIServerConfig]]:
        config, server = default_configs(
            RSConfig,
            MODEL,
            server={"server_type": "sglang"},
            group_size=16,
            max_token_length=16384,
            max_num_workers_per_node=12,
            inference_weight=4,
            min_batch_allocation=0.1,
            batch_size=1024,
            steps_per_eval=25,
            eval_handling=EvalHandlingEnum.LIMIT_TRAIN,
            eval_limit_ratio=0.1,
            total_steps=1000,
            wandb_name="math",
        )
        return config, [server]

    async def collect_trajectories(self, item: MathItem) -> Rollout:
        if item.kind == "rlaif":
            return await self.prefer(item), []
        if item.kind == "judge":
            return await self.judge(item)
        if item.kind == "selfcorrect":
            return self.emit_retries(item), []
        return await self.solve(item)

    async def solve(self, item: MathItem) -> Rollout:
        """Sample solutions; return their group and the items that judge them."""
        messages = solve_messages(item.problem)
        trajectories = await self._sample(messages)
        answers = [trajectory.completion for trajectory in trajectories]
        correct = await self.check_answers(answers, item.answer)
        if not trajectories or correct is None:
            return None, []
        scores = [
            score(is_correct=is_correct, is_cut=trajectory.is_truncated)
            for is_correct, trajectory in zip(correct, trajectories, strict=True)
        ]
        self.metrics.note_solutions(trajectories, scores)
        self._note("normal", item, messages, trajectories[0], scores[0])
        if all(value == 1.0 for value in scores):
            later = await self._to_prefer(item, messages, trajectories)
            return self._concise_group(messages, trajectories), later
        if all(value == -1.0 for value in scores):
            return None, []
        later = self._to_judge(item, trajectories, scores)
        return self._group(messages, trajectories, scores), later

    async def prefer(self, item: MathItem) -> ScoredDataGroup | None:
        """Let judges choose between two correct solutions; None for a tie."""
        kept = self.kept.take(item.kept)
        if kept is None:
            return None
        first, second = item.solutions
        forward, backward = await all_results(
            self._votes(preference_messages(item.problem, *order))
            for order in ((first, second), (second, first))
        )
        lead = lead_of_first(forward, backward)
        if lead == 0:
            return None
        scores = [1.0, -1.0] if lead > 0 else [-1.0, 1.0]
        self._note("rlaif", item, kept.messages, kept.trajectories[0], scores[0])
        group = self._group(kept.messages, kept.trajectories, scores)
        group["group_overrides"] = {"group_size": len(scores)}
        return group

    async def judge(self, item: MathItem) -> Rollout:
        """Let the policy judge a solution.

        A right verdict on a wrong solution scores the fraction of right retries that are given it.
        """
        messages = judge_messages(item.problem, item.solutions[0])
        trajectories = await self._sample(messages)
        verdicts = [answer_text(trajectory.completion) for trajectory in trajectories]
        is_right = [
            not trajectory.is_truncated
            and boxed_word(verdict, ("True", "False")) == str(item.is_right)
            for verdict, trajectory in zip(verdicts, trajectories, strict=True)
        ]
        self.metrics.note("judge_train/percent_judge_correct", *map(float, is_right))
        if not any(is_right):
            return None, []
        later: list[MathItem] = []
        scores = [1.0 if right else -1.0 for right in is_right]
        if not item.is_right:
            helpful = [i for i, right in enumerate(is_right) if right]
            shares = await all_results(self._retry(item, verdicts[i], later) for i in helpful)
            for i, share in zip(helpful, shares, strict=True):
                scores[i] = share
        self._note("judge", item, messages, trajectories[0], scores[0])
        if all(value == 1.0 for value in scores):
            return self._concise_group(messages, trajectories), later
        if len(set(scores)) == 1:
            return None, later
        return self._group(messages, trajectories, scores), later

    def emit_retries(self, item: MathItem) -> ScoredDataGroup | None:
        """Return the group of retries that were sampled for a verdict."""
        kept = self.kept.take(item.kept)
        if kept is None:
            return None
        self._note("selfcorrect", item, kept.messages, kept.trajectories[0], kept.scores[0])
        return self._group(kept.messages, kept.trajectories, kept.scores)

    def check_gold_answer(self, item: MathItem) -> str:
        return f"<think>Straight to it.</think>The answer is {item.answer}."

    async def answer_for_evaluation(self, problem: MathProblem) -> EvalAnswer:
        messages = solve_messages(problem.question)
        reply = await self.server.chat_completion(
            messages=messages, n=1, max_tokens=MAX_EVAL_TOKENS, temperature=0.0, split="eval"
        )
        [choice] = reply.choices
        completion = choice.message.content or ""
        correct = await self.check_answers([completion], problem.answer)
        is_correct = bool(correct and correct[0]) and choice.finish_reason != "length"
        return EvalAnswer(is_correct, messages, completion, choice.finish_reason)

    async def _retry(self, item: MathItem, verification: str, later: list[MathItem]) -> float:
        """Sample retries that are given the verdict; return the fraction that is right."""
        messages = retry_messages(item.problem, item.solutions[0], verification)
        trajectories = await self._sample(messages)
        answers = [trajectory.completion for trajectory in trajectories]
        correct = await self.check_answers(answers, item.answer)
        if not trajectories or correct is None:
            return 0.0
        scores = [
            0.0 if trajectory.is_truncated else score(is_correct=is_correct)
            for is_correct, trajectory in zip(correct, trajectories, strict=True)
        ]
        share = scores.count(1.0) / len(scores)
        self.metrics.note("judge_train/judge_success_rate", share)
        if len(set(scores)) > 1:
            number = self.kept.put(KeptGroup(messages, trajectories, scores))
            later.append(MathItem(item.problem, item.answer, "selfcorrect", kept=number))
        return share

    async def _to_prefer(
        self, item: MathItem, messages: Messages, trajectories: Sequence[Trajectory]
    ) -> list[MathItem]:
        texts = [answer_text(trajectory.completion).strip() for trajectory in trajectories]
        if len(texts) < 2:
            return []
        pair = await self.score_pool.run(least_similar_pair, texts, default=None)
        if pair is None or pair.similarity >= DIFFERENT:
            return []
        chosen = (pair.first, pair.second)
        number = self.kept.put(KeptGroup(messages, [trajectories[i] for i in chosen], ()))
        solutions = tuple(texts[i] for i in chosen)
        return [MathItem(item.problem, item.answer, "rlaif", solutions, kept=number)]

    def _to_judge(
        self, item: MathItem, trajectories: Sequence[Trajectory], scores: Sequence[float]
    ) -> list[MathItem]:
        """Return items for a right and a wrong solution; empty without one of each."""
        if self.random.random() >= self.config.percent_to_judge:
            return []
        whole = [i for i, trajectory in enumerate(trajectories) if not trajectory.is_truncated]
        found = [next((i for i in whole if scores[i] == worth), None) for worth in (1.0, -1.0)]
        if None in found:
            return []
        texts = [answer_text(trajectories[i].completion).strip() for i in found if i is not None]
        return [
            MathItem(item.problem, item.answer, "judge", (text,), is_right=is_right)
            for text, is_right in zip(texts, (True, False), strict=True)
        ]

    async def _sample(self, messages: Messages) -> list[Trajectory]:
        """Sample a group; empty if the prompt leaves too little room."""
        budget = self._budget(messages)
        if budget < min(MIN_BUDGET, self.config.max_token_length // 2):
            logger.warning("item skipped: its prompt leaves no room in max_token_length")
            return []
        return await sample_trajectories(
            self.server,
            self.tokenizer,
            messages,
            group_size=self.config.group_size,
            max_tokens=budget,
            **SAMPLING,
        )

    async def _votes(self, messages: Messages) -> list[str]:
        budget = self._budget(messages)
        if budget < 1:
            return []
        reply = await self.server.chat_completion(
            messages=list(messages), n=NUM_VOTES, max_tokens=budget, **SAMPLING
        )
        return [answer_text(choice.message.content or "") for choice in reply.choices]

    def _budget(self, messages: Messages) -> int:
        limit = self.config.max_token_length
        return completion_budget(self.tokenizer, messages, max_token_length=limit)

    def _concise_group(
        self, messages: Messages, trajectories: Sequence[Trajectory]
    ) -> ScoredDataGroup | None:
        scores = self.maybe_concise_scores(trajectories)
        return None if scores is None else self._group(messages, trajectories, scores)

    def _group(
        self, messages: Messages, trajectories: Sequence[Trajectory], scores: Sequence[float]
    ) -> ScoredDataGroup:
        return build_group(
            messages,
            trajectories,
            scores,
            is_muted=self.is_masked(trajectories),
            generation_params=SAMPLING,
            include_messages=self.config.include_messages,
        )

    def _note(
        self, kind: str, item: MathItem, messages: Messages, trajectory: Trajectory, value: float
    ) -> None:
        prompt, gold = str(messages[-1]["content"]), item.answer
        self.metrics.note_rollout(kind, prompt, trajectory.completion, value, gold)


if __name__ == "__main__":
    MathEnv.cli()
