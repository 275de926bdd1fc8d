"""A session whose chat answers are set beforehand, for handlers without any network."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from starlette.responses import Response, StreamingResponse

from atroposlib.envs.server_handling.proxy.exchange import Dialect, Exchange, RenderedPrompt

__all__ = ["Reply", "ScriptedSession", "chat_completion", "reply_of", "tool_call"]


def tool_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A tool call in the form of the chat APIs."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def chat_completion(
    content: str | None, *, calls: Iterable[Mapping[str, Any]] = (), finish_reason: str = "stop"
) -> dict[str, Any]:
    """A chat completion of 7 prompt and 5 completion tokens."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls := list(calls):
        message["tool_calls"] = calls
        finish_reason = "tool_calls"
    choice = {"index": 0, "message": message, "finish_reason": finish_reason, "logprobs": None}
    usage = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
    return {"id": "chatcmpl-1", "object": "chat.completion", "choices": [choice], "usage": usage}


class Reply(NamedTuple):
    """What a handler answered."""

    body: Any
    """Decoded JSON, None for a stream."""
    events: list[dict[str, Any]]
    """Data of a stream's events."""
    names: list[str]
    """Their names."""


class ScriptedSession:
    """Plays one session to the handlers of a dialect.

    Attributes:
        answers: Chat completions to give, or errors to raise, in order.
        requests: Chat requests received.
        prompt: What rendering a request gives.
    """

    def __init__(self, dialect: Dialect, answers: Iterable[Any] = ()) -> None:
        self.dialect = dialect
        self.answers = list(answers)
        self.requests: list[dict[str, Any]] = []
        self.prompt = RenderedPrompt("[user]Hi", [1, 2, 3])
        self.model_name = "tiny"
        self.dialect_state: dict[str, Any] = {}

    async def post(self, path: str, body: Mapping[str, Any]) -> Reply:
        """Answer a POST of a body that has been JSON."""
        return await self.call("POST", path, json.loads(json.dumps(body)))

    async def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, **path_params: str
    ) -> Reply:
        """Answer a request of one route, whose path holds the `{names}` of `path_params`."""
        [route] = [r for r in self.dialect.routes if (r.method, r.path) == (method, path)]
        exchange = _Exchange(self, dict(body or {}), path_params, {}, {})  # type: ignore[arg-type]
        return await reply_of(await route.handler(exchange))


class _Exchange(Exchange):
    """An exchange that asks the script instead of an engine."""

    session: Any

    async def complete_chat(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self.session.requests.append(json.loads(json.dumps(request)))
        answer: dict[str, Any] | Exception = self.session.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def render(self, request: Mapping[str, Any]) -> RenderedPrompt:
        self.session.requests.append(json.loads(json.dumps(request)))
        prompt: RenderedPrompt = self.session.prompt
        return prompt


async def reply_of(response: Response) -> Reply:
    """Return what a response says, of a stream its events."""
    if not isinstance(response, StreamingResponse):
        return Reply(json.loads(bytes(response.body)), [], [])
    text = "".join([str(piece) async for piece in response.body_iterator])
    events, names = [], []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n", 1)
        names.append(name.removeprefix("event: "))
        events.append(json.loads(data.removeprefix("data: ")))
    return Reply(None, events, names)
