"""OpenAI's Responses protocol: requests to chat requests, chat answers to Responses and events.

POST /responses                  answer, whole or as events
POST /responses/input_tokens     number of tokens in the prompt of a request
GET, DELETE /responses/{id}      a stored response
GET /responses/{id}/input_items  the input of a stored response
POST /responses/{id}/cancel      refused: every response is answered on its own connection

Input:
    reasoning     ┐
    message       ├─ one SentTurn of the assistant
    function_call ┘
    function_call_output ── a tool message
    message of another role ── a chat message

Output:
    thinking ─► reasoning item      rs_...
    text     ─► message item        msg_...
    calls    ─► function_call items fc_..., each with the call_id of the chat answer

Stream:
    response.created, response.in_progress
      per item    response.output_item.added
        per part  response.content_part.added
                  response.output_text.delta ... response.output_text.done
                  response.content_part.done
                  (calls: response.function_call_arguments.delta ... .done)
                  response.output_item.done
    response.completed | response.incomplete

State: each session keeps its turns and the most recent stored responses.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    ChatMessage,
    GivenTurns,
    SentTurn,
    ShownAnswer,
    ShownCall,
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
)
from atroposlib.envs.server_handling.proxy.refusals import (
    ProxyRefusal,
    bad_request,
    openai_error_body,
    refuse,
)
from atroposlib.envs.server_handling.proxy.requests import (
    LARGEST_LIMIT,
    Objects,
    Texts,
    inner_names,
    unsupported_names,
)

_UNSUPPORTED = {
    "background": "a response is answered on its own connection",
    "conversation": "use previous_response_id, or send the history",
    "prompt": "prompt templates are kept by their provider",
    "top_logprobs": "the session's nodes have the logprobs of what was sampled",
}
_LOGPROBS = "message.output_text.logprobs"
_NAMESPACE = "namespace"
_PROVIDER_TOOLS = (
    "code_interpreter",
    "computer",
    "computer_use",
    "file_search",
    "image_generation",
    "local_shell",
    "web_search",
)
"""Tools that OpenAI's own models are trained to call. Versions have longer names, such as
`web_search_preview` and `computer_use_preview`."""
ENCRYPTED_REASONING = "reasoning.encrypted_content"
"""Entry of a request's `include` that requests an identifier in each reasoning item."""

_TOOL_MODES = ("none", "auto", "required")
_TOOL_FIELDS = ("type", "name", "description", "parameters", "strict")

Item = dict[str, Any]

_ID_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}
_MOST_LISTED = 100

Fields = dict[str, Any]

_TEXT_EVENT = {"output_text": "response.output_text", "reasoning_text": "response.reasoning_text"}

FindItem = Callable[[str], Mapping[str, Any] | None]

_INPUT_PARTS = ("input_text", "text", "output_text")
_OUTPUT_PARTS = ("output_text", "text", "refusal", "input_text")
_ROLES = {"user": "user", "system": "system", "developer": "system"}

_MAX_STORED = 1024

_NAME = "responses"


class ResponsesFields(BaseModel):
    """Supported fields of a Responses request; other fields are ignored."""

    model_config = ConfigDict(extra="ignore")

    input: Any = Field(default_factory=list)
    """Text or items; parsed by `read_input`."""
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, le=LARGEST_LIMIT)
    temperature: float | None = None
    top_p: float | None = None
    tools: Objects | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: Texts | None = None
    metadata: dict[str, Any] | None = None


def read_request(body: Mapping[str, Any]) -> ResponsesFields:
    """Return the fields of a request.

    Raises:
        ProxyRefusal: a field is malformed or not supported.
    """
    for name, remedy in _UNSUPPORTED.items():
        if body.get(name):
            refuse(name, f"not supported: {remedy}")
    fields = read_fields(ResponsesFields, body)
    if _LOGPROBS in (fields.include or ()):
        refuse("include", f"{_LOGPROBS} is not supported: {_UNSUPPORTED['top_logprobs']}")
    return fields


