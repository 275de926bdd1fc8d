"""Poker: choose the action of a player in no-limit hold'em who won the hand.

    hand -> [system, user] -> G completions -> <answer> action and amount
        -> 0.6 x reward `action_match` + 0.4 x reward `bet_sizing`

Both rewards are in the registry of reward functions. Hands come from the hub or local files:

    python environments/community/poker_holdem/poker_holdem_env.py process --env.dataset_path \
        environments/community/poker_holdem/sample --env.total_steps 4
"""

from __future__ import annotations

import logging
import re
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from atroposlib.envs.dataset_items import DatasetItems, HubItemsConfig
from atroposlib.envs.reward_fns import CombinedReward, RewardFunction, registry
from atroposlib.envs.reward_fns.reward_function import one_per_completion
from atroposlib.envs.single_turn_env import SingleTurnEnv, SingleTurnEnvConfig
from atroposlib.errors import ConfigError
from atroposlib.tasks.answers import only_tagged
from atroposlib.tasks.card import EnvironmentCard

__all__ = [
    "ActionMatchReward",
    "BetSizingReward",
    "PokerAction",
    "PokerConfig",
    "PokerEnv",
    "action_match",
    "bet_sizing",
    "read_action",
]

logger = logging.getLogger("environments.poker_holdem")

CARD = EnvironmentCard(
    task="choose an action in no-limit hold'em",
    turns="1",
    reward="0.6 for the winner's action, 0.4 for its amount, each also in part",
    data="6max-nlh-poker from the hub, or `--env.dataset_path`",
    command="process --env.dataset_path environments/community/poker_holdem/sample "
    "--env.total_steps 4",
)

SAMPLE = Path(__file__).with_name("sample")
REWARDS: list[Mapping[str, Any]] = [
    {"type": "action_match", "name": "action_match", "weight": 0.6},
    {"type": "bet_sizing", "name": "bet_sizing", "weight": 0.4},
]
EXACT, SAME_TYPE, RELATED = 1.0, 0.7, 0.5
MAX_DEVIATION = 0.5
"""Deviation of an amount, as a part of the gold one, from which it earns nothing."""
RELATIVES = (frozenset(["bet", "raise", "all-in"]), frozenset(["check", "call"]))
SIZED = frozenset(["bet", "raise"])
ACTION = re.compile(
    r"(fold|check|call|bet|raise|all[- ]?in)s?(?: (?:to|of|for))? ?\$?([0-9][0-9,]*(?:\.[0-9]+)?)?"
    r" ?(?:bb|chips|big blinds)?\.?"
)
MAX_ACTION_CHARACTERS = 60
SYSTEM_PROMPT = (
    "You are an expert in no-limit hold'em poker with six players. You read the course of a hand "
    "and decide for one player: fold, check, call, bet, raise or all-in. Think about the cards, "
    "the position, the pot and the stacks first. Then write the action between <answer> and "
    "</answer>, once. For a bet write its amount and for a raise the amount that is raised to, in "
    "the unit of the hand, such as <answer>raise 12</answer>."
)


class PokerAction(NamedTuple):
    """One action."""

    kind: str
    amount: float | None = None
    """Of a bet or a raise, in the unit of the hand."""


class PokerConfig(HubItemsConfig, SingleTurnEnvConfig):
    """Data set of the hands, and sampling."""


def read_action(text: str) -> PokerAction | None:
    """Return the action that a text consists of, such as `raise to 12 bb`; None for others."""
    short = " ".join(text[: MAX_ACTION_CHARACTERS + 1].lower().split())
    found = ACTION.fullmatch(short) if len(text) <= MAX_ACTION_CHARACTERS else None
    if found is None:
        return None
    kind = "all-in" if found[1].startswith("all") else found[1]
    amount = float(found[2].replace(",", "")) if found[2] and kind in SIZED else None
    return PokerAction(kind, amount or None)


def action_match(action: PokerAction, gold: PokerAction) -> float:
    """Return 1.0 for the same action, 0.7 for another amount of it, 0.5 for a related action."""
    if action == gold:
        return EXACT
    if action.kind == gold.kind:
        return SAME_TYPE
    return RELATED if any({action.kind, gold.kind} <= group for group in RELATIVES) else 0.0


