"""Policies, which sample the turns of a conversation: exact tokens, a chat, or a recording.

    TokenPolicy      a managed server; its sequences are trained on
    ChatPolicy       a server that answers chats, for evaluations
    RecordedPolicy   the turns of a finished conversation, without a server

The next prompt of a `TokenPolicy` is the sequence so far plus the text that the chat template
writes after a reply; `multi_turn_env` has a drawing. `added_tokens` returns what the latest turn
added to its sequence, and `restore_turn` adds it again in another process (`turn_journal`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec

from atroposlib.envs.conversation import ChatMessage
from atroposlib.envs.server_handling.chat_rendering import render_messages, text_of_content
from atroposlib.envs.server_handling.server_baseline import TOKEN_VERSIONS, note_node
from atroposlib.envs.server_handling.turn_recording import SequenceNode
from atroposlib.envs.single_turn_env import RESERVED_TOKENS, ask, complete, completion_budget
from atroposlib.scored_data import IGNORE_INDEX, join_runs

__all__ = [
    "AddedTokens",
    "ChatPolicy",
    "Policy",
    "PolicyTurn",
    "RecordedPolicy",
    "TokenPolicy",
    "TokenSequence",
    "TurnSpan",
    "Written",
]


REPLY_MARK = "\ue010reply\ue011"
"""Placeholder for a reply in the output of a template, of private-use characters."""


class TurnSpan(NamedTuple):
    """Positions of one turn's sampled tokens in a sequence."""

    turn: int
    """Index of the turn in its rollout."""
    start: int
    """Position of its first token."""
    end: int
    """Position after its last token."""


@dataclass
class TokenSequence:
    """One token sequence of a rollout, with its turns."""

    tokens: list[int]
    """[L] ids from the engine, or those of its texts."""
    masks: list[int]
    """[L] ids of sampled tokens, -100 elsewhere."""
    inference_logprobs: list[float]
    """[L] the policy's logprobs, 1.0 where masked."""
    messages: list[ChatMessage]
    """The chat of this sequence."""
    spans: list[TurnSpan]
    finish_reason: str | None = None
    """Reason why the engine ended the last turn; None if unknown."""


class Written(Protocol):
    """A completion, and whether the token limit truncated it."""

    @property
    def text(self) -> str: ...
    @property
    def is_cut(self) -> bool: ...


@dataclass(frozen=True)
class PolicyTurn:
    """A completion as text."""

    text: str
    is_cut: bool


class AddedTokens(msgspec.Struct, frozen=True, array_like=True):
    """The tokens that one turn added to its rollout: prompt and completion."""

    starts_sequence: bool
    """Whether the turn began a sequence, of a new history."""
    num_kept: int
    """Tokens of the sequence before the turn; `tokens` follow them."""
    num_kept_characters: int
    """Characters of the sequence's text before the turn; `text` follows them."""
    tokens: list[int]
    masks: list[int]
    logprobs: list[float]
    text: str
    start: int
    """Position of the first sampled token in the sequence."""
    metadata: dict[str, Any] | None
    """That of the whole sequence; see `SequenceNode`."""


class Policy(Protocol):
    """Samples the turns of a conversation."""

    def budget(self, chat: Sequence[ChatMessage], *, max_tokens: int) -> int:
        """Return the maximum number of tokens of the next turn; below 1 there is no room."""

    async def write(self, chat: Sequence[ChatMessage], *, max_tokens: int) -> Written:
        """Sample the next turn."""

    def sequences(self) -> list[TokenSequence]:
        """Return the sequences so far, with turns numbered from 0."""


