"""DynastAI: the parts of a scenario, requests from templates, the settings of the weights."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from pydantic import ValidationError

from environments.community.dynastai.dynastai_server import (
    METRICS,
    DynastAIConfig,
    make_request,
    score_scenario,
)

REQUEST = {
    "category": "piety",
    "character": "abbess",
    "subject": "relic",
    "state": {"power": 50, "stability": 50, "piety": 90, "wealth": 10},
}
YES = {"power": 0, "stability": 5, "piety": -5, "wealth": 0}
NO = {"power": 0, "stability": -5, "piety": 5, "wealth": 0}
CARD: dict[str, Any] = {
    "character": "The old Abbess",
    "category": "Piety",
    "scenario": "A thief has taken the relic of the chapel, and the abbess asks for soldiers.",
    "yes_option": "Send soldiers",
    "no_option": "Pray",
    "effects": {"yes": YES, "no": NO},
}


def total(card: object) -> float:
    text = card if isinstance(card, str) else json.dumps(card)
    return sum(score_scenario(text, REQUEST).values())


@pytest.mark.parametrize(
    ("changes", "score"),
    [
        ({}, 1.0),
        ({"title": "x"}, 0.0),
        ({"scenario": "The relic is gone."}, 0.25),
        ({"scenario": "The abbess asks for soldiers, since a thief has been in the chapel."}, 0.25),
        ({"scenario": "relic " * 20}, 0.25),
        ({"scenario": 3}, 0.25),
        ({"category": "power"}, 0.25),
        ({"character": "admiral"}, 0.25),
        ({"no_option": " send soldiers"}, 0.25),
        ({"effects": {"yes": YES}}, 0.5),
        ({"effects": {"yes": YES, "no": {**NO, "piety": 5.0}}}, 0.5),
        ({"effects": {"yes": YES, "no": {**NO, "piety": True}}}, 0.5),
        ({"effects": {"yes": YES, "no": {**NO, "piety": 26}}}, 0.5),
        ({"effects": {"yes": YES, "no": {**NO, "piety": float("nan")}}}, 0.5),
        ({"effects": {"yes": YES, "no": YES}}, 0.75),  # no choice
        ({"effects": {"yes": {**YES, "piety": 6}, "no": NO}}, 0.75),  # yes is better
        ({"effects": {"yes": {**YES, "piety": 0}, "no": {**NO, "piety": 0, "power": 5}}}, 0.75),
        ({"effects": {"yes": {**YES, "wealth": -10}, "no": {**NO, "piety": 10}}}, 0.75),  # the end
    ],
)
def test_parts_of_a_scenario(changes: dict[str, Any], score: float) -> None:
    assert total({**CARD, **changes}) == score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (f"```json\n{json.dumps(CARD, indent=1)}\n```", 1.0),
        (f"Here it is: {json.dumps(CARD)}", 0.0),
        (json.dumps(CARD)[:-1] + ', "character": "abbess"}', 0.0),
        (json.dumps([CARD]), 0.0),
        ('{"effects":' * 360, 0.0),
        (json.dumps({**CARD, "scenario": "relic" * 1000}), 0.0),
        (json.dumps(CARD).replace("-5", "-" + "5" * 3_000), 0.0),
        ("", 0.0),
    ],
)
def test_text_must_be_one_object(text: str, score: float) -> None:
    assert total(text) == score


@pytest.mark.parametrize(("num_templates", "num_found"), [(400, 400), (8, 8), (5, 5)])
def test_requests_are_made_from_all_templates(num_templates: int, num_found: int) -> None:
    source = random.Random(0)
    requests = [
        make_request(source, weights=[50] * 4, num_templates=num_templates) for _ in range(5_000)
    ]

    found = {(r["category"], r["character"], r["subject"]) for r in requests}

    assert len(found) == num_found


def test_weights_choose_the_category() -> None:
    source = random.Random(0)
    config = DynastAIConfig(power_weight=0, stability_weight=0, wealth_weight=0)

    requests = [make_request(source, weights=config.weights, num_templates=400) for _ in range(50)]

    assert {request["category"] for request in requests} == {"piety"}
    with pytest.raises(ValidationError, match="the weights of all categories are 0"):
        DynastAIConfig(**{f"{name}_weight": 0 for name in METRICS})
