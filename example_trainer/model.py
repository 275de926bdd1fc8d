"""Loading the model that is trained, and choosing which of its parameters are."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import re
from collections.abc import Collection
from typing import Any

from atroposlib.errors import ConfigError, MissingExtraError
from example_trainer.config import TrainingConfig, unloadable
from example_trainer.lora import add_adapters

__all__ = [
    "attention_kinds",
    "attention_note",
    "autocast",
    "flash_attention_obstacle",
    "freeze_other_layers",
    "load_frozen_model",
    "load_model_and_tokenizer",
]

logger = logging.getLogger(__name__)

_PACKABLE_LAYERS = {"full_attention", "sliding_attention"}
_BLOCK = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")


def load_model_and_tokenizer(
    config: TrainingConfig, single_copy: bool = False, *, source: str | None = None
) -> tuple[Any, Any]:
    """Load the model in training mode on its device, and its tokenizer.

    Args:
        config: Settings; `train_dtype`, `gradient_checkpointing` and `train_layer_indices` apply.
        single_copy: Sharing weights with the engine; not built yet.
        source: Directory to load instead of `config.model_name`, e.g. a checkpoint.

    Raises:
        ConfigError: `single_copy`, a layer index the model lacks, a device or weights that are not
            there.
    """
    if single_copy:
        raise ConfigError("single_copy needs weight_bridge_mode=shared_vllm, not built yet")
    try:
        import torch
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtraError("torch", extra="trainer") from error
    _require_device(config.device, torch)
    # Adapters are put into the model they were trained with, which lies elsewhere.
    name = config.model_name if config.uses_lora else source or config.model_name
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise unloadable(name, error, part="the tokenizer of model") from error
    try:
        model = _load(name, dtype=getattr(torch, config.loaded_dtype), device=config.device)
    except (OSError, ValueError, KeyError) as error:  # KeyError: an unknown architecture
        raise unloadable(name, error) from error
    _make_ready(model, config)
    _tell_idle_layers(config)
    if config.uses_lora:
        add_adapters(model, config, source=source)
    elif config.train_layer_indices is not None:
        freeze_other_layers(model, config.train_layer_indices)
    if config.gradient_checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    if config.debug_loading:
        for parameter_name, parameter in model.named_parameters():
            logger.info("%s %s %s", parameter_name, tuple(parameter.shape), parameter.dtype)
    return model, tokenizer


def load_frozen_model(name: str, config: TrainingConfig) -> Any:
    """Load a model that is asked and never trained; bfloat16 on CUDA, float32 on a CPU.

    Args:
        name: Hub name or directory.
        config: Settings; `device` and `packing` apply.

    Raises:
        ConfigError: it cannot be loaded.
    """
    import torch

    on_gpu = config.device.startswith("cuda")
    try:
        model = _load(name, dtype=torch.bfloat16 if on_gpu else torch.float32, device=config.device)
    except OSError as error:
        raise ConfigError(f"reference_model {name!r} cannot be loaded: {error}") from error
    _make_ready(model, config)
    return model.requires_grad_(False).eval()


def _load(name: str, *, dtype: Any, device: str) -> Any:
    """Load a model with the fastest attention that it has and the device runs."""
    from transformers import AutoModelForCausalLM

    kinds = attention_kinds(_obstacle_to_flash_attention(device))
    for kind in kinds[:-1]:
        try:
            return AutoModelForCausalLM.from_pretrained(name, dtype=dtype, attn_implementation=kind)
        except (ImportError, ValueError) as error:  # its code has no such attention
            if "attention" not in str(error).lower() and "attn" not in str(error).lower():
                raise
            logger.info("attention %s cannot be used: %s", kind, error)
    return AutoModelForCausalLM.from_pretrained(name, dtype=dtype, attn_implementation=kinds[-1])


def _make_ready(model: Any, config: TrainingConfig) -> None:
    model.config.use_cache = False
    if config.packing != "off" and model.config._attn_implementation == "sdpa":
        use_packed_attention(model)
    model.to(config.device)


def _tell_idle_layers(config: TrainingConfig) -> None:
    """Say that a choice of blocks is the other mode's; scripts give both, whatever they run."""
    if config.uses_lora and config.train_layer_indices is not None:
        logger.warning(
            "train_layer_indices is not used: weight_bridge_mode=%s trains adapters, whose blocks "
            "lora_layer_indices chooses",
            config.weight_bridge_mode,
        )
    if not config.uses_lora and config.lora_layer_indices is not None:
        logger.warning(
            "lora_layer_indices is not used: weight_bridge_mode=%s trains the model's own weights, "
            "whose blocks train_layer_indices chooses",
            config.weight_bridge_mode,
        )


