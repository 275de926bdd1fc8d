"""Checkpoints: a model directory anything can load, plus what a killed run needs to go on.

    step_<n>/ config.json, model.safetensors, tokenizer ...      loadable by transformers and vLLM
              trainer_state.safetensors, trainer_state.json      optimiser, random state, step

A directory appears complete or not at all: it is written beside its place and renamed.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atroposlib.errors import ConfigError

__all__ = [
    "find_latest_checkpoint",
    "load_training_state",
    "replace_directory",
    "save_checkpoint",
    "save_training_state",
]

_STATE = "trainer_state.json"
_TENSORS = "trainer_state.safetensors"
_STEP_DIRECTORY = re.compile(r"step_(\d+)")


def replace_directory(path: Path, write: Callable[[Path], None]) -> Path:
    """Fill a fresh directory through `write` and put it in the place of `path` by renaming.

    When `write` raises, what stood at `path` before is untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.new")
    retired = path.with_name(f".{path.name}.old")
    for leftover in (fresh, retired):
        shutil.rmtree(leftover, ignore_errors=True)
    fresh.mkdir()
    try:
        write(fresh)
        for file in fresh.rglob("*"):
            _flush_to_disk(file)
        _flush_to_disk(fresh)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    if path.exists():
        path.rename(retired)
    fresh.rename(path)
    _flush_to_disk(path.parent)
    shutil.rmtree(retired, ignore_errors=True)
    return path


def save_checkpoint(
    model: Any,
    tokenizer: Any,
    save_path: str | Path,
    step: int,
    is_final: bool = False,
    *,
    optimizer: Any = None,
) -> Path:
    """Save model and tokenizer as `step_<step>`, or `final_model`, replacing what stood there.

    Args:
        model: A transformers model.
        tokenizer: Its tokenizer.
        save_path: Parent directory.
        step: Optimiser steps done.
        is_final: Name the directory `final_model`.
        optimizer: With it the directory can be resumed from.

    Returns:
        The directory.
    """

    def write(directory: Path) -> None:
        model.save_pretrained(directory, safe_serialization=True)
        tokenizer.save_pretrained(directory)
        if optimizer is not None:
            save_training_state(directory, optimizer, step)

    name = "final_model" if is_final else f"step_{step}"
    return replace_directory(Path(save_path) / name, write)


def save_training_state(directory: Path, optimizer: Any, step: int) -> None:
    """Write optimiser, random generators and step beside a saved model, without pickling."""
    import torch
    from safetensors.torch import save_file

    state = optimizer.state_dict()
    tensors = {"rng.torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["rng.cuda"] = torch.cuda.get_rng_state()
    plain: dict[str, dict[str, Any]] = {}
    for index, slots in state["state"].items():
        for name, value in slots.items():
            if isinstance(value, torch.Tensor):
                tensors[f"state.{index}.{name}"] = value.detach().contiguous().cpu()
            else:
                plain.setdefault(str(index), {})[name] = value
    save_file(tensors, directory / _TENSORS)
    record = {
        "step": step,
        "optimizer": type(optimizer).__name__,
        "param_groups": state["param_groups"],
        "plain_state": plain,
        "rng_python": random.getstate(),
    }
    (directory / _STATE).write_text(json.dumps(record), encoding="utf-8")


def load_training_state(directory: Path, optimizer: Any) -> int:
    """Restore optimiser and random generators from a checkpoint.

    Returns:
        Optimiser steps done when it was written.

    Raises:
        ConfigError: the checkpoint belongs to another kind of optimiser.
    """
    import torch
    from safetensors.torch import load_file

    record = json.loads((directory / _STATE).read_text(encoding="utf-8"))
    if record["optimizer"] != type(optimizer).__name__:
        raise ConfigError(
            f"{directory} was written by {record['optimizer']}, this run uses "
            f"{type(optimizer).__name__}; choose the same optimizer or start without --resume"
        )
    tensors = load_file(directory / _TENSORS)
    slots: dict[int, dict[str, Any]] = {
        int(index): dict(values) for index, values in record["plain_state"].items()
    }
    for key, value in tensors.items():
        if key.startswith("state."):
            _, index, name = key.split(".", 2)
            slots.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": slots, "param_groups": record["param_groups"]})
    version, internal, gauss = record["rng_python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(tensors["rng.torch"])
    if "rng.cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["rng.cuda"])
    return int(record["step"])


def find_latest_checkpoint(save_path: str | Path) -> Path | None:
    """Return the resumable `step_<n>` directory with the largest n, None when there is none."""
    steps: dict[int, Path] = {}
    root = Path(save_path)
    for path in root.iterdir() if root.is_dir() else ():
        match = _STEP_DIRECTORY.fullmatch(path.name)
        if match and (path / _STATE).is_file():
            steps[int(match.group(1))] = path
    return steps[max(steps)] if steps else None


def _flush_to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
