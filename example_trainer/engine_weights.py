"""Writing the trained weights for an engine that is already running."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from atroposlib.errors import ConfigError
from example_trainer.checkpointing import replace_directory
from example_trainer.config import TrainingConfig

__all__ = [
    "SHARED_MEMORY",
    "export_for_engine",
    "require_shared_memory_for",
    "ties_output_to_input",
    "transport_directory",
]

SHARED_MEMORY = Path("/dev/shm")
"""Where Linux lets processes of one host share memory as files."""


def transport_directory(config: TrainingConfig) -> Path:
    """Return the directory through which an engine gets weights in place; it need not exist.

    Raises:
        ConfigError: shared memory is asked for and this system has none as files.
    """
    if config.sync_transport == "disk":
        return Path(config.save_path) / "sync_weights"
    if not SHARED_MEMORY.is_dir():
        raise ConfigError(
            f"sync_transport=shared_memory needs {SHARED_MEMORY}, which this system lacks; use disk"
        )
    return SHARED_MEMORY / f"atropos_weights_{os.getpid()}_{config.vllm_port}"


def require_shared_memory_for(model: Any) -> None:
    """Check that two copies of the weights fit: the one in place and the one being written.

    Raises:
        ConfigError: they do not; containers often allow little.
    """
    need_bytes = 2 * sum(value.nbytes for value in model.state_dict().values())
    free_bytes = shutil.disk_usage(SHARED_MEMORY).free
    if free_bytes < need_bytes:
        raise ConfigError(
            f"{SHARED_MEMORY} has {free_bytes / 2**30:.1f} GiB free, two copies of the weights "
            f"take {need_bytes / 2**30:.1f}; give it more (docker: --shm-size) or use "
            "--sync-transport disk"
        )


def ties_output_to_input(model: Any) -> bool:
    """Say whether the output layer of a transformers model is its input embedding."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def export_for_engine(model: Any, directory: Path, *, tokenizer: Any = None) -> Path:
    """Write a model directory in which every layer has weights of its own.

    An output layer tied to the input embedding is written out as a layer, and the config says it
    is none: vLLM on a CPU keeps a packed copy of the output layer which a reload replaces only
    when the checkpoint has weights for it. An engine that runs the model tied passes over the
    additional tensor.

    Args:
        model: The transformers model; not changed.
        directory: Where to; what stood there is replaced at once.
        tokenizer: Written too, for an engine that is to be started on the directory.
    """
    is_tied = ties_output_to_input(model)

    def write(target: Path) -> None:
        state = model.state_dict()
        if is_tied:
            name = next(n for n, m in model.named_modules() if m is model.get_output_embeddings())
            state[f"{name}.weight"] = state[f"{name}.weight"].clone()
        model.save_pretrained(target, state_dict=state, safe_serialization=True)
        if is_tied:
            _say_untied(target / "config.json")
        if tokenizer is not None:
            tokenizer.save_pretrained(target)

    return replace_directory(directory, write)


def _say_untied(path: Path) -> None:
    settings = json.loads(path.read_text(encoding="utf-8"))
    for section in (settings, settings.get("text_config", {})):
        if "tie_word_embeddings" in section or section is settings:
            section["tie_word_embeddings"] = False
    path.write_text(json.dumps(settings, indent=2), encoding="utf-8")
