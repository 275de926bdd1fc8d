"""Shared base of the dialects: restore sampled turns in a client's history, and split answers.

A dialect shows a turn in its own shape: separate thinking, arguments as an object, texts cut at a
stop sequence. Clients send it back in that shape, often re-serialized. The model's next prompt must
hold the turn as it was sampled, so the session stores the original chat message of every turn:

    chat message --> ShownAnswer --> items or blocks with ids --> client
    client --> items or blocks, same ids --> SentTurn --> GivenTurns.restore --> chat message

A turn is identified by the id of a call, an item or a signature. A turn without ids, such as plain
text, is identified by its position: the same text after the same messages. Ignored differences are
whitespace around thoughts and text, spacing and key order in arguments, omitted or repeated
thinking, and text omitted before calls. A turn that the client changed otherwise, or removed calls
from, is used as it was sent.

The readers of untrusted JSON (`text_at`, `read_fields`, ...) raise refusals that name the field.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from atroposlib.envs.server_handling.chat_rendering import (
    THINKING_END,
    THINKING_START,
    calls_of,
    leading_systems_joined,
    normal_form,
    reply_forms,
)
from atroposlib.envs.server_handling.proxy.exchange import Exchange
from atroposlib.envs.server_handling.proxy.refusals import ProxyRefusal, refuse
from atroposlib.envs.server_handling.proxy.requests import (
    ENGINE_OPTIONS,
    NAMED_OPTIONS,
    ChatCompletionProxyRequest,
    Thought,
    split_thinking,
    with_thinking,
)

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")

ChatMessage = Mapping[str, Any]
Call = tuple[str, str, str]

_MAX_REMEMBERED = 8192

_DELTA_CHARACTERS = 48

FieldsT = TypeVar("FieldsT", bound=BaseModel)

SHARED_OPTIONS = (
    *(name for name in NAMED_OPTIONS if name not in ("n", "stop")),
    *sorted(ENGINE_OPTIONS - {"include_stop_str_in_output", "priority", "response_format"}),
)
"""Sampling options passed on unchanged; clients send some of them through `extra_body`."""


class Bounded(Generic[KeyT, ValueT]):
    """A mapping of up to `max_entries` values; the least recently used is dropped first."""

    def __init__(self, max_entries: int) -> None:
        self.max_entries = max_entries
        self._entries: OrderedDict[KeyT, ValueT] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def keep(self, key: KeyT, value: ValueT) -> None:
        self._entries[key] = value
        self._entries.move_to_end(key)
        while len(self._entries) > self.max_entries:
            self._entries.popitem(last=False)

    def recall(self, key: KeyT) -> ValueT | None:
        """Return the value of a key and mark it as used; None for an unknown key."""
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)


@dataclass(frozen=True)
class SentTurn:
    """One assistant turn as a client sent it back."""

    text: str
    ids: tuple[str, ...] = ()
    """Ids of the turn's items or blocks, without those of its calls."""
    calls: tuple[ChatMessage, ...] = ()
    thinking: str = ""

    def as_message(self) -> dict[str, Any]:
        """Return the turn as a chat message, built only from what the client sent."""
        content = with_thinking(self.thinking, self.text)
        if not self.calls:
            return {"role": "assistant", "content": content}
        calls = [dict(call) for call in self.calls]
        return {"role": "assistant", "content": content or None, "tool_calls": calls}


@dataclass(frozen=True)
class GivenTurn:
    """One assistant turn as it was returned to the client."""

    message: ChatMessage
    text: str
    """Part of it that was sent to the client as text."""

    @cached_property
    def calls(self) -> frozenset[Call]:
        return frozenset(calls_of(self.message.get("tool_calls")))

    @cached_property
    def forms(self) -> frozenset[str]:
        """Normalized forms in which a client may send its text back."""
        has_calls = bool(self.calls)
        whole = reply_forms(self.message.get("content") or "", has_calls=has_calls)
        return whole | reply_forms(self.text, has_calls=has_calls)

    def is_repeated_by(self, sent: SentTurn) -> bool:
        """Whether a sent turn with the same id repeats this one or some of its calls unchanged."""
        if bool(self.calls) != bool(sent.calls) or normal_form(sent.text) not in self.forms:
            return False
        return self.calls.issuperset(calls_of(sent.calls))


