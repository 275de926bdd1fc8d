"""TRL's GRPOTrainer on groups of the service: `python -m example_trainer.recipes.trl_grpo`.

    environments ─► service ─► batches() ─► ServiceRollouts, as TRL's rollout_func ─► GRPOTrainer
         ▲                                                                                │
         └──────────── engine ◄── weights, and their version: PublishWeights ─────────────┘

TRL computes advantages, loss and steps by its own rules; rewards are the scores of the groups. It
assumes that trajectories were sampled from the current weights: keep staleness low.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from atroposlib.api.client import BatchIterator, batches
from atroposlib.errors import ConfigError, GroupError
from atroposlib.scored_data import (
    IGNORE_INDEX,
    MASKED_LOGPROB,
    check_group,
    has_zeroed_advantage,
    is_demonstration,
    temperature_of,
)
from atroposlib.utils.command_parser import CommandParser, prepare_command
from example_trainer.engine import EngineControl
from example_trainer.rows import refuse_unsampled

_UNUSED_FIELDS = ("advantages", "distill_token_ids", "distill_logprobs", "images")
_PROMPT = "placeholder"


def service_reward(
    prompts: Sequence[Any], completions: Sequence[Any], *, score: Sequence[float], **_others: Any
) -> list[float]:
    """Return the scores of the environment; a reward function of TRL."""
    return list(score)


class ServiceRollouts:
    """Returns groups of the service to TRL as new samples; a `rollout_func`.

    A batch is acknowledged when TRL requests the next one, and the last one when `train` has ended,
    by a callback that this adds to the trainer.

    Args:
        stream: Result of `batches`, with TRL's `generation_batch_size` as batch size.
        allow_tokenized_from_text: Whether to accept groups whose tokens were made from text.
    """

    def __init__(self, stream: BatchIterator, *, allow_tokenized_from_text: bool = False) -> None:
        self._stream = stream
        self._allows_text = allow_tokenized_from_text
        self._trainer: Any = None

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """Wait for a batch; return token ids, logprobs, the mask of trained tokens and scores.

        Raises:
            GroupError: a group has a field that TRL does not support; the message names it.
            ConfigError: the size or temperature of a group differs from the trainer's, or the run
                has no batch left.
        """
        if trainer.accelerator.num_processes > 1:
            raise ConfigError("this recipe feeds one process; TRL runs on several")
        if trainer is not self._trainer:
            trainer.add_callback(_acknowledge_at_end(self))
            self._trainer = trainer
        batch = next(self._stream, None)
        if batch is None:
            raise ConfigError(
                "the run has no more batches, but TRL asks for more: set num_steps of `batches` to "
                "the number of batches that TRL generates"
            )
        rows: list[dict[str, Any]] = []
        for i, group in enumerate(batch.groups):
            try:
                rows += rollouts_of(
                    group,
                    size=trainer.num_generations,
                    temperature=trainer.temperature,
                    allow_tokenized_from_text=self._allows_text,
                )
            except (GroupError, ConfigError) as error:
                raise type(error)(f"group {i}: {error}") from error
        if len(rows) != len(prompts):
            raise ConfigError(
                f"a batch of the service has {len(rows)} sequences, TRL asks for {len(prompts)}: "
                "register its generation_batch_size as batch_size"
            )
        output: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
        if any(logprobs is None for logprobs in output["logprobs"]):
            output["logprobs"] = None
        return output

    def finish(self) -> None:
        """Acknowledge the last batch, after TRL's `train` has ended without an error."""
        for batch in self._stream.held:
            self._stream.ack(batch)


def rollouts_of(
    group: Mapping[str, Any],
    *,
    size: int,
    temperature: float,
    allow_tokenized_from_text: bool = False,
) -> list[dict[str, Any]]:
    """Convert a group to TRL's fields of each of `size` completions.

    A completion starts at the first trained token; `env_mask` is 0 at tokens of the environment.

    Raises:
        GroupError, ConfigError: as for `ServiceRollouts`.
    """
    check_group(group)
    _refuse_unused(group)
    refuse_unsampled(
        group, [False] * len(group["tokens"]), uses_rewards=True, allow=allow_tokenized_from_text
    )
    if len(group["tokens"]) != size:
        raise ConfigError(
            f"{len(group['tokens'])} trajectories, TRL's num_generations is {size}: set the "
            "environment's group_size to the same, and send whole groups"
        )
    sampled_at = temperature_of(group, 0)
    if any(temperature_of(group, i) != temperature for i in range(size)):
        raise ConfigError(
            f"sampled at temperature {sampled_at:g}, TRL's temperature is {temperature:g}: they "
            "must be the same"
        )
    logprobs = group.get("inference_logprobs") or [None] * size
    return [
        _rollout(tokens, masks, row, score)
        for tokens, masks, row, score in zip(
            group["tokens"], group["masks"], logprobs, group["scores"], strict=True
        )
    ]


def _rollout(
    tokens: Sequence[int], masks: Sequence[int], logprobs: Sequence[float] | None, score: float
) -> dict[str, Any]:
    is_prompt = itertools.takewhile(lambda label: label == IGNORE_INDEX, masks)
    start = sum(1 for _ in is_prompt)
    if start in (0, len(tokens)):
        raise GroupError("masks: a trajectory needs a prompt in front and a trained token after it")
    is_trained = [int(label != IGNORE_INDEX) for label in masks[start:]]
    known = None
    if logprobs is not None:
        pairs = list(zip(logprobs[start:], is_trained, strict=True))
        # TRL would take the placeholder of an unknown logprob for one.
        if (MASKED_LOGPROB, 1) not in pairs:
            known = [float(value) if trained else 0.0 for value, trained in pairs]
    return {
        "prompt_ids": list(tokens[:start]),
        "completion_ids": list(tokens[start:]),
        "logprobs": known,
        "env_mask": is_trained,
        "score": float(score),
    }


