"""Build OpenAI chat and completion objects from texts, with tool calls as plain dictionaries.

The OpenAI client's own types turn each tool call into an object, which cannot be indexed; the
subclasses here keep dictionaries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from openai.types.chat import ChatCompletion, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice
from pydantic import SerializeAsAny

if TYPE_CHECKING:
    from openai.types.completion import Completion
    from openai.types.completion_usage import CompletionUsage

__all__ = [
    "Answer",
    "ChatCompletion",
    "ChatCompletionMessage",
    "Choice",
    "FinishReason",
    "ToolAnswer",
    "ToolCallChat",
    "ToolCallChoice",
    "ToolCallMessage",
    "as_finish_reason",
    "build_chat",
    "build_completion",
]

FinishReason = Literal["stop", "length", "content_filter"]


class Answer(NamedTuple):
    """One completion as text."""

    text: str
    finish_reason: FinishReason


class ToolAnswer(NamedTuple):
    """One completion that calls tools."""

    content: str | None
    """Text before the calls."""
    tool_calls: list[dict[str, Any]]
    """The calls in the form of the chat APIs."""


def as_finish_reason(reason: Any) -> FinishReason:
    """Return a reason both OpenAI types accept; engines send text, an object or null.

    Unknown reasons become `stop`, so that the answer can be built.
    """
    if isinstance(reason, Mapping):
        reason = reason.get("type")
    known = reason in ("stop", "length", "content_filter")
    return cast(FinishReason, reason) if known else "stop"


def build_chat(
    answers: Sequence[Answer | ToolAnswer],
    *,
    model: str,
    id_: str,
    created: int,
    usage: CompletionUsage | None = None,
) -> ChatCompletion:
    """Build a chat answer with one choice per completion, numbered from 0; `created` in seconds.

    Tool calls are plain dictionaries: they can be indexed, and reused in messages unchanged.
    """
    choices: list[Choice] = []
    for i, answer in enumerate(answers):
        if isinstance(answer, ToolAnswer):
            calling = ToolCallMessage(
                role="assistant", content=answer.content, tool_calls=answer.tool_calls
            )
            choices.append(ToolCallChoice(index=i, finish_reason="tool_calls", message=calling))
            continue
        message = ChatCompletionMessage(role="assistant", content=answer.text)
        choices.append(Choice(index=i, finish_reason=answer.finish_reason, message=message))
    calls_tools = any(isinstance(answer, ToolAnswer) for answer in answers)
    chat_type = ToolCallChat if calls_tools else ChatCompletion
    return chat_type(
        id=id_,
        created=created,
        model=model,
        object="chat.completion",
        choices=choices,
        usage=usage,
    )


def build_completion(
    answers: Sequence[Answer],
    *,
    model: str,
    id_: str,
    created: int,
    usage: CompletionUsage | None = None,
) -> Completion:
    """Build a completion with one choice per text, numbered from 0; `created` in seconds."""
    from openai.types.completion import Completion
    from openai.types.completion_choice import CompletionChoice

    return Completion(
        id=id_,
        created=created,
        model=model,
        object="text_completion",
        choices=[
            CompletionChoice(index=i, finish_reason=answer.finish_reason, text=answer.text)
            for i, answer in enumerate(answers)
        ],
        usage=usage,
    )


class ToolCallMessage(ChatCompletionMessage):
    """A message whose tool calls are dictionaries."""

    tool_calls: list[dict[str, Any]] | None = None  # type: ignore[assignment]  # see the module
    """Each `{"id", "type": "function", "function": {"name", "arguments"}}`."""


class ToolCallChoice(Choice):
    """A choice whose message holds tool calls."""

    message: ToolCallMessage


class ToolCallChat(ChatCompletion):
    """An answer whose choices may call tools."""

    choices: list[SerializeAsAny[Choice]]
    """Serialized by their own class; the client's type would warn about the dictionaries."""
