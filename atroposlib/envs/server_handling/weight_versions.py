"""Which weights sampled which tokens, and why sampling ended, as engines and the service say.

    engine's answer ── VersionedTokens.weight_versions ─┐
    service's report of the policy ─────────────────────┴─ policy_version_of ─► node, group

Names of weights are free text. One that is a whole number is taken for the policy version the
trainer reports to the service, so whoever loads weights should name them by that number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

__all__ = [
    "FROM_TEXT",
    "SampledVersions",
    "VersionedTokens",
    "join_answers",
    "note_finish_reason",
    "note_from_text",
    "note_node",
    "note_sampled",
    "policy_version_of",
    "sampled_versions",
    "versions_in",
]


FROM_TEXT = "tokenized_from_text"
"""Key of a node's metadata, and field of a group: its tokens were made from text."""

Tokens = tuple[list[int], list[list[int]], list[list[float]], list[Any]]
"""Prompt ids [P], completions [n][C], their logprobs, and finish reasons [n]."""

_OPEN: ContextVar[tuple[SampledVersions, ...]] = ContextVar("sampled_versions", default=())


class VersionedTokens(tuple[list[int], list[list[int]], list[list[float]], list[Any]]):
    """An answer with tokens and logprobs, unpacked and compared like the plain tuple.

    Attributes:
        weight_versions: [n] what the engine calls the weights of each completion, None where it
            does not say. Whoever loads new weights into the engine chooses the names.
    """

    weight_versions: list[str | None]

    def __new__(cls, tokens: Tokens, weight_versions: Sequence[str | None]) -> VersionedTokens:
        """Wrap an answer."""
        self = super().__new__(cls, tokens)
        self.weight_versions = list(weight_versions)
        return self


def versions_in(answer: Any, num_completions: int) -> list[str | None]:
    """Return what an answer says of each completion's weights; Nones if it says nothing."""
    if isinstance(answer, VersionedTokens):
        return list(answer.weight_versions)
    return [None] * num_completions


def join_answers(parts: Sequence[Tokens]) -> Tokens:
    """Return the answers to the parts of one request as one, with the first part's prompt.

    Args:
        parts: Token answers, at least one.
    """
    if len(parts) == 1:
        return parts[0]
    tokens: Tokens = (
        parts[0][0],
        [ids for part in parts for ids in part[1]],
        [logprobs for part in parts for logprobs in part[2]],
        [reason for part in parts for reason in part[3]],
    )
    return VersionedTokens(
        tokens, [version for part in parts for version in versions_in(part, len(part[1]))]
    )


def policy_version_of(weight_version: Any, reported: int | None) -> int | None:
    """Return the policy version of a completion.

    Args:
        weight_version: The engine's own name of the weights; counts if it is a whole number.
        reported: What the service called the policy when the completion was asked for.
    """
    text = str(weight_version)
    return int(text) if text.isascii() and text.isdigit() else reported


class SampledVersions:
    """The policy versions and finish reasons of what was sampled since this was opened.

    Attributes:
        oldest: The smallest version; None while none is known.
        has_text: Whether tokens of something that was sampled were made from its text.
    """

    def __init__(self) -> None:
        self.oldest: int | None = None
        self._reasons: dict[int, str] = {}
        self.has_text = False

    def add(self, version: int) -> None:
        """Take note of one more."""
        self.oldest = version if self.oldest is None else min(self.oldest, version)

    def add_finish_reason(self, tokens: Sequence[int], reason: str) -> None:
        """Take note of why the last completion of a sequence ended.

        Args:
            tokens: [L] the whole sequence, prompt included.
            reason: As the engine gave it.
        """
        self._reasons[hash(tuple(tokens))] = reason

    def finish_reasons(self, sequences: Sequence[Sequence[int]]) -> list[str | None] | None:
        """Return [G] why the engine ended each of the sequences; None when none of them is known.

        Args:
            sequences: [G][L] token ids; one that differs from what was recorded has no reason.
        """
        reasons = [self._reasons.get(hash(tuple(tokens))) for tokens in sequences]
        return reasons if any(reason is not None for reason in reasons) else None


@contextmanager
def sampled_versions() -> Iterator[SampledVersions]:
    """Collect the versions of everything sampled inside, in tasks started there too."""
    versions = SampledVersions()
    token = _OPEN.set((*_OPEN.get(), versions))
    try:
        yield versions
    finally:
        _OPEN.reset(token)


def note_sampled(version: int | None) -> None:
    """Tell every open collection of this task under which version a completion was sampled."""
    if version is not None:
        for versions in _OPEN.get():
            versions.add(version)


def note_finish_reason(tokens: Sequence[int], reason: str | None) -> None:
    """Tell every open collection of this task why the last completion of a sequence ended."""
    if reason is not None:
        for versions in _OPEN.get():
            versions.add_finish_reason(tokens, reason)


def note_from_text() -> None:
    """Tell every open collection of this task that tokens were made from text."""
    for versions in _OPEN.get():
        versions.has_text = True


def note_node(tokens: Sequence[int], metadata: Mapping[str, Any] | None) -> None:
    """Tell every open collection of this task what a sequence from elsewhere says of itself.

    Args:
        tokens: [L] of its node.
        metadata: Of its node.
    """
    said = metadata or {}
    note_sampled(said.get("policy_version"))
    note_finish_reason(tokens, said.get("finish_reason"))
    if said.get(FROM_TEXT):
        note_from_text()
