"""Request and response bodies of the proxy, and the request fields that reach the engine; pure.

body ─► read_body ─► ChatCompletionProxyRequest ─► chat_kwargs ─► ManagedServer.chat_completion

Only listed fields are passed on: a field that changed the prompt or the shape of the engine's
answer would invalidate the tokens recorded for the session.

`split_thinking` separates the thinking of a completion, `with_thinking` writes it back:

    <think>            thinking: The sum of ...
    The sum of ...
    </think>           text: It is 4.

    It is 4.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from atroposlib.envs.server_handling.chat_rendering import THINKING_END, THINKING_START
from atroposlib.envs.server_handling.config import ServerType
from atroposlib.envs.server_handling.proxy.refusals import bad_request, invalid_body, refuse

LARGEST_LIMIT = 2**31 - 1
"""Maximum value of a reply's token limit."""
MOST_STOPS = 128
"""Maximum number of stop sequences in a request."""
_LARGEST_SEED = 2**63 - 1

_Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
_Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
_TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,10}$")]

_FIRST_ERROR = Field(fail_fast=True)
"""For lists, which may have millions of elements: pydantic keeps an error for each wrong one."""
Objects = Annotated[list[dict[str, Any]], _FIRST_ERROR]
Texts = Annotated[list[str], _FIRST_ERROR]
_MOST_BIASES = 2**14

AnyModel = TypeVar("AnyModel", bound=BaseModel)

_FORMS = ("text", "json_object", "json_schema", "structural_tag")
_ROLES = ("system", "developer", "user", "assistant", "tool")

NAMED_OPTIONS = (
    "temperature",
    "top_p",
    "n",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
)
ENGINE_OPTIONS = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "ignore_eos",
        "include_stop_str_in_output",
        "min_p",
        "min_tokens",
        "priority",
        "repetition_penalty",
        "response_format",
        "stop_token_ids",
        "structured_outputs",
        "top_k",
    }
)
"""Sampling options of engines beyond OpenAI's; they only affect which token is sampled."""

_REFUSED = {
    "audio": "only text can be tracked",
    "best_of": "discarded completions could not be tracked",
    "chat_template": "the session's own template renders every prompt",
    "chat_template_kwargs": "the session's own template renders every prompt",
    "continue_final_message": "the session's own template renders every prompt",
    "function_call": "use tools and tool_choice",
    "functions": "use tools and tool_choice",
    "input_ids": "prompts are tokenized by the session",
    "prompt_logprobs": "only sampled tokens have logprobs here",
    "use_beam_search": "beams are not samples of the policy",
    "web_search_options": "no search is available",
}
_ACTIVE_WHEN_EMPTY = ("web_search_options",)
_WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "user",
    }
)
"""Fields for a provider's bookkeeping, which do not affect an answer."""

_DEFAULT_VALUES: dict[str, tuple[Any, ...]] = {
    "service_tier": ("auto", "default"),
    "store": (False,),
    "truncation": ("disabled",),
}
"""Values of unsupported fields that have no effect."""


class Thought(NamedTuple):
    """A completion split into thinking and text."""

    thinking: str | None
    """Thinking at its start; None without thinking."""
    text: str
    """Text after the thinking; the unchanged completion without thinking."""


def split_thinking(completion: str) -> Thought:
    """Split a completion that begins with thinking; whitespace around both parts is dropped.

    The opening tag is missing if the template wrote it into the prompt, the closing tag if the
    completion was truncated. Later tags are kept as text.
    """
    head, closed, tail = completion.partition(THINKING_END)
    opened = head.lstrip()
    if opened.startswith(THINKING_START):
        return Thought(opened[len(THINKING_START) :].strip(), tail.strip())
    if closed and THINKING_START not in head:
        return Thought(head.strip(), tail.strip())
    return Thought(None, completion)


def with_thinking(thinking: str, text: str) -> str:
    """Return the completion that `split_thinking` would split into these parts."""
    return f"{THINKING_START}\n{thinking}\n{THINKING_END}\n\n{text}" if thinking else text


def _not_zero(limit: int) -> int:
    if limit == 0:
        raise PydanticCustomError("limit_zero", "Input should be at least 1, or -1 for no limit")
    return limit


_Limit = Annotated[int, Field(ge=-1, le=LARGEST_LIMIT), AfterValidator(_not_zero)]


class ProxyModel(BaseModel):
    """A body whose unknown fields are ignored."""

    model_config = ConfigDict(protected_namespaces=())  # `model_name` is a field of the contract


