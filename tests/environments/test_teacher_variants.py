"""Environments with a teacher beside the plain ones: every token of a group gets its choices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.teacher_distillation_env import TeacherDistillationEnv
from environments.gsm8k_server_teacher_distill import GSM8kTeacherDistillEnv
from environments.reasoning_gym_environment.reasoning_gym_teacher_distill import (
    ReasoningGymTeacherDistillEnv,
)
from tests.environments.offline import make_env, read_groups, run_process
from tests.fakes import ScriptedEngine

GSM8K_SAMPLE = Path(__file__).parents[2] / "environments" / "data" / "gsm8k_sample"
TOP_K = 4
SETTINGS: dict[type[TeacherDistillationEnv], dict[str, Any]] = {
    GSM8kTeacherDistillEnv: {
        "dataset_path": str(GSM8K_SAMPLE),
        "ensure_scores_are_not_same": False,
    },
    ReasoningGymTeacherDistillEnv: {"task_names": ["chain_sum"]},
}


@pytest.mark.parametrize("env_cls", SETTINGS)
def test_config_made_without_the_command_line_asks_the_teacher(
    env_cls: type[TeacherDistillationEnv],
) -> None:
    config, _ = env_cls.config_init()
    plain = env_cls.env_config_cls()

    for name in ("teacher_enabled", "teacher_top_k", "ensure_scores_are_not_same"):
        assert getattr(plain, name) == getattr(config, name)
    assert plain.teacher_enabled


@pytest.mark.parametrize("env_cls", SETTINGS)
async def test_groups_carry_what_the_teacher_says_of_every_token(
    env_cls: type[TeacherDistillationEnv], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "groups.jsonl"
    # Both wrong: the scores are the same, and the group goes out all the same.
    replies = ["I get 9 or so.", "I have no idea at all."]
    async with ScriptedEngine(replies) as engine:
        monkeypatch.setattr(env_cls, "teacher_server_configs", engine_as_teacher(engine))
        env = make_env(
            env_cls,
            engine,
            monkeypatch,
            **SETTINGS[env_cls],
            teacher_top_k=TOP_K,
            data_path_to_save_groups=str(out),
        )
        await run_process(env, num_groups=1, group_size=2)

    [group] = read_groups(out)
    for name in ("distill_token_ids", "distill_logprobs"):
        rows = group[name]
        assert [len(row) for row in rows] == [len(tokens) for tokens in group["tokens"]]
        assert {len(entry) for row in rows for entry in row[1:]} == {TOP_K}


def engine_as_teacher(engine: ScriptedEngine) -> Any:
    teacher = GSM8kTeacherDistillEnv.teacher_config_init()
    return teacher.model_copy(
        update={"base_url": engine.base_url, "model_name": engine.model, "health_check": False}
    )
