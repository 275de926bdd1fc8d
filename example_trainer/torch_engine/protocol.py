"""Requests of the routes: their fields, their limits, and the prompts they contain.

Names and defaults are those of vLLM. Sampling defaults are neutral and independent of the model's
`generation_config.json`, as with vLLM's `--generation-config vllm`; its end-of-turn tokens apply.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, ValidationError

from example_trainer.torch_engine.generation import EngineLimits, PromptRequest
from example_trainer.torch_engine.sampling import SamplingSettings

MAX_COMPLETIONS = 512
"""Completions of one request, over all its prompts."""
MAX_BODY_BYTES = 64 * 2**20
_MAX_STOPS = 64
_MAX_STOP_CHARS = 1024
_MAX_BIASES = 4096
_MAX_SCORED_LOGITS = 2**30
"""Positions times vocabulary of a prompt whose logprobs are requested: 4 GiB in float32."""
_MAX_PROMPT_ENTRIES = 2**21
"""Logprobs of all prompts of a request: about 1 GiB in an answer."""
_MAX_DECODED_TOKENS = 2**20
_LONG_TOKEN = 64
_SEED_LIMIT = 2**63 - 1
_MOST_TOP_K = 2**31 - 1
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0, None), "presence_penalty": (0, None), "repetition_penalty": (1, None),
    "min_tokens": (0, None), "best_of": (1, None), "use_beam_search": (False, None),
    "suffix": ("", None), "bad_words": ([], None), "allowed_token_ids": (None,),
    "truncate_prompt_tokens": (None,), "prompt_embeds": (None,), "chat_template": (None,),
    "response_format": ({"type": "text"}, None), "structured_outputs": (None,),
    "tool_choice": ("auto", "none", None),
}  # fmt: skip
"""Fields of vLLM that this engine does not implement, and the values that have no effect."""


class EngineRefusal(Exception):
    """A request that is answered with an error."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


@dataclass(frozen=True)
class ServedTorchModel:
    """The model as the routes see it."""

    name: str
    """In requests and answers."""
    path: str
    tokenizer: Any
    vocabulary_size: int
    end_ids: frozenset[int]
    """Tokens that end a completion."""
    limits: EngineLimits
    max_logprobs: int = 20

    @cached_property
    def max_characters(self) -> int:
        """Length of a text that may fit the context; longer ones are not worth encoding."""
        longest = max(map(len, self.tokenizer.get_vocab()), default=0)
        return self.limits.max_model_len * max(_LONG_TOKEN, longest)

    @cached_property
    def _token_texts(self) -> dict[int, str]:
        return {}

    def token_text(self, token: int) -> str:
        """Return the text of a token, as it is shown next to its logprob."""
        if token not in self._token_texts:
            self._token_texts[token] = str(self.tokenizer.decode([token]))
        return self._token_texts[token]


