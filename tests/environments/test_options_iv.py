"""Implied volatility: the line with the number, its closeness, the threshold, the options."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest

from atroposlib.errors import ConfigError
from environments.community.options_iv_prediction.options_iv_prediction_env import (
    LEAD_IN,
    OptionsIVPrediction,
    closeness,
    read_volatility,
    score_prediction,
)
from tests.environments.offline import ready_env


@pytest.mark.parametrize(
    ("answer", "volatility"),
    [
        (f"So {LEAD_IN} 31.5%", 31.5),
        ("the implied volatility will be 31 %.", 31.0),
        ("**The implied volatility will be:** 31%", 31.0),
        (f"{LEAD_IN} 31.5", None),
        (f"{LEAD_IN} -31.5%", None),
        (f"{LEAD_IN} 31% or so. {LEAD_IN} 40%", None),
        (f"{LEAD_IN} between 10% and 90%", None),
        (f"{LEAD_IN} 31% {LEAD_IN}", None),
        (f"{LEAD_IN} {'9' * 400}%", None),
        (f"{LEAD_IN} 1e3%", None),
        (f"{LEAD_IN} nan%", None),
        ("31%", None),
        ("", None),
    ],
)
def test_line_with_the_number(answer: str, volatility: float | None) -> None:
    assert read_volatility(answer) == volatility


@pytest.mark.parametrize(
    ("difference", "score"),
    [
        *[(0.0, 1.0), (0.49, 1.0), (0.5, 0.95), (2, 0.95), (5, 0.85), (10, 0.7), (15, 0.5)],
        *[(20, 0.3), (20.5, 0.1), (900, 0.1)],
    ],
)
def test_closeness(difference: float, score: float) -> None:
    assert closeness(30.0 + difference, 30.0) == score
    assert score_prediction(f"{LEAD_IN} {30.0 + difference}%", 30.0) == score


def test_answer_without_a_number_scores_below_a_wrong_one() -> None:
    assert score_prediction("I do not know.", 30.0) == -0.5


def test_scores_of_a_group_depend_on_the_threshold_and_the_length() -> None:
    env = SimpleNamespace(config=SimpleNamespace(max_token_length=100))
    lengths = [10, 10, 10, 96, 95]
    trajectories = [SimpleNamespace(num_completion_tokens=length) for length in lengths]

    scores = OptionsIVPrediction.group_scores(
        env,
        [0.7, 0.5, -0.5, 0.95, 0.95],
        trajectories,  # type: ignore[arg-type]
    )

    assert scores == [1.0, -1.0, -1.0, -1.0, 1.0]  # 0.95 - 0.5 * 0.96 is 0.47


def priced(option: dict[str, str]) -> float:
    """The price of an option by the formula of Black and Scholes."""
    spot, strike = float(option["stock_price"]), float(option["strike"])
    years = float(option["days_to_expiration"]) / 365
    rate, volatility = (
        float(option[name]) / 100 for name in ("risk_free_rate", "implied_volatility")
    )
    spread = volatility * math.sqrt(years)
    first = (math.log(spot / strike) + (rate + volatility**2 / 2) * years) / spread
    normal = statistics.NormalDist().cdf
    call = spot * normal(first) - strike * math.exp(-rate * years) * normal(first - spread)
    is_call = option["option_type"] == "call"
    return call if is_call else call - spot + strike * math.exp(-rate * years)


async def test_shipped_options_have_their_prices_and_no_best_constant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = await ready_env(OptionsIVPrediction, monkeypatch)
    options = [*env.train, *env.test]

    golds = [float(option["implied_volatility"]) for option in options]
    shares = [
        statistics.fmean(closeness(guess, gold) > 0.5 for gold in golds) for guess in range(200)
    ]

    assert len(options) == 48
    assert all(abs(priced(o) - float(o["option_price"])) < 0.006 for o in options)
    assert max(shares) < 0.45


async def test_options_without_a_volatility_are_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    row = dict.fromkeys(OptionsIVPrediction.columns, "1")
    values = ["nan", "x", "-3", "0", "20"]
    rows = [json.dumps({**row, "implied_volatility": value}) for value in values]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(rows))

    env = await ready_env(OptionsIVPrediction, monkeypatch, dataset_path=str(tmp_path))

    assert [option["implied_volatility"] for option in env.train] == ["20"]
    (tmp_path / "train.jsonl").write_text(rows[0])
    with pytest.raises(ConfigError, match="implied_volatility above 0"):
        await env.setup()
