"""LoRA: adapters of a model, which alone are trained and saved."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from atroposlib.errors import ConfigError, MissingExtraError
from example_trainer.config import TrainingConfig

__all__ = ["add_adapters", "engine_rank", "is_adapter", "require_layers", "without_adapters"]

logger = logging.getLogger(__name__)

_TARGET_MODULES = ["q_proj", "v_proj"]
_ADAPTER = "default"
"""Name of the adapters in the model, the only ones."""
_ENGINE_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM's `--max-lora-rank` accepts."""


def is_adapter(directory: str | Path) -> bool:
    """Return whether a directory contains adapters rather than a model."""
    return (Path(directory) / "adapter_config.json").is_file()


def engine_rank(rank: int) -> int:
    """Return the smallest `--max-lora-rank` of vLLM for adapters of a rank.

    Raises:
        ConfigError: the rank is too large for vLLM.
    """
    for possible in _ENGINE_RANKS:
        if possible >= rank:
            return possible
    raise ConfigError(f"lora_r={rank}: vLLM supports ranks up to {_ENGINE_RANKS[-1]}")


def add_adapters(model: Any, config: TrainingConfig, *, source: str | None = None) -> None:
    """Freeze a transformers model in place and add adapters, which alone are trained and saved.

    The class of the model is unchanged. Adapters are float32, or of the type of the frozen weights
    if they are sharded together. `source` may be a directory of adapters to continue from; new
    adapters do not change the model's output.

    Raises:
        ConfigError: a layer or module does not exist, or peft is too old for transformers.
        MissingExtraError: peft is not installed.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise MissingExtraError("peft", extra="trainer") from error
    _require_recent_peft()
    require_layers(model, config.lora_layer_indices or (), "lora_layer_indices")
    if source is not None and is_adapter(source):
        model.load_adapter(source, is_trainable=True)
        _warn_of_other_settings(model, config)
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
            raise ConfigError(
                f"lora_target_modules: {str(error).strip().splitlines()[0]} The linear layers of "
                f"the blocks are {', '.join(_linear_layers(model))}"
            ) from error
    _require_plain_output_layer(model)
    if not config.is_sharded:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        if source is not None and is_adapter(source):
            _restore_precision(model, Path(source))


def _warn_of_other_settings(model: Any, config: TrainingConfig) -> None:
    saved = model.peft_config[_ADAPTER]
    modules = sorted(set(config.lora_target_modules or _TARGET_MODULES))
    for name, value, given in (
        ("lora_r", saved.r, config.lora_r),
        ("lora_alpha", saved.lora_alpha, config.lora_alpha),
        ("lora_dropout", saved.lora_dropout, config.lora_dropout),
        ("lora_target_modules", sorted(saved.target_modules), modules),
        ("lora_layer_indices", saved.layers_to_transform, config.lora_layer_indices),
    ):
        if value != given:
            logger.warning(
                "%s=%s is not used: the adapters from which the run continues have %s",
                name,
                given,
                value,
            )


def _restore_precision(model: Any, source: Path) -> None:
    """Copy the float32 values of loaded adapters, which transformers rounds to the frozen type."""
    from safetensors.torch import load_file

    path = source / "adapter_model.safetensors"
    stored = load_file(path) if path.is_file() else {}
    for name, parameter in model.named_parameters():
        found = stored.get("base_model.model." + name.replace(f".{_ADAPTER}.", "."))
        if parameter.requires_grad and found is not None:
            parameter.data.copy_(found)


def _linear_layers(model: Any) -> list[str]:
    """Return the names of linear layers in transformer blocks, without their place."""
    from torch.nn import Linear
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    return sorted(
        {
            name.rpartition(".")[2]
            for name, layer in model.named_modules()
            if isinstance(layer, Linear | Conv1D) and layer is not head
        }
    )


def _require_recent_peft() -> None:
    import peft
    import transformers
    from transformers.integrations.peft import MIN_PEFT_VERSION
    from transformers.utils import check_peft_version

    try:
        check_peft_version(MIN_PEFT_VERSION)
    except ValueError as error:
        raise ConfigError(
            f"LoRA with transformers {transformers.__version__} needs peft {MIN_PEFT_VERSION} or "
            f"later, installed is {peft.__version__}: upgrade peft, or use an earlier transformers"
        ) from error


def require_layers(model: Any, indices: Collection[int], setting: str) -> None:
    """Raise `ConfigError` if a model has no transformer block of one of the indices."""
    num_layers = model.config.get_text_config().num_hidden_layers
    outside = sorted(index for index in indices if not 0 <= index < num_layers)
    if outside:
        raise ConfigError(
            f"{setting} {outside} do not exist: the model has layers 0-{num_layers - 1}"
        )


def _require_plain_output_layer(model: Any) -> None:
    from peft.tuners.tuners_utils import BaseTunerLayer

    if isinstance(model.get_output_embeddings(), BaseTunerLayer):
        raise ConfigError(
            "lora_target_modules: adapters on the output layer (lm_head) are not supported, since "
            "logprobs are computed from its weights only; name layers inside the blocks, such as "
            "q_proj v_proj"
        )


@contextlib.contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """Context in which a model computes without its adapters, which remain trainable."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    # The public method also changes `requires_grad`, which sharded weights do not support.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
