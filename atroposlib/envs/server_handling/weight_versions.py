"""Which weights sampled which tokens, as far as engines and the service say.

    engine's answer ── VersionedTokens.weight_versions ─┐
    service's report of the policy ─────────────────────┴─ policy_version_of ─► node, group

Names of weights are free text. One that is a whole number is taken for the policy version the
trainer reports to the service, so whoever loads weights should name them by that number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

__all__ = [
    "SampledVersions",
    "VersionedTokens",
    "join_answers",
    "note_sampled",
    "policy_version_of",
    "sampled_versions",
    "versions_in",
]


Tokens = tuple[list[int], list[list[int]], list[list[float]], list[Any]]
"""Prompt ids [P], completions [n][C], their logprobs, and finish reasons [n]."""


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
    """The policy versions of what was sampled since this was opened.

    Attributes:
        oldest: The smallest one; None while none is known.
    """

    def __init__(self) -> None:
        self.oldest: int | None = None

    def add(self, version: int) -> None:
        """Take note of one more."""
        self.oldest = version if self.oldest is None else min(self.oldest, version)


_OPEN: ContextVar[tuple[SampledVersions, ...]] = ContextVar("sampled_versions", default=())


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
