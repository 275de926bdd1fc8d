"""Build sequences from text, for servers that report no token ids.

    messages ─► provider_messages ─► any OpenAI-compatible server ─► choices
    choice ─► reply_of ─► the text a model would have written: thinking, answer, calls
    text ─► ids of the environment's tokenizer + the end of turn that its chat template writes

Special tokens that a model spells in its text are encoded as plain text. One end-of-turn marker
that a server left at the end of a finished reply is removed.

The ids are the tokenizer's encoding of the text. The model may have sampled others, so these
sequences have no logprobs. They are suitable for SFT, DPO, distillation and viewing; a policy
gradient needs exact tokens. Images and other non-text parts of a message are sent to the server and
have no tokens.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from atroposlib.envs.server_handling.chat_rendering import (
    THINKING_END,
    THINKING_START,
    FinishReason,
    as_finish_reason,
    as_mapping,
    encode_added,
    is_hidden,
    render_added,
    spoken_text,
    text_of_content,
)
from atroposlib.envs.server_handling.tool_formats import FunctionCall, HermesFormat

logger = logging.getLogger(__name__)

_KNOWN_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_OWN_ROLES = {"agent": "assistant", "environment": "user"}
_MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id")
_ENDED = frozenset({"stop", "tool_calls", "function_call"})


class TextReply(NamedTuple):
    """One choice of a server's answer."""

    text: str
    """Everything the model wrote, as one text: thinking, answer, and tool calls."""
    content: str | None
    """The part before the tool calls; the whole text if there are no calls."""
    tool_calls: list[dict[str, Any]] | None
    """Structured calls returned by the server, in the format of the chat APIs."""
    finish_reason: FinishReason
    is_ended: bool
    """Whether the model ended its turn itself, rather than a stop string or a limit."""
    own_marks: str = ""
    """Tool-call markup added here, with placeholders for names and arguments."""


def reply_of(
    choice: Any,
    *,
    render_calls: Callable[[Sequence[FunctionCall]], str] | None = None,
    opens_thinking: bool = False,
    has_stop_strings: bool = False,
    end_texts: Sequence[str] = (),
) -> TextReply:
    """Return the text, calls and ending of one choice of a chat or a completion.

    Args:
        choice: A choice in the answer of an OpenAI client.
        render_calls: Renders tool calls as text; None uses the Hermes format.
        opens_thinking: Whether the prompt ends with `<think>`, which the reply then lacks.
        has_stop_strings: Whether the request has stop strings.
        end_texts: Possible end-of-turn markers. Some servers leave one at the end of a finished
            reply; it is removed.
    """
    reason = choice.finish_reason
    is_ended = reason in _ENDED or as_finish_reason(reason) == "stop"
    if has_stop_strings:
        # vLLM reports the string that ended a reply; null means the end of the turn.
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
    """Return the special tokens that a template writes after a reply; may be empty."""
    ids = encode_added(tokenizer, (render_added(render, [], []) or "").lstrip())
    end = next(
        (i for i, token_id in enumerate(ids) if not is_hidden(tokenizer, token_id)), len(ids)
    )
    return ids[:end]


def text_only(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages without their non-text parts, which text tokens cannot represent."""
    return [
        {**message, "content": spoken_text(message["content"])}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def provider_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as OpenAI-compatible providers accept them.

    Roles unknown to the protocol become `user` and `assistant`. A tool result becomes a user
    message if its call is only text in the conversation. Fields unknown to the protocol are left
    out.
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
    """Log once per process that texts are tokenized, the tokenizer, and the consequences."""
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
    """Return the content after the thinking, which some servers return in a separate field."""
    thinking = _thinking_of(message)
    if not thinking or THINKING_END in content:
        return content
    start = "" if opens_thinking else f"{THINKING_START}\n"
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
    """Return a tool call with its arguments as text, as the protocol defines them."""
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
