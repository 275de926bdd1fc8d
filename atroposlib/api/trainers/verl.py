"""Batches of the service as verl's `DataProto`, with the tensors of its agent loop.

    batches() ─► data_protos ─► the caller's loop on verl's workers ─► next one: acknowledge

Prompts are padded on the left and responses on the right, as in verl:

    prompts        [ 0  0  1  2 ]     responses      [ 7  9  8  0 ]
    attention_mask [ 0  0  1  1        1  1  1  0 ]   response_mask [ 1  0  1  0 ]

`response_mask` is 0 at tokens of the environment between turns. Scores stand at the last token of a
response, in `rm_scores`, `token_level_scores` and `token_level_rewards`. `uid` is the same for the
rows of a group, so that verl's estimators compute advantages within the group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from atroposlib.api.client import LeasedBatch
from atroposlib.api.trainers import FaceRules, TrainerRow, groups_of_rows
from atroposlib.errors import GroupError, MissingExtraError

__all__ = ["data_proto", "data_protos"]

_NUM_TURNS = "__num_turns__"


def data_protos(
    stream: Iterable[LeasedBatch], *, pad_token_id: int, **options: Any
) -> Iterator[Any]:
    """Yield one `DataProto` per batch; a batch is acknowledged when the next one is requested.

    Args:
        stream: return value of `batches`. With `acknowledge="explicit"`, the caller acknowledges,
            and `meta_info["batch_id"]` names the batch.
        pad_token_id: id of padding tokens.
        **options: further arguments of `data_proto`.

    Raises:
        GroupError, ConfigError: a group cannot be carried over; the message names group and field.

    Example:
        >>> with batches("http://localhost:8000", batch_size=64, num_steps=100) as stream:
        ...     for data in data_protos(stream, pad_token_id=tokenizer.pad_token_id):
        ...         train(data)
    """
    for batch in stream:
        yield data_proto(batch, pad_token_id=pad_token_id, **options)


def data_proto(
    batch: LeasedBatch,
    *,
    pad_token_id: int,
    prompt_length: int | None = None,
    response_length: int | None = None,
    temperature: float | None = None,
    takes_advantages: bool = False,
    allow_tokenized_from_text: bool = False,
    ignored_fields: Collection[str] = (),
) -> Any:
    """Convert a batch to a `DataProto` with B rows, P prompt and R response positions.

    Tensors: `prompts` (B, P); `responses`, `response_mask`, `rm_scores`, `token_level_scores`,
    `token_level_rewards` and, if the engine reported logprobs, `rollout_log_probs` (B, R);
    `input_ids`, `attention_mask` and `position_ids` (B, P + R). With advantages of the environment
    also `advantages` and `returns` (B, R).

    Other columns (B,): `uid`, `__num_turns__` (trained spans), `min_global_steps` and
    `max_global_steps` (policy version that sampled, None if unknown), `finish_reason`, the parts of
    the reward by name, and `multi_modal_inputs`, empty.

    Args:
        batch: batch of a stream.
        pad_token_id: id of padding tokens.
        prompt_length: P; None takes that of the longest prompt.
        response_length: R; None takes that of the longest response.
        temperature: sampling temperature that is required of all groups; None accepts any.
        takes_advantages: Whether advantages of the environment are accepted, and
            `set_advantage_to_zero` with them. verl's `compute_advantage` overwrites them, so the
            caller must not call it for such a batch.
        allow_tokenized_from_text: Whether to accept groups whose tokens were made from text.
        ignored_fields: optional fields of groups that are left out instead of rejected.

    Raises:
        GroupError, ConfigError: a group cannot be carried over, or a trajectory is longer than P or
            R; the message names group and field.
        MissingExtraError: verl is not installed.
    """
    try:
        from verl import DataProto
    except ImportError as error:
        raise MissingExtraError("verl", extra="verl") from error
    rules = FaceRules(
        "verl",
        temperature=temperature,
        takes_advantages=takes_advantages,
        allow_tokenized_from_text=allow_tokenized_from_text,
        ignored_fields=tuple(ignored_fields),
    )
    groups = list(groups_of_rows(batch, rules))
    rows = [row for group in groups for row in group]
    longest_prompt = max(row.num_prompt_tokens for row in rows)
    longest_response = max(len(row.tokens) - row.num_prompt_tokens for row in rows)
    width_P = _width("prompt_length", prompt_length, longest_prompt)
    width_R = _width("response_length", response_length, longest_response)

    tensors = _tensors(rows, width_P=width_P, width_R=width_R, pad_token_id=pad_token_id)
    return DataProto.from_dict(
        tensors=tensors,
        non_tensors=_columns(batch, groups, taken=tensors),
        meta_info={
            "batch_id": batch.batch_id,
            "temperature": temperature,
            "reward_extra_keys": _reward_parts(rows),
        },
    )


def _tensors(
    rows: Sequence[TrainerRow], *, width_P: int, width_R: int, pad_token_id: int
) -> dict[str, Any]:
    """Return the tensors of B rows: prompts padded on the left, responses on the right."""
    import torch

    def left(values: Sequence[Sequence[Any]], fill: Any) -> Any:
        return torch.tensor([[fill] * (width_P - len(row)) + list(row) for row in values])

    def right(values: Sequence[Sequence[Any]], fill: Any) -> Any:
        return torch.tensor([list(row) + [fill] * (width_R - len(row)) for row in values])

    prompts = [row.tokens[: row.num_prompt_tokens] for row in rows]
    responses = [row.tokens[row.response] for row in rows]
    attention_BT = torch.cat(
        [left([[1] * len(p) for p in prompts], 0), right([[1] * len(r) for r in responses], 0)], 1
    )
    prompts_BP, responses_BR = left(prompts, pad_token_id), right(responses, pad_token_id)
    scores_BR = right(
        [[0.0] * (len(r) - 1) + [row.score] for r, row in zip(responses, rows, strict=True)], 0.0
    )
    tensors = {
        "prompts": prompts_BP,
        "responses": responses_BR,
        "response_mask": right([row.is_trained[row.response] for row in rows], 0),
        "input_ids": torch.cat([prompts_BP, responses_BR], 1),
        "attention_mask": attention_BT,
        "position_ids": (attention_BT.cumsum(1) - 1).clamp(min=0) * attention_BT,
        "rm_scores": scores_BR,
        "token_level_scores": scores_BR.clone(),
        "token_level_rewards": scores_BR.clone(),
    }
    logprobs = _all_or_none("inference_logprobs", [row.logprobs for row in rows])
    if logprobs is not None:
        pairs = zip(logprobs, rows, strict=True)
        tensors["rollout_log_probs"] = right([values[row.response] for values, row in pairs], 0.0)
    advantages = _advantages(rows)
    if advantages is not None:
        tensors["advantages"] = right(advantages, 0.0)
        tensors["returns"] = tensors["advantages"].clone()
    return tensors


def _width(name: str, wanted: int | None, longest: int) -> int:
    if wanted is not None and longest > wanted:
        raise GroupError(
            f"a trajectory needs {name} {longest}, and {wanted} is given: raise it, or lower "
            "max_token_len of `batches`"
        )
    return longest if wanted is None else wanted


def _all_or_none(name: str, values: list[list[float] | None]) -> list[list[float]] | None:
    present = [value for value in values if value is not None]
    if present and len(present) < len(values):
        raise GroupError(
            f"{name}: {len(present)} of {len(values)} trajectories of the batch have them; verl "
            "needs them for all, or for none"
        )
    return present or None


def _advantages(rows: Sequence[TrainerRow]) -> list[list[float]] | None:
    """Return the advantages of each response, if the environment has set those of all."""
    given = _all_or_none("advantages", [row.advantages for row in rows])
    if given is None:
        for i, row in enumerate(rows):
            if row.has_zeroed_advantage:
                raise GroupError(
                    f"set_advantage_to_zero of row {i}: verl computes advantages from the scores; "
                    "send advantages with it"
                )
        return None
    return [
        [0.0] * len(row.tokens[row.response]) if row.has_zeroed_advantage else values[row.response]
        for row, values in zip(rows, given, strict=True)
    ]


def _columns(
    batch: LeasedBatch, groups: Sequence[Sequence[TrainerRow]], *, taken: Collection[str]
) -> dict[str, Any]:
    """Return the columns that are no tensors; the names of those are `taken`."""
    import numpy as np

    rows = [row for group in groups for row in group]
    name = batch.batch_id or "batch"
    uids = [f"{name}/{g}" for g, group in enumerate(groups) for _ in group]
    columns: dict[str, list[Any]] = {
        "uid": uids,
        "min_global_steps": [row.policy_version for row in rows],
        "max_global_steps": [row.policy_version for row in rows],
        "finish_reason": [row.finish_reason for row in rows],
        "multi_modal_inputs": [{} for _ in rows],
    }
    for key in _reward_parts(rows):
        if key in columns or key in taken or key == _NUM_TURNS:
            raise GroupError(
                f"reward_parts: {key!r} is the name of another column of verl; rename the part in "
                "the environment"
            )
        columns[key] = [row.reward_parts.get(key) for row in rows]
    made: dict[str, Any] = {_NUM_TURNS: np.array([_num_spans(row) for row in rows], np.int32)}
    for key, values in columns.items():
        made[key] = np.empty(len(rows), dtype=object)
        made[key][:] = values
    return made


def _reward_parts(rows: Sequence[TrainerRow]) -> list[str]:
    """Return the names of the parts of the reward, in the order in which they first appear."""
    return list(dict.fromkeys(key for row in rows for key in row.reward_parts))


def _num_spans(row: TrainerRow) -> int:
    """Return the number of uninterrupted spans of trained tokens."""
    before = [0, *row.is_trained[:-1]]
    return sum(now > last for last, now in zip(before, row.is_trained, strict=True))
