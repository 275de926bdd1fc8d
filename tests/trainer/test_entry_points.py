"""The entry points: three ways to start, and their exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from example_trainer import grpo, run

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def start(*command):
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=60, cwd=ROOT
    )


@pytest.mark.parametrize(
    "command",
    [
        ("-m", "example_trainer.grpo"),
        ("example_trainer/grpo.py",),
        ("-m", "example_trainer.run"),
        ("example_trainer/run.py",),
    ],
    ids=" ".join,
)
def test_entry_point_explains_a_mistyped_flag_however_it_is_started(command):
    result = start(*command, "--modle", "m")

    assert result.returncode == 2
    assert "did you mean --model?" in result.stderr


def test_missing_torch_is_told_with_the_extra_that_brings_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)

    with pytest.raises(SystemExit) as exit_info:
        grpo.main(["--model", "some/model"])

    assert exit_info.value.code == 2
    assert "pip install '.[trainer]'" in capsys.readouterr().err


def test_script_help_shows_every_flag_with_its_default():
    result = start("example_trainer/grpo.py", "--help", "all")

    assert result.returncode == 0
    text = " ".join(result.stdout.split())
    assert "--vllm-restart-interval" in text
    assert "(default: trained_model_checkpoints)" in text


def test_run_without_flags_outside_the_script_asks_for_the_model(capsys):
    with pytest.raises(SystemExit) as exit_info:
        grpo.main([])

    assert exit_info.value.code == 2
    assert "--model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "m", "--lr", "-1"], "--lr: Input should be greater than 0 (got -1.0)"),
        (["--model", "m", "--weight-bridge-mode", "shared_vllm"], "use one of: "),
        (
            ["--model", "m", "--ratio-anchor", "inference", "--importance-cap", "2"],
            "count that mismatch twice",
        ),
    ],
)
def test_wrong_settings_exit_with_2_before_anything_is_loaded(argv, message, capsys):
    with pytest.raises(SystemExit) as exit_info:
        grpo.main([*argv, "--device", "cpu"])

    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_gpu_that_is_not_there_ends_the_run_before_it_waits_for_a_service(capsys):
    with pytest.raises(SystemExit) as exit_info:
        grpo.main(["--model", "m", "--device", "cuda:4711"])

    assert exit_info.value.code == 2
    assert "device=cuda:4711: torch sees" in capsys.readouterr().err


def test_launcher_has_no_mode_flag(capsys):
    with pytest.raises(SystemExit) as exit_info:
        run.main(["--model", "m", "--weight-bridge-mode", "none"])

    assert exit_info.value.code == 2
    assert "unrecognized argument --weight-bridge-mode" in capsys.readouterr().err


def test_first_example_is_the_one_of_the_contract():
    config = grpo.first_example()

    assert config.model_name == "Qwen/Qwen2.5-1.5B-Instruct"
    assert (config.training_steps, config.vllm_restart_interval) == (20, 3)
    assert (config.use_wandb, config.wandb_project) == (True, "grpo-trainer-example")


def test_model_that_is_not_there_exits_with_2_and_the_cause(tmp_path):
    result = start(
        *("-m", "example_trainer.grpo", "--model", str(tmp_path / "nowhere"), "--device", "cpu"),
        *("--weight-bridge-mode", "in_place", "--vllm-port", "1"),
    )

    assert result.returncode == 2
    assert "nowhere" in result.stderr
    assert "Traceback" not in result.stderr


def test_unknown_name_of_a_model_ends_the_run_before_it_waits_for_a_service(tmp_path, caplog):
    words = ["--model", "no-such-model", "--device", "cpu", "--weight-bridge-mode", "off"]
    words += ["--save-path", str(tmp_path), "--atropos-url", "http://127.0.0.1:1"]

    with pytest.raises(SystemExit) as ended:
        grpo.main(words)

    assert ended.value.code == 2
    assert "no-such-model' cannot be loaded: " in caplog.text
    assert not (tmp_path / "journal").exists()
