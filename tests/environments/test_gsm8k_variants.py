from __future__ import annotations

from pathlib import Path

import pytest

from atroposlib.envs.base import BaseEnv
from atroposlib.envs.check import check_environment
from atroposlib.envs.teacher_distillation_env import TeacherDistillationConfig
from environments import gsm8k_server, gsm8k_server_axolotl
from environments.gsm8k_server_teacher_distill import GSM8kTeacherDistillEnv
from tests.environments.offline import make_env, read_groups, run_process
from tests.fakes import ScriptedEngine

SAMPLE = Path(__file__).parents[2] / "environments" / "data" / "gsm8k_sample"


@pytest.mark.parametrize("env_cls", [gsm8k_server_axolotl.GSM8kEnv, GSM8kTeacherDistillEnv])
def test_check_passes_offline(env_cls: type[BaseEnv]) -> None:
    report = check_environment(env_cls)

    assert report.passed, report.text


def test_axolotl_differs_in_model_and_server_alone() -> None:
    config, server = gsm8k_server_axolotl.GSM8kEnv.config_init()
    plain, plain_server = gsm8k_server.GSM8kEnv.config_init()

    assert config.tokenizer_name == server.model_name == "Qwen/Qwen3-1.7B"
    assert (server.base_url, server.server_type) == ("http://localhost:9001", "trl")
    assert config.model_copy(update={"tokenizer_name": plain.tokenizer_name}) == plain
    assert server.num_requests_for_eval == plain_server.num_requests_for_eval


def test_teacher_variant_has_the_published_settings() -> None:
    config, server = GSM8kTeacherDistillEnv.config_init()
    teacher = GSM8kTeacherDistillEnv.teacher_config_init()

    assert isinstance(config, TeacherDistillationConfig)
    assert (config.teacher_enabled, config.teacher_top_k) == (True, 4)
    assert (config.wandb_name, config.group_size, config.total_steps) == (
        "gsm8k_teacher_distill",
        8,
        1000,
    )
    assert (teacher.base_url, teacher.model_name) == ("http://localhost:9003/v1", "mock-teacher")
    assert (teacher.server_type, teacher.timeout, teacher.api_key) == ("vllm", 1200, "")
    assert teacher.tokenizer_name == config.tokenizer_name == server.model_name


async def test_groups_carry_what_the_teacher_says_of_every_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "groups.jsonl"
    replies = ["\\boxed{9} is what I get.", "I have no idea at all."]
    async with ScriptedEngine(replies) as engine:
        teacher = GSM8kTeacherDistillEnv.teacher_config_init().model_copy(
            update={"base_url": engine.base_url, "health_check": False}
        )
        monkeypatch.setattr(GSM8kTeacherDistillEnv, "teacher_server_configs", teacher)
        env = make_env(
            GSM8kTeacherDistillEnv,
            engine,
            monkeypatch,
            dataset_path=str(SAMPLE),
            data_path_to_save_groups=str(out),
            ensure_scores_are_not_same=False,
        )
        await run_process(env, num_groups=1, group_size=2)

    [group] = read_groups(out)
    for name in ("distill_token_ids", "distill_logprobs"):
        rows = group[name]
        assert [len(row) for row in rows] == [len(tokens) for tokens in group["tokens"]]
        assert {len(entry) for row in rows for entry in row[1:]} == {4}
