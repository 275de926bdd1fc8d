"""A Responses request as the options of a chat request; pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from atroposlib.envs.server_handling.proxy.dialects.chat_options import (
    SHARED_OPTIONS,
    shared_options,
)
from atroposlib.envs.server_handling.proxy.dialects.reading import (
    list_at,
    object_at,
    read_fields,
    refuse,
    text_at,
)
from atroposlib.envs.server_handling.proxy.request_models import LARGEST_LIMIT
from atroposlib.envs.server_handling.proxy.sampling import inner_names, not_honoured

__all__ = [
    "ENCRYPTED_REASONING",
    "ResponsesFields",
    "chat_options",
    "flat_name",
    "ignored_fields",
    "namespaces_of",
    "read_request",
]

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
"""Tools that OpenAI's own models are trained to call. Versions have longer names, as
`web_search_preview` and `computer_use_preview`."""
ENCRYPTED_REASONING = "reasoning.encrypted_content"
"""Entry of a request's `include` that asks for a handle in each reasoning item."""

_TOOL_MODES = ("none", "auto", "required")
_TOOL_FIELDS = ("type", "name", "description", "parameters", "strict")


class ResponsesFields(BaseModel):
    """What of a Responses request matters here; other fields are ignored."""

    model_config = ConfigDict(extra="ignore")

    input: Any = Field(default_factory=list)
    """Text or items; read by `input_items`."""
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, le=LARGEST_LIMIT)
    temperature: float | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None


def read_request(body: Mapping[str, Any]) -> ResponsesFields:
    """Return the fields of a request.

    Raises:
        ProxyRefusal: a field is malformed, or asks for what a session does not have.
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
    """Return the names of what a request asks for and does not get; inner ones behind a dot."""
    known = {*ResponsesFields.model_fields, *_UNSUPPORTED, *SHARED_OPTIONS}
    names = not_honoured(body, known | {"model", "stop", "stream_options"})
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
    """Return the name under which the model knows a function of a namespace."""
    if not isinstance(namespace, str) or not namespace:
        return name
    return f"{namespace.rstrip('_')}__{name}"


def namespaces_of(fields: ResponsesFields) -> dict[str, tuple[str, str]]:
    """Return namespace and name of each function that stands in one, by its `flat_name`."""
    return {
        flat_name(tool["name"], space["name"]): (space["name"], tool["name"])
        for space in fields.tools or ()
        if space.get("type") == _NAMESPACE
        for tool in space["tools"]
    }


def _is_providers(tool: Mapping[str, Any]) -> bool:
    """Whether a tool is one that a provider runs, and an engine here cannot."""
    kind = str(tool.get("type"))
    return any(kind == name or kind.startswith(f"{name}_") for name in _PROVIDER_TOOLS)


def _tools(tool: Mapping[str, Any], path: str) -> list[dict[str, Any]]:
    """Return a tool in the form of the chat APIs, of a namespace each of its functions."""
    if tool.get("type") != _NAMESPACE:
        return [_tool(tool, path)]
    namespace = text_at(tool.get("name"), f"{path}.name")
    about = tool.get("description")
    found = []
    for i, entry in enumerate(list_at(tool.get("tools"), f"{path}.tools")):
        inner = _tool(object_at(entry, f"{path}.tools[{i}]"), f"{path}.tools[{i}]")
        function = inner["function"]
        function["name"] = flat_name(function["name"], namespace)
        told = [text for text in (about, function.get("description")) if text]
        if told:
            function["description"] = "\n".join(told)
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
