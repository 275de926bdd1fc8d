"""What the log says before the first step: shapes, memory, and advice where it will not fit."""

from __future__ import annotations

import logging
from typing import Any

import torch

from example_trainer.batch import Batch, padded_length
from example_trainer.config import TrainingConfig
from example_trainer.losses.linear_logprobs import auto_chunk_tokens
from example_trainer.memory_plan import ModelSizes, StepSetup, advice, plan_memory

__all__ = ["log_step_plan", "shape_lines", "sizes_of", "step_setup"]

logger = logging.getLogger(__name__)


def log_step_plan(
    batch: Batch,
    *,
    model: Any,
    optimizer: Any,
    config: TrainingConfig,
    packs: bool,
    reference_bytes: int = 0,
) -> None:
    """Log the shapes of this rank's first batch and the memory of the largest possible step.

    Args:
        batch: This rank's share.
        model: The trained model, sharded or whole.
        optimizer: Says by its kind how much state it keeps.
        config: Settings.
        packs: Whether sequences share a row.
        reference_bytes: Memory that a reference model holds, not available to the step.
    """
    sizes = sizes_of(model)
    setup = step_setup(config, sizes, optimizer=optimizer, packs=packs)
    for line in shape_lines(batch, sizes, setup):
        logger.info("%s", line)
    available_bytes = _available_bytes(config.device, model, reference_bytes=reference_bytes)
    logger.info(
        "memory of a step with %d tokens in its largest pass, in GiB: %s",
        setup.pass_tokens,
        plan_memory(sizes, setup).describe(available_bytes),
    )
    for line in advice(sizes, setup, available_bytes):
        logger.warning("%s", line)


def shape_lines(batch: Batch, sizes: ModelSizes, setup: StepSetup) -> list[str]:
    """Return the shapes of the tensors of a batch, a line each kind."""
    shapes = [tuple(mb.tokens_BT.shape) for mb in batch.microbatches]
    largest = max(shapes, key=lambda shape: shape[0] * shape[1])
    trained = max(int((mb.labels_BT >= 0).sum()) for mb in batch.microbatches)
    chunk = min(setup.chunk_tokens, max(1, trained))
    return [
        f"first batch: {len(shapes)} forward passes, largest tokens (B, T) = {largest}; padding "
        f"{batch.summary.padding_fraction:.1%}",
        f"hidden states (B, T, D) = {(*largest, sizes.hidden)}, logits by chunks (N, V) = "
        f"{(chunk, sizes.vocabulary)}, trained tokens of a pass up to {trained}",
    ]


def sizes_of(model: Any) -> ModelSizes:
    """Read the sizes of a transformers causal language model."""
    settings = model.config.get_text_config()
    parameters = list(model.parameters())
    in_blocks = sum(
        parameter.numel()
        for module in model.modules()
        if type(module).__name__.removeprefix("FSDP") in set(model._no_split_modules or ())
        for parameter in module.parameters()
    )
    total = sum(parameter.numel() for parameter in parameters)
    return ModelSizes(
        num_parameters=total,
        num_trained=sum(p.numel() for p in parameters if p.requires_grad),
        num_outside_blocks=total - in_blocks,
        num_layers=settings.num_hidden_layers,
        hidden=settings.hidden_size,
        intermediate=getattr(settings, "intermediate_size", None) or 4 * settings.hidden_size,
        vocabulary=settings.vocab_size,
        weight_bytes=round(sum(p.numel() * p.element_size() for p in parameters) / max(1, total)),
        trained_bytes=max((p.element_size() for p in parameters if p.requires_grad), default=None),
    )


def step_setup(
    config: TrainingConfig, sizes: ModelSizes, *, optimizer: Any, packs: bool
) -> StepSetup:
    """Return what of the settings decides about memory, for the largest batch they allow."""
    longest = padded_length(config.seq_len, multiple=1 if packs else config.pad_multiple)
    tokens = config.batch_size * longest
    if config.microbatch_tokens is not None:
        tokens = min(config.sequences_per_step * longest, max(config.microbatch_tokens, longest))
    kinds = {"AdamW8bit": "adamw_8bit", "Adafactor": "adafactor"}
    device = torch.device(config.device)
    return StepSetup(
        pass_tokens=tokens,
        chunk_tokens=config.logprob_chunk_tokens or auto_chunk_tokens(sizes.vocabulary, device),
        activation_bytes=2 if config.autocasts else sizes.weight_bytes,
        optimizer=kinds.get(type(optimizer).__name__, "adamw"),
        gradient_checkpointing=config.gradient_checkpointing,
        shards=config.world_size if config.is_sharded else 1,
    )


def _available_bytes(device: str, model: Any, *, reference_bytes: int) -> float:
    """Return the device's free memory and what the model holds of it already."""
    if device.startswith("cuda"):
        free, _ = torch.cuda.mem_get_info(device)
        return float(free + torch.cuda.memory_reserved(device) - reference_bytes)
    import psutil

    held = sum(p.numel() * p.element_size() for p in model.parameters())
    return float(psutil.virtual_memory().available + held)