class ChatMessage(ProxyModel):
    """One message of a chat."""

    role: str
    content: str | None = None
    """Text; a list of text parts is joined, other kinds of parts are refused."""
    tool_calls: Objects | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    """Thinking of the assistant that its client shows separately; also sent as `reasoning`."""
    reasoning: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _join_text_parts(cls, content: Any) -> Any:
        if not isinstance(content, list):
            return content
        texts = []
        for i, part in enumerate(content):
            kind = part.get("type") if isinstance(part, Mapping) else None
            text = part.get("text") if kind in ("text", "refusal") else None
            if kind == "refusal":
                text = part.get("refusal")
            if not isinstance(text, str):
                raise PydanticCustomError(
                    "part_not_text", "part {i} is not text; only text can be tracked", {"i": i}
                )
            texts.append(text)
        return "".join(texts)

    def as_dict(self) -> dict[str, Any]:
        """Return the message without its null fields, as chat templates expect it.

        Thinking that was shown separately is put back before the assistant's text.
        """
        fields = self.model_dump(exclude_none=True, exclude={"reasoning_content", "reasoning"})
        thinking = (self.reasoning_content or self.reasoning or "").strip()
        if thinking and self.role == "assistant" and THINKING_END not in (self.content or ""):
            fields["content"] = with_thinking(thinking, self.content or "")
        return fields


class SamplingRequest(ProxyModel):
    """Fields shared by chat and text requests; other fields are kept in `model_extra`."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = None
    temperature: float | None = Field(default=1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False)
    n: int = Field(default=1, ge=1)
    seed: int | None = Field(default=None, ge=-_LARGEST_SEED - 1, le=_LARGEST_SEED)
    stop: str | Texts | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: dict[_TokenId, _Bias] | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _limit_biases(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > _MOST_BIASES:
            raise PydanticCustomError(
                "too_long", "expected at most {most} tokens", {"most": _MOST_BIASES}
            )
        return value

    @field_validator("n", "stream", mode="before")
    @classmethod
    def _null_is_default(cls, value: Any, info: Any) -> Any:
        return cls.model_fields[info.field_name].default if value is None else value


class ChatCompletionProxyRequest(SamplingRequest):
    """A chat request. `max_tokens: null` lets the reply fill the context."""

    messages: Annotated[list[ChatMessage], _FIRST_ERROR]
    max_tokens: _Limit | None = 1024
    max_completion_tokens: _Limit | None = None
    tools: Objects | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    """Whether to return thinking as `reasoning_content`; alias `separate_reasoning`."""
    separate_reasoning: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0)


class CompletionProxyRequest(SamplingRequest):
    """A text request."""

    prompt: str | Texts
    max_tokens: _Limit | None = 16
    logprobs: int | None = Field(default=None, ge=0)
    echo: bool | None = None
    suffix: str | None = None


class SessionCreateRequest(ProxyModel):
    """Options of a new session."""

    tool_parser: str = "hermes"
    track_tree: bool = False
    base_url: str | None = None
    """Inference server to use; None chooses the least loaded one."""


class SessionCreateResponse(ProxyModel):
    """A new session, with its key, which is returned only here."""

    uuid: str
    model_name: str
    tool_parser: str
    base_url: str | None
    created_at: float
    api_key: str


class RenderResponse(ProxyModel):
    """The prompt of a chat request."""

    prompt_text: str
    token_ids: list[int]
    num_tokens: int


class ServerEntry(ProxyModel):
    """One inference server of `POST /setup` or of the configuration file."""

    base_url: str = Field(min_length=1)
    api_key: str = Field(default="", repr=False)
    server_type: ServerType = "vllm"
    num_max_requests_at_once: int = Field(default=512, ge=1)
    num_requests_for_eval: int = Field(default=64, ge=1)
    timeout: int = Field(default=1200, gt=0)


class SetupRequest(ProxyModel):
    """Inference servers to use from now on."""

    model_name: str | None = None
    tokenizer_name: str | None = None
    servers: list[ServerEntry] = Field(default_factory=list, fail_fast=True)


def read_body(model: type[AnyModel], body: Mapping[str, Any]) -> AnyModel:
    """Return the body as a model; raises a 422 that names every wrong field."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False, include_context=False)
        raise invalid_body([dict(entry) for entry in details]) from None


def chat_kwargs(request: ChatCompletionProxyRequest, *, max_choices: int) -> dict[str, Any]:
    """Return the arguments of `ManagedServer.chat_completion`.

    Raises:
        ProxyRefusal: 400 for an unsupported field, missing messages, an unknown role, or an `n`
            that is too large.
    """
    if not request.messages:
        raise bad_request("messages is empty; give at least one", param="messages")
    for i, message in enumerate(request.messages):
        _check_message(message, f"messages[{i}]")
    _check(request, num_choices=request.n, max_choices=max_choices)
    if request.top_logprobs:
        raise bad_request("only the sampled token's logprob is known", param="top_logprobs")
    limit = request.max_completion_tokens
    if limit is None:
        limit = request.max_tokens
    kwargs: dict[str, Any] = {
        **_options(request),
        "messages": [message.as_dict() for message in request.messages],
        "max_tokens": limit,
    }
    for i, tool in enumerate(request.tools or ()):
        _check_tool(tool, f"tools[{i}]")
    if request.tools:
        kwargs["tools"] = request.tools
        if request.tool_choice is not None:
            kwargs["tool_choice"] = request.tool_choice
    return kwargs


