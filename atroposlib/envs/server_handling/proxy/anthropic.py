"""Anthropic's Messages protocol: requests to chat requests, chat answers to Messages and events.

POST /messages               answer, whole or as events
POST /messages/count_tokens  number of tokens in the prompt of a request

Request:
    user       text        ─► a user message; adjacent ones are joined
               tool_result ─► a tool message
    assistant  thinking    ┐
               text        ├─ one SentTurn
               tool_use    ┘

Answer:
    thinking ─► thinking block, its signature identifies the turn
    text     ─► text block
    calls    ─► tool_use blocks, each with the id of the chat answer's call

Stream:
    message_start, ping
      per block   content_block_start
                  content_block_delta ...   text_delta | input_json_delta
                                            | thinking_delta ... signature_delta
                  content_block_stop
    message_delta, message_stop

State: with a `thread`, the session stores the conversation and clients send only new messages.
    {"thread": {"type": "create"}}                               stored under the Message's id
    {"thread": {"type": "continue", "previous_message_id": ID}}  continues after that Message
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse, Response

from atroposlib.envs.server_handling.proxy.exchange import (
    Dialect,
    Event,
    Exchange,
    Route,
    stream_events,
)
from atroposlib.envs.server_handling.proxy.history import (
    SHARED_OPTIONS,
    Bounded,
    ChatMessage,
    GivenTurns,
    SentTurn,
    ShownAnswer,
    answer_turn,
    chat_request,
    joined_text,
    list_at,
    new_id,
    object_at,
    pieces,
    read_fields,
    shared_options,
    text_at,
    whole_turn,
)
from atroposlib.envs.server_handling.proxy.refusals import ProxyRefusal, refuse
from atroposlib.envs.server_handling.proxy.requests import (
    LARGEST_LIMIT,
    MOST_STOPS,
    Objects,
    inner_names,
    unsupported_names,
)
from atroposlib.errors import ContextOverflowError

_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_TOOL_FIELDS = ("type", "name", "description", "input_schema", "strict", "cache_control")
_THINKING_KINDS = ("enabled", "adaptive", "between_tools")
_Stop = Annotated[str, Field(min_length=1)]


FieldsT = TypeVar("FieldsT", bound="CountFields")

THREAD_NOT_FOUND = "thread_not_found"
"""Error code after which clients send the whole conversation again."""

_MAX_STORED = 1024

Block = dict[str, Any]

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_ERROR_CODES = frozenset({THREAD_NOT_FOUND})

Fields = dict[str, Any]

_TEXT = ("text",)
_ROLES = ("user", "assistant", "system")

_NAME = "anthropic"


class ThreadField(BaseModel):
    """Requests that the conversation is stored, or continues a stored one."""

    type: Literal["create", "continue"]
    previous_message_id: str | None = None
    """The Message to continue after; required for `continue`."""


class CountFields(BaseModel):
    """Fields of a request that determine the prompt."""

    model_config = ConfigDict(extra="ignore")

    messages: list[Any] = Field(min_length=1)
    system: Any = None
    """Text or text blocks; parsed by `read_messages`."""
    tools: Objects | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    thread: ThreadField | None = None

    @property
    def splits_thinking(self) -> bool:
        return (self.thinking or {}).get("type") in _THINKING_KINDS

    @property
    def omits_thinking(self) -> bool:
        """Whether thinking blocks contain only their signature."""
        return (self.thinking or {}).get("display") == "omitted"


class MessagesFields(CountFields):
    """Supported fields of a Messages request; other fields are ignored."""

    max_tokens: int = Field(ge=1, le=LARGEST_LIMIT)
    stop_sequences: list[_Stop] | None = Field(default=None, max_length=MOST_STOPS)
    stream: bool | None = None


def read_request(body: Mapping[str, Any]) -> MessagesFields:
    """Return the fields of a request; refuses malformed requests and MCP servers."""
    if body.get("mcp_servers"):
        refuse("mcp_servers", "not supported: only tools of the agent's own")
    return _read(MessagesFields, body)


def _read(model: type[FieldsT], body: Mapping[str, Any]) -> FieldsT:
    fields = read_fields(model, body)
    kinds = (*_THINKING_KINDS, "disabled")
    if fields.thinking is not None and fields.thinking.get("type") not in kinds:
        message = f"expected one of {', '.join(kinds)}; got {fields.thinking.get('type')!r}"
        refuse("thinking.type", message)
    return fields


def ignored_fields(fields: CountFields, body: Mapping[str, Any]) -> list[str]:
    """Return the names of unsupported fields of a request, nested ones as `thinking.budget`."""
    known = {*MessagesFields.model_fields, "mcp_servers", "model", *SHARED_OPTIONS}
    names = unsupported_names(body, known)
    names += inner_names("thinking", fields.thinking, known=("type", "display"))
    names += inner_names("output_config", fields.output_config, known=("format",))
    for tool in fields.tools or ():
        is_called_directly = tool.get("allowed_callers") == ["direct"]
        parts = (*_TOOL_FIELDS, *(["allowed_callers"] if is_called_directly else []))
        names += inner_names("tools", tool, known=parts)
    blocks = (
        block
        for message in fields.messages
        if isinstance(message, Mapping) and isinstance(message.get("content"), list)
        for block in message["content"]
    )
    if any(isinstance(block, Mapping) and block.get("is_error") for block in blocks):
        names.append("tool_result.is_error")
    return names


def chat_options(fields: CountFields, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chat request without its messages."""
    options = shared_options(body)
    if isinstance(fields, MessagesFields):
        options["max_tokens"] = fields.max_tokens
        if fields.stop_sequences:
            options["stop"] = fields.stop_sequences
    if fields.tools:
        options["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(fields.tools)]
    if fields.tool_choice is not None:
        options["tool_choice"] = _tool_choice(fields.tool_choice)
        if fields.tool_choice.get("disable_parallel_tool_use") is True:
            options["parallel_tool_calls"] = False
    response_format = _response_format((fields.output_config or {}).get("format"))
    if response_format is not None:
        options["response_format"] = response_format
    return options


def _tool(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
    kind = tool.get("type") or "custom"
    if kind != "custom":
        refuse(path, f"tools of type {kind!r} are not supported: only tools of the agent's own")
    function: dict[str, Any] = {"name": text_at(tool.get("name"), f"{path}.name")}
    for field in ("description", "strict"):
        if tool.get(field) is not None:
            function[field] = tool[field]
    function["parameters"] = dict(object_at(tool.get("input_schema"), f"{path}.input_schema"))
    return {"type": "function", "function": function}


def _tool_choice(choice: Mapping[str, Any]) -> Any:
    kind = text_at(choice.get("type"), "tool_choice.type")
    if kind == "tool":
        name = text_at(choice.get("name"), "tool_choice.name")
        return {"type": "function", "function": {"name": name}}
    if kind not in _TOOL_CHOICES:
        refuse(
            "tool_choice.type",
            f"expected one of {', '.join([*_TOOL_CHOICES, 'tool'])}; got {kind!r}",
        )
    return _TOOL_CHOICES[kind]


def _response_format(output_format: Any) -> dict[str, Any] | None:
    if output_format is None:
        return None
    wanted = object_at(output_format, "output_config.format")
    if wanted.get("type") != "json_schema":
        refuse("output_config.format", f"type {wanted.get('type')!r} is not supported")
    schema = object_at(wanted.get("schema"), "output_config.format.schema")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}


@dataclass(frozen=True)
class StoredConversation:
    """A conversation up to and including one Message."""

    messages: Sequence[ChatMessage] = ()
    """Chat messages, including the system message."""
    tools: list[dict[str, Any]] | None = None
    """Tools as the client defined them; requests that continue leave them out."""


class MessagesState:
    """State of one session for the Messages protocol."""

    def __init__(self) -> None:
        self.turns = GivenTurns()
        self.stored: Bounded[str, StoredConversation] = Bounded(_MAX_STORED)

    def continued(self, fields: CountFields) -> StoredConversation:
        """Return the conversation a request continues, empty for a new one; 404 if unknown."""
        if fields.thread is None or fields.thread.type == "create":
            return StoredConversation()
        message_id = fields.thread.previous_message_id
        if message_id is None:
            refuse("thread.previous_message_id", "expected the id of a Message, got nothing")
        stored = self.stored.recall(message_id)
        if stored is None:
            raise ProxyRefusal(
                f"this session has no stored conversation that ends with {message_id!r}; send the "
                "whole conversation",
                status=404,
                code=THREAD_NOT_FOUND,
            )
        return stored


def content_blocks(answer: ShownAnswer, *, omits_thinking: bool = False) -> list[Block]:
    """Return the content of an answer: thinking, text, then calls; empty for an empty answer.

    `omits_thinking` leaves thinking blocks empty except for their signature.
    """
    blocks: list[Block] = []
    if answer.thinking is not None:
        shown = "" if omits_thinking else answer.thinking
        blocks.append({"type": "thinking", "thinking": shown, "signature": new_id("sig")})
    if answer.text.strip() or (answer.text and not answer.calls and not blocks):
        blocks.append({"type": "text", "text": answer.text})
    for call in answer.calls:
        arguments = tool_input(call.arguments)
        blocks.append(
            {"type": "tool_use", "id": call.call_id, "name": call.name, "input": arguments}
        )
    return blocks


def tool_input(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call as an object; other text is wrapped under `arguments`."""
    try:
        value = json.loads(arguments or "{}", strict=False)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


def message_object(
    answer: ShownAnswer, content: Sequence[Block], *, model: str, fills_context: bool = False
) -> dict[str, Any]:
    """Return the Message of an answer with these content blocks.

    With `fills_context`, only the context limited the length of the answer.
    """
    stop_reason = _STOP_REASONS.get(answer.finish_reason, "end_turn")
    if fills_context and stop_reason == "max_tokens":
        stop_reason = "model_context_window_exceeded"
    was_stopped = answer.stop_sequence is not None and stop_reason == "end_turn"
    return {
        "id": new_id("msg"),
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": list(content),
        "stop_reason": "stop_sequence" if was_stopped else stop_reason,
        "stop_sequence": answer.stop_sequence if was_stopped else None,
        "usage": {
            "input_tokens": answer.num_prompt_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": answer.num_completion_tokens,
            "output_tokens_details": {"thinking_tokens": answer.num_thinking_tokens},
        },
    }


def anthropic_model_list(model_name: str, created: float) -> dict[str, Any]:
    """Return Anthropic's model list with the single model."""
    return {
        "data": [anthropic_model_card(model_name, created)],
        "first_id": model_name,
        "last_id": model_name,
        "has_more": False,
    }


def anthropic_model_card(model_name: str, created: float) -> dict[str, Any]:
    """Return Anthropic's description of a model; `created` in seconds since the epoch."""
    at = datetime.fromtimestamp(int(created), tz=timezone.utc)
    return {
        "type": "model",
        "id": model_name,
        "display_name": model_name,
        "created_at": at.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
    }


def error_body(refusal: ProxyRefusal) -> dict[str, Any]:
    """Return `{"type": "error", "error": {"type", "message"}}` in Anthropic's vocabulary.

    If clients recognize the code, `error` has `details` with an `error_code`.
    """
    fallback = "api_error" if refusal.status >= 500 else "invalid_request_error"
    kind = _ERROR_TYPES.get(refusal.status, fallback)
    error: dict[str, Any] = {"type": kind, "message": str(refusal)}
    if refusal.code in _ERROR_CODES:
        error["details"] = {"error_code": refusal.code}
    return {"type": "error", "error": error}


def message_events(message: Mapping[str, Any], answer: ShownAnswer) -> Iterator[Fields]:
    """Yield the events of a message; arguments of calls are streamed unchanged from the answer."""
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
    """Return the empty block that opens a content block, and the deltas that fill it."""
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


def read_messages(messages: list[Any], system: Any) -> list[ChatMessage | SentTurn]:
    """Return the entries of a request's `system` and `messages`.

    Raises:
        ProxyRefusal: a block cannot be given to a model that reads text and calls tools.
    """
    entries: list[ChatMessage | SentTurn] = []
    instructions = joined_text(system, "system", kinds=_TEXT)
    if instructions:
        entries.append({"role": "system", "content": instructions})
    for i, value in enumerate(messages):
        path = f"messages[{i}]"
        message = object_at(value, path)
        role, content = message.get("role"), message.get("content")
        if role == "user":
            _add_user(entries, content, f"{path}.content")
        elif role == "assistant":
            entries.append(_assistant_turn(content, f"{path}.content"))
        elif role == "system":
            text = joined_text(content, f"{path}.content", kinds=_TEXT)
            entries.append({"role": "system", "content": text})
        else:
            refuse(f"{path}.role", f"expected one of {', '.join(_ROLES)}; got {role!r}")
    return entries


def _add_user(entries: list[ChatMessage | SentTurn], content: Any, path: str) -> None:
    if content in ("", []):
        refuse(path, "user messages must have non-empty content")
    if isinstance(content, str):
        _add_user_text(entries, content)
        return
    for i, entry in enumerate(list_at(content, path)):
        block = object_at(entry, f"{path}[{i}]")
        if block.get("type") == "tool_result":
            entries.append(_tool_message(block, f"{path}[{i}]"))
        else:
            _add_user_text(entries, _block_text(block, f"{path}[{i}]"))


def _add_user_text(entries: list[ChatMessage | SentTurn], text: str) -> None:
    """Add text to the user's turn; adjacent messages are joined, as templates expect one."""
    last = entries[-1] if entries else None
    if isinstance(last, Mapping) and last["role"] == "user":
        entries[-1] = {"role": "user", "content": f"{last['content']}\n{text}"}
    else:
        entries.append({"role": "user", "content": text})


def _tool_message(block: Mapping[str, Any], path: str) -> ChatMessage:
    return {
        "role": "tool",
        "tool_call_id": text_at(block.get("tool_use_id"), f"{path}.tool_use_id"),
        "content": joined_text(block.get("content"), f"{path}.content", kinds=_TEXT),
    }


def _assistant_turn(content: Any, path: str) -> SentTurn:
    if isinstance(content, str):
        return SentTurn(content)
    texts: list[str] = []
    thinking: list[str] = []
    signatures: list[str] = []
    calls: list[ChatMessage] = []
    for i, entry in enumerate(list_at(content, path)):
        place = f"{path}[{i}]"
        block = object_at(entry, place)
        kind = block.get("type")
        if kind == "tool_use":
            calls.append(_call_of(block, place))
        elif kind == "thinking":
            thinking.append(text_at(block.get("thinking"), f"{place}.thinking"))
            signatures.append(text_at(block.get("signature", ""), f"{place}.signature"))
        elif kind != "redacted_thinking":  # encrypted by another model's provider
            texts.append(_block_text(block, place))
    return SentTurn("".join(texts), tuple(signatures), tuple(calls), "\n".join(thinking).strip())


def _block_text(block: Mapping[str, Any], path: str) -> str:
    if block.get("type") != "text":
        refuse(
            path, f"blocks of type {block.get('type')!r} are not supported: the model reads text"
        )
    return text_at(block.get("text"), f"{path}.text")


def _call_of(block: Mapping[str, Any], path: str) -> ChatMessage:
    arguments = json.dumps(object_at(block.get("input"), f"{path}.input"), ensure_ascii=False)
    function = {"name": text_at(block.get("name"), f"{path}.name"), "arguments": arguments}
    return {"id": text_at(block.get("id"), f"{path}.id"), "type": "function", "function": function}


async def create_message(exchange: Exchange) -> Response:
    """Answer a request with a Message, or with its events if `stream` is set."""
    state = _state_of(exchange)
    fields = read_request(exchange.body)
    prompt = _prompt(fields, exchange)
    exchange.ignored.update(ignored_fields(fields, exchange.body))
    answer, fills_context = await _answer(fields, prompt.request, exchange)
    if "parallel_tool_calls" in exchange.ignored:
        exchange.ignored.remove("parallel_tool_calls")
        exchange.ignored.add("tool_choice.disable_parallel_tool_use")
    content = content_blocks(answer, omits_thinking=fields.omits_thinking)
    signatures = [block["signature"] for block in content if block["type"] == "thinking"]
    turn, before = whole_turn(answer.as_turn, prompt.conversation)
    state.turns.remember(turn, ids=signatures, conversation=before)
    model = exchange.session.model_name
    message = message_object(answer, content, model=model, fills_context=fills_context)
    if fields.thread is not None:
        messages = [*before, turn.message]
        state.stored.keep(message["id"], StoredConversation(messages, prompt.tools))
    if not fields.stream:
        return JSONResponse(message)
    events = message_events(message, answer)
    return stream_events(Event(event, event["type"]) for event in events)


async def count_tokens(exchange: Exchange) -> Response:
    """Return the number of tokens in the prompt of a request."""
    fields = _read(CountFields, exchange.body)
    prompt = _prompt(fields, exchange)
    exchange.ignored.update(ignored_fields(fields, exchange.body))
    return JSONResponse({"input_tokens": len(exchange.render(prompt.request).token_ids)})


class _Prompt(NamedTuple):
    """A Messages request converted to a chat request."""

    request: dict[str, Any]
    conversation: list[ChatMessage]
    """Messages before any are joined."""
    tools: list[dict[str, Any]] | None
    """Tools as the client defined them, in this request or in the continued thread."""


def _state_of(exchange: Exchange) -> MessagesState:
    state: MessagesState = exchange.session.dialect_state.setdefault(_NAME, MessagesState())
    return state


async def _answer(
    fields: CountFields, request: dict[str, Any], exchange: Exchange
) -> tuple[ShownAnswer, bool]:
    """Answer a request; also return whether only the context limited the answer.

    Clients must give a limit and often give a large one. If it does not fit after the prompt, it is
    ignored, as Anthropic does; a prompt that does not fit is refused.
    """
    splits = fields.splits_thinking
    try:
        return await answer_turn(exchange, request, splits_thinking=splits), False
    except ContextOverflowError:
        unlimited = {**request, "max_tokens": None}
        return await answer_turn(exchange, unlimited, splits_thinking=splits), True


def _prompt(fields: CountFields, exchange: Exchange) -> _Prompt:
    state = _state_of(exchange)
    stored = state.continued(fields)
    tools = stored.tools if fields.tools is None else fields.tools
    entries = read_messages(fields.messages, fields.system)
    conversation = state.turns.restore(entries, stored.messages)
    options = chat_options(fields.model_copy(update={"tools": tools}), exchange.body)
    request = chat_request(
        options, conversation, param="messages", continues_turns=not fields.splits_thinking
    )
    last = conversation[-1]
    text = last.get("content")
    if last["role"] == "assistant" and isinstance(text, str) and text != text.rstrip():
        refuse("messages", "final assistant content cannot end with trailing whitespace")
    return _Prompt(request, conversation, tools)


ANTHROPIC = Dialect(
    name=_NAME,
    routes=(
        Route("/messages", create_message),
        Route("/messages/count_tokens", count_tokens),
    ),
    error_body=error_body,
    version_header="anthropic-version",
)
