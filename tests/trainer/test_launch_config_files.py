"""`--env.config FILE`: the settings of a file for `serve` in a run of `atropos-train`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from atroposlib.errors import ConfigError
from example_trainer.launch.config_files import with_config_files
from example_trainer.launch.preflight import describe_environment

ENVIRONMENTS = Path(__file__).parents[2] / "environments"
FIXED = {"tokenizer_name", "rollout_server_url"}


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "sums.yaml"
    path.write_text(
        "env:\n"
        "  group_size: 4\n"
        "  use_wandb: false\n"
        "  total_steps: 250\n"
        "  tokenizer_name: Qwen/Qwen3-8B\n"
        "  min_batch_allocation: null\n"
        "openai:\n"
        "  - base_url: http://localhost:9001/v1\n"
        "slurm: false\n"
    )
    return path


def test_file_becomes_flags_without_what_the_run_sets(config):
    flags, notes = with_config_files({"": ("--env.config", str(config))}, fixed=FIXED)

    assert flags == {
        "": ("--env.group_size=4", "--env.use_wandb=false", "--env.min_batch_allocation=None")
    }
    assert notes == [
        f"{config}: not used, since the run sets it: total_steps, tokenizer_name, openai"
    ]


@pytest.mark.parametrize("typed", [("--env.group_size=8",), ("--env.group_size", "8")])
def test_flags_have_precedence_over_the_file_of_their_environment(config, typed):
    flags, _ = with_config_files(
        {"": ("--env.temperature=1",), "sums": (f"--env.config={config}", *typed)}, fixed=FIXED
    )

    assert flags[""] == ("--env.temperature=1",)
    assert flags["sums"][-len(typed) :] == typed
    assert sum(word.startswith("--env.group_size") for word in flags["sums"]) == 1


def test_environment_reads_values_of_every_kind_from_the_flags(tmp_path):
    path = tmp_path / "gym.yaml"
    path.write_text(
        "env:\n  group_size: 3\n  max_token_length: 77\n  task_names: [chain_sum, leg_counting]\n"
        "  complexity_mode: null\n  dump_rollouts: true\n"
    )
    script = ENVIRONMENTS / "reasoning_gym_environment" / "reasoning_gym_environment.py"
    flags, _ = with_config_files({"": ("--env.config", str(path))}, fixed=FIXED)

    facts = describe_environment([str(script)], flags[""])

    assert (facts.group_size, facts.max_token_length) == (3, 77)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("env: [group_size]", "section env must be a mapping"),
        ("- 1", "expected a mapping with the section env"),
        (None, "cannot be read as YAML"),
        ("env: {", "cannot be read as YAML"),
        ("envs: {group_size: 4}", "unknown section envs; did you mean env?"),
        ("env: {x: &x [*x]}", "env.x refers to itself"),
        (
            "a: &a ["
            + ", ".join(["1"] * 1000)
            + "]\nb: &b ["
            + ", ".join(["*a"] * 1000)
            + "]\nenv: {x: *b}\n",
            "env.x refers to itself or has over 100,000 values",
        ),
        ("env: {x: " + "9" * 6000 + "}", "cannot be read as YAML"),
    ],
)
def test_files_of_another_form_are_refused(tmp_path, text, message):
    path = tmp_path / "other.yaml"
    if text is not None:
        path.write_text(text)

    with pytest.raises(ConfigError, match=message):
        with_config_files({"": ("--env.config", str(path))}, fixed=FIXED)


@pytest.mark.parametrize("text", ["", "env:\n", "group_size: 4\n1: 2\n"])
def test_files_without_settings_change_nothing(tmp_path, text):
    path = tmp_path / "none.yaml"
    path.write_text(text)

    flags, notes = with_config_files({"": ("--env.config", str(path))}, fixed=FIXED)

    assert flags == {"": ()}
    assert all("is not used; settings of the environment are in env" in note for note in notes)


def test_values_that_json_does_not_have_become_text(tmp_path):
    path = tmp_path / "dates.yaml"
    path.write_text("env: {days: [2024-01-02]}\n")

    flags, _ = with_config_files({"": ("--env.config", str(path))}, fixed=FIXED)

    assert flags == {"": ('--env.days=["2024-01-02"]',)}


@pytest.mark.parametrize("words", [("--env.config",), ("--env.config", "--env.group_size=8")])
def test_flag_without_a_file_is_refused(words):
    with pytest.raises(ConfigError, match="needs the path of a YAML file"):
        with_config_files({"": words}, fixed=FIXED)


def test_command_names_a_setting_of_the_file_that_does_not_exist(tmp_path):
    path = tmp_path / "typo.yaml"
    path.write_text("env:\n  group_sise: 4\n")
    command = ["-m", "example_trainer.launch.cli", str(ENVIRONMENTS / "word_sums.py")]
    command += ["--model", str(tmp_path), "--env.config", str(path), "--output"]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))

    done = subprocess.run(
        [sys.executable, *command, str(tmp_path / "run")], capture_output=True, text=True
    )

    assert done.returncode == 2
    assert "group_sise; did you mean --env.group_size?" in done.stderr
