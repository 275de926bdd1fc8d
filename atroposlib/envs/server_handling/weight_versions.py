"""Track which weights sampled which tokens, and why sampling ended.

    engine's answer ── VersionedTokens.weight_versions ─┐
    service's report of the policy ─────────────────────┴─ policy_version_of ─► node, group

Names of weights are free text. An integer name is interpreted as the policy version that the
trainer reports to the service, so weights should be loaded under that number.
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
"""Key of a node's metadata and field of a group: the tokens were encoded from text."""

Tokens = tuple[list[int], list[list[int]], list[list[float]], list[Any]]
"""Prompt ids [P], completions [n][C], their logprobs, and finish reasons [n]."""

_OPEN: ContextVar[tuple[SampledVersions, ...]] = ContextVar("sampled_versions", default=())


class VersionedTokens(tuple[list[int], list[list[int]], list[list[float]], list[Any]]):
    """An answer with tokens and logprobs, unpacked and compared like the plain tuple.

    Attributes:
        weight_versions: [n] the engine's name for the weights of each completion; None if it does
            not report one. Names are chosen when weights are loaded into the engine.
    """

    weight_versions: list[str | None]

    def __new__(cls, tokens: Tokens, weight_versions: Sequence[str | None]) -> VersionedTokens:
        """Attach weight versions to an answer."""
        self = super().__new__(cls, tokens)
        self.weight_versions = list(weight_versions)
        return self


def versions_in(answer: Any, num_completions: int) -> list[str | None]:
    """Return the weight version of each completion of an answer; None for unknown ones."""
    if isinstance(answer, VersionedTokens):
        return list(answer.weight_versions)
    return [None] * num_completions


def join_answers(parts: Sequence[Tokens]) -> Tokens:
    """Join the answers to the parts of one request, with the first part's prompt.

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
        weight_version: The engine's name of the weights; used if it is an integer.
        reported: Policy version the service reported when the completion was requested.
    """
    text = str(weight_version)
    return int(text) if text.isascii() and text.isdigit() else reported


class SampledVersions:
    """Policy versions and finish reasons of everything sampled while this collection is open.

    Attributes:
        oldest: The smallest version; None while none is known.
        has_text: Whether the tokens of any completion were encoded from its text.
    """

    def __init__(self) -> None:
        self.oldest: int | None = None
        self._reasons: dict[int, str] = {}
        self.has_text = False

    def add(self, version: int) -> None:
        """Record the version of one completion."""
        self.oldest = version if self.oldest is None else min(self.oldest, version)

    def add_finish_reason(self, tokens: Sequence[int], reason: str) -> None:
        """Record why the last completion of a sequence ended.

        Args:
            tokens: [L] the whole sequence, prompt included.
            reason: Finish reason from the engine.
        """
        self._reasons[hash(tuple(tokens))] = reason

    def finish_reasons(self, sequences: Sequence[Sequence[int]]) -> list[str | None] | None:
        """Return [G] the finish reason of each sequence; None if all are unknown.

        Args:
            sequences: [G][L] token ids; one that differs from what was recorded has no reason.
        """
        reasons = [self._reasons.get(hash(tuple(tokens))) for tokens in sequences]
        return reasons if any(reason is not None for reason in reasons) else None


@contextmanager
def sampled_versions() -> Iterator[SampledVersions]:
    """Collect the versions of everything sampled in this context and in tasks started in it."""
    versions = SampledVersions()
    token = _OPEN.set((*_OPEN.get(), versions))
    try:
        yield versions
    finally:
        _OPEN.reset(token)


def note_sampled(version: int | None) -> None:
    """Record the policy version of a completion in every open collection of this task."""
    if version is not None:
        for versions in _OPEN.get():
            versions.add(version)


def note_finish_reason(tokens: Sequence[int], reason: str | None) -> None:
    """Record the finish reason of a sequence in every open collection of this task."""
    if reason is not None:
        for versions in _OPEN.get():
            versions.add_finish_reason(tokens, reason)


def note_from_text() -> None:
    """Record in every open collection of this task that tokens were encoded from text."""
    for versions in _OPEN.get():
        versions.has_text = True


def note_node(tokens: Sequence[int], metadata: Mapping[str, Any] | None) -> None:
    """Record the metadata of a sequence sampled by another process in every open collection.

    Args:
        tokens: [L] tokens of the node.
        metadata: Metadata of the node.
    """
    said = metadata or {}
    note_sampled(said.get("policy_version"))
    note_finish_reason(tokens, said.get("finish_reason"))
    if said.get(FROM_TEXT):
        note_from_text()
