"""`MultiTurnEnv`: an environment whose items are played as conversations.

    get_next_item ─► G x (start_conversation ─► play) ─► [G] Rollout ─► group_of_rollouts ─► group

A rollout has the exact tokens of every turn, from a managed server. Evaluations play the same
conversations on any server that answers chats.

The next prompt is the sequence so far plus the text that the chat template writes *after* a reply.
The reply is never rendered again: a template that trims, drops thinking or rewrites history cannot
break the sequence.

    sequence so far   <user>…<assistant> r e p l y
    template output   <user>…<assistant> MARK </s><user> n e x t <assistant>
    next prompt       <user>…<assistant> r e p l y </s><user> n e x t <assistant>

Rewards of turns become advantages of tokens:

    rewards [G][T] ─► turn_advantages ─► [G][T] ─► token_advantages ─► [L] for each sequence

Example with two rollouts, discount 1, normalized by "returns":

    rewards      [0, 1]     [0]
    returns      [1, 1]     [0]        mean 2/3, deviation √2/3
    advantages   [0.71, 0.71]  [-1.41]
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import logging
import statistics
import time
import uuid
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from atroposlib.envs.base import BaseEnv, Item
from atroposlib.envs.conversation import (
    A_CHAT,
    ChatMessage,
    Conversation,
    Outcome,
    Reply,
    Turn,
    checked_chat,
    checked_reply,
    is_chat,
)
from atroposlib.envs.evaluation import EvaluationConfig, EvaluationRun, stable_form
from atroposlib.envs.evaluation_statistics import numbers_of, uncertainty_metrics
from atroposlib.envs.policies import (
    REPLY_MARK,
    ChatPolicy,
    Policy,
    RecordedPolicy,
    TokenPolicy,
    TokenSequence,
    TurnSpan,
    Written,
)
from atroposlib.envs.reporting import (
    RewardWeights,
    check_weight_names,
    complete_parts,
    part_means,
    weigh,
)
from atroposlib.envs.server_handling.managed_server import ManagedServer
from atroposlib.envs.single_turn_env import PromptRoom, require_settings_of
from atroposlib.envs.turn_journal import NOT_PLAIN, TurnJournal, is_plain, journaled_group
from atroposlib.errors import ConfigError, ContextOverflowError, GroupError
from atroposlib.scored_data import IGNORE_INDEX, ScoredDataGroup
from atroposlib.utils.advantages import (
    compute_discounted_returns,
    compute_grpo_process_supervision_advantages,
    compute_stats,
)
from atroposlib.utils.aio import settle
from atroposlib.utils.tracing import current_span, each_in_span

__all__ = [
    "REPLY_MARK",
    "ChatMessage",
    "ChatPolicy",
    "Conversation",
    "Limits",
    "MultiTurnEnv",
    "MultiTurnEnvConfig",
    "Normalization",
    "Policy",
    "RecordedPolicy",
    "Reply",
    "Rollout",
    "TokenPolicy",
    "TokenSequence",
    "Turn",
    "TurnSpan",
    "Written",
    "discounted_return",
    "group_of_rollouts",
    "parts_of",
    "play",
    "rollout_of_record",
    "token_advantages",
    "turn_advantages",
]

logger = logging.getLogger(__name__)

Normalization = Literal["returns", "rewards", "none"]
"""Values that are normalized within the group: discounted returns, rewards, or none."""

MIN_DEVIATION = 1e-8
"""Deviation below which a group has no signal."""


def discounted_return(rewards: Sequence[float], *, discount: float = 1.0) -> float:
    """Return the sum of the rewards of a rollout, discounted once per turn."""
    return sum(reward * discount**step for step, reward in enumerate(rewards))


def turn_advantages(
    rewards: Sequence[Sequence[float]],
    *,
    discount: float = 1.0,
    normalization: Normalization = "returns",
) -> list[list[float]]:
    """Convert the rewards of a group to one advantage per turn, from its discounted return.

    Normalized values of a group with equal rewards are zeros.

    Args:
        rewards: [G][T] one finite reward per turn; T may differ between rollouts.
        discount: weight of the next turn's return, 0 to 1.
        normalization: `returns` subtracts the mean of the returns of all turns of the group and
            divides by their population deviation; `rewards` does so with the rewards, before
            they are summed (process supervision); `none` returns the returns.

    Returns:
        [G][T] advantages.

    Raises:
        GroupError: a reward is not finite.

    Source: Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, section 4.1.3, for `rewards`.
    Differs in allowing a discount.
    """
    for i, row in enumerate(rewards):
        for step, reward in enumerate(row):
            if not np.isfinite(reward):
                raise GroupError(f"rewards[{i}][{step}]: {reward} is not a finite number")
    if not any(rewards):
        return [[] for _ in rewards]
    if normalization == "rewards":
        if compute_stats(rewards)["var"] ** 0.5 < MIN_DEVIATION:
            return [[0.0] * len(row) for row in rewards]
        rows = compute_grpo_process_supervision_advantages(rewards, discount, MIN_DEVIATION)
        return [row.tolist() for row in rows]
    returns = [
        compute_discounted_returns(np.asarray(row, dtype=np.float64), discount).tolist()
        for row in rewards
    ]
    return returns if normalization == "none" else _standardized(returns)


def _standardized(rows: list[list[float]]) -> list[list[float]]:
    stats = compute_stats(rows)
    deviation = stats["var"] ** 0.5
    if deviation < MIN_DEVIATION:
        return [[0.0] * len(row) for row in rows]
    return [[(value - stats["mean"]) / deviation for value in row] for row in rows]


def token_advantages(
    masks: Sequence[int], spans: Sequence[TurnSpan], advantages: Sequence[float]
) -> list[float]:
    """Return [L] the advantage of each token's turn, 0.0 on masked tokens.

    Args:
        masks: [L] `IGNORE_INDEX` on tokens that are not trained.
        spans: turns of this sequence.
        advantages: [T] advantages of the turns of the rollout. A later turn, which was sampled but
            not taken before the time limit, has 0.0.
    """
    row = [0.0] * len(masks)
    for span in spans:
        value = advantages[span.turn] if span.turn < len(advantages) else 0.0
        labels = masks[span.start : span.end]
        row[span.start : span.end] = [value if m != IGNORE_INDEX else 0.0 for m in labels]
    return row


@dataclass(frozen=True)
class Limits:
    """Limits of a conversation."""

    max_turns: int = 8
    """Turns of the policy."""
    max_tokens: int = 2048
    """Tokens of one sequence, including the prompt; a few of them remain unused."""
    max_turn_tokens: int | None = None
    """Tokens of one turn; None allows the rest of `max_tokens`."""
    timeout_s: float | None = None
    """Seconds of the whole conversation; None: no limit."""


@dataclass
class Rollout:
    """The record of one conversation."""

    sequences: list[TokenSequence] = field(default_factory=list)
    """One, or one for each history; none without exact tokens or without a turn."""
    rewards: list[float] = field(default_factory=list)
    """[T] one per turn."""
    reward_parts: list[dict[str, float]] = field(default_factory=list)
    """[T] unweighted parts of each reward; empty if it is a number."""
    messages: list[ChatMessage] = field(default_factory=list)
    """The final chat."""
    replies: list[str] = field(default_factory=list)
    """[T] the completions, in order."""
    outcome: Outcome = "done"
    conversation: Conversation | None = None
    """The conversation, in its final state."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Measurements other than the reward; their means are logged as `<area>/metric/<name>`."""
    item: Item = None
    """The item of the conversation, if its environment sets it."""
    trace: Any = None
    """Record of an agent's rollout as JSON, for the field `traces` of the group."""


