"""Metric cards: parts of the score, objects in answers, the requests that are built in."""

from __future__ import annotations

import json
import statistics
from typing import Any

import pytest

from environments.community.metric_card_generator.metric_card_generator_env import (
    REQUESTS,
    CardRequest,
    MetricCardEnv,
    score_card,
)
from tests.environments.offline import PROBED, make_env, ready_env
from tests.fakes import ScriptedEngine

ITEM = CardRequest("Sales rose to 1,250.", ("sales",), 1250, "up")


def card(**props: Any) -> str:
    chosen = {"title": "Total sales", "value": "1,250", "trend": {"direction": "up"}, **props}
    present = {name: value for name, value in chosen.items() if value is not None}
    return json.dumps({"componentType": "metricCard", "props": present})


@pytest.mark.parametrize(
    ("answer", "schema", "formatting"),
    [
        (card(), 0.5, 0.5),
        (card(value="$1250.00", icon="cart", description="In May"), 0.5, 0.5),
        (f"```json\n{card()}\n```", 0.5, 0.5),
        (f"Here it is: {card()}", 0.5, 0.0),
        (f"```\n{card()}\n```\nDone.", 0.5, 0.0),
        (card(title="Total"), 0.0, 0.5),  # of what?
        (card(trend=None), 0.0, 0.5),
        (card(trend={"direction": "down"}), 0.0, 0.5),
        (card(trend={"direction": "up", "speed": 3}), 0.0, 0.5),
        (card(color="red"), 0.0, 0.5),
        (card().replace("metricCard", "chart"), 0.0, 0.5),
        (card(value="1,251"), 0.0, 0.0),
        (card(value=1250), 0.0, 0.0),  # not a text
        (card(value="1,250 or 1,251"), 0.0, 0.0),
        (card(value="many"), 0.0, 0.0),
        (card(value="1" * 500), 0.0, 0.0),
        (f"[{card()}]", 0.5, 0.0),
        (f"{card()} {card()}", 0.0, 0.0),
        ("[" * 4_000, 0.0, 0.0),
        (card() + " " * 10 + "x" * 5_000, 0.0, 0.0),
        ('{"props": [1250]}', 0.0, 0.0),
        ("{}", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_score(answer: str, schema: float, formatting: float) -> None:
    assert score_card(answer, ITEM) == {"schema": schema, "formatting": formatting}


async def test_one_card_for_all_requests_earns_little(monkeypatch: pytest.MonkeyPatch) -> None:
    env = await ready_env(MetricCardEnv, monkeypatch)
    golds = [env.check_gold_answer(item) for item in REQUESTS]

    def mean(answer: str) -> float:
        return statistics.fmean(sum(score_card(answer, item).values()) for item in REQUESTS)

    assert all(
        sum(score_card(g, item).values()) == 1.0 for g, item in zip(golds, REQUESTS, strict=True)
    )
    assert max(map(mean, golds)) <= 0.05


async def test_group_has_the_parts_of_its_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    replies = iter([card(), f"Sure: {card()}", "no"])

    def play(prompt: str) -> str:
        return next(replies) if ITEM.request in prompt else PROBED

    async with ScriptedEngine(play) as engine:
        env = make_env(MetricCardEnv, engine, monkeypatch, group_size=3)
        group, _ = await env.collect_trajectories(ITEM)
        await env.server.close()

    assert group["scores"] == [1.0, 0.5, 0.0]
    assert group["reward_parts"][1] == {"schema": 0.5, "formatting": 0.0}
