"""Training of `environments/data/reward_model_sample`, a classifier of 26,000 parameters.

It reads bytes and prefers finished sentences of English to empty, cut or meaningless ones:

    python -m tests.environments.reward_model_recipe
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[2] / "environments" / "data"
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
MAX_BYTES = 256


def make_tokenizer() -> Any:
    """Return a tokenizer with one token per byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        model_max_length=MAX_BYTES,
        chat_template=TEMPLATE,
        truncation_side="left",
    )


def make_model(vocab_size: int) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=MAX_BYTES,
        type_vocab_size=1,
        num_labels=1,
    )
    return BertForSequenceClassification(config)


def sentences() -> list[str]:
    """Return the replies and the answers of the sample data."""
    found = []
    for line in (DATA / "rlaif_sample" / "train.jsonl").read_text().splitlines():
        conversation = json.loads(line)["conversation"]
        found += [m["content"] for m in conversation if m["role"] == "assistant"]
    for line in (DATA / "gsm8k_sample" / "train.jsonl").read_text().splitlines():
        found.append(json.loads(line)["question"])
    return found


def pairs(source: random.Random) -> Iterator[tuple[str, str]]:
    """Yield a good and a bad answer, without end."""
    good = sentences()
    while True:
        best = source.choice(good)
        noise = "".join(source.choices(string.punctuation + string.ascii_letters + " ", k=24))
        yield best, source.choice(["", best[: len(best) // 2], best[::-1], noise, noise * 3])


def main(folder: Path = DATA / "reward_model_sample") -> None:
    """Train for some seconds, then save model and tokenizer."""
    import torch

    torch.manual_seed(0)
    source = random.Random(0)
    tokenizer = make_tokenizer()
    model = make_model(len(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    stream, known = pairs(source), sentences()
    for step in range(300):
        chosen, rejected = zip(*(next(stream) for _ in range(16)), strict=True)
        questions = source.choices(known, k=16)
        chats = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": asked}, {"role": "assistant", "content": text}],
                tokenize=False,
            )
            for asked, text in zip(2 * questions, (*chosen, *rejected), strict=True)
        ]
        inputs = tokenizer(chats, return_tensors="pt", padding=True, truncation=True)
        rewards = model(**inputs).logits[:, 0]
        loss = -torch.nn.functional.logsigmoid(rewards[:16] - rewards[16:]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
