"""In-place updates of a model's weights from a checkpoint in safetensors files.

All tensors are read and checked before the first one is replaced, so that a wrong checkpoint leaves
the weights as they are:

    files ─► names, shapes, types ─► tensors in host memory ─► finite ─► the model

The files are read, not mapped into memory: another process may replace them meanwhile, which would
end this one with SIGBUS.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import sys
from collections.abc import Mapping, Sequence
from io import BufferedReader
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch

from atroposlib.errors import ConfigError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SHOWN_NAMES = 3
_FLOATS = {
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip
_TYPES = _FLOATS | {
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_ALIGNMENT = 64
_MAX_HEADER_BYTES = 100_000_000
"""The limit of the format."""


def replace_weights(model: Any, folder: Path) -> None:
    """Copy the weights of a checkpoint into a transformers model.

    An output layer that the model ties to its input embedding may be part of the checkpoint or not.
    The checkpoint is in host memory as a whole during the call.

    Raises:
        ConfigError: A file is missing or damaged or changes meanwhile, a name or a shape differs
            from the model's, or a tensor has NaN or infinity. The model is not changed.
    """
    files = _files_of_tensors(folder)
    state: Mapping[str, torch.Tensor] = model.state_dict()
    _compare_names(set(files), set(state), _tied_names(model), folder)
    read: dict[str, torch.Tensor] = {}
    for path, names in _by_file(files).items():
        read |= _read_tensors(path, {name: state[name] for name in names})
    with torch.no_grad():
        for name, tensor in read.items():
            state[name].copy_(tensor)


def _files_of_tensors(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor of a checkpoint."""
    try:
        if (folder / _INDEX).is_file():
            index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
            return {str(name): folder / Path(file).name for name, file in index.items()}
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
    with _opened(path) as file:
        return dict.fromkeys(_read_header(file, path), path)


def _opened(path: Path) -> BufferedReader:
    try:
        return path.open("rb")
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, reason: object) -> ConfigError:
    return ConfigError(f"weights_path: {path} cannot be read: {reason}; the weights are unchanged")


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


class _Entry(NamedTuple):
    """A tensor in a file."""

    dtype: str
    shape: list[int]
    first: int
    """Position of its first byte in the file."""
    num_bytes: int


def _read_header(file: BufferedReader, path: Path) -> dict[str, _Entry]:
    """Return the tensors of a safetensors file by name.

    The file has the size of a JSON header in 8 bytes, the header, and the data, to whose first byte
    the offsets in the header are relative.
    """
    try:
        size = int.from_bytes(file.read(8), "little")
        if size > _MAX_HEADER_BYTES:
            raise ValueError(f"a header of {size} bytes")
        header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        entries = {}
        for name, each in header.items():
            begin, end = map(int, each["data_offsets"])
            shape = [int(length) for length in each["shape"]]
            entries[name] = _Entry(str(each["dtype"]), shape, 8 + size + begin, end - begin)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _unreadable(path, f"{error!r}, expected a safetensors file") from error
    return entries


def _read_tensors(path: Path, served: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a file that replace those of the served model."""
    with _opened(path) as file:
        before = os.fstat(file.fileno())
        entries = _read_header(file, path)
        for name, tensor in served.items():
            _compare(name, entries.get(name), tensor, path)
        memory = _host_memory([entries[name].num_bytes for name in served])
        pairs = zip(served, memory, strict=True)
        read = {name: _read_tensor(file, path, name, entries[name], part) for name, part in pairs}
        after = os.fstat(file.fileno())
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise _unreadable(path, "it changed meanwhile")
    for name, tensor in read.items():
        _require_finite(name, tensor, path, dtype=served[name].dtype)
    return read


def _compare(name: str, entry: _Entry | None, served: torch.Tensor, path: Path) -> None:
    if entry is None:
        raise ConfigError(
            f"weights_path: {path} lacks {name}, which {_INDEX} lists; the weights are unchanged"
        )
    if entry.shape != list(served.shape):
        raise ConfigError(
            f"weights_path: {name} in {path} has shape {entry.shape}, the served model has "
            f"{list(served.shape)}; the weights are unchanged"
        )
    types = _FLOATS if served.is_floating_point() else _TYPES
    if entry.dtype not in types:
        raise ConfigError(
            f"weights_path: {name} in {path} has type {entry.dtype}, expected one of "
            f"{', '.join(types)}, not quantized; the weights are unchanged"
        )
    if entry.num_bytes != math.prod(entry.shape) * types[entry.dtype].itemsize:
        raise _unreadable(path, f"{name} has {entry.num_bytes} bytes")


def _host_memory(sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return memory of these numbers of bytes."""
    ends = list(accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes))
    total = max(1, ends[-1])
    if sys.platform == "linux":
        mapped = mmap.mmap(-1, total, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without them
            # With small pages, the faults take longer than the rest of an update.
            mapped.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.frombuffer(mapped, dtype=torch.uint8)
    else:
        memory = torch.empty(total, dtype=torch.uint8)
    firsts = [0, *ends[:-1]]
    return [memory[first : first + n] for first, n in zip(firsts, sizes, strict=True)]


def _read_tensor(
    file: BufferedReader, path: Path, name: str, entry: _Entry, memory: torch.Tensor
) -> torch.Tensor:
    try:
        file.seek(entry.first)
        found = file.readinto(memory.numpy())
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    if found != entry.num_bytes:
        raise _unreadable(path, f"it ends within {name}")
    return memory.view(_TYPES[entry.dtype]).view(entry.shape)


def _require_finite(name: str, tensor: torch.Tensor, path: Path, *, dtype: torch.dtype) -> None:
    if not dtype.is_floating_point or not tensor.numel():
        return
    # The smallest and the largest element are NaN if any is.
    if not torch.stack(tensor.aminmax()).to(dtype).isfinite().all():
        raise ConfigError(
            f"weights_path: {name} in {path} has NaN, infinity, or a number that {dtype} cannot "
            "represent; the weights are unchanged"
        )
