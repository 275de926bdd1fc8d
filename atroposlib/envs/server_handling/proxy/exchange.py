"""Process one agent request in OpenAI's format through the session's managed server.

    dialect's request ─► route's handler ─► OpenAI chat request ─► Exchange.complete_chat
        ─► checked fields ─► ManagedServer ─► engine
                                  │ exact tokens into the session's nodes
    OpenAI answer ◄── texts, tool calls
        ─► route's handler ─► dialect's answer, or server-sent events of the complete answer

Every dialect uses this path, so a session is one record whichever protocols its agents use. A
`Dialect` defines its routes and the shape of its errors; its handlers only translate. Keys,
sessions, malformed bodies, disconnects and engine failures are handled by `proxy.app`.

`tool_choice` and `parallel_tool_calls` become a structural tag: the engine samples only allowed
tokens, and its logprobs are normalized over them. Arguments are constrained to an object, and to
their schema if the tool is `strict`. A `strict` tool alone adds no constraint.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from starlette.responses import Response, StreamingResponse

from atroposlib.envs.server_handling.chat_rendering import THINKING_END, THINKING_START, as_mapping
from atroposlib.envs.server_handling.managed_server import ManagedServer, present_server
from atroposlib.envs.server_handling.proxy.refusals import ProxyRefusal, bad_request, refuse
from atroposlib.envs.server_handling.proxy.requests import (
    ChatCompletionProxyRequest,
    CompletionProxyRequest,
    chat_kwargs,
    read_body,
    text_kwargs,
)
from atroposlib.envs.server_handling.proxy.sessions import Sample, SessionState
from atroposlib.envs.server_handling.tool_formats import ToolCallFormat, registry
from atroposlib.errors import AtroposError, ContextOverflowError, PromptError
from atroposlib.utils.tracing import HEADER

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion
    from openai.types.completion import Completion

_MODES = ("none", "auto", "required")
_BETWEEN = "\n\n"
"""Text between thinking and the first call."""

Form = dict[str, Any]


class ToolDemand(NamedTuple):
    """Constraints on the tool calls of a reply."""

    names: tuple[str, ...]
    """Tools that may be called."""
    is_required: bool
    """Whether the reply must contain a call."""
    is_single: bool
    """Whether the reply may contain at most one call."""
    fields: tuple[str, ...]


def demand_of(
    tool_choice: Any, parallel_tool_calls: bool | None, tools: Sequence[Any] | None
) -> ToolDemand | None:
    """Return the constraints of a chat request on its calls; None without any.

    Raises:
        ProxyRefusal: 400 for a malformed choice, an unknown tool, or a required call without tools.
    """
    known = [name for name in map(_name_of, tools or ()) if name is not None]
    names, is_required = known, False
    if isinstance(tool_choice, Mapping):
        names, is_required = _chosen(tool_choice)
        unknown = [name for name in names if name not in known]
        if unknown:
            refuse(
                "tool_choice",
                f"no tool of the request is named {unknown[0]!r}; there are: "
                f"{', '.join(known) or 'none'}",
            )
    elif tool_choice is not None:
        if tool_choice not in _MODES:
            expected = f"expected one of {', '.join(_MODES)}, or a function"
            refuse("tool_choice", f"{expected}; got {tool_choice!r}")
        is_required = tool_choice == "required"
    if is_required and not known:
        text = "tool_choice is only allowed when tools are specified"
        raise bad_request(text, param="tool_choice")
    is_single = parallel_tool_calls is False and bool(known) and tool_choice != "none"
    is_limited = is_required or names != known
    fields = [("tool_choice", is_limited), ("parallel_tool_calls", is_single)]
    demanding = tuple(name for name, is_set in fields if is_set)
    return ToolDemand(tuple(names), is_required, is_single, demanding) if demanding else None


def strict_fields(tool_choice: Any, tools: Sequence[Any] | None) -> tuple[str, ...]:
    """Return the field name `tools.strict` if a tool sets it, else no name.

    Without other constraints the field is ignored: clients set it for every tool by default, and a
    structural tag changes the logprobs of the whole reply.
    """
    is_strict = any(_function_of(tool).get("strict") is True for tool in tools or ())
    return ("tools.strict",) if is_strict and tool_choice != "none" else ()


def structural_tag(
    demand: ToolDemand,
    tools: Sequence[Any],
    tool_format: ToolCallFormat,
    *,
    is_thinking: bool,
) -> str | None:
    """Return the structural tag for the constraints of a reply, as JSON text for xgrammar.

    A reply may start with thinking; a required call follows immediately. None if a structural tag
    cannot describe the calls of this format.
    """
    tags = []
    for function in map(_function_of, tools):
        name = function.get("name")
        frame = tool_format.frame_of(name) if name in demand.names else None
        if frame is not None:
            schema = function.get("parameters") if function.get("strict") else None
            content = {"type": "json_schema", "json_schema": schema or {"type": "object"}}
            tags.append({"type": "tag", "begin": frame[0], "content": content, "end": frame[1]})
    if len(tags) != len(set(demand.names)):
        return None
    if not demand.is_required and tool_format.trigger is None:
        return None
    calls: Form = {
        "tags": tags,
        "at_least_one": demand.is_required,
        "stop_after_first": demand.is_single,
    }
    if demand.is_required:
        calls |= {"type": "tags_with_separator", "separator": tool_format.separator}
    else:
        calls |= {"type": "triggered_tags", "triggers": [tool_format.trigger]}
    between = {"type": "const_string", "value": _BETWEEN}
    thinking: Form = {
        "type": "tag",
        "begin": "" if is_thinking else THINKING_START,
        "content": {"type": "any_text"},
        "end": THINKING_END,
    }
    parts = [thinking, between, calls] if demand.is_required else [thinking, calls]
    form: Form = {"type": "sequence", "elements": parts}
    if not is_thinking:
        form = {"type": "or", "elements": [calls, form]}
    return json.dumps({"type": "structural_tag", "format": form})


def _chosen(choice: Mapping[str, Any]) -> tuple[list[str], bool]:
    """Return the tools that a choice names, and whether one of them must be called."""
    kind = choice.get("type")
    if kind == "function" and isinstance(_name_of(choice), str):
        return [str(_name_of(choice))], True
    allowed = choice.get("allowed_tools", choice)
    if kind == "allowed_tools" and isinstance(allowed, Mapping):
        names = [_name_of(tool) for tool in allowed.get("tools") or ()]
        mode = allowed.get("mode", "auto")
        if names and all(isinstance(name, str) for name in names) and mode in _MODES[1:]:
            return [str(name) for name in names], mode == "required"
    raise bad_request(
        f"tool_choice: expected {', '.join(_MODES)}, a function with its name, or allowed_tools "
        f"with mode and tools; got type {kind!r}",
        param="tool_choice",
    )


def _function_of(tool: Any) -> Mapping[str, Any]:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
    return function if isinstance(function, Mapping) else {}


def _name_of(tool: Any) -> str | None:
    name = _function_of(tool).get("name")
    return name if isinstance(name, str) else None


TextOf = Callable[[list[int]], str]

IGNORED_HEADER = "X-Atropos-Ignored"
"""Response header that lists ignored fields of the request."""


def chat_answer(
    answer: ChatCompletion, samples: Sequence[Sample], *, model: str, text_of: TextOf | None
) -> dict[str, Any]:
    """Return a chat completion for the answer of a managed server.

    `samples` are empty for a server without token ids; `text_of` decodes ids, to add logprobs, and
    None leaves logprobs out.
    """
    rows = _rows_of(samples)
    choices = []
    for i, choice in enumerate(answer.choices):
        message: dict[str, Any] = {"role": "assistant", "content": choice.message.content}
        if choice.message.tool_calls:
            # Managed servers return dictionaries, providers return objects.
            message["tool_calls"] = [dict(as_mapping(call)) for call in choice.message.tool_calls]
        logprobs = None
        if text_of is not None and rows:
            logprobs = {"content": _chat_logprobs(*rows[i], text_of), "refusal": None}
        choices.append(
            {
                "index": i,
                "message": message,
                "finish_reason": choice.finish_reason,
                "logprobs": logprobs,
            }
        )
    return {
        "id": f"chatcmpl-{secrets.token_hex(6)}",
        "object": "chat.completion",
        "created": answer.created,
        "model": model,
        "choices": choices,
        "usage": _usage(samples, [answer.usage]),
    }


def text_answer(
    answers: Sequence[Completion],
    samples: Sequence[Sample],
    *,
    model: str,
    text_of: TextOf | None,
) -> dict[str, Any]:
    """Return a text completion with the choices of all answers, numbered consecutively.

    `samples` are in the order of the choices; arguments as in `chat_answer`.
    """
    rows = _rows_of(samples)
    found = [choice for answer in answers for choice in answer.choices]
    choices = [
        {
            "index": i,
            "text": choice.text,
            "finish_reason": choice.finish_reason,
            "logprobs": _text_logprobs(*rows[i], text_of) if text_of and rows else None,
        }
        for i, choice in enumerate(found)
    ]
    return {
        "id": f"cmpl-{secrets.token_hex(6)}",
        "object": "text_completion",
        "created": answers[0].created,
        "model": model,
        "choices": choices,
        "usage": _usage(samples, [answer.usage for answer in answers]),
    }


def _rows_of(samples: Sequence[Sample]) -> list[tuple[list[int], list[float]]]:
    return [
        (ids, logprobs)
        for sample in samples
        for ids, logprobs in zip(sample.completion_ids, sample.completion_logprobs, strict=True)
    ]


def _usage(samples: Sequence[Sample], reported: Sequence[Any]) -> dict[str, int]:
    """Count the tokens of the samples, else use the servers' reports, else 0."""
    if samples:
        num_prompt = sum(len(sample.prompt_ids) for sample in samples)
        num_completion = sum(len(ids) for sample in samples for ids in sample.completion_ids)
    else:
        usages = [usage for usage in reported if usage is not None]
        num_prompt = sum(usage.prompt_tokens for usage in usages)
        num_completion = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
    }


