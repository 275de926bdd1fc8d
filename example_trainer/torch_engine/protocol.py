"""Requests of the routes: their fields, their limits, and the prompts they contain.

Names and defaults are those of vLLM. Sampling defaults are neutral and independent of the model's
`generation_config.json`, as with vLLM's `--generation-config vllm`; its end-of-turn tokens apply.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StrictBool,
    StrictInt,
    ValidationError,
)
from pydantic_core import PydanticCustomError

from atroposlib.errors import GroupError, MissingExtraError
from atroposlib.utils.text import inert_line, near_name
from atroposlib.utils.tokenizers.content_parts import in_readable_form, reads_parts
from example_trainer.torch_engine.batching import EngineLimits
from example_trainer.torch_engine.grammars import Grammar, GrammarKind, GrammarSource
from example_trainer.torch_engine.images import PromptImages, PromptReader
from example_trainer.torch_engine.jobs import PromptRequest
from example_trainer.torch_engine.sampling import SamplingSettings

logger = logging.getLogger(__name__)

MAX_COMPLETIONS = 512
"""Completions of one request, over all its prompts."""
MAX_BODY_BYTES = 64 * 2**20
_MAX_STOPS = 64
_MAX_STOP_CHARS = 1024
_MAX_BIASES = 4096
_MAX_ALLOWED = 2**20
_MAX_BAD_WORDS = 1024
_MAX_BAD_WORD_CHARS = 128
_MAX_OBJECTS = 2**16
"""Messages or tools of a request."""
_MAX_FIELDS = 256
_MAX_SHOWN_CHARS = 200
_MAX_SCORED_LOGITS = 2**30
"""Positions times vocabulary of a prompt whose logprobs are requested: 4 GiB in float32."""
_MAX_PROMPT_ENTRIES = 2**21
"""Logprobs of prompt tokens in an answer: about 1 GiB while it is built."""
_MAX_DECODED_TOKENS = 2**20
_LONG_TOKEN = 64
_SEED_LIMIT = 2**63 - 1
_NO_SEED = -1
"""A seed that means none, as in vLLM."""
_MOST_TOP_K = 2**31 - 1
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1, None), "use_beam_search": (False, None), "suffix": ("", None),
    "truncate_prompt_tokens": (None,), "prompt_embeds": (None,), "chat_template": (None,),
    "tool_choice": ("auto", "none", None), "guided_json": (None,),
    "guided_regex": (None,), "guided_choice": (None,), "guided_grammar": (None,),
}  # fmt: skip
"""Fields of vLLM that this engine does not implement, and the values that have no effect."""
_SOURCE_TYPES: dict[GrammarKind, tuple[type, ...]] = {
    "json": (dict, str), "json_object": (bool,), "regex": (str,), "choice": (list,),
    "grammar": (str,), "structural_tag": (str, dict),
}  # fmt: skip
"""Fields of `structured_outputs`, of which a request has one."""
_MAX_NOTED = 64
_noted: set[str] = set()
"""Ignored fields that were logged."""


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
    image_reader: PromptReader | None = None
    obstacle_to_images: str = ""
    """Why there is no `image_reader`, with the remedy."""

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


def _checked_prompt(value: Any) -> Any:
    """Return the value of `prompt`, unless its structure is not one of a prompt.

    Not checked by pydantic, which tries each kind of list and keeps an error for every element: 9
    GB for a body of 20 MB.
    """
    if isinstance(value, str):
        return value
    kind = type(value[0]) if isinstance(value, list) and value else list
    if not isinstance(value, list) or kind not in (int, str, list):
        raise _field_error("expected a text, a list of token ids, or a list of these")
    if kind is not int and len(value) > MAX_COMPLETIONS:
        raise _field_error(f"expected at most {MAX_COMPLETIONS} prompts, got {len(value)}")
    _require_elements(value, kind, where="")
    if kind is list:
        for position, ids in enumerate(value):
            _require_elements(ids, int, where=f"{position}.")
    return value


def _require_elements(values: list[Any], kind: type, *, where: str) -> None:
    if set(map(type, values)) <= {kind}:
        return
    position = next(i for i, value in enumerate(values) if type(value) is not kind)
    expected = {int: "a token id", str: "a text", list: "a list of token ids"}[kind]
    raise _field_error(f"expected {expected} at position {where}{position}")


def _with_few_biases(value: Any) -> Any:
    # Before pydantic, which checks all entries of an object before its length.
    if isinstance(value, dict) and len(value) > _MAX_BIASES:
        raise _field_error(f"expected at most {_MAX_BIASES} tokens, got {len(value)}")
    return value


def _field_error(text: str) -> PydanticCustomError:
    return PydanticCustomError("field", "{text}", {"text": text})


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
    logit_bias: Annotated[dict[int, float] | None, BeforeValidator(_with_few_biases)] = None
    allowed_token_ids: list[StrictInt] | None = Field(
        default=None, min_length=1, max_length=_MAX_ALLOWED, fail_fast=True
    )
    bad_words: list[Annotated[str, Field(min_length=1, max_length=_MAX_BAD_WORD_CHARS)]] | None = (
        Field(default=None, max_length=_MAX_BAD_WORDS, fail_fast=True)
    )
    min_tokens: StrictInt | None = Field(default=None, ge=0)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    ignore_eos: StrictBool = False
    include_stop_str_in_output: StrictBool = False
    skip_special_tokens: StrictBool = True
    prompt_logprobs: StrictInt | None = Field(default=None, ge=0)
    return_token_ids: StrictBool | None = None
    return_tokens_as_token_ids: StrictBool | None = None
    stream: StrictBool | None = None
    stream_options: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None

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

    prompt: Annotated[
        str | list[int] | list[str] | list[list[int]], PlainValidator(_checked_prompt)
    ]
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

    messages: list[dict[str, Any]] = Field(min_length=1, max_length=_MAX_OBJECTS, fail_fast=True)
    max_tokens: StrictInt | None = Field(default=None, ge=1)
    max_completion_tokens: StrictInt | None = Field(default=None, ge=1)
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = Field(default=None, ge=0)
    tools: list[dict[str, Any]] | None = Field(
        default=None, max_length=_MAX_OBJECTS, fail_fast=True
    )
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
    messages: list[dict[str, Any]] | None = Field(
        default=None, max_length=_MAX_OBJECTS, fail_fast=True
    )
    tools: list[dict[str, Any]] | None = Field(
        default=None, max_length=_MAX_OBJECTS, fail_fast=True
    )
    add_special_tokens: StrictBool = True
    add_generation_prompt: StrictBool = True
    continue_final_message: StrictBool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: StrictBool | None = None


class DetokenizeFields(BaseModel):
    """Body of `/detokenize`."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    tokens: list[StrictInt] = Field(max_length=_MAX_DECODED_TOKENS, fail_fast=True)


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
    if len(body) > _MAX_FIELDS:
        raise EngineRefusal(f"expected at most {_MAX_FIELDS} fields, got {len(body)}")
    for name, allowed in _NEUTRAL.items():
        if name in body and body[name] not in allowed:
            raise EngineRefusal(
                f"{name} is not supported by the torch engine; leave it out or serve the model "
                "with vLLM",
                param=name,
            )
    _note_ignored(body.keys() - kind.model_fields.keys() - _NEUTRAL.keys(), kind.model_fields)
    try:
        return kind.model_validate(dict(body))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))[:_MAX_SHOWN_CHARS]
        raise EngineRefusal(f"{where}: {first['msg']}", param=where or None) from error


