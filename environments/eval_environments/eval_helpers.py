r"""The parts that evaluations share: prompts, reasoning, answers, mathematics and results.

    create_system_content ─► request ─► extract_reasoning_from_completion ─► answer
      ├► extract_letter_from_answer_tag, extract_mcqa_answer_with_fallback
      ├► extract_number_from_answer_tag, extract_freeform_from_answer_tag
      └► score_math_answer (a worker process compares)           ─► save_eval_results

The rules that find an answer are in `atroposlib.tasks.eval_answers`, which the shipped evaluations
use; the same functions are importable from here.

Providers return reasoning in different fields, which are searched in this order:

    choice.reasoning_content ► message.reasoning_content ► message.reasoning
      ► choice.reasoning_details ► message.reasoning_details ► choice.reasoning
      ► <think> in the text ► scratchpad in the text
"""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import BrokenExecutor, Executor, Future
from pathlib import Path
from typing import Any, Literal, NamedTuple

from atroposlib.errors import ConfigError
from atroposlib.tasks.eval_answers import (
    build_mcqa_fallback_patterns,
    compare_math_strings,
    extract_boxed_answers,
    extract_first_boxed_answer,
    extract_freeform_from_answer_tag,
    extract_letter_from_answer_tag,
    extract_mcqa_answer_with_fallback,
    extract_number_from_answer_tag,
    extract_thinking_content,
    math_normalize_string,
    only_boxed_answer,
    validate_thinking_format,
)
from atroposlib.tasks.evaluations import (
    create_system_content,
    format_math_answer_instruction,
    get_default_thinking_prompt,
)
from atroposlib.utils.json_text import to_plain
from atroposlib.utils.math_check import MathVerdict, check_math_answer
from atroposlib.utils.score_pool import stop_processes

__all__ = [
    "HERMES_REASONING_PROMPT",
    "HERMES_REASONING_PROMPT_WITH_ANSWER",
    "CompletionReasoning",
    "MathScore",
    "Reasoning",
    "build_mcqa_fallback_patterns",
    "calculate_accuracy",
    "compare_math_strings",
    "create_system_content",
    "extract_boxed_answers",
    "extract_first_boxed_answer",
    "extract_freeform_from_answer_tag",
    "extract_letter_from_answer_tag",
    "extract_mcqa_answer_with_fallback",
    "extract_number_from_answer_tag",
    "extract_reasoning_from_completion",
    "extract_reasoning_from_response",
    "extract_thinking_content",
    "format_math_answer_instruction",
    "format_percentage",
    "format_reasoning_debug_info",
    "get_default_thinking_prompt",
    "get_math_executor",
    "get_reasoning_token_usage",
    "get_thinking_prompt_or_hermes",
    "group_results_by_key",
    "load_eval_results",
    "math_normalize_string",
    "print_eval_summary",
    "save_eval_results",
    "score_math_answer",
    "score_math_answer_async",
    "validate_thinking_format",
]

logger = logging.getLogger(__name__)

HERMES_REASONING_PROMPT = (
    "You are an assistant that reasons before it answers. Work through the problem step by step, "
    "check your steps and correct them where they are wrong. Write all of this between <think> "
    "and </think>, then give your answer to the user after the closing tag."
)
HERMES_REASONING_PROMPT_WITH_ANSWER = (
    f"{HERMES_REASONING_PROMPT} Put the final answer, and nothing else, between <answer> and "
    "</answer>."
)


def get_thinking_prompt_or_hermes(custom_prompt: str | None = None) -> str:
    """Return the given prompt, or `HERMES_REASONING_PROMPT` if it is None or empty."""
    return custom_prompt or HERMES_REASONING_PROMPT


Source = Literal[
    "reasoning_content",
    "reasoning",
    "reasoning_details",
    "think_block",
    "scratchpad_block",
    "none",
]

