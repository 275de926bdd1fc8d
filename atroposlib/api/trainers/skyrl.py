"""Batches of the service as SkyRL's `GeneratorOutput`, and a generator for its trainer.

    SkyRL's trainer ─► generate(prompts) ─► batch of the service ─► GeneratorOutput
                            └── acknowledges the batch before

SkyRL repeats each of its prompts for the samples of a group and computes advantages over the
repetitions. The prompts themselves are not used: row i of a batch takes the place of prompt i, and
the environment's `group_size` must be SkyRL's `n_samples_per_prompt`.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from atroposlib.api.client import AsyncBatches, BatchIterator, LeasedBatch
from atroposlib.api.trainers import FaceRules, TrainerRow, groups_of_rows
from atroposlib.errors import ConfigError, MissingExtraError

__all__ = ["generator_output", "service_generator"]

_TRAINER = "SkyRL"
_EVALUATION = "eval"


def _skyrl() -> Any:
    try:
        from skyrl.train.generators import base
    except ImportError as error:
        raise MissingExtraError("skyrl", extra="skyrl") from error
    return base


def generator_output(
    batch: LeasedBatch,
    *,
    group_size: int | None = None,
    temperature: float | None = None,
    allow_tokenized_from_text: bool = False,
    ignored_fields: Collection[str] = (),
) -> Any:
    """Convert a batch to a `GeneratorOutput`; groups one after another.

    `loss_masks` are 0 at tokens of the environment between turns, and `rollout_logprobs` are 0.0
    there; they are None if a group has none. `rewards` has one score per trajectory. Keys of SkyRL
    that a group has no value for are None.

    Args:
        batch: batch of a stream.
        group_size: trajectories that each group must have; None accepts any number.
        temperature: sampling temperature that is required of all groups; None accepts any.
        allow_tokenized_from_text: Whether to accept groups whose tokens were made from text.
        ignored_fields: optional fields of groups that are left out instead of rejected.

    Raises:
        GroupError, ConfigError: a group cannot be carried over; the message names group and field.
        MissingExtraError: SkyRL is not installed.
    """
    base = _skyrl()
    rules = FaceRules(
        _TRAINER,
        temperature=temperature,
        group_size=group_size,
        allow_tokenized_from_text=allow_tokenized_from_text,
        ignored_fields=tuple(ignored_fields),
    )
    groups = list(groups_of_rows(batch, rules))
    rows = [row for group in groups for row in group]
    logprobs = [row.logprobs for row in rows]
    name = batch.batch_id or "batch"
    output = dict.fromkeys(base.GeneratorOutput.__annotations__)
    output |= {
        "prompt_token_ids": [row.tokens[: row.num_prompt_tokens] for row in rows],
        "response_ids": [row.tokens[row.response] for row in rows],
        "rewards": [row.score for row in rows],
        "loss_masks": [row.is_trained[row.response] for row in rows],
        "stop_reasons": [row.finish_reason or "stop" for row in rows],
        "rollout_metrics": _metrics(rows),
        "rollout_logprobs": None
        if any(values is None for values in logprobs)
        else [
            values[row.response]
            for values, row in zip(logprobs, rows, strict=True)
            if values is not None
        ],
        "trajectory_ids": [
            base.TrajectoryID(instance_id=f"{name}/{g}", repetition_id=i)
            for g, group in enumerate(groups)
            for i in range(len(group))
        ],
        "env_metrics": [dict(row.reward_parts) for row in rows],
    }
    return output


def _metrics(rows: Sequence[TrainerRow]) -> dict[str, float]:
    """Return means over the rows, for SkyRL's log."""
    metrics = {"atropos/trained_tokens_mean": sum(r.num_trained_tokens for r in rows) / len(rows)}
    versions = [row.policy_version for row in rows if row.policy_version is not None]
    if versions:
        metrics["atropos/policy_version_mean"] = sum(versions) / len(versions)
        metrics["atropos/policy_version_min"] = float(min(versions))
    return metrics


def service_generator(stream: BatchIterator, **options: Any) -> Any:
    """Return a generator for SkyRL's trainer that delivers the batches of a stream.

    Each call of `generate` acknowledges the batch before and waits for the next. The stream's
    `batch_size` is SkyRL's `train_batch_size` times `n_samples_per_prompt`. Call
    `await generator.close()` after training: it acknowledges the last batch of the run and returns
    any other.

    Args:
        stream: return value of `batches`; owned by the generator.
        **options: arguments of `generator_output`, other than `group_size`.

    Raises:
        MissingExtraError: SkyRL is not installed.
    """
    base = _skyrl()

    class ServiceGenerator(base.GeneratorInterface):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            self._batches = AsyncBatches(stream)

        async def generate(self, input_batch: Mapping[str, Any]) -> Any:
            """Return the next batch, with one row for each prompt.

            Raises:
                ConfigError: the batch does not fit the prompts, the run has no batch left, or SkyRL
                    asks for an evaluation.
            """
            metadata = input_batch.get("batch_metadata")
            if metadata is not None and metadata.training_phase == _EVALUATION:
                raise ConfigError(
                    "SkyRL asks for an evaluation, which environments of the service do by "
                    "themselves: set trainer.eval_interval=-1 and trainer.eval_before_train=false"
                )
            batch = await anext(self._batches, None)
            if batch is None:
                raise ConfigError(
                    "the run has no more batches, but SkyRL asks for more: set num_steps of "
                    "`batches` to the steps of SkyRL's trainer"
                )
            ids = input_batch.get("trajectory_ids")
            num_prompts = len(input_batch["prompts"])
            output = generator_output(batch, group_size=_group_size(ids), **options)
            if len(output["response_ids"]) != num_prompts:
                raise ConfigError(
                    f"a batch of the service has {len(output['response_ids'])} sequences, SkyRL "
                    f"asks for {num_prompts}: register the latter as batch_size"
                )
            if ids is not None:
                output["trajectory_ids"] = list(ids)
            return output

        async def close(self) -> None:
            await self._batches.__aexit__(None, None, None)

    return ServiceGenerator()


def _group_size(trajectory_ids: Sequence[Any] | None) -> int | None:
    """Return the number of repetitions of each of SkyRL's prompts; None if it names none."""
    if not trajectory_ids:
        return None
    runs = itertools.groupby(trajectory_ids, key=lambda one: one.instance_id)
    sizes = {sum(1 for _ in run) for _, run in runs}
    if len(sizes) > 1:
        raise ConfigError(
            f"SkyRL repeats its prompts {sorted(sizes)} times; expected the same number for all"
        )
    return sizes.pop()
