"""Blackjack: the table, the prompt, the exact value of each decision, scores and metrics.

table (cards) ─► chat (prompt) ─► reply ─► score of the decision ─► next hand

Shared by the environments of `environments/game_environments/gymnasium/blackjack/`.
"""

from __future__ import annotations

import logging
import re
import statistics
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from pydantic import Field

from atroposlib.envs.base import BaseEnvConfig
from atroposlib.envs.conversation import visible_text
from atroposlib.envs.server_handling.chat_rendering import render_messages
from atroposlib.envs.single_turn_env import RESERVED_TOKENS
from atroposlib.envs.tools import Tool, tool_instructions
from atroposlib.tasks.games import THINK_FIRST, load_gymnasium
from atroposlib.utils.tool_call_parser import parse_tool_call

__all__ = [
    "ACTIONS",
    "PREFILL",
    "Action",
    "BlackjackEnvConfig",
    "GameRecord",
    "Hand",
    "PlayedGame",
    "Prompt",
    "Rules",
    "ScoredReply",
    "Table",
    "action_value",
    "best_action",
    "describe",
    "evaluation_metrics",
    "fit_prompt",
    "form_bonus",
    "opening",
    "read_action",
    "score_reply",
    "shorten_thinking",
    "training_metrics",
    "value",
]

logger = logging.getLogger("environments.blackjack")


class BlackjackEnvConfig(BaseEnvConfig):
    """Settings of the game, of sampling and of the score."""

    env_name: str = Field("Blackjack-v1", description="Name of the game in gymnasium.")
    temperature: float = Field(
        0.7, ge=0, description="Sampling temperature of rollouts and evaluations."
    )
    top_p: float = Field(0.9, gt=0, le=1, description="Nucleus of sampling; 1 disables it.")
    max_turns: int = Field(5, ge=1, description="Maximum number of decisions in one game.")
    wandb_name: str | None = Field("blackjack", description="Name to register under.")
    thinking_active: bool = Field(
        True, description="Whether the policy is asked to think and rewarded for it."
    )
    eval_episodes: int = Field(100, ge=0, description="Number of games of one evaluation.")
    max_think_chars_history: int = Field(
        3000, ge=0, description="Maximum characters of thinking kept in earlier replies."
    )
    max_trajectory_tokens: int = Field(
        24576,
        ge=1,
        description="Maximum tokens of prompt and reply; the oldest decisions are dropped first.",
    )
    debug_mode: bool = Field(False, description="Whether every decision is logged.")
    group_size: int = Field(16, ge=1, description="Number of replies per decision.")
    tiebreak_token_factor: float = Field(0.01, ge=0, description="Maximum bonus for a short reply.")


Action = Literal["hit", "stick"]
ACTIONS: tuple[Action, ...] = ("hit", "stick")

GOAL = 21
DEALER_STANDS_AT = 17
CARD_PROBABILITY = {card: (4 if card == 10 else 1) / 13 for card in range(1, 11)}


class Rules(NamedTuple):
    """The two options of the game in gymnasium."""

    sab: bool = True
    """Whether a natural wins against everything but a natural, as in Sutton and Barto."""
    natural: bool = False
    """Whether winning with a natural pays 1.5; only without `sab`."""


class Hand(NamedTuple):
    """The observation of the player."""

    total: int
    """Sum of the hand, with a usable ace as 11."""
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
    """Return V*, the expected reward of a hand under optimal play."""
    return max(action_value(hand, action, rules) for action in ACTIONS)


def best_action(hand: Hand, rules: Rules) -> Action:
    """Return the action with the higher expected reward."""
    return max(ACTIONS, key=lambda action: action_value(hand, action, rules))


@lru_cache(maxsize=4096)
def action_value(hand: Hand, action: Action, rules: Rules) -> float:
    """Return Q*, the expected reward of an action followed by optimal play."""
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
    """Return the final hands of a dealer that shows a card, and their probabilities."""
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
    total += card
    if card == 1 and not usable_ace and total + 10 <= GOAL:
        return total + 10, True
    if usable_ace and total > GOAL:
        return total - 10, False
    return total, usable_ace


class Table:
    """One game.

    Args:
        env_name: name of the game in gymnasium's registry.
        seed: seed of the cards.

    Attributes:
        hand: current observation.
        rules: rules of the game.
        is_over: whether the game has ended.
        reward: reward of the game; 0 until it has ended.
    """

    def __init__(self, env_name: str, *, seed: int) -> None:
        self._env = load_gymnasium().make(env_name)
        observation, _ = self._env.reset(seed=seed)
        options = self._env.unwrapped
        self.rules = Rules(sab=bool(options.sab), natural=bool(options.natural))
        self.is_over = False
        self.reward = 0.0
        self.hand = _hand(observation, is_dealt=True)

    def play(self, action: Action) -> float:
        """Apply an action and return its reward.

        Raises:
            ValueError: the game is over.
        """
        if self.is_over:
            raise ValueError("the game is over; no action can be taken")
        observation, reward, terminated, truncated, _ = self._env.step(int(action == "hit"))
        self.hand = _hand(observation, is_dealt=False)
        self.is_over = bool(terminated or truncated)
        self.reward += float(reward)
        return float(reward)


