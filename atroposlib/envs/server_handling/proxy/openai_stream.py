"""An OpenAI answer cut into the chunks a streaming client expects; pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from atroposlib.envs.server_handling.proxy.sse import Event

__all__ = ["chat_events", "text_events"]

_PIECE_CHARS = 64


def chat_events(answer: Mapping[str, Any], *, include_usage: bool) -> Iterator[Event]:
    """Yield a chat completion as chunks: role, content, calls and end of each choice, `[DONE]`.

    Args:
        answer: As `complete_chat` returns it.
        include_usage: Add a last chunk without choices that tells the usage.
    """
    head = {
        "id": answer["id"],
        "object": "chat.completion.chunk",
        "created": answer["created"],
        "model": answer["model"],
        **({"usage": None} if include_usage else {}),
    }
    for choice in answer["choices"]:
        for change in _chat_changes(choice):
            full = {"index": choice["index"], "finish_reason": None, "logprobs": None, **change}
            yield Event({**head, "choices": [full]})
    if include_usage:
        yield Event({**head, "choices": [], "usage": answer["usage"]})
    yield Event("[DONE]")


def text_events(answer: Mapping[str, Any], *, include_usage: bool) -> Iterator[Event]:
    """Yield a text completion as chunks; arguments as in `chat_events`."""
    head = {name: answer[name] for name in ("id", "object", "created", "model")}
    if include_usage:
        head["usage"] = None
    for choice in answer["choices"]:
        logprobs = choice["logprobs"]
        for piece in _pieces(choice["text"]):
            part = {"index": choice["index"], "text": piece, "logprobs": logprobs}
            yield Event({**head, "choices": [{**part, "finish_reason": None}]})
            logprobs = None
        end = {"index": choice["index"], "text": "", "logprobs": logprobs}
        yield Event({**head, "choices": [{**end, "finish_reason": choice["finish_reason"]}]})
    if include_usage:
        yield Event({**head, "choices": [], "usage": answer["usage"]})
    yield Event("[DONE]")


def _chat_changes(choice: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the parts of one choice; its logprobs come whole with the first piece of text."""
    message = choice["message"]
    yield {"delta": {"role": "assistant", "content": None if message["content"] is None else ""}}
    for piece in _pieces(message.get("reasoning_content") or ""):
        yield {"delta": {"reasoning_content": piece}}
    logprobs = choice["logprobs"]
    for piece in _pieces(message["content"] or ""):
        yield {"delta": {"content": piece}, "logprobs": logprobs}
        logprobs = None
    for i, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        opened = {**call, "index": i, "function": {"name": function["name"], "arguments": ""}}
        yield {"delta": {"tool_calls": [opened]}}
        for piece in _pieces(function["arguments"]):
            delta = {"index": i, "function": {"arguments": piece}}
            yield {"delta": {"tool_calls": [delta]}}
    yield {"delta": {}, "logprobs": logprobs, "finish_reason": choice["finish_reason"]}


def _pieces(text: str) -> Iterator[str]:
    for start in range(0, len(text), _PIECE_CHARS):
        yield text[start : start + _PIECE_CHARS]
