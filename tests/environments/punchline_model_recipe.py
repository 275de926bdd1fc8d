"""Training of the model in `environments/community/punchline_vrcli/sample`, of 58,000 parameters.

It reads bytes, and expects a punchline to repeat words of the reasoning before it:

    python -m tests.environments.punchline_model_recipe
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from environments.community.punchline_vrcli.punchline_vrcli_env import SAMPLE, context_of
from tests.environments.reward_model_recipe import make_tokenizer

MAX_BYTES = 512
NUM_STEPS = 5_000


def make_model(vocab_size: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=96,
        max_position_embeddings=MAX_BYTES,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def word(source: random.Random, known: Sequence[str]) -> str:
    """Return a word of the jokes, or letters that only a copy can predict."""
    if source.random() < 0.3:
        return source.choice(known)
    return "".join(source.choices(string.ascii_lowercase, k=source.randint(1, 5)))


def example(source: random.Random, known: Sequence[str]) -> tuple[str, str]:
    """Return a context and a punchline, which the reasoning mostly has between other words."""

    def words(least: int, most: int) -> str:
        return " ".join(word(source, known) for _ in range(source.randint(least, most)))

    punchline = words(2, 4)
    middle = punchline if source.random() < 0.8 else words(2, 5)
    reasoning = " ".join([words(0, 3), middle, words(0, 2)]).strip()
    return context_of(words(1, 2), source.choice([reasoning] * 4 + [""])), punchline


def main(folder: Path = SAMPLE / "model") -> None:
    """Train for some minutes, then save model and tokenizer."""
    import torch

    torch.manual_seed(0)
    source = random.Random(0)
    rows = (SAMPLE / "train.jsonl").read_text(encoding="utf-8").splitlines()
    known = [word for row in rows for text in json.loads(row).values() for word in text.split()]
    tokenizer = make_tokenizer()
    tokenizer.model_max_length = MAX_BYTES
    tokenizer.chat_template = None
    model = make_model(len(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=NUM_STEPS)
    for step in range(NUM_STEPS):
        examples = [example(source, known) for _ in range(32)]
        inputs = tokenizer([c + p for c, p in examples], return_tensors="pt", padding=True)
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        for row, (context, _) in enumerate(examples):
            labels[row, : len(tokenizer(context)["input_ids"])] = -100
        loss = model(**inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 250 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
