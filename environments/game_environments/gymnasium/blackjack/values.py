"""What a blackjack hand is worth: exact expectations from the rules. Pure.

    dealer's card ─► distribution of the dealer's total ─► stick ─┐
    next card, 1/13 each, 10 with 4/13 ─► bust or a new hand ─► hit ─┴─► the better one is V*

Cards are drawn from an endless deck, the dealer draws up to 17 or more, an ace counts 11 where
that does not bust: the rules of gymnasium's `Blackjack-v1`. What counts is what the player sees;
the cards that a seed hides do not enter.

    natural against a 10, book rules: the dealer has a natural too with 1/13, a draw ─► V* = 12/13
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Literal, NamedTuple

__all__ = ["ACTIONS", "Action", "Hand", "Rules", "action_value", "best_action", "value"]

Action = Literal["hit", "stick"]
ACTIONS: tuple[Action, ...] = ("hit", "stick")

GOAL = 21
DEALER_STANDS_AT = 17
CARD_PROBABILITY = {card: (4 if card == 10 else 1) / 13 for card in range(1, 11)}


class Rules(NamedTuple):
    """The two options of the game."""

    sab: bool = True
    """A natural wins against all but a natural, as in the book of Sutton and Barto."""
    natural: bool = False
    """Without `sab`: winning with a natural pays 1.5."""


class Hand(NamedTuple):
    """What the player sees."""

    total: int
    """Sum of the hand, a usable ace counted as 11."""
    usable_ace: bool
    dealer_card: int
    """1 to 10, an ace is 1."""
    is_natural: bool = False
    """Whether the first two cards are an ace and a ten."""


class _DealerEnd(NamedTuple):
    total: int
    """17 to 21, or 0 for a bust."""
    is_natural: bool


def value(hand: Hand, rules: Rules) -> float:
    """Return V*: what a hand earns on average when it is played best."""
    return max(action_value(hand, action, rules) for action in ACTIONS)


def best_action(hand: Hand, rules: Rules) -> Action:
    """Return the action that earns more on average."""
    return max(ACTIONS, key=lambda action: action_value(hand, action, rules))


@lru_cache(maxsize=4096)
def action_value(hand: Hand, action: Action, rules: Rules) -> float:
    """Return what an action earns on average when the game is played best from there on."""
    if action == "stick":
        ends = _dealer_ends(hand.dealer_card)
        return sum(chance * _result(hand, end, rules) for end, chance in ends.items())
    expected = 0.0
    for card, chance in CARD_PROBABILITY.items():
        total, usable_ace = _add(hand.total, hand.usable_ace, card)
        if total > GOAL:
            expected -= chance
        else:
            expected += chance * value(Hand(total, usable_ace, hand.dealer_card), rules)
    return expected


def _result(hand: Hand, dealer: _DealerEnd, rules: Rules) -> float:
    result = float((hand.total > dealer.total) - (hand.total < dealer.total))
    if not hand.is_natural:
        return result
    if rules.sab:
        return result if dealer.is_natural else 1.0
    return 1.5 if rules.natural and result == 1.0 else result


@lru_cache(maxsize=16)
def _dealer_ends(card: int) -> Mapping[_DealerEnd, float]:
    """Return how the dealer may end who shows a card, with the probabilities."""
    ends: dict[_DealerEnd, float] = {}

    def draw(total: int, usable_ace: bool, chance: float, num_cards: int) -> None:
        if total >= DEALER_STANDS_AT:
            is_natural = num_cards == 2 and total == GOAL
            end = _DealerEnd(total if total <= GOAL else 0, is_natural)
            ends[end] = ends.get(end, 0.0) + chance
            return
        for drawn, probability in CARD_PROBABILITY.items():
            draw(*_add(total, usable_ace, drawn), chance * probability, num_cards + 1)

    draw(*_add(0, False, card), 1.0, 1)
    return ends


def _add(total: int, usable_ace: bool, card: int) -> tuple[int, bool]:
    """Return total and usable ace of a hand with one more card."""
    total += card
    if card == 1 and not usable_ace and total + 10 <= GOAL:
        return total + 10, True
    if usable_ace and total > GOAL:
        return total - 10, False
    return total, usable_ace
