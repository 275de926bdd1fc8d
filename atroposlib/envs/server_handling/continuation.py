"""Which recorded sequence a chat continues, and with what text.

recorded text + rest of the prompt   when the prompt begins with the text, and the rest with
                                     the end of the turn
recorded text + what the template    when it would write the recorded turns differently
  writes behind a reply
recorded text                        when the last message is a reply that a limit cut off

A chat that ends with the assistant's text asks for the rest of that reply: the text stands behind
the opening of the reply, and what is sampled goes on from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from atroposlib.envs.server_handling.chat_rendering import render_added, tail_behind
from atroposlib.envs.server_handling.node_records import Continuation, NodeRecord, NodeRecords
from atroposlib.envs.server_handling.sequence_tracker import SequenceNode
from atroposlib.envs.server_handling.turn_matching import (
    as_mapping,
    digest,
    message_key,
    text_of_content,
)
from atroposlib.errors import PromptError

__all__ = ["ChatRequest", "continue_chat", "plain_messages"]

Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Any] | None], str]
"""From messages and the tools to show, to a prompt text."""


@dataclass(frozen=True)
class ChatRequest:
    """A chat as it is compared with recorded ones."""

    messages: list[Mapping[str, Any]]
    """[M] the conversation, without the reply that it begins."""
    keys: list[str]
    """[M] `message_key` of each message."""
    tools: Sequence[Any] | None
    """What the prompt shows of tools."""
    tools_key: str
    """Equal for equal tools."""
    prompt: str
    """The text of the messages and of the begun reply."""
    begun: Mapping[str, Any] | None = None
    """The message of the assistant that the reply goes on from; None for a reply from its start."""

    @property
    def begun_text(self) -> str:
        """The text of the begun reply."""
        return "" if self.begun is None else text_of_content(self.begun.get("content"))

    @property
    def all_messages(self) -> list[Mapping[str, Any]]:
        """The conversation with the begun reply."""
        return self.messages if self.begun is None else [*self.messages, self.begun]

    @classmethod
    def of(
        cls, messages: Sequence[Any], tools: Sequence[Any] | None, render: Render
    ) -> ChatRequest:
        """Render a chat and make its keys.

        Raises:
            PromptError: the last message calls tools, so that no text can follow in it.
        """
        plain = plain_messages(messages)
        begun = None
        if plain and plain[-1].get("role") == "assistant":
            begun = plain.pop()
            if begun.get("tool_calls"):
                raise PromptError(
                    "the last message is the assistant's and calls tools; add a tool message with "
                    "the result of each call"
                )
        keys = [message_key(message) for message in plain]
        tools_key = digest(tools) if tools else ""
        chat = cls(plain, keys, tools, tools_key, "", begun)
        return replace(chat, prompt=render(plain, tools) + chat.begun_text)


def continue_chat(
    records: NodeRecords,
    nodes: Sequence[SequenceNode],
    request: ChatRequest,
    render: Render,
    *,
    strips_thinking: bool,
) -> Continuation | None:
    """Return the sequence that a chat continues; None for a new one.

    Args:
        records: What is known of the nodes.
        nodes: Candidates.
        request: The chat.
        render: Writes prompts.
        strips_thinking: Whether a template that drops earlier thinking is to be obeyed.
    """
    cut = _cut_reply(records, nodes, request)
    if cut is not None:
        return Continuation(cut, "", is_rerendered=False, is_same_reply=True)
    record = records.find_conversation(nodes, request.messages, request.keys, request.prompt)
    conversation = record.last.conversation if record is not None and record.last else None
    if record is None or conversation is None:
        return records.find_text(nodes, request.prompt, only_bare=True)
    num_turns = conversation.num_turns
    history, added = request.messages[: num_turns - 1], request.messages[num_turns:]
    rest = _rest_of_prompt(record, request, history, added, render)
    if rest is not None:
        # A turn that ended with another token than the template writes keeps both.
        is_same_end = rest.startswith(record.last.end_text if record.last else "")
        return Continuation(record, rest, is_rerendered=not is_same_end)
    is_dropped = strips_thinking and conversation.has_thinking
    if is_dropped or conversation.tools_key != request.tools_key:
        return None
    tail = render_added(lambda messages: render(messages, None), history, added)
    if tail is None:
        return None
    return Continuation(record, tail + request.begun_text, is_rerendered=True)


def _cut_reply(
    records: NodeRecords, nodes: Sequence[SequenceNode], request: ChatRequest
) -> NodeRecord | None:
    """Return the record whose last reply is the begun one, without an end of its turn."""
    if request.begun is None or not request.begun_text.strip():
        return None
    keys = [*request.keys, message_key(request.begun)]
    record = records.find_conversation(nodes, request.all_messages, keys, request.prompt)
    last = record.last if record is not None else None
    if last is None or last.conversation is None or last.num_end_ids:
        return None
    is_whole = last.conversation.num_turns == len(keys)
    return record if is_whole and last.conversation.tools_key == request.tools_key else None


def _rest_of_prompt(
    record: NodeRecord,
    request: ChatRequest,
    history: Sequence[Mapping[str, Any]],
    added: Sequence[Mapping[str, Any]],
    render: Render,
) -> str | None:
    """Return the prompt behind the recorded text, None unless the turn ends just there.

    A prompt may begin with the text and yet go on inside of the turn: `1` begins `10`, and an
    empty reply begins everything a template writes in front of one.
    """
    if not request.prompt.startswith(record.node.full_text):
        return None
    rest = request.prompt[len(record.node.full_text) :]
    end_text = record.last.end_text if record.last is not None else ""
    if end_text and rest.startswith(end_text):
        return rest
    tail = tail_behind(lambda messages: render(messages, request.tools), history, added)
    return rest if tail is not None and tail + request.begun_text == rest else None


def plain_messages(messages: Sequence[Any]) -> list[Mapping[str, Any]]:
    """Return messages as mappings whose text is text, as chat templates want them.

    Objects of a client lose their unset fields; a content of text parts only becomes one text.
    Anything else is the same object.
    """
    return [_plain_message(message) for message in messages]


def _plain_message(message: Any) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = message
    if not isinstance(message, Mapping):
        fields = {name: v for name, v in as_mapping(message).items() if v is not None}
    content = fields.get("content")
    if not isinstance(content, list) or not content:
        return fields
    texts = [as_mapping(part).get("text") for part in content]
    if not all(isinstance(text, str) for text in texts):
        return fields
    return {**fields, "content": "".join(map(str, texts))}
