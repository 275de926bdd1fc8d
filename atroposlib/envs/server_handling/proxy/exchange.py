"""One request of an agent, from OpenAI's form to OpenAI's form, through the session's tracked path.

    OpenAI request ─► checked fields ─► ManagedServer ─► engine
                                              │ exact tokens into the session's nodes
    OpenAI answer ◄── texts, tool calls ◄─────┘

Every dialect goes through here, so a session is one record whatever its agents speak.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
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
from atroposlib.errors import AtroposError

__all__ = ["RenderedPrompt", "complete_chat", "complete_text", "render"]


class RenderedPrompt(NamedTuple):
    """The prompt of a chat request."""

    text: str
    token_ids: list[int]
    """[P] ids of the text, without special tokens of the tokenizer's own."""


async def complete_chat(
    session: SessionState, body: Mapping[str, Any] | ChatCompletionProxyRequest
) -> dict[str, Any]:
    """Answer a chat request and record its sequences.

    Args:
        session: Whose sequences the request continues.
        body: An OpenAI chat request, read or not. `stream` is ignored: the answer is whole, and
            streaming is the dialect's affair.

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
    try:
        answer, samples = await session.run(lambda managed: managed.chat_completion(**kwargs))
    except (AtroposError, OSError):
        raise
    except Exception:
        _prompt_of(session, kwargs)  # tells when it was the template's doing
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
    """Return the prompt of a chat's next reply; nothing is generated or recorded.

    A reply is opened behind an assistant's message too, which `complete_chat` would continue.

    Raises:
        ProxyRefusal: the request is malformed, the template refuses the messages, or the
            session's server gives no token ids and so renders nothing here.
    """
    kwargs = chat_kwargs(_chat_request(body), max_choices=session.max_choices)
    text = _prompt_of(session, kwargs)
    managed = session.managed_server
    if text is None or managed.tokenizer is None:
        raise bad_request("this session has no tokenizer to render a prompt with")
    if kwargs["messages"][-1]["role"] == "assistant":
        text += _reply_opening(managed.tokenizer)
    return RenderedPrompt(text, list(managed.tokenizer.encode(text, add_special_tokens=False)))


def _chat_request(
    body: Mapping[str, Any] | ChatCompletionProxyRequest,
) -> ChatCompletionProxyRequest:
    if isinstance(body, ChatCompletionProxyRequest):
        return body
    return read_body(ChatCompletionProxyRequest, body)


def _prompt_of(session: SessionState, kwargs: Mapping[str, Any]) -> str | None:
    """Return the prompt text of a chat; None when the engine renders it.

    Raises:
        ProxyRefusal: the chat template refuses the messages.
    """
    managed = session.managed_server
    if not isinstance(managed, ManagedServer):
        return None
    try:
        return managed._convert_messages_to_prompt(kwargs["messages"], kwargs.get("tools"))
    except Exception as error:  # templates are code that raises anything
        raise bad_request(
            f"the chat template refused the messages: {error}", code="render_failed"
        ) from error


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


def _reply_opening(tokenizer: Any) -> str:
    """Return what the chat template writes in front of a reply."""
    if not hasattr(tokenizer, "apply_chat_template"):
        return ""
    messages = [{"role": "user", "content": "x"}]
    closed, opened = (
        str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=is_open))
        for is_open in (False, True)
    )
    return opened.removeprefix(closed)


def _text_of(session: SessionState) -> TextOf | None:
    tokenizer = session.managed_server.tokenizer
    return None if tokenizer is None else lambda ids: str(tokenizer.decode(ids))
