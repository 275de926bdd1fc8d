"""Convert chats to text and back: prompts, token ids, tool calls, and OpenAI answer objects.

    messages ─► convert_messages_for_template ─► render_messages ─► text ─► encode_prompt ─► ids
    ids ─► text_of ─► completion ─► parse_model_output ─► content, tool calls ─► build_chat

`render_added` and `encode_added` give the text that a template writes after a reply.

A completion that called tools is inserted into the next prompt exactly as it was sampled, so that
the next turn continues the same tokens. It is found by the ids of its calls; spacing and key order
of their arguments do not matter. Calls that the caller changed are rendered as given.

Tool calls in answers are plain dictionaries. The OpenAI client's own types turn each into an
object, which cannot be indexed, so the answer types here are subclasses.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast
from weakref import WeakKeyDictionary

from openai.types.chat import ChatCompletion, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice
from pydantic import SerializeAsAny

from atroposlib.envs.server_handling.openai_compatible import drop_double_bos
from atroposlib.envs.server_handling.tool_formats import (
    FoundCall,
    FunctionCall,
    HermesFormat,
    ToolCall,
    ToolCallFormat,
    registry,
    to_json,
    whole_value,
)
from atroposlib.envs.server_handling.turn_matching import (
    THINKING_END,
    as_mapping,
    calls_of,
    reply_forms,
    said_form,
    spoken_text,
)
from atroposlib.errors import ConfigError, PromptError
from atroposlib.utils.text import near_name
from atroposlib.utils.tokenizers.earlier_calls import no_template_text

if TYPE_CHECKING:
    from openai.types.completion import Completion
    from openai.types.completion_usage import CompletionUsage

__all__ = [
    "Answer",
    "ChatCompletion",
    "ChatCompletionMessage",
    "Choice",
    "FinishReason",
    "FunctionCall",
    "ToolAnswer",
    "ToolCall",
    "ToolCallChat",
    "ToolCallChoice",
    "ToolCallMessage",
    "ToolCallTranslator",
    "as_finish_reason",
    "build_chat",
    "build_completion",
    "check_texts",
    "encode_added",
    "encode_model_text",
    "encode_prompt",
    "has_ids_of_text",
    "hidden_tail",
    "is_hidden",
    "render_added",
    "render_either",
    "render_messages",
    "tail_behind",
    "text_of",
    "text_of_end",
]

Render = Callable[[Sequence[Mapping[str, Any]]], str]

# Private-use characters: templates do not look for them, and they are removed before encoding.
_PLACEHOLDERS = {"<think>": "\ue000think\ue001", "</think>": "\ue000/think\ue001"}
_REPLY = "\ue002reply\ue003"

_STANDS_FOR = {"developer": "system"}
"""Roles that most templates silently skip, mapped to the role with the same meaning."""

_SHOWN_START = 60

PIECE_TOKENS = 2048
"""Maximum number of tokens encoded at once; longer pieces would block the event loop."""

_WORD_WITHIN = 64
"""How many tokens after a piece are searched for the start of a word."""

_COPIES: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""Copies that encode the spelling of special tokens as text, by the original tokenizer."""


def render_messages(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Any] | None = None,
    keep_thinking: bool = True,
) -> str:
    """Return the prompt text of a conversation.

    A generation prompt is added unless the last message is the assistant's. Without a chat template
    each message becomes a line `role: content`. The role `developer` becomes `system` if the
    template's source does not name it.

    Args:
        tokenizer: Any object with `apply_chat_template`; None for the plain lines.
        messages: Conversation so far; not modified.
        tools: Tool definitions for the template; None leaves the argument out.
        keep_thinking: Hide `<think>` tags of assistant messages from the template, since many
            templates drop earlier thinking and a continued sequence would no longer match.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """
    if not hasattr(tokenizer, "apply_chat_template"):
        return "\n".join(
            f"{message['role']}: {message.get('content') or ''}" for message in messages
        )
    # User-defined tokenizers may render without one.
    if not getattr(tokenizer, "chat_template", "their own"):
        raise ConfigError(no_template_text(tokenizer))
    shown = [_with_parsed_arguments(m) for m in _with_known_roles(tokenizer, messages)]
    text = tokenizer.apply_chat_template(
        [_hide_thinking(message) for message in shown] if keep_thinking else shown,
        tokenize=False,
        add_generation_prompt=not messages or messages[-1]["role"] != "assistant",
        **({"tools": tools} if tools is not None else {}),
    )
    return _show_thinking(str(text)) if keep_thinking else str(text)