def _chat_logprobs(
    ids: Sequence[int], logprobs: Sequence[float], text_of: TextOf
) -> list[dict[str, Any]]:
    return [
        {
            "token": (text := text_of([token_id])),
            "logprob": logprob,
            "bytes": list(text.encode()) if "\ufffd" not in text else None,
            "top_logprobs": [],
        }
        for token_id, logprob in zip(ids, logprobs, strict=True)
    ]


def _text_logprobs(
    ids: Sequence[int], logprobs: Sequence[float], text_of: TextOf
) -> dict[str, Any]:
    tokens = [text_of([token_id]) for token_id in ids]
    offsets = [0]
    for token in tokens[:-1]:
        offsets.append(offsets[-1] + len(token))
    return {
        "tokens": tokens,
        "token_logprobs": list(logprobs),
        "top_logprobs": None,
        "text_offset": offsets[: len(tokens)],
    }


class RenderedPrompt(NamedTuple):
    """The prompt of a chat request."""

    text: str
    token_ids: list[int]
    """[P] the ids that are sent."""


def _constrain(
    session: SessionState, request: ChatCompletionProxyRequest, kwargs: dict[str, Any]
) -> Sequence[str]:
    """Constrain the engine to the tool calls a request demands; return the unsupported fields.

    Raises:
        ProxyRefusal: the demand is malformed.
    """
    demand = demand_of(request.tool_choice, request.parallel_tool_calls, request.tools)
    managed = session.managed_server
    if not isinstance(managed, ManagedServer):  # a provider has these fields itself
        if demand is not None and demand.is_single:
            kwargs["parallel_tool_calls"] = False
        return ()
    strict = strict_fields(request.tool_choice, request.tools)
    if demand is None:
        return strict
    tool_format = registry.find(session.tool_parser)
    server = present_server(managed.server)
    # Test and user-defined servers may lack the attribute.
    can_constrain = getattr(server, "takes_structural_tags", False) and not managed.is_text_only
    extra = kwargs.get("extra_body") or {}
    begins_reply = kwargs["messages"][-1]["role"] == "assistant"
    form = None
    if (
        can_constrain
        and tool_format is not None
        and managed.tokenizer is not None
        and not begins_reply
        and not extra.get("structured_outputs")
    ):
        is_thinking = _prompt_of(managed, kwargs).text.rstrip().endswith(THINKING_START)
        form = structural_tag(demand, kwargs["tools"], tool_format, is_thinking=is_thinking)
    if form is None:
        return (*demand.fields, *strict)
    unmet = ["response_format"] if extra.get("response_format") else []
    kept = {name: value for name, value in extra.items() if name != "response_format"}
    kwargs["extra_body"] = {**kept, "structured_outputs": {"structural_tag": form}}
    return unmet