def chat_options(fields: ResponsesFields, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chat request without its messages.

    Without `max_output_tokens` a reply may fill the model's context.
    """
    options: dict[str, Any] = {**shared_options(body), "max_tokens": fields.max_output_tokens}
    if body.get("stop") is not None:
        options["stop"] = body["stop"]
    tools = [
        tool
        for i, entry in enumerate(fields.tools or ())
        if not _is_providers(entry)
        for tool in _tools(entry, f"tools[{i}]")
    ]
    if tools:
        options["tools"] = tools
    if fields.tool_choice is not None:
        options["tool_choice"] = _tool_choice(fields.tool_choice)
    if fields.parallel_tool_calls is not None:
        options["parallel_tool_calls"] = fields.parallel_tool_calls
    response_format = _response_format((fields.text or {}).get("format"))
    if response_format is not None:
        options["response_format"] = response_format
    return options


def ignored_fields(fields: ResponsesFields, body: Mapping[str, Any]) -> list[str]:
    """Return the names of unsupported fields of a request, nested ones as `reasoning.effort`."""
    known = {*ResponsesFields.model_fields, *_UNSUPPORTED, *SHARED_OPTIONS}
    names = unsupported_names(body, known | {"model", "stop", "stream_options"})
    names += inner_names("stream_options", body.get("stream_options"), known=())
    names += inner_names("reasoning", fields.reasoning, known=())
    names += inner_names("text", fields.text, known=("format",))
    for tool in fields.tools or ():
        if _is_providers(tool):
            names.append(f"tools.{tool['type']}")
            continue
        for entry in tool["tools"] if tool.get("type") == _NAMESPACE else (tool,):
            names += inner_names("tools", entry, known=_TOOL_FIELDS)
    if set(fields.include or ()) - {ENCRYPTED_REASONING}:
        names.append("include")
    return names


def flat_name(name: str, namespace: Any) -> str:
    """Return the name that the model sees for a function of a namespace."""
    if not isinstance(namespace, str) or not namespace:
        return name
    return f"{namespace.rstrip('_')}__{name}"


def namespaces_of(fields: ResponsesFields) -> dict[str, tuple[str, str]]:
    """Return namespace and name of each function in a namespace, by its `flat_name`."""
    return {
        flat_name(tool["name"], space["name"]): (space["name"], tool["name"])
        for space in fields.tools or ()
        if space.get("type") == _NAMESPACE
        for tool in space["tools"]
    }


def _is_providers(tool: Mapping[str, Any]) -> bool:
    """Whether a tool runs at a provider only."""
    kind = str(tool.get("type"))
    return any(kind == name or kind.startswith(f"{name}_") for name in _PROVIDER_TOOLS)


def _tools(tool: Mapping[str, Any], path: str) -> list[dict[str, Any]]:
    """Return a tool, or each function of a namespace, in the format of the chat APIs."""
    if tool.get("type") != _NAMESPACE:
        return [_tool(tool, path)]
    namespace = text_at(tool.get("name"), f"{path}.name")
    about = tool.get("description")
    found = []
    for i, entry in enumerate(list_at(tool.get("tools"), f"{path}.tools")):
        inner = _tool(object_at(entry, f"{path}.tools[{i}]"), f"{path}.tools[{i}]")
        function = inner["function"]
        function["name"] = flat_name(function["name"], namespace)
        descriptions = [text for text in (about, function.get("description")) if text]
        if descriptions:
            function["description"] = "\n".join(descriptions)
        found.append(inner)
    return found


def _tool(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind != "function":
        refuse(path, f"tools of type {kind!r} are not supported: only functions of the agent's own")
    function = {"name": text_at(tool.get("name"), f"{path}.name")}
    for name in ("description", "parameters", "strict"):
        if tool.get(name) is not None:
            function[name] = tool[name]
    object_at(function.get("parameters", {}), f"{path}.parameters")
    return {"type": "function", "function": function}


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, str):
        if choice not in _TOOL_MODES:
            refuse("tool_choice", f"expected one of {', '.join(_TOOL_MODES)}; got {choice!r}")
        return choice
    wanted = object_at(choice, "tool_choice")
    if wanted.get("type") == "allowed_tools":
        mode = text_at(wanted.get("mode"), "tool_choice.mode")
        chosen = [
            _tool_choice(object_at(tool, f"tool_choice.tools[{i}]"))
            for i, tool in enumerate(list_at(wanted.get("tools"), "tool_choice.tools"))
        ]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": chosen}}
    if wanted.get("type") != "function":
        refuse("tool_choice", f"type {wanted.get('type')!r} is not supported")
    name = text_at(wanted.get("name"), "tool_choice.name")
    return {"type": "function", "function": {"name": flat_name(name, wanted.get("namespace"))}}


def _response_format(text_format: Any) -> dict[str, Any] | None:
    if text_format is None:
        return None
    wanted = object_at(text_format, "text.format")
    kind = wanted.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind != "json_schema":
        refuse("text.format", f"type {kind!r} is not supported")
    schema = {"schema": object_at(wanted.get("schema"), "text.format.schema")}
    for name in ("name", "description", "strict"):
        if wanted.get(name) is not None:
            schema[name] = wanted[name]
    return {"type": "json_schema", "json_schema": schema}


def output_items(
    answer: ShownAnswer,
    *,
    include: Sequence[str] = (),
    namespaces: Mapping[str, tuple[str, str]] | None = None,
) -> list[Item]:
    """Return the output items of an answer: thinking, text, then calls.

    An empty answer becomes an empty message. If `include` requests it, the `encrypted_content` of a
    reasoning item identifies the turn within this session. `namespaces` is as returned by
    `namespaces_of`.
    """
    status = "incomplete" if answer.finish_reason == "length" else "completed"
    items: list[Item] = []
    if answer.thinking is not None:
        handle = new_id("enc") if ENCRYPTED_REASONING in include else None
        items.append(_reasoning_item(answer.thinking, handle, status))
    if answer.text.strip() or not (answer.calls or items):
        part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
        items.append(
            {
                "id": new_id("msg"),
                "type": "message",
                "role": "assistant",
                "status": status,
                "content": [part],
            }
        )
    return [*items, *(_call_item(call, (namespaces or {}).get(call.name)) for call in answer.calls)]


def in_progress(
    fields: ResponsesFields, *, response_id: str, created_at: float, model: str
) -> dict[str, Any]:
    """Return the Response object of an unanswered request; `created_at` in seconds since 1970."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_at,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "metadata": fields.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": fields.previous_response_id,
        "reasoning": {"effort": None, "summary": None, **(fields.reasoning or {})},
        "store": fields.store is not False,
        "temperature": 1.0 if fields.temperature is None else fields.temperature,
        "text": {"format": {"type": "text"}, **(fields.text or {})},
        "tool_choice": fields.tool_choice or "auto",
        "tools": fields.tools or [],
        "top_p": 1.0 if fields.top_p is None else fields.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def finished(
    started: Mapping[str, Any], answer: ShownAnswer, output: Sequence[Item], *, now: float
) -> dict[str, Any]:
    """Return the Response object of an answered request; `now` in seconds since 1970."""
    reason = {"length": "max_output_tokens", "content_filter": "content_filter"}.get(
        answer.finish_reason
    )
    return {
        **started,
        "status": "incomplete" if reason else "completed",
        "completed_at": None if reason else now,
        "incomplete_details": {"reason": reason} if reason else None,
        "output": list(output),
        "usage": _usage(answer),
    }


def listed_items(sent: Any) -> list[Item]:
    """Return a request's input as a list of items, each with an id."""
    entries = [{"role": "user", "content": sent}] if isinstance(sent, str) else sent
    return [_listed_item(entry) for entry in entries]


def page_of(items: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return one page of a list of items.

    `query` may have `order` (`desc` unless `asc`), `limit` (1 to 100, else 20), and `after`, an id.
    """
    ordered = list(items) if query.get("order") == "asc" else list(items)[::-1]
    after = query.get("after")
    if after is not None:
        places = [i for i, item in enumerate(ordered) if item["id"] == after]
        if not places:
            refuse("after", f"there is no item {after!r}")
        ordered = ordered[places[0] + 1 :]
    limit = query.get("limit", "20")
    if not limit.isdecimal() or not 1 <= int(limit) <= _MOST_LISTED:
        refuse("limit", f"expected an integer from 1 to {_MOST_LISTED}, got {limit!r}")
    page = ordered[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(ordered) > len(page),
    }


def _listed_item(entry: Mapping[str, Any]) -> Item:
    kind = entry.get("type", "message")
    item = {**entry, "type": kind, "id": entry.get("id") or new_id(_ID_PREFIXES.get(kind, "item"))}
    if kind == "message" and isinstance(entry.get("content"), str):
        part = "output_text" if entry.get("role") == "assistant" else "input_text"
        item["content"] = [{"type": part, "text": entry["content"]}]
    if kind in _ID_PREFIXES:
        item.setdefault("status", "completed")
    return item


def _reasoning_item(thinking: str, handle: str | None, status: str) -> Item:
    return {
        "id": new_id("rs"),
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": thinking}],
        "encrypted_content": handle,
        "status": status,
    }


def _call_item(call: ShownCall, place: tuple[str, str] | None) -> Item:
    namespace, name = place or (None, call.name)
    return {
        **({} if namespace is None else {"namespace": namespace}),
        "id": new_id("fc"),
        "type": "function_call",
        "call_id": call.call_id,
        "name": name,
        "arguments": call.arguments,
        "status": "completed",
    }


def _usage(answer: ShownAnswer) -> Mapping[str, Any]:
    return {
        "input_tokens": answer.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": answer.num_completion_tokens,
        "output_tokens_details": {"reasoning_tokens": answer.num_thinking_tokens},
        "total_tokens": answer.num_prompt_tokens + answer.num_completion_tokens,
    }


def response_events(
    started: Mapping[str, Any], response: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield the events of a response, numbered from 0 in `sequence_number`."""
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


def read_input(value: Any, find_item: FindItem) -> list[ChatMessage | SentTurn]:
    """Return the entries of a request's `input`; text becomes a user message.

    `find_item` returns an earlier output item of the session by its id.

    Raises:
        ProxyRefusal: an item cannot be given to a model that reads text and calls functions.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    reader = _Reader()
    for i, entry in enumerate(list_at(value, "input")):
        path = f"input[{i}]"
        item = object_at(entry, path)
        if item.get("type") == "item_reference":
            item = _referenced(item, path, find_item)
        reader.read(item, path)
    return reader.finish()


def _some_text(item: Mapping[str, Any], field: str, path: str) -> str:
    if item.get(field) is None:
        refuse(f"{path}.{field}", "expected text or a list, got nothing")
    return joined_text(item[field], f"{path}.{field}", kinds=_INPUT_PARTS)


class _Reader:
    """Collects the items of one assistant turn until an item of another role follows."""

    def __init__(self) -> None:
        self._entries: list[ChatMessage | SentTurn] = []
        self._ids: list[str] = []
        self._texts: list[str] = []
        self._calls: list[ChatMessage] = []
        self._thinking: list[str] = []

    def read(self, item: Mapping[str, Any], path: str) -> None:
        kind = item.get("type", "message")
        if kind == "reasoning":
            self._read_reasoning(item, path)
        elif kind == "function_call":
            self._note_id(item)
            self._calls.append(_call_of(item, path))
        elif kind == "message" and item.get("role") == "assistant":
            self._read_assistant(item, path)
        elif kind in ("message", "function_call_output"):
            self._end_turn()
            message = _message_of if kind == "message" else _result_of
            self._entries.append(message(item, path))
        else:
            refuse(path, f"items of type {kind!r} are not supported")

    def finish(self) -> list[ChatMessage | SentTurn]:
        self._end_turn()
        return self._entries

    def _read_reasoning(self, item: Mapping[str, Any], path: str) -> None:
        parts = joined_text(item.get("content"), f"{path}.content", kinds=("reasoning_text",))
        summary = joined_text(item.get("summary"), f"{path}.summary", kinds=("summary_text",))
        thinking = parts or summary
        is_repeated = thinking.split() in [known.split() for known in self._thinking]
        if self._texts or self._calls or (self._thinking and not is_repeated):
            self._end_turn()
        self._note_id(item)
        handle = item.get("encrypted_content")
        if isinstance(handle, str):
            self._ids.append(handle)
        if not (self._thinking and is_repeated):
            self._thinking.append(thinking)

    def _read_assistant(self, item: Mapping[str, Any], path: str) -> None:
        if self._texts or self._calls:
            self._end_turn()
        self._note_id(item)
        content = item.get("content")
        self._texts.append(
            joined_text(content, f"{path}.content", kinds=_OUTPUT_PARTS, separator="")
        )

    def _note_id(self, item: Mapping[str, Any]) -> None:
        if isinstance(item.get("id"), str):
            self._ids.append(item["id"])

    def _end_turn(self) -> None:
        if self._texts or self._calls or self._thinking:
            self._entries.append(
                SentTurn(
                    text="".join(self._texts),
                    ids=tuple(self._ids),
                    calls=tuple(self._calls),
                    thinking="\n".join(filter(None, self._thinking)),
                )
            )
        self._ids, self._texts, self._calls, self._thinking = [], [], [], []


def _referenced(reference: Mapping[str, Any], path: str, find_item: FindItem) -> Mapping[str, Any]:
    item_id = text_at(reference.get("id"), f"{path}.id")
    item = find_item(item_id)
    if item is None:
        refuse(f"{path}.id", f"no stored response of this session has an item {item_id!r}")
    return item


def _message_of(item: Mapping[str, Any], path: str) -> ChatMessage:
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        refuse(f"{path}.role", f"expected one of {', '.join([*_ROLES, 'assistant'])}; got {role!r}")
    return {"role": _ROLES[role], "content": _some_text(item, "content", path)}


def _result_of(item: Mapping[str, Any], path: str) -> ChatMessage:
    return {
        "role": "tool",
        "tool_call_id": text_at(item.get("call_id"), f"{path}.call_id"),
        "content": _some_text(item, "output", path),
    }


def _call_of(item: Mapping[str, Any], path: str) -> ChatMessage:
    function = {
        "name": flat_name(text_at(item.get("name"), f"{path}.name"), item.get("namespace")),
        "arguments": text_at(item.get("arguments"), f"{path}.arguments"),
    }
    call_id = text_at(item.get("call_id"), f"{path}.call_id")
    return {"id": call_id, "type": "function", "function": function}


@dataclass(frozen=True)
class StoredResponse:
    """A response and the conversation it ends."""

    response: Mapping[str, Any]
    messages: Sequence[ChatMessage]
    """Chat messages up to and including the answer, without the request's instructions."""
    input_items: Sequence[Mapping[str, Any]] = ()
    """Items of the request's input, each with an id."""


class ResponsesState:
    """State of one session for the Responses protocol: its turns and the latest responses."""

    def __init__(self, *, max_stored: int = _MAX_STORED) -> None:
        self.turns = GivenTurns()
        self.max_stored = max_stored
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._items: dict[str, Mapping[str, Any]] = {}

    def keep(self, stored: StoredResponse) -> None:
        self._stored[stored.response["id"]] = stored
        self._items.update({item["id"]: item for item in stored.response["output"]})
        while len(self._stored) > self.max_stored:
            self.forget(next(iter(self._stored)))

    def get(self, response_id: str) -> StoredResponse:
        """Return a stored response; raises 404 for an unknown one."""
        try:
            return self._stored[response_id]
        except KeyError:
            raise ProxyRefusal(
                f"this session has no stored response with id {response_id!r}",
                status=404,
                code="response_not_found",
            ) from None

    def previous(self, response_id: str) -> StoredResponse:
        """Return the response a request continues; raises 400 for an unknown one."""
        if response_id not in self._stored:
            raise bad_request(
                f"this session has no stored response with id {response_id!r}; it may have been "
                "made with store=false, deleted, or be older than the ones kept",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        return self._stored[response_id]

    def find_item(self, item_id: str) -> Mapping[str, Any] | None:
        return self._items.get(item_id)

    def forget(self, response_id: str) -> None:
        """Delete a stored response; raises 404 for an unknown one."""
        for item in self.get(response_id).response["output"]:
            self._items.pop(item["id"], None)
        del self._stored[response_id]


async def create_response(exchange: Exchange) -> Response:
    """Answer a request with a Response object, or with its events if `stream` is set."""
    state = _state_of(exchange)
    fields = read_request(exchange.body)
    conversation = _conversation(fields, state)
    request = chat_request(
        chat_options(fields, exchange.body), _with_instructions(fields, conversation), param="input"
    )
    exchange.ignored.update(ignored_fields(fields, exchange.body))
    model = exchange.session.model_name
    started = in_progress(fields, response_id=new_id("resp"), created_at=time.time(), model=model)
    include = fields.include or ()
    splits_thinking = fields.reasoning is not None or ENCRYPTED_REASONING in include
    answer = await answer_turn(exchange, request, splits_thinking=splits_thinking)
    output = output_items(answer, include=include, namespaces=namespaces_of(fields))
    response = finished(started, answer, output, now=time.time())
    handles = [item.get("encrypted_content") for item in output]
    ids = [*(item["id"] for item in output), *filter(None, handles)]
    state.turns.remember(answer.as_turn, ids=ids, conversation=conversation)
    if fields.store is not False:
        items = listed_items(fields.input)
        state.keep(StoredResponse(response, [*conversation, answer.message], items))
    if not fields.stream:
        return JSONResponse(response)
    events = response_events(started, response)
    return stream_events(Event(event, event["type"]) for event in events)


async def count_input_tokens(exchange: Exchange) -> Response:
    """Return the number of tokens in the prompt of a request."""
    fields = read_request(exchange.body)
    exchange.ignored.update(ignored_fields(fields, exchange.body))
    messages = _with_instructions(fields, _conversation(fields, _state_of(exchange)))
    prompt = exchange.render(
        chat_request(chat_options(fields, exchange.body), messages, param="input")
    )
    num_tokens = len(prompt.token_ids)
    return JSONResponse({"object": "response.input_tokens", "input_tokens": num_tokens})


async def get_response(exchange: Exchange) -> Response:
    """Return a stored Response object; its events cannot be streamed again."""
    if exchange.query.get("stream") == "true":
        raise bad_request("only a response in the background can be streamed again", param="stream")
    stored = _state_of(exchange).get(exchange.path_params["response_id"])
    return JSONResponse(stored.response)


async def delete_response(exchange: Exchange) -> Response:
    """Delete a stored response; its recorded tokens are kept."""
    response_id = exchange.path_params["response_id"]
    _state_of(exchange).forget(response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


async def list_input_items(exchange: Exchange) -> Response:
    """Return a page of a stored response's input items, the latest first."""
    stored = _state_of(exchange).get(exchange.path_params["response_id"])
    return JSONResponse(page_of(stored.input_items, exchange.query))


async def cancel_response(exchange: Exchange) -> Response:
    """Refuse: only background responses can be cancelled, which are not supported."""
    _state_of(exchange).get(exchange.path_params["response_id"])
    raise bad_request("Cannot cancel a synchronous response.", code="invalid_request_error")


def _state_of(exchange: Exchange) -> ResponsesState:
    state: ResponsesState = exchange.session.dialect_state.setdefault(_NAME, ResponsesState())
    return state


def _conversation(fields: ResponsesFields, state: ResponsesState) -> list[ChatMessage]:
    """Return the chat messages of a request without its instructions, which do not carry over."""
    before = (
        state.previous(fields.previous_response_id).messages if fields.previous_response_id else ()
    )
    return state.turns.restore(read_input(fields.input, state.find_item), before)


def _with_instructions(
    fields: ResponsesFields, conversation: list[ChatMessage]
) -> list[ChatMessage]:
    if not fields.instructions:
        return conversation
    return [{"role": "system", "content": fields.instructions}, *conversation]


RESPONSES = Dialect(
    name=_NAME,
    routes=(
        Route("/responses", create_response),
        Route("/responses/input_tokens", count_input_tokens),
        Route("/responses/{response_id}", get_response, "GET"),
        Route("/responses/{response_id}", delete_response, "DELETE"),
        Route("/responses/{response_id}/input_items", list_input_items, "GET"),
        Route("/responses/{response_id}/cancel", cancel_response),
    ),
    error_body=openai_error_body,
)
