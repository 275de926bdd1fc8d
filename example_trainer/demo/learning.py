"""Supervised learning on conversations: what the assistant says is learned, the rest is read."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

__all__ = ["Example", "encode_conversation", "prompt_text", "supervised_steps"]

_RAMP_STEPS = 30


class Example(NamedTuple):
    """One conversation as the model sees it."""

    tokens: list[int]
    """[L] messages in the order they were said."""

    is_learned: list[bool]
    """[L] whether the token was written by the assistant; the ends of its turns were."""


def encode_conversation(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[Mapping[str, Any]]
) -> Example:
    """Turn a conversation into the tokens of a rollout of it.

    A prompt, a completion and what follows are encoded apart, as they are when the completion is
    sampled.

    Args:
        tokenizer: Its template adds messages behind those before, as ChatML does.
        messages: The last one is the assistant's.
    """
    tokens: list[int] = []
    is_learned: list[bool] = []
    text = ""
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = prompt_text(tokenizer, messages[:index])
        read = tokenizer.encode(prompt[len(text) :], add_special_tokens=False)
        written = tokenizer.encode(message["content"], add_special_tokens=False)
        tokens += [*read, *written, tokenizer.eos_token_id]
        is_learned += [False] * len(read) + [True] * (len(written) + 1)
        text = f"{prompt}{message['content']}{tokenizer.eos_token}"
    return Example(tokens, is_learned)


def prompt_text(tokenizer: PreTrainedTokenizerFast, messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the conversation up to where the model begins to write."""
    return str(
        tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    )


def supervised_steps(
    model: PreTrainedModel,
    examples: Sequence[Example],
    *,
    lr: float,
    batch_size: int,
    pad_token: int,
    seed: int,
) -> Iterator[float]:
    """Train `model` in place, one optimiser step for each value taken; never ends.

    Args:
        model: In float32 on the CPU.
        examples: What is learned, at least `batch_size`.
        lr: Learning rate, after a linear rise over the first steps.
        batch_size: Examples per step.
        pad_token: Fills up short examples.
        seed: Order of the examples.

    Yields:
        The loss of the step.
    """
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
    for step, batch in enumerate(_batches(examples, batch_size, random.Random(seed)), start=1):
        for parameters in optimizer.param_groups:
            parameters["lr"] = lr * min(1.0, step / _RAMP_STEPS)
        loss = _loss(model, batch, pad_token=pad_token)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield float(loss.detach())


def _batches(
    examples: Sequence[Example], size: int, rng: random.Random
) -> Iterator[Sequence[Example]]:
    """Draw batches for ever, each pass in a new order."""
    while True:
        order = rng.sample(examples, len(examples))
        for start in range(0, len(order) - size + 1, size):
            yield order[start : start + size]


def _loss(model: Any, batch: Sequence[Example], *, pad_token: int) -> torch.Tensor:
    """Return the mean cross-entropy of the learned tokens of a batch."""
    import torch

    length = max(len(example.tokens) for example in batch)
    missing = [length - len(example.tokens) for example in batch]
    tokens_BL = torch.tensor(
        [e.tokens + [pad_token] * m for e, m in zip(batch, missing, strict=True)]
    )
    learned_BL = torch.tensor(
        [e.is_learned + [False] * m for e, m in zip(batch, missing, strict=True)]
    )
    hidden = model.model(tokens_BL).last_hidden_state[:, :-1]
    # Only where something is learned: the vocabulary projection is a large part of the work.
    logits = model.lm_head(hidden[learned_BL[:, 1:]])
    return torch.nn.functional.cross_entropy(logits, tokens_BL[:, 1:][learned_BL[:, 1:]])
