"""`SingleTurnEnv`: an environment with one prompt per item.

    get_next_item ─► prompt ─► sample_trajectories ─► [G] Trajectory ─► score ─► build_group

The G completions are sampled in one request. Evaluations use the same `prompt` and `score`.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, NamedTuple

from pydantic import Field

from atroposlib.envs.base import BaseEnv, Item, ScoredDataGroup
from atroposlib.envs.conversation import checked_chat, visible_text
from atroposlib.envs.evaluation import EvaluationConfig, EvaluationRun
from atroposlib.envs.evaluation_statistics import numbers_of, uncertainty_metrics
from atroposlib.envs.reporting import (
    Reward,
    RewardWeights,
    WeighedReward,
    check_weight_names,
    complete_parts,
    part_means,
    weigh,
)
from atroposlib.envs.server_handling.chat_rendering import render_messages, text_of_content
from atroposlib.errors import ConfigError, NoTextCompletionsError
from atroposlib.scored_data import IGNORE_INDEX
from atroposlib.utils.aio import all_results, settle
from atroposlib.utils.tokenize_for_trainer import render_chat_ids
from atroposlib.utils.tracing import child_span

__all__ = [
    "Answer",
    "PromptRoom",
    "SingleTurnEnv",
    "SingleTurnEnvConfig",
    "Trajectory",
    "ask",
    "build_group",
    "complete",
    "completion_budget",
    "require_settings_of",
    "sample_trajectories",
]

logger = logging.getLogger(__name__)

RESERVED_TOKENS = 2
MAX_PROMPTS_WITHOUT_ROOM = 50


class Answer(NamedTuple):
    """One completion as text."""

    completion: str
    """Text, including the prefill."""
    finish_reason: str


@dataclass(frozen=True)
class Trajectory:
    """One completion of a prompt, with the tokens from the engine, or those of its text."""

    completion: str
    """Text, including the prefill."""
    finish_reason: str
    """`stop`, or `length` if it was truncated."""
    tokens: list[int]
    """[L] prompt and completion ids."""
    masks: list[int]
    """[L] -100 on the prompt, the ids on the completion."""
    inference_logprobs: list[float]
    """[L] 1.0 on the prompt, the policy's logprobs on the completion; 1.0 for tokens of a text."""

    @property
    def is_truncated(self) -> bool:
        return self.finish_reason == "length"

    @property
    def num_completion_tokens(self) -> int:
        return sum(1 for mask in self.masks if mask != IGNORE_INDEX)

    def chat(self, prompt: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return the messages of the prompt, followed by the completion as a message."""
        return [*prompt, {"role": "assistant", "content": self.completion}]


def completion_budget(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    max_token_length: int,
    prefill: str = "",
) -> int:
    """Return the maximum number of tokens of a completion; below 1 the prompt leaves no room.

    `RESERVED_TOKENS` remain unused: a group with a trajectory of `max_token_length` is dropped as
    too long, and some engines add a start token before the prompt.
    """
    prompt = render_chat_ids(tokenizer, messages, add_generation_prompt=True)
    prefill_ids = tokenizer.encode(prefill, add_special_tokens=False) if prefill else ()
    return max_token_length - len(prompt) - len(prefill_ids) - RESERVED_TOKENS


def require_settings_of(env: BaseEnv, expected: type[EvaluationConfig]) -> None:
    """Raise `ConfigError` if an environment lacks the settings that its base class reads."""
    if not isinstance(env.config, expected):
        raise ConfigError(
            f"{type(env).__name__}: its settings are a {type(env.config).__name__}; expected a "
            f"subclass of {expected.__name__}: let env_config_cls, and what config_init returns, "
            "be one"
        )


class PromptRoom:
    """Counts the prompts that leave no room for a completion; a run in which none does ends."""

    def __init__(self, env: BaseEnv) -> None:
        self.has_fit = False
        """Whether a prompt left room."""
        self._env = env
        self._num_skipped = 0

    @property
    def limit(self) -> int:
        """Maximum tokens of prompt and completion: the lower of the own and the trainer's limit."""
        own, trainers = self._env.config.max_token_length, self._env.max_token_len
        return min(own, trainers) if trainers > 0 else own

    def skip(self, limit: int, *, missing: int | None = None) -> None:
        """Log that an item is skipped, because its prompt leaves no room within a limit.

        Args:
            limit: the limit of prompt and completion.
            missing: tokens by which it is too low; None: unknown.

        Raises:
            ConfigError: it is so for each of the first `MAX_PROMPTS_WITHOUT_ROOM` items.
        """
        self._num_skipped += 1
        is_trainers = limit < self._env.config.max_token_length
        source = "the trainer's maximum length" if is_trainers else "max_token_length"
        problem = f"leaves no room in {source} ({limit})"
        if self._num_skipped >= MAX_PROMPTS_WITHOUT_ROOM and not self.has_fit:
            raise ConfigError(f"each of the first {self._num_skipped} prompts {problem}; raise it")
        more = f"; raise it by {missing} or more" if missing else ""
        logger.warning("item skipped: its prompt %s%s", problem, more)


async def ask(
    server: Any,
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    prefill: str = "",
    **sampling: Any,
) -> list[Answer]:
    """Request the completions of one prompt.

    Args:
        server: a `ServerManager` or a managed server.
        tokenizer: tokenizer for rendering a prompt with a prefill.
        messages: the prompt.
        prefill: start of every completion, as part of the prompt; omitted for a server that answers
            chats only.
        sampling: parameters of the engine, such as `n` and `max_tokens`. With `max_tokens` below 1,
            nothing is sent, and completions are empty and truncated.
    """
    if sampling.get("max_tokens", 1) < 1:
        return [Answer("", "length")] * sampling.get("n", 1)
    if not prefill:
        return await _chat(server, messages, sampling)
    prompt = render_messages(tokenizer, messages) + prefill
    return await complete(server, prompt, prefill=prefill, chat=messages, **sampling)


async def complete(
    server: Any,
    prompt: str,
    *,
    prefill: str = "",
    chat: Sequence[Mapping[str, Any]] | None = None,
    **sampling: Any,
) -> list[Answer]:
    """Request the continuations of a text, or the answers to a chat if the server takes only those.

    Args:
        server: a `ServerManager` or a managed server.
        prompt: the text.
        prefill: end of `prompt` that belongs to the completions, but not to answers to `chat`.
        chat: the messages that `prompt` renders; None means `prompt` as one user message.
        sampling: parameters of the engine.

    Returns:
        [n] completions.
    """
    try:
        texts = await server.completion(prompt=prompt, **sampling)
    except NoTextCompletionsError as error:
        logger.debug("%s", error)
        messages = [{"role": "user", "content": prompt}] if chat is None else chat
        return await _chat(server, messages, sampling)
    return [
        Answer(prefill + text_of_content(c.text), c.finish_reason or "stop") for c in texts.choices
    ]


async def _chat(
    server: Any, messages: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any]
) -> list[Answer]:
    chat = await server.chat_completion(messages=list(messages), **sampling)
    return [
        Answer(text_of_content(c.message.content), c.finish_reason or "stop") for c in chat.choices
    ]


