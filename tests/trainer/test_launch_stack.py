"""Settings of the demo, and the four commands made from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from example_trainer.cli import config_from_args, create_full_parser
from example_trainer.demo.settings import (
    ENVIRONMENT_DOOR,
    REPOSITORY,
    DemoPaths,
    DemoSettings,
    demo_plan,
    settings_for,
)
from example_trainer.launch.options import RunPlan
from example_trainer.launch.stack import (
    Stack,
    build_stack,
    engine_arguments,
    environment_sections,
    trainer_arguments,
)


def make_plan(settings: DemoSettings, folder: Path) -> RunPlan:
    return demo_plan(settings, DemoPaths(folder), model="some/model", on_gpu=False)


def make_stack(settings: DemoSettings, folder: Path) -> Stack:
    return build_stack(
        make_plan(settings, folder),
        DemoPaths(folder),
        ports=(1111, 2222),
        inherited={"PATH": "/bin", "PYTHONPATH": "elsewhere"},
    )


def trainer_words(settings: DemoSettings, folder: Path) -> list[str]:
    return trainer_arguments(
        make_plan(settings, folder),
        DemoPaths(folder),
        engine_url="http://127.0.0.1:1111",
        service_url="http://127.0.0.1:2222",
    )


def sections_of(settings: DemoSettings, folder: Path) -> dict[str, Any]:
    plan = make_plan(settings, folder)
    [environment] = plan.environments
    return environment_sections(plan, environment, engine_url="http://e", service_url="http://s")


@pytest.mark.parametrize("profile", ["full", "quick"])
@pytest.mark.parametrize("model", [None, "some/model"])
def test_trainer_arguments_are_understood_by_the_trainer(
    profile: str, model: str | None, tmp_path: Path
) -> None:
    settings = settings_for(profile, model=model, seed=7)  # type: ignore[arg-type]
    arguments = trainer_words(settings, tmp_path)

    config = config_from_args(create_full_parser().parse_args(arguments[2:]))

    assert arguments[:2] == ["-m", "example_trainer.grpo"]
    assert config.sequences_per_step == settings.groups_per_step * settings.group_size
    assert (config.training_steps, config.lr, config.seed) == (settings.steps, settings.lr, 7)
    assert config.weight_bridge_mode == "in_place"
    assert config.metrics_path == str(tmp_path / "trainer_metrics.jsonl")


def test_environment_settings_every_key_is_a_field_of_the_environment(tmp_path: Path) -> None:
    from atroposlib.envs.server_handling.config import APIServerConfig
    from atroposlib.tasks.reasoning_gym import ReasoningGymEnvConfig

    settings = sections_of(settings_for("full"), tmp_path)

    assert set(settings["env"]) <= set(ReasoningGymEnvConfig.model_fields)
    assert set(settings["openai"]) <= set(APIServerConfig.model_fields)
    ReasoningGymEnvConfig(**settings["env"]).validate_config()


def test_environment_settings_held_out_problems_are_the_evaluation_set(tmp_path: Path) -> None:
    settings = settings_for("full", seed=3)

    env = sections_of(settings, tmp_path)["env"]

    assert env["num_eval_samples_per_task"] == settings.num_held_out >= 200
    assert env["eval_seed"] != settings_for("full", seed=4).eval_seed


def test_engine_arguments_never_leave_the_loopback_address() -> None:
    arguments = engine_arguments(make_plan(settings_for("full"), Path()), port=1111)

    assert arguments[arguments.index("--host") + 1] == "127.0.0.1"


def test_build_stack_tiny_model_parts_need_no_network_and_find_the_repository(
    tmp_path: Path,
) -> None:
    stack = make_stack(settings_for("full"), tmp_path)

    for process in (stack.engine, stack.service, *stack.environments, stack.trainer):
        assert process is not None
        assert process._env is not None
        assert process._env["HF_HUB_OFFLINE"] == "1"
        assert process._env["OMP_NUM_THREADS"] == "1"
        assert process._env["PYTHONPATH"].split(":") == [str(REPOSITORY), "elsewhere"]
    assert stack.engine_url == "http://127.0.0.1:1111"
    assert yaml.safe_load((tmp_path / "environment.yaml").read_text())["env"]["group_size"] == 8


def test_build_stack_given_model_may_use_the_network_and_all_cores(tmp_path: Path) -> None:
    stack = make_stack(settings_for("full", model="some/model"), tmp_path)

    assert stack.trainer._env is not None
    assert "HF_HUB_OFFLINE" not in stack.trainer._env
    assert "OMP_NUM_THREADS" not in stack.trainer._env


def test_build_stack_every_part_has_a_log_of_its_own(tmp_path: Path) -> None:
    stack = make_stack(settings_for("full"), tmp_path)

    parts = (stack.engine, stack.service, *stack.environments, stack.trainer)
    assert len({process.log_path for process in parts if process}) == 4
    assert all(process.log_path.parent == tmp_path / "logs" for process in parts if process)


def test_settings_for_given_values_win_over_the_profile() -> None:
    settings = settings_for("quick", steps=11, lr=0.5, max_tokens=99)

    assert (settings.steps, settings.lr, settings.max_tokens) == (11, 0.5, 99)
    assert settings_for("quick").steps == 3


def test_settings_for_passes_divide_the_step() -> None:
    for settings in (settings_for("full"), settings_for("full", model="m"), settings_for("quick")):
        assert settings.sequences_per_step % settings.sequences_per_pass == 0


def test_environment_of_ones_own_is_started_with_its_sections(tmp_path: Path) -> None:
    settings = replace(
        settings_for("full"),
        environment_door=Path("elsewhere/door.py"),
        environment_sections={"env": {"group_size": 2}, "teacher": {"model_name": "wise"}},
    )

    stack = make_stack(settings, tmp_path)

    written = yaml.safe_load((tmp_path / "environment.yaml").read_text())
    assert stack.environments[0].command[1:3] == ["elsewhere/door.py", "serve"]
    assert (written["env"]["group_size"], written["env"]["total_steps"]) == (2, settings.steps)
    # The service of a continued run may still have the smaller number of steps.
    assert written["env"]["end_with_trainer"] is False
    assert written["teacher"] == {"model_name": "wise"}


def test_repository_has_the_environment() -> None:
    assert (REPOSITORY / ENVIRONMENT_DOOR).is_file()


def test_trainer_gets_the_algorithm_of_the_command_line_last(tmp_path: Path) -> None:
    arguments = trainer_words(settings_for("full", algorithm="gspo"), tmp_path)

    assert arguments[-1] == "--algorithm=gspo"
