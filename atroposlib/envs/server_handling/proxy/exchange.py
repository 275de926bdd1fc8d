"""One request of an agent, from OpenAI's form to OpenAI's form, through the session's tracked path.

    OpenAI request ─► checked fields ─► ManagedServer ─► engine
                                              │ exact tokens into the session's nodes
    OpenAI answer ◄── texts, tool calls ◄─────┘

Every dialect goes through here, so a session is one record whatever its agents speak.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from atroposlib.envs.server_handling.managed_server import ManagedServer
from atroposlib.envs.server_handling.proxy.answers import TextOf, chat_answer, text_answer
from atroposlib.envs.server_handling.proxy.refusals import bad_request
from atroposlib.envs.server_handling.proxy.request_models import (
    ChatCompletionProxyRequest,
    CompletionProxyRequest,
    read_body,
)
from atroposlib.envs.server_handling.proxy.sampling import chat_kwargs, text_kwargs
from atroposlib.envs.server_handling.proxy.session import SessionState
from atroposlib.envs.server_handling.proxy.session_server import Sample
from atroposlib.envs.server_handling.proxy.tool_constraints import (
    demand_of,
    strict_fields,
    structural_tag,
)
from atroposlib.envs.server_handling.routing import present_server
from atroposlib.envs.server_handling.tool_formats import registry
from atroposlib.envs.server_handling.turn_matching import THINKING_START
from atroposlib.errors import AtroposError, PromptError

__all__ = ["RenderedPrompt", "complete_chat", "complete_text", "render"]


class RenderedPrompt(NamedTuple):
    """The prompt of a chat request."""

    text: str
    token_ids: list[int]
    """[P] the ids that are sent."""


async def complete_chat(
    session: SessionState,
    body: Mapping[str, Any] | ChatCompletionProxyRequest,
    *,
    ignored: set[str] | None = None,
) -> dict[str, Any]:
    """Answer a chat request and record its sequences.

    Args:
        session: Whose sequences the request continues.
        body: An OpenAI chat request, read or not. `stream` is ignored: the answer is whole, and
            streaming is the dialect's affair.
        ignored: Receives the fields that the session's server cannot honour.

    Returns:
        An OpenAI chat completion: `id`, `object`, `created`, `model`, `choices`, `usage`. Each
        choice has `message` (`content` text or None, `tool_calls` only when there are any),
        `finish_reason` and `logprobs` (only when asked for, else None).

    Raises:
        ProxyRefusal: the request is malformed or cannot be honoured, or the session is gone.
        Exception: whatever the engine's failure raised; `as_refusal` knows them.
    """
    request = _chat_request(body)
    kwargs = chat_kwargs(request, max_choices=session.max_choices)
    unmet = _constrain(session, request, kwargs)
    if ignored is not None:
        ignored.update(unmet)
    try:
        answer, samples = await session.run(lambda managed: managed.chat_completion(**kwargs))
    except PromptError as error:
        raise bad_request(str(error), code="render_failed", param="messages") from error
    except (AtroposError, OSError):
        raise
    except Exception:
        managed = session.managed_server
        if isinstance(managed, ManagedServer) and managed.tokenizer is not None:
            _prompt_of(managed, kwargs)  # tells when it was the template's doing
        raise
    text_of = _text_of(session) if request.logprobs else None
    return chat_answer(answer, samples, model=session.model_name, text_of=text_of)


async def complete_text(session: SessionState, request: CompletionProxyRequest) -> dict[str, Any]:
    """Continue the prompts of a text request and record the sequences.

    Args:
        session: Whose sequences the prompts continue.
        request: An OpenAI completion request; several prompts are sampled at the same time.

    Returns:
        An OpenAI completion, the choices of the first prompt first.

    Raises:
        ProxyRefusal: as in `complete_chat`.
    """
    calls = text_kwargs(request, max_choices=session.max_choices)
    found = await _run_all(session, calls)
    samples: list[Sample] = [sample for _, row in found for sample in row]
    return text_answer(
        [answer for answer, _ in found],
        samples,
        model=session.model_name,
        text_of=_text_of(session) if request.logprobs is not None else None,
    )


def render(
    session: SessionState, body: Mapping[str, Any] | ChatCompletionProxyRequest
) -> RenderedPrompt:
    """Return the prompt that `complete_chat` would send; nothing is generated or recorded.

    Where the chat continues a recorded sequence, its ids are the recorded ones.

    Raises:
        ProxyRefusal: the request is malformed, the template refuses the messages, or the
            session's server gives no token ids and so renders nothing here.
    """
    kwargs = chat_kwargs(_chat_request(body), max_choices=session.max_choices)
    managed = session.managed_server
    if not isinstance(managed, ManagedServer) or managed.tokenizer is None:
        raise bad_request("this session has no tokenizer to render a prompt with")
    return _prompt_of(managed, kwargs)


def _constrain(
    session: SessionState, request: ChatCompletionProxyRequest, kwargs: dict[str, Any]
) -> Sequence[str]:
    """Let the engine keep to what a request demands of its calls; return the fields that it cannot.

    Raises:
        ProxyRefusal: the demand cannot be understood.
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
    # Servers of tests and of users need not say what they take.
    can_constrain = getattr(server, "takes_structural_tags", False) and not managed.is_text_only
    extra = kwargs.get("extra_body") or {}
    begins_reply = kwargs["messages"][-1]["role"] == "assistant"
    if not can_constrain or tool_format is None or managed.tokenizer is None or begins_reply:
        return (*demand.fields, *strict)
    if extra.get("structured_outputs"):
        return (*demand.fields, *strict)
    prompt = _prompt_of(managed, kwargs).text
    form = structural_tag(
        demand, kwargs["tools"], tool_format, is_thinking=prompt.rstrip().endswith(THINKING_START)
    )
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
    except Exception as error:  # templates are code that raises anything
        said = str(error) if isinstance(error, PromptError) else None
        raise bad_request(
            said or f"the chat template refused the messages: {error}",
            code="render_failed",
            param="messages",
        ) from error
    return RenderedPrompt(text, ids)


async def _run_all(
    session: SessionState, calls: list[dict[str, Any]]
) -> list[tuple[Any, list[Sample]]]:
    """Make all calls at once; the first failure cancels the others."""

    async def run(kwargs: dict[str, Any]) -> tuple[Any, list[Sample]]:
        return await session.run(lambda managed: managed.completion(**kwargs))

    tasks = [asyncio.ensure_future(run(kwargs)) for kwargs in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def _text_of(session: SessionState) -> TextOf | None:
    tokenizer = session.managed_server.tokenizer
    return None if tokenizer is None else lambda ids: str(tokenizer.decode(ids))