def _chat_request(
    body: Mapping[str, Any] | ChatCompletionProxyRequest,
) -> ChatCompletionProxyRequest:
    if isinstance(body, ChatCompletionProxyRequest):
        return body
    return read_body(ChatCompletionProxyRequest, body)


def _prompt_of(managed: ManagedServer, kwargs: Mapping[str, Any]) -> RenderedPrompt:
    """Return the prompt of a chat.

    Raises:
        ProxyRefusal: the chat template refuses the messages, or leaves a text out.
    """
    try:
        text, ids = managed.prompt_of_chat(kwargs["messages"], kwargs.get("tools"))
    except Exception as error:  # templates may raise any exception
        text = f"the chat template refused the messages: {error}"
        raise bad_request(
            str(error) if isinstance(error, PromptError) else text,
            code="render_failed",
            param="messages",
        ) from error
    return RenderedPrompt(text, ids)


def _limit_length(session: SessionState, kwargs: dict[str, Any]) -> None:
    """Lower `max_tokens` to what `max_sequence_tokens` leaves for the completion.

    Raises:
        ContextOverflowError: the prompt leaves no room.
    """
    limit, managed = session.max_sequence_tokens, session.managed_server
    if limit is None or not isinstance(managed, ManagedServer) or managed.tokenizer is None:
        return
    num_prompt_tokens = len(_prompt_of(managed, kwargs).token_ids)
    room = limit - num_prompt_tokens
    if room < 1:
        raise ContextOverflowError(
            f"the prompt has {num_prompt_tokens} tokens, prompt and completion are limited to "
            f"{limit}; reduce the length of the messages",
            prompt_tokens=num_prompt_tokens,
            context_tokens=limit,
        )
    wanted = kwargs.get("max_tokens")
    kwargs["max_tokens"] = room if wanted is None else min(wanted, room)


