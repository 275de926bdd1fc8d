"""`SingleTurnEnv`: an environment whose items are one prompt each.

    get_next_item ─► prompt ─► G completions in one request ─► score of each ─► group

The author writes what is asked and what an answer is worth; evaluations ask and score alike.

One prompt, G completions, one group: what environments of a single turn share.

messages -> sample_trajectories -> [G] Trajectory -> scores of the environment -> build_group
"""

from __future__ import annotations

import logging
import statistics
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from pydantic import Field

from atroposlib.envs.base import BaseEnv, BaseEnvConfig, Item, ScoredDataGroup
from atroposlib.envs.conversation import checked_chat, visible_text
from atroposlib.envs.reporting import (
    Reward,
    RewardWeights,
    WeighedReward,
    check_weight_names,
    complete_parts,
    part_means,
    weigh,
)
from atroposlib.envs.server_handling.chat_rendering import render_messages
from atroposlib.errors import NoTextCompletionsError
from atroposlib.scored_data import IGNORE_INDEX
from atroposlib.utils.aio import all_results, settle
from atroposlib.utils.tokenize_for_trainer import render_chat_ids

__all__ = [
    "Answer",
    "SingleTurnEnv",
    "SingleTurnEnvConfig",
    "Trajectory",
    "ask",
    "build_group",
    "complete",
    "completion_budget",
    "sample_trajectories",
]

RESERVED_TOKENS = 2


class Answer(NamedTuple):
    """One completion as text."""

    completion: str
    """With the prefill before it, if there was one."""
    finish_reason: str


@dataclass(frozen=True)
class Trajectory:
    """One completion of a prompt, with the tokens the engine reported, or those of its text."""

    completion: str
    """What the policy wrote, as text."""
    finish_reason: str
    """`stop`, or `length` when it was cut."""
    tokens: list[int]
    """[L] prompt and completion ids."""
    masks: list[int]
    """[L] -100 on the prompt, the ids on the completion."""
    inference_logprobs: list[float]
    """[L] 1.0 on the prompt, the policy's logprobs on the completion; 1.0 there too where the
    tokens are those of its text."""

    @property
    def is_truncated(self) -> bool:
        """Whether the token budget cut the completion."""
        return self.finish_reason == "length"

    @property
    def num_completion_tokens(self) -> int:
        """Tokens the policy wrote."""
        return sum(1 for mask in self.masks if mask != IGNORE_INDEX)

    def chat(self, prompt: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return the messages of the prompt and, behind them, the completion as a message."""
        return [*prompt, {"role": "assistant", "content": self.completion}]


def completion_budget(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    max_token_length: int,
    prefill: str = "",
) -> int:
    """Return how many tokens a completion may have; below 1 the prompt leaves no room.

    `RESERVED_TOKENS` stay free: a trajectory that fills the limit to the last token is refused as
    too long, its whole group with it, and some engines put a start token before the prompt.
    """
    prompt = render_chat_ids(tokenizer, messages, add_generation_prompt=True)
    prefill_ids = tokenizer.encode(prefill, add_special_tokens=False) if prefill else ()
    return max_token_length - len(prompt) - len(prefill_ids) - RESERVED_TOKENS


async def ask(
    server: Any,
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    prefill: str = "",
    **sampling: Any,
) -> list[Answer]:
    """Wait for the completions of one prompt.

    Args:
        server: a `ServerManager` or a managed server.
        tokenizer: renders the prompt where there is a prefill.
        messages: the prompt.
        prefill: how every completion begins; it is part of what the policy reads. A server that
            answers chats only is asked without it.
        sampling: what the engine takes, as `n` and `max_tokens`. A prompt that leaves no token is
            not sent, which engines refuse; its completions are empty and cut.
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
    """Wait for the continuations of a text; a server that answers chats only is asked a chat.

    Args:
        server: a `ServerManager` or a managed server.
        prompt: the text.
        prefill: end of `prompt` that belongs to the completions.
        chat: what a server is asked that cannot continue a text: the messages that `prompt`
            renders; None asks with `prompt` as one user message.
        sampling: what the engine takes.

    Returns:
        [n] completions. An answer to `chat` is given as it is, for it did not read the prefill.
    """
    try:
        texts = await server.completion(prompt=prompt, **sampling)
    except NoTextCompletionsError as error:
        logger.debug("%s", error)
        asked = [{"role": "user", "content": prompt}] if chat is None else chat
        return await _chat(server, asked, sampling)
    return [Answer(prefill + c.text, c.finish_reason or "stop") for c in texts.choices]


async def _chat(
    server: Any, messages: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any]
) -> list[Answer]:
    chat = await server.chat_completion(messages=list(messages), **sampling)
    return [Answer(c.message.content or "", c.finish_reason or "stop") for c in chat.choices]


