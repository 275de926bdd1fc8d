"""Loading the trained model, and the optimizer."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import pickle
import re
from collections.abc import Collection, Iterable
from typing import Any, Literal, NamedTuple

from atroposlib.errors import ConfigError, MissingExtraError
from atroposlib.utils.model_paths import use_cache_without_hub
from example_trainer.config import LoraFields, TrainingConfig, loading_errors, unloadable
from example_trainer.images import IMAGE_MODELS, vision_encoder
from example_trainer.lora import add_adapters, require_layers

__all__ = [
    "FOREIGN_ERRORS",
    "PLAIN_LAYERS",
    "LayerWidths",
    "NothingTrainedError",
    "OptimizerChoice",
    "attention_kinds",
    "attention_note",
    "auto_class_of",
    "autocast",
    "checkpoint_activations",
    "choose_optimizer",
    "create_optimizer",
    "create_optimizer_for_params",
    "flash_attention_obstacle",
    "freeze_other_layers",
    "in_text_layers",
    "layer_configs",
    "layer_widths",
    "load_frozen_model",
    "load_model_and_tokenizer",
    "load_pretrained",
    "num_learned_positions",
    "own_memory",
    "require_device",
    "tokens_to_test_attention",
    "usable_length",
    "usable_pad_multiple",
]

logger = logging.getLogger(__name__)


class NothingTrainedError(ConfigError, RuntimeError):
    """No parameter of the model would be trained."""


FOREIGN_ERRORS = (
    TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError, NotImplementedError
)  # fmt: skip
"""Errors that the code of a model raises for arguments it does not support."""

PLAIN_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers that read earlier tokens through their attention only, as transformers names
them."""
_BLOCK = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")


def require_model(name: str) -> None:
    """Check that the config of a model can be read, which takes less time than loading it.

    Raises:
        ConfigError: it cannot.
    """
    from transformers import AutoConfig

    use_cache_without_hub(name)
    try:
        AutoConfig.from_pretrained(name)
    except loading_errors() as error:
        raise unloadable(name, error) from error


def load_model_and_tokenizer(
    config: TrainingConfig, single_copy: bool = False, *, source: str | None = None
) -> tuple[Any, Any]:
    """Load the model in training mode on its device, and its tokenizer.

    Args:
        config: Settings; `train_dtype`, `gradient_checkpointing` and `train_layer_indices` apply.
        single_copy: Whether to share weights with the engine; not built yet.
        source: Directory to load instead of `config.model_name`, such as a checkpoint.

    Raises:
        ConfigError: `single_copy` is set, or a layer, the device or the weights do not exist.
    """
    if single_copy:
        raise ConfigError("single_copy needs weight_bridge_mode=shared_vllm, not built yet")
    try:
        import torch
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtraError("torch", extra="trainer") from error
    require_device(config.device)
    # A checkpoint of adapters does not contain the model.
    name = config.model_name if config.uses_lora else source or config.model_name
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except loading_errors() as error:
        raise unloadable(name, error, part="the tokenizer of model") from error
    try:
        model = _load(name, config, dtype=getattr(torch, config.loaded_dtype))
    except loading_errors() as error:
        raise unloadable(name, error) from error
    _move_to_device(model, config)
    _warn_of_unused_settings(config)
    _warn_of_noise(model)
    if config.uses_lora:
        add_adapters(model, config, source=source)
    elif config.train_layer_indices is not None:
        freeze_other_layers(model, config.train_layer_indices)
    if config.freeze_vision:  # with its adapters, which the names of modules may select too
        _freeze_vision(model)
    if config.gradient_checkpointing:
        model.enable_input_require_grads()
        checkpoint_activations(model)
    model.train()
    if config.debug_loading:
        for parameter_name, parameter in model.named_parameters():
            logger.info("%s %s %s", parameter_name, tuple(parameter.shape), parameter.dtype)
    return model, tokenizer


_POSITION_EMBEDDINGS = ("wpe", "embed_positions", "position_embeddings")
"""Names of learned embeddings of positions in GPT-2, OPT and BERT, and their relatives."""


def num_learned_positions(model: Any) -> int | None:
    """Return the number of tokens for which a model has learned positions.

    None: it computes them, as with rotary embeddings, and has no such limit.
    """
    for name, module in model.named_modules():
        size = getattr(module, "num_embeddings", None)
        if size is not None and name.rpartition(".")[2] in _POSITION_EMBEDDINGS:
            # OPT and RoBERTa leave the first rows unused.
            padding = getattr(module, "padding_idx", None)
            unused = getattr(module, "offset", 0 if padding is None else padding + 1)
            return int(size) - int(unused)
    return None


