"""Supervised learning on conversations, ended by a measured accuracy."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from example_trainer.demo.learning import (
    Example,
    encode_conversation,
    prompt_text,
    supervised_steps,
)
from example_trainer.demo.task import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

__all__ = ["WarmUpResult", "encode_example", "sample_completions", "warm_up"]

_MAX_COMPLETION_TOKENS = 32


class WarmUpResult(NamedTuple):
    """How it ended."""

    accuracy: float
    """Share of the measured problems answered correctly at the end."""

    steps: int
    """Optimiser steps taken."""

    seconds: float
    """How long it took."""


def encode_example(tokenizer: PreTrainedTokenizerFast, problem: Problem, solution: str) -> Example:
    """Turn a problem and a solution to it into tokens."""
    return encode_conversation(
        tokenizer, [*problem.messages, {"role": "assistant", "content": solution}]
    )


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    *,
    examples: Sequence[Example],
    measured: Sequence[Problem],
    is_enough: Callable[[float], bool],
    lr: float,
    batch_size: int,
    limit_s: float,
    steps_per_check: int,
    seed: int,
    on_check: Callable[[int, float, float], None],
    clock: Callable[[], float] = time.monotonic,
) -> WarmUpResult:
    """Train `model` in place until its accuracy is as it should be, or the time is over.

    Args:
        model: In float32 on the CPU.
        tokenizer: Its tokenizer.
        examples: What is learned.
        measured: Problems that are only measured, none of them among `examples`.
        is_enough: Whether to stop at this share of `measured` answered correctly.
        lr: Learning rate, after a linear rise over the first steps.
        batch_size: Examples per step.
        limit_s: Seconds after which it ends in any case.
        steps_per_check: Steps between two measurements.
        seed: Order of the examples.
        on_check: Called at each measurement with step, loss and accuracy; what it raises ends
            the warm-up.
        clock: Monotonic seconds.
    """
    losses = supervised_steps(
        model,
        examples,
        lr=lr,
        batch_size=batch_size,
        pad_token=int(tokenizer.pad_token_id),
        seed=seed,
    )
    started = clock()
    step = 0
    while True:
        step, loss = step + 1, next(losses)
        if step % steps_per_check:
            continue
        accuracy = measure_accuracy(model, tokenizer, measured)
        on_check(step, loss, accuracy)
        elapsed_s = clock() - started
        if is_enough(accuracy) or elapsed_s >= limit_s:
            return WarmUpResult(accuracy, step, elapsed_s)


def measure_accuracy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem]
) -> float:
    """Return the share of `problems` that `model` answers correctly, sampling as in a rollout."""
    completions = sample_completions(model, tokenizer, problems)
    right = [p.is_correct(text) for p, text in zip(problems, completions, strict=True)]
    return sum(right) / len(right)


def sample_completions(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem]
) -> list[str]:
    """Return one completion of each problem, sampled at temperature 1."""
    import torch

    texts = [prompt_text(tokenizer, problem.messages) for problem in problems]
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    width = max(map(len, prompts))
    pad = int(tokenizer.pad_token_id)
    tokens_BP = torch.tensor([[pad] * (width - len(p)) + p for p in prompts])
    mask_BP = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    model.eval()
    with torch.no_grad():
        written = model.generate(
            tokens_BP,
            attention_mask=mask_BP,
            max_new_tokens=_MAX_COMPLETION_TOKENS,
            do_sample=True,
            top_k=0,
            pad_token_id=pad,
            eos_token_id=tokenizer.eos_token_id,
        )
    model.train()
    completions: list[str] = tokenizer.batch_decode(written[:, width:], skip_special_tokens=True)
    return completions
