"""Runs the trainer by its command line, as one process or as two under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from safetensors.torch import load_file

from tests.api.soak.service_process import Replica

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
_LIMIT_S = 900


@contextmanager
def service_with(groups: Sequence[dict[str, Any]], folder: Path, name: str) -> Iterator[Replica]:
    """A service that holds groups from the start, until the context ends."""
    service = Replica(folder, "sqlite", run=name)
    service.start()
    try:
        posted = httpx.post(f"{service.url}/scored_data_list", json=list(groups))
        posted.raise_for_status()
        yield service
    finally:
        service.stop()


def run_trainer(
    service: Replica, folder: Path, *extra: str, ranks: int, steps: int, final: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Train the model next to the folder.

    Args:
        service: holds the groups.
        folder: where the run writes.
        extra: flags; they count more than those set here.
        ranks: one or two.
        steps: of the whole run.
        final: file of the final weights, under the folder.

    Returns:
        The final weights, and the metrics by step.
    """
    options = {
        "model": folder.parent / "model",
        "device": "cpu",
        "training-steps": steps,
        "batch-size": 1,
        "gradient-accumulation-steps": 4,
        "seq-len": 64,
        "lr": 0.003,
        "optimizer": "adamw",
        "checkpoint-interval": 5,
        "keep-checkpoints": "none",  # all of them
        "weight-bridge-mode": "off",
        "save-path": folder,
        "log-dir": folder / "logs",
        "atropos-url": service.url,
        "loss-reduction": "token_mean",
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    launcher = TORCHRUN if ranks == 2 else []
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "example_trainer.grpo", *flags, *extra],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return load_file(folder / final), list(map(json.loads, lines))


def largest_difference(weights: dict[str, Any], others: dict[str, Any]) -> float:
    """Return the largest difference of two sets of weights."""
    assert weights.keys() == others.keys()
    return max(float((weights[name] - others[name]).abs().max()) for name in weights)