def _note_ignored(names: Iterable[str], known: Iterable[str]) -> None:
    """Log each field that no request has had before; the first ones only."""
    for name in names:
        if name not in _noted and len(_noted) < _MAX_NOTED:
            _noted.add(name)
            shown = inert_line(name, max_characters=_MAX_SHOWN_CHARS)
            logger.warning("field %s of a request is ignored%s", shown, near_name(shown, known))


def grammar_source(fields: TextFields | ChatFields) -> GrammarSource | None:
    """Return the form that the completions follow, which one of two fields sets.

    Raises:
        EngineRefusal: Both are set, or one is malformed.
    """
    form, given = fields.response_format, fields.structured_outputs
    source = None if form is None else _source_of_format(form)
    if given is None:
        return source
    if source is not None:
        raise EngineRefusal(
            "expected one of response_format and structured_outputs, got both",
            param="structured_outputs",
        )
    set_names = [name for name in _SOURCE_TYPES if given.get(name) not in (None, False)]
    if len(set_names) != 1:
        expected = ", ".join(_SOURCE_TYPES)
        raise EngineRefusal(
            f"structured_outputs: expected one of {expected}, got {', '.join(set_names) or 'none'}",
            param="structured_outputs",
        )
    _note_ignored(given.keys() - _SOURCE_TYPES.keys(), _SOURCE_TYPES)
    return _source(set_names[0], given[set_names[0]], where=f"structured_outputs.{set_names[0]}")


