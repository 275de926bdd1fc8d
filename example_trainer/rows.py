"""Rows: the trajectories of scored groups, each with everything the loss needs of it.

    group [G][L] --(check, advantages, overrides, temperature, cut)--> G rows [L]

This is the border where a group is honoured field by field or refused naming the field; behind it
nothing is re-validated. Nothing is shifted or padded here: that is `batch`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from atroposlib.errors import GroupError
from atroposlib.scored_data import IGNORE_INDEX, check_group
from example_trainer.advantages import group_advantages, overlong_penalty
from example_trainer.row_checks import (
    check_numbers,
    check_switches,
    check_tokens,
    drop_unfilled,
)
from example_trainer.row_fields import (
    float_rows,
    is_cut_by_engine,
    is_demonstration,
    is_silenced,
    refuse_unsampled,
    refuse_unsupported,
    samples_from_a_part,
    teacher_row,
    temperature_of,
)

__all__ = ["Row", "RowRules", "rows_from_group"]


@dataclass(frozen=True)
class RowRules:
    """The settings that decide how groups become rows."""

    seq_len: int
    """Tokens a row keeps at most; the rest is cut from its end."""
    advantage_std: Literal["sample", "population", "none"] = "population"
    advantage_eps: float = 1e-8
    unsupported_fields: Literal["refuse", "ignore"] = "refuse"
    allow_tokenized_from_text: bool = False
    """Whether the policy loss takes tokens that were made from text."""
    vocabulary: int | None = None
    """Token ids the model has; None: unknown."""
    overlong_max_tokens: int | None = None
    """Trained tokens at which the score loses 1; None: no penalty."""
    overlong_buffer_tokens: int = 0
    truncated_completions: Literal["train", "mask"] = "train"
    uses_rewards: bool = True
    """Whether the policy loss takes part; without it every advantage is 0."""
    uses_reference: bool = False
    """Whether the loss has a KL penalty."""
    scores_reference: bool = False
    """Whether the trainer scores the reference itself where a group carries no `ref_logprobs`."""
    uses_teacher: bool = False
    """Whether the loss distils."""


@dataclass(frozen=True)
class Row:
    """One trajectory, unshifted; every list has its L entries."""

    tokens: Sequence[int]
    """[L] token ids."""
    labels: Sequence[int]
    """[L] the token id where trained, `IGNORE_INDEX` elsewhere."""
    advantages: Sequence[float]
    """[L] multiplier of each token's loss."""
    inference_logprobs: Sequence[float] | None
    """[L] logprobs of the engine that sampled, None when the group carried none."""
    temperature: float
    """Sampling temperature, above 0."""
    is_truncated: bool = False
    """Whether tokens were cut to fit `seq_len`."""
    is_cut_sampling: bool = False
    """Whether the engine drew from a part of the vocabulary only, so that its logprobs are either
    not of what it drew from, or not comparable with the trainer's."""
    is_sft: bool = False
    """Whether it is a demonstration, trained by likelihood."""
    ref_logprobs: Sequence[float] | None = None
    """[L] logprobs of a reference model."""
    distill_token_ids: Sequence[Sequence[int]] | None = None
    """[L][K] what a teacher expects at each position; K may differ and be 0."""
    distill_logprobs: Sequence[Sequence[float]] | None = None
    """[L][K] the teacher's logprobs of these."""


def rows_from_group(group: Mapping[str, Any], rules: RowRules, *, name: str = "group") -> list[Row]:
    """Turn one scored group into rows.

    Advantages come from the group's token-level `advantages` where it has them, else from its
    scores; both are passed over where rewards are not used. `overrides[i].set_advantage_to_zero`
    silences trajectory i after that. Trajectories marked `sft` have no advantage, and their scores
    no part in their siblings'. `messages` are not read: tokens say what they say.

    Args:
        group: A group as the service delivers it; null fields count as absent.
        rules: The settings.
        name: How errors call this group.

    Returns:
        [G] rows in the order of the group.

    Raises:
        GroupError: the group is malformed, or asks for something this trainer cannot do.
        ConfigError: its tokens are not those that a model sampled; every group of its environment
            is like that.
    """
    try:
        group = drop_unfilled(group)
        check_group(group)
        check_tokens(group, vocabulary=rules.vocabulary)
        check_switches(group)
        if rules.unsupported_fields == "refuse":
            refuse_unsupported(
                group, uses_reference=rules.uses_reference, uses_teacher=rules.uses_teacher
            )
        are_sft = [is_demonstration(group, i) for i in range(len(group["tokens"]))]
        refuse_unsampled(
            group, are_sft, uses_rewards=rules.uses_rewards, allow=rules.allow_tokenized_from_text
        )
        advantages = _token_advantages(group, rules, are_sft)
        reference = float_rows(group, "ref_logprobs") if rules.uses_reference else None
        needs_reference = rules.uses_reference and not rules.scores_reference
        if needs_reference and reference is None and not all(are_sft):
            raise GroupError(
                "ref_logprobs: missing; the KL penalty needs them. Let the environment send "
                "them, name a --reference-model, or set --kl-coef 0"
            )
        return [
            _row(group, i, rules, advantages[i], reference[i] if reference else None, is_sft=is_sft)
            for i, is_sft in enumerate(are_sft)
        ]
    except GroupError as error:
        raise GroupError(f"{name}: {error}") from error
    except ArithmeticError as error:
        raise GroupError(f"{name}: its numbers cannot be computed with: {error}") from error


