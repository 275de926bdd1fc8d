"""DynastAI: scenarios of a kingdom card game, as well-formed JSON.

    category, visitor, subject, state of the kingdom -> [system, user] -> G completions -> JSON
        -> object, texts, effects, fit: 0.25 each

A scenario has two options, and each changes power, stability, piety and wealth. Requests are made
from templates on the spot:

    python environments/community/dynastai/dynastai_server.py process --env.total_steps 4
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field, model_validator

from atroposlib.envs.single_turn_env import SingleTurnEnv, SingleTurnEnvConfig
from atroposlib.tasks.answers import only_json_object
from atroposlib.tasks.card import EnvironmentCard

__all__ = ["METRICS", "DynastAIConfig", "DynastAIEnv", "make_request", "score_scenario"]

CARD = EnvironmentCard(
    task="write a scenario of a kingdom card game as JSON",
    turns="1",
    reward="0.25 each for the object, its texts, its effects, and a fitting choice",
    data="400 templates built in",
    command="process --env.total_steps 4",
)

METRICS = ("power", "stability", "piety", "wealth")
OPTIONS = ("yes", "no")
KEYS = {"character", "category", "scenario", "yes_option", "no_option", "effects"}
PART = 0.25
MAX_CHARACTERS = 4_000
"""Characters of a scenario as JSON."""
LENGTHS = {"scenario": (40, 400), "yes_option": (3, 80), "no_option": (3, 80)}
"""Minimum and maximum number of characters of each text."""
MAX_EFFECT = 25
CHARACTERS = (
    *("abbess", "admiral", "blacksmith", "chancellor", "envoy", "general", "gravedigger"),
    *("huntress", "merchant", "miller"),
)
SUBJECTS = {
    "power": (
        *("border", "rebels", "fortress", "duel", "mercenaries", "spies", "siege", "oath"),
        *("hostage", "armory"),
    ),
    "stability": (
        *("harvest", "plague", "bridge", "feud", "curfew", "wolves", "flood", "census"),
        *("refugees", "heir"),
    ),
    "piety": (
        *("relic", "pilgrims", "heresy", "cathedral", "miracle", "fast", "prophecy", "tithe"),
        *("choir", "shrine"),
    ),
    "wealth": (
        *("taxes", "caravan", "silver", "harbor", "guild", "loan", "market", "toll", "mint"),
        *("festival",),
    ),
}
NUM_TEMPLATES = len(METRICS) * 10 * len(CHARACTERS)
EVALUATION = "evaluation"
SYSTEM_PROMPT = (
    "You write cards of a game about a kingdom. Each card is a visit to the ruler that asks for a "
    "decision between yes and no; the decision changes the power, stability, piety and wealth of "
    "the kingdom, each from 0 to 100. The reign ends when one of them reaches 0 or 100. You may "
    "think first between <think> and </think>. Then write one JSON object and nothing else, with "
    "exactly these keys:\n"
    '{"character": "who visits", "category": "power, stability, piety or wealth", "scenario": '
    '"40 to 400 characters", "yes_option": "3 to 80 characters", "no_option": "3 to 80 '
    'characters", "effects": {"yes": {"power": 0, "stability": 0, "piety": 0, "wealth": 0}, '
    '"no": {"power": 0, "stability": 0, "piety": 0, "wealth": 0}}}\n'
    f"Effects are integers from -{MAX_EFFECT} to {MAX_EFFECT}. Each option must have a "
    "disadvantage that the other lacks, one of them must change the category of the card, and "
    "one of them must not end the reign."
)
QUESTION = (
    "Category: {category}\nVisitor: {character}\nSubject, a word that the scenario has: {subject}\n"
    "Kingdom: {state}"
)
Request = Mapping[str, Any]
"""One item: `category`, `character`, `subject`, and `state`, the value of each metric."""


class DynastAIConfig(SingleTurnEnvConfig):
    """Settings of the requests."""

    card_template_count: int = Field(
        400,
        ge=1,
        le=NUM_TEMPLATES,
        description="Number of templates: combinations of category, visitor and subject.",
    )
    api_port: int = Field(
        9001, ge=0, le=65535, description="Has no effect: there is no page of the game to serve."
    )
    power_weight: int = Field(50, ge=0, le=1000, description="Weight of cards about power.")
    stability_weight: int = Field(50, ge=0, le=1000, description="Weight of cards about stability.")
    piety_weight: int = Field(50, ge=0, le=1000, description="Weight of cards about piety.")
    wealth_weight: int = Field(50, ge=0, le=1000, description="Weight of cards about wealth.")
    num_eval_items: int = Field(
        32, ge=0, le=10_000, description="Number of requests of one evaluation."
    )
    seed: int = Field(0, description="Seed of the requests.")

    @model_validator(mode="after")
    def _a_category_has_a_weight(self) -> DynastAIConfig:
        if not any(self.weights):
            raise ValueError("the weights of all categories are 0; expected one above 0")
        return self

    @property
    def weights(self) -> list[int]:
        """Weights in the order of `METRICS`."""
        return [getattr(self, f"{name}_weight") for name in METRICS]


def make_request(source: random.Random, *, weights: Sequence[int], num_templates: int) -> Request:
    """Return a request: a weighted category, one of its templates, and a state of the kingdom.

    Args:
        source: random numbers.
        weights: weight of each of `METRICS`.
        num_templates: number of templates of all categories.
    """
    place = source.choices(range(len(METRICS)), weights)[0]
    # Templates are numbered through the categories in turn; each has one, if there are enough.
    number = source.randrange(max(1, (num_templates - place + 3) // len(METRICS)))
    category = METRICS[place]
    return {
        "category": category,
        "character": CHARACTERS[number % len(CHARACTERS)],
        "subject": SUBJECTS[category][number // len(CHARACTERS)],
        "state": {name: source.randint(5, 95) for name in METRICS},
    }


def score_scenario(answer: str, request: Request) -> dict[str, float]:
    """Return the parts of the score, each 0.0 or 0.25; a part needs those before it.

    Args:
        answer: the completion without its thinking.
        request: the item.
    """
    parts = dict.fromkeys(("object", "texts", "effects", "fit"), 0.0)
    card = only_json_object(answer, max_characters=MAX_CHARACTERS)
    if card is None or card.keys() != KEYS:
        return parts
    parts["object"] = PART
    if _has_texts(card, request):
        parts["texts"] = PART
        if _has_effects(card["effects"]):
            parts["effects"] = PART
            if _is_fitting(card["effects"], request):
                parts["fit"] = PART
    return parts


def _has_texts(card: Mapping[str, Any], request: Request) -> bool:
    """Whether the texts are those of the request, of the right lengths, and options differ."""
    if not all(isinstance(card[name], str) for name in (*LENGTHS, "character", "category")):
        return False
    lengths = {name: len(card[name].strip()) for name in LENGTHS}
    words = re.findall(r"\w+", card["scenario"].casefold())
    return (
        all(least <= lengths[name] <= most for name, (least, most) in LENGTHS.items())
        and card["category"].strip().casefold() == request["category"]
        and request["character"] in re.findall(r"\w+", card["character"].casefold())
        and request["subject"] in words
        and len(set(words)) > len(words) // 2
        and card["yes_option"].strip().casefold() != card["no_option"].strip().casefold()
    )


def _has_effects(effects: Any) -> bool:
    """Whether each option has one integer in range for each metric, and nothing else."""
    if not isinstance(effects, dict) or effects.keys() != set(OPTIONS):
        return False
    return all(
        isinstance(changes, dict)
        and changes.keys() == set(METRICS)
        and all(type(value) is int and abs(value) <= MAX_EFFECT for value in changes.values())
        for changes in effects.values()
    )


def _is_fitting(effects: Mapping[str, Mapping[str, int]], request: Request) -> bool:
    """Whether no option is better in all metrics, the category changes, and the reign can go on."""
    yes, no = effects["yes"], effects["no"]
    gains = [yes[name] - no[name] for name in METRICS]
    is_dilemma = any(gain > 0 for gain in gains) and any(gain < 0 for gain in gains)
    changes_category = any(changes[request["category"]] for changes in (yes, no))
    state = request["state"]
    goes_on = any(
        all(0 < state[name] + changes[name] < 100 for name in METRICS) for changes in (yes, no)
    )
    return is_dilemma and changes_category and goes_on


class DynastAIEnv(SingleTurnEnv):
    """Requests for scenarios; an item is a `Request`.

    Attributes:
        iter: training requests handed out so far; kept in checkpoints.
    """

    name = "dynastai"
    env_config_cls = DynastAIConfig
    config: DynastAIConfig
    default_model = "Qwen/Qwen3-1.7B"
    default_settings: ClassVar[dict[str, Any]] = {
        "group_size": 8,
        "max_token_length": 2048,
        "wandb_name": "dynastai",
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.iter = 0

    def _request(self, number: object) -> Request:
        config = self.config
        return make_request(
            random.Random(f"{config.seed} {number}"),
            weights=config.weights,
            num_templates=config.card_template_count,
        )

    async def get_next_item(self) -> Request:
        request = self._request(self.iter)
        self.iter += 1
        return request

    def eval_items(self) -> Sequence[Request]:
        return [self._request(f"{EVALUATION} {i}") for i in range(self.config.num_eval_items)]

    def prompt(self, item: Request) -> list[dict[str, str]]:
        state = ", ".join(f"{name} {value}" for name, value in item["state"].items())
        return [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": QUESTION.format(**{**item, "state": state})},
        ]

    async def score(self, item: Request, answer: str) -> dict[str, float]:
        return score_scenario(answer, item)

    def save_checkpoint(self, step: int, data: Mapping[str, Any] | None = None) -> None:
        super().save_checkpoint(step, {**(data or {}), "iter": self.iter})

    def check_gold_answer(self, item: Request) -> str:
        category = item["category"]
        other = METRICS[METRICS.index(category) - 1]
        changes = {
            option: dict.fromkeys(METRICS, 0) | {category: sign * 3, other: -sign * 3}
            for option, sign in (("yes", 1), ("no", -1))
        }
        card = {
            "character": f"The {item['character']}",
            "category": category,
            "scenario": f"A visitor bows and speaks of the {item['subject']}, and of what it will "
            "cost if nothing happens before winter.",
            "yes_option": "Do what is asked",
            "no_option": "Send the visitor away",
            "effects": changes,
        }
        return json.dumps(card)


if __name__ == "__main__":
    DynastAIEnv.cli()