async def sample_trajectories(
    server: Any,
    tokenizer: Any,
    prompt: Sequence[Mapping[str, Any]] | str,
    *,
    group_size: int,
    max_tokens: int,
    **sampling: Any,
) -> list[Trajectory]:
    """Return [G] completions of one prompt, in the order of the engine's choices.

    Args:
        server: the environment's `ServerManager`.
        tokenizer: the environment's tokenizer.
        prompt: messages, or a text to continue.
        group_size: G.
        max_tokens: token limit of one completion.
        sampling: further arguments of `ask` or `complete`, such as `temperature`.
    """
    sampling = {**sampling, "n": group_size, "max_tokens": max_tokens}
    async with server.managed_server(tokenizer=tokenizer) as managed:
        if isinstance(prompt, str):
            answers = await complete(managed, prompt, **sampling)
        else:
            answers = await ask(managed, tokenizer, prompt, **sampling)
        nodes = managed.get_state()["nodes"]
    return [
        Trajectory(
            completion=answer.completion,
            finish_reason=answer.finish_reason,
            tokens=node.tokens,
            masks=node.masked_tokens,
            inference_logprobs=node.logprobs,
        )
        for answer, node in zip(answers, nodes, strict=True)
    ]


def build_group(
    messages: Sequence[Mapping[str, Any]],
    trajectories: Sequence[Trajectory],
    scores: Sequence[float],
    *,
    is_muted: Sequence[bool],
    generation_params: Mapping[str, Any],
    include_messages: bool,
    reward_parts: Sequence[Mapping[str, float]] = (),
) -> ScoredDataGroup:
    """Combine trajectories and their scores.

    Args:
        messages: the prompt.
        trajectories: [G] trajectories.
        scores: [G] scores.
        is_muted: [G] whether a trajectory is excluded from training (`set_advantage_to_zero`).
        generation_params: sampling settings, for the record.
        include_messages: Whether to add the chats.
        reward_parts: [G] unweighted parts of each score; may be empty.
    """
    group: ScoredDataGroup = {
        "tokens": [trajectory.tokens for trajectory in trajectories],
        "masks": [trajectory.masks for trajectory in trajectories],
        "scores": [float(score) for score in scores],
        "inference_logprobs": [trajectory.inference_logprobs for trajectory in trajectories],
        "overrides": [{"set_advantage_to_zero": True} if muted else {} for muted in is_muted],
        "generation_params": dict(generation_params),
        "finish_reasons": [trajectory.finish_reason for trajectory in trajectories],
    }
    parts = complete_parts(reward_parts)
    if parts is not None:
        group["reward_parts"] = parts
    if include_messages:
        group["messages"] = [trajectory.chat(messages) for trajectory in trajectories]
    return group


