"""One answer made of those to the parts of a request that was split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from atroposlib.envs.server_handling.openai_compatible import append_choices
from atroposlib.envs.server_handling.server_baseline import TokensAndLogprobs
from atroposlib.envs.server_handling.weight_versions import (
    join_answers,
    note_sampled,
    policy_version_of,
    versions_in,
)

__all__ = ["Answered", "merge_choices", "merge_tokens"]


class Answered(NamedTuple):
    """An answer and the server that gave it."""

    server: Any
    answer: Any


def merge_choices(parts: Sequence[Answered]) -> Any:
    """Return one chat or completion with the choices of all, numbered from 0."""
    if len(parts) == 1:
        return parts[0].answer
    return append_choices(parts[0].answer, [part.answer for part in parts[1:]])


def merge_tokens(parts: Sequence[Answered], *, reported: int | None) -> TokensAndLogprobs:
    """Return the completions of all, and note which policy versions sampled them.

    Args:
        parts: Token answers, at least one.
        reported: What the service called the policy when the request was made.
    """
    answer = join_answers([part.answer for part in parts])
    for version in versions_in(answer, len(answer[1])):
        note_sampled(policy_version_of(version, reported))
    return answer