async def play(
    conversation: Conversation,
    policy: Policy,
    *,
    limits: Limits,
    reward_weights: Mapping[str, float] | None = None,
) -> Rollout:
    """Play a conversation to its end or to a limit.

    A turn that is truncated by a token limit ends it without a reply. `conversation.close` is
    always awaited. Cancelling is safe.

    Args:
        conversation: used by this call only.
        policy: samples the turns.
        limits: limits of the conversation.
        reward_weights: weights of the named parts of rewards; 1 by default.

    Raises:
        TimeoutError: no turn was written within `limits.timeout_s`.
        Exception: an exception of the conversation or the inference server.
    """
    if inspect.iscoroutine(conversation):
        conversation.close()  # otherwise Python warns that it was never awaited
        raise TypeError(
            "start_conversation is async: write `def start_conversation(self, item)` without async"
        )
    if not isinstance(conversation, Conversation):
        raise TypeError(f"start_conversation returned {conversation!r}; expected a Conversation")
    rollout = Rollout(conversation=conversation)
    weights = reward_weights or {}
    playing = asyncio.ensure_future(_play_turns(conversation, policy, limits, weights, rollout))
    try:
        await asyncio.wait({playing}, timeout=limits.timeout_s)
        is_late = not playing.done()
    finally:
        if not playing.done():
            playing.cancel()  # once, so that a turn can clean up
            await asyncio.wait({playing})
        if not playing.cancelled():
            playing.exception()  # so that it is not logged as lost if the caller is cancelled
        await settle(conversation.close())
    rollout.outcome = "timed_out" if is_late else playing.result()
    if not rollout.rewards and is_late:
        raise TimeoutError(f"no turn was written within {limits.timeout_s} s")
    if rollout.outcome != "done" and rollout.rewards:
        _add_reward(rollout, conversation.unfinished_reward, weights, "unfinished_reward is")
    rollout.sequences = policy.sequences()
    current_span().set({"rl.reward": sum(rollout.rewards), "rl.rollout.outcome": rollout.outcome})
    return rollout