class _SamplingFields(BaseModel):
    """Fields of both kinds of completions."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    n: StrictInt = Field(default=1, ge=1, le=MAX_COMPLETIONS)
    temperature: float | None = Field(default=None, ge=0, le=1000, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: StrictInt | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: StrictInt | None = Field(default=None, ge=-_SEED_LIMIT, le=_SEED_LIMIT)
    stop: (
        Annotated[str, Field(max_length=_MAX_STOP_CHARS)]
        | Annotated[
            list[Annotated[str, Field(min_length=1, max_length=_MAX_STOP_CHARS)]],
            Field(max_length=_MAX_STOPS),
        ]
        | None
    ) = None
    stop_token_ids: list[StrictInt] | None = Field(default=None, max_length=_MAX_STOPS)
    logit_bias: dict[int, float] | None = Field(default=None, max_length=_MAX_BIASES)
    ignore_eos: StrictBool = False
    include_stop_str_in_output: StrictBool = False
    skip_special_tokens: StrictBool = True
    prompt_logprobs: StrictInt | None = Field(default=None, ge=0)
    return_token_ids: StrictBool | None = None
    return_tokens_as_token_ids: StrictBool | None = None
    stream: StrictBool | None = None
    stream_options: dict[str, Any] | None = None

    @property
    def stop_texts(self) -> tuple[str, ...]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(stop for stop in stops if stop)

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return bool((self.stream_options or {}).get("include_usage"))


class TextFields(_SamplingFields):
    """Body of `/v1/completions`."""

    prompt: str | list[StrictInt] | list[str] | list[list[StrictInt]]
    max_tokens: StrictInt | None = Field(default=16, ge=0)
    logprobs: StrictInt | None = Field(default=None, ge=0)
    echo: StrictBool = False
    add_special_tokens: StrictBool = True

    @property
    def num_top(self) -> int:
        return self.logprobs or 0

    @property
    def prompt_top(self) -> int | None:
        if self.prompt_logprobs is not None:
            return self.prompt_logprobs
        return self.logprobs if self.echo else None


class ChatFields(_SamplingFields):
    """Body of `/v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: StrictInt | None = Field(default=None, ge=1)
    max_completion_tokens: StrictInt | None = Field(default=None, ge=1)
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = Field(default=None, ge=0)
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: StrictBool = True
    continue_final_message: StrictBool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def num_top(self) -> int:
        return (self.top_logprobs or 0) if self.logprobs else 0

    @property
    def prompt_top(self) -> int | None:
        return self.prompt_logprobs


class TokenizeFields(BaseModel):
    """Body of `/tokenize`: a text, or messages."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: StrictBool = True
    add_generation_prompt: StrictBool = True
    continue_final_message: StrictBool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: StrictBool | None = None


class DetokenizeFields(BaseModel):
    """Body of `/detokenize`."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    tokens: list[StrictInt] = Field(max_length=_MAX_DECODED_TOKENS)


class UpdateFields(BaseModel):
    """Keyword arguments of `reload_weights`."""

    model_config = ConfigDict(extra="forbid")

    weights_path: str = Field(min_length=1)
    weight_version: str | None = Field(default=None, max_length=256)


Fields = TypeVar("Fields", bound=BaseModel)


def parse_body(kind: type[Fields], body: Mapping[str, Any]) -> Fields:
    """Return the fields of a body.

    Raises:
        EngineRefusal: A field has a wrong type, is out of range, or is not implemented.
    """
    for name, allowed in _NEUTRAL.items():
        if name in body and body[name] not in allowed:
            raise EngineRefusal(
                f"{name} is not supported by the torch engine; leave it out or serve the model "
                "with vLLM",
                param=name,
            )
    try:
        return kind.model_validate(dict(body))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise EngineRefusal(f"{where}: {first['msg']}", param=where or None) from error


def text_prompts(fields: TextFields, served: ServedTorchModel) -> list[list[int]]:
    """Return the ids of each prompt of `/v1/completions`.

    Raises:
        EngineRefusal: There is none, one is empty, or they or their logprobs are too many.
    """
    given: Any = fields.prompt
    is_one = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
    prompts = [given] if is_one else given
    if not 1 <= len(prompts) * fields.n <= MAX_COMPLETIONS:
        raise EngineRefusal(
            f"expected 1 to {MAX_COMPLETIONS} completions, got {len(prompts)} prompts with "
            f"n={fields.n}",
            param="prompt",
        )
    encoded = []
    for prompt in prompts:
        ids = prompt
        if isinstance(prompt, str):
            ids = encode_text(served, prompt, add_special_tokens=fields.add_special_tokens)
        encoded.append(check_ids(ids, served, param="prompt"))
    if fields.prompt_top is not None:
        num_entries = sum(map(len, encoded)) * (1 + fields.prompt_top)
        if num_entries > _MAX_PROMPT_ENTRIES:
            raise EngineRefusal(
                f"the prompts have {num_entries} logprobs, expected at most {_MAX_PROMPT_ENTRIES} "
                "in a request; send fewer prompts",
                param="prompt_logprobs",
            )
    return encoded


def encode_text(served: ServedTorchModel, text: str, *, add_special_tokens: bool) -> list[int]:
    """Return the ids of a text, none for an empty one.

    Raises:
        EngineRefusal: It is far too long for the context.
    """
    _require_encodable(len(text), served, param="prompt")
    return list(served.tokenizer.encode(text, add_special_tokens=add_special_tokens))


def _require_encodable(num_characters: int, served: ServedTorchModel, *, param: str) -> None:
    if num_characters > served.max_characters:
        raise EngineRefusal(
            f"{param}: {num_characters} characters cannot fit the context of "
            f"{served.limits.max_model_len} tokens; expected at most {served.max_characters}",
            param=param,
        )


def check_ids(ids: Sequence[int], served: ServedTorchModel, *, param: str) -> list[int]:
    """Return the ids as a list; `EngineRefusal` for an empty list or an unknown id."""
    if not ids:
        raise EngineRefusal(f"{param}: expected at least one token", param=param)
    for position, token in enumerate(ids):
        if not 0 <= token < served.vocabulary_size:
            raise EngineRefusal(
                f"{param}: token id {token} at position {position} is out of vocabulary, expected "
                f"0 to {served.vocabulary_size - 1}",
                param=param,
            )
    return list(ids)


def render_chat(fields: ChatFields | TokenizeFields, served: ServedTorchModel) -> list[int]:
    """Return the ids of a conversation under the model's chat template.

    Raises:
        EngineRefusal: A message has content other than text, or the template rejects it.
    """
    messages = [_with_plain_content(each, i) for i, each in enumerate(fields.messages or [])]
    if not messages:
        raise EngineRefusal("messages: expected at least one", param="messages")
    rendered = [messages, fields.tools, fields.chat_template_kwargs]
    _require_encodable(len(msgspec.json.encode(rendered)), served, param="messages")
    try:
        ids = served.tokenizer.apply_chat_template(
            messages,
            tools=fields.tools or None,
            add_generation_prompt=fields.add_generation_prompt
            and not fields.continue_final_message,
            continue_final_message=fields.continue_final_message,
            tokenize=True,
            return_dict=False,
            **_template_settings(fields.chat_template_kwargs),
        )
    except Exception as error:  # templates raise errors of any kind for malformed messages
        raise EngineRefusal(
            f"messages: the chat template failed: {error}", param="messages"
        ) from error
    return check_ids(ids, served, param="messages")


def _template_settings(given: Mapping[str, Any] | None) -> dict[str, Any]:
    reserved = {
        "chat_template", "tokenize", "return_dict", "return_tensors", "messages", "conversation",
        "tools", "add_generation_prompt", "continue_final_message", "padding", "truncation",
        "max_length", "tokenizer_kwargs", "return_assistant_tokens_mask",
    }  # fmt: skip
    for name in given or {}:
        if name in reserved:
            raise EngineRefusal(
                f"chat_template_kwargs: {name} cannot be set here", param="chat_template_kwargs"
            )
    return dict(given or {})


def _with_plain_content(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return a message as templates expect it: content as text, arguments of tools as objects."""
    where = f"messages.{index}"
    if not isinstance(message.get("role"), str):
        raise EngineRefusal(f"{where}.role: expected a text", param="messages")
    plain = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        found = [each.get("text") for each in content if isinstance(each, dict)]
        texts = [text for text in found if isinstance(text, str)]
        if len(texts) != len(content):
            raise EngineRefusal(
                f"{where}.content: only text is supported by the torch engine", param="messages"
            )
        plain["content"] = "\n".join(texts)
    elif not isinstance(content, str):
        if content is not None:
            raise EngineRefusal(f"{where}.content: expected a text or parts", param="messages")
        plain["content"] = ""
    if isinstance(message.get("tool_calls"), list):
        plain["tool_calls"] = [_with_parsed_arguments(call) for call in message["tool_calls"]]
    return plain


def _with_parsed_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def prompt_request(
    fields: TextFields | ChatFields, prompt_ids: Sequence[int], served: ServedTorchModel
) -> PromptRequest:
    """Return the engine's request for one prompt.

    Raises:
        EngineRefusal: Prompt and completion exceed the context, or a number exceeds its limit.
    """
    for name in ("num_top", "prompt_top"):
        if (
            (fields.num_top if name == "num_top" else fields.prompt_top) or 0
        ) > served.max_logprobs:
            raise EngineRefusal(
                f"expected at most {served.max_logprobs} logprobs per token (--max-logprobs)",
                param="logprobs" if name == "num_top" else "prompt_logprobs",
            )
    if fields.prompt_top is not None:
        _require_scorable(len(prompt_ids), served)
    for name, ids in (("stop_token_ids", fields.stop_token_ids), ("logit_bias", fields.logit_bias)):
        if ids:
            check_ids(list(ids), served, param=name)
    stop_ids = frozenset(fields.stop_token_ids or ())
    return PromptRequest(
        prompt_ids=tuple(prompt_ids),
        num_completions=fields.n,
        max_tokens=_token_limit(fields, len(prompt_ids), served),
        sampling=_sampling(fields),
        seed=fields.seed,
        stop_ids=stop_ids if fields.ignore_eos else stop_ids | served.end_ids,
        stop_texts=fields.stop_texts,
        num_top=fields.num_top,
        prompt_top=fields.prompt_top,
    )


def _require_scorable(num_tokens: int, served: ServedTorchModel) -> None:
    most = _MAX_SCORED_LOGITS // served.vocabulary_size
    if num_tokens > most:
        raise EngineRefusal(
            f"logprobs of a prompt are limited to {most} tokens, got {num_tokens}",
            param="prompt_logprobs",
        )


def _sampling(fields: TextFields | ChatFields) -> SamplingSettings:
    return SamplingSettings(
        temperature=1.0 if fields.temperature is None else fields.temperature,
        top_p=1.0 if fields.top_p is None else fields.top_p,
        top_k=min(max(0, fields.top_k or 0), _MOST_TOP_K),
        min_p=fields.min_p or 0.0,
        logit_bias={
            token: min(100.0, max(-100.0, bias))
            for token, bias in (fields.logit_bias or {}).items()
        },
    )


def _token_limit(fields: TextFields | ChatFields, num_prompt: int, served: ServedTorchModel) -> int:
    """Return the maximum of completion tokens, which fits the context with the prompt."""
    context = served.limits.max_model_len
    wanted = fields.max_tokens
    if isinstance(fields, ChatFields):
        wanted = fields.max_completion_tokens or wanted
    elif wanted is None:
        wanted = 16
    elif wanted == 0 and not fields.echo and fields.prompt_logprobs is None:
        raise EngineRefusal("max_tokens must be at least 1, got 0", param="max_tokens")
    if num_prompt + (1 if wanted is None else wanted) <= context:
        return context - num_prompt if wanted is None else wanted
    # Worded as vLLM words it, since clients parse it.
    raise EngineRefusal(
        f"This model's maximum context length is {context} tokens. However, you requested "
        f"{1 if wanted is None else wanted} output tokens and your prompt contains {num_prompt} "
        f"input tokens, for a total of {num_prompt + (wanted or 1)} tokens. Please reduce the "
        "length of the input prompt or the number of requested output tokens.",
        param="input_tokens",
    )
