"""Supervised learning on conversations of several turns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from example_trainer.demo.settings import TinyModelShape, build_model, train_tokenizer
from example_trainer.demo.student import (
    TokenizedConversation,
    encode_conversation,
    supervised_steps,
)

CONVERSATION = [
    {"role": "system", "content": "Answer with one word."},
    {"role": "user", "content": "Your hand counts 12."},
    {"role": "assistant", "content": "hit"},
    {"role": "user", "content": "Your hand counts 19."},
    {"role": "assistant", "content": "stick"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer([CONVERSATION] * 10, max_length=64)


def test_encode_conversation_is_the_template_text_without_what_follows_the_last_turn(
    tokenizer: Any,
) -> None:
    text = tokenizer.apply_chat_template(CONVERSATION, tokenize=False)

    example = encode_conversation(tokenizer, CONVERSATION)

    assert tokenizer.decode(example.tokens) + "\n" == text
    assert len(example.is_learned) == len(example.tokens)


def test_encode_conversation_every_turn_of_the_assistant_is_learned_with_its_end(
    tokenizer: Any,
) -> None:
    example = encode_conversation(tokenizer, CONVERSATION)

    learned = [t for t, is_learned in zip(*example, strict=True) if is_learned]
    assert tokenizer.decode(learned) == "hit<|im_end|>stick<|im_end|>"


def test_supervised_steps_learn_only_what_the_assistant_wrote(tokenizer: Any) -> None:
    shape = TinyModelShape(hidden_size=32, num_layers=1, num_heads=1, max_length=64)
    model = build_model(tokenizer, shape, seed=0)
    examples = [encode_conversation(tokenizer, turns) for turns in (CONVERSATION, CONVERSATION[:3])]

    losses = supervised_steps(
        model, examples, lr=1e-2, batch_size=2, pad_token=tokenizer.pad_token_id, seed=0
    )

    taken = [next(losses) for _ in range(40)]
    assert taken[-1] < 0.05 < taken[0]
    assert user_loss(model, examples[0]) > 1.0


def user_loss(model: Any, example: TokenizedConversation) -> float:
    """Return the cross-entropy of what the assistant did not write."""
    tokens = torch.tensor(example.tokens)
    is_read = ~torch.tensor(example.is_learned)[1:]
    with torch.no_grad():
        logits = model(tokens[None]).logits[0, :-1]
    return float(torch.nn.functional.cross_entropy(logits[is_read], tokens[1:][is_read]))