async def _play_turns(
    conversation: Conversation,
    policy: Policy,
    limits: Limits,
    weights: Mapping[str, float],
    rollout: Rollout,
) -> Outcome:
    name, rollout_id = type(conversation).__name__, uuid.uuid4().hex
    rollout.messages = list(
        checked_chat(conversation.opening(), f"{name}.opening", signature="def opening(self)")
    )
    for index in each_in_span("rl.turn", range(limits.max_turns), "rl.turn.index"):
        budget = policy.budget(rollout.messages, max_tokens=limits.max_tokens)
        if budget < 1:
            return "truncated"
        try:
            written = await policy.write(
                rollout.messages, max_tokens=min(budget, limits.max_turn_tokens or budget)
            )
        except ContextOverflowError:
            if not rollout.rewards:
                raise
            return "truncated"
        rollout.messages = [*rollout.messages, {"role": "assistant", "content": written.text}]
        rollout.replies.append(written.text)
        rollout.rewards.append(0.0)
        rollout.reward_parts.append({})
        if written.is_cut:
            return "truncated"
        turn = Turn(written.text, index, tuple(rollout.messages), key=f"{rollout_id}-{index}")
        reply = await checked_reply(conversation, turn)
        _add_reward(rollout, reply.reward, weights, "reply gave the reward")
        if reply.is_done:
            return "done"
        rollout.messages = _next_chat(rollout.messages, reply, conversation)
    return "out_of_turns"


def _add_reward(rollout: Rollout, reward: Any, weights: Mapping[str, float], source: str) -> None:
    """Add to the reward of the last turn; an error starts with the class name and `source`."""
    weighed = weigh(reward, weights, f"{type(rollout.conversation).__name__}.{source}")
    rollout.rewards[-1] += weighed.total
    parts = rollout.reward_parts[-1]
    for name, value in weighed.parts.items():
        parts[name] = parts.get(name, 0.0) + value


def _next_chat(
    chat: list[ChatMessage], reply: Reply, conversation: Conversation
) -> list[ChatMessage]:
    if not isinstance(reply.messages, str) and reply.messages and not is_chat(reply.messages):
        raise TypeError(
            f"{type(conversation).__name__}.reply gave the messages {reply.messages!r:.100}; "
            f"expected a text or {A_CHAT}"
        )
    added = reply.chat_messages()
    if not added and reply.history is None:
        raise ConfigError(
            f"{type(conversation).__name__}.reply gave neither messages nor is_done=True; "
            "the policy needs something to read, or the end"
        )
    return [*(chat if reply.history is None else reply.history), *added]


