"""The example trainer: GRPO on batches from an Atropos trajectory service.

Importing this package loads neither torch nor vLLM; the names below load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from example_trainer.cli import config_from_args, parse_args
    from example_trainer.config import TrainingConfig
    from example_trainer.trainers import (
        train,
        train_legacy,
        train_lora,
        train_lora_restart,
        train_shared_vllm,
    )

__all__ = [
    "TrainingConfig",
    "config_from_args",
    "parse_args",
    "train",
    "train_legacy",
    "train_lora",
    "train_lora_restart",
    "train_shared_vllm",
]

_HOME_OF_NAME = {
    "TrainingConfig": "config",
    "config_from_args": "cli",
    "parse_args": "cli",
    "train": "trainers",
    "train_legacy": "trainers",
    "train_lora": "trainers",
    "train_lora_restart": "trainers",
    "train_shared_vllm": "trainers",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF_NAME[name]}"), name)
