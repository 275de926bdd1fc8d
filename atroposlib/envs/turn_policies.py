"""Whoever writes the turns of a conversation: a managed server with exact tokens, or any chat.

A turn is continued by the text a chat template puts *behind* a reply, never by rendering the reply
again: a template that trims, drops thinking or rewrites history cannot break the sequence.

    sequence so far   <user>…<assistant> r e p l y
    template shows    <user>…<assistant> MARK </s><user> n e x t <assistant>
    next prompt       <user>…<assistant> r e p l y </s><user> n e x t <assistant>
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from atroposlib.envs.conversation import ChatMessage
from atroposlib.envs.server_handling.chat_rendering import render_messages
from atroposlib.envs.server_handling.sequence_tracker import SequenceNode
from atroposlib.envs.single_turn import RESERVED_TOKENS, ask, complete, completion_budget
from atroposlib.envs.turn_rewards import TurnSpan
from atroposlib.scored_data import IGNORE_INDEX

__all__ = ["ChatPolicy", "Policy", "TokenPolicy", "TokenSequence", "Written"]

REPLY_MARK = "\ue010reply\ue011"
"""Stands for a reply while a template shows what it writes behind one; private-use characters."""


@dataclass
class TokenSequence:
    """One token sequence of a rollout, with the turns sampled in it."""

    tokens: list[int]
    """[L] ids as the engine reported them, or those of its texts."""
    masks: list[int]
    """[L] the id where it was sampled, -100 elsewhere."""
    inference_logprobs: list[float]
    """[L] the policy's logprobs, 1.0 where masked."""
    messages: list[ChatMessage]
    """The chat, as far as it goes in this sequence."""
    spans: list[TurnSpan]
    """The turns."""
    finish_reason: str | None = None
    """Why the engine ended the last turn; None where unknown."""


class Written(Protocol):
    """What a policy wrote."""

    @property
    def text(self) -> str:
        """The completion."""

    @property
    def is_cut(self) -> bool:
        """Whether the token limit ended it."""


@dataclass(frozen=True)
class _Written:
    text: str
    is_cut: bool


class Policy(Protocol):
    """Whoever writes the turns."""

    def budget(self, chat: Sequence[ChatMessage], *, max_tokens: int) -> int:
        """Return how many tokens the next turn may have; below 1 there is no room."""

    async def write(self, chat: Sequence[ChatMessage], *, max_tokens: int) -> Written:
        """Wait for the next turn."""

    def sequences(self) -> list[TokenSequence]:
        """Return what was sampled so far, the turns numbered from 0."""


class ChatPolicy:
    """A server asked for chats, without tokens: evaluations, and other people's models.

    Args:
        server: anything with `chat_completion`.
        tokenizer: measures prompts.
        sampling: what else each request carries, as `temperature` or `split`.
    """

    def __init__(self, server: Any, tokenizer: Any, **sampling: Any) -> None:
        self._server = server
        self._tokenizer = tokenizer
        self._sampling = sampling

    def budget(self, chat: Sequence[ChatMessage], *, max_tokens: int) -> int:
        """Return the tokens left behind the rendered chat."""
        return completion_budget(self._tokenizer, chat, max_token_length=max_tokens)

    async def write(self, chat: Sequence[ChatMessage], *, max_tokens: int) -> Written:
        """Wait for the answer to a chat."""
        answer = await self._server.chat_completion(
            messages=list(chat), n=1, max_tokens=max_tokens, **self._sampling
        )
        [choice] = answer.choices
        return _Written(choice.message.content or "", choice.finish_reason == "length")

    def sequences(self) -> list[TokenSequence]:
        """Return nothing: there are no tokens."""
        return []


class TokenPolicy:
    """A managed server that continues one sequence by its tokens, turn after turn.

    Args:
        managed: the session; used by this conversation alone.
        tokenizer: renders prompts.
        sampling: what else each request carries, as `temperature`.
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

    def budget(self, chat: Sequence[ChatMessage], *, max_tokens: int) -> int:
        """Return the tokens left behind the sequence and what the chat adds to it."""
        added = self._added_text(chat)
        if self._node is None or added is None:
            prompt = render_messages(self._tokenizer, chat)
            num_tokens = len(self._tokenizer.encode(prompt, add_special_tokens=True))
        else:
            new_ids = self._tokenizer.encode(added, add_special_tokens=False)
            num_tokens = len(self._node.tokens) + len(new_ids)
        return max_tokens - num_tokens - RESERVED_TOKENS

    async def write(self, chat: Sequence[ChatMessage], *, max_tokens: int) -> Written:
        """Wait for the next turn; a chat that does not go on from the last starts a sequence."""
        added = self._added_text(chat)
        if self._node is None or added is None:
            self._finish_sequence()
            prompt = render_messages(self._tokenizer, chat)
        else:
            prompt = self._node.full_text + added
        known_length = 0 if self._node is None else len(self._node.tokens)
        sampling = {"n": 1, "max_tokens": max_tokens, **self._sampling}
        if getattr(self._managed, "is_text_only", False):  # which servers of users need not have
            # A provider renders chats by itself, perhaps with another template.
            [answer] = await ask(self._managed, self._tokenizer, chat, **sampling)
        else:
            [answer] = await complete(self._managed, prompt, chat=chat, **sampling)
        node: SequenceNode = self._managed.get_state()["nodes"][-1]
        start = _start_of_last_run(node.masked_tokens, known_length)
        self._spans.append(TurnSpan(self._num_turns, start, len(node.tokens)))
        self._num_turns += 1
        self._node = node
        self._chat = [*chat, {"role": "assistant", "content": answer.completion}]
        return _Written(answer.completion, answer.finish_reason == "length")

    def sequences(self) -> list[TokenSequence]:
        """Return the sequences in the order they were started."""
        current = self._current_sequence()
        return self._finished if current is None else [*self._finished, current]

    def _added_text(self, chat: Sequence[ChatMessage]) -> str | None:
        """Return what the template writes behind the last turn; None when the chat is another.

        Raises nothing of its own; a template may refuse the roles it is given.
        """
        length = len(self._chat)
        if self._node is None or length == 0 or list(chat[:length]) != self._chat:
            return None
        mark = REPLY_MARK
        while any(mark in str(message.get("content")) for message in chat):
            mark += REPLY_MARK  # whoever writes it must not be taken for it
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


def _start_of_last_run(masks: Sequence[int], at_least: int) -> int:
    """Return where the sampled tokens at the end begin, not before `at_least`."""
    start = len(masks)
    while start > at_least and masks[start - 1] != IGNORE_INDEX:
        start -= 1
    return start
