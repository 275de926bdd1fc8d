"""Sequences made from text, for servers that report no token ids.

    messages ─► provider_messages ─► any OpenAI-compatible server ─► choices
    choice ─► reply_of ─► the text a model would have written: thinking, answer, calls
    text ─► ids of the environment's tokenizer + the end of turn that its chat template writes

The text stays text: special tokens that a model spells are encoded letter by letter, and one end
of turn that a server left at the end of a finished reply is taken off.

The ids are the tokenizer's own for that text. The model may have sampled others, and nobody knows
how likely they were, so there are no logprobs. Such sequences are fit for SFT, DPO, distillation
and viewing; a policy gradient needs exact tokens. Images and other parts of a message that are not
text go to the server and have no tokens.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from atroposlib.envs.server_handling.chat_rendering import encode_added, is_hidden, render_added
from atroposlib.envs.server_handling.completion_objects import FinishReason, as_finish_reason
from atroposlib.envs.server_handling.tool_formats import FunctionCall, HermesFormat
from atroposlib.envs.server_handling.turn_matching import (
    THINKING_END,
    as_mapping,
    spoken_text,
    text_of_content,
)

__all__ = [
    "TextReply",
    "announce_text_tokens",
    "end_of_turn_ids",
    "provider_messages",
    "reply_of",
    "text_only",
]

logger = logging.getLogger(__name__)

_THINKING_START = "<think>"
_KNOWN_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_OWN_ROLES = {"agent": "assistant", "environment": "user"}
_MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id")
_ENDED = frozenset({"stop", "tool_calls", "function_call"})


class TextReply(NamedTuple):
    """One choice of a server's answer."""

    text: str
    """What the model wrote, as one text: thinking, answer, and tool calls."""
    content: str | None
    """The part before the tool calls; all of it where there are none."""
    tool_calls: list[dict[str, Any]] | None
    """Calls that the server returned as such, in the form of the chat APIs."""
    finish_reason: FinishReason
    is_ended: bool
    """Whether the model ended its turn by itself; a stop string or a limit ends it otherwise."""
    own_marks: str = ""
    """How tool calls are written here when all that the model chose is left out."""


def reply_of(
    choice: Any,
    *,
    render_calls: Callable[[Sequence[FunctionCall]], str] | None = None,
    opens_thinking: bool = False,
    has_stop_strings: bool = False,
    end_texts: Sequence[str] = (),
) -> TextReply:
    """Return what a choice of a chat or a completion says.

    Args:
        choice: Of the answer of an OpenAI client.
        render_calls: Writes tool calls as text; None writes them as Hermes does.
        opens_thinking: Whether the prompt ends with `<think>`, which the reply then lacks.
        has_stop_strings: Whether the request named strings that end the reply.
        end_texts: What may end a turn. Of a reply that ended by itself one is taken off, which
            some servers leave there.
    """
    reason = choice.finish_reason
    is_ended = reason in _ENDED or as_finish_reason(reason) == "stop"
    if has_stop_strings:
        # vLLM tells the string that ended a reply; null means the end of the turn.
        is_ended = is_ended and getattr(choice, "stop_reason", "unknown") is None
    message = getattr(choice, "message", None)
    if message is None:
        text = _without_end(choice.text or "", end_texts if is_ended else ())
        return TextReply(text, text, None, as_finish_reason(reason), is_ended)
    spoken = _without_end(text_of_content(message.content), end_texts if is_ended else ())
    content = _with_thinking(message, spoken, opens_thinking)
    calls = [_plain_call(call) for call in message.tool_calls or ()]
    if not calls:
        return TextReply(content, content, None, as_finish_reason(reason), is_ended)
    functions = [FunctionCall(**call["function"]) for call in calls]
    write = render_calls or HermesFormat().render
    written = write(functions)
    text = f"{content}\n{written}" if content else written
    marks = write([FunctionCall(name="f", arguments="{}")] * len(functions))
    return TextReply(text, content or None, calls, as_finish_reason(reason), is_ended, marks)


def end_of_turn_ids(
    tokenizer: Any, render: Callable[[Sequence[Mapping[str, Any]]], str]
) -> list[int]:
    """Return the special tokens that a chat template writes directly behind a reply; may be none.

    Args:
        tokenizer: Encodes what the template writes.
        render: From messages to prompt text.
    """
    ids = encode_added(tokenizer, render_added(render, [], []) or "")
    end = next(
        (i for i, token_id in enumerate(ids) if not is_hidden(tokenizer, token_id)), len(ids)
    )
    return ids[:end]


def text_only(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages without the parts that are not text, as text tokens cannot show them."""
    return [
        {**message, "content": spoken_text(message["content"])}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def provider_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as OpenAI-compatible providers accept them.

    Roles that the protocol does not have become `user` and `assistant`. A result that answers no
    call of the conversation, because the calls are text there, becomes a user message. Fields that
    the protocol does not have are left out.
    """
    given: list[dict[str, Any]] = []
    open_calls: set[str] = set()
    for message in messages:
        plain = {name: message[name] for name in _MESSAGE_KEYS if message.get(name) is not None}
        role = str(message.get("role"))
        plain["role"] = _OWN_ROLES.get(role, role if role in _KNOWN_ROLES else "user")
        calls = plain.pop("tool_calls", None)
        if calls:
            plain["tool_calls"] = [_plain_call(call) for call in calls]
            open_calls |= {call["id"] for call in plain["tool_calls"]}
        plain.setdefault("content", None if calls else "")
        if role == "tool" and plain.get("tool_call_id") not in open_calls:
            result = text_of_content(plain["content"])
            plain = {"role": "user", "content": f"<tool_response>\n{result}\n</tool_response>"}
        given.append(plain)
    return given


@lru_cache(maxsize=1)
def announce_text_tokens(server_name: str, tokenizer_name: str) -> None:
    """Log, once per process, that tokens are made from text, with what, and what that means."""
    logger.warning(
        "inference server %s reports no token ids: its texts are tokenized with %s. Groups are "
        "marked tokenized_from_text and carry no logprobs: they serve SFT, DPO, distillation, "
        "evaluation and viewing; policy-gradient trainers refuse them. Exact tokens come from an "
        "engine with server_type vllm or sglang",
        server_name,
        tokenizer_name,
    )


def _without_end(text: str, end_texts: Sequence[str]) -> str:
    end = next((end for end in end_texts if end and text.endswith(end)), "")
    return text.removesuffix(end)


def _with_thinking(message: Any, content: str, opens_thinking: bool) -> str:
    """Return the content behind the thinking that some servers return in a field of its own."""
    thinking = _thinking_of(message)
    if not thinking or THINKING_END in content:
        return content
    start = "" if opens_thinking else f"{_THINKING_START}\n"
    return f"{start}{thinking.strip()}\n{THINKING_END}\n\n{content}"


def _thinking_of(message: Any) -> str:
    for name in ("reasoning_content", "reasoning"):
        thinking = getattr(message, name, None)
        if isinstance(thinking, str) and thinking.strip():
            return thinking
    details = getattr(message, "reasoning_details", None)
    entries = details if isinstance(details, list) else []
    texts = (as_mapping(entry).get("text") for entry in entries)
    return "".join(text for text in texts if isinstance(text, str))


def _plain_call(call: Any) -> dict[str, Any]:
    """Return a tool call with its arguments as text, as the protocol has them."""
    fields = as_mapping(call)
    function = as_mapping(fields.get("function"))
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
    return {
        "id": str(fields.get("id") or ""),
        "type": "function",
        "function": {"name": str(function.get("name") or ""), "arguments": arguments},
    }
