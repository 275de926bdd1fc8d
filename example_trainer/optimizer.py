"""The optimiser and its learning-rate schedule."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from example_trainer.config import TrainingConfig

__all__ = [
    "OptimizerChoice",
    "choose_optimizer",
    "create_optimizer",
    "create_optimizer_for_params",
    "learning_rate_at",
]


def create_optimizer(model: Any, config: TrainingConfig) -> Any:
    """Return an optimiser over the trainable parameters of a model.

    Raises:
        RuntimeError: nothing is trainable.
    """
    return create_optimizer_for_params(model.parameters(), config)


def create_optimizer_for_params(params: Iterable[Any], config: TrainingConfig) -> Any:
    """Return an optimiser over those of the parameters that require gradients.

    `choose_optimizer` says which one.

    Raises:
        RuntimeError: nothing is trainable.
    """
    import torch

    trainable = [parameter for parameter in params if parameter.requires_grad]
    if not trainable:
        raise RuntimeError("no parameter requires a gradient; check train_layer_indices")
    choice = choose_optimizer(
        config, trains_bfloat16=any(p.dtype == torch.bfloat16 for p in trainable)
    )
    if choice.name == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(
            trainable,
            # Adafactor refuses a learning rate beside relative_step.
            lr=None if config.adafactor_relative_step else config.lr,
            scale_parameter=config.adafactor_scale_parameter,
            relative_step=config.adafactor_relative_step,
        )
    settings = {"lr": config.lr, "weight_decay": config.weight_decay}
    if choice.name == "adamw_8bit":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(trainable, **settings)
    if choice.is_stochastic:
        from example_trainer.stochastic_adamw import AdamW

        return AdamW(trainable, **settings, seed=config.seed)
    return torch.optim.AdamW(trainable, **settings, fused=choice.is_fused or None)


class OptimizerChoice(NamedTuple):
    """Which optimizer runs, and what about it a person should know."""

    name: Literal["adamw", "adamw_8bit", "adafactor"]
    is_fused: bool = False
    """Whether one kernel updates all weights."""
    is_stochastic: bool = False
    """Whether weights and states are bfloat16, rounded up or down at random."""
    note: str = ""
    """Why it is not the one that was asked for, or what it loses; empty: nothing."""

    def describe(self) -> str:
        """Return a few words for the log."""
        kind = {"adamw": "AdamW", "adamw_8bit": "8-bit AdamW", "adafactor": "Adafactor"}[self.name]
        kind += ", fused" if self.is_fused else ""
        kind += ", stochastic rounding" if self.is_stochastic else ""
        return f"{kind} ({self.note})" if self.note else kind


def choose_optimizer(
    config: TrainingConfig, *, trains_bfloat16: bool, has_bitsandbytes: bool | None = None
) -> OptimizerChoice:
    """Return the optimizer that `config.optimizer` means on this device.

    `adamw_8bit` needs bitsandbytes, a GPU and whole weights; elsewhere AdamW takes its place.
    AdamW is fused on CUDA.

    Args:
        config: Settings.
        trains_bfloat16: Whether trained weights are bfloat16.
        has_bitsandbytes: Whether that package is there; None: looked up.
    """
    on_gpu = config.device.startswith("cuda")
    if has_bitsandbytes is None:
        has_bitsandbytes = importlib.util.find_spec("bitsandbytes") is not None
    loses = (
        "updates smaller than half a bfloat16 step are lost; use --train-dtype mixed, or "
        "--optimizer adamw, which rounds stochastically"
        if trains_bfloat16
        else ""
    )
    if config.optimizer == "adafactor":
        return OptimizerChoice("adafactor", note=loses)
    note = ""
    if config.optimizer == "adamw_8bit":
        if not on_gpu:
            note = "not adamw_8bit: it needs a GPU"
        elif config.is_sharded:
            note = "not adamw_8bit: its state cannot be sharded"
        elif not has_bitsandbytes:
            note = "not adamw_8bit: bitsandbytes is not installed"
        else:
            return OptimizerChoice("adamw_8bit", note=loses)
    if trains_bfloat16:
        return OptimizerChoice("adamw", is_stochastic=True, note=note)
    return OptimizerChoice("adamw", is_fused=on_gpu, note=note)


def learning_rate_at(step: int, config: TrainingConfig) -> float:
    """Return the learning rate of the optimiser step that follows `step` finished ones.

    It rises linearly over `warmup_steps`, then follows `lr_schedule` from `lr` towards `min_lr`,
    which it would reach one step after the last.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    num_steps = max(1, config.training_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / num_steps)
    left = 1.0 - progress
    if config.lr_schedule == "cosine":
        left = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.min_lr + (config.lr - config.min_lr) * left
