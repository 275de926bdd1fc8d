"""Entry point of the trainer: `atropos-grpo`, `python -m example_trainer.grpo`, or this file."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    # Run as a file: replace the package's folder, whose modules (`config`, `data`, ...) must not
    # be importable at the top level, by its parent.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from example_trainer.cli import (
    config_from_args,
    create_full_parser,
    run_training,
    torchrun_settings,
)
from example_trainer.config import TrainingConfig

__all__ = ["TrainingConfig", "first_example", "main"]

_EARLIER_NAMES = {
    "get_batch": "api",
    "get_data": "data",
    "pad_data_to_good_offset": "data",
    "register_trainer": "api",
    "train": "trainers",
}
"""Module of each function that this file contained in earlier versions."""


def __getattr__(name: str) -> Any:
    if name not in _EARLIER_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"example_trainer.{_EARLIER_NAMES[name]}"), name)


def first_example() -> TrainingConfig:
    """Return the config of `python example_trainer/grpo.py` without flags."""
    return TrainingConfig(
        model_name="Qwen/Qwen2.5-1.5B-Instruct",
        training_steps=20,
        vllm_restart_interval=3,
        use_wandb=True,
        wandb_project="grpo-trainer-example",
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Train according to the flags; exit with 0 on success, 2 on invalid settings, 1 on failure."""
    parser = create_full_parser()

    def make_config() -> TrainingConfig:
        arguments = parser.parse_args(argv)
        ranks = torchrun_settings(os.environ, device=arguments.device)
        return config_from_args(arguments, **ranks)

    run_training(parser, make_config)


if __name__ == "__main__":
    if __package__ in (None, "") and len(sys.argv) == 1:
        print("no flags given: training the built-in example (see --help for the flags)")
        run_training(create_full_parser(), first_example)
    else:
        main()
