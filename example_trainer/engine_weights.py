"""Writing the trained weights for an engine that is already running."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from example_trainer.checkpointing import replace_directory

__all__ = ["export_for_engine", "ties_output_to_input"]


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