async def _as_saved(_: Any, record: dict[str, Any]) -> dict[str, Any]:
    return record


class SingleTurnEnvConfig(EvaluationConfig):
    """Sampling and scoring; `max_token_length` is the limit of prompt and completion together."""

    temperature: float = Field(1.0, ge=0, description="Sampling temperature of rollouts.")
    mute_truncated: bool = Field(
        False, description="Whether to exclude truncated completions from training."
    )
    reward_weights: RewardWeights = Field(
        default_factory=dict,
        description="Weights of the named parts of a score, by name; the default weight is 1.",
    )


class SingleTurnEnv(BaseEnv):
    """Implement `get_next_item`, `prompt` and `score`; `eval_items` for evaluations.

    Attributes:
        scores_thinking: Whether `score` also gets the thinking.
        logs_percent_correct: Whether metrics are the fraction of positive scores, not their mean.
        min_trained_tokens: shorter completions stay in their group but are not trained.
        prefill: start of every completion; part of the prompt, not trained.
        scores_since_log: weighted scores since the last log.
        prompt_room: limit of prompt and completion, and the prompts without room.
    """

    scores_thinking: ClassVar[bool] = False
    logs_percent_correct: ClassVar[bool] = False
    min_trained_tokens: ClassVar[int] = 0
    prefill: str = ""
    env_config_cls = SingleTurnEnvConfig
    config: SingleTurnEnvConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        require_settings_of(self, SingleTurnEnvConfig)
        self.scores_since_log: list[float] = []
        self.prompt_room = PromptRoom(self)

    @abstractmethod
    def prompt(self, item: Item) -> Sequence[Mapping[str, Any]]:
        """Return the prompt of an item as messages."""

    @abstractmethod
    async def score(self, item: Item, answer: str) -> Reward:
        """Return the score of an answer; an exception fails the group.

        A mapping such as `{"answer": 1.0, "format": 0.2}` names the parts of the score. They are
        summed with the setting `reward_weights`, and each part is logged.

        Args:
            item: the item of the prompt.
            answer: the completion, without its thinking unless `scores_thinking` is set; empty if
                the completion was truncated.
        """

    async def score_all(self, item: Item, answers: Sequence[str]) -> Sequence[Reward]:
        """Return [G] scores of all answers to an item; the default calls `score` for each."""
        return await all_results(self._checked_score(item, answer) for answer in answers)

    def sampling(self) -> dict[str, Any]:
        """Return the sampling parameters of rollouts, as the engine takes them."""
        return {"temperature": self.config.temperature}

    def group_scores(
        self, scores: Sequence[float], trajectories: Sequence[Trajectory]
    ) -> Sequence[float]:
        """Return [G] final scores, for rules that depend on lengths or on the group."""
        return scores

    def note_group(
        self, item: Item, trajectories: Sequence[Trajectory], scores: Sequence[float]
    ) -> None:
        """Record statistics of a training group; called with [G] scores before `group_scores`."""

    def train_metrics(self, scores: Sequence[float]) -> dict[str, float]:
        """Return the metrics of the scores since the last log, at least one."""
        if self.logs_percent_correct:
            return {"train/percent_correct": statistics.fmean(score > 0 for score in scores)}
        return {"train/mean_score": statistics.fmean(scores)}

    def evaluation_metrics(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Return the metrics of an evaluation from its records, at least one."""
        scores = [sample["score"] for sample in samples]
        if self.logs_percent_correct:
            return {"eval/percent_correct": statistics.fmean(score > 0 for score in scores)}
        return {"eval/mean_score": statistics.fmean(scores)}

    def evaluation_values(self, record: Mapping[str, Any]) -> dict[str, float]:
        """Return the values of one record whose means are metrics, by name of the metric.

        They give the confidence intervals and are compared by `atropos-compare`. A name that
        `evaluation_metrics` does not have, or has with another mean, gets no interval.
        """
        score = record.get("score")
        if not isinstance(score, Real):
            return {}  # a record of an environment with metrics of its own
        value = float(score)
        if self.logs_percent_correct:
            return {"eval/percent_correct": float(value > 0)}
        return {"eval/mean_score": value}

    def is_correct(self, record: Mapping[str, Any]) -> bool:
        """Whether a record counts as correct for pass@k."""
        return bool(record.get("correct", (record.get("score") or 0) > 0))

    def evaluation_sampling(self) -> dict[str, Any]:
        """Return the sampling settings of evaluations, for the result."""
        return {"temperature": self.config.eval_temperature, "max_tokens": self.eval_token_limit}

    @property
    def eval_token_limit(self) -> int:
        """Limit of prompt and completion in evaluations; `max_token_length` by default."""
        return self.config.max_token_length

    def eval_items(self) -> Sequence[Item]:
        """Return the items for `evaluate`; none by default."""
        return ()

    async def collect_trajectories(self, item: Item) -> tuple[ScoredDataGroup | None, list[Item]]:
        """Sample G completions in one request and score them concurrently."""
        messages = self._checked_prompt(item)
        budget, limit = self._budget(messages), self.prompt_room.limit
        if limit < self.config.max_token_length:
            # Not in `_budget`, which evaluations also use: the trainer limits only its own data.
            budget = min(budget, self._room(messages, limit))
        if budget < 1:
            self.prompt_room.skip(limit, missing=1 - budget)
            return None, []
        self.prompt_room.has_fit = True
        trajectories = await sample_trajectories(
            self.server,
            self.tokenizer,
            messages,
            group_size=self.config.group_size,
            max_tokens=budget,
            prefill=self.prefill,
            **self.sampling(),
        )
        answers = [self._shown(t.completion, is_cut=t.is_truncated) for t in trajectories]
        rewards = await self.weighed_scores(item, answers)
        check_weight_names(
            self.config.reward_weights, [reward.parts for reward in rewards], self._score_name
        )
        scores = [reward.total for reward in rewards]
        self.scores_since_log += scores
        self.note_group(item, trajectories, scores)
        group = build_group(
            messages,
            trajectories,
            self.group_scores(scores, trajectories),
            is_muted=[self._is_muted(trajectory) for trajectory in trajectories],
            generation_params=self.sampling(),
            include_messages=self.config.include_messages,
            reward_parts=[reward.parts for reward in rewards],
        )
        return group, []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Sample every evaluation item `eval_samples_per_item` times; log and write the metrics."""
        started_at = time.time()
        with EvaluationRun[dict[str, Any]](self, encode=dict, decode=_as_saved) as run:
            samples = await run.sample(self.eval_items(), self.evaluate_item)
            if not samples:
                logger.info("no evaluation: eval_items gives none")
                return
            records = [sample.record for sample in samples]
            parts = [record.get("reward_parts", {}) for record in records]
            check_weight_names(self.config.reward_weights, parts, self._score_name)
            metrics = {**part_means(parts, "eval"), **self.evaluation_metrics(records)}
            metrics |= await asyncio.to_thread(
                uncertainty_metrics,
                metrics,
                item_ids=[sample.item_id for sample in samples],
                values=[self.evaluation_values(record) for record in records],
                is_correct=[self.is_correct(record) for record in records],
            )
            await self.evaluate_log(
                metrics=metrics,
                samples=[
                    {
                        **sample.record,
                        "item_id": sample.item_id,
                        "sample_index": sample.sample_index,
                        "metric_values": self.evaluation_values(sample.record),
                    }
                    for sample in samples
                ],
                start_time=started_at,
                end_time=time.time(),
                generation_parameters=run.sampling(self.evaluation_sampling()),
            )
        await self.wandb_log(numbers_of(metrics))

    async def evaluate_item(self, item: Item) -> dict[str, Any]:
        """Sample and score one answer to an evaluation item; return its record."""
        messages = self._checked_prompt(item)
        extra_tokens = self.eval_token_limit - self.config.max_token_length
        [answer] = await ask(
            self.server,
            self.tokenizer,
            messages,
            prefill=self.prefill,
            n=1,
            max_tokens=self._budget(messages) + extra_tokens,
            temperature=self.config.eval_temperature,
            split="eval",
        )
        shown = self._shown(answer.completion, is_cut=answer.finish_reason == "length")
        [score] = await self.weighed_scores(item, [shown])
        return {
            "messages": [*messages, {"role": "assistant", "content": answer.completion}],
            "score": score.total,
            **({"reward_parts": score.parts} if score.parts else {}),
            "finish_reason": answer.finish_reason,
        }

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        metrics = {} if wandb_metrics is None else wandb_metrics
        if self.scores_since_log:
            metrics.update(self.train_metrics(self.scores_since_log))
        self.scores_since_log = []
        await super().wandb_log(metrics)

    def _shown(self, completion: str, *, is_cut: bool) -> str:
        if is_cut:
            return ""
        return completion if self.scores_thinking else visible_text(completion)

    @property
    def _score_name(self) -> str:
        return f"{type(self).__name__}.score"

    async def _checked_score(self, item: Item, answer: str) -> Reward:
        score: Reward = await settle(self.score(item, answer))
        weigh(score, {}, f"{self._score_name} returned")  # raises on an invalid score
        return score

    async def weighed_scores(self, item: Item, answers: Sequence[str]) -> list[WeighedReward]:
        """Call `score_all` and sum the parts of each score with `reward_weights`."""
        weights = self.config.reward_weights
        with child_span("rl.score", {"rl.group.size": len(answers)}):
            rewards = await self.score_all(item, answers)
        return [weigh(reward, weights, f"{self._score_name} returned") for reward in rewards]

    def _checked_prompt(self, item: Item) -> Sequence[Mapping[str, Any]]:
        signature = "def prompt(self, item)"
        return checked_chat(self.prompt(item), f"{type(self).__name__}.prompt", signature=signature)

    def _is_muted(self, trajectory: Trajectory) -> bool:
        is_cut = self.config.mute_truncated and trajectory.is_truncated
        return is_cut or trajectory.num_completion_tokens < self.min_trained_tokens

    def _budget(self, messages: Sequence[Mapping[str, Any]]) -> int:
        return self._room(messages, self.config.max_token_length)

    def _room(self, messages: Sequence[Mapping[str, Any]], limit: int) -> int:
        return completion_budget(
            self.tokenizer, messages, max_token_length=limit, prefill=self.prefill
        )