def usable_length(model: Any, config: TrainingConfig) -> int:
    """Return `seq_len`, or the number of the model's positions if that is smaller."""
    positions = num_learned_positions(model)
    if positions is None or positions >= config.seq_len:
        return config.seq_len
    logger.warning(
        "seq_len=%d exceeds the %d positions of the model: longer sequences are truncated to that",
        *(config.seq_len, positions),
    )
    return positions


def usable_pad_multiple(model: Any, config: TrainingConfig) -> int:
    """Return `pad_multiple`, or less where padding would exceed the positions of the model."""
    positions = num_learned_positions(model)
    if positions is None:
        return config.pad_multiple
    multiples = range(min(config.pad_multiple, positions), 0, -1)
    return next(multiple for multiple in multiples if positions % multiple == 0)


def checkpoint_activations(model: Any) -> None:
    """Let a model of transformers compute its activations again in the backward pass.

    Raises:
        ConfigError: the code of the model cannot do this.
    """
    options = {"use_reentrant": False}
    try:
        if hasattr(model, "activation_checkpointing_enable"):  # its name from transformers 5.23 on
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
        else:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    except ValueError as error:
        raise ConfigError(
            f"gradient_checkpointing: {error} Train it with --no-gradient-checkpointing"
        ) from error


def load_frozen_model(name: str, config: TrainingConfig) -> Any:
    """Load a model for inference only, in bfloat16 on CUDA and float32 on a CPU.

    Raises:
        ConfigError: it cannot be loaded.
    """
    import torch

    on_gpu = config.device.startswith("cuda")
    try:
        model = _load(name, config, dtype=torch.bfloat16 if on_gpu else torch.float32)
    except loading_errors() as error:
        raise ConfigError(f"reference_model {name!r} cannot be loaded: {error}") from error
    _move_to_device(model, config)
    return model.requires_grad_(False).eval()


