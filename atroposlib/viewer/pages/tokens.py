"""One rollout token by token; pure.

A token is `<b>`: its class says whether it is trained on and how likely it was, `data-t` what the
page's script shows beside the pointer.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

from atroposlib.viewer.pages.markup import chip, empty, number, score_chip, shown
from atroposlib.viewer.rollouts import Group, Rollout
from atroposlib.viewer.token_reader import TokenPiece, TokenReader

__all__ = ["COLOURS", "TOKENS_PER_PAGE", "Colour", "tokens_page"]

Colour = Literal["logprob", "advantage", "trained"]
COLOURS: tuple[Colour, ...] = get_args(Colour)

TOKENS_PER_PAGE = 3000
_PROBABILITY_STEPS = (0.9, 0.7, 0.5, 0.3, 0.1, 0.03, 0.01)
_ADVANTAGE_STEPS = (0.1, 0.5, 1.0, 2.0)


def tokens_page(
    group: Group, rollout: Rollout, reader: TokenReader, *, colour: Colour, start: int
) -> str:
    """Return a stretch of the tokens of a rollout.

    Args:
        group: the group of the rollout.
        rollout: what to show.
        reader: gives tokens their text.
        colour: what the colours tell.
        start: position of the first token.
    """
    if not len(rollout):
        return empty("This rollout has no tokens; its messages are on the conversation page.")
    stop = min(len(rollout), start + TOKENS_PER_PAGE)
    pieces = reader.pieces(rollout.tokens[start:stop])
    whole_advantage = group.advantage(rollout)
    spans = "".join(
        _span(rollout, start + i, piece, colour, whole_advantage) for i, piece in enumerate(pieces)
    )
    return (
        f'<div class="v-chips">{_facts(rollout, whole_advantage, start, stop)}</div>'
        f"{_legend(rollout, colour)}"
        f'<div class="v-tokens">{spans}</div>{_turn(start, stop, len(rollout))}'
    )


def _facts(rollout: Rollout, advantage: float | None, start: int, stop: int) -> str:
    facts = [
        f"score {score_chip(rollout.score)}",
        chip(f"tokens {start:,} to {stop - 1:,} of {len(rollout):,}"),
        chip(f"{rollout.num_trained:,} trained"),
    ]
    if advantage is not None:
        facts.append(chip(f"advantage {advantage:+.2f}", "score less mean, in deviations"))
    if len(rollout.masks) != len(rollout):
        facts.append(chip("no mask of this length", "which tokens are trained on is not known"))
    return " ".join(facts)


def _legend(rollout: Rollout, colour: Colour) -> str:
    key = '<b class="m">masked</b> <b class="s">special</b> '
    if colour == "trained":
        return f'<p class="v-legend">{key}<b class="t">trained</b></p>'
    if colour == "advantage":
        source = "of its own token" if rollout.advantages else "of the whole rollout"
        return (
            f'<p class="v-legend">{key}<b class="a-4">-2</b><b class="a-2">-0.5</b>'
            f'<b class="a2">+0.5</b><b class="a4">+2</b> advantage {source}</p>'
        )
    if not rollout.logprobs:
        return f'<p class="v-legend">{key}this rollout carries no log-probabilities</p>'
    steps = "".join(
        f'<b class="l{i}">{text}</b>'
        for i, text in ((0, "&gt;90%"), (2, "&gt;50%"), (4, "&gt;10%"), (7, "&lt;1%"))
    )
    return f'<p class="v-legend">{key}{steps} probability when sampled</p>'


def _span(
    rollout: Rollout, position: int, piece: TokenPiece, colour: Colour, advantage: float | None
) -> str:
    is_trained = rollout.is_trained(position)
    logprob = _at(rollout.logprobs, position) if is_trained else None
    own_advantage = _at(rollout.advantages, position)
    facts = [f"position {position}", f"id {rollout.tokens[position]}"]
    facts.append("trained" if is_trained else "masked")
    if logprob is not None:
        facts.append(f"logprob {logprob:.4f} ({math.exp(min(0.0, logprob)):.1%})")
    if own_advantage is not None:
        facts.append(f"advantage {own_advantage:+.3f}")
    if not is_trained:
        kind = "m"
    elif colour == "logprob" and logprob is not None:
        kind = f"l{_step(math.exp(min(0.0, logprob)))}"
    elif colour == "advantage":
        kind = _advantage_class(advantage if own_advantage is None else own_advantage)
    else:
        kind = "t"
    special = " s" if piece.is_special else ""
    return f'<b class="{kind}{special}" data-t="{" · ".join(facts)}">{_visible(piece.text)}</b>'


def _visible(text: str) -> str:
    """Escape the text of a token; line breaks get a sign, an empty text as well."""
    return shown(text).replace("\n", '<i class="nl"></i>\n') or '<i class="no"></i>'


def _step(probability: float) -> int:
    return sum(probability < bound for bound in _PROBABILITY_STEPS)


def _advantage_class(advantage: float | None) -> str:
    if not advantage:
        return "a0"
    size = sum(abs(advantage) >= bound for bound in _ADVANTAGE_STEPS)
    return f"a{'-' if advantage < 0 and size else ''}{size}"


def _at(values: object, position: int) -> float | None:
    is_there = isinstance(values, list) and position < len(values)
    return float(values[position]) if is_there else None  # type: ignore[index]


def _turn(start: int, stop: int, length: int) -> str:
    """Offer the stretches before and after this one."""
    parts = []
    if start > 0:
        parts.append(f'<button data-tokens="{max(0, start - TOKENS_PER_PAGE)}">earlier</button>')
    if stop < length:
        parts.append(
            f'<button data-tokens="{stop}">later ({number(length - stop)} tokens left)</button>'
        )
    return f'<p class="v-turn">{" ".join(parts)}</p>' if parts else ""
