"""Read chat messages, convert them to text and ids and back, and build OpenAI answer objects.

    messages ─► render_messages ─► text ─► encode_prompt ─► ids
    ids ─► text_of ─► completion ─► content, tool calls ─► build_chat

`calls_of`, `normal_form` and `reply_forms` normalize messages for comparison; `turn_recording` has
the rules. `render_added` returns the text that a template writes after a reply.

The types of the OpenAI client are imported when an answer is built, since that takes a second.
"""

from __future__ import annotations

import asyncio
import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast
from weakref import WeakKeyDictionary

from atroposlib.envs.server_handling.openai_compatible import drop_double_bos
from atroposlib.envs.server_handling.tool_calls import whole_value
from atroposlib.errors import ConfigError, PromptError
from atroposlib.utils.tokenizers.content_parts import in_readable_form
from atroposlib.utils.tokenizers.earlier_calls import no_template_text

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion
    from openai.types.chat.chat_completion import Choice
    from openai.types.completion import Completion
    from openai.types.completion_usage import CompletionUsage

THINKING_START = "<think>"
THINKING_END = "</think>"

INSERTED_TEXTS = frozenset(
    {"[System: Empty message content sanitised to satisfy protocol]", "Please continue."}
)
"""Texts that litellm inserts into empty assistant messages, which some providers refuse."""

_EMPTY_ARGUMENTS = "{}"
_SPACED = re.compile(r"\s")
_TAGS = re.compile(f"{THINKING_START}|{THINKING_END}")

Render = Callable[[Sequence[Mapping[str, Any]]], str]

# Private-use characters: templates do not look for them, and they are removed before encoding.
_PLACEHOLDERS = {THINKING_START: "\ue000think\ue001", THINKING_END: "\ue000/think\ue001"}
_REPLY = "\ue002reply\ue003"

_STANDS_FOR = {"developer": "system"}
"""Roles that most templates silently skip, mapped to an equivalent role."""

_SHOWN_START = 60

PIECE_TOKENS = 2048
"""Maximum number of tokens encoded at once; longer pieces would block the event loop."""

_WORD_WITHIN = 64
"""Number of tokens after a piece that are searched for the start of a word."""

_COPIES: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""Copies that encode the spelling of special tokens as text, by the original tokenizer."""
OWN_TAGS = frozenset(
    f"<{slash}{name}>"
    for name in ("think", "tools", "tool_call", "tool_response")
    for slash in ("", "/")
)
"""Tags that some tokenizers have as special tokens."""


def calls_of(tool_calls: Any) -> list[tuple[str, str, str]]:
    """Return (id, name, canonical arguments) of each call of an assistant message."""
    found = []
    for call in tool_calls if isinstance(tool_calls, Sequence) else ():
        fields = as_mapping(call)
        function = as_mapping(fields.get("function"))
        arguments = _canonical_arguments(function.get("arguments"))
        found.append((str(fields.get("id")), str(function.get("name")), arguments))
    return found


def text_of_content(content: Any) -> str:
    """Return the text of a message's content; parts that are not text appear as JSON."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, Sequence) else [content]
    return "".join(_text_of_part(part) for part in parts)


def spoken_text(content: Any) -> str:
    """Return the text of a message's content without its non-text parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) else ()
    return "".join(str(as_mapping(part).get("text") or "") for part in parts)


def as_mapping(value: Any) -> Mapping[str, Any]:
    """Return a message or call as a mapping; agents may pass objects of their client."""
    if isinstance(value, Mapping):
        return value
    dump = getattr(value, "model_dump", None)
    dumped = dump() if callable(dump) else None
    return dumped if isinstance(dumped, Mapping) else {}


def _text_of_part(part: Any) -> str:
    fields = as_mapping(part)
    text = fields.get("text")
    if isinstance(text, str):
        return text
    return json.dumps(fields or part, sort_keys=True, default=str)


def _canonical_arguments(arguments: Any) -> str:
    """Return JSON that is equal for equal values; text that is not JSON loses its whitespace."""
    value = arguments
    if isinstance(arguments, str):
        if not arguments.strip():
            return _EMPTY_ARGUMENTS
        try:
            value = json.loads(arguments, strict=False)
        except (ValueError, RecursionError):
            return _SPACED.sub("", arguments)
    if value is None:
        return _EMPTY_ARGUMENTS
    try:
        return json.dumps(_with_plain_numbers(value), sort_keys=True, default=str)
    except (ValueError, TypeError, RecursionError):
        return repr(value)


def _with_plain_numbers(value: Any) -> Any:
    """Convert floats with integral values to integers, as clients in other languages do."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {str(key): _with_plain_numbers(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_with_plain_numbers(entry) for entry in value]
    return value


