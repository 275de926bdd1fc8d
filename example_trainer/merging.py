"""The merged model of a run that trains adapters: frozen weights plus the product of the adapters.

    q_proj.base_layer.weight [out, in]  W ─┐
    q_proj.lora_A.default.weight [r, in] A ┼─► q_proj.weight = W + lora_alpha / r * B A
    q_proj.lora_B.default.weight [out, r] B ┘

Any engine serves it as it serves a trained model, without support for adapters. The weights in
training are not changed, so that merging loses nothing, however often it is done.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atroposlib.errors import ConfigError
from example_trainer.config import TrainingConfig, loading_errors, unloadable
from example_trainer.lora import add_adapters, is_adapter
from example_trainer.model import auto_class_of
from example_trainer.weight_sync import WeightSync, export_for_engine

if TYPE_CHECKING:
    import torch

__all__ = [
    "MergedModel",
    "MergingSync",
    "merged_weights",
    "require_adapters",
    "with_merged_adapters",
]


class MergedModel:
    """A model with adapters that saves, and names its weights, like the same model without them.

    Args:
        model: A transformers model with adapters, or the whole of a sharded one
            (`parallel.GatheredModel`).
    """

    def __init__(self, model: Any) -> None:
        import torch

        self._model = model
        with torch.device("meta"):  # without memory: its layers and their names only
            self._plain = auto_class_of(model.config).from_config(model.config, dtype=model.dtype)
        self._plain.generation_config = model.generation_config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return merged_weights(self._model)

    def save_pretrained(self, directory: Path, **options: Any) -> None:
        self._plain.save_pretrained(directory, **{"state_dict": self.state_dict(), **options})


def merged_weights(model: Any) -> dict[str, torch.Tensor]:
    """Return the weights of a model with its adapters merged, under the names of its checkpoint.

    Weights without adapters are those of the model, not copies; the others are on the CPU. Products
    are computed in float32.

    Raises:
        ConfigError: a layer with an adapter is not linear.
    """
    weights: dict[str, torch.Tensor] = dict(model.state_dict())
    for name, layer in _layers_with_adapters(model):
        parts = {
            key.removeprefix(f"{name}."): weights.pop(key)
            for key in list(weights)
            if key.startswith(f"{name}.")
        }
        [adapter] = layer.active_adapters
        down, up = (parts[f"lora_{side}.{adapter}.weight"].float() for side in "AB")
        weight = parts["base_layer.weight"]
        product = layer.scaling[adapter] * (up @ down)
        # GPT-2 has its weights as [in, out].
        product = product.T if layer.fan_in_fan_out else product
        # On the CPU: a GPU that trains adapters may have no memory for a second model.
        weights[f"{name}.weight"] = (weight.float() + product).to(weight.dtype).cpu()
        if "base_layer.bias" in parts:
            weights[f"{name}.bias"] = parts["base_layer.bias"]
    return weights


def _layers_with_adapters(model: Any) -> Iterator[tuple[str, Any]]:
    from peft.tuners.lora import Linear, LoraLayer

    for name, layer in model.named_modules():
        if isinstance(layer, Linear):
            yield name, layer
        elif isinstance(layer, LoraLayer):
            raise ConfigError(
                f"lora_target_modules: the adapter of {name} cannot be merged, since the layer is "
                "not linear; name linear layers, such as q_proj v_proj"
            )


def require_adapters(config: TrainingConfig) -> None:
    """Raise `ConfigError` if the model of the config cannot have its adapters; loads no weights."""
    import torch
    from transformers import AutoConfig

    try:
        model_config = AutoConfig.from_pretrained(config.model_name)
        with torch.device("meta"):
            model = auto_class_of(model_config).from_config(model_config)
    except loading_errors() as error:
        raise unloadable(config.model_name, error) from error
    with torch.device("meta"):
        add_adapters(model, config)
    if config.merges_adapters:
        list(_layers_with_adapters(model))


class MergingSync:
    """A weight sync that gives the merged model to `inner`."""

    def __init__(self, config: TrainingConfig, inner: WeightSync) -> None:
        self._inner = inner
        self._directory = Path(config.save_path) / "merged_weights"

    @property
    def mode(self) -> str:
        return self._inner.mode

    @property
    def publishes_final(self) -> bool:
        return self._inner.publishes_final

    def check_before_load(self) -> None:
        self._inner.check_before_load()

    def start(self, model: Any, tokenizer: Any, *, source: str, step: int = 0) -> None:
        """Let an engine serve the merged model; `source` may be a checkpoint of adapters."""
        merged = MergedModel(model)
        list(_layers_with_adapters(model))  # raises before an engine starts
        if is_adapter(source):
            source = str(export_for_engine(merged, self._directory, tokenizer=tokenizer))
        self._inner.start(merged, tokenizer, source=source, step=step)

    def before_step(self, *, sync_follows: bool) -> None:
        self._inner.before_step(sync_follows=sync_follows)

    def publish(self, model: Any, *, checkpoint: Path | None, step: int = 0) -> None:
        """Publish the merged model; a checkpoint has the adapters alone, so that it is not used."""
        self._inner.publish(MergedModel(model), checkpoint=None, step=step)

    def check_alive(self) -> None:
        self._inner.check_alive()

    def returns_processed_logprobs(self) -> bool:
        return self._inner.returns_processed_logprobs()

    def close(self) -> None:
        try:
            self._inner.close()
        finally:
            shutil.rmtree(self._directory, ignore_errors=True)


def with_merged_adapters(config: TrainingConfig, sync: WeightSync | None) -> WeightSync | None:
    """Return a weight sync for the model of the config, which may have adapters to merge."""
    if sync is None or not config.merges_adapters:
        return sync
    return MergingSync(config, sync)