_BLOCKS: Mapping[Source, tuple[re.Pattern[str], re.Pattern[str]]] = {
    "think_block": (re.compile("<think>", re.IGNORECASE), re.compile("</think>", re.IGNORECASE)),
    "scratchpad_block": (
        re.compile(r"<\|start_of_scratchpad\|>", re.IGNORECASE),
        re.compile(r"<\|end_of_scratchpad\|>", re.IGNORECASE),
    ),
}
"""Opening and closing tag."""


class Reasoning(NamedTuple):
    """Reasoning and where it was; unpacks as `(reasoning, source)`."""

    reasoning: str | None
    """Never blank; None with the source `none`."""
    source: Source
    """Field or block of the reasoning."""


class CompletionReasoning(NamedTuple):
    """Reasoning and text of one choice; unpacks as `(reasoning, source, content)`."""

    reasoning: str | None
    """As in `Reasoning`."""
    source: Source
    content: str | None
    """Text of the message, reasoning blocks included; None without a text."""


def extract_reasoning_from_response(response: Any, content: str | None = None) -> Reasoning:
    """Return the reasoning of one choice of a chat answer.

    Args:
        response: A choice, as an object of the OpenAI client or as a mapping.
        content: Text to search for reasoning blocks; None takes that of the choice's message.
    """
    message = _field(response, "message")
    fields: list[tuple[Source, Any]] = [
        ("reasoning_content", _field(response, "reasoning_content")),
        ("reasoning_content", _field(message, "reasoning_content")),
        ("reasoning", _field(message, "reasoning")),
        ("reasoning_details", _first_detail(_field(response, "reasoning_details"))),
        ("reasoning_details", _first_detail(_field(message, "reasoning_details"))),
        ("reasoning", _field(response, "reasoning")),
    ]
    text = _field(message, "content") if content is None else content
    if isinstance(text, str):
        fields += [(source, _first_block(text, *tags)) for source, tags in _BLOCKS.items()]
    for source, value in fields:
        if _is_text(value):
            return Reasoning(value, source)
    return Reasoning(None, "none")


def extract_reasoning_from_completion(completion: Any, choice_idx: int = 0) -> CompletionReasoning:
    """Return reasoning and text of one choice of a chat answer; all None without such a choice.

    Args:
        completion: The answer, as an object of the OpenAI client or as a mapping.
        choice_idx: Index of the choice.
    """
    choices = _field(completion, "choices")
    if not isinstance(choices, Sequence) or not 0 <= choice_idx < len(choices):
        return CompletionReasoning(None, "none", None)
    content = _field(_field(choices[choice_idx], "message"), "content")
    text = content if isinstance(content, str) else None
    reasoning, source = extract_reasoning_from_response(choices[choice_idx], text)
    return CompletionReasoning(reasoning, source, text)


def _first_block(text: str, opening: re.Pattern[str], closing: re.Pattern[str]) -> str | None:
    start = opening.search(text)
    end = closing.search(text, start.end()) if start else None
    return text[start.end() : end.start()].strip() if start and end else None


def _field(owner: Any, name: str) -> Any:
    # Fields added by providers are not declared.
    return owner.get(name) if isinstance(owner, Mapping) else getattr(owner, name, None)


def _first_detail(details: Any) -> str | None:
    """Return the first text of the entries; others are encrypted or summaries."""
    entries = details if isinstance(details, Sequence) and not isinstance(details, str) else ()
    texts = (_field(entry, "text") for entry in entries)
    return next((text for text in texts if _is_text(text)), None)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def get_reasoning_token_usage(completion: Any) -> int | None:
    """Return the number of reasoning tokens in the usage of an answer; None if not reported."""
    usage = _field(completion, "usage")
    for owner in (_field(usage, "completion_tokens_details"), usage):
        count = _field(owner, "reasoning_tokens")
        if isinstance(count, int) and not isinstance(count, bool):
            return count
    return None


def format_reasoning_debug_info(completion: Any, choice_idx: int = 0) -> str:
    """Return one line on the reasoning of a choice: source, lengths and token usage."""
    reasoning, source, content = extract_reasoning_from_completion(completion, choice_idx)
    num_tokens = get_reasoning_token_usage(completion)
    usage = "" if num_tokens is None else f", {num_tokens} reasoning tokens"
    return (
        f"reasoning: {source}, {len(reasoning or '')} characters; "
        f"content: {len(content or '')} characters{usage}"
    )