def check_texts(
    prompt: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    start: int = 0,
    keeps_thinking: bool = True,
) -> None:
    """Raise unless a prompt holds the text of every message from `start` on.

    Surrounding whitespace may differ, and the text may appear as JSON, as in tool results.
    Parts of a message that are not text are not checked.

    Args:
        prompt: Output of the template for the messages.
        messages: A conversation.
        start: Index of the first message to check.
        keeps_thinking: Whether the prompt must hold the thinking of the assistant's messages.

    Raises:
        PromptError: a text is missing; names the message and its role.
    """
    position = 0
    for i, message in enumerate(messages[start:], start=start):
        for text in _texts_of(message, keeps_thinking=keeps_thinking):
            found = prompt.find(text, position)
            if found >= 0:
                position = found + len(text)
            elif text not in prompt and not _is_written_otherwise(text, prompt):
                raise PromptError(
                    f"the chat template leaves out the text of messages[{i}] (role "
                    f"{message.get('role')!r}, {text[:_SHOWN_START]!r}); send the text in a role "
                    "that the template supports"
                )


def render_either(
    render: Render,
    preferred: Sequence[Mapping[str, Any]],
    other: Sequence[Mapping[str, Any]],
) -> str:
    """Return the text of a conversation in the first of two forms that the template accepts.

    Some templates recognize a tool call by its `tool_calls`, and refuse two answers in a row.
    """
    refusals = _refusals()
    try:
        return render(preferred)
    except refusals as error:
        if list(other) == list(preferred):
            raise
        try:
            return render(other)
        except refusals:
            raise error from None


def render_added(
    render: Render, history: Sequence[Mapping[str, Any]], added: Sequence[Mapping[str, Any]]
) -> str | None:
    """Return the text a template writes after a reply: its end, the added messages, the opening.

    The result does not depend on how the template would write the messages before the reply. The
    reply follows one short question: some templates put the system text or the tools before the
    *last* question and would repeat them. A template that refuses this gets the whole history.

    Args:
        render: Renders messages as prompt text.
        history: [M] messages before the reply.
        added: Messages after it.

    Returns:
        The text, or None if the template refuses both.
    """
    question = {"role": "user", "content": "?"}
    for before in ([question], list(history)):
        text = tail_behind(render, before, added)
        if text is not None:
            return text
    return None


def tail_behind(
    render: Render, before: Sequence[Mapping[str, Any]], added: Sequence[Mapping[str, Any]]
) -> str | None:
    """Return what a template writes after a reply to `before`; None if it refuses."""
    marker = _REPLY
    while any(marker in str(message.get("content")) for message in before):
        marker += _REPLY
    reply = {"role": "assistant", "content": marker}
    try:
        text = render([*before, reply, *added])
    except _refusals():
        return None
    _, found, tail = text.partition(marker)
    return tail if found else None


def _refusals() -> tuple[type[Exception], ...]:
    """Return the errors a template raises for a conversation it refuses."""
    try:
        from jinja2 import TemplateError
    except ImportError:  # then the tokenizer does not render with jinja2
        return (TypeError,)
    return (TemplateError, TypeError)  # TypeError when a template adds None to text