class GivenTurns:
    """The turns of one session.

    Args:
        max_remembered: Maximum number of ids, and of positions; the least recently used are
            dropped first.
    """

    def __init__(self, *, max_remembered: int = _MAX_REMEMBERED) -> None:
        self._by_id: Bounded[str, GivenTurn] = Bounded(max_remembered)
        self._by_place: Bounded[bytes, GivenTurn] = Bounded(max_remembered)

    def remember(
        self, turn: GivenTurn, *, ids: Iterable[str], conversation: Sequence[ChatMessage]
    ) -> None:
        """Store a turn under its ids and its calls' ids, or by position if it is only text."""
        for turn_id in [*ids, *(call_id for call_id, _, _ in turn.calls)]:
            self._by_id.keep(turn_id, turn)
        if not turn.calls and turn.text != turn.message.get("content"):
            place = _Conversation()
            place.extend(conversation)
            self._by_place.keep(place.key(turn.text), turn)

    def restore(
        self, entries: Sequence[ChatMessage | SentTurn], before: Sequence[ChatMessage] = ()
    ) -> list[ChatMessage]:
        """Return the chat messages of a history, with recognized turns as they were sampled.

        Clients may list each call of a turn followed by its result; such a turn becomes one message
        again. `before` are the preceding chat messages, restored earlier.
        """
        messages = list(before)
        conversation = _Conversation()
        num_read = index = 0
        while index < len(entries):
            entry = entries[index]
            index += 1
            if not isinstance(entry, SentTurn):
                messages.append(entry)
                continue
            if entry.calls:
                found = self._with_results(entries, index - 1)
                messages.extend(found.messages)
                index = found.end
                continue
            turn = self._turn_with_id_of(entry)
            if turn is None and self._by_place:
                conversation.extend(messages[num_read:])
                num_read = len(messages)
                turn = self._by_place.recall(conversation.key(entry.text))
                if turn is not None and not turn.is_repeated_by(entry):
                    turn = None
            messages.append(entry.as_message() if turn is None else turn.message)
        return messages

    def _with_results(self, entries: Sequence[ChatMessage | SentTurn], start: int) -> _Restored:
        """Return the turn at `start`, which calls tools, with results found between its calls."""
        first = entries[start]
        assert isinstance(first, SentTurn)
        alone = _Restored([first.as_message()], start + 1)
        turn = self._turn_with_id_of(first)
        if turn is None:
            return alone
        calls = set(calls_of(first.calls))
        results: list[ChatMessage] = []
        for index in range(start + 1, len(entries) + 1):
            if calls == turn.calls:
                return _Restored([turn.message, *results], index)
            entry = entries[index] if index < len(entries) else None
            if isinstance(entry, SentTurn) and self._turn_with_id_of(entry) is turn:
                calls.update(calls_of(entry.calls))
            elif isinstance(entry, Mapping) and entry["role"] == "tool":
                results.append(entry)
            else:
                break
        return alone

    def _turn_with_id_of(self, sent: SentTurn) -> GivenTurn | None:
        """Return the stored turn with one of the ids, unless the client changed it."""
        for turn_id in [*(str(call["id"]) for call in sent.calls), *sent.ids]:
            turn = self._by_id.recall(turn_id)
            if turn is not None and turn.is_repeated_by(sent):
                return turn
        return None


class _Restored(NamedTuple):
    """Chat messages built from some entries."""

    messages: list[ChatMessage]
    end: int