class ChatPolicy:
    """A server that answers chats, without tokens, for evaluations.

    Args:
        server: an object with `chat_completion`.
        tokenizer: tokenizer for the length of prompts.
        sampling: further parameters of each request, such as `temperature` or `split`.
    """

    def __init__(self, server: Any, tokenizer: Any, **sampling: Any) -> None:
        self._server = server
        self._tokenizer = tokenizer
        self._sampling = sampling

    def budget(self, chat: Sequence[ChatMessage], *, max_tokens: int) -> int:
        return completion_budget(self._tokenizer, chat, max_token_length=max_tokens)

    async def write(self, chat: Sequence[ChatMessage], *, max_tokens: int) -> Written:
        answer = await self._server.chat_completion(
            messages=list(chat), n=1, max_tokens=max_tokens, **self._sampling
        )
        [choice] = answer.choices
        text = text_of_content(choice.message.content)
        return PolicyTurn(text, choice.finish_reason == "length")

    def sequences(self) -> list[TokenSequence]:
        return []


class TokenPolicy:
    """A managed server that continues a sequence turn by turn.

    Args:
        managed: a session for this conversation only.
        tokenizer: tokenizer for rendering prompts.
        sampling: further parameters of each request, such as `temperature`.
    """

    def __init__(self, managed: Any, tokenizer: Any, **sampling: Any) -> None:
        self._managed = managed
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._node: SequenceNode | None = None
        self._chat: list[ChatMessage] = []
        self._spans: list[TurnSpan] = []
        self._finished: list[TokenSequence] = []
        self._num_turns = 0
        self._before: SequenceNode | None = None  # the sequence before the latest turn

    def budget(self, chat: Sequence[ChatMessage], *, max_tokens: int) -> int:
        added = self._added_text(chat)
        if self._node is None or added is None:
            prompt = render_messages(self._tokenizer, chat)
            num_tokens = len(self._tokenizer.encode(prompt, add_special_tokens=True))
        else:
            new_ids = self._tokenizer.encode(added, add_special_tokens=False)
            num_tokens = len(self._node.tokens) + len(new_ids)
        return max_tokens - num_tokens - RESERVED_TOKENS

    async def write(self, chat: Sequence[ChatMessage], *, max_tokens: int) -> Written:
        """Sample the next turn; a chat that does not continue the last one starts a sequence."""
        added = self._added_text(chat)
        if self._node is None or added is None:
            self._finish_sequence()
            prompt = render_messages(self._tokenizer, chat)
        else:
            prompt = self._node.full_text + added
        self._before = self._node
        known_length = 0 if self._node is None else len(self._node.tokens)
        sampling = {"n": 1, "max_tokens": max_tokens, **self._sampling}
        if getattr(self._managed, "is_text_only", False):  # custom servers may lack it
            # A provider renders chats itself, maybe with another template.
            [answer] = await ask(self._managed, self._tokenizer, chat, **sampling)
        else:
            [answer] = await complete(self._managed, prompt, chat=chat, **sampling)
        node: SequenceNode = self._managed.get_state()["nodes"][-1]
        start = _start_of_last_run(node.masked_tokens, known_length)
        self._spans.append(TurnSpan(self._num_turns, start, len(node.tokens)))
        self._num_turns += 1
        self._node = node
        self._chat = [*chat, {"role": "assistant", "content": answer.completion}]
        return PolicyTurn(answer.completion, answer.finish_reason == "length")

    def added_tokens(self) -> AddedTokens:
        """Return what the latest turn added; called after a `write`."""
        if self._node is None:
            raise RuntimeError("no turn is written yet")
        node, before = self._node, self._before
        kept, kept_text = (0, "") if before is None else (len(before.tokens), before.full_text)
        if before is not None and node.tokens[:kept] != before.tokens:
            kept = 0  # the engine read other tokens
        if not node.full_text.startswith(kept_text):
            kept_text = ""
        return AddedTokens(
            starts_sequence=before is None,
            num_kept=kept,
            num_kept_characters=len(kept_text),
            tokens=node.tokens[kept:],
            masks=node.masked_tokens[kept:],
            logprobs=node.logprobs[kept:],
            text=node.full_text[len(kept_text) :],
            start=self._spans[-1].start,
            metadata=node.metadata,
        )

    def restore_turn(self, added: AddedTokens, chat: Sequence[ChatMessage], reply: str) -> None:
        """Add a turn of an earlier process, as `write` added it there; nothing is sampled.

        Args:
            added: `added_tokens` of that turn; all turns before it are restored.
            chat: the messages that it answered.
            reply: its text.
        """
        if added.starts_sequence:
            self._finish_sequence()
        before = self._node
        tokens, masks, logprobs, text = (
            ([], [], [], "")
            if before is None
            else (before.tokens, before.masked_tokens, before.logprobs, before.full_text)
        )
        kept = added.num_kept
        metadata = None if added.metadata is None else dict(added.metadata)
        if metadata and metadata.get(TOKEN_VERSIONS) is not None:
            metadata[TOKEN_VERSIONS] = join_runs(metadata[TOKEN_VERSIONS])
        self._node = SequenceNode.model_construct(
            full_text=text[: added.num_kept_characters] + added.text,
            tokens=[*tokens[:kept], *added.tokens],
            masked_tokens=[*masks[:kept], *added.masks],
            logprobs=[*logprobs[:kept], *added.logprobs],
            metadata=metadata,
        )
        self._spans.append(TurnSpan(self._num_turns, added.start, len(self._node.tokens)))
        self._num_turns += 1
        self._before = before
        self._chat = [*chat, {"role": "assistant", "content": reply}]
        # The session continues the sequence whose text the next prompt starts with.
        self._managed.reset()
        self._managed.current_nodes.append(self._node)
        note_node(self._node.tokens, metadata)

    def sequences(self) -> list[TokenSequence]:
        current = self._current_sequence()
        return self._finished if current is None else [*self._finished, current]

    def _added_text(self, chat: Sequence[ChatMessage]) -> str | None:
        """Return the template's text after the last turn; None if the chat does not continue it."""
        length = len(self._chat)
        if self._node is None or length == 0 or list(chat[:length]) != self._chat:
            return None
        mark = REPLY_MARK
        while any(mark in str(message.get("content")) for message in chat):
            mark += REPLY_MARK  # a message that contains the mark must not match it
        marked = [*chat[: length - 1], {"role": "assistant", "content": mark}]
        text = render_messages(self._tokenizer, [*marked, *chat[length:]])
        _, found, added = text.partition(mark)
        return added if found else None

    def _finish_sequence(self) -> None:
        self._finished = self.sequences()
        self._managed.reset()
        self._node, self._chat, self._spans = None, [], []

    def _current_sequence(self) -> TokenSequence | None:
        if self._node is None:
            return None
        return TokenSequence(
            tokens=self._node.tokens,
            masks=self._node.masked_tokens,
            inference_logprobs=self._node.logprobs,
            messages=list(self._chat),
            spans=list(self._spans),
            finish_reason=(self._node.metadata or {}).get("finish_reason"),
        )


class RecordedPolicy:
    """Repeats the turns of a recorded conversation, without a server.

    Args:
        replies: the completions; the conversation is truncated after the last one.
        is_last_cut: Whether a token limit truncated the last completion.
    """

    def __init__(self, replies: Sequence[str], *, is_last_cut: bool) -> None:
        self._replies = list(replies)
        self._is_last_cut = is_last_cut

    def budget(self, chat: Sequence[ChatMessage], *, max_tokens: int) -> int:
        return len(self._replies)

    async def write(self, chat: Sequence[ChatMessage], *, max_tokens: int) -> Written:
        text = self._replies.pop(0)
        return PolicyTurn(text, self._is_last_cut and not self._replies)

    def sequences(self) -> list[TokenSequence]:
        return []


def _start_of_last_run(masks: Sequence[int], at_least: int) -> int:
    """Return the start of the sampled tokens at the end, at least `at_least`."""
    start = len(masks)
    while start > at_least and masks[start - 1] != IGNORE_INDEX:
        start -= 1
    return start