async def _run_all(
    session: SessionState, calls: list[dict[str, Any]], traceparent: str | None
) -> list[tuple[Any, list[Sample]]]:
    """Make all calls at once; the first failure cancels the others."""

    async def run(kwargs: dict[str, Any]) -> tuple[Any, list[Sample]]:
        return await session.run(
            lambda managed, samples: managed.completion(**{**kwargs, "samples": samples}),
            traceparent=traceparent,
        )

    tasks = [asyncio.ensure_future(run(kwargs)) for kwargs in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def _note_turns(
    session: SessionState,
    samples: Sequence[Sample],
    choices: Sequence[Mapping[str, Any]],
    asked_at: float,
    *,
    messages: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Record the turns of one request, if the session records them."""
    if session.log is None:
        return
    replies = [choice.get("message") or {"content": choice.get("text")} for choice in choices]
    without_ids = Sample([], [[] for _ in replies], [])  # of a server that reports none
    for sample in samples or [without_ids]:
        num_choices = len(sample.completion_ids)
        own, replies = replies[:num_choices], replies[num_choices:]
        session.log.add(sample, messages, own, asked_at=asked_at, answered_at=session.clock())


def _text_of(session: SessionState) -> TextOf | None:
    tokenizer = session.managed_server.tokenizer
    return None if tokenizer is None else lambda ids: str(tokenizer.decode(ids))


@dataclass(frozen=True)
class Exchange:
    """One request of an agent, with its session."""

    session: SessionState
    body: dict[str, Any]
    """The JSON object the agent sent; empty for GET and DELETE."""
    path_params: Mapping[str, str]
    """Values of the `{names}` in the route's path, without the session's."""
    query: Mapping[str, str]
    headers: Mapping[str, str]
    """Headers by lower-case name."""
    ignored: set[str] = field(default_factory=set)
    """Unsupported fields of the body, added by handlers; listed in `IGNORED_HEADER`."""

    async def complete_chat(
        self, body: Mapping[str, Any] | ChatCompletionProxyRequest
    ) -> dict[str, Any]:
        """Answer an OpenAI chat request and record its sequences.

        The answer is complete, whatever `stream` is. Fields that the session's server does not
        support are added to `ignored`.

        Returns:
            An OpenAI chat completion. Each choice has `message` (`content` text or None,
            `tool_calls` only if there are any), `finish_reason` and `logprobs` (None unless
            requested).

        Raises:
            ProxyRefusal: the request is malformed or unsupported, or the session is closed.
            Exception: an engine failure; `as_refusal` converts it.
        """
        session = self.session
        request = _chat_request(body)
        kwargs = chat_kwargs(request, max_choices=session.max_choices)
        self.ignored.update(_constrain(session, request, kwargs))
        session.sampling.apply(kwargs)
        _limit_length(session, kwargs)
        asked_at = session.clock()
        try:
            answer, samples = await session.run(
                lambda managed, samples: managed.chat_completion(**{**kwargs, "samples": samples}),
                traceparent=self.headers.get(HEADER),
            )
        except PromptError as error:
            raise bad_request(str(error), code="render_failed", param="messages") from error
        except (AtroposError, OSError):
            raise
        except Exception:
            managed = session.managed_server
            if isinstance(managed, ManagedServer) and managed.tokenizer is not None:
                _prompt_of(managed, kwargs)  # raises a refusal if the template caused the failure
            raise
        text_of = _text_of(session) if request.logprobs else None
        found = chat_answer(answer, samples, model=session.model_name, text_of=text_of)
        _note_turns(session, samples, found["choices"], asked_at, messages=kwargs["messages"])
        return found

    async def complete_text(self, request: CompletionProxyRequest) -> dict[str, Any]:
        """Continue the prompts of an OpenAI completion request and record the sequences.

        Several prompts are sampled at the same time; the choices of the first one come first.

        Raises:
            ProxyRefusal: as in `complete_chat`.
        """
        session = self.session
        calls = text_kwargs(request, max_choices=session.max_choices)
        for kwargs in calls:
            session.sampling.apply(kwargs)
        asked_at = session.clock()
        found = await _run_all(session, calls, self.headers.get(HEADER))
        samples = [sample for _, row in found for sample in row]
        answer = text_answer(
            [answer for answer, _ in found],
            samples,
            model=session.model_name,
            text_of=_text_of(session) if request.logprobs is not None else None,
        )
        _note_turns(session, samples, answer["choices"], asked_at)
        return answer

    def render(self, body: Mapping[str, Any] | ChatCompletionProxyRequest) -> RenderedPrompt:
        """Return the prompt that `complete_chat` would send; nothing is generated or recorded.

        If the chat continues a recorded sequence, the prompt has the recorded ids.

        Raises:
            ProxyRefusal: the request is malformed, the template refuses the messages, or the
                session has no tokenizer.
        """
        kwargs = chat_kwargs(_chat_request(body), max_choices=self.session.max_choices)
        managed = self.session.managed_server
        if not isinstance(managed, ManagedServer) or managed.tokenizer is None:
            raise bad_request("this session has no tokenizer to render a prompt with")
        return _prompt_of(managed, kwargs)


Handler = Callable[[Exchange], Awaitable[Response]]


@dataclass(frozen=True)
class Route:
    """One route of a dialect."""

    path: str
    """Path below `/v1`. `/messages` is served at `/v1/messages`, where the key identifies the
    session, and at `/{uuid}/v1/messages`."""
    handler: Handler
    method: Literal["GET", "POST", "DELETE"] = "POST"
    invalid_status: int = 400
    """Status for a body with missing or mistyped fields, of a session named in the path; with a key
    it is 400, as that of the providers."""


@dataclass(frozen=True)
class Dialect:
    """A protocol that agents use: its routes and the shape of its errors.

    For every dialect, the key of a session is read from `Authorization: Bearer` and `x-api-key`.
    """

    name: str
    """Name, and key of its state in `SessionState.dialect_state`."""
    routes: tuple[Route, ...]
    error_body: Callable[[ProxyRefusal], dict[str, Any]]
    """Builds the body of an error response; status and headers come from the refusal."""
    version_header: str | None = None
    """Header that every client of this protocol sends, and clients of other protocols do not."""


class Event(NamedTuple):
    """One server-sent event."""

    data: dict[str, Any] | str
    """An object, sent as JSON, or literal text without line breaks, such as `[DONE]`."""
    name: str | None = None
    """Value of the `event:` line; None leaves the line out."""


def stream_events(events: Iterable[Event]) -> StreamingResponse:
    """Return a `text/event-stream` response of the events."""

    async def lines() -> AsyncIterator[str]:
        for event in events:
            data = event.data if isinstance(event.data, str) else json.dumps(event.data)
            head = "" if event.name is None else f"event: {event.name}\n"
            yield f"{head}data: {data}\n\n"

    return StreamingResponse(
        lines(),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )
