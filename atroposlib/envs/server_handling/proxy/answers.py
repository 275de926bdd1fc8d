"""Answers in OpenAI's form, made of a managed server's answer and the tokens behind it; pure."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from atroposlib.envs.server_handling.proxy.session_server import Sample

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion
    from openai.types.completion import Completion

__all__ = ["chat_answer", "text_answer"]

TextOf = Callable[[list[int]], str]


def chat_answer(
    answer: ChatCompletion, samples: Sequence[Sample], *, model: str, text_of: TextOf | None
) -> dict[str, Any]:
    """Return a chat completion.

    Args:
        answer: Of the managed server.
        samples: What the engine sampled for it; empty for a server without token ids.
        model: Name in the answer.
        text_of: Text of ids, to add logprobs; None leaves them out.
    """
    rows = _rows_of(samples)
    choices = []
    for i, choice in enumerate(answer.choices):
        message: dict[str, Any] = {"role": "assistant", "content": choice.message.content}
        if choice.message.tool_calls:
            # Dictionaries of a managed server, objects of a provider.
            message["tool_calls"] = [_as_dict(call) for call in choice.message.tool_calls]
        logprobs = None
        if text_of is not None and rows:
            logprobs = {"content": _chat_logprobs(*rows[i], text_of), "refusal": None}
        choices.append(
            {
                "index": i,
                "message": message,
                "finish_reason": choice.finish_reason,
                "logprobs": logprobs,
            }
        )
    return {
        "id": f"chatcmpl-{secrets.token_hex(6)}",
        "object": "chat.completion",
        "created": answer.created,
        "model": model,
        "choices": choices,
        "usage": _usage(samples, [answer.usage]),
    }


def text_answer(
    answers: Sequence[Completion],
    samples: Sequence[Sample],
    *,
    model: str,
    text_of: TextOf | None,
) -> dict[str, Any]:
    """Return a text completion with the choices of all answers, numbered through.

    Args:
        answers: One per prompt.
        samples: What the engine sampled, in the order of the choices.
        model: Name in the answer.
        text_of: Text of ids, to add logprobs; None leaves them out.
    """
    rows = _rows_of(samples)
    found = [choice for answer in answers for choice in answer.choices]
    choices = [
        {
            "index": i,
            "text": choice.text,
            "finish_reason": choice.finish_reason,
            "logprobs": _text_logprobs(*rows[i], text_of) if text_of and rows else None,
        }
        for i, choice in enumerate(found)
    ]
    return {
        "id": f"cmpl-{secrets.token_hex(6)}",
        "object": "text_completion",
        "created": answers[0].created,
        "model": model,
        "choices": choices,
        "usage": _usage(samples, [answer.usage for answer in answers]),
    }


def _rows_of(samples: Sequence[Sample]) -> list[tuple[list[int], list[float]]]:
    return [
        (ids, logprobs)
        for sample in samples
        for ids, logprobs in zip(sample.completion_ids, sample.completion_logprobs, strict=True)
    ]


def _usage(samples: Sequence[Sample], reported: Sequence[Any]) -> dict[str, int]:
    """Count tokens: those of the samples, else what the servers reported, else none."""
    if samples:
        num_prompt = sum(len(sample.prompt_ids) for sample in samples)
        num_completion = sum(len(ids) for sample in samples for ids in sample.completion_ids)
    else:
        usages = [usage for usage in reported if usage is not None]
        num_prompt = sum(usage.prompt_tokens for usage in usages)
        num_completion = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
    }


def _chat_logprobs(
    ids: Sequence[int], logprobs: Sequence[float], text_of: TextOf
) -> list[dict[str, Any]]:
    return [
        {
            "token": (text := text_of([token_id])),
            "logprob": logprob,
            "bytes": list(text.encode()) if "\ufffd" not in text else None,
            "top_logprobs": [],
        }
        for token_id, logprob in zip(ids, logprobs, strict=True)
    ]


def _text_logprobs(
    ids: Sequence[int], logprobs: Sequence[float], text_of: TextOf
) -> dict[str, Any]:
    tokens = [text_of([token_id]) for token_id in ids]
    offsets = [0]
    for token in tokens[:-1]:
        offsets.append(offsets[-1] + len(token))
    return {
        "tokens": tokens,
        "token_logprobs": list(logprobs),
        "top_logprobs": None,
        "text_offset": offsets[: len(tokens)],
    }


def _as_dict(call: Any) -> dict[str, Any]:
    dumped: dict[str, Any] = dict(call) if isinstance(call, dict) else call.model_dump()
    return dumped
