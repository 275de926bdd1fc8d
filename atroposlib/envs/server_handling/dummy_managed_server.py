"""Stand-ins around a managed server: placeholder tokens, and the shape of an OpenAI client."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from atroposlib.envs.server_handling.sequence_tracker import SequenceNode
from atroposlib.scored_data import IGNORE_INDEX, PLACEHOLDER_TOKENS

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion
    from openai.types.completion import Completion

__all__ = ["DummyManagedServer", "ManagedServerAdapter"]


class DummyManagedServer:
    """A session at a server without token ids: real texts, placeholder tokens.

    Lets an environment run against any provider. Its sequences say nothing about what was sampled
    and must not be trained on: `metadata["dummy_tokens"]` is True in each, and exports and trainers
    refuse them (`scored_data.has_placeholder_tokens`).
    """

    DUMMY_TOKENS: ClassVar[list[int]] = list(PLACEHOLDER_TOKENS)
    DUMMY_MASKED_TOKENS: ClassVar[list[int]] = [IGNORE_INDEX, *PLACEHOLDER_TOKENS[1:]]
    DUMMY_LOGPROBS: ClassVar[list[float]] = [-0.5] * len(PLACEHOLDER_TOKENS)

    def __init__(self, server: Any, tokenizer: Any = None, track_tree: bool = False) -> None:
        self.server = server
        self.tokenizer = tokenizer
        self.track_tree = track_tree
        self.current_nodes: list[SequenceNode] = []

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        """Return the server's answer and add one node per choice."""
        answer: ChatCompletion = await self.server.chat_completion(**kwargs)
        blocks = [f"{m['role']}:{m.get('content') or ''}" for m in kwargs["messages"]]
        for choice in answer.choices:
            text = "\n\n".join([*blocks, f"assistant:{choice.message.content or ''}"])
            self._track(text, choice.finish_reason)
        return answer

    async def completion(self, **kwargs: Any) -> Completion:
        """Return the server's answer and add one node per choice."""
        answer: Completion = await self.server.completion(**kwargs)
        for choice in answer.choices:
            self._track(kwargs["prompt"] + choice.text, choice.finish_reason)
        return answer

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        """Raise: this server has no logprobs."""
        raise NotImplementedError("a server without token ids does not implement get_logprobs")

    def get_state(self) -> dict[str, Any]:
        """Return `{"nodes": [...]}`, or `{"sequences": ..., "tree": ...}` in tree mode."""
        if self.track_tree:
            sequences = {node.full_text: node for node in self.current_nodes}
            return {"sequences": sequences, "tree": dict(sequences)}
        return {"nodes": list(self.current_nodes)}

    def reset(self) -> None:
        """Forget every node."""
        self.current_nodes = []

    def _track(self, full_text: str, finish_reason: str | None) -> None:
        self.current_nodes.append(
            SequenceNode(
                full_text=full_text,
                tokens=list(self.DUMMY_TOKENS),
                masked_tokens=list(self.DUMMY_MASKED_TOKENS),
                logprobs=list(self.DUMMY_LOGPROBS),
                metadata={"finish_reason": finish_reason or "stop", "dummy_tokens": True},
            )
        )


class ManagedServerAdapter:
    """A managed server in the shape of an async OpenAI client.

    Offers `chat.completions.create` and `completions.create`; everything else of the client is
    refused, since it would bypass the recording of tokens.
    """

    def __init__(self, managed_server: Any, base_url: str) -> None:
        self.base_url = base_url
        self.completions = SimpleNamespace(create=managed_server.completion)
        self.chat = SimpleNamespace(
            completions=SimpleNamespace(create=managed_server.chat_completion)
        )

    async def post(self, path: str, body: Any, cast_to: Any) -> NoReturn:
        """Raise: raw requests would not be recorded."""
        raise NotImplementedError(f"a managed server records no raw request to {path}")

    def copy(self, **kwargs: Any) -> NoReturn:
        """Raise: a copy would not share the recorded sequences."""
        raise NotImplementedError("a managed server cannot be copied with other settings")
