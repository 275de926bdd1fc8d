"""Versions of a small model's weights in bfloat16, after real steps of AdamW in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from example_trainer.weights.training_sync import stage_weights


def small_model(*, hidden: int = 128, layers: int = 2, vocab: int = 1024) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            use_cache=False,
        )
    )


def train_versions(
    folder: Path, *, lr: float, versions: int, model: Any = None, dtype: str = "bfloat16"
) -> Iterator[tuple[int, Path]]:
    """Yield the checkpoint before the first and after each step of a policy gradient."""
    model = small_model() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    vocab = model.config.vocab_size
    for version in range(versions):
        path = folder / f"step_{version}"
        stage_weights(model, path, dtype=dtype, unties=False)
        yield version, path
        tokens = torch.randint(0, vocab, (4, 24))
        advantages = torch.randn(4, 1)
        logprobs = model(input_ids=tokens).logits[:, :-1].log_softmax(-1)
        chosen = logprobs.gather(-1, tokens[:, 1:, None]).squeeze(-1)
        (-(advantages * chosen).mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