def whole_turn(
    turn: GivenTurn, conversation: Sequence[ChatMessage]
) -> tuple[GivenTurn, Sequence[ChatMessage]]:
    """Return a turn with the partial reply of its request prepended, and the messages before."""
    if not conversation or conversation[-1]["role"] != "assistant":
        return turn, conversation
    start = conversation[-1].get("content") or ""
    message = {**turn.message, "content": start + (turn.message.get("content") or "")}
    return GivenTurn(message, start + turn.text), conversation[:-1]


class _Conversation:
    """A running digest of messages, so that each is read once for any number of look-ups.

    It includes the calls of assistant messages and their text after the thinking, since clients may
    leave out thinking.
    """

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def extend(self, messages: Iterable[ChatMessage]) -> None:
        for message in messages:
            text = message.get("content") or ""
            calls = [call[1:] for call in calls_of(message.get("tool_calls"))]
            if message["role"] == "assistant":
                text = "" if calls else _without_thinking(text)
            head = [message["role"], len(text), calls]
            self._digest.update(json.dumps(head).encode())
            self._digest.update(_bytes_of(text))  # not as JSON: histories are long

    def key(self, text: str) -> bytes:
        digest = self._digest.copy()
        digest.update(_bytes_of(_without_thinking(text)))
        return digest.digest()


def _without_thinking(text: str) -> str:
    return normal_form(text.rpartition(THINKING_END)[2])


