"""Checkpoints: a standard model directory and the state that a killed run resumes from.

    step_<n>/ config.json, model.safetensors, tokenizer ...    loadable by transformers and vLLM
              trainer/ trainer_state.safetensors, .json        optimizer, random state, step,
                                                               trained batches
              trainer/ checksums.json                          of every other file

The trainer's state has its own folder because engines load every `*.safetensors` file next to the
weights. Earlier versions wrote it there; a run can resume from such a checkpoint, and
`move_training_state` converts it to the present layout.

A directory is written under a temporary name and renamed, so that it is either complete or absent.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from atroposlib.errors import ConfigError
from atroposlib.utils.writable import flush_to_disk, naming_writes

__all__ = [
    "check_checkpoint",
    "drop_checkpoints_before",
    "drop_old_checkpoints",
    "find_intact_checkpoint",
    "has_unnamed_checkpoint",
    "load_feed_state",
    "load_step_metrics",
    "load_training_state",
    "move_training_state",
    "random_states",
    "replace_directory",
    "safetensors_errors",
    "save_checkpoint",
    "save_lora_checkpoint",
    "save_training_state",
]

logger = logging.getLogger(__name__)

_STATE_FOLDER = "trainer"
_CHECKSUMS = "checksums.json"
_READ_BYTES = 2**24
_STATE = "trainer_state.json"
_TENSORS = "trainer_state.safetensors"
_STATE_FIELDS: dict[str, type] = {
    "step": int,
    "optimizer": str,
    "param_groups": list,
    "plain_state": dict,
    "rng_python": list,
}
"""Fields of the record of a run's state that every version writes."""
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_STEP_DIRECTORY = re.compile(r"step_(\d+)")


def replace_directory(path: Path, write: Callable[[Path], None]) -> Path:
    """Let `write` fill a new directory and replace `path` with it; unchanged if `write` raises."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.new")
    retired = path.with_name(f".{path.name}.old")
    for leftover in (fresh, retired):
        _remove(leftover)
    fresh.mkdir()
    try:
        with naming_writes(path), safetensors_errors():
            write(fresh)
        for file in fresh.rglob("*"):
            flush_to_disk(file)
        flush_to_disk(fresh)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    if not _exchange(fresh, path):
        if path.exists():
            path.rename(retired)  # a process that is killed now leaves no directory of this name
        fresh.rename(path)
    flush_to_disk(path.parent)
    for old in (fresh, retired):
        shutil.rmtree(old, ignore_errors=True)
    return path


def _remove(path: Path) -> None:
    """Delete a directory, a file or a link, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two directories in one step; return False if that is not possible."""
    if not sys.platform.startswith("linux") or other.is_symlink() or not other.is_dir():
        return False
    try:
        rename = ctypes.CDLL(None).renameat2
    except AttributeError:  # an older C library
        return False
    names = os.fsencode(one), os.fsencode(other)
    return bool(rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0)


@contextlib.contextmanager
def safetensors_errors() -> Iterator[None]:
    """Raise an error of the operating system that the library reports as its own as `OSError`."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        if found is None:
            raise
        number = int(found.group(1))
        raise OSError(number, os.strerror(number)) from error


def save_checkpoint(
    model: Any,
    tokenizer: Any,
    save_path: str | Path,
    step: int,
    is_final: bool = False,
    safe_mode: bool = True,
    *,
    final_name: str = "final_model",
    optimizer: Any = None,
    feed_state: Mapping[str, Any] | None = None,
    optimizer_state: Mapping[str, Any] | None = None,
    states_by_rank: Sequence[Mapping[str, Any]] | None = None,
    step_metrics: Mapping[str, float] | None = None,
    writes: bool = True,
) -> Path:
    """Save a transformers model and its tokenizer under `save_path` and return the directory.

    It is named `step_<step>`, or `final_name` if `is_final`, and replaces an existing one. With an
    optimizer, a run can resume from it; the arguments after `optimizer` are those of
    `save_training_state`. Unless `writes`, only the path is returned, for ranks other than 0.
    `safe_mode`, of the earlier trainer, has no effect: weights are always safetensors.
    """

    def write(directory: Path) -> None:
        model.save_pretrained(directory, safe_serialization=True)
        tokenizer.save_pretrained(directory)
        if optimizer is not None:
            save_training_state(
                directory,
                optimizer,
                step,
                feed_state,
                optimizer_state=optimizer_state,
                states_by_rank=states_by_rank,
                step_metrics=step_metrics,
                trained_weights=trained_weights(model),
            )
            _write_checksums(directory)

    path = Path(save_path) / (final_name if is_final else f"step_{step}")
    return replace_directory(path, write) if writes else path


