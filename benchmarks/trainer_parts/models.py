"""Models of the benchmarks: random weights in the shapes of published ones, made locally."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["MODEL_SIZES", "ModelSize", "write_model"]


class ModelSize(NamedTuple):
    """Sizes of a causal language model."""

    kind: str
    """Architecture of transformers: `qwen2` or `qwen3`."""
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    head_width: int
    vocabulary: int
    max_tokens: int = 40960


MODEL_SIZES = {
    "cpu": ModelSize("qwen2", 192, 576, 4, 3, 1, 64, 4096, 2048),
    "0.6b": ModelSize("qwen3", 1024, 3072, 28, 16, 8, 128, 151936),
    "1.5b": ModelSize("qwen2", 1536, 8960, 28, 12, 2, 128, 151936),
    "tiny 0.6b": ModelSize("qwen3", 64, 128, 2, 2, 1, 32, 320, 512),
    "tiny 1.5b": ModelSize("qwen2", 64, 128, 2, 2, 1, 32, 320, 512),
}
"""`0.6b` has the shape of Qwen3-0.6B and `1.5b` that of Qwen2.5-1.5B; the tiny ones are for
rehearsals."""


def write_model(
    folder: Path, size: ModelSize, *, device: str = "cpu", dtype: str = "float32", seed: int = 0
) -> Path:
    """Save a model with random weights and a tokenizer of its vocabulary; return the folder."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    torch.manual_seed(seed)
    default = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(_config(size))
    finally:
        torch.set_default_dtype(default)
    model.save_pretrained(folder)
    del model
    gc.collect()
    _write_tokenizer(folder, size.vocabulary)
    return folder


def _config(size: ModelSize) -> Any:
    from transformers import Qwen2Config, Qwen3Config

    settings: dict[str, Any] = {
        "vocab_size": size.vocabulary,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.key_value_heads,
        "max_position_embeddings": size.max_tokens,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "use_cache": False,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    if size.kind == "qwen3":
        return Qwen3Config(**settings, head_dim=size.head_width)
    return Qwen2Config(**settings)


def _write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Save a byte-level tokenizer; ids above its 259 entries occur in tokens only."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<|pad|>", "<|end|>", "<|unknown|>", *letters]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    assert vocabulary >= len(names)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>"
    ).save_pretrained(folder)
