"""What evaluations have in common: their requests count as such, and are sampled as reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL", reason="the extra examples is not installed")

from atroposlib.envs.base import BaseEnv
from atroposlib.sandbox import SandboxUnavailableError, open_sandbox
from environments import math_server, math_server_zero
from environments.code_execution_server.code_execution_server import CodingEnv
from environments.dataset_environment.dataset_env import DatasetEnv
from environments.deep_research.deep_research_environment import DeepResearchEnv
from environments.eval_environments.drop_eval import DROPEvalEnv
from environments.eval_environments.gsm8k_eval import GSM8KEvalEnv
from environments.eval_environments.mmlu_eval import MMLUEvalEnv
from environments.fundamental_prediction_environment import FundamentalPredictionEnv
from environments.game_environments.crosswords.crosswords_env import CrosswordsEnv
from environments.game_environments.gymnasium.blackjack.blackjack_env_no_thinking import (
    BlackjackEnvNoThinking,
)
from environments.game_environments.gymnasium.blackjack.blackjack_env_thinking import BlackjackEnv
from environments.game_environments.gymnasium.gym_taxi import GymTaxiEnv
from environments.game_environments.hangman.hangman_env import HangmanOnlineEnv
from environments.gsm8k_server import GSM8kEnv
from environments.infinimath.infinimath_env import InfiniteMathEnv
from environments.mcqa_thinking_env import MCQAThinkingEnv
from environments.multimodal_dpo.pixmo_clocks import ClockDatasetEnv
from environments.number_guessing import NumberGuessingEnv
from environments.rlaif_server import RLAIFEnv
from environments.tool_calling_server import SingleToolCallingEnv
from environments.tool_use_multiturn_server import MultiTurnToolCallingEnv
from environments.tool_use_turnlevel_advantage_server import MultiTurnToolUseTurnLevelAdvantageEnv
from environments.word_sums import WordSumsEnv
from tests.environments.offline import make_env
from tests.fakes import ScriptedEngine

pytestmark = pytest.mark.slow

TEMPERATURES: dict[type[BaseEnv], float] = {
    GSM8kEnv: 0.0,
    MCQAThinkingEnv: 0.5,
    RLAIFEnv: 0.0,
    SingleToolCallingEnv: 0.0,
    FundamentalPredictionEnv: 0.2,
    math_server.MathEnv: 0.0,
    math_server_zero.MathEnv: 0.0,
    ClockDatasetEnv: 0.0,
    DatasetEnv: 0.0,
    InfiniteMathEnv: 0.0,
    CodingEnv: 0.6,
    BlackjackEnv: 0.7,
    BlackjackEnvNoThinking: 0.0,
    GymTaxiEnv: 0.0,
    HangmanOnlineEnv: 0.0,
    CrosswordsEnv: 0.0,
    NumberGuessingEnv: 0.0,
    WordSumsEnv: 0.0,
    MMLUEvalEnv: 0.0,
    GSM8KEvalEnv: 0.6,
    DROPEvalEnv: 0.6,
    MultiTurnToolCallingEnv: 0.0,
    MultiTurnToolUseTurnLevelAdvantageEnv: 0.0,
    DeepResearchEnv: 0.0,
}
SMALL = {"eval_episodes": 2, "eval_topics": 2, "num_eval_items": 2, "max_turns": 3}


@pytest.mark.parametrize(
    "env_cls", TEMPERATURES, ids=lambda cls: f"{cls.__module__.rsplit('.', 1)[-1]}.{cls.__name__}"
)
async def test_evaluation_counts_as_one_and_is_sampled_as_reported(
    env_cls: type[BaseEnv], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if env_cls is CodingEnv:
        try:
            open_sandbox()
        except SandboxUnavailableError as error:
            pytest.skip(str(error))
    splits: list[Any] = []
    async with ScriptedEngine(["I cannot tell, and say so at some length."]) as engine:
        written = {"data_dir_to_save_evals": str(tmp_path), "num_score_workers": 0}
        settings = {**SMALL, **env_cls.check_settings, **written}
        env = make_env(env_cls, engine, monkeypatch, **settings)
        for name in ("chat_completion", "completion"):
            monkeypatch.setattr(env.server, name, noting_split(getattr(env.server, name), splits))
        monkeypatch.delattr(type(env.server), "managed_server")
        await env.setup()
        await env.evaluate()
        await env.close()
        await env.server.close()
        asked = [r.body for r in engine.requests if "temperature" in r.body]

    report = json.loads((tmp_path / "metrics.json").read_text())
    reported = report["config_general"]["generation_parameters"]["temperature"]
    # A judge is asked at a temperature of its own.
    sampled = {body["temperature"] for body in asked if "Criterion: " not in json.dumps(body)}
    assert set(splits) == {"eval"}
    assert sampled == {reported} == {TEMPERATURES[env_cls]}
    assert report["results"]["all"]


def noting_split(ask: Any, splits: list[Any]) -> Any:
    async def noting(**request: Any) -> Any:
        splits.append(request.get("split"))
        return await ask(**request)

    return noting