def _with_known_roles(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    """Return the messages with roles unknown to the template replaced by equivalent ones.

    Leading system messages are then joined, since templates expect a single one.
    """
    source = str(getattr(tokenizer, "chat_template", None) or "")
    unknown = {role for role in _STANDS_FOR if role not in source}
    if not any(message.get("role") in unknown for message in messages):
        return messages
    known = [
        {**message, "role": _STANDS_FOR[message["role"]]}
        if message.get("role") in unknown
        else message
        for message in messages
    ]
    num_systems = next((i for i, m in enumerate(known) if m.get("role") != "system"), len(known))
    if num_systems < 2:
        return known
    joined = "\n\n".join(str(message.get("content") or "") for message in known[:num_systems])
    return [{"role": "system", "content": joined}, *known[num_systems:]]


def _texts_of(message: Mapping[str, Any], *, keeps_thinking: bool) -> Iterator[str]:
    """Yield the texts of a message without surrounding whitespace."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    for part in parts:
        text = as_mapping(part).get("text")
        if not isinstance(text, str):
            continue
        if message.get("role") == "assistant" and not keeps_thinking:
            text = text.rpartition(THINKING_END)[2]
        if text.strip():
            yield text.strip()


def _is_written_otherwise(text: str, prompt: str) -> bool:
    """Whether a prompt holds a text as JSON, or with different whitespace."""
    written = [json.dumps(text, ensure_ascii=is_ascii)[1:-1] for is_ascii in (False, True)]
    written += [_without_marks(form) for form in written]
    if any(form in prompt for form in written):
        return True
    squeezed = "".join(prompt.split())
    value = whole_value(text)
    if isinstance(value, (dict, list)):
        written += [json.dumps(value, ensure_ascii=is_ascii) for is_ascii in (False, True)]
    return any("".join(form.split()) in squeezed for form in [text, *written])


def _without_marks(text: str) -> str:
    """Return JSON text with the escapes of templates that write HTML."""
    marks = {ord(mark): f"\\u{ord(mark):04x}" for mark in "<>&'"}
    return text.translate(marks)


def _with_parsed_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose calls hold arguments as objects, as chat templates expect them."""
    calls = message.get("tool_calls")
    if not isinstance(calls, Sequence) or not calls:
        return message
    return {**message, "tool_calls": [_with_object(as_mapping(call)) for call in calls]}


def _with_object(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = as_mapping(call.get("function"))
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    return {**call, "function": {**function, "arguments": whole_value(arguments, blank={})}}


def _hide_thinking(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    if message.get("role") != "assistant" or not isinstance(content, str):
        return message
    for tag, placeholder in _PLACEHOLDERS.items():
        content = content.replace(tag, placeholder)
    return {**message, "content": content}


def _show_thinking(text: str) -> str:
    for tag, placeholder in _PLACEHOLDERS.items():
        text = text.replace(placeholder, tag)
    return text


def encode_prompt(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a whole prompt, without the duplicate if text and tokenizer add a bos."""
    ids = tokenizer.encode(text, add_special_tokens=True)
    return drop_double_bos(ids, getattr(tokenizer, "bos_token_id", None))


def encode_added(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of text that follows a recorded sequence."""
    return list(tokenizer.encode(text, add_special_tokens=False)) if text else []


def encode_model_text(tokenizer: Any, text: str, *, own_marks: str = "") -> list[int]:
    """Return the ids of a model's text, encoding the spelling of special tokens as plain text.

    A model that spells `<|im_end|>` in its answer has not ended its turn, and must not be trained
    as if it had. Tokens that stay in texts, such as `<think>`, are encoded as usual.

    Args:
        tokenizer: Any tokenizer. Texts that contain special tokens are encoded with its option
            `split_special_tokens`, or piece by piece if it lacks that option.
        text: Text of the model, with the markup that this package added.
        own_marks: The added markup alone. Its special tokens stay special in `text`, unless
            `text` spells further ones.
    """
    ids = encode_added(tokenizer, text)
    special = _special_ids(tokenizer)
    found = [i for i in ids if i in special]
    if not found or found == [i for i in encode_added(tokenizer, own_marks) if i in special]:
        return ids
    ids = _encode_split(tokenizer, text)
    if special.isdisjoint(ids):
        return ids
    spellings = (str(tokenizer.decode([i], skip_special_tokens=False)).strip() for i in special)
    longest_first = sorted(filter(None, spellings), key=len, reverse=True)
    # A cut after the first character of each leaves no special token in any piece.
    pieces = re.split(
        "|".join(f"(?<={re.escape(s[0])})(?={re.escape(s[1:])})" for s in longest_first), text
    )
    ids = [i for piece in pieces for i in encode_added(tokenizer, piece)]
    return [i for i in ids if i not in special]


def _encode_split(tokenizer: Any, text: str) -> list[int]:
    try:
        splitting = _COPIES.get(tokenizer)
        if splitting is None:
            # Fast tokenizers keep the option until their next call, possibly from another thread.
            splitting = copy.deepcopy(tokenizer)
            _COPIES[tokenizer] = splitting
        return list(splitting.encode(text, add_special_tokens=False, split_special_tokens=True))
    except Exception:  # noqa: BLE001 - any object may stand in for a tokenizer
        return encode_added(tokenizer, text)


def _special_ids(tokenizer: Any) -> set[int]:
    """Return the ids of special tokens, without the one for unknown text."""
    # User-defined tokenizers may have neither attribute.
    ids = set(getattr(tokenizer, "all_special_ids", None) or ())
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    ids |= {i for i, token in added.items() if getattr(token, "special", False)}
    unknown = getattr(tokenizer, "unk_token_id", None)
    ends = {getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad")}
    return {i for i in ids if i != unknown or i in ends}


def text_of(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return a completion without its special tokens; without a tokenizer, ids are code points."""
    if tokenizer is None:
        return "".join(chr(i) for i in ids if 0 <= i < 0x110000 and chr(i).isprintable())
    return str(tokenizer.decode(list(ids), skip_special_tokens=True))


def is_hidden(tokenizer: Any, token_id: int) -> bool:
    """Whether a token is left out of texts; False for one that always decodes to nothing."""
    try:
        return _is_hidden_once(tokenizer, token_id)
    except TypeError:  # a tokenizer that cannot be hashed
        return _is_hidden_once.__wrapped__(tokenizer, token_id)


@lru_cache(maxsize=4096)
def _is_hidden_once(tokenizer: Any, token_id: int) -> bool:
    shown = tokenizer.decode([token_id], skip_special_tokens=False)
    return bool(shown) and not text_of(tokenizer, [token_id])


def text_of_end(tokenizer: Any, end_ids: Sequence[int]) -> str:
    """Return the special tokens that end a turn as a template writes them."""
    return "".join(str(tokenizer.decode([i], skip_special_tokens=False)) for i in end_ids)


def hidden_tail(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """Return the special tokens at the end of a completion, which end its turn."""
    start = len(ids)
    while start and is_hidden(tokenizer, ids[start - 1]):
        start -= 1
    return list(ids[start:])


async def has_ids_of_text(tokenizer: Any, ids: Sequence[int], *, hides_specials: bool) -> bool:
    """Whether encoding the text of these ids returns the same ids; models may sample others.

    Long texts are encoded in pieces that start at a word, so that each piece encodes as in the
    whole text.

    Args:
        tokenizer: Encodes and decodes.
        ids: [L] tokens.
        hides_specials: Whether special tokens are left out of the text.
    """
    start = 0
    while start < len(ids):
        end = _end_of_piece(tokenizer, ids, start)
        piece = list(ids[start:end])
        text = str(tokenizer.decode(piece, skip_special_tokens=hides_specials))
        if encode_added(tokenizer, text) != piece:
            return False
        start = end
        if start < len(ids):
            await asyncio.sleep(0)
    return True


def _end_of_piece(tokenizer: Any, ids: Sequence[int], start: int) -> int:
    end = start + PIECE_TOKENS
    for word in range(end, min(end + _WORD_WITHIN, len(ids))):
        if str(tokenizer.decode([ids[word]])).startswith(" "):
            return word
    return min(end, len(ids))


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


logger = logging.getLogger(__name__)

# Mistral's chat templates accept only ids of this length.
_ID_LENGTH = 9


class ToolCallTranslator:
    """Reads the tool calls of completions and writes them back into conversations.

    Args:
        tokenizer: Decodes completions.
        parser_name: Name of a format in `tool_formats.registry`. For an unknown name a warning
            is logged, completions stay text and calls are rendered in the Hermes format.

    Attributes:
        parser: The format; None if its name is unknown.
        call_id_to_raw_text: The completion of each call, by the id of the call; limited to the
            `max_remembered_calls` most recently used.
    """

    max_remembered_calls = 4096

    def __init__(self, tokenizer: Any, parser_name: str = "hermes") -> None:
        self.tokenizer = tokenizer
        self.parser_name = parser_name
        self.parser: ToolCallFormat | None = registry.find(parser_name)
        self.call_id_to_raw_text: OrderedDict[str, str] = OrderedDict()
        self._answers: dict[str, _ToolAnswer] = {}
        if self.parser is None:
            logger.warning(
                "no tool-call format %r, so tool calls stay text%s; known formats: %s",
                parser_name,
                near_name(parser_name.lower(), registry.names()),
                ", ".join(registry.names()),
            )

    def parse_model_output(
        self, raw_text: str, tool_choice: str | None = None, tools: Sequence[Any] | None = None
    ) -> tuple[str | None, list[ToolCall] | None, str]:
        """Return content, tool calls and finish reason of a completion; never raises on its text.

        If calls are found: the text before them or None, the calls, `tool_calls`. Otherwise, and if
        one of several calls is malformed: the unchanged completion, None, `stop`. Calls inside the
        thinking are ignored.

        Args:
            raw_text: The completion.
            tool_choice: `none` disables parsing.
            tools: Definitions given to the model; without any, parsing is disabled.
        """
        if self.parser is None or not tools or tool_choice == "none":
            return raw_text, None, "stop"
        found = _calls_after_thinking(self.parser, raw_text, tools)
        if not found:
            return raw_text, None, "stop"
        text = raw_text[: found[0].start]
        content = text if text.strip() else None
        calls = [self._remember(call, raw_text) for call in found]
        self._remember_meaning([call.id for call in calls], content, calls)
        return content, calls, "tool_calls"

    def remember_answer(
        self, raw_text: str, content: str | None, tool_calls: Sequence[Mapping[str, Any]]
    ) -> None:
        """Store structured calls that a server returned, with the text that represents them.

        Args:
            raw_text: The whole reply.
            content: The text before the calls.
            tool_calls: Calls in the format of the chat APIs, with the server's ids.
        """
        ids = [str(call.get("id")) for call in tool_calls]
        for call_id in ids:
            self._keep(call_id, raw_text)
        self._remember_meaning(ids, content, tool_calls)

    def render_calls(self, calls: Sequence[FunctionCall]) -> str:
        """Return calls as text in this format; in the Hermes format if it is unknown."""
        return (self.parser or HermesFormat()).render(calls)

    def reconstruct_raw_text_from_tool_calls(self, tool_calls: Sequence[Any]) -> str:
        """Return the completion that made these calls, or their rendering if it is unknown.

        Args:
            tool_calls: Calls of one assistant message, in the format of the chat APIs.
        """
        calls = [as_mapping(call) for call in tool_calls]
        known = self._recall(calls)
        if known is not None or not calls:
            return known or ""
        return self._render(calls)

    def convert_messages_for_template(
        self, messages: Sequence[Any], *, honours_content: bool = False
    ) -> list[Any]:
        """Return the messages with every assistant message that calls tools as plain text.

        The text is the completion itself if it is known; else the message's content and the
        rendered calls, on separate lines. All other messages are the same objects.

        Args:
            messages: A conversation.
            honours_content: Treat a completion as unknown if the message's content differs from
                it; otherwise the content of known calls is ignored.
        """
        return [self._as_text(message, honours_content) for message in messages]

    def decode_with_tool_awareness(self, token_ids: Sequence[int], has_tools: bool = False) -> str:
        """Return the text of ids; special tokens stay when they may mark tool calls."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=not has_tools))

    def _as_text(self, message: Any, honours_content: bool) -> Any:
        if not isinstance(message, Mapping) or message.get("role") != "assistant":
            return message
        tool_calls = message.get("tool_calls")
        if not tool_calls:
            return message
        calls = [as_mapping(call) for call in tool_calls]
        content = spoken_text(message.get("content"))
        text = self._recall(calls, content if honours_content else "")
        if text is None:
            rendered = self._render(calls)
            text = f"{content}\n{rendered}" if content else rendered
        return {"role": "assistant", "content": text}

    def _render(self, calls: Sequence[Mapping[str, Any]]) -> str:
        return self.render_calls([_function_of(call) for call in calls])

    def _remember_meaning(
        self, call_ids: Sequence[str], content: str | None, calls: Sequence[Any]
    ) -> None:
        answer = _ToolAnswer(content, _meaning(calls))
        self._answers |= dict.fromkeys(call_ids, answer)
        for call_id in self._answers.keys() - self.call_id_to_raw_text.keys():
            del self._answers[call_id]

    def _keep(self, call_id: str, raw_text: str) -> None:
        self.call_id_to_raw_text[call_id] = raw_text
        while len(self.call_id_to_raw_text) > self.max_remembered_calls:
            self.call_id_to_raw_text.popitem(last=False)

    def _remember(self, found: FoundCall, raw_text: str) -> ToolCall:
        """Give a call a unique id and store its completion under that id."""
        call_id = found.call_id
        while call_id is None or call_id in self.call_id_to_raw_text:
            call_id = secrets.token_hex(_ID_LENGTH)[:_ID_LENGTH]
        self._keep(call_id, raw_text)
        function = FunctionCall(name=found.name, arguments=found.arguments)
        return ToolCall(id=call_id, function=function)

    def _recall(self, calls: Sequence[Mapping[str, Any]], content: str = "") -> str | None:
        """Return the completion of the first call and mark its calls as recently used.

        None if it is unknown, or if calls or content differ from it.
        """
        remembered = self.call_id_to_raw_text
        ids = [str(call.get("id")) for call in calls]
        if not ids or ids[0] not in remembered:
            return None
        answer = self._answers.get(ids[0])
        if answer is not None and not answer.is_said_by(calls, content):
            return None
        for call_id in ids:
            if call_id in remembered:
                remembered.move_to_end(call_id)
        return remembered[ids[0]]


class _ToolAnswer(NamedTuple):
    """The answer given for one completion that calls tools."""

    content: str | None
    """Text before the calls."""
    meaning: list[tuple[str, str]]
    """Name and canonical arguments of each call."""

    def is_said_by(self, calls: Sequence[Mapping[str, Any]], content: str) -> bool:
        """Whether a message repeats this answer, possibly without its text or its thinking."""
        forms = reply_forms(self.content or "", has_calls=True)
        return _meaning(calls) == self.meaning and said_form(content) in forms


def _meaning(calls: Sequence[Any]) -> list[tuple[str, str]]:
    return [(name, arguments) for _, name, arguments in calls_of(calls)]


def _calls_after_thinking(
    parser: ToolCallFormat, text: str, tools: Sequence[Any]
) -> list[FoundCall]:
    """Return the calls of a completion, without those before the `</think>` that ends its thinking.

    The prompt may have opened the thinking, so only its end is searched. A tag inside a call, such
    as in the text of an argument, is ignored.
    """
    starts = [0]
    if THINKING_END in text:
        # Only the first and the last end: a search after each would take quadratic time.
        ends = (text.index(THINKING_END), text.rindex(THINKING_END))
        starts += [end + len(THINKING_END) for end in ends]
    calls: list[FoundCall] = []
    for start in starts:
        calls = parser.find_calls(text, start, tools)
        thinking_end = text.find(THINKING_END, start)
        is_inside_call = any(call.start <= thinking_end < call.end for call in calls)
        if thinking_end < 0 or is_inside_call or (calls and calls[0].start > thinking_end):
            break
    return calls


def _function_of(call: Mapping[str, Any]) -> FunctionCall:
    function = as_mapping(call.get("function"))
    arguments = function.get("arguments", "")
    if not isinstance(arguments, str):
        arguments = to_json(arguments) or ""
    return FunctionCall(name=str(function.get("name", "")), arguments=arguments)
