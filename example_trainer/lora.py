"""LoRA adapters: putting trainable ones into a model, and which directories hold one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from atroposlib.errors import ConfigError, MissingExtraError
from example_trainer.config import TrainingConfig

__all__ = ["add_adapters", "engine_rank", "is_adapter", "without_adapters"]

_TARGET_MODULES = ["q_proj", "v_proj"]
_ENGINE_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks vLLM's `--max-lora-rank` takes."""


def is_adapter(directory: str | Path) -> bool:
    """Say whether a directory holds adapters rather than a model."""
    return (Path(directory) / "adapter_config.json").is_file()


def engine_rank(rank: int) -> int:
    """Return the smallest `--max-lora-rank` of vLLM that takes adapters of a rank.

    Raises:
        ConfigError: it takes none of that rank.
    """
    for possible in _ENGINE_RANKS:
        if possible >= rank:
            return possible
    raise ConfigError(f"lora_r={rank}: vLLM takes ranks up to {_ENGINE_RANKS[-1]}")


def add_adapters(model: Any, config: TrainingConfig, *, source: str | None = None) -> None:
    """Freeze a model and put adapters into it, which alone are trained and saved.

    The model keeps its class, so whatever reads its layers finds them. Adapters are float32 unless
    they are sharded together with the frozen weights, which then give the type.

    Args:
        model: A transformers model; changed in place.
        config: The `lora_` settings.
        source: A directory of adapters to go on from; None or a model: fresh ones, which leave the
            model's output as it is.

    Raises:
        ConfigError: a layer or module is not there.
        MissingExtraError: peft is not installed.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise MissingExtraError("peft", extra="trainer") from error
    num_layers = model.config.get_text_config().num_hidden_layers
    outside = [i for i in config.lora_layer_indices or () if not 0 <= i < num_layers]
    if outside:
        raise ConfigError(
            f"lora_layer_indices {outside} do not exist: the model has layers 0-{num_layers - 1}"
        )
    if source is not None and is_adapter(source):
        model.load_adapter(source, is_trainable=True)
    else:
        settings = LoraConfig(
            task_type="CAUSAL_LM",
            r=config.lora_r,
            lora_alpha=config.lora_alpha,
            lora_dropout=config.lora_dropout,
            target_modules=config.lora_target_modules or _TARGET_MODULES,
            layers_to_transform=config.lora_layer_indices,
            bias="none",
        )
        try:
            model.add_adapter(settings)
        except ValueError as error:
            raise ConfigError(f"lora_target_modules: {error}") from error
    _require_plain_output_layer(model)
    if not config.is_sharded:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()


def _require_plain_output_layer(model: Any) -> None:
    """Refuse adapters on the output layer, whose weights alone the loss would read.

    Raises:
        ConfigError: it has one.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    if isinstance(model.get_output_embeddings(), BaseTunerLayer):
        raise ConfigError(
            "lora_target_modules: adapters on the output layer (lm_head) are not supported, its "
            "logprobs are computed from its weights alone; name layers inside the blocks, such as "
            "q_proj v_proj"
        )


@contextlib.contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """Let a model answer as without its adapters, which stay trainable."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    # The public switch also turns gradients off and on, which sharded weights do not take.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