def freeze_other_layers(model: Any, layer_indices: Collection[int]) -> None:
    """Leave only the named transformer blocks trainable; all else is frozen.

    Raises:
        ConfigError: an index is out of range, or no parameter lies in a block.
    """
    text_config = model.config.get_text_config()
    num_layers = text_config.num_hidden_layers
    outside = sorted(index for index in layer_indices if not 0 <= index < num_layers)
    if outside:
        raise ConfigError(
            f"train_layer_indices {outside} do not exist: the model has layers 0-{num_layers - 1}"
        )
    found = False
    for name, parameter in model.named_parameters():
        block = _BLOCK.search(name)
        chosen = block is not None and int(block.group(1)) in layer_indices
        parameter.requires_grad_(chosen)
        found = found or chosen
    if not found:
        raise ConfigError("train_layer_indices match no parameter of this model")


def _require_device(device: str, torch: Any) -> None:
    if not device.startswith("cuda"):
        return
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(device.partition(":")[2] or 0) >= num_gpus:
        raise ConfigError(
            f"device={device}: torch sees {num_gpus} GPUs here; choose one of them, or --device cpu"
        )


def autocast(config: TrainingConfig) -> contextlib.AbstractContextManager[Any]:
    """Return the context every forward pass of a run is made in, trials of the model included."""
    import torch

    kind = "cuda" if config.device.startswith("cuda") else "cpu"
    context: contextlib.AbstractContextManager[Any] = torch.autocast(
        kind, dtype=torch.bfloat16, enabled=config.autocasts
    )
    return context


def attention_kinds(obstacle_to_flash: str | None) -> tuple[str, ...]:
    """Return the attention implementations of transformers to try, the fastest first."""
    return ("sdpa", "eager") if obstacle_to_flash else ("flash_attention_2", "sdpa", "eager")


def attention_note(model: Any, device: str) -> str:
    """Return which attention a model runs, for the log, and why not flash attention."""
    from example_trainer.packed_attention import PACKED_ATTENTION

    used = model.config._attn_implementation
    if used.startswith("flash_attention"):
        return str(used)
    name = "sdpa for each sequence" if used == PACKED_ATTENTION else used
    return f"{name} ({_obstacle_to_flash_attention(device) or 'the model takes no flash-attn'})"


def _obstacle_to_flash_attention(device: str) -> str | None:
    if not device.startswith("cuda"):
        return flash_attention_obstacle(None)
    import torch
    from transformers.utils import is_flash_attn_2_available

    return flash_attention_obstacle(
        torch.cuda.get_device_capability(device),
        is_installed=importlib.util.find_spec("flash_attn") is not None,
        is_taken=is_flash_attn_2_available(),
    )


def flash_attention_obstacle(
    capability: tuple[int, int] | None, *, is_installed: bool = False, is_taken: bool = False
) -> str | None:
    """Return why flash attention cannot be used, None where it can.

    Args:
        capability: CUDA compute capability of the device; None: it is no GPU.
        is_installed: Whether there is a package flash_attn.
        is_taken: Whether transformers takes the one there is.
    """
    if capability is None:
        return "flash-attn needs a GPU"
    if not is_installed:
        return "flash-attn is not installed"
    if not is_taken:
        return "transformers does not take the installed flash-attn"
    if capability < (8, 0):
        major, minor = capability
        return f"flash-attn needs compute capability 8.0, this GPU has {major}.{minor}"
    return None


def use_packed_attention(model: Any) -> None:
    """Swap the attention for one that handles packed rows; only where the logits stay the same."""
    import torch

    from example_trainer.packed_attention import PACKED_ATTENTION, register

    text_config = model.config.get_text_config()
    if not _PACKABLE_LAYERS.issuperset(getattr(text_config, "layer_types", None) or ()):
        return
    register()
    was_training = model.training
    tokens = torch.arange(1, 13, device=model.device)[None] % text_config.vocab_size
    model.eval()
    try:
        with torch.no_grad():
            before = model(input_ids=tokens).logits
            model.set_attn_implementation(PACKED_ATTENTION)
            after = model(input_ids=tokens).logits
        is_same = torch.allclose(before.float(), after.float(), atol=0.05, rtol=0.05)
    except (ValueError, TypeError, RuntimeError) as error:
        logger.info("the model keeps its own attention: %s", error)
        is_same = False
    if not is_same:
        model.set_attn_implementation("sdpa")
    model.train(was_training)
