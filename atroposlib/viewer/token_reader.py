"""The text of tokens and rollouts, and a check that the tokenizer is that of the run.

The tokenizer is loaded in the background; until then, pages show ids. The text of a rollout comes
from its messages, else from its tokens.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from atroposlib.viewer.rollouts import Group, ShownRollout, text_of_content

__all__ = [
    "RolloutText",
    "TokenPiece",
    "TokenReader",
    "answer_of",
    "texts_of",
]

logger = logging.getLogger(__name__)

REPLACEMENT = "\ufffd"
_MAX_JOINED = 8
"""Maximum number of tokens of one character."""
_MIN_COMPARED = 40
_LEAST_AGREEMENT = 0.8
_COMPARED_TOKENS = 600


class TokenPiece(NamedTuple):
    """One token for display."""

    text: str
    is_special: bool


class TokenReader:
    """Converts tokens to text, or to ids in brackets without a tokenizer.

    Args:
        name: name of the tokenizer, the argument of `load`.
        load: returns a tokenizer; called once, in a separate thread.
        is_lazy: whether the tokenizer is loaded on first use or by `start`, instead of at once.
            Groups with messages may never need it.
    """

    def __init__(self, name: str, load: Callable[[str], Any], *, is_lazy: bool = False) -> None:
        self.name = name
        self.problem: str | None = None
        """Reason why the tokenizer could not be loaded; None otherwise."""
        self._tokenizer: Any = None  # transformers carries no types
        self._pieces: dict[int, TokenPiece] = {}
        self._special: frozenset[int] = frozenset()
        self._size = 0
        self._ready = threading.Event()
        self._starting = threading.Lock()
        self._load_once: Callable[[str], Any] | None = load
        if not is_lazy:
            self.start()

    def start(self) -> None:
        """Start loading; further calls have no effect."""
        with self._starting:
            load, self._load_once = self._load_once, None
        if load is not None:
            threading.Thread(
                target=self._load, args=(load,), name="tokenizer-loader", daemon=True
            ).start()

    @property
    def is_ready(self) -> bool:
        return self._tokenizer is not None

    def wait(self, timeout_s: float) -> bool:
        """Wait until loading has ended; return whether it succeeded."""
        self._ready.wait(timeout_s)
        return self.is_ready

    def text(self, ids: Sequence[int]) -> str:
        """Decode ids, special tokens included."""
        if not self.is_ready or any(not 0 <= i < self._size for i in ids):
            return "".join(piece.text for piece in self.pieces(ids))
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def pieces(self, ids: Sequence[int]) -> list[TokenPiece]:
        """Return the text of each token; a character of several tokens is that of the last one."""
        if ids:
            self.start()
        pieces = [self._piece(token_id) for token_id in ids]
        if not self.is_ready:
            return pieces
        start = 0
        while start < len(ids):
            if REPLACEMENT in pieces[start].text:
                start = self._join(ids, pieces, start)
            start += 1
        return pieces

    def mismatch(self, group: Group) -> str | None:
        """Return the reason why a group was made with another tokenizer; None without evidence.

        Evidence are ids outside the vocabulary and tokens whose text is not that of the answer.
        Without messages, the text is tokenized again and the ids are compared.
        """
        if not self.is_ready:
            return None
        highest = max((max(r.tokens, default=0) for r in group.rollouts), default=0)
        if highest >= self._size:
            return (
                f"tokenizer {self.name} has {self._size:,} tokens and this group has id "
                f"{highest:,}: it was made with another tokenizer"
            )
        for rollout in group.rollouts[:2]:
            reason = self._mismatch_of(rollout)
            if reason:
                return f"tokenizer {self.name} does not seem to fit this group: {reason}"
        return None

    def _mismatch_of(self, rollout: ShownRollout) -> str | None:
        if not len(rollout):
            return None
        answers = [m for m in rollout.chat if m.get("role") == "assistant"] or rollout.chat
        content = text_of_content(answers[-1].get("content")) if answers else ""
        wanted = "".join(content.split())[:200]
        if wanted:
            found = "".join(self.text(rollout.tokens).split())
            if wanted in found:
                return None
            # A parser may have removed parts of the answer, so most of its words are sufficient.
            words = content.split()[:100]
            share = sum("".join(word.split()) in found for word in words) / len(words)
            return None if share >= _LEAST_AGREEMENT else "its tokens do not spell its messages"
        ids = list(rollout.tokens[:_COMPARED_TOKENS])
        if len(ids) < _MIN_COMPARED:
            return None
        again = self._tokenizer.encode(self.text(ids), add_special_tokens=False)
        kept = sum((Counter(ids) & Counter(again)).values()) / len(ids)
        if kept >= _LEAST_AGREEMENT:
            return None
        return f"only {kept:.0%} of its tokens are the same after decoding and encoding"

    def _load(self, load: Callable[[str], Any]) -> None:
        try:
            tokenizer = load(self.name)
            self._size = len(tokenizer)
            added = getattr(tokenizer, "added_tokens_decoder", None) or {}
            self._special = frozenset(tokenizer.all_special_ids) | frozenset(added)
            self._pieces.clear()
            self._tokenizer = tokenizer
        except Exception as error:
            logger.info("tokenizer %s cannot be loaded", self.name, exc_info=error)
            reason = str(error).strip().splitlines() or [type(error).__name__]
            self.problem = (
                f"tokenizer {self.name} could not be loaded; name the run's own, or a folder with "
                f"it, with --tokenizer ({reason[0][:120]})"
            )
        finally:
            self._ready.set()

    def _piece(self, token_id: int) -> TokenPiece:
        known = self._pieces.get(token_id)
        if known is None:
            is_readable = self.is_ready and 0 <= token_id < self._size
            text = self._tokenizer.decode([token_id]) if is_readable else f"⟨{token_id}⟩"
            known = TokenPiece(str(text), token_id in self._special)
            if self.is_ready:
                self._pieces[token_id] = known
        return known

    def _join(self, ids: Sequence[int], pieces: list[TokenPiece], start: int) -> int:
        """Decode the character that begins at token `start`; return the position of its last."""
        for stop in range(start + 2, min(len(ids), start + _MAX_JOINED) + 1):
            if any(not 0 <= i < self._size for i in ids[start:stop]):
                break
            text = str(self._tokenizer.decode(list(ids[start:stop])))
            if REPLACEMENT not in text:
                for i in range(start, stop - 1):
                    pieces[i] = TokenPiece("·", False)
                pieces[stop - 1] = TokenPiece(text, False)
                return stop - 1
        return start


class RolloutText(NamedTuple):
    """One rollout as text."""

    prompt: str
    answer: str


def texts_of(group: Group, reader: TokenReader) -> list[RolloutText]:
    """Return prompt and answer of every rollout."""
    return [
        RolloutText(prompt_of(group, rollout, reader), answer_of(group, rollout, reader))
        for rollout in group.rollouts
    ]


def prompt_of(group: Group, rollout: ShownRollout, reader: TokenReader) -> str:
    """Return the prompt of a rollout."""
    if rollout.chat:
        return _spell(rollout.chat[: group.num_shared_messages])
    return reader.text(rollout.tokens[: rollout.first_trained])


def answer_of(group: Group, rollout: ShownRollout, reader: TokenReader) -> str:
    """Return the text after the prompt, including later messages of tools and users."""
    if rollout.chat:
        rest = rollout.chat[group.num_shared_messages :]
        is_single = len(rest) == 1 and not any(rest[0].get(key) for key in _FURTHER)
        return text_of_content(rest[0].get("content")) if is_single else _spell(rest)
    return reader.text(rollout.tokens[rollout.first_trained :])


_FURTHER = ("reasoning_content", "tool_calls")


def _spell(messages: Sequence[dict[str, Any]]) -> str:
    parts = []
    for message in messages:
        role = str(message.get("role") or "text")
        parts.append(f"[{role}] {text_of_content(message.get('content'))}")
        for key in _FURTHER:
            if message.get(key):
                value = message[key]
                spelled = value if isinstance(value, str) else json.dumps(value, default=str)
                parts.append(f"[{role}, {key}] {spelled}")
    return "\n\n".join(parts)
