"""The small model of the demo: supervised learning from random weights to a measured accuracy."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from example_trainer.demo.settings import (
    TinyModelShape,
    WarmUpSettings,
    build_model,
    save_tiny_model,
    train_tokenizer,
)
from example_trainer.demo.task import Problem, training_problems

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

_RAMP_STEPS = 30


class TokenizedConversation(NamedTuple):
    """The tokens of one conversation."""

    tokens: list[int]
    """[L] token ids."""
    is_learned: list[bool]
    """[L] whether the token belongs to the assistant, including the ends of its turns."""


def encode_conversation(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[Mapping[str, Any]]
) -> TokenizedConversation:
    """Tokenize a conversation that ends with the assistant, as in a rollout.

    Prompts and completions are encoded separately, since completions are sampled. The template
    must append messages to the preceding ones, as ChatML does.
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
    return TokenizedConversation(tokens, is_learned)


def prompt_text(tokenizer: PreTrainedTokenizerFast, messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the conversation with the generation prompt."""
    return str(
        tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    )


def supervised_steps(
    model: PreTrainedModel,
    examples: Sequence[TokenizedConversation],
    *,
    lr: float,
    batch_size: int,
    pad_token: int,
    seed: int,
) -> Iterator[float]:
    """Train `model` in place on the CPU, one optimizer step per loss, without end.

    The learning rate rises linearly over the first steps.
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
    examples: Sequence[TokenizedConversation], size: int, rng: random.Random
) -> Iterator[Sequence[TokenizedConversation]]:
    """Yield batches without end, each pass in a new order."""
    while True:
        order = rng.sample(examples, len(examples))
        for start in range(0, len(order) - size + 1, size):
            yield order[start : start + size]


def _loss(model: Any, batch: Sequence[TokenizedConversation], *, pad_token: int) -> torch.Tensor:
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
    # Only trained positions: the vocabulary projection takes much of the time.
    logits = model.lm_head(hidden[learned_BL[:, 1:]])
    return torch.nn.functional.cross_entropy(logits, tokens_BL[:, 1:][learned_BL[:, 1:]])


_MAX_COMPLETION_TOKENS = 32


class WarmUpResult(NamedTuple):
    """Result of a part of the supervised learning."""

    accuracy: float
    """Share of the measured problems answered correctly at the end."""
    steps: int
    """Optimizer steps taken."""
    seconds: float


def encode_example(
    tokenizer: PreTrainedTokenizerFast, problem: Problem, solution: str
) -> TokenizedConversation:
    """Tokenize a problem with a solution."""
    return encode_conversation(
        tokenizer, [*problem.messages, {"role": "assistant", "content": solution}]
    )


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    *,
    examples: Sequence[TokenizedConversation],
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
    """Train `model` in place on the CPU until `is_enough` accuracy, or for `limit_s` seconds.

    Every `steps_per_check` steps the accuracy on the `measured` problems, which are not among the
    `examples`, is passed to `is_enough`, and with step and loss to `on_check`, which may raise to
    end the training.
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


_NUM_TOKENIZER_PROBLEMS = 2_000


class Student(NamedTuple):
    """A model, its tokenizer, and the folder other processes read both from."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    folder: Path


def make_student(
    env_settings: Mapping[str, Any], *, shape: TinyModelShape, seed: int, folder: Path
) -> Student:
    """Create a tokenizer for the environment's task and a model with random weights; write both."""
    conversations = [
        [*problem.messages, {"role": "assistant", "content": problem.worked_solution}]
        for problem in training_problems(env_settings, _NUM_TOKENIZER_PROBLEMS)
    ]
    return student_of(conversations, shape=shape, seed=seed, folder=folder)


def student_of(
    conversations: Iterable[Sequence[Mapping[str, Any]]],
    *,
    shape: TinyModelShape,
    seed: int,
    folder: Path,
) -> Student:
    """Create a tokenizer for conversations and a model with random weights, and write both."""
    student = untrained_student(conversations, shape=shape, seed=seed, folder=folder)
    save_tiny_model(student.model, student.tokenizer, folder)
    return student


def untrained_student(
    conversations: Iterable[Sequence[Mapping[str, Any]]],
    *,
    shape: TinyModelShape,
    seed: int,
    folder: Path,
) -> Student:
    """Create the same without writing it to the folder."""
    tokenizer = train_tokenizer(
        conversations, max_length=shape.max_length, max_vocabulary=shape.max_vocabulary
    )
    model = build_model(tokenizer, shape, seed=seed)
    return Student(model, tokenizer, folder)


def teach_student(
    student: Student,
    env_settings: Mapping[str, Any],
    *,
    measured: Sequence[Problem],
    settings: WarmUpSettings,
    seed: int,
    on_check: Callable[[int, float, float], None],
) -> list[WarmUpResult]:
    """Train the student in place in the two parts of `WarmUpSettings`, and write it again.

    `measured` are held-out problems, whose accuracy ends each part. Returns the result of each.
    """
    import torch

    torch.set_num_threads(1)  # the engine is starting on the other cores
    problems = training_problems(env_settings, settings.num_conversations)
    rng = random.Random(seed)
    lowest, highest = settings.start_accuracy
    parts = (
        (
            [problem.worked_solution for problem in problems],
            lambda accuracy: accuracy >= settings.worked_accuracy,
            settings.lr,
        ),
        (
            [mixed_solution(problem, settings.direct_share, rng) for problem in problems],
            lambda accuracy: lowest <= accuracy <= highest,
            settings.mixed_lr,
        ),
    )
    results = [
        warm_up(
            student.model,
            student.tokenizer,
            examples=[
                encode_example(student.tokenizer, problem, solution)
                for problem, solution in zip(problems, solutions, strict=True)
            ],
            measured=measured,
            is_enough=is_enough,
            lr=lr,
            batch_size=settings.batch_size,
            limit_s=settings.limit_s,
            steps_per_check=settings.steps_per_check,
            seed=seed,
            on_check=on_check,
        )
        for solutions, is_enough, lr in parts
    ]
    save_tiny_model(student.model, student.tokenizer, student.folder)
    return results


def mixed_solution(problem: Problem, direct_share: float, rng: random.Random) -> str:
    """Return a direct solution with probability `direct_share`, else a worked one."""
    is_direct = rng.random() < direct_share
    return problem.direct_solution if is_direct else problem.worked_solution