def save_lora_checkpoint(
    model: Any, save_path: str | Path, step: int, is_final: bool = False
) -> Path:
    """Save adapters as `adapter_step_<step>` or `final_adapter`, and return the directory."""
    path = Path(save_path) / ("final_adapter" if is_final else f"adapter_step_{step}")
    return replace_directory(path, model.save_pretrained)


def trained_weights(model: Any) -> list[str]:
    """Return the names of the trained parameters of a model, in the order of its optimizer."""
    return [name for name, value in model.named_parameters() if value.requires_grad]


def random_states() -> dict[str, Any]:
    """Return the states of torch's random generators in this process, by name."""
    import torch

    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def save_training_state(
    directory: Path,
    optimizer: Any,
    step: int,
    feed_state: Mapping[str, Any] | None = None,
    *,
    optimizer_state: Mapping[str, Any] | None = None,
    states_by_rank: Sequence[Mapping[str, Any]] | None = None,
    step_metrics: Mapping[str, float] | None = None,
    trained_weights: Sequence[str] | None = None,
) -> None:
    """Write the state of the run to the folder `trainer` of a checkpoint, without pickling.

    Args:
        directory: The checkpoint.
        optimizer: Its class is recorded, and its state unless `optimizer_state` is given.
        step: Optimizer steps completed; the learning rate is a function of it.
        feed_state: JSON object for `load_feed_state`, such as the batches trained.
        optimizer_state: Of the whole model; None: `optimizer.state_dict()`.
        states_by_rank: `random_states` of every rank; None: of this process alone.
        step_metrics: Of the last step, for a run that is killed before it has logged them.
        trained_weights: `trained_weights` of the model; None: not recorded.
    """
    import numpy as np
    import torch
    from safetensors.torch import save_file

    folder = directory / _STATE_FOLDER
    folder.mkdir(exist_ok=True)
    state = optimizer.state_dict() if optimizer_state is None else optimizer_state
    tensors: dict[str, Any] = {}
    for rank, states in enumerate(states_by_rank or [random_states()]):
        tensors |= {_state_name(name, rank): value for name, value in states.items()}
    plain: dict[str, dict[str, Any]] = {}
    for index, slots in state["state"].items():
        for name, value in slots.items():
            if isinstance(value, torch.Tensor):
                tensors[f"state.{index}.{name}"] = value.detach().contiguous().cpu()
            else:
                plain.setdefault(str(index), {})[name] = value
    save_file(tensors, folder / _TENSORS)
    record = {
        "step": step,
        "optimizer": type(optimizer).__name__,
        "param_groups": state["param_groups"],
        "plain_state": plain,
        "rng_python": random.getstate(),
        "rng_numpy": _numpy_state(np.random.get_state(legacy=False)),
        "feed": feed_state or {},
        "metrics": dict(step_metrics or {}),
        "trained_weights": trained_weights,
    }
    (folder / _STATE).write_text(json.dumps(record), encoding="utf-8")


def load_training_state(
    directory: Path, optimizer: Any, *, rank: int = 0, model: Any = None
) -> int:
    """Restore optimizer and random generators; return the optimizer steps completed.

    The optimizer is that of the whole model or of this rank's shard. It keeps its own settings: the
    present ones count, not those of the checkpoint. If the checkpoint has no random state of
    `rank`, that of rank 0 is used.

    Raises:
        ConfigError: the checkpoint was written with another class of optimizer, or by a run that
            trains other weights than `model`.
    """
    import numpy as np
    import torch
    from safetensors.torch import load_file

    from example_trainer.parallel import load_optimizer_state

    record = _read_record(directory)
    if record["optimizer"] != type(optimizer).__name__:
        raise ConfigError(
            f"{directory} was written by {record['optimizer']}, this run uses "
            f"{type(optimizer).__name__}; choose the same optimizer or start without --resume"
        )
    _require_same_weights(directory, record, optimizer, model)
    tensors = load_file(_state_file(directory, _TENSORS))
    slots: dict[int, dict[str, Any]] = {
        int(index): dict(values) for index, values in record["plain_state"].items()
    }
    for key, value in tensors.items():
        if key.startswith("state."):
            _, index, name = key.split(".", 2)
            slots.setdefault(int(index), {})[name] = value
    groups = [
        {**saved, **{name: value for name, value in own.items() if name != "params"}}
        for saved, own in zip(record["param_groups"], optimizer.param_groups, strict=True)
    ]
    load_optimizer_state(optimizer, {"state": slots, "param_groups": groups})
    if record["optimizer"] == "Adafactor":
        _restore_precision(optimizer, slots)
    version, internal, gauss = record["rng_python"]
    random.setstate((version, tuple(internal), gauss))
    if "rng_numpy" in record:
        np.random.set_state(record["rng_numpy"])
    torch.set_rng_state(tensors.get(_state_name("torch", rank), tensors["rng.torch"]))
    if "rng.cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors.get(_state_name("cuda", rank), tensors["rng.cuda"]))
    return int(record["step"])


