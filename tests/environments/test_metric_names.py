"""The names under which environments log, where their own tests do not look at all of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from atroposlib.envs.multi_turn_env import Rollout
from atroposlib.tasks.infinimath import MathCurriculum
from atroposlib.tasks.math_problems import TABLES, MathMetrics
from environments import math_server, math_server_zero
from environments.code_execution_server.code_execution_server import (
    ProgramAnswer,
    eval_metrics,
    train_metrics,
)
from environments.deep_research.deep_research_environment import (
    DeepResearchEnv,
    Question,
    ResearchConversation,
    Verdict,
)
from environments.infinimath.infinimath_env import InfiniteMathEnv
from environments.math_server import SAMPLE as MATH_SAMPLE
from environments.rlaif_server import RLAIFEnv
from tests.environments.offline import PROBED, make_env
from tests.fakes import ScriptedEngine

Logged = dict[str, Any]


def test_mathematics() -> None:
    figures = MathMetrics(4)
    right, wrong = (SimpleNamespace(is_truncated=cut, num_completion_tokens=9) for cut in (0, 1))
    figures.note_solutions([right, wrong], [1.0, -1.0])  # type: ignore[list-item]

    assert figures.take() == {
        "train/pass_at_groupsize": 1.0,
        "train/percent_correct": 0.5,
        "train/percent_overanswer": 0.5,
        "train/avg_correct_answer_len": 9.0,
        "train/avg_incorrect_answer_len": 9.0,
    }
    assert set(TABLES.values()) == {
        "train/normal_rollouts",
        "train/rlaif_rollouts",
        "judge_train/judge_rollouts",
        "judge_train/selfcorrect_rollouts",
    }


@pytest.mark.parametrize(
    ("env_cls", "names"),
    [
        (math_server.MathEnv, {"train/iter"}),
        (math_server_zero.MathEnv, {"train/iter", "train/curr_token_length"}),
    ],
)
async def test_position_and_length_of_mathematics(
    env_cls: Any, names: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: Logged = {}
    async with ScriptedEngine([PROBED, "no", "no"]) as engine:
        settings = {"dataset_path": str(MATH_SAMPLE), "group_size": 2}
        env = make_env(env_cls, engine, monkeypatch, **settings)
        await env.setup()
        await env.collect_trajectories(await env.get_next_item())
        await env.wandb_log(logged)
        await env.close()
        await env.server.close()

    assert names <= set(logged)
    assert logged["train/iter"] == 1


async def test_infinimath(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: Logged = {}
    settings = {"generator": "builtin", "data_path_to_save_groups": None}
    async with ScriptedEngine(["no"]) as engine:
        env = make_env(
            InfiniteMathEnv, engine, monkeypatch, **settings, word_problem_openai_api_key=None
        )
        await env.setup()
        monkeypatch.setattr(env.run_log, "log", lambda metrics, step: logged.update(metrics))
        await env.evaluate()
        await env.close()
        await env.server.close()

    assert (logged["eval/level_1_accuracy"], logged["eval/current_level"]) == (0.0, 1)
    assert logged["eval/advanced_level"] == 0.0
    curriculum = MathCurriculum(level=1, progress_threshold=0.8, min_evaluations=5)
    assert set(curriculum.metrics()) == {
        f"curriculum/{name}"
        for name in (
            *("current_level", "max_level", "progress_percent", "level_description"),
            *("current_level_success_rate", "threshold_to_advance", "remaining_to_threshold"),
        )
    }


async def test_judgements(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: Logged = {}
    async with ScriptedEngine([PROBED]) as engine:
        env = make_env(RLAIFEnv, engine, monkeypatch)
        env.judgements = [("one", "two", "\\boxed{A}")]
        monkeypatch.setattr(env.run_log, "table", lambda columns, rows: (columns, rows))
        await env.wandb_log(logged)
        await env.close()

    columns, rows = logged["train/judgement_table"]
    assert columns == ["resp_a", "resp_b", "sample_judgement"]
    assert rows == [("one", "two", "\\boxed{A}")]
    assert env.judgements == []


def test_code_execution() -> None:
    groups = [[ProgramAnswer(True, False, 3), ProgramAnswer(False, True, 5)]] * 3
    lengths = {"completion_length", "correct_completion_length", "incorrect_completion_length"}
    common = {"pass@group_size", "overlong_ratio", *lengths}
    by_difficulty = {"easy_pass_1", "medium_pass_1", "hard_pass_1"}

    evaluated = eval_metrics(groups, ["easy", "medium", "hard"], group_size=2)

    assert set(evaluated) == {f"eval/{name}" for name in {"pass_1", *by_difficulty, *common}}
    assert set(train_metrics(groups)) == {f"train_rewards/{n}" for n in {"rewards", *common}}


def test_deep_research() -> None:
    env = DeepResearchEnv.__new__(DeepResearchEnv)
    env.config, _ = DeepResearchEnv.config_init()  # type: ignore[assignment]
    source: Any = None
    games = [
        ResearchConversation(
            Question("?", [], [], []), source, max_steps=3, tool_timeout_s=60.0, is_thinking=True
        )
        for _ in range(2)
    ]
    games[0].verdict = Verdict(0.5, is_right=True, support=0.5, num_fakes=1)
    rollouts = [Rollout(rewards=[0.0, 0.5], conversation=game) for game in games]

    metrics = env.metrics_of(rollouts, "eval")

    assert {name: metrics[f"eval/{name}"] for name in ("percent_correct", "avg_support")} == {
        "percent_correct": 0.5,
        "avg_support": 0.25,
    }
    assert (metrics["eval/avg_false_citations"], metrics["eval/completion_rate"]) == (0.5, 0.5)
    assert (metrics["eval/avg_calls"], metrics["eval/avg_steps"]) == (0.0, 2.0)