def bet_sizing(action: PokerAction, gold: PokerAction) -> float:
    """Return 1.0 for the gold amount, linearly less up to a deviation of one half.

    Where the gold action has no amount, the same kind of action earns 1.0.
    """
    if gold.amount is None:
        return float(action.kind == gold.kind)
    if action.amount is None:
        return 0.0
    deviation = abs(action.amount - gold.amount) / gold.amount
    return max(0.0, 1 - deviation / MAX_DEVIATION)


class _TaggedActionReward(RewardFunction):
    """Compares the action in the tags of a completion with `solution`, the gold one."""

    @abstractmethod
    def compare(self, action: PokerAction, gold: PokerAction) -> float: ...

    def compute(self, completions: list[Any], solution: Any = None, **kwargs: Any) -> list[float]:
        """Return [G] rewards; 0.0 for completions without one action, or a gold one."""
        golds = one_per_completion(solution, len(completions))
        return [self._reward(*pair) for pair in zip(completions, golds, strict=True)]

    def _reward(self, completion: Any, solution: Any) -> float:
        gold = read_action(str(solution or ""))
        action = read_action(only_tagged(self.get_content(completion), "answer") or "")
        return self.compare(action, gold) if action and gold else 0.0


@registry.register(name="action_match")
class ActionMatchReward(_TaggedActionReward):
    """`action_match` of the action in a completion."""

    def compare(self, action: PokerAction, gold: PokerAction) -> float:
        return action_match(action, gold)


@registry.register(name="bet_sizing")
class BetSizingReward(_TaggedActionReward):
    """`bet_sizing` of the action in a completion."""

    def compare(self, action: PokerAction, gold: PokerAction) -> float:
        return bet_sizing(action, gold)


class PokerEnv(DatasetItems, SingleTurnEnv):
    """Hands in which an action is to be chosen; an item is a row.

    Attributes:
        reward: the weighted sum of both rewards.
    """

    name = "poker_env"
    hub_dataset = "yoniebans/6max-nlh-poker"
    env_config_cls = PokerConfig
    config: PokerConfig
    columns = ("pokergpt_prompt", "winning_action")
    optional_columns = ("formatted_winning_action", "game_stage", "hand_id", "bb_won")
    default_model = "Qwen/Qwen3-1.7B"
    default_settings: ClassVar[dict[str, Any]] = {
        "group_size": 16,
        "max_token_length": 4096,
        "wandb_name": "poker_env",
    }
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reward = CombinedReward(REWARDS)

    def _read(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        splits = super()._read()
        train, test = (list(filter(gold_of, rows)) for rows in splits)
        num_left_out = sum(map(len, splits)) - len(train) - len(test)
        if num_left_out:
            logger.warning("%d hands without a readable action are left out", num_left_out)
        if not train:
            first = splits[0][0]["winning_action"]
            raise ConfigError(f"no hand has a readable action; that of the first is {first!r:.80}")
        return train, test

    def prompt(self, item: Mapping[str, Any]) -> list[dict[str, str]]:
        return [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": item["pokergpt_prompt"]},
        ]

    async def score(self, item: Mapping[str, Any], answer: str) -> dict[str, float]:
        """Return the weighted rewards by name."""
        [parts] = self.reward.parts([answer], solution=gold_of(item))
        return parts

    async def evaluate_item(self, item: Mapping[str, Any]) -> dict[str, Any]:
        record = await super().evaluate_item(item)
        return {**record, "game_stage": item["game_stage"], "gold_answer": gold_of(item)}

    def check_gold_answer(self, item: Mapping[str, Any]) -> str:
        return f"<answer>{gold_of(item)}</answer>"


def gold_of(row: Mapping[str, Any]) -> str:
    """Return the gold action, from the column that has its amount if possible; empty if unread."""
    texts = (str(row[name] or "") for name in ("formatted_winning_action", "winning_action"))
    return next((text for text in texts if read_action(text)), "")


if __name__ == "__main__":
    PokerEnv.cli()