def normal_form(text: str) -> str:
    """Return a reply's text in a normalized form, equal for texts with equal meaning.

    Whitespace around thoughts and text is removed. Within thoughts, whitespace is collapsed, and
    repeated or empty thoughts are dropped. The opening tag may be missing.
    """
    head, end, rest = text.rpartition(THINKING_END)
    rest = rest.strip()
    while rest.startswith(THINKING_START):  # truncated within the thinking
        rest = rest.removeprefix(THINKING_START).lstrip()
    if rest in INSERTED_TEXTS:
        rest = ""
    thoughts = [" ".join(part.split()) for part in _TAGS.split(head)] if end else []
    distinct = dict.fromkeys(filter(None, thoughts))
    return "\0".join([*distinct, "", rest]) if distinct else rest


def reply_forms(text: str, *, has_calls: bool = False) -> frozenset[str]:
    """Return the `normal_form` of every form in which a reply's text may be sent back.

    A reply that calls tools (`has_calls`) may be sent back without its text.
    """
    rest = text.rpartition(THINKING_END)[2]
    is_cut = rest.lstrip().startswith(THINKING_START)
    forms = {text, rest, "" if is_cut else rest}
    if has_calls:
        forms |= {"", text[: len(text) - len(rest)]}
    return frozenset(map(normal_form, forms))


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
    template's source does not name it, and texts become parts if the template reads only those.

    Args:
        tokenizer: Any object with `apply_chat_template`; None for the plain lines.
        messages: Conversation so far; not modified.
        tools: Tool definitions for the template; None leaves the argument out.
        keep_thinking: Whether `<think>` tags of assistant messages are hidden from the template.
            Many templates drop earlier thinking; a continued sequence would no longer match.

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
    if keep_thinking:
        shown = [_hide_thinking(message) for message in shown]
    text = tokenizer.apply_chat_template(
        in_readable_form(tokenizer, shown),
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
    """Raise `PromptError` unless a prompt contains the text of every message from `start` on.

    Surrounding whitespace may differ, and the text may appear as JSON, as in tool results.
    Parts of a message that are not text are not checked. Without `keeps_thinking`, the assistant's
    thinking may be left out.
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

    Some templates recognize a tool call only by its `tool_calls`, and reject two answers in a row.
    """
    refusals = template_errors()
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

    The reply follows one short question, since some templates put the system text or the tools
    before the *last* question and would repeat them. A template that rejects this gets the whole
    history.

    Returns:
        The text, or None if the template rejects both.
    """
    text = text_after_reply(render, [{"role": "user", "content": "?"}], added)
    return text_after_reply(render, history, added) if text is None else text


def text_after_reply(
    render: Render, before: Sequence[Mapping[str, Any]], added: Sequence[Mapping[str, Any]]
) -> str | None:
    """Return the text that a template writes after a reply to `before`; None if it rejects it."""
    marker = _REPLY
    while any(marker in str(message.get("content")) for message in before):
        marker += _REPLY
    reply = {"role": "assistant", "content": marker}
    try:
        text = render([*before, reply, *added])
    except template_errors():
        return None
    _, found, tail = text.partition(marker)
    return tail if found else None


def template_errors() -> tuple[type[Exception], ...]:
    """Return the types of exception with which chat templates refuse a conversation."""
    try:
        from jinja2 import TemplateError
    except ImportError:  # then the tokenizer does not render with jinja2
        return (TypeError,)
    return (TemplateError, TypeError)  # TypeError when a template adds None to text


def _with_known_roles(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    """Return the messages with roles unknown to the template replaced by equivalent ones."""
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
    return leading_systems_joined(known)


def leading_systems_joined(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages with leading system messages joined, as templates accept only one."""
    num_systems = next(
        (i for i, message in enumerate(messages) if message.get("role") != "system"), len(messages)
    )
    if num_systems < 2:
        return list(messages)
    joined = "\n\n".join(str(message.get("content") or "") for message in messages[:num_systems])
    return [{"role": "system", "content": joined}, *messages[num_systems:]]


def _texts_of(message: Mapping[str, Any], *, keeps_thinking: bool) -> Iterator[str]:
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
    marks = {ord(mark): f"\\u{ord(mark):04x}" for mark in "<>&'"}  # as templates that write HTML
    written += [form.translate(marks) for form in written]
    if any(form in prompt for form in written):
        return True
    squeezed = "".join(prompt.split())
    value = whole_value(text)
    if isinstance(value, (dict, list)):
        written += [json.dumps(value, ensure_ascii=is_ascii) for is_ascii in (False, True)]
    return any("".join(form.split()) in squeezed for form in [text, *written])


def _with_parsed_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose calls have arguments as objects, as chat templates expect them."""
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
    """Return the ids of a whole prompt that a model continues.

    A bos added by both text and tokenizer is kept once, an eos added by the tokenizer is dropped.
    """
    ids = list(tokenizer.encode(text, add_special_tokens=True))
    eos = getattr(tokenizer, "eos_token_id", None)
    if len(ids) > 1 and ids[-1] == eos and _encode_alone(tokenizer, text)[-1:] != [eos]:
        ids.pop()
    return drop_double_bos(ids, getattr(tokenizer, "bos_token_id", None))


def encode_added(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of text that follows a recorded sequence.

    SentencePiece tokenizers write a space before any text. It would be within the sequence here,
    so such a tokenizer encodes the text after a line end, whose ids are then cut off.
    """
    if not text:
        return []
    try:
        has_space = _writes_space_first(tokenizer)
    except TypeError:  # a tokenizer that cannot be hashed
        has_space = _writes_space_first.__wrapped__(tokenizer)
    if has_space:
        line, ids = _encode_alone(tokenizer, "\n"), _encode_alone(tokenizer, "\n" + text)
        if ids[: len(line)] == line:
            return ids[len(line) :]
    return _encode_alone(tokenizer, text)


@lru_cache(maxsize=64)
def _writes_space_first(tokenizer: Any) -> bool:
    line, word, both = (_encode_alone(tokenizer, text) for text in ("\n", "x", "\nx"))
    inside = both[len(line) :] if both[: len(line)] == line else []
    return bool(inside) and inside != word


def _encode_alone(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def encode_model_text(tokenizer: Any, text: str, *, own_marks: str = "") -> list[int]:
    """Return the ids of a model's text, encoding the spelling of special tokens as plain text.

    A model that spells `<|im_end|>` in its answer has not ended its turn, and must not be trained
    to end it. Tokens that stay in texts, such as `<think>`, are encoded as usual.

    Args:
        tokenizer: Any tokenizer. Texts that contain special tokens are encoded with its option
            `split_special_tokens`, or piece by piece if it lacks that option.
        text: Text of the model, with the markup that this package added.
        own_marks: The added markup alone. Its special tokens stay special in `text`, unless
            `text` spells further ones.
    """
    ids = _encode_alone(tokenizer, text)
    special = _special_ids(tokenizer)
    found = [i for i in ids if i in special]
    if not found or found == [i for i in _encode_alone(tokenizer, own_marks) if i in special]:
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
    ids = [i for piece in pieces for i in _encode_alone(tokenizer, piece)]
    return [i for i in ids if i not in special]


def special_spellings(tokenizer: Any) -> re.Pattern[str] | None:
    """Return a pattern of the special tokens as texts spell them; None without any.

    The tags of thinking and tools are left out: messages of ours have them.
    """
    decoded = (
        str(tokenizer.decode([i], skip_special_tokens=False)) for i in _special_ids(tokenizer)
    )
    # A token of one character, such as a line end, is ordinary text.
    spellings = sorted({text.strip() for text in decoded if len(text.strip()) > 1} - OWN_TAGS)
    longest_first = sorted(spellings, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def without_specials(text: str, spellings: re.Pattern[str] | None) -> str:
    """Return a text whose spellings of special tokens are broken by a space.

    A chat template writes the texts of messages between its special tokens, so a text that spells
    them ends its message and starts another, of any role.

    Example: `<|im_end|>` becomes `< |im_end|>`.
    """
    if spellings is None:
        return text
    while spellings.search(text):  # the part after a space may spell a shorter one
        text = spellings.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)
    return text


def _encode_split(tokenizer: Any, text: str) -> list[int]:
    try:
        splitting = _COPIES.get(tokenizer)
        if splitting is None:
            # Fast tokenizers keep the option until their next call, possibly from another thread.
            splitting = copy.deepcopy(tokenizer)
            _COPIES[tokenizer] = splitting
        return list(splitting.encode(text, add_special_tokens=False, split_special_tokens=True))
    except Exception:  # noqa: BLE001 - any object may stand in for a tokenizer
        return _encode_alone(tokenizer, text)


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

    Long texts are encoded in pieces that start at a word, which does not change their encoding.
    """
    start = 0
    while start < len(ids):
        end = _end_of_piece(tokenizer, ids, start)
        piece = list(ids[start:end])
        text = str(tokenizer.decode(piece, skip_special_tokens=hides_specials))
        if _encode_alone(tokenizer, text) != piece:
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


class TextAnswer(NamedTuple):
    """One completion as text."""

    text: str
    finish_reason: FinishReason


class ToolAnswer(NamedTuple):
    """One completion that calls tools."""

    content: str | None
    """Text before the calls."""
    tool_calls: list[dict[str, Any]]
    """Calls in the form of the chat APIs."""


def as_finish_reason(reason: Any) -> FinishReason:
    """Return a reason that both OpenAI types accept, `stop` for an unknown one.

    Engines send text, an object with a `type`, or null.
    """
    if isinstance(reason, Mapping):
        reason = reason.get("type")
    known = reason in ("stop", "length", "content_filter")
    return cast(FinishReason, reason) if known else "stop"


def build_chat(
    answers: Sequence[TextAnswer | ToolAnswer],
    *,
    model: str,
    id_: str,
    created: int,
    usage: CompletionUsage | None = None,
) -> ChatCompletion:
    """Build a chat answer with one choice per completion, numbered from 0; `created` in seconds."""
    from openai.types.chat import ChatCompletion, ChatCompletionMessage
    from openai.types.chat.chat_completion import Choice

    from atroposlib.envs.server_handling.tool_call_answers import (
        ToolCallChat,
        ToolCallChoice,
        ToolCallMessage,
    )

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
    answers: Sequence[TextAnswer],
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