def _source_of_format(form: Mapping[str, Any]) -> GrammarSource | None:
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return _source("json_object", True, where="response_format")
    if kind == "structural_tag":
        return _source("structural_tag", dict(form), where="response_format")
    holder = form.get("json_schema")
    if kind == "json_schema" and isinstance(holder, dict):
        return _source("json", holder.get("schema"), where="response_format.json_schema.schema")
    raise EngineRefusal(
        "response_format: expected the type text, json_object, json_schema with its json_schema, "
        "or structural_tag",
        param="response_format",
    )


def _source(kind: GrammarKind, value: Any, *, where: str) -> GrammarSource:
    expected = _SOURCE_TYPES[kind]
    is_valid = isinstance(value, expected)
    if isinstance(value, list):
        is_valid = is_valid and bool(value) and all(isinstance(each, str) for each in value)
    if not is_valid:
        names = {dict: "an object", str: "a text", list: "a list of texts", bool: "true"}
        shown = " or ".join(names[each] for each in expected)
        raise EngineRefusal(f"{where}: expected {shown}", param=where)
    return GrammarSource(
        kind, value if isinstance(value, str) else msgspec.json.encode(value).decode()
    )


def text_prompts(fields: TextFields, served: ServedTorchModel) -> Iterator[list[int]]:
    """Yield the ids of each prompt of `/v1/completions`, encoded when it is asked for.

    Encoding all before the first is refused would delay other requests by seconds.

    Raises:
        EngineRefusal: There is none, one is empty, or they are too many.
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
    for prompt in prompts:
        ids = prompt
        if isinstance(prompt, str):
            ids = encode_text(served, prompt, add_special_tokens=fields.add_special_tokens)
        yield check_ids(ids, served, param="prompt")


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
    size = served.vocabulary_size
    if min(ids) < 0 or max(ids) >= size:
        position, token = next((i, each) for i, each in enumerate(ids) if not 0 <= each < size)
        raise EngineRefusal(
            f"{param}: token id {token} at position {position} is out of vocabulary, expected "
            f"0 to {size - 1}",
            param=param,
        )
    return list(ids)


class RenderedChat(NamedTuple):
    """A conversation under the model's chat template."""

    ids: list[int]
    """With one token for each image."""
    images: dict[str, Any]
    """Place of each image in the request, such as `messages.0.content.1`, to its payload."""