def _bytes_of(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


@dataclass(frozen=True)
class ShownCall:
    """One tool call of an answer."""

    call_id: str
    """Id by which its result refers to the call."""
    name: str
    arguments: str
    """JSON text as the model's format gave it."""


@dataclass(frozen=True)
class ShownAnswer:
    """One answer, split into the parts that dialects represent differently."""

    message: ChatMessage
    thinking: str | None
    """Thinking at its start; None without thinking, or if it was not requested separately."""
    text: str
    """Rest of its text, without the stop sequence that ended it."""
    calls: tuple[ShownCall, ...]
    finish_reason: str
    """`stop`, `length`, `tool_calls` or `content_filter`."""
    stop_sequence: str | None
    """Stop sequence that ended it; None without one."""
    num_prompt_tokens: int
    num_completion_tokens: int

    @property
    def num_thinking_tokens(self) -> int:
        """Estimated number of thinking tokens, from its share of the completion's characters."""
        content = self.message.get("content") or ""
        calls = sum(len(call.name) + len(call.arguments) for call in self.calls)
        share = len(self.thinking or "") / max(1, len(content) + calls)
        return min(self.num_completion_tokens, round(self.num_completion_tokens * share))

    @property
    def as_turn(self) -> GivenTurn:
        return GivenTurn(self.message, self.text)


def new_id(prefix: str) -> str:
    """Return an unguessable id such as `msg_3f...`."""
    return f"{prefix}_{secrets.token_hex(16)}"


def pieces(text: str) -> Iterable[str]:
    """Yield a text in the pieces that a stream sends."""
    for start in range(0, len(text), _DELTA_CHARACTERS):
        yield text[start : start + _DELTA_CHARACTERS]


def cut_at_stop(text: str, stops: str | Sequence[str] | None) -> tuple[str, str | None]:
    """Return the text before the first stop sequence in it, and that sequence.

    Engines report the tokens of the sequence, so the decoded text contains it.
    """
    wanted = [stops] if isinstance(stops, str) else stops or ()
    found = [(text.index(stop), stop) for stop in wanted if stop and stop in text]
    if not found:
        return text, None
    start, stop = min(found, key=lambda place: place[0])
    return text[:start], stop


def text_at(value: Any, path: str) -> str:
    """Return a string; refuses other types."""
    if not isinstance(value, str):
        refuse(path, f"expected text, got {_kind_of(value)}")
    return value


def list_at(value: Any, path: str) -> list[Any]:
    """Return a list; refuses other types."""
    if not isinstance(value, list):
        refuse(path, f"expected a list, got {_kind_of(value)}")
    return value


def object_at(value: Any, path: str) -> Mapping[str, Any]:
    """Return an object; refuses other types."""
    if not isinstance(value, Mapping):
        refuse(path, f"expected an object, got {_kind_of(value)}")
    return value


def joined_text(value: Any, path: str, *, kinds: Iterable[str], separator: str = "\n") -> str:
    """Return the text of a content: a string, a list of text parts, or None for an empty one.

    `kinds` are the accepted types of text parts, the recommended one first.

    Raises:
        ProxyRefusal: a part of another type, such as an image.
    """
    if value is None or isinstance(value, str):
        return value or ""
    known = tuple(kinds)
    texts = []
    for i, entry in enumerate(list_at(value, path)):
        part = object_at(entry, f"{path}[{i}]")
        kind = part.get("type")
        if kind not in known:
            refuse(
                f"{path}[{i}]",
                f"type {kind!r} is not supported: the model reads text; send {known[0]!r}",
            )
        texts.append(text_at(part.get("text", part.get("refusal")), f"{path}[{i}].text"))
    return separator.join(texts)


def read_fields(model: type[FieldsT], body: Mapping[str, Any]) -> FieldsT:
    """Return the fields of a body; the refusal of an invalid body names its first invalid field."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        refuse(_path_of(problem["loc"]), problem["msg"][:1].lower() + problem["msg"][1:])


def _path_of(location: Iterable[int | str]) -> str:
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path


def _kind_of(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean"}
    if value is None:
        return "nothing"
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else "a value")


def chat_request(
    options: Mapping[str, Any],
    messages: Sequence[ChatMessage],
    *,
    param: str,
    continues_turns: bool = False,
) -> dict[str, Any]:
    """Return the chat request of a conversation whose next turn is the assistant's.

    `param` is the name of the field with the messages; `continues_turns` allows an assistant text
    at the end, which is continued.

    Raises:
        ProxyRefusal: the last turn is the assistant's and cannot be continued.
    """
    if not messages:
        refuse(param, "nothing to answer; give at least one message")
    last = messages[-1]
    can_continue = continues_turns and not last.get("tool_calls")
    if last.get("role") == "assistant" and not can_continue:
        refuse(param, "the last turn is the assistant's; a turn can be answered, not continued")
    return {**options, "messages": leading_systems_joined(messages)}


async def answer_turn(
    exchange: Exchange, request: Mapping[str, Any], *, splits_thinking: bool
) -> ShownAnswer:
    """Answer a chat request of one choice; return the answer in parts."""
    completion = await exchange.complete_chat(request)
    choice = completion["choices"][0]
    message = choice["message"]
    thought = Thought(None, message.get("content") or "")
    if splits_thinking:
        thought = thought_of(exchange, request, choice)
    text, stop = cut_at_stop(thought.text, request.get("stop"))
    usage = completion["usage"]
    return ShownAnswer(
        message=message,
        thinking=thought.thinking or None,
        text=text,
        calls=tuple(
            ShownCall(str(call["id"]), call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls") or ()
        ),
        finish_reason=choice.get("finish_reason") or "stop",
        stop_sequence=stop,
        num_prompt_tokens=usage["prompt_tokens"],
        num_completion_tokens=usage["completion_tokens"],
    )


def thought_of(
    exchange: Exchange,
    request: Mapping[str, Any] | ChatCompletionProxyRequest,
    choice: Mapping[str, Any],
) -> Thought:
    """Return the thinking and the text of a choice.

    A truncated answer without tags consists of thinking if the prompt opened it.
    """
    content = choice["message"].get("content") or ""
    if choice["finish_reason"] == "length" and "think>" not in content:
        with suppress(ProxyRefusal):  # the session's server renders prompts itself
            if exchange.render(request).text.rstrip().endswith(THINKING_START):
                return Thought(content.strip(), "")
    return split_thinking(content)


def shared_options(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling options of a body that are set; the chat request checks their values."""
    return {name: body[name] for name in SHARED_OPTIONS if body.get(name) is not None}
