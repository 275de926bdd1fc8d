"""Supervised learning on conversations, ended by a measured accuracy."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from example_trainer.demo.task import Problem

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

__all__ = ["Example", "WarmUpResult", "encode_example", "sample_completions", "warm_up"]

_RAMP_STEPS = 30
_MAX_COMPLETION_TOKENS = 32


class Example(NamedTuple):
    """One conversation as the model sees it."""

    tokens: list[int]
    """[L] prompt, completion and end of turn."""

    num_prompt_tokens: int
    """How many of them are the prompt, which is not learned."""


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
    prompt = prompt_tokens(tokenizer, problem)
    completion = tokenizer.encode(solution, add_special_tokens=False)
    return Example([*prompt, *completion, tokenizer.eos_token_id], len(prompt))


def prompt_tokens(tokenizer: PreTrainedTokenizerFast, problem: Problem) -> list[int]:
    """Return the tokens of the conversation up to where the model begins to write."""
    text = tokenizer.apply_chat_template(
        problem.messages, tokenize=False, add_generation_prompt=True
    )
    return list(tokenizer.encode(text, add_special_tokens=False))


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
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
    batches = _batches(examples, batch_size, random.Random(seed))
    started = clock()
    step = 0
    while True:
        step += 1
        for parameters in optimizer.param_groups:
            parameters["lr"] = lr * min(1.0, step / _RAMP_STEPS)
        loss = _loss(model, next(batches), pad_token=int(tokenizer.pad_token_id))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % steps_per_check:
            continue
        accuracy = measure_accuracy(model, tokenizer, measured)
        on_check(step, float(loss.detach()), accuracy)
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

    prompts = [prompt_tokens(tokenizer, problem) for problem in problems]
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
    texts: list[str] = tokenizer.batch_decode(written[:, width:], skip_special_tokens=True)
    return texts


def _batches(
    examples: Sequence[Example], size: int, rng: random.Random
) -> Iterator[Sequence[Example]]:
    """Draw batches for ever, each pass in a new order."""
    while True:
        order = rng.sample(examples, len(examples))
        for start in range(0, len(order) - size + 1, size):
            yield order[start : start + size]


def _loss(model: Any, batch: Sequence[Example], *, pad_token: int) -> torch.Tensor:
    """Return the mean cross-entropy of the completion tokens of a batch."""
    import torch

    length = max(len(example.tokens) for example in batch)
    tokens_BL = torch.tensor([e.tokens + [pad_token] * (length - len(e.tokens)) for e in batch])
    positions_L = torch.arange(length)
    starts_B1 = torch.tensor([[e.num_prompt_tokens] for e in batch])
    ends_B1 = torch.tensor([[len(e.tokens)] for e in batch])
    learned_BL = (positions_L >= starts_B1) & (positions_L < ends_B1)
    hidden = model.model(tokens_BL).last_hidden_state[:, :-1]
    # Only where something is learned: the vocabulary projection is a large part of the work.
    logits = model.lm_head(hidden[learned_BL[:, 1:]])
    return torch.nn.functional.cross_entropy(logits, tokens_BL[:, 1:][learned_BL[:, 1:]])
