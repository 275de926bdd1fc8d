"""The typed events of a streamed Response; pure.

response.created, response.in_progress
  per item    response.output_item.added
    per part  response.content_part.added
              response.output_text.delta ... response.output_text.done
              response.content_part.done
              (calls: response.function_call_arguments.delta ... .done)
              response.output_item.done
response.completed | response.incomplete
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from atroposlib.envs.server_handling.proxy.dialects.answers import pieces

__all__ = ["response_events"]

Fields = dict[str, Any]

_TEXT_EVENT = {"output_text": "response.output_text", "reasoning_text": "response.reasoning_text"}


def response_events(
    started: Mapping[str, Any], response: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield the events of a response, numbered from 0 in `sequence_number`.

    Args:
        started: The Response object in progress.
        response: The finished one.
    """
    for number, (kind, fields) in enumerate(_events(started, response)):
        yield {"type": kind, "sequence_number": number, **fields}


def _events(
    started: Mapping[str, Any], response: Mapping[str, Any]
) -> Iterator[tuple[str, Fields]]:
    yield "response.created", {"response": started}
    yield "response.in_progress", {"response": started}
    for index, item in enumerate(response["output"]):
        yield "response.output_item.added", {"output_index": index, "item": _opened(item)}
        place = {"item_id": item["id"], "output_index": index}
        for kind, fields in _call_events(item) if item["type"] == "function_call" else ():
            yield kind, {**place, **fields}
        for content_index, part in enumerate(item.get("content") or ()):
            for kind, fields in _part_events(part):
                yield kind, {**place, "content_index": content_index, **fields}
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield f"response.{response['status']}", {"response": response}


def _opened(item: Mapping[str, Any]) -> Fields:
    """Return an item as it is announced: without what its events bring."""
    empty: Fields = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
    return {**item, **empty, "status": "in_progress"}


def _call_events(item: Mapping[str, Any]) -> Iterator[tuple[str, Fields]]:
    head = "response.function_call_arguments"
    for delta in pieces(item["arguments"]):
        yield f"{head}.delta", {"delta": delta}
    yield f"{head}.done", {"name": item["name"], "arguments": item["arguments"]}


def _part_events(part: Mapping[str, Any]) -> Iterator[tuple[str, Fields]]:
    head = _TEXT_EVENT[part["type"]]
    logprobs: Fields = {"logprobs": []} if part["type"] == "output_text" else {}
    yield "response.content_part.added", {"part": {**part, "text": ""}}
    for delta in pieces(part["text"]):
        yield f"{head}.delta", {"delta": delta, **logprobs}
    yield f"{head}.done", {"text": part["text"], **logprobs}
    yield "response.content_part.done", {"part": part}