def auto_class_of(model_config: Any) -> Any:
    """Return the class of transformers that loads models with this config."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    reads_images = model_config.model_type in IMAGE_MODELS
    return AutoModelForImageTextToText if reads_images else AutoModelForCausalLM


def load_pretrained(auto_class: Any, name: str, **options: Any) -> Any:
    """Return `auto_class.from_pretrained(name, **options)` if its files have every weight.

    transformers itself initializes the others at random, with a warning.

    Raises:
        ConfigError: weights are missing, are pickled together with other objects, or have another
            shape than the model's config says.
    """
    try:
        model, report = auto_class.from_pretrained(name, output_loading_info=True, **options)
    except pickle.UnpicklingError as error:
        raise ConfigError(
            "its weights are a pickle that could run code, which is not loaded; expected "
            "model.safetensors"
        ) from error
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise ConfigError(
            "its weights have other shapes than its config.json; transformers lists them above"
        ) from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ConfigError(f"{len(missing)} of its weights are missing, the first is {missing[0]}")
    return model


def own_memory(model: Any) -> None:
    """Copy parameters and buffers to memory of their own, in place; shared ones remain shared.

    transformers maps the file of the weights into memory. Weights on a CPU would follow changes of
    the file, and the process would end with SIGBUS once it is truncated.
    """
    import torch

    copies: dict[int, torch.UntypedStorage] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in copies:
            copies[storage.data_ptr()] = storage.clone()
        owned = copies[storage.data_ptr()]
        view = torch.empty(0, dtype=tensor.dtype)
        tensor.data = view.set_(owned, tensor.storage_offset(), tensor.shape, tensor.stride())


def _load(name: str, config: TrainingConfig, *, dtype: Any) -> Any:
    from transformers import AutoConfig

    use_cache_without_hub(name)
    auto_class = auto_class_of(AutoConfig.from_pretrained(name))
    obstacle = _obstacle_to_flash_attention(config.device)
    if config.shared_prefixes == "on":
        obstacle = "flash-attn has no attention over trees"
    kinds = attention_kinds(obstacle)
    for kind in kinds[:-1]:
        try:
            return load_pretrained(auto_class, name, dtype=dtype, attn_implementation=kind)
        except ConfigError:
            raise
        except (ImportError, ValueError) as error:  # not implemented for this model
            if "attention" not in str(error).lower() and "attn" not in str(error).lower():
                raise
            logger.info("attention %s cannot be used: %s", kind, error)
    return load_pretrained(auto_class, name, dtype=dtype, attn_implementation=kinds[-1])


def _move_to_device(model: Any, config: TrainingConfig) -> None:
    model.config.use_cache = False
    model.config.get_text_config().use_cache = False
    if config.packing != "off" and model.config._attn_implementation in ("sdpa", "eager"):
        use_packed_attention(model, longest=config.seq_len)
    model.to(config.device)
    if config.device == "cpu":
        own_memory(model)


def _warn_of_unused_settings(config: TrainingConfig) -> None:
    if config.uses_lora:
        unused = [("only adapters are trained", ["train_layer_indices"])]
    else:
        unused = [("no adapters are trained; set --lora", sorted(LoraFields.model_fields))]
    if config.optimizer == "adafactor":
        unused.append(("adafactor is used without it", ["weight_decay"]))
        if config.adafactor_relative_step:
            rates = ["lr", "lr_schedule", "warmup_steps"]
            unused.append(("adafactor_relative_step determines the learning rate", rates))
    else:
        of_adafactor = ["adafactor_relative_step", "adafactor_scale_parameter"]
        unused.append((f"optimizer is {config.optimizer}", of_adafactor))
    if config.lr_schedule == "constant":
        unused.append(("the learning rate is constant; set --lr-schedule", ["min_lr"]))
    if not config.kl_coef:
        unused.append(("kl_coef is 0", ["kl_estimator", "kl_unbiased"]))
    if not config.distill_coef:
        unused.append(("distill_coef is 0", ["distill_loss", "distill_temperature"]))
    for reason, names in unused:
        for name in names:
            if getattr(config, name) != TrainingConfig.model_fields[name].default:
                logger.warning("%s is not used: %s", name, reason)


def _warn_of_noise(model: Any) -> None:
    noises = [
        (value, "dropout" if name == "p" else name.replace("_", " "))
        for module in model.modules()
        for name, value in vars(module).items()
        if _draws_at_random(module, name)
        and isinstance(value, float | int)
        and not isinstance(value, bool)
    ]
    largest, kind = max(noises, default=(0.0, ""))
    if largest > 0:
        logger.warning(
            "the model has %s of %g in training, so that its log-probabilities differ from those "
            "of the engine: set it to 0 in its config.json",
            *(kind, largest),
        )


def _draws_at_random(module: Any, name: str) -> bool:
    """Return whether an attribute of a module is the amount of its noise in training."""
    import torch

    if isinstance(module, torch.nn.Dropout):
        return name == "p"
    return any(word in name for word in ("dropout", "layerdrop", "jitter"))


def freeze_other_layers(model: Any, layer_indices: Collection[int]) -> None:
    """Freeze all parameters outside the given transformer blocks.

    Raises:
        ConfigError: an index is out of range.
        NothingTrainedError: no parameter is in one of the blocks.
    """
    require_layers(model, layer_indices, "train_layer_indices")
    found = False
    for name, parameter in model.named_parameters():
        block = _BLOCK.search(name)
        chosen = block is not None and int(block.group(1)) in layer_indices
        parameter.requires_grad_(chosen)
        found = found or chosen
    if not found:
        raise NothingTrainedError("train_layer_indices match no parameter of this model")


def _freeze_vision(model: Any) -> None:
    if model.config.model_type not in IMAGE_MODELS:
        raise ConfigError(
            f"freeze_vision: a model of type {model.config.model_type} has no vision encoder that "
            "this trainer knows; leave the setting out"
        )
    vision_encoder(model).requires_grad_(False)


def require_device(device: str) -> None:
    """Raise `ConfigError` for a GPU that torch does not see."""
    import torch

    kind, _, index = device.partition(":")
    if kind == "cpu":
        return
    if kind == "mps":
        num_gpus = int(torch.backends.mps.is_available())
    else:
        backend = getattr(torch, kind)
        num_gpus = backend.device_count() if backend.is_available() else 0
    if int(index or 0) >= num_gpus:
        raise ConfigError(
            f"device={device}: torch sees {num_gpus} GPUs here; choose one of them, or --device cpu"
        )


def autocast(config: TrainingConfig) -> contextlib.AbstractContextManager[Any]:
    """Return the context for every forward pass of a run."""
    import torch

    kind = "cuda" if config.device.startswith("cuda") else "cpu"
    context: contextlib.AbstractContextManager[Any] = torch.autocast(
        kind, dtype=torch.bfloat16, enabled=config.autocasts
    )
    return context


def attention_kinds(obstacle_to_flash: str | None) -> tuple[str, ...]:
    """Return the attention implementations of transformers to try, fastest first."""
    return ("sdpa", "eager") if obstacle_to_flash else ("flash_attention_2", "sdpa", "eager")


def attention_note(model: Any, device: str) -> str:
    """Return the attention implementation of a model, with the reason if it is not flash-attn."""
    from example_trainer.scoring import PACKED_ATTENTION

    used = model.config.get_text_config()._attn_implementation
    if used.startswith("flash_attention"):
        return str(used)
    name = "sdpa for each sequence" if used == PACKED_ATTENTION else used
    reason = (
        _obstacle_to_flash_attention(device) or "not supported by the model or --shared-prefixes on"
    )
    return f"{name} ({reason})"


def _obstacle_to_flash_attention(device: str) -> str | None:
    if not device.startswith("cuda"):
        return flash_attention_obstacle(None)
    import torch
    from transformers.utils import is_flash_attn_2_available

    return flash_attention_obstacle(
        torch.cuda.get_device_capability(device),
        is_installed=importlib.util.find_spec("flash_attn") is not None,
        is_supported=is_flash_attn_2_available(),
    )


def flash_attention_obstacle(
    capability: tuple[int, int] | None, *, is_installed: bool = False, is_supported: bool = False
) -> str | None:
    """Return the reason why flash attention cannot be used, or None.

    `capability`: of CUDA, None without a GPU; `is_supported`: whether transformers accepts the
    installed version.
    """
    if capability is None:
        return "flash-attn needs a GPU"
    if not is_installed:
        return "flash-attn is not installed"
    if not is_supported:
        return "transformers does not support the installed flash-attn"
    if capability < (8, 0):
        major, minor = capability
        return f"flash-attn needs compute capability 8.0, this GPU has {major}.{minor}"
    return None


class LayerWidths(NamedTuple):
    """Sizes of one transformer block."""

    query: int
    """Heads times their size."""
    key: int
    intermediate: int


def layer_widths(text_config: Any) -> list[LayerWidths]:
    """Return the sizes of each transformer block, from the config of a causal language model."""
    found = []
    for index, config in enumerate(layer_configs(text_config)):
        heads = getattr(config, "num_attention_heads", None) or 1
        head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        intermediate = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        if isinstance(intermediate, list | tuple):  # Gemma 3n has one for each block
            intermediate = intermediate[index]
        found.append(LayerWidths(heads * head_size, key_heads * head_size, intermediate))
    return found


def layer_configs(text_config: Any) -> list[Any]:
    """Return the config of each transformer block.

    They differ in Gemma 4, whose own config raises an error for settings that do.
    """
    if getattr(text_config, "is_heterogeneous", False):
        return list(text_config.per_layer_config)
    return [text_config] * getattr(text_config, "num_hidden_layers", 1)


_WINDOWS = ("sliding_window", "attention_chunk_size", "keep_window_size")
"""Settings of models that limit how far a token attends."""


def tokens_to_test_attention(text_config: Any, *, at_least: int, longest: int) -> int:
    """Return the number of tokens with which to compare an attention with the model's own.

    They exceed each window of the attention that sequences of `longest` tokens exceed: with fewer
    tokens, an implementation that does not know the window gives the same result.
    """
    windows = (
        getattr(each, name, None) for each in layer_configs(text_config) for name in _WINDOWS
    )
    reached = [each for each in windows if isinstance(each, int) and 0 < each < longest]
    return at_least + max(reached, default=0)


_TESTED_TOKENS = 12
_LARGEST_DIFFERENCES = {"torch.float64": 1e-6, "torch.float32": 1e-3}
_LARGEST_HALF_DIFFERENCE = 0.05
"""Relative to the largest logit."""


def use_packed_attention(model: Any, *, longest: int = 0) -> None:
    """Use an attention that supports packed rows, provided that the logits do not change.

    `longest` is the length of the longest sequences.
    """
    import torch

    from example_trainer.scoring import PACKED_ATTENTION, register

    text_config = model.config.get_text_config()
    if not PLAIN_LAYERS.issuperset(getattr(text_config, "layer_types", None) or ()):
        return
    register()
    was_training, own_attention = model.training, model.config._attn_implementation
    number = tokens_to_test_attention(text_config, at_least=_TESTED_TOKENS, longest=longest)
    tokens = torch.arange(1, number + 1, device=model.device)[None] % text_config.vocab_size
    # The logits of all tokens can take gigabytes.
    kept = {"logits_to_keep": _TESTED_TOKENS} if number > _TESTED_TOKENS else {}
    model.eval()
    try:
        with torch.no_grad():
            before = model(input_ids=tokens, **kept).logits
            model.set_attn_implementation(in_text_layers(model, PACKED_ATTENTION))
            after = model(input_ids=tokens, **kept).logits
        limit = _LARGEST_DIFFERENCES.get(str(before.dtype), _LARGEST_HALF_DIFFERENCE)
        is_same = bool((before - after).abs().max() <= limit * before.abs().max())
    except (ValueError, TypeError, RuntimeError) as error:
        logger.info("the model keeps its own attention: %s", error)
        is_same = False
    if not is_same:
        model.set_attn_implementation(own_attention)
    model.train(was_training)


def in_text_layers(model: Any, attention: str) -> str | dict[str, str]:
    """Return the argument that sets an attention outside a vision encoder, which is not causal."""
    return {"text_config": attention} if model.config.model_type in IMAGE_MODELS else attention


def create_optimizer(model: Any, config: TrainingConfig) -> Any:
    """Return an optimizer over the trainable parameters; see `create_optimizer_for_params`."""
    return create_optimizer_for_params(model.parameters(), config)


def create_optimizer_for_params(params: Iterable[Any], config: TrainingConfig) -> Any:
    """Return the optimizer of `choose_optimizer` over those parameters that require gradients.

    Raises:
        NothingTrainedError: nothing is trainable.
    """
    import torch

    trainable = [parameter for parameter in params if parameter.requires_grad]
    if not trainable:
        raise NothingTrainedError("no parameter requires a gradient; check train_layer_indices")
    choice = choose_optimizer(
        config, trains_bfloat16=any(p.dtype == torch.bfloat16 for p in trainable)
    )
    if choice.name == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(
            trainable,
            # Adafactor rejects a learning rate combined with relative_step.
            lr=None if config.adafactor_relative_step else config.lr,
            scale_parameter=config.adafactor_scale_parameter,
            relative_step=config.adafactor_relative_step,
        )
    settings = {"lr": config.lr, "weight_decay": config.weight_decay}
    if choice.name == "adamw_8bit":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(trainable, **settings)
    if choice.is_stochastic:
        from example_trainer.stochastic_adamw import AdamW

        return AdamW(trainable, **settings, seed=config.seed)
    return torch.optim.AdamW(trainable, **settings, fused=choice.is_fused or None)


class OptimizerChoice(NamedTuple):
    """The optimizer of a run and the reason for a fallback."""

    name: Literal["adamw", "adamw_8bit", "adafactor"]
    is_fused: bool = False
    """Whether one kernel updates all weights."""
    is_stochastic: bool = False
    """Whether weights and states are bfloat16 with stochastic rounding."""
    note: str = ""
    """Reason why it differs from the configured one, or a loss of precision."""

    def describe(self) -> str:
        kind = {"adamw": "AdamW", "adamw_8bit": "8-bit AdamW", "adafactor": "Adafactor"}[self.name]
        kind += ", fused" if self.is_fused else ""
        kind += ", stochastic rounding" if self.is_stochastic else ""
        return f"{kind} ({self.note})" if self.note else kind


def choose_optimizer(
    config: TrainingConfig, *, trains_bfloat16: bool, has_bitsandbytes: bool | None = None
) -> OptimizerChoice:
    """Resolve `config.optimizer` for this device.

    `adamw_8bit` needs bitsandbytes (looked up if None), a GPU and unsharded weights; otherwise it
    becomes AdamW. AdamW is fused on CUDA, and rounds stochastically if it trains bfloat16.
    """
    on_gpu = config.device.startswith("cuda")
    if has_bitsandbytes is None:
        has_bitsandbytes = importlib.util.find_spec("bitsandbytes") is not None
    loses = (
        "updates smaller than half a bfloat16 step are lost; use --train-dtype mixed, or "
        "--optimizer adamw, which rounds stochastically"
        if trains_bfloat16
        else ""
    )
    if config.optimizer == "adafactor":
        return OptimizerChoice("adafactor", note=loses)
    note = ""
    if config.optimizer == "adamw_8bit":
        if not on_gpu:
            note = "not adamw_8bit: it needs a GPU"
        elif config.is_sharded:
            note = "not adamw_8bit: its state cannot be sharded"
        elif not has_bitsandbytes:
            note = "not adamw_8bit: bitsandbytes is not installed"
        else:
            return OptimizerChoice("adamw_8bit", note=loses)
    if trains_bfloat16:
        return OptimizerChoice("adamw", is_stochastic=True, note=note)
    return OptimizerChoice("adamw", is_fused=on_gpu, note=note)