def _refuse_unused(group: Mapping[str, Any]) -> None:
    for name in _UNUSED_FIELDS:
        if group.get(name):
            raise GroupError(f"{name}: not supported by TRL's GRPOTrainer")
    for i in range(len(group["tokens"])):
        if is_demonstration(group, i) or has_zeroed_advantage(group, i):
            raise GroupError(
                f"overrides[{i}]: TRL's GRPOTrainer supports neither sft nor set_advantage_to_zero"
            )


def _acknowledge_at_end(rollouts: ServiceRollouts) -> Any:
    """Return a callback of transformers that acknowledges the last batch."""
    from transformers import TrainerCallback

    class AcknowledgeLastBatch(TrainerCallback):  # type: ignore[misc]  # it has no types here
        def on_train_end(self, args: Any, state: Any, control: Any, **_others: Any) -> None:
            rollouts.finish()

    return AcknowledgeLastBatch()


def publish_weights(
    stream: BatchIterator, engine_url: str, directory: Path, *, interval: int
) -> Any:
    """Return a callback of transformers that updates the weights of a running vLLM.

    Args:
        stream: Receives the policy version that the engine serves.
        engine_url: Address of a vLLM with its development routes, without `/v1`.
        directory: Directory for the weights, which the engine's host can read.
        interval: Optimizer steps between two updates.
    """
    from transformers import TrainerCallback

    class PublishWeights(TrainerCallback):  # type: ignore[misc]  # it has no types here
        def on_train_begin(self, args: Any, state: Any, control: Any, **_others: Any) -> None:
            stream.set_policy_version(0)

        def on_step_end(
            self, args: Any, state: Any, control: Any, *, model: Any, **_others: Any
        ) -> None:
            if state.global_step % interval:
                return
            model.save_pretrained(directory)
            engine = EngineControl(engine_url)
            try:
                engine.reload_weights(directory, pause_mode="keep")
            finally:
                engine.close()
            stream.set_policy_version(state.global_step)

    return PublishWeights()


def make_trainer(settings: argparse.Namespace, rollouts: ServiceRollouts) -> Any:
    """Return TRL's trainer on batches of the service, configured by the flags."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[attr-defined]  # its lazy package

    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    # TRL requires a dataset of prompts; those of the environments are used instead.
    prompts = Dataset.from_dict({"prompt": [_PROMPT] * settings.batch_size})
    return GRPOTrainer(
        model=settings.model,
        processing_class=tokenizer,
        reward_funcs=service_reward,
        rollout_func=rollouts,
        train_dataset=prompts,
        args=GRPOConfig(
            output_dir=str(settings.output_dir),
            max_steps=settings.max_steps,
            per_device_train_batch_size=settings.micro_batch_size,
            gradient_accumulation_steps=settings.batch_size // settings.micro_batch_size,
            num_generations=settings.num_generations,
            max_completion_length=settings.max_token_len,
            temperature=settings.temperature,
            learning_rate=settings.lr,
            bf16=settings.bf16,
            use_cpu=settings.cpu,
            save_strategy="no",
            report_to=[],
            logging_steps=1,
        ),
    )


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m example_trainer.recipes.trl_grpo",
        description="Train with TRL's GRPOTrainer on groups of the trajectory service.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", required=True, help="hub name or directory of the model")
    add("--atropos-url", default="http://localhost:8000", help="the trajectory service")
    add("--output-dir", type=Path, default=Path("trl_grpo"), help="folder of the trained model")
    add("--max-steps", type=int, default=20, help="optimizer steps")
    add("--batch-size", type=int, default=32, help="sequences per optimizer step")
    add("--micro-batch-size", type=int, default=8, help="sequences per forward pass")
    add("--num-generations", type=int, default=8, help="trajectories per group")
    add("--max-token-len", type=int, default=2048, help="maximum sequence length in tokens")
    add("--temperature", type=float, default=1.0, help="sampling temperature of the engine")
    add("--lr", type=float, default=1e-6, help="learning rate")
    add("--bf16", action="store_true", help="run the model in bfloat16")
    add("--cpu", action="store_true", help="train on the CPU")
    add(
        "--allow-tokenized-from-text",
        action="store_true",
        help="accept groups of servers without token ids, whose tokens were made from text",
    )
    add("--engine-url", help="a vLLM to update with new weights, e.g. http://localhost:9001")
    add("--publish-every", type=int, default=1, help="optimizer steps between weight updates")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Train according to the flags and save the model."""
    prepare_command()
    parser = _parser()
    settings = parser.parse_args(argv)
    for whole, part in (("batch_size", "micro_batch_size"), ("batch_size", "num_generations")):
        if getattr(settings, whole) % getattr(settings, part):
            parser.error(f"--{whole} must be a multiple of --{part}".replace("_", "-"))
    stream = batches(
        settings.atropos_url,
        batch_size=settings.batch_size,
        num_steps=settings.max_steps,
        max_token_len=settings.max_token_len,
        token=os.environ.get("ATROPOS_API_TOKEN"),
    )
    with stream:
        rollouts = ServiceRollouts(
            stream, allow_tokenized_from_text=settings.allow_tokenized_from_text
        )
        trainer = make_trainer(settings, rollouts)
        if settings.engine_url:
            directory = settings.output_dir / "published"
            trainer.add_callback(
                publish_weights(
                    stream, settings.engine_url, directory, interval=settings.publish_every
                )
            )
        trainer.train()
        trainer.save_model(str(settings.output_dir))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)  # closing the stream has returned the unacknowledged batch
