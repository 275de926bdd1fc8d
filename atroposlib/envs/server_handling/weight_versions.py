"""Token answers that also tell which weights sampled them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["VersionedTokens"]


class VersionedTokens(tuple[list[int], list[list[int]], list[list[float]], list[Any]]):
    """An answer with tokens and logprobs, unpacked and compared like the plain tuple.

    Attributes:
        weight_versions: [n] what the engine calls the weights of each completion, None where it
            does not say. Whoever loads new weights into the engine chooses the names.
    """

    weight_versions: list[str | None]

    def __new__(
        cls,
        tokens: tuple[list[int], list[list[int]], list[list[float]], list[Any]],
        weight_versions: Sequence[str | None],
    ) -> VersionedTokens:
        """Wrap an answer."""
        self = super().__new__(cls, tokens)
        self.weight_versions = list(weight_versions)
        return self
