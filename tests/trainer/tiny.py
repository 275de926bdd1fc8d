"""A model small enough for a test, and groups to train it on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from example_trainer.config import TrainingConfig

VOCAB = 32


class SavedTokenizer:
    """Stands in for a tokenizer where the trainer only saves it."""

    def save_pretrained(self, directory: Path) -> None:
        (Path(directory) / "tokenizer_config.json").write_text("{}")


def tiny_llama(*, seed: int = 0, layers: int = 2, dtype: torch.dtype = torch.float32) -> Any:
    """A Llama of some ten thousand parameters, in training mode."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=128,
            use_cache=False,
        )
    )
    return model.to(dtype).train()


def save_tiny_model(directory: Path) -> Path:
    """A model directory with a tokenizer that transformers can load."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # tests read what is written to stderr
    tiny_llama().save_pretrained(directory)
    words = models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(directory)
    return directory


def group(
    completions: list[list[int]],
    scores: list[float],
    *,
    prompt: tuple[int, ...] = (1, 2, 3),
    logprob: float | None = None,
    **extra: Any,
) -> dict[str, Any]:
    """A scored group whose completions follow one prompt; null fields as the service sends them."""
    tokens = [[*prompt, *completion] for completion in completions]
    masks = [[-100] * len(prompt) + completion for completion in completions]
    logprobs = None
    if logprob is not None:
        logprobs = [[1.0] * len(prompt) + [logprob] * len(c) for c in completions]
    return {
        "tokens": tokens,
        "masks": masks,
        "scores": scores,
        "inference_logprobs": logprobs,
        "advantages": None,
        "overrides": None,
        "group_overrides": None,
        "generation_params": None,
        "images": None,
        **extra,
    }


def move_adapters(model: Any) -> None:
    """Change the adapters of a model as training might, only more."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter))


def tiny_config(tmp_path: Path, **overrides: Any) -> TrainingConfig:
    """Settings for a run of a few steps on the CPU."""
    defaults: dict[str, Any] = {
        "model_name": "tiny",
        "device": "cpu",
        "lr": 1e-2,
        "training_steps": 4,
        "batch_size": 2,
        "gradient_accumulation_steps": 2,
        "seq_len": 64,
        "optimizer": "adamw",
        "weight_decay": 0.0,
        "checkpoint_interval": 0,
        "gradient_checkpointing": False,
        "weight_bridge_mode": "in_place",
        "save_path": str(tmp_path / "saves"),
        "log_dir": str(tmp_path / "logs"),
    }
    return TrainingConfig(**{**defaults, **overrides})
