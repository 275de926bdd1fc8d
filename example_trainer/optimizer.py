"""The optimiser and its learning-rate schedule."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterable
from typing import Any

from example_trainer.config import TrainingConfig

__all__ = ["create_optimizer", "create_optimizer_for_params", "learning_rate_at"]

logger = logging.getLogger(__name__)


def create_optimizer(model: Any, config: TrainingConfig) -> Any:
    """Return an optimiser over the trainable parameters of a model.

    Raises:
        RuntimeError: nothing is trainable.
    """
    return create_optimizer_for_params(model.parameters(), config)


def create_optimizer_for_params(params: Iterable[Any], config: TrainingConfig) -> Any:
    """Return an optimiser over those of the parameters that require gradients.

    `adamw_8bit` needs bitsandbytes and a GPU; elsewhere torch's AdamW takes its place with a note.

    Raises:
        RuntimeError: nothing is trainable.
    """
    import torch

    trainable = [parameter for parameter in params if parameter.requires_grad]
    if not trainable:
        raise RuntimeError("no parameter requires a gradient; check train_layer_indices")
    if config.optimizer == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(
            trainable,
            # Adafactor refuses a learning rate beside relative_step.
            lr=None if config.adafactor_relative_step else config.lr,
            scale_parameter=config.adafactor_scale_parameter,
            relative_step=config.adafactor_relative_step,
        )
    if config.optimizer == "adamw_8bit":
        on_gpu = config.device.startswith("cuda")
        if (
            on_gpu
            and not config.is_sharded
            and importlib.util.find_spec("bitsandbytes") is not None
        ):
            from bitsandbytes.optim import AdamW8bit

            return AdamW8bit(trainable, lr=config.lr, weight_decay=config.weight_decay)
        reason = "bitsandbytes is not installed" if on_gpu else "it needs a GPU"
        reason = "its state cannot be sharded" if config.is_sharded else reason
        logger.info("optimizer adamw_8bit: %s, using torch's AdamW", reason)
    return torch.optim.AdamW(trainable, lr=config.lr, weight_decay=config.weight_decay)


def learning_rate_at(step: int, config: TrainingConfig) -> float:
    """Return the learning rate of the optimiser step that follows `step` finished ones."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    return config.lr
