"""In-place updates of a model's weights from a checkpoint in safetensors files.

All tensors are read and checked before the first one is replaced, so that a wrong checkpoint leaves
the weights as they are:

    files ─► tensors in host memory ─► names, shapes, types, finite ─► the model
                  └─ transformers converts those of models that join the experts of a layer

The files are read, not mapped into memory: another process may replace them meanwhile, which would
end this one with SIGBUS.
"""

from __future__ import annotations

import copy
import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from atroposlib.errors import ConfigError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SHOWN_NAMES = 3
_MAX_HEADER_BYTES = 100 * 2**20  # the limit of the safetensors library
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def replace_weights(model: Any, folder: Path) -> None:
    """Copy the weights of a checkpoint into a transformers model.

    An output layer that the model ties to its input embedding may be part of the checkpoint or not.
    The checkpoint is in host memory as a whole during the call.

    Raises:
        ConfigError: A file is missing or damaged or changes meanwhile, a name or a shape differs
            from the model's, or a tensor has NaN or infinity. The model is not changed.
    """
    read: dict[str, torch.Tensor] = {}
    state: Mapping[str, torch.Tensor] = model.state_dict()
    max_bytes = _MAX_HEADER_BYTES + sum(8 * tensor.numel() for tensor in state.values())
    for path in _files_of_checkpoint(folder):
        read |= _read_file(path, max_bytes=max_bytes)
    tied = _tied_names(model)
    if not set(state) - tied <= set(read):
        read = _converted(model, read) or read
    _compare_names(set(read), set(state), tied, folder)
    for name, tensor in read.items():
        _compare(name, tensor, state[name], folder)
    with torch.no_grad():
        for name, tensor in read.items():
            state[name].copy_(tensor)


def _files_of_checkpoint(folder: Path) -> list[Path]:
    try:
        if (folder / _INDEX).is_file():
            index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
            return [
                folder / name for name in dict.fromkeys(Path(each).name for each in index.values())
            ]
    except (
        *(OSError, ValueError, KeyError, TypeError, AttributeError),
        RecursionError,  # deeply nested JSON
    ) as error:
        raise ConfigError(f"weights_path: {folder / _INDEX} cannot be read: {error!r}") from error
    path = folder / _SINGLE
    if not path.is_file():
        raise ConfigError(
            f"weights_path: {folder} has neither {_SINGLE} nor {_INDEX}; give the folder of a "
            "checkpoint written by save_pretrained"
        )
    return [path]


def _read_file(path: Path, *, max_bytes: int) -> dict[str, torch.Tensor]:
    import safetensors.torch
    from safetensors import SafetensorError

    try:
        before = path.stat()
        if not stat.S_ISREG(before.st_mode):  # a pipe would block the engine
            raise OSError("it is not a file")
        if before.st_size > max_bytes:
            raise OSError(f"it has {before.st_size} bytes, more than the served model")
        tensors: dict[str, torch.Tensor] = safetensors.torch.load(path.read_bytes())
        after = path.stat()
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise _unreadable(path, error) from error
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise _unreadable(path, "it changed meanwhile")
    return tensors


def _converted(model: Any, read: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
    """Return tensors of a checkpoint under the names of the model, as transformers loads them.

    None if they are not those of this model.
    """
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)
    try:
        loaded, found = type(model).from_pretrained(
            None,
            config=copy.deepcopy(model.config),
            state_dict=dict(read),
            dtype=model.dtype,
            output_loading_info=True,
        )
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError):
        return None
    finally:
        transformers_logging.set_verbosity(verbosity)
    if any(found.values()):
        return None
    return dict(loaded.state_dict())


def _unreadable(path: Path, reason: object) -> ConfigError:
    return ConfigError(f"weights_path: {path} cannot be read: {reason}; the weights are unchanged")


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


def _compare(name: str, read: torch.Tensor, served: torch.Tensor, folder: Path) -> None:
    if read.shape != served.shape:
        raise ConfigError(
            f"weights_path: {name} in {folder} has shape {list(read.shape)}, the served model has "
            f"{list(served.shape)}; the weights are unchanged"
        )
    if read.dtype not in _FLOATS and served.is_floating_point():
        raise ConfigError(
            f"weights_path: {name} in {folder} has type {read.dtype}, expected one of "
            f"{', '.join(map(str, _FLOATS))}, not quantized; the weights are unchanged"
        )
    if not served.is_floating_point() or not read.numel():
        return
    # The smallest and the largest element are NaN if any is.
    if not torch.stack(read.aminmax()).to(served.dtype).isfinite().all():
        raise ConfigError(
            f"weights_path: {name} in {folder} has NaN, infinity, or a number that {served.dtype} "
            "cannot represent; the weights are unchanged"
        )
