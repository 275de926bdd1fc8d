"""`--env.config FILE`: the settings of a file for `serve` in a run of `atropos-train`."""

from __future__ import annotations

from pathlib import Path

import pytest

from atroposlib.cli.new_env import write_environment
from atroposlib.errors import ConfigError
from example_trainer.launch.config_files import with_config_files
from example_trainer.launch.preflight import describe_environment

ENVIRONMENTS = Path(__file__).parents[2] / "environments"
FIXED = {"tokenizer_name", "rollout_server_url"}


def known(name):
    """Names of settings, whatever the environment."""
    return {
        "group_size", "use_wandb", "total_steps", "min_batch_allocation", "temperature",
        "max_token_length", "task_names", "complexity_mode", "dump_rollouts", "tokenizer_name",
        "days", "x",
    }  # fmt: skip


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
    flags, notes = with_config_files({"": ("--env.config", str(config))}, fixed=FIXED, known=known)

    assert flags == {
        "": ("--env.group_size=4", "--env.use_wandb=false", "--env.min_batch_allocation=None")
    }
    assert notes == [
        f"{config}: not used, since the run sets it: total_steps, tokenizer_name, openai"
    ]


@pytest.mark.parametrize("typed", [("--env.group_size=8",), ("--env.group_size", "8")])
def test_flags_have_precedence_over_the_file_of_their_environment(config, typed):
    flags, _ = with_config_files(
        {"": ("--env.temperature=1",), "sums": (f"--env.config={config}", *typed)},
        fixed=FIXED,
        known=known,
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
    flags, _ = with_config_files({"": ("--env.config", str(path))}, fixed=FIXED, known=known)

    facts = describe_environment([str(script)], flags[""])

    assert (facts.group_size, facts.max_token_length) == (3, 77)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("env: [group_size]", "section env must be a mapping"),
        ("- 1", "expected a mapping with the section env"),
        (None, "cannot be read as YAML"),
        ("env: {", "cannot be read as YAML"),
        ("a: b: c", "cannot be read as YAML in line 1, column 5: mapping values are not allowed"),
        ("envs: {group_size: 4}", "unknown section envs; did you mean env?"),
        ("env: {x: &x [*x]}", "an alias refers to itself"),
        (
            "a: &a ["
            + ", ".join(["1"] * 500)
            + "]\nb: &b ["
            + ", ".join(["*a"] * 500)
            + "]\nenv: {x: *b}\n",
            "env.x has over 100,000 values",
        ),
        ("env: {x: " + "9" * 6000 + "}", "cannot be read as YAML"),
        ('env: {x: "a\\0b"}', "env.x has a NUL character"),
    ],
)
def test_files_of_another_form_are_refused(tmp_path, text, message):
    path = tmp_path / "other.yaml"
    if text is not None:
        path.write_text(text)

    with pytest.raises(ConfigError, match=message):
        with_config_files({"": ("--env.config", str(path))}, fixed=FIXED, known=known)


@pytest.mark.parametrize("text", ["", "env:\n", "group_size: 4\n1: 2\n"])
def test_files_without_settings_change_nothing(tmp_path, text):
    path = tmp_path / "none.yaml"
    path.write_text(text)

    flags, notes = with_config_files({"": ("--env.config", str(path))}, fixed=FIXED, known=known)

    assert flags == {"": ()}
    assert all("is not used; settings of the environment are in env" in note for note in notes)


def test_values_that_json_does_not_have_become_text(tmp_path):
    path = tmp_path / "dates.yaml"
    path.write_text("env: {days: [2024-01-02]}\n")

    flags, _ = with_config_files({"": ("--env.config", str(path))}, fixed=FIXED, known=known)

    assert flags == {"": ('--env.days=["2024-01-02"]',)}


@pytest.mark.parametrize("words", [("--env.config",), ("--env.config", "--env.group_size=8")])
def test_flag_without_a_file_is_refused(words):
    with pytest.raises(ConfigError, match="needs the path of a YAML file"):
        with_config_files({"": words}, fixed=FIXED, known=known)


def test_setting_that_the_environment_does_not_have_is_left_out_with_a_note(tmp_path):
    path = tmp_path / "typo.yaml"
    path.write_text("env:\n  group_sise: 4\n  temperature: 0.5\n")

    flags, notes = with_config_files({"": ("--env.config", str(path))}, fixed=FIXED, known=known)

    assert flags == {"": ("--env.temperature=0.5",)}
    assert notes == [
        f"{path}: not used, since the environment has no such setting: group_sise; did you mean "
        "group_size?"
    ]


def test_repeated_key_is_noted_since_only_its_last_value_is_used(tmp_path):
    path = tmp_path / "twice.yaml"
    path.write_text("env: {temperature: 1}\n\nenv: {temperature: 0.5}\n")

    flags, notes = with_config_files({"": ("--env.config", str(path))}, fixed=FIXED, known=known)

    assert flags == {"": ("--env.temperature=0.5",)}
    assert notes == [f"{path}: only the last value of env in lines 1 and 3 is used"]


def test_environment_names_its_settings():
    facts = describe_environment([str(ENVIRONMENTS / "word_sums.py")], ())

    assert {"group_size", "max_token_length", "max_turns"} <= set(facts.settings)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    write_environment("my_words", kind="single-turn", folder=tmp_path)
    return tmp_path / "my_words.py"


def test_environment_may_print_at_its_exit_and_write_any_bytes(script: Path) -> None:
    odd = 'import atexit, os\natexit.register(print, "bye")\nos.write(2, b"\\xe9\\n")\n'
    script.write_text(odd + script.read_text())

    facts = describe_environment([str(script)], ())

    assert facts.class_name == "MyWordsEnv"


def test_script_that_ends_before_it_runs_an_environment_is_named(script: Path) -> None:
    script.write_text("import sys\nsys.exit()\n")

    with pytest.raises(ConfigError, match=r"my_words\.py ends before it calls cli\(\)"):
        describe_environment([str(script)], ())