def _require_same_weights(
    directory: Path, record: Mapping[str, Any], optimizer: Any, model: Any
) -> None:
    saved = [len(group["params"]) for group in record["param_groups"]]
    differs = saved != [len(group["params"]) for group in optimizer.param_groups]
    names = record.get("trained_weights")  # not in checkpoints of earlier versions
    if differs or (model is not None and names is not None and names != trained_weights(model)):
        raise ConfigError(
            f"{directory} was written by a run that trains other weights of the model; choose the "
            "same --lora, --train-layer-indices and --freeze-vision, or start without --resume"
        )


def _restore_precision(optimizer: Any, slots: Mapping[int, Mapping[str, Any]]) -> None:
    """Undo the rounding of float32 statistics to the type of their bfloat16 weights by torch."""
    import torch

    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, values in slots.items():
        state = optimizer.state[parameters[index]]
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and state[name].dtype != value.dtype:
                state[name] = value.to(state[name].device)


def move_training_state(checkpoint: Path) -> bool:
    """Convert a checkpoint of the earlier layout, on which engines fail; return whether it was one.

    Each file is renamed and read from either place, so that a run can resume at any time.
    """
    # The record last: it marks a checkpoint as resumable.
    present = [name for name in (_TENSORS, _STATE) if (checkpoint / name).is_file()]
    for name in present:
        folder = checkpoint / _STATE_FOLDER
        folder.mkdir(exist_ok=True)
        (checkpoint / name).rename(folder / name)
        flush_to_disk(folder)
    if present:
        flush_to_disk(checkpoint)
    return bool(present)


def _state_file(checkpoint: Path, name: str) -> Path:
    """Return the path of a file of the trainer's state in the present or the earlier layout."""
    path, earlier = checkpoint / _STATE_FOLDER / name, checkpoint / name
    return earlier if earlier.is_file() and not path.is_file() else path


def _read_record(checkpoint: Path) -> dict[str, Any]:
    path = _state_file(checkpoint, _STATE)
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"the trainer's state in {path} cannot be read: {error}; delete {checkpoint} to resume "
            "from the checkpoint before it"
        ) from error
    parts = [record]
    if isinstance(record, dict):
        parts += [record.get(name, {}) for name in ("feed", "metrics")]
    if not all(isinstance(part, dict) for part in parts):
        raise ConfigError(
            f"the trainer's state in {path}: expected a JSON object, with objects as feed and "
            f"metrics; delete {checkpoint}"
        )
    return record


def _state_name(generator: str, rank: int) -> str:
    return f"rng.{generator}.{rank}" if rank else f"rng.{generator}"


def load_feed_state(directory: Path) -> dict[str, Any]:
    """Return the `feed_state` of a checkpoint, empty without one."""
    return dict(_read_record(directory).get("feed", {}))


def load_step_metrics(directory: Path) -> dict[str, float]:
    """Return the metrics of a checkpoint's last step, empty if it has none."""
    return dict(_read_record(directory).get("metrics", {}))


def find_intact_checkpoint(*places: str | Path, run_id: str | None = None) -> Path | None:
    """Return the resumable `step_<n>` directory with the largest n that is intact, or None.

    Damaged ones are logged. With a `run_id`, the checkpoints of other runs are ignored.

    Raises:
        ConfigError: every checkpoint is damaged; the message names the newest.
    """
    steps: dict[int, Path] = {}
    for place in places:
        steps |= _resumable_checkpoints(place, run_id, keeps_damaged=True)
    first: ConfigError | None = None
    for step in sorted(steps, reverse=True):
        try:
            check_checkpoint(steps[step])
        except ConfigError as error:
            first = first or error
            logger.error("%s; skipping it: later steps are repeated, with new batches", error)
        else:
            return steps[step]
    if first is not None:
        raise ConfigError(
            f"{first}; no other checkpoint of the run is intact: restore one, or start without "
            "--resume"
        )
    return None