def parts_of(rollout: Rollout, *, discount: float) -> dict[str, float]:
    """Return the discounted sum of each unweighted part of a rollout's rewards."""
    names = dict.fromkeys(name for parts in rollout.reward_parts for name in parts)
    return {
        name: discounted_return(
            [parts.get(name, 0.0) for parts in rollout.reward_parts], discount=discount
        )
        for name in names
    }


def group_of_rollouts(
    rollouts: Sequence[Rollout],
    *,
    discount: float = 1.0,
    normalization: Normalization = "returns",
    generation_params: Mapping[str, Any] | None = None,
    include_messages: bool = False,
) -> ScoredDataGroup:
    """Combine the rollouts of one item, with the advantage of its turn for each token.

    The score of a rollout is its discounted return, and the parts of its rewards are summed in the
    same way. A rollout of several sequences gives a row for each; `group_overrides` has the total.

    Args:
        rollouts: [G] rollouts with at least one sequence.
        discount: weight of the next turn's return, 0 to 1.
        normalization: see `turn_advantages`.
        generation_params: sampling settings, for the record.
        include_messages: Whether to add the chats.
    """
    by_turn = turn_advantages(
        [rollout.rewards for rollout in rollouts], discount=discount, normalization=normalization
    )
    rows = [
        (rollout, sequence, token_advantages(sequence.masks, sequence.spans, advantages))
        for rollout, advantages in zip(rollouts, by_turn, strict=True)
        for sequence in rollout.sequences
    ]
    group: ScoredDataGroup = {
        "tokens": [sequence.tokens for _, sequence, _ in rows],
        "masks": [sequence.masks for _, sequence, _ in rows],
        "scores": [discounted_return(rollout.rewards, discount=discount) for rollout, _, _ in rows],
        "inference_logprobs": [sequence.inference_logprobs for _, sequence, _ in rows],
        "advantages": [advantages for _, _, advantages in rows],
        "generation_params": dict(generation_params or {}),
    }
    reasons = [sequence.finish_reason for _, sequence, _ in rows]
    if any(reason is not None for reason in reasons):
        group["finish_reasons"] = reasons
    parts = complete_parts([parts_of(rollout, discount=discount) for rollout, _, _ in rows])
    if parts is not None:
        group["reward_parts"] = parts
    if include_messages:
        group["messages"] = [sequence.messages for _, sequence, _ in rows]
    if any(rollout.trace is not None for rollout in rollouts):
        group["traces"] = [
            rollout.trace if row == 0 else None
            for rollout in rollouts
            for row in range(len(rollout.sequences))
        ]
    if len(rows) != len(rollouts):
        group["group_overrides"] = {"group_size": len(rows)}
    return group


class MultiTurnEnvConfig(EvaluationConfig):
    """Limits and rewards of conversations; `max_token_length` limits a whole conversation."""

    max_turns: int = Field(8, ge=1, description="Turns of the policy in one conversation.")
    max_turn_tokens: int | None = Field(
        None, ge=1, description="Token limit of one turn; None: the rest of the conversation's."
    )
    conversation_timeout_s: float | None = Field(
        None, gt=0, description="Time limit of one conversation in seconds; None: no limit."
    )
    temperature: float = Field(1.0, ge=0, description="Sampling temperature of rollouts.")
    reward_discount: float = Field(
        1.0, ge=0, le=1, description="Weight of the next turn's return in a turn's return."
    )
    reward_weights: RewardWeights = Field(
        default_factory=dict,
        description="Weights of the named parts of a reward, by name; the default weight is 1.",
    )
    advantage_normalization: Normalization = Field(
        "returns",
        description="Values that are normalized within the group: the turns' returns, their "
        "rewards before they are summed, or none.",
    )
    turn_journal: str | None = Field(
        None,
        description="File in which `serve` keeps the turns of running rollouts, so that they "
        "continue after a kill; None: they start again.",
    )
    turn_journal_mib: int = Field(
        1024, ge=1, le=1_048_576, description="Limit of the turns in that file in MiB."
    )