async def sample_trajectories(
    server: Any,
    tokenizer: Any,
    prompt: Sequence[Mapping[str, Any]] | str,
    *,
    group_size: int,
    max_tokens: int,
    **sampling: Any,
) -> list[Trajectory]:
    """Wait for G completions of one prompt.

    Args:
        server: the environment's `ServerManager`.
        tokenizer: the environment's tokenizer.
        prompt: messages, or a text to continue.
        group_size: G.
        max_tokens: budget of one completion.
        sampling: what else `ask` or `complete` takes, as `temperature`.

    Returns:
        [G] trajectories, in the order of the engine's choices.
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
    """Put trajectories and their scores together.

    Args:
        messages: the prompt.
        trajectories: [G].
        scores: [G], in the order of `trajectories`.
        is_muted: [G] whether a trajectory must not move the policy (`set_advantage_to_zero`).
        generation_params: sampling settings, for the record.
        include_messages: add the chats.
        reward_parts: [G] named parts of each score, before weighing; left out if empty.
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


logger = logging.getLogger(__name__)


class SingleTurnEnvConfig(BaseEnvConfig):
    """How completions are drawn. `max_token_length` holds for prompt and completion together."""

    temperature: float = Field(1.0, ge=0, description="Sampling temperature of rollouts.")
    eval_temperature: float = Field(0.0, ge=0, description="Sampling temperature of evaluations.")
    mute_truncated: bool = Field(
        False, description="Keep completions that were cut from moving the policy."
    )
    reward_weights: RewardWeights = Field(
        default_factory=dict,
        description="Weights of the named parts of a score, by name; a part without one counts 1.",
    )


