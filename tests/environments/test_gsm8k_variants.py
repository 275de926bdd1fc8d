from __future__ import annotations

import pytest

from atroposlib.envs.base import BaseEnv
from atroposlib.envs.check import check_environment
from atroposlib.envs.teacher_distillation_env import TeacherDistillationConfig
from environments import gsm8k_server, gsm8k_server_axolotl
from environments.gsm8k_server_teacher_distill import GSM8kTeacherDistillEnv

pytestmark = pytest.mark.slow


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