class MathScore(NamedTuple):
    """The result of one mathematical answer; unpacks as `(correct, method, multiple_boxed)`."""

    correct: bool | None
    """None without exactly one boxed answer."""
    method: str
    """`math_verify`, `string_compare`, `no_boxed` or `multiple_boxed`."""
    multiple_boxed: bool


CHECK_LIMIT_S = 30.0


class MathExecutor(Executor):
    """Worker processes whose calls have a time limit; a worker that exceeds it is replaced.

    Args:
        max_workers: maximum number of processes, which start with the first call.

    Attributes:
        is_closed: Whether `shutdown` was called.
    """

    def __init__(self, max_workers: int) -> None:
        import multiprocessing

        import pebble

        self.is_closed = False
        # "spawn": forking a process with threads and open sockets is not safe.
        self._pool = pebble.ProcessPool(
            max_workers=max_workers, context=multiprocessing.get_context("spawn")
        )

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = self._pool.schedule(
            fn, args=list(args), kwargs=kwargs, timeout=CHECK_LIMIT_S
        )
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.is_closed = True
        if cancel_futures and wait:
            stop_processes(self._pool)
            return
        if cancel_futures:
            self._pool.stop()
        else:
            self._pool.close()
        if wait:
            self._pool.join()


_EXECUTORS: dict[int, MathExecutor] = {}


def get_math_executor(max_workers: int = 64) -> Executor:
    """Return the worker processes for `score_math_answer`, at most one per core.

    The same executor is returned for the same number, unless it was shut down, and closed when this
    process ends.
    """
    executor = _EXECUTORS.get(max_workers)
    if executor is None or executor.is_closed:
        executor = MathExecutor(max(1, min(max_workers, os.cpu_count() or 1)))
        atexit.register(executor.shutdown, cancel_futures=True)
        _EXECUTORS[max_workers] = executor
    return executor


def score_math_answer(
    gold: str,
    response: str,
    after_think: bool = True,
    wrap_gold_boxed: bool = True,
    executor: Executor | None = None,
    debug: bool = False,
) -> MathScore:
    r"""Compare the boxed answer of a completion with the gold answer.

    Args:
        gold: the gold answer, as plain text or LaTeX.
        response: the completion; an answer counts if it is in exactly one `\boxed{}`.
        after_think: Whether only the text after the thinking is searched.
        wrap_gold_boxed: Whether a gold answer without a box is put in one.
        executor: where math-verify runs, such as `get_math_executor()`, the default. Answers come
            from models, and some keep the comparison busy without end.
        debug: Whether to log the result.
    """
    boxed = only_boxed_answer(response, after_think=after_think)
    if boxed.text is None:
        return _shown(MathScore(None, boxed.method, boxed.is_multiple), debug)
    executor = executor or get_math_executor()
    answer = f"\\boxed{{{boxed.text}}}"
    verdict = None
    try:
        call = executor.submit(check_math_answer, answer, _gold(gold, wrap_gold_boxed))
        verdict = call.result()
    except _CHECK_FAILED as error:
        _log_failed_check(error)
    return _shown(_math_score(verdict, boxed.text, gold), debug)


async def score_math_answer_async(
    gold: str,
    response: str,
    after_think: bool = True,
    wrap_gold_boxed: bool = True,
    executor: Executor | None = None,
    debug: bool = False,
) -> MathScore:
    """Return `score_math_answer` without blocking the event loop; the arguments are the same."""
    boxed = only_boxed_answer(response, after_think=after_think)
    if boxed.text is None:
        return _shown(MathScore(None, boxed.method, boxed.is_multiple), debug)
    if executor is None:
        executor = await asyncio.to_thread(get_math_executor)
    answer = f"\\boxed{{{boxed.text}}}"
    verdict = None
    try:
        call = executor.submit(check_math_answer, answer, _gold(gold, wrap_gold_boxed))
        verdict = await asyncio.wrap_future(call)
    except _CHECK_FAILED as error:
        _log_failed_check(error)
    return _shown(_math_score(verdict, boxed.text, gold), debug)