def text_kwargs(request: CompletionProxyRequest, *, max_choices: int) -> list[dict[str, Any]]:
    """Return the arguments of `ManagedServer.completion`, one call per prompt.

    Raises:
        ProxyRefusal: 400 for an unsupported field, an empty prompt, or too many choices.
    """
    prompts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    if not prompts or not all(prompts):
        raise bad_request("prompt is empty", param="prompt")
    _check(request, num_choices=request.n * len(prompts), max_choices=max_choices)
    for name in ("echo", "suffix"):
        if getattr(request, name):
            raise bad_request(f"{name} is not supported", code="unsupported_field", param=name)
    if request.logprobs is not None and request.logprobs > 1:
        raise bad_request(
            "only the sampled token's logprob is known; give 0 or 1", param="logprobs"
        )
    shared = {**_options(request), "max_tokens": request.max_tokens}
    return [{**shared, "prompt": prompt} for prompt in prompts]


def ignored_fields(body: Mapping[str, Any], model: type[SamplingRequest]) -> list[str]:
    """Return the names of a body's unsupported fields, sorted."""
    known = model.model_fields.keys() | ENGINE_OPTIONS | _REFUSED.keys() | {"modalities"}
    return unsupported_names(body, known) + inner_names(
        "stream_options", body.get("stream_options"), known=("include_usage",)
    )


def unsupported_names(body: Mapping[str, Any], known: Iterable[str]) -> list[str]:
    """Return the names of a body's fields that are ignored although they may have an effect.

    `known` are the fields that are supported or refused.
    """
    others = set(body) - set(known) - _WITHOUT_EFFECT
    return sorted(
        name
        for name in others
        if body[name] is not None and body[name] not in _DEFAULT_VALUES.get(name, ())
    )


def inner_names(name: str, value: Any, known: Iterable[str]) -> list[str]:
    """Return the names of unsupported entries of a field, such as `reasoning.effort`."""
    parts = value if isinstance(value, Mapping) else {}
    asked = [part for part in parts if parts[part] is not None and parts[part] is not False]
    return sorted(f"{name}.{part}" for part in asked if part not in set(known))


def _check(request: SamplingRequest, *, num_choices: int, max_choices: int) -> None:
    if num_choices > max_choices:
        raise bad_request(
            f"{num_choices} choices are requested, at most {max_choices} are allowed", param="n"
        )
    extra = request.model_extra or {}
    for name, reason in _REFUSED.items():
        value = extra.get(name)
        if value not in (None, [], {}, False) or (value == {} and name in _ACTIVE_WHEN_EMPTY):
            raise bad_request(
                f"{name} is not supported: {reason}", code="unsupported_field", param=name
            )
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(stops) > MOST_STOPS or not all(stops):
        refuse("stop", f"expected at most {MOST_STOPS} non-empty strings")
    if extra.get("response_format") is not None:
        _check_form(extra["response_format"])
    if extra.get("modalities") not in (None, ["text"]):
        raise bad_request("only text can be tracked", code="unsupported_field", param="modalities")


def _check_message(message: ChatMessage, path: str) -> None:
    """Raise 400 for a malformed message, which would be incomplete in the prompt."""
    if message.role not in _ROLES:
        expected = f"expected one of {', '.join(_ROLES)}; got {message.role!r}"
        refuse(f"{path}.role", expected)
    if message.content is None and message.role != "assistant":
        refuse(f"{path}.content", "expected text, got null")
    for i, call in enumerate(message.tool_calls or ()):
        function = call.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            refuse(f"{path}.tool_calls[{i}].function.name", "expected text")


def _check_tool(tool: Mapping[str, Any], path: str) -> None:
    """Raise 400 for a tool that is not a function; the `function` wrapper may be missing."""
    kind = tool.get("type", "function")
    if kind != "function":
        raise bad_request(
            f"{path}: tools of type {kind!r} are not supported: only functions of the agent's own",
            code="unsupported_field",
            param=path,
        )
    function = tool.get("function", tool)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        refuse(f"{path}.function.name", "expected text")
    if not isinstance(function.get("parameters") or {}, Mapping):
        refuse(f"{path}.function.parameters", "expected an object")


def _check_form(response_format: Any) -> None:
    """Raise 400 for an unknown response format, with a clearer message than the engine's."""
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if not isinstance(kind, str) or kind not in _FORMS:
        refuse("response_format", f"expected an object with a type of {', '.join(_FORMS)}")
    if kind == "json_schema":
        holder = response_format.get("json_schema")
        if not isinstance(holder, Mapping) or not isinstance(holder.get("schema"), Mapping):
            refuse("response_format.json_schema.schema", "expected an object")


def _options(request: SamplingRequest) -> dict[str, Any]:
    named = {name: getattr(request, name) for name in NAMED_OPTIONS}
    options = {name: value for name, value in named.items() if value is not None}
    extra = {
        name: value
        for name, value in (request.model_extra or {}).items()
        if name in ENGINE_OPTIONS and value is not None
    }
    return {**options, "extra_body": extra} if extra else options