def check_checkpoint(checkpoint: Path) -> None:
    """Compare every file of a checkpoint with its checksum.

    In a checkpoint of an earlier version, without checksums, only the headers are checked.

    Raises:
        ConfigError: names the file that is damaged or missing.
    """
    record = _read_record(checkpoint)
    manifest = checkpoint / _STATE_FOLDER / _CHECKSUMS
    if not manifest.is_file():
        _check_headers(checkpoint)
        for name, kind in _STATE_FIELDS.items():
            if not isinstance(record.get(name), kind):
                path = _state_file(checkpoint, _STATE)
                raise ConfigError(f"{path} is damaged: expected {name} of type {kind.__name__}")
        return
    try:
        found = json.loads(manifest.read_text(encoding="utf-8"))
        checksums: dict[str, str] = dict(found["xxh3_128"])
        names = sorted(checksums)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{manifest} cannot be read: {error!r}") from error
    for name in names:
        path = checkpoint / name
        try:
            is_intact = _checksum(path) == checksums[name]
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        if not is_intact:
            raise ConfigError(f"{path} is damaged: its checksum is not that of {manifest}")


def has_unnamed_checkpoint(save_path: str | Path) -> bool:
    """Return whether there is a resumable checkpoint without a run id, of an earlier version."""
    return any(
        "run_id" not in load_feed_state(path)
        for path in _resumable_checkpoints(save_path, None).values()
    )


def _write_checksums(checkpoint: Path) -> None:
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    checksums = {path.relative_to(checkpoint).as_posix(): _checksum(path) for path in files}
    content = json.dumps({"xxh3_128": checksums}, indent=1)
    (checkpoint / _STATE_FOLDER / _CHECKSUMS).write_text(content, encoding="utf-8")


def _checksum(path: Path) -> str:
    import xxhash

    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def weights_checksum(model: Any) -> str:
    """Return a checksum of the names and values of all parameters of a model."""
    import torch
    import xxhash

    digest = xxhash.xxh3_128()
    for name, parameter in model.named_parameters():
        values = parameter.detach().cpu().contiguous()
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}\n".encode())
        digest.update(values.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _check_headers(checkpoint: Path) -> None:
    from safetensors import SafetensorError, safe_open

    for path in checkpoint.rglob("*.safetensors"):
        try:
            with safe_open(path, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path} is damaged: {error}") from error
    path = _state_file(checkpoint, _TENSORS)
    if not path.is_file():
        raise ConfigError(f"{path} is missing")


def drop_old_checkpoints(save_path: str | Path, *, keep: int, run_id: str | None = None) -> None:
    """Delete all but the newest `keep` resumable checkpoints of a run."""
    for pattern in (".step_*.old", ".step_*.new"):  # left over by a killed process
        for leftover in Path(save_path).glob(pattern):
            _remove(leftover)
    checkpoints = _resumable_checkpoints(save_path, run_id)
    for step in sorted(checkpoints)[:-keep]:
        _drop(checkpoints[step])


def drop_checkpoints_before(step: int, directory: Path) -> None:
    """Delete the resumable checkpoints in a directory that are older than `step`."""
    for number, path in _resumable_checkpoints(directory, None).items():
        if number < step:
            _drop(path)


def _drop(checkpoint: Path) -> None:
    # Renamed first, so that an incomplete checkpoint never has its name.
    retired = checkpoint.with_name(f".{checkpoint.name}.old")
    _remove(retired)
    checkpoint.rename(retired)
    shutil.rmtree(retired, ignore_errors=True)


def _resumable_checkpoints(
    save_path: str | Path, run_id: str | None, *, keeps_damaged: bool = False
) -> dict[int, Path]:
    """Return the `step_<n>` directories with a training state, by n.

    `keeps_damaged`: include those whose state, and thereby whose run id, cannot be read.
    """
    steps: dict[int, Path] = {}
    root = Path(save_path)
    for path in root.iterdir() if root.is_dir() else ():
        match = _STEP_DIRECTORY.fullmatch(path.name)
        if not match or not _state_file(path, _STATE).is_file():
            continue
        try:
            is_ours = run_id is None or load_feed_state(path).get("run_id", run_id) == run_id
        except ConfigError:
            is_ours = keeps_damaged
        if is_ours:
            steps[int(match.group(1))] = path
    return steps


def _numpy_state(state: Mapping[str, Any]) -> dict[str, Any]:
    inner = {**state["state"], "key": state["state"]["key"].tolist()}
    return {**state, "state": inner}
