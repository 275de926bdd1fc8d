"""Launch a vLLM engine and train against it: `atropos-grpo-run`, or this file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):
    # Run as a file: see `grpo`.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from example_trainer.cli import config_from_args, create_unified_parser, run_training
from example_trainer.config import TrainingConfig

__all__ = ["main", "with_engine_gpu"]


def with_engine_gpu(config: TrainingConfig) -> TrainingConfig:
    """Return the config with the engine on the trainer's GPU, if `device` names one by its index.

    Settings that choose the GPUs of the engine otherwise are kept.
    """
    kind, _, index = config.device.partition(":")
    chooses = config.vllm_gpu is not None or "parallel-size" in config.vllm_args
    if kind != "cuda" or not index or chooses or config.sync_transport == "nccl":
        return config
    return config if config.world_size > 1 else config.model_copy(update={"vllm_gpu": int(index)})


def main(argv: Sequence[str] | None = None) -> None:
    """Train in one command; exit with 0 on success, 2 on invalid flags, 1 on failure.

    An engine is launched, or the one at the port is used, and updated in place. The trajectory
    service and the environments are started separately.
    """
    parser = create_unified_parser()
    run_training(
        parser,
        lambda: with_engine_gpu(
            config_from_args(parser.parse_args(argv), weight_bridge_mode="in_place", benchmark=True)
        ),
    )


if __name__ == "__main__":
    main()