JOURNAL_SETTINGS = ("turn_journal", "turn_journal_mib")
PROBE_TEXT = "The tokenizer of a turn journal: 12345 \u00e4\u4f60"


class MultiTurnEnv(BaseEnv):
    """Implement `start_conversation` and `get_next_item`; `eval_items` for evaluations.

    Attributes:
        rollouts_since_log: finished rollouts since the last log.
        turn_journal: open journal while `serve` runs with the setting; otherwise None.
        prompt_room: limit of a conversation, and the first prompts without room.
    """

    env_config_cls = MultiTurnEnvConfig
    config: MultiTurnEnvConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        require_settings_of(self, MultiTurnEnvConfig)
        self.rollouts_since_log: list[Rollout] = []
        self.turn_journal: TurnJournal | None = None
        self.prompt_room = PromptRoom(self)

    @abstractmethod
    def start_conversation(self, item: Item) -> Conversation:
        """Return a new conversation about an item; called for each of the G rollouts."""

    def eval_items(self) -> Sequence[Item]:
        """Return the items for `evaluate`; none by default."""
        return ()

    def encode_item(self, item: Item) -> Any:
        """Return an item as JSON values for the `turn_journal`; override it for other items."""
        return item

    def decode_item(self, encoded: Any) -> Item:
        """Return the item that `encode_item` encoded."""
        return encoded

    async def collect_trajectory(self, item: Item) -> tuple[Rollout, list[Item]]:
        """Play one conversation about an item on a managed server."""
        weights = self.config.reward_weights
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            policy = TokenPolicy(managed, self.tokenizer, temperature=self.config.temperature)
            group = journaled_group()
            if group is None or not isinstance(managed, ManagedServer):
                rollout = await play(
                    self.start_conversation(item),
                    policy,
                    limits=self.limits(),
                    reward_weights=weights,
                )
                return rollout, []
            async with group.rollout(lambda: self.start_conversation(item), policy) as record:
                rollout = await play(
                    record.conversation,
                    record.policy,
                    limits=self.limits(),
                    reward_weights=weights,
                )
                rollout.outcome = await record.note_ending(rollout.outcome)
                rollout.conversation = record.original
        return rollout, []

    async def env_manager(self) -> None:
        if self.config.turn_journal is None:
            await super().env_manager()
            return
        self.turn_journal = await TurnJournal.open(
            Path(self.config.turn_journal),
            self._journal_identity(),
            max_bytes=self.config.turn_journal_mib * 2**20,
        )
        try:
            items = [self.decode_item(item) for item in self.turn_journal.waiting_items()]
            if items:
                logger.info("%d groups of %s continue", len(items), self.config.turn_journal)
            self.backlog += reversed(items)  # a stack
            await super().env_manager()
            await self.turn_journal.clear()  # the run is over
        finally:
            journal, self.turn_journal = self.turn_journal, None
            await journal.close()

    async def handle_env(self, item_uuid: str) -> Any:
        record = self.running_items.get(item_uuid)
        if self.turn_journal is None or record is None:
            return await super().handle_env(item_uuid)
        async with self.turn_journal.group(
            self._journal_item(record["item"]),
            step=self.curr_step,
            is_dropped=lambda: bool(record.get("is_expired")),
        ):
            return await super().handle_env(item_uuid)

    async def _send_scored_data_to_api(self, scored_data: Any) -> None:
        group = journaled_group()
        if group is None:
            await super()._send_scored_data_to_api(scored_data)
        else:
            await self._delivery.send(scored_data, key=group.delivery_key())

    def _journal_item(self, item: Item) -> Any:
        """Return an item as the journal stores it; `NOT_PLAIN` if it cannot be read back."""
        encoded = self.encode_item(item)
        return encoded if is_plain(encoded) and self.decode_item(encoded) == item else NOT_PLAIN

    def _journal_identity(self) -> dict[str, str]:
        """Return digests of what saved turns depend on; the values may contain secrets."""
        others = {*EvaluationConfig.model_fields, *JOURNAL_SETTINGS}
        names = {*type(self.config).model_fields} - others | {"group_size", "max_token_length"}
        settings = self.config.model_dump(mode="json", include=names)
        tokenizer = [self.config.tokenizer_name, self.tokenizer.encode(PROBE_TEXT)]
        values = {"environment": f"{type(self).__name__} {self.desired_name}"}
        return {
            name: hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()
            for name, value in {**values, "tokenizer": tokenizer, **settings}.items()
        }

    async def postprocess_histories(self, trajectories: Sequence[Rollout]) -> Any:
        """Combine the [G] conversations about one item; return None if one has no turn."""
        if not all(rollout.sequences for rollout in trajectories):
            self.prompt_room.skip(self.prompt_room.limit)
            return None
        self.prompt_room.has_fit = True
        self._check_weights(trajectories)
        self.rollouts_since_log += trajectories
        # In a thread: long groups hold a million tokens.
        return await self._side_thread.run(
            group_of_rollouts,
            trajectories,
            discount=self.config.reward_discount,
            normalization=self.config.advantage_normalization,
            generation_params={"temperature": self.config.temperature},
            include_messages=self.config.include_messages,
        )

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Play every evaluation item `eval_samples_per_item` times; log and write the metrics."""
        started_at = time.time()
        with EvaluationRun[Rollout](self, encode=_record_of, decode=self.restored_rollout) as run:
            samples = await run.sample(self.eval_items(), self.play_for_evaluation)
            if not samples:
                logger.info("no evaluation: eval_items gives none")
                return
            rollouts = [sample.record for sample in samples]
            self._check_weights(rollouts)
            discount = self.config.reward_discount
            parts = [parts_of(rollout, discount=discount) for rollout in rollouts]
            metrics = {**part_means(parts, "eval"), **self.metrics_of(rollouts, "eval")}
            values = [self.evaluation_values(rollout) for rollout in rollouts]
            metrics |= await asyncio.to_thread(
                uncertainty_metrics,
                metrics,
                item_ids=[sample.item_id for sample in samples],
                values=values,
                is_correct=[self.is_correct(rollout) for rollout in rollouts],
            )
            await self.evaluate_log(
                metrics=metrics,
                samples=[
                    {
                        "messages": sample.record.messages,
                        "score": self.score_of(sample.record),
                        "rewards": sample.record.rewards,
                        "outcome": sample.record.outcome,
                        **({"reward_parts": of_rollout} if of_rollout else {}),
                        **({"metrics": sample.record.metrics} if sample.record.metrics else {}),
                        "item_id": sample.item_id,
                        "sample_index": sample.sample_index,
                        "metric_values": of_metrics,
                    }
                    for sample, of_rollout, of_metrics in zip(samples, parts, values, strict=True)
                ],
                start_time=started_at,
                end_time=time.time(),
                generation_parameters=run.sampling({"temperature": self.config.eval_temperature}),
            )
        await self.wandb_log(numbers_of(metrics))

    def evaluation_values(self, rollout: Rollout) -> dict[str, float]:
        """Return the values of one rollout whose means are metrics, by name of the metric.

        They give the confidence intervals and are compared by `atropos-compare`. A name that
        `metrics_of` does not have, or has with another mean, gets no interval.
        """
        discount = self.config.reward_discount
        return {
            "eval/mean_return": discounted_return(rollout.rewards, discount=discount),
            "eval/fraction_done": float(rollout.outcome == "done"),
        }

    def is_correct(self, rollout: Rollout) -> bool:
        """Whether a conversation counts as correct for pass@k; the default is a positive score."""
        return self.score_of(rollout) > 0

    async def restored_rollout(self, item: Item, saved: dict[str, Any]) -> Rollout | None:
        """Return a conversation that an interrupted evaluation has recorded.

        The conversation is repeated with the recorded replies, for its final state. If it goes
        another way, the result is None, and it is played again.

        Args:
            item: the evaluation item.
            saved: the record; `rollout_of_record` reads it.
        """
        if saved["outcome"] == "timed_out":
            return None
        rollout = await play(
            self.start_conversation(item),
            RecordedPolicy(saved["replies"], is_last_cut=saved["is_last_cut"]),
            limits=self.limits(),
            reward_weights=self.config.reward_weights,
        )
        repeated = _record_of(rollout)
        if any(repeated[name] != saved[name] for name in ("replies", "outcome", "messages")):
            return None
        # A judge need not repeat its rewards, and `play_for_evaluation` may change them.
        recorded = rollout_of_record(saved)
        recorded.conversation, recorded.item = rollout.conversation, rollout.item
        return recorded

    async def play_for_evaluation(self, item: Item) -> Rollout:
        """Play one conversation on a server that answers chats."""
        policy = ChatPolicy(
            self.server, self.tokenizer, temperature=self.config.eval_temperature, split="eval"
        )
        return await play(
            self.start_conversation(item),
            policy,
            limits=self.limits(),
            reward_weights=self.config.reward_weights,
        )

    def _check_weights(self, rollouts: Sequence[Rollout]) -> None:
        given = [parts for rollout in rollouts for parts in rollout.reward_parts]
        owner = type(rollouts[0].conversation).__name__
        check_weight_names(self.config.reward_weights, given, f"{owner}.reply")

    def score_of(self, rollout: Rollout) -> float:
        """Return the score of an evaluated conversation; the default is its return."""
        return discounted_return(rollout.rewards, discount=self.config.reward_discount)

    def metrics_of(self, rollouts: Sequence[Rollout], area: str) -> dict[str, float]:
        """Return metrics of finished rollouts; override it to add those of a game.

        Args:
            rollouts: rollouts since the last log, or of one evaluation.
            area: first part of the names, `train` or `eval`.
        """
        return rollout_metrics(rollouts, area, discount=self.config.reward_discount)

    def limits(self) -> Limits:
        """Return the limits of a conversation, from the settings and the trainer."""
        return Limits(
            max_turns=self.config.max_turns,
            max_tokens=self.prompt_room.limit,
            max_turn_tokens=self.config.max_turn_tokens,
            timeout_s=self.config.conversation_timeout_s,
        )

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        metrics = {} if wandb_metrics is None else wandb_metrics
        finished, self.rollouts_since_log = self.rollouts_since_log, []
        metrics.update(self.metrics_of(finished, "train"))
        await super().wandb_log(metrics)


def _record_of(rollout: Rollout) -> dict[str, Any]:
    ends_with_reply = bool(rollout.messages) and rollout.messages[-1]["role"] == "assistant"
    saved = {
        "replies": rollout.replies,
        "is_last_cut": rollout.outcome == "truncated" and ends_with_reply,
        "messages": rollout.messages,
        "outcome": rollout.outcome,
        "rewards": rollout.rewards,
        "reward_parts": rollout.reward_parts,
        "metrics": rollout.metrics,
    }
    plain: dict[str, Any] = json.loads(json.dumps(stable_form(saved)))
    return plain


def rollout_of_record(saved: Mapping[str, Any]) -> Rollout:
    """Return the rollout of a record, without its conversation and its item."""
    names = ("replies", "messages", "outcome", "rewards", "reward_parts", "metrics")
    return Rollout(**{name: saved[name] for name in names})


def rollout_metrics(rollouts: Sequence[Rollout], area: str, *, discount: float) -> dict[str, float]:
    """Return mean return, mean number of turns and fraction of finished conversations."""
    if not rollouts:
        return {}
    returns = [discounted_return(rollout.rewards, discount=discount) for rollout in rollouts]
    return {
        f"{area}/mean_return": statistics.fmean(returns),
        f"{area}/mean_turns": statistics.fmean(len(rollout.rewards) for rollout in rollouts),
        f"{area}/fraction_done": statistics.fmean(r.outcome == "done" for r in rollouts),
        **_mean_metrics(rollouts, area),
    }


def _mean_metrics(rollouts: Sequence[Rollout], area: str) -> dict[str, float]:
    """Return the mean of each metric over the rollouts that have it."""
    names = dict.fromkeys(name for rollout in rollouts for name in rollout.metrics)
    return {
        f"{area}/metric/{name}": statistics.fmean(
            rollout.metrics[name] for rollout in rollouts if name in rollout.metrics
        )
        for name in names
    }
