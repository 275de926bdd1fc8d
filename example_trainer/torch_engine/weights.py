"""In-place updates of a model's weights from a checkpoint in safetensors files.

All names and shapes are compared before the first tensor is written, so that a wrong checkpoint
leaves the weights as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from atroposlib.errors import ConfigError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SHOWN_NAMES = 3
_FLOATS = ("F16", "BF16", "F32", "F64")


def replace_weights(model: Any, folder: Path) -> None:
    """Copy the weights of a checkpoint into a transformers model.

    An output layer that the model ties to its input embedding may be part of the checkpoint or not.

    Raises:
        ConfigError: A file is missing or damaged, or a name or a shape differs from the model's.
            The model is not changed.
    """
    files = _files_of_tensors(folder)
    state: Mapping[str, torch.Tensor] = model.state_dict()
    tied = _tied_names(model)
    _compare_names(set(files), set(state), tied, folder)
    _compare_shapes(files, state)
    with torch.no_grad():
        for path, names in _by_file({n: f for n, f in files.items() if n in state}).items():
            with _opened(path) as tensors:
                for name in names:
                    state[name].copy_(tensors.get_tensor(name))


def _files_of_tensors(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor of a checkpoint."""
    try:
        if (folder / _INDEX).is_file():
            index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
            return {str(name): folder / Path(file).name for name, file in index.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"weights_path: {folder / _INDEX} cannot be read: {error!r}") from error
    path = folder / _SINGLE
    if not path.is_file():
        raise ConfigError(
            f"weights_path: {folder} has neither {_SINGLE} nor {_INDEX}; give the folder of a "
            "checkpoint written by save_pretrained"
        )
    with _opened(path) as tensors:
        return dict.fromkeys(tensors.keys(), path)


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"weights_path: {path} cannot be read: {error}") from error


def _by_file(files: Mapping[str, Path]) -> dict[Path, list[str]]:
    grouped: dict[Path, list[str]] = {}
    for name, path in files.items():
        grouped.setdefault(path, []).append(name)
    return grouped


def _tied_names(model: Any) -> set[str]:
    """Return the names in `state_dict` that share the tensor of another name."""
    seen: set[int] = set()
    tied: set[str] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            tied.add(name)
        seen.add(id(tensor))
    return tied


def _compare_names(found: set[str], expected: set[str], tied: set[str], folder: Path) -> None:
    missing = sorted(expected - tied - found)
    unknown = sorted(found - expected)
    for problem, names in (("lacks", missing), ("has unknown", unknown)):
        if names:
            shown = ", ".join(names[:_SHOWN_NAMES])
            more = len(names) - _SHOWN_NAMES
            raise ConfigError(
                f"weights_path: the checkpoint in {folder} {problem} tensors of the served model: "
                f"{shown}{f' and {more} more' if more > 0 else ''}; the weights are unchanged"
            )


def _compare_shapes(files: Mapping[str, Path], state: Mapping[str, torch.Tensor]) -> None:
    for path, names in _by_file(files).items():
        with _opened(path) as tensors:
            stored = set(tensors.keys())
            for name in names:
                if name not in stored:
                    raise ConfigError(
                        f"weights_path: {path} lacks {name}, which {_INDEX} lists; the weights are "
                        "unchanged"
                    )
                stored_slice = tensors.get_slice(name)
                shape = list(stored_slice.get_shape())
                if shape != list(state[name].shape):
                    raise ConfigError(
                        f"weights_path: {name} in {path} has shape {shape}, the served model has "
                        f"{list(state[name].shape)}; the weights are unchanged"
                    )
                dtype = stored_slice.get_dtype()
                if state[name].is_floating_point() and dtype not in _FLOATS:
                    raise ConfigError(
                        f"weights_path: {name} in {path} has type {dtype}, expected one of "
                        f"{', '.join(_FLOATS)}, not quantized; the weights are unchanged"
                    )