def render_chat(fields: ChatFields | TokenizeFields, served: ServedTorchModel) -> RenderedChat:
    """Return a conversation under the model's chat template.

    Raises:
        EngineRefusal: A message has content that the model does not read, or the template rejects
            it.
    """
    images: dict[str, Any] = {}
    messages = [
        _with_plain_content(each, i, served, images) for i, each in enumerate(fields.messages or [])
    ]
    if not messages:
        raise EngineRefusal("messages: expected at least one", param="messages")
    try:
        rendered = msgspec.json.encode([messages, fields.tools, fields.chat_template_kwargs])
    except (UnicodeEncodeError, RecursionError) as error:  # from the arguments of a tool call
        raise EngineRefusal(
            f"messages: cannot be encoded as JSON: {error}", param="messages"
        ) from error
    _require_encodable(len(rendered), served, param="messages")
    settings = _template_settings(fields.chat_template_kwargs)
    try:
        ids = served.tokenizer.apply_chat_template(
            in_readable_form(served.tokenizer, messages),
            tools=fields.tools or None,
            add_generation_prompt=fields.add_generation_prompt
            and not fields.continue_final_message,
            continue_final_message=fields.continue_final_message,
            tokenize=True,
            return_dict=False,
            **settings,
        )
    except Exception as error:  # templates raise errors of any kind for malformed messages
        raise EngineRefusal(
            f"messages: the chat template failed: {error}", param="messages"
        ) from error
    return RenderedChat(check_ids(ids, served, param="messages"), images)


async def read_images(
    chat: RenderedChat, served: ServedTorchModel
) -> tuple[list[int], PromptImages]:
    """Return the ids of a chat with images, with all tokens of these, and the images.

    Raises:
        EngineRefusal: An image cannot be read, or the template did not write one token for each.
    """
    assert served.image_reader is not None
    try:
        return await served.image_reader.read(chat.ids, chat.images)
    except (GroupError, MissingExtraError) as error:
        raise EngineRefusal(str(error), param="messages") from error


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


def _with_plain_content(
    message: Mapping[str, Any], index: int, served: ServedTorchModel, images: dict[str, Any]
) -> dict[str, Any]:
    """Return a message as templates expect it: content as text, arguments of tools as objects.

    Content with images is a list of parts; the images are added to `images`.
    """
    where = f"messages.{index}"
    if not isinstance(message.get("role"), str):
        raise EngineRefusal(f"{where}.role: expected a text", param="messages")
    plain = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        parts = [
            _plain_part(part, f"{where}.content.{i}", served, images)
            for i, part in enumerate(content)
        ]
        is_text = all(part["type"] == "text" for part in parts)
        if is_text and not reads_parts(served.tokenizer):
            plain["content"] = "\n".join(part["text"] for part in parts)
        else:
            plain["content"] = parts
    elif not isinstance(content, str):
        if content is not None:
            raise EngineRefusal(f"{where}.content: expected a text or parts", param="messages")
        plain["content"] = ""
    if isinstance(message.get("tool_calls"), list):
        plain["tool_calls"] = [_with_parsed_arguments(call) for call in message["tool_calls"]]
    return plain


def _plain_part(
    part: Any, where: str, served: ServedTorchModel, images: dict[str, Any]
) -> dict[str, str]:
    """Return a part of a message's content; an image is added to `images`."""
    fields = part if isinstance(part, dict) else {}
    if fields.get("type") != "image_url" and isinstance(fields.get("text"), str):
        return {"type": "text", "text": fields["text"]}
    if "image_url" not in fields:
        raise EngineRefusal(
            f"{where}: the torch engine reads parts of type text and image_url", param="messages"
        )
    if served.image_reader is None:
        raise EngineRefusal(f"{where}: {served.obstacle_to_images}", param="messages")
    images[where] = fields
    return {"type": "image"}


def _with_parsed_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def prompt_requests(
    fields: TextFields | ChatFields,
    prompts: Iterable[Sequence[int]],
    served: ServedTorchModel,
    grammar: Grammar | None = None,
    images: PromptImages | None = None,
) -> list[PromptRequest]:
    """Return the engine's requests, one for each prompt; `grammar` limits their completions.

    `images` are those of the only prompt.

    Raises:
        EngineRefusal: Prompt and completion exceed the context, a number exceeds its limit, or the
            answer would have too many logprobs of prompt tokens.
    """
    sampling = _sampling(fields, served)
    requests = [
        _prompt_request(fields, prompt, served, sampling, grammar, images) for prompt in prompts
    ]
    num_entries = _num_prompt_entries(fields, requests)
    if num_entries > _MAX_PROMPT_ENTRIES:
        raise EngineRefusal(
            f"the answer would have {num_entries} logprobs of prompt tokens, expected at most "
            f"{_MAX_PROMPT_ENTRIES}; send fewer prompts in a request, or lower n, which repeats "
            "them in each choice",
            param="prompt_logprobs",
        )
    return requests