def _hand(observation: Any, *, is_dealt: bool) -> Hand:
    total, dealer_card, usable_ace = (int(number) for number in observation)
    # Two cards have the sum 21 only as an ace and a ten.
    return Hand(total, bool(usable_ace), dealer_card, is_natural=is_dealt and total == 21)


Chat = Sequence[Mapping[str, str]]
"""Messages of the roles `system`, `environment` and `agent`."""

RULES = """You play blackjack: get closer to 21 than the dealer without going over it.
An ace counts 11 where that is not too much, else 1. The dealer takes cards up to 17 or more."""
ONE_CALL = "Answer each hand with one call of take_action."
HAND = "Your hand counts {total}{ace}. The dealer shows {dealer_card}."
TEMPLATE_ROLES = {"system": "system", "environment": "user", "agent": "assistant"}
"""Roles of the records, and the roles that chat templates accept."""
MIN_REPLY_SHARE = 4
"""Old turns are dropped until a reply has at least 1 / `MIN_REPLY_SHARE` of the token limit."""


class Prompt(NamedTuple):
    """The prompt of a decision."""

    chat: list[Mapping[str, str]]
    """Messages in the prompt."""
    text: str
    num_tokens: int
    budget: int
    """Maximum tokens of the reply."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        return _as_messages(self.chat)


def describe(hand: Hand) -> str:
    """Return the observation as text."""
    return HAND.format(
        total=hand.total,
        ace=", with an ace that counts 11" if hand.usable_ace else "",
        dealer_card="an ace" if hand.dealer_card == 1 else f"a {hand.dealer_card}",
    )


def opening(hand: Hand, *, thinking_active: bool) -> list[Mapping[str, str]]:
    """Return the messages with the rules and the first hand."""
    rules = [RULES, *([THINK_FIRST] if thinking_active else []), ONE_CALL]
    system = "\n".join(rules) + f"\n\n{tool_instructions([TAKE_ACTION])}"
    return [
        {"role": "system", "content": system},
        {"role": "environment", "content": describe(hand)},
    ]


def fit_prompt(chat: Chat, tokenizer: Any, *, limit: int, thinking_active: bool) -> Prompt | None:
    """Render a chat, without its oldest turns if they leave a reply too little room.

    Args:
        chat: system message, then hands and replies; the last message is a hand.
        tokenizer: tokenizer of the policy.
        limit: maximum tokens of prompt and reply.
        thinking_active: whether the reply begins with thinking.

    Returns:
        The prompt; None if even the last hand leaves no room for a reply.
    """
    kept = list(chat)
    while True:
        text = render_messages(tokenizer, _as_messages(kept))
        # Some chat templates write the opening tag themselves.
        if thinking_active and not text.rstrip().endswith("<think>"):
            text += PREFILL
        num_tokens = len(tokenizer.encode(text, add_special_tokens=True))
        budget = limit - num_tokens - RESERVED_TOKENS
        if len(kept) <= 2 or budget * MIN_REPLY_SHARE >= limit:
            return Prompt(kept, text, num_tokens, budget) if budget > 0 else None
        del kept[1:3]  # the oldest hand and the reply to it


def _as_messages(chat: Chat) -> list[dict[str, Any]]:
    return [{**message, "role": TEMPLATE_ROLES[message["role"]]} for message in chat]


PREFILL = "<think>\n"
"""Prefix of a reply if thinking is requested; not written by the policy."""
DEFAULT_ACTION: Action = "stick"
"""Action for an invalid reply."""
BONUS = 0.2

THINK_START, THINK_END = "<think>", "</think>"
_PARAGRAPHS = re.compile(r"\n\s*\n")


def take_action(action: Literal["hit", "stick"]) -> None:
    """Play a blackjack hand.

    Args:
        action: hit takes a card, stick ends your turn.
    """


TAKE_ACTION = Tool.of(take_action)


class ScoredReply(NamedTuple):
    """Action and score of a reply."""

    action: Action | None
    """None if the reply is invalid."""
    score: float

    @property
    def played(self) -> Action:
        return self.action or DEFAULT_ACTION


def read_action(reply: str) -> Action | None:
    """Return the action of the only call after the thinking; None without a valid call."""
    answer = visible_text(reply)
    if answer.count("<tool_call>") != 1:
        return None
    _, arguments, is_error = parse_tool_call(answer, [TAKE_ACTION.definition()], ["tool_call"])
    wanted: Any = arguments.get("action") if isinstance(arguments, dict) else None
    if is_error or wanted not in ACTIONS:
        return None
    return "hit" if wanted == "hit" else "stick"


def form_bonus(reply: str, *, is_valid: bool, thinking_active: bool) -> float:
    """Return the score of the form: of a valid call, and of thinking if it is requested.

    Args:
        reply: reply, prefill included.
        is_valid: whether the reply has a valid action.
        thinking_active: whether thinking is requested.
    """
    bonus = BONUS if is_valid else -BONUS
    if not thinking_active:
        return bonus
    _, thinking, _ = _around_thinking(reply)
    if not thinking:
        return bonus - BONUS
    return bonus + (BONUS if thinking.strip() else 0.0)


def score_reply(
    hand: Hand,
    reply: str,
    *,
    rules: Rules,
    thinking_active: bool,
    is_cut: bool,
    length_share: float,
    tiebreak_factor: float,
) -> ScoredReply:
    """Score one reply to a hand.

    Args:
        hand: observation of the player.
        reply: reply, prefill included.
        rules: rules of the game.
        thinking_active: whether thinking is requested.
        is_cut: whether the reply was truncated, which makes it invalid.
        length_share: tokens of the reply as a fraction of `max_token_length`.
        tiebreak_factor: maximum bonus for a short reply.
    """
    action = None if is_cut else read_action(reply)
    played = action or DEFAULT_ACTION
    advantage = action_value(hand, played, rules) - value(hand, rules)
    bonus = form_bonus(reply, is_valid=action is not None, thinking_active=thinking_active)
    shortness = tiebreak_factor * (1 - min(1.0, length_share))
    return ScoredReply(action, advantage + bonus + shortness)


def shorten_thinking(reply: str, *, max_chars: int) -> str:
    """Shorten the thinking to at most `max_chars` characters of its last paragraph.

    A reply without a closed thinking block is unchanged.
    """
    before, inside, after = _around_thinking(reply)
    if inside is None:
        return reply
    thinking = inside.strip()
    kept = _PARAGRAPHS.split(thinking)[-1]
    kept = kept[max(0, len(kept) - max_chars) :].strip()
    inner = kept if kept == thinking else f"... {kept}"
    return f"{before}{THINK_START}\n{inner}\n{THINK_END}{after}"


def _around_thinking(reply: str) -> tuple[str, str | None, str]:
    """Return the text before, in and after the first thinking block; None for a missing block.

    Linear, unlike a regular expression, since it runs in the event loop.
    """
    before, opened, rest = reply.partition(THINK_START)
    inside, closed, after = rest.partition(THINK_END)
    return (before, inside, after) if opened and closed else (reply, None, "")


class PlayedGame:
    """One game.

    Attributes:
        table: the cards.
        chat: messages so far; the last one is a hand until the game ends.
    """

    def __init__(self, config: BlackjackEnvConfig, *, seed: int) -> None:
        self.config = config
        self.table = Table(config.env_name, seed=seed)
        self.chat = opening(self.table.hand, thinking_active=config.thinking_active)
        self.num_turns = 0
        self.num_best = 0

    @property
    def goes_on(self) -> bool:
        return not self.table.is_over and self.num_turns < self.config.max_turns

    def play(self, text: str, scored: ScoredReply) -> None:
        table = self.table
        if self.config.debug_mode:
            logger.info("%s: %s, score %.3f", table.hand, scored.action, scored.score)
        self.num_turns += 1
        self.num_best += scored.action == best_action(table.hand, table.rules)
        table.play(scored.played)
        kept = shorten_thinking(text, max_chars=self.config.max_think_chars_history)
        self.chat.append({"role": "agent", "content": kept})
        if not table.is_over:
            self.chat.append({"role": "environment", "content": describe(table.hand)})

    def record(self) -> GameRecord:
        table = self.table
        return GameRecord(table.reward, self.num_turns, self.num_best, table.is_over, self.chat)


class GameRecord(NamedTuple):
    """One game."""

    reward: float
    """1 won, 0 drawn or not finished, -1 lost."""
    num_turns: int
    num_best: int
    """Number of decisions that were valid and optimal."""
    is_over: bool
    messages: list[Mapping[str, str]]


def training_metrics(games: Sequence[GameRecord]) -> dict[str, float]:
    """Return the metrics of games, by name without an area; empty without games."""
    if not games:
        return {}
    return {
        "avg_episode_reward": statistics.fmean(game.reward for game in games),
        "avg_episode_steps": statistics.fmean(game.num_turns for game in games),
        "episode_win_rate": statistics.fmean(game.reward > 0 for game in games),
        "num_episodes": len(games),
    }


def evaluation_metrics(games: Sequence[GameRecord]) -> dict[str, float]:
    """Return the metrics of at least one game; rates are fractions of the finished games.

    `action_accuracy` is the fraction of decisions that were valid and optimal.
    """
    num_turns = sum(game.num_turns for game in games)
    finished = [game for game in games if game.is_over]
    num_finished = max(1, len(finished))
    return {
        "eval/avg_total_reward": statistics.fmean(game.reward for game in games),
        "eval/avg_num_turns": num_turns / len(games),
        "eval/action_accuracy": sum(game.num_best for game in games) / max(1, num_turns),
        "eval/win_rate": sum(game.reward > 0 for game in finished) / num_finished,
        "eval/loss_rate": sum(game.reward < 0 for game in finished) / num_finished,
        "eval/draw_rate": sum(game.reward == 0 for game in finished) / num_finished,
        "eval/num_completed_episodes": len(finished),
    }
