"""The events of a streamed Message; pure.

message_start, ping
  per block   content_block_start
              content_block_delta ...   text_delta | input_json_delta
                                        | thinking_delta ... signature_delta
              content_block_stop
message_delta, message_stop
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from atroposlib.envs.server_handling.proxy.dialects.answers import ShownAnswer, pieces

__all__ = ["message_events"]

Fields = dict[str, Any]


def message_events(message: Mapping[str, Any], answer: ShownAnswer) -> Iterator[Fields]:
    """Yield the events of a message.

    Args:
        message: The whole Message.
        answer: What it was made of; its calls bring the arguments' text, which is streamed as the
            model's format gave it.
    """
    usage = {**message["usage"], "output_tokens": 0, "output_tokens_details": None}
    unfinished: Fields = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield {"type": "message_start", "message": {**message, **unfinished}}
    yield {"type": "ping"}
    arguments = {call.call_id: call.arguments for call in answer.calls}
    for index, block in enumerate(message["content"]):
        opened, deltas = _opened_block(block, arguments)
        yield {"type": "content_block_start", "index": index, "content_block": opened}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ending = {name: message[name] for name in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": ending, "usage": message["usage"]}
    yield {"type": "message_stop"}


def _opened_block(
    block: Mapping[str, Any], arguments: Mapping[str, str]
) -> tuple[Fields, Iterator[Fields]]:
    """Return a block as it is announced, and the deltas that fill it."""
    kind = block["type"]
    if kind == "text":
        return {**block, "text": ""}, _deltas("text_delta", "text", block["text"])
    if kind == "thinking":
        return {**block, "thinking": "", "signature": ""}, _thinking_deltas(block)
    text = arguments[block["id"]]
    return {**block, "input": {}}, _deltas("input_json_delta", "partial_json", text)


def _thinking_deltas(block: Mapping[str, Any]) -> Iterator[Fields]:
    yield from _deltas("thinking_delta", "thinking", block["thinking"])
    yield {"type": "signature_delta", "signature": block["signature"]}


def _deltas(kind: str, field: str, text: str) -> Iterator[Fields]:
    for piece in pieces(text):
        yield {"type": kind, field: piece}
