"""A Messages request as the options of a chat request; pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from atroposlib.envs.server_handling.proxy.dialects.chat_options import (
    SHARED_OPTIONS,
    shared_options,
)
from atroposlib.envs.server_handling.proxy.dialects.reading import (
    object_at,
    read_fields,
    refuse,
    text_at,
)
from atroposlib.envs.server_handling.proxy.request_models import LARGEST_LIMIT, MOST_STOPS
from atroposlib.envs.server_handling.proxy.sampling import inner_names, not_honoured

__all__ = [
    "CountFields",
    "MessagesFields",
    "chat_options",
    "ignored_fields",
    "read_count",
    "read_request",
]

_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_TOOL_FIELDS = ("type", "name", "description", "input_schema", "strict", "cache_control")
_THINKING_KINDS = ("enabled", "adaptive", "between_tools")
_Stop = Annotated[str, Field(min_length=1)]


FieldsT = TypeVar("FieldsT", bound="CountFields")


class ThreadField(BaseModel):
    """Asks to hold the conversation, or to go on with a held one."""

    type: Literal["create", "continue"]
    previous_message_id: str | None = None
    """The Message to go on from; a request that continues has it."""


class CountFields(BaseModel):
    """What of a request decides the prompt."""

    model_config = ConfigDict(extra="ignore")

    messages: list[Any] = Field(min_length=1)
    system: Any = None
    """Text or text blocks; read by `content_blocks`."""
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    thread: ThreadField | None = None

    @property
    def splits_thinking(self) -> bool:
        """Whether thinking is wanted in blocks of its own."""
        return (self.thinking or {}).get("type") in _THINKING_KINDS

    @property
    def omits_thinking(self) -> bool:
        """Whether the blocks shall carry their signature only."""
        return (self.thinking or {}).get("display") == "omitted"


class MessagesFields(CountFields):
    """What of a Messages request matters here; other fields are ignored."""

    max_tokens: int = Field(ge=1, le=LARGEST_LIMIT)
    stop_sequences: list[_Stop] | None = Field(default=None, max_length=MOST_STOPS)
    stream: bool | None = None


def read_request(body: Mapping[str, Any]) -> MessagesFields:
    """Return the fields of a request; refuses malformed ones, and tools kept elsewhere."""
    if body.get("mcp_servers"):
        refuse("mcp_servers", "not supported: only tools of the agent's own")
    return _read(MessagesFields, body)


def read_count(body: Mapping[str, Any]) -> CountFields:
    """Return the fields of a request to count tokens; refuses malformed ones."""
    return _read(CountFields, body)


def _read(model: type[FieldsT], body: Mapping[str, Any]) -> FieldsT:
    fields = read_fields(model, body)
    kinds = (*_THINKING_KINDS, "disabled")
    if fields.thinking is not None and fields.thinking.get("type") not in kinds:
        told = f"expected one of {', '.join(kinds)}; got {fields.thinking.get('type')!r}"
        refuse("thinking.type", told)
    return fields


def ignored_fields(fields: CountFields, body: Mapping[str, Any]) -> list[str]:
    """Return the names of what a request asks for and does not get; inner ones behind a dot."""
    known = {*MessagesFields.model_fields, "mcp_servers", "model", *SHARED_OPTIONS}
    names = not_honoured(body, known)
    names += inner_names("thinking", fields.thinking, known=("type", "display"))
    names += inner_names("output_config", fields.output_config, known=("format",))
    for tool in fields.tools or ():
        parts = (*_TOOL_FIELDS, *(["allowed_callers"] if _is_called_directly(tool) else []))
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


def _is_called_directly(tool: Mapping[str, Any]) -> bool:
    return tool.get("allowed_callers") == ["direct"]


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
