"""Weather forecasts: ratings of the judge, missing calls and summaries, files of soundings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atroposlib.errors import ConfigError
from atroposlib.tasks.judge_model import NoVerdictError
from environments.community.meteorology_forecast.meteorology_forecast_env import (
    LEVEL,
    MeteorologyForecastRLEnv,
    read_ratings,
    read_station,
    summary_of,
)
from tests.environments.offline import PROBED, make_env, ready_env
from tests.fakes import ScriptedEngine

CALL = '<tool_call>{"name": "radar", "arguments": {}}</tool_call>'
SUMMARY = "FORECAST SUMMARY: rain."
ITEM = {"station": "ALFS", "model": "RAP", "date": "20250314", "soundings": "Hour 6\n1000 90"}


def verdict(reasoning: object, calls: object, summary: object) -> str:
    return (
        f"Well.\nREASONING_SCORE: {reasoning}\nTOOL_CALL_SCORE: {calls}\n"
        f"FORECAST_SUMMARY_SCORE: {summary}"
    )


@pytest.mark.parametrize(
    ("text", "ratings"),
    [
        (verdict(5, 3, 2), [5.0, 3.0, 2.0]),
        (verdict(3.5, 0, "1/2"), [3.5, 0.0, 1.0]),
        ("<think>REASONING_SCORE: 5</think>" + verdict(1, 1, 1), [1.0, 1.0, 1.0]),
        (
            "**REASONING_SCORE: 4**\n- TOOL_CALL_SCORE: **2**\n* FORECAST_SUMMARY_SCORE: 1",
            [4, 2, 1],
        ),
        (verdict("1\nREASONING_SCORE: 5", 3, 2), None),
        (verdict(6, 3, 2), None),
        (verdict(5, 3, 2.5), None),
        (verdict(-1, 3, 2), None),
        (verdict("nan", 3, 2), None),
        (verdict(10**50, 3, 2), None),
        (verdict(5, 3, ""), None),
        ("REASONING_SCORE: 5", None),
        ("", None),
    ],
)
def test_ratings(text: str, ratings: list[float] | None) -> None:
    found = read_ratings(text)

    assert (found and list(found.values())) == ratings


@pytest.mark.parametrize(
    ("answer", "summary"),
    [
        (f"Moist.\n**{SUMMARY}**", "rain."),
        ("forecast summary: snow\nDone.", "snow"),
        ("FORECAST SUMMARY:", ""),
        ("My FORECAST SUMMARY: rain", ""),
        ("", ""),
    ],
)
def test_summary(answer: str, summary: str) -> None:
    assert summary_of(answer) == summary


async def group_of(answers: list[str], monkeypatch: pytest.MonkeyPatch, reply: str) -> Any:
    """The group of some answers, and the number of requests to the judge."""
    written, requests = iter(answers), []

    def play(prompt: str) -> str:
        if "You grade a trainee" in prompt:
            requests.append(prompt)
            return reply
        return next(written) if "Station: ALFS" in prompt else PROBED

    async with ScriptedEngine(play) as engine:
        env = make_env(
            MeteorologyForecastRLEnv,
            engine,
            monkeypatch,
            group_size=len(answers),
            max_token_length=40_000,
        )
        try:
            group, _ = await env.collect_trajectories(ITEM)
        finally:
            await env.server.close()
    return group, len(requests)


async def test_score_is_the_sum_of_the_ratings(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [
        f"Moist.\n{CALL}\n{SUMMARY}",
        f"Moist.\n{SUMMARY}",
        f"Moist.\n<tool_call>radar</tool_call>\n{CALL[:-3]}",
        f"<think>{CALL}\n{SUMMARY}</think>",
        "x" * 20_001,
    ]

    group, num_judged = await group_of(answers, monkeypatch, verdict(4, 2, 1))

    assert group["scores"] == [7.0, 5.0, 4.0, 0.0, 0.0]
    assert num_judged == 3
    assert group["reward_parts"][0] == {"reasoning": 4, "tool_calls": 2, "forecast_summary": 1}


async def test_judge_without_ratings_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoVerdictError, match=r"three ratings: 'Fine\.'"):
        await group_of([f"Moist.\n{SUMMARY}"], monkeypatch, "Fine.")


async def test_shipped_stations(monkeypatch: pytest.MonkeyPatch) -> None:
    env = await ready_env(MeteorologyForecastRLEnv, monkeypatch)

    assert (len(env.train), len(env.test)) == (6, 2)
    assert {text.count("Hour") for item in env.train for text in [item["soundings"]]} == {5}
    env.config.forecast_hours_to_sample = [7]
    with pytest.raises(ConfigError, match="no soundings of RAP for the hours"):
        await env.setup()


def test_malformed_soundings_are_named(tmp_path: Path) -> None:
    level = dict.fromkeys(LEVEL, 1.5)
    path = tmp_path / "ALFS.json"

    def read(levels: object) -> str | None:
        path.write_text(json.dumps({"soundings": {"6": levels}}))
        return read_station(path, [6, 9])

    assert read([level]) == f"Hour 6\n{' '.join(LEVEL)}\n1.5 1.5 1.5 1.5 1.5 1.5"
    for levels in ([{**level, "height_m": float("nan")}], [{}], 3, [{**level, "height_m": "x"}]):
        with pytest.raises(ConfigError, match=r"ALFS\.json cannot be read"):
            read(levels)