def _row(
    group: Mapping[str, Any],
    i: int,
    rules: RowRules,
    advantages: Sequence[float],
    ref_logprobs: Sequence[float] | None,
    *,
    is_sft: bool,
) -> Row:
    keep = slice(0, rules.seq_len)
    tokens, labels = group["tokens"][i], group["masks"][i][keep]
    is_cut = len(tokens) > rules.seq_len
    may_mask = rules.truncated_completions == "mask" and not is_sft
    if may_mask and (is_cut or is_cut_by_engine(group, i)):
        labels = [IGNORE_INDEX] * len(labels)
    logprobs = group.get("inference_logprobs")
    ids, teacher = (
        teacher_row(group, i, vocabulary=rules.vocabulary) if rules.uses_teacher else (None, None)
    )
    return Row(
        tokens=tokens[keep],
        labels=labels,
        advantages=advantages[keep],
        inference_logprobs=None if logprobs is None else logprobs[i][keep],
        temperature=1.0 if is_sft else temperature_of(group, i),  # nobody sampled it
        is_truncated=is_cut,
        is_cut_sampling=samples_from_a_part(group),
        is_sft=is_sft,
        ref_logprobs=None if ref_logprobs is None else ref_logprobs[keep],
        distill_token_ids=None if ids is None else ids[keep],
        distill_logprobs=None if teacher is None else teacher[keep],
    )


def _token_advantages(
    group: Mapping[str, Any], rules: RowRules, are_sft: Sequence[bool]
) -> list[list[float]]:
    """Return [G][L] advantages; demonstrations get zeros, and what they sent is not looked at."""
    if not rules.uses_rewards:
        return [[0.0] * len(tokens) for tokens in group["tokens"]]
    given = group.get("advantages")
    if given is None:
        given = _score_advantages(group, rules, are_sft)
    if len(given) != len(group["tokens"]):
        raise GroupError(f"advantages: {len(given)} entries, tokens has {len(group['tokens'])}")
    result = []
    for i, (value, tokens) in enumerate(zip(given, group["tokens"], strict=True)):
        if are_sft[i] or is_silenced(group, i):
            result.append([0.0] * len(tokens))
            continue
        # May-2025 environments send one number per trajectory.
        row = [float(value)] * len(tokens) if isinstance(value, (int, float)) else list(value)
        if len(row) != len(tokens):
            raise GroupError(f"advantages[{i}]: {len(row)} entries, tokens[{i}] has {len(tokens)}")
        check_numbers(f"advantages[{i}]", row)
        result.append(row)
    return result


def _score_advantages(
    group: Mapping[str, Any], rules: RowRules, are_sft: Sequence[bool]
) -> list[float]:
    """Return [G] one advantage per trajectory, from the scores of those that were sampled."""
    sampled = [i for i, is_sft in enumerate(are_sft) if not is_sft]
    scores = [float(group["scores"][i]) for i in sampled]
    if rules.overlong_max_tokens is not None:
        scores = [
            score
            + overlong_penalty(
                _num_trained(group, i),
                max_tokens=rules.overlong_max_tokens,
                buffer_tokens=rules.overlong_buffer_tokens,
            )
            for i, score in zip(sampled, scores, strict=True)
        ]
    result = [0.0] * len(are_sft)
    if sampled:
        advantages = group_advantages(scores, std=rules.advantage_std, eps=rules.advantage_eps)
        for i, advantage in zip(sampled, advantages, strict=True):
            result[i] = advantage
    return result


def _num_trained(group: Mapping[str, Any], i: int) -> int:
    return sum(label != IGNORE_INDEX for label in group["masks"][i])