class SingleTurnEnv(BaseEnv):
    """Write `get_next_item`, `prompt` and `score`; `eval_items` for evaluations.

    Attributes:
        scores_thinking: whether `score` reads the thinking as well.
        logs_percent_correct: whether metrics are the part of scores above zero, not their mean.
        min_trained_tokens: shorter completions stay in their group but do not move the policy.
        prefill: how every completion begins; read by the policy, not trained.
        scores_since_log: what `score` returned since the last log, its parts weighed and summed.
    """

    scores_thinking: ClassVar[bool] = False
    logs_percent_correct: ClassVar[bool] = False
    min_trained_tokens: ClassVar[int] = 0
    prefill: str = ""
    env_config_cls = SingleTurnEnvConfig
    config: SingleTurnEnvConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scores_since_log: list[float] = []

    @abstractmethod
    def prompt(self, item: Item) -> Sequence[Mapping[str, Any]]:
        """Return the messages that pose an item."""

    @abstractmethod
    async def score(self, item: Item, answer: str) -> Reward:
        """Return what an answer is worth; what it raises fails the group.

        A mapping such as `{"answer": 1.0, "format": 0.2}` names the parts of the score: they are
        weighed by the setting `reward_weights` and summed, and each one is logged and shown.

        Args:
            item: what was asked.
            answer: the completion without its thinking, or with it where `scores_thinking`; empty
                when the completion was cut, for half an answer is none.
        """

    async def score_all(self, item: Item, answers: Sequence[str]) -> Sequence[Reward]:
        """Return the scores of all answers to an item; the default asks `score` for each.

        Override it where answers are looked at together.
        """
        return await all_results(self._checked_score(item, answer) for answer in answers)

    def sampling(self) -> dict[str, Any]:
        """Return how rollouts are sampled: what the engine takes."""
        return {"temperature": self.config.temperature}

    def group_scores(
        self, scores: Sequence[float], trajectories: Sequence[Trajectory]
    ) -> Sequence[float]:
        """Return [G] scores as they are sent, for rules that look at lengths or at the group."""
        return scores

    def note_group(
        self, item: Item, trajectories: Sequence[Trajectory], scores: Sequence[float]
    ) -> None:
        """Record statistics of a training group; called before `group_scores`, with [G] scores."""

    def train_metrics(self, scores: Sequence[float]) -> dict[str, float]:
        """Return what is logged of the scores since the last log; there is at least one."""
        if self.logs_percent_correct:
            return {"train/percent_correct": statistics.fmean(score > 0 for score in scores)}
        return {"train/mean_score": statistics.fmean(scores)}

    def evaluation_metrics(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Return the result of an evaluation from its records, at least one."""
        scores = [sample["score"] for sample in samples]
        if self.logs_percent_correct:
            return {"eval/percent_correct": statistics.fmean(score > 0 for score in scores)}
        return {"eval/mean_score": statistics.fmean(scores)}

    @property
    def eval_token_limit(self) -> int:
        """Tokens of prompt and completion in evaluations; `max_token_length` by default."""
        return self.config.max_token_length

    def eval_items(self) -> Sequence[Item]:
        """Return the items `evaluate` asks; none by default."""
        return ()

    async def collect_trajectories(self, item: Item) -> tuple[ScoredDataGroup | None, list[Item]]:
        """Sample G completions in one request and score them at the same time."""
        messages = self._checked_prompt(item)
        budget = self._budget(messages)
        if budget < 1:
            limit = self.config.max_token_length
            logger.warning(
                "item skipped: its prompt leaves no room in max_token_length (%d); raise the limit "
                "by %d or more",
                limit,
                1 - budget,
            )
            return None, []
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
        """Ask every evaluation item once and log the mean score."""
        started_at = time.time()
        samples = await all_results(self.evaluate_item(item) for item in self.eval_items())
        if not samples:
            logger.info("no evaluation: eval_items gives none")
            return
        parts = [sample.get("reward_parts", {}) for sample in samples]
        check_weight_names(self.config.reward_weights, parts, self._score_name)
        metrics = {**part_means(parts, "eval"), **self.evaluation_metrics(samples)}
        await self.evaluate_log(
            metrics=metrics,
            samples=samples,
            start_time=started_at,
            end_time=time.time(),
            generation_parameters={
                "temperature": self.config.eval_temperature,
                "max_tokens": self.eval_token_limit,
            },
        )
        await self.wandb_log(metrics)

    async def evaluate_item(self, item: Item) -> dict[str, Any]:
        """Wait for one answer to an evaluation item; returns its record."""
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
        """Add what the scores since the last log tell."""
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
        weigh(score, {}, f"{self._score_name} returned")  # raises as soon as one score is wrong
        return score

    async def weighed_scores(self, item: Item, answers: Sequence[str]) -> list[WeighedReward]:
        """Wait for `score_all` and sum the parts of each score by `reward_weights`."""
        weights = self.config.reward_weights
        rewards = await self.score_all(item, answers)
        return [weigh(reward, weights, f"{self._score_name} returned") for reward in rewards]

    def _checked_prompt(self, item: Item) -> Sequence[Mapping[str, Any]]:
        signature = "def prompt(self, item)"
        return checked_chat(self.prompt(item), f"{type(self).__name__}.prompt", signature=signature)

    def _is_muted(self, trajectory: Trajectory) -> bool:
        is_cut = self.config.mute_truncated and trajectory.is_truncated
        return is_cut or trajectory.num_completion_tokens < self.min_trained_tokens

    def _budget(self, messages: Sequence[Mapping[str, Any]]) -> int:
        limit = self.config.max_token_length
        return completion_budget(
            self.tokenizer, messages, max_token_length=limit, prefill=self.prefill
        )
