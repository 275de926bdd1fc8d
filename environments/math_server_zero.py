"""Math zero: problems for a base model, which continues a plain text instead of a chat.

    text ending in "<think>" -> G continuations -> box in the last <answer> -> +1 or -1

The maximum length of a continuation grows with the trainer's step. With a vLLM server on port
9001, and without the hub:

    python environments/math_server_zero.py process --env.total_steps 4 \
        --env.dataset_path environments/data/math_sample \
        --env.tokenizer_name NAME --openai.model_name NAME
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from atroposlib.envs.base import APIServerConfig, EvalHandlingEnum, ScoredDataGroup
from atroposlib.envs.single_turn_env import Trajectory, build_group, complete, sample_trajectories
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.math_problems import (
    ZERO_SETS,
    ZERO_STOPS,
    EvalAnswer,
    MathConfig,
    MathItem,
    MathProblem,
    SolvingEnv,
    score,
    subset_counts,
    zero_answer,
    zero_prompt,
    zero_reply,
)
from atroposlib.tasks.single_turn_parts import default_configs

__all__ = ["MathEnv", "RSConfig", "curriculum_length"]

logger = logging.getLogger(__name__)

CARD = EnvironmentCard(
    task="mathematics for a base model, without a chat template",
    turns="1",
    reward="+1 right, -1 wrong",
    data="DeepMath from the hub, or `--env.dataset_path`",
    command="process --env.dataset_path environments/data/math_sample --env.total_steps 4",
)

MODEL = "Qwen/Qwen3-4B-Instruct-2507"
SAMPLING: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0}
THINK_START = "<think>"
"""End of the prompt; part of the completion in the messages of a group."""
RESERVED_TOKENS = 2


SAMPLE = Path(__file__).with_name("data") / "math_sample"


class RSConfig(MathConfig):
    """Settings of the environment for base models."""

    percent_length_penalty: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Probability that a group of only correct answers is scored by length; "
        "otherwise it is dropped.",
    )
    start_tok_length: int = Field(
        8192, ge=1, description="Maximum tokens of a continuation at trainer step 0."
    )


def curriculum_length(
    *, num_prompt_tokens: int, max_length: int, start_length: int, step: int, total_steps: int
) -> int:
    """Return the maximum tokens of a continuation; below 1 if the prompt leaves no room."""
    part = step / total_steps if total_steps > 0 else 1.0
    grown = start_length + (max_length - start_length) * part
    return int(min(max_length - num_prompt_tokens - RESERVED_TOKENS, grown))


class MathEnv(SolvingEnv):
    """Problems of competitions and textbooks for a base model."""

    env_config_cls = RSConfig
    config: RSConfig
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}
    eval_sets = ZERO_SETS

    @classmethod
    def config_init(cls) -> tuple[RSConfig, APIServerConfig]:
        return default_configs(
            RSConfig,
            MODEL,
            port=9001,
            server={"num_requests_for_eval": 256},
            group_size=8,
            batch_size=64,
            total_steps=120,
            steps_per_eval=20,
            max_token_length=32000,
            start_tok_length=32000,
            max_num_workers_per_node=24,
            worker_timeout=1500,
            eval_handling=EvalHandlingEnum.LIMIT_TRAIN,
            eval_limit_ratio=0.1,
            wandb_name="math-zero-env",
        )

    async def collect_trajectories(
        self, item: MathItem
    ) -> tuple[ScoredDataGroup | None, list[MathItem]]:
        prompt = zero_prompt(item.problem)
        budget = self._budget(prompt)
        if budget < 1:
            logger.warning("item skipped: its prompt leaves no room in max_token_length")
            return None, []
        self.metrics.note("train/curr_token_length", budget)
        trajectories = await sample_trajectories(
            self.server,
            self.tokenizer,
            prompt,
            group_size=self.config.group_size,
            max_tokens=budget,
            prefill=THINK_START,
            stop=list(ZERO_STOPS),
            **SAMPLING,
        )
        replies = [t.completion.removeprefix(THINK_START) for t in trajectories]
        is_cut = [trajectory.is_truncated for trajectory in trajectories]
        correct = await self._are_correct(replies, is_cut, item.answer)
        if correct is None:
            return None, []
        scores = [score(is_correct=is_correct) for is_correct in correct]
        self.metrics.note_solutions(trajectories, scores)
        self.metrics.note_rollout("normal", item.problem, replies[0], scores[0], item.answer)
        return self._group(item, trajectories, scores), []

    def check_gold_answer(self, item: MathItem) -> str:
        return f" Straight to it. </think> <answer> {item.answer} </answer>"

    async def answer_for_evaluation(self, problem: MathProblem) -> EvalAnswer:
        prompt = zero_prompt(problem.question)
        limit = self.config.max_token_length - self._num_tokens(prompt) - RESERVED_TOKENS
        [reply] = await complete(
            self.server,
            prompt,
            prefill=THINK_START,
            n=1,
            max_tokens=max(1, limit),
            temperature=0.0,
            stop=list(ZERO_STOPS),
            split="eval",
        )
        is_cut = reply.finish_reason == "length"
        continuation = reply.completion.removeprefix(THINK_START)
        correct = await self._are_correct([continuation], [is_cut], problem.answer)
        messages = [{"role": "user", "content": problem.question}]
        is_correct = bool(correct and correct[0])
        return EvalAnswer(is_correct, messages, reply.completion, reply.finish_reason)

    def evaluation_result(self, correct: Mapping[str, Sequence[bool]]) -> dict[str, Any]:
        return {"metrics": subset_counts(correct), "task_name": "math_zero"}

    async def _are_correct(
        self, replies: Sequence[str], is_cut: Sequence[bool], gold: str
    ) -> list[bool] | None:
        """Return whether each reply has the gold answer in its tag; None for an unreadable gold."""
        whole = [zero_reply(reply, is_cut=cut) for reply, cut in zip(replies, is_cut, strict=True)]
        answers = [
            "" if cut else zero_answer(reply) or ""
            for reply, cut in zip(whole, is_cut, strict=True)
        ]
        return await self.check_answers(answers, gold, skip_thinking=False)

    def _group(
        self, item: MathItem, trajectories: Sequence[Trajectory], scores: Sequence[float]
    ) -> ScoredDataGroup | None:
        if all(value == 1.0 for value in scores):
            concise = self.maybe_concise_scores(trajectories)
            if concise is None:
                return None
            scores = concise
        elif all(value == -1.0 for value in scores):
            return None
        return build_group(
            [{"role": "user", "content": item.problem}],
            trajectories,
            scores,
            is_muted=self.is_masked(trajectories),
            generation_params=SAMPLING,
            include_messages=self.config.include_messages,
        )

    def _budget(self, prompt: str) -> int:
        return curriculum_length(
            num_prompt_tokens=self._num_tokens(prompt),
            max_length=self.config.max_token_length,
            start_length=self.config.start_tok_length,
            step=self.curr_step,
            total_steps=self.config.total_steps,
        )

    def _num_tokens(self, prompt: str) -> int:
        return len(self.tokenizer.encode(prompt))


if __name__ == "__main__":
    MathEnv.cli()
