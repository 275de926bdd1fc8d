"""Bodies of the proxy's requests and replies, in OpenAI's vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
)
from pydantic_core import PydanticCustomError

from atroposlib.envs.server_handling.config import ServerType
from atroposlib.envs.server_handling.proxy.refusals import invalid_body
from atroposlib.envs.server_handling.proxy.thinking import with_thinking
from atroposlib.envs.server_handling.turn_matching import THINKING_END

__all__ = [
    "LARGEST_LIMIT",
    "MOST_STOPS",
    "ChatCompletionProxyRequest",
    "ChatMessage",
    "CompletionProxyRequest",
    "RenderResponse",
    "SamplingRequest",
    "ServerEntry",
    "SessionCreateRequest",
    "SessionCreateResponse",
    "SetupRequest",
    "read_body",
]

LARGEST_LIMIT = 2**31 - 1
"""Of tokens of a reply."""
MOST_STOPS = 128
"""Stop sequences of a request."""
_LARGEST_SEED = 2**63 - 1


def _not_zero(limit: int) -> int:
    if limit == 0:
        raise PydanticCustomError("limit_zero", "Input should be at least 1, or -1 for no limit")
    return limit


_Limit = Annotated[int, Field(ge=-1, le=LARGEST_LIMIT), AfterValidator(_not_zero)]
_Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
_Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
_TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,10}$")]

AnyModel = TypeVar("AnyModel", bound=BaseModel)


class ProxyModel(BaseModel):
    """A body whose unknown fields are ignored."""

    model_config = ConfigDict(protected_namespaces=())  # `model_name` is a field of the contract


class ChatMessage(ProxyModel):
    """One message of a chat."""

    role: str
    content: str | None = None
    """Text; a list of text parts is joined, other parts are refused."""
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    """Thinking of the assistant that its client shows apart; `reasoning` is another name for it."""
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

        Thinking that was shown apart stands in front of the assistant's text again.
        """
        fields = self.model_dump(exclude_none=True, exclude={"reasoning_content", "reasoning"})
        thinking = (self.reasoning_content or self.reasoning or "").strip()
        if thinking and self.role == "assistant" and THINKING_END not in (self.content or ""):
            fields["content"] = with_thinking(thinking, self.content or "")
        return fields


class SamplingRequest(ProxyModel):
    """What chat and text requests share. Fields it does not name are kept in `model_extra`."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = None
    temperature: float | None = Field(default=1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False)
    n: int = Field(default=1, ge=1)
    seed: int | None = Field(default=None, ge=-_LARGEST_SEED - 1, le=_LARGEST_SEED)
    stop: str | list[str] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: dict[_TokenId, _Bias] | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None

    @field_validator("n", "stream", mode="before")
    @classmethod
    def _null_is_default(cls, value: Any, info: Any) -> Any:
        return cls.model_fields[info.field_name].default if value is None else value


class ChatCompletionProxyRequest(SamplingRequest):
    """A chat request. `max_tokens: null` lets the reply fill the context."""

    messages: list[ChatMessage]
    max_tokens: _Limit | None = 1024
    max_completion_tokens: _Limit | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    """Show thinking as `reasoning_content`, apart from the text; also `separate_reasoning`."""
    separate_reasoning: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0)


class CompletionProxyRequest(SamplingRequest):
    """A text request."""

    prompt: str | list[str]
    max_tokens: _Limit | None = 16
    logprobs: int | None = Field(default=None, ge=0)
    echo: bool | None = None
    suffix: str | None = None


class SessionCreateRequest(ProxyModel):
    """What a session is opened with."""

    tool_parser: str = "hermes"
    track_tree: bool = False
    base_url: str | None = None
    """Inference server to use; None chooses the least loaded one."""


class SessionCreateResponse(ProxyModel):
    """A session, with the key that only its creator is told."""

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
    servers: list[ServerEntry] = Field(default_factory=list)


def read_body(model: type[AnyModel], body: Mapping[str, Any]) -> AnyModel:
    """Return the body as a model; raises the 422 that names every wrong field."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False, include_context=False)
        raise invalid_body([dict(entry) for entry in details]) from None
