"""Laying a trajectory over what the model wrote: masks, logprobs and prefix continuity. Pure.

tokens   p p p p c c c e o o o c c e        p prompt, c sampled, o observation, e end of turn
spans            [-----]       [---]        found by prompt and reply, each a `Span`
masks    . . . . c c c e . . . c c e        trained positions must lie in a span
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from atroposlib.envs.checks.scripted_model import SampledReply
from atroposlib.scored_data import IGNORE_INDEX, MASKED_LOGPROB

__all__ = ["Alignment", "Span", "align"]

TOLERANCE = 1e-4


class Span(NamedTuple):
    """Where one reply lies in a trajectory."""

    start: int
    end: int
    reply: SampledReply
    is_exact: bool
    """Whether the tokens before it are those the model read."""


class Alignment(NamedTuple):
    """One trajectory against what the model wrote; texts say what is wrong, None nothing."""

    spans: list[Span]
    mask_problem: str | None
    logprob_problem: str | None
    context_problem: str | None
    num_trained: int


def align(
    path: str,
    tokens: Sequence[int],
    masks: Sequence[int],
    logprobs: Sequence[float] | None,
    sampled: Sequence[SampledReply],
    tokenizer: Any,
) -> Alignment:
    """Compare one trajectory with the replies of the model.

    Args:
        path: its index for messages, as `[0]`.
        tokens: [L].
        masks: [L].
        logprobs: [L], or None when the group has none.
        sampled: every reply given for the item.
        tokenizer: of the environment.
    """
    trained = [i for i, mask in enumerate(masks) if mask != IGNORE_INDEX]
    spans = _spans(list(tokens), trained, sampled)
    written = {i for span in spans for i in range(span.start, span.end)}
    return Alignment(
        spans=spans,
        mask_problem=_mask_problem(path, tokens, masks, written, tokenizer),
        logprob_problem=None
        if logprobs is None
        else _logprob_problem(path, tokens, masks, logprobs, spans),
        context_problem=_context_problem(path, tokens, spans, tokenizer),
        num_trained=len(trained),
    )


def _spans(
    tokens: list[int], trained: Sequence[int], sampled: Sequence[SampledReply]
) -> list[Span]:
    """Find the replies in a trajectory: by their whole context first, by their text otherwise."""
    exact: dict[int, Span] = {}
    for reply in sampled:
        start = len(reply.prompt_ids)
        length = _shared(reply.ids, tokens[start:])
        if tokens[:start] != reply.prompt_ids or not length:
            continue
        if start not in exact or start + length > exact[start].end:
            exact[start] = Span(start, start + length, reply, True)
    spans = list(exact.values())
    covered = {i for span in spans for i in range(span.start, span.end)}
    for i in trained:
        if i in covered:
            continue
        loose = _loose_span(tokens, i, sampled)
        if loose is not None:
            spans.append(loose)
            covered |= set(range(loose.start, loose.end))
    return sorted(spans)


def _shared(ids: Sequence[int], tokens: Sequence[int]) -> int:
    """Return how many tokens of a reply begin `tokens`: all, all but the end of turn, or none."""
    for length in (len(ids), len(ids) - 1):
        if length > 0 and list(tokens[:length]) == list(ids[:length]):
            return length
    return 0


def _loose_span(tokens: list[int], start: int, sampled: Sequence[SampledReply]) -> Span | None:
    """Find a reply of several tokens that begins at `start`, behind another context."""
    longest: Span | None = None
    for reply in sampled:
        length = _shared(reply.ids, tokens[start:])
        if length > 1 and (longest is None or start + length > longest.end):
            longest = Span(start, start + length, reply, False)
    return longest


def _mask_problem(
    path: str,
    tokens: Sequence[int],
    masks: Sequence[int],
    written: set[int],
    tokenizer: Any,
) -> str | None:
    for i, (token, mask) in enumerate(zip(tokens, masks, strict=True)):
        if mask not in (IGNORE_INDEX, token):
            return (
                f"masks{path}[{i}] is {mask}; expected {IGNORE_INDEX} or the token, {token} "
                f"({_text([token], tokenizer)!r})"
            )
    # Tokens without text only close a turn: a chat template adds them behind a reply.
    foreign = [
        i
        for i, mask in enumerate(masks)
        if mask != IGNORE_INDEX and i not in written and _text([mask], tokenizer).strip()
    ]
    if foreign:
        i = foreign[0]
        shown = _text(tokens[i : i + 12], tokenizer)
        return (
            f"masks{path} trains on {len(foreign)} tokens that the model did not write, from "
            f"position {i}: {shown!r}"
        )
    return None


def _logprob_problem(
    path: str,
    tokens: Sequence[int],
    masks: Sequence[int],
    logprobs: Sequence[float],
    spans: Sequence[Span],
) -> str | None:
    shift = _shift(masks, logprobs, spans)
    if shift:
        direction = "early" if shift < 0 else "late"
        return (
            f"inference_logprobs{path} are shifted: each stands {abs(shift)} position too "
            f"{direction}"
        )
    for span in spans:
        for i, known in _known(span, masks):
            if math.isfinite(logprobs[i]) and abs(logprobs[i] - known) > TOLERANCE:
                return (
                    f"inference_logprobs{path}[{i}] is {logprobs[i]:.6g}; "
                    f"the engine reported {known:.6g} for this token"
                )
    for i, mask in enumerate(masks):
        value = logprobs[i]
        if mask == IGNORE_INDEX and math.isfinite(value) and value != MASKED_LOGPROB:
            return (
                f"inference_logprobs{path}[{i}] is {value:.6g} where the mask is {IGNORE_INDEX}; "
                f"expected {MASKED_LOGPROB}"
            )
    return None


def _shift(masks: Sequence[int], logprobs: Sequence[float], spans: Sequence[Span]) -> int:
    """Return by how many positions the logprobs are moved; 0 when they are not."""
    pairs = [pair for span in spans for pair in _known(span, masks)]
    if len(pairs) < 3 or _share(pairs, logprobs, 0) == 1.0:
        return 0
    return next((by for by in (-1, 1) if _share(pairs, logprobs, by) > 0.6), 0)


def _share(pairs: Sequence[tuple[int, float]], logprobs: Sequence[float], by: int) -> float:
    """Return the share of known logprobs found `by` positions from where they belong."""
    hits = [
        0 <= i + by < len(logprobs) and abs(logprobs[i + by] - known) <= TOLERANCE
        for i, known in pairs
    ]
    return sum(hits) / len(hits)


def _known(span: Span, masks: Sequence[int]) -> list[tuple[int, float]]:
    """Return position and engine's logprob of each trained token of a reply."""
    if span.reply.logprobs is None:
        return []
    values = zip(range(span.start, span.end), span.reply.logprobs, strict=False)
    return [(i, value) for i, value in values if masks[i] != IGNORE_INDEX]


def _context_problem(
    path: str, tokens: Sequence[int], spans: Sequence[Span], tokenizer: Any
) -> str | None:
    for span in spans:
        if span.is_exact or span.reply.has_images:
            continue
        read, found = span.reply.prompt_ids, list(tokens[: span.start])
        pairs = zip(read, found, strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(read), len(found)))
        return (
            f"tokens{path} has {len(found)} tokens before the reply at {span.start}, the model "
            f"read {len(read)}; the first difference is at {first}: "
            f"{_text(found[first : first + 12], tokenizer)!r}, "
            f"the model read {_text(read[first : first + 12], tokenizer)!r}"
        )
    return None


def _text(ids: Sequence[int], tokenizer: Any) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=True))
