"""Client of a tracked session at a proxy in another process, with a managed server's interface.

chat_completion ──► POST /{uuid}/v1/chat/completions
get_state ◄──────── GET  /{uuid}/nodes, fetched after every chat
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import aiohttp

from atroposlib.envs.server_handling.server_baseline import note_node
from atroposlib.envs.server_handling.turn_recording import SequenceNode
from atroposlib.errors import InferenceError, NoTextCompletionsError
from atroposlib.utils.text import without_secrets
from atroposlib.utils.tracing import trace_headers

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion

__all__ = ["ProxyManagedServer", "create_proxy_session"]

logger = logging.getLogger(__name__)

_SHORT_TIMEOUT_S = 30.0
_CHAT_TIMEOUT_S = 300.0
_CHAT_DEFAULTS: Mapping[str, Any] = {"max_tokens": 1024, "temperature": 1.0, "n": 1}
_LOCAL_ONLY = ("split", "skip_reasoning", "timeout", "extra_headers")


class ChatsOnlyError(NoTextCompletionsError, NotImplementedError):
    """A session at a proxy was asked to continue a text; environments then send a chat."""


async def create_proxy_session(
    proxy_url: str,
    base_url: str | None = None,
    tool_parser: str = "hermes",
    track_tree: bool = False,
    model_name: str = "unknown",
    *,
    admin_key: str | None = None,
) -> ProxyManagedServer:
    """Open a session at a proxy.

    Args:
        proxy_url: URL of the proxy, without `/v1`.
        base_url: Inference server to use; None lets the proxy choose.
        tool_parser: Tool-call format of the model.
        track_tree: Whether to keep every sequence instead of replacing the continued one.
        model_name: Name to use if the proxy does not return one.
        admin_key: Administrator key of the proxy, if it has one.

    Raises:
        RuntimeError: the proxy refused, with its message.
    """
    root = proxy_url.rstrip("/")
    body = {"tool_parser": tool_parser, "track_tree": track_tree, "base_url": base_url}
    answer = await _ask(
        "POST", f"{root}/sessions/create", body, key=admin_key, timeout_s=_SHORT_TIMEOUT_S
    )
    return ProxyManagedServer(
        root,
        answer["uuid"],
        answer.get("model_name") or model_name,
        answer.get("base_url") or base_url,
        api_key=answer.get("api_key"),
    )


class ProxyManagedServer:
    """A session at a proxy; `async with` it to fetch its sequences and delete it at the end.

    Attributes:
        proxy_url: URL of the proxy, without a trailing slash.
        session_uuid: Name of the session.
        model_name: Model name in answers.
        base_url: Inference server of the session, None when unknown.
        api_key: Key of the session, None when unknown.
    """

    def __init__(
        self,
        proxy_url: str,
        session_uuid: str,
        model_name: str = "unknown",
        base_url: str | None = None,
        *,
        api_key: str | None = None,
    ) -> None:
        self.proxy_url = proxy_url.rstrip("/")
        self.session_uuid = session_uuid
        self.model_name = model_name
        self.base_url = base_url
        self.api_key = api_key
        self._nodes: list[SequenceNode] = []

    def get_url(self) -> str:
        """Return the base URL for an agent's OpenAI client; its key is `api_key`."""
        return f"{self.proxy_url}/{self.session_uuid}/v1"

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        """Return the answer to `messages` and refresh the state.

        `kwargs` are the fields of an OpenAI chat request; `max_tokens` defaults to 1024.

        Raises:
            RuntimeError: the proxy refused, with its message.
        """
        from openai.types.chat.chat_completion import Choice

        from atroposlib.envs.server_handling.tool_call_answers import ToolCallChat, ToolCallChoice

        body = {**_CHAT_DEFAULTS, **kwargs}
        for name in _LOCAL_ONLY:
            body.pop(name, None)
        answer = await self._ask("POST", "/v1/chat/completions", body, timeout_s=_CHAT_TIMEOUT_S)
        await self.fetch_state()
        choices = [
            (ToolCallChoice if choice["message"].get("tool_calls") else Choice).model_validate(
                choice
            )
            for choice in answer["choices"]
        ]
        return ToolCallChat.model_validate({**answer, "choices": choices})

    async def completion(self, **kwargs: Any) -> NoReturn:
        raise ChatsOnlyError("a session at a proxy answers chats only; use chat_completion")

    def get_state(self) -> dict[str, Any]:
        return {"nodes": list(self._nodes)}

    async def fetch_state(self) -> dict[str, Any]:
        """Fetch the sequences from the proxy and return them; RuntimeError when it refuses."""
        answer = await self._ask("GET", "/nodes", None, timeout_s=_SHORT_TIMEOUT_S)
        self._nodes = [SequenceNode.model_validate(node) for node in answer["nodes"]]
        for node in self._nodes:
            note_node(node.tokens, node.metadata)
        return self.get_state()

    def reset(self) -> None:
        self._nodes = []

    async def cleanup(self) -> None:
        """Delete the session; a failure is only logged, since the session expires by itself."""
        try:
            await self._ask("DELETE", "", None, timeout_s=_SHORT_TIMEOUT_S)
        except (RuntimeError, OSError, aiohttp.ClientError, asyncio.TimeoutError) as error:
            logger.warning(
                "the session at %s was not deleted: %s", without_secrets(self.proxy_url), error
            )

    async def __aenter__(self) -> ProxyManagedServer:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                await self.fetch_state()
        finally:
            await self.cleanup()

    async def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, timeout_s: float
    ) -> Any:
        url = f"{self.proxy_url}/{self.session_uuid}{path}"
        return await _ask(method, url, body, key=self.api_key, timeout_s=timeout_s)


async def _ask(
    method: str, url: str, body: Mapping[str, Any] | None, *, key: str | None, timeout_s: float
) -> Any:
    """Return the JSON of an answer; InferenceError, a RuntimeError, for a refusal."""
    headers = {**({"Authorization": f"Bearer {key}"} if key else {}), **trace_headers()}
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with (
        aiohttp.ClientSession(timeout=timeout, headers=headers) as http,
        http.request(method, url, json=None if body is None else dict(body)) as response,
    ):
        if response.status == 200:
            return await response.json()
        raise InferenceError(
            f"the proxy answered {method} with status {response.status}: "
            f"{_message_of(await response.text())}"
        )


def _message_of(text: str) -> str:
    """Return the message of an error body in OpenAI's shape, else its beginning."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return text[:200]
