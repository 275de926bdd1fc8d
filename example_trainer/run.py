"""Launch a vLLM engine and train against it: `atropos-grpo-run`, or this file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):
    # Run as a file: see `grpo`.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from example_trainer.cli import config_from_args, create_unified_parser, run_training

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> None:
    """Train in one command; exit with 0 on success, 2 on invalid flags, 1 on failure.

    An engine is launched, or the one at the port is used, and updated in place. The trajectory
    service and the environments are started separately.
    """
    parser = create_unified_parser()
    run_training(
        parser,
        lambda: config_from_args(
            parser.parse_args(argv), weight_bridge_mode="in_place", benchmark=True
        ),
    )


if __name__ == "__main__":
    main()