def _num_prompt_entries(fields: TextFields | ChatFields, requests: Sequence[PromptRequest]) -> int:
    """Return the number of logprobs of prompt tokens in an answer, over all choices."""
    num_copies = int(fields.prompt_logprobs is not None)
    if isinstance(fields, TextFields):
        num_copies = fields.n * (num_copies + int(fields.echo and fields.logprobs is not None))
    num_tokens = sum(len(request.prompt_ids) for request in requests)
    return num_copies * num_tokens * (1 + (fields.prompt_top or 0))


def _prompt_request(
    fields: TextFields | ChatFields,
    prompt_ids: Sequence[int],
    served: ServedTorchModel,
    sampling: SamplingSettings,
    grammar: Grammar | None,
    images: PromptImages | None,
) -> PromptRequest:
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
    stop_ids = frozenset(fields.stop_token_ids or ())
    max_tokens = _token_limit(fields, len(prompt_ids), served)
    _require_possible(sampling, max_tokens)
    return PromptRequest(
        prompt_ids=tuple(prompt_ids),
        images=images,
        num_completions=fields.n,
        max_tokens=max_tokens,
        sampling=sampling,
        grammar=grammar,
        seed=None if fields.seed == _NO_SEED else fields.seed,
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


def _sequences_of(words: Iterable[str], served: ServedTorchModel) -> Iterator[tuple[int, ...]]:
    """Yield the tokens of each word, as at the beginning of a text and after a space."""
    for word in words:
        alone, spaced = (
            served.tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False)
            for prefix in ("", " ")
        )
        if not alone:
            raise EngineRefusal(f"bad_words: {word[:40]!r} has no tokens", param="bad_words")
        yield tuple(alone)
        # A space that is a token of its own adds nothing.
        if spaced and spaced[0] != alone[0] and len(spaced) == len(alone):
            yield tuple(spaced)


def _sampling(fields: TextFields | ChatFields, served: ServedTorchModel) -> SamplingSettings:
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        if ids := getattr(fields, name):
            check_ids(list(ids), served, param=name)
    held_ids = served.end_ids.union(fields.stop_token_ids or ()) if fields.min_tokens else ()
    penalty, allowed = fields.repetition_penalty, fields.allowed_token_ids
    return SamplingSettings(
        temperature=1.0 if fields.temperature is None else fields.temperature,
        top_p=1.0 if fields.top_p is None else fields.top_p,
        top_k=min(max(0, fields.top_k or 0), _MOST_TOP_K),
        min_p=fields.min_p or 0.0,
        logit_bias={
            token: min(100.0, max(-100.0, bias))
            for token, bias in (fields.logit_bias or {}).items()
        },
        allowed_ids=None if allowed is None else tuple(set(allowed)),
        bad_words=tuple(_sequences_of(fields.bad_words or (), served)),
        min_tokens=fields.min_tokens or 0,
        held_ids=frozenset(held_ids),
        repetition_penalty=1.0 if penalty is None else penalty,
        frequency_penalty=fields.frequency_penalty or 0.0,
        presence_penalty=fields.presence_penalty or 0.0,
    )


def _require_possible(sampling: SamplingSettings, max_tokens: int) -> None:
    if sampling.min_tokens > max_tokens:
        raise EngineRefusal(
            f"min_tokens must be at most max_tokens={max_tokens}, got {sampling.min_tokens}",
            param="min_tokens",
        )
    allowed = sampling.allowed_ids
    if sampling.min_tokens and allowed is not None and sampling.held_ids.issuperset(allowed):
        raise EngineRefusal(
            "allowed_token_ids has only tokens that end a completion, which min_tokens excludes",
            param="allowed_token_ids",
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