_CHECK_FAILED = (
    TimeoutError,
    asyncio.TimeoutError,
    futures.TimeoutError,
    BrokenExecutor,
    OSError,
    RuntimeError,
)
"""Errors of a worker that ran out of time or died; Python 3.10 has three classes for the first."""


def _gold(gold: str, wraps: bool) -> str:
    return f"\\boxed{{{gold}}}" if wraps and "\\boxed" not in gold else gold


def _log_failed_check(error: BaseException) -> None:
    logger.warning("math-verify gave no result (%r); the texts are compared", error)


def _math_score(verdict: MathVerdict | None, answer: str, gold: str) -> MathScore:
    if verdict is not None and verdict.is_gold_readable and verdict.answer_parsed:
        return MathScore(verdict.is_correct, "math_verify", False)
    return MathScore(compare_math_strings(answer, gold), "string_compare", False)


def _shown(score: MathScore, debug: bool) -> MathScore:
    if debug:
        logger.info("mathematical answer: %s by %s", score.correct, score.method)
    return score


def save_eval_results(
    save_dir: str | Path,
    metrics: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    metrics_filename: str = "metrics.json",
    results_filename: str = "results.jsonl",
    print_confirmation: bool = True,
) -> None:
    """Write metrics and one line per result to a folder, which is created if missing."""
    folder = Path(save_dir)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(dict(metrics), indent=2, default=to_plain)
    (folder / metrics_filename).write_text(text + "\n", encoding="utf-8")
    with (folder / results_filename).open("w", encoding="utf-8") as file:
        for result in results:
            file.write(json.dumps(dict(result), default=to_plain) + "\n")
    if print_confirmation:
        print(f"{len(results)} results are in {folder}")  # noqa: T201 - asked for by the caller


def load_eval_results(
    save_dir: str | Path,
    metrics_filename: str = "metrics.json",
    results_filename: str = "results.jsonl",
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the metrics and results of a folder.

    Raises:
        ConfigError: a file is missing or not JSON.
    """
    folder = Path(save_dir)
    try:
        metrics = json.loads((folder / metrics_filename).read_text(encoding="utf-8"))
        lines = (folder / results_filename).read_text(encoding="utf-8").split("\n")
        return metrics, [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder} has no readable results ({error}); expected {metrics_filename} and "
            f"{results_filename}, as written by save_eval_results"
        ) from error


def calculate_accuracy(
    results: Sequence[Mapping[str, Any]],
    score_key: str = "is_correct",
    filter_fn: Callable[[Mapping[str, Any]], bool] | None = None,
) -> float:
    """Return the mean of a key over the results, of those that `filter_fn` accepts; 0.0 if none.

    A result without the key, or with None, counts as 0.
    """
    chosen = [result for result in results if filter_fn is None or filter_fn(result)]
    if not chosen:
        return 0.0
    return sum(float(result.get(score_key) or 0.0) for result in chosen) / len(chosen)


def group_results_by_key(
    results: Sequence[Mapping[str, Any]], key: str
) -> dict[Any, list[Mapping[str, Any]]]:
    """Return the results by their value of a key, in order; `unknown` for those without it."""
    groups: dict[Any, list[Mapping[str, Any]]] = {}
    for result in results:
        groups.setdefault(result.get(key, "unknown"), []).append(result)
    return groups


def format_percentage(value: float, decimals: int = 2) -> str:
    """Return a fraction as a percentage, such as `62.50%` for 0.625."""
    return f"{100 * value:.{decimals}f}%"


def print_eval_summary(title: str, metrics: Mapping[str, Any]) -> None:
    """Print a title and one line per metric; fractions named accuracy or rate as percentages."""
    print(title)  # noqa: T201 - the purpose of this function
    for name, value in metrics.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_share = is_number and 0 <= value <= 1 and name.endswith(("accuracy", "rate", "_acc"))
        print(f"  {name}: {format_percentage(value) if is_share else value}")  # noqa: T201
