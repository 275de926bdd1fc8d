"""Each file of `environments/`, copied alone to an empty folder, as a program of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from environments.card_table import find_cards
from tests.packaging.installed import REPOSITORY, Installed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FOLDER = REPOSITORY / "environments"
EXTENDED = {
    "community/cybersecurity_sigma/llm_judge_sigmarule_env.py": (
        "community/cybersecurity_sigma/cybersecurity_sigma_env.py"
    ),
    "gsm8k_server_axolotl.py": "gsm8k_server.py",
    "gsm8k_server_teacher_distill.py": "gsm8k_server.py",
    "game_environments/gymnasium/blackjack_env.py": (
        "game_environments/gymnasium/blackjack/blackjack_env_thinking.py"
    ),
    "reasoning_gym_environment/reasoning_gym_teacher_distill.py": (
        "reasoning_gym_environment/reasoning_gym_environment.py"
    ),
    "reward_model_env.py": "rlaif_server.py",
    "community/cat_behavior_env/catbot_arena.py": "gsm8k_server.py",
    "community/conversational_style_dpo/gsm8k_conversational_style_dpo_env.py": (
        "community/conversational_style_dpo/conversational_style_dpo_env.py"
    ),
    "community/mcp_tool_calling/mcp_tool_calling_env.py": "tool_calling_server.py",
    "community/ufc_prediction_env/ufc_image_env.py": (
        "community/ufc_prediction_env/ufc_prediction_env.py"
    ),
}
"""Environment that extends another one -> that one, which is copied with it."""
CHECKED = {
    "tool_calling_server.py": "tool_calling_sample",
    "word_sums.py": None,
    "game_environments/hangman/hangman_env.py": None,
    "multimodal_dpo/pixmo_count.py": "pixmo_count_sample",
}
"""Environment that is checked as well -> its sample."""


def copy_alone(path: str, folder: Path) -> str:
    """Copy an environment, and the one it extends, to a folder; return the name of its file."""
    for name in (path, EXTENDED.get(path)):
        if name:
            shutil.copy(FOLDER / name, folder)
    return Path(path).name


@pytest.mark.parametrize("path", find_cards())
@pytest.mark.long
def test_copied_file_runs(path: str, with_examples: Installed, tmp_path: Path) -> None:
    done = with_examples.run("python", copy_alone(path, tmp_path), "--help", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert "{serve,process,evaluate,check}" in done.stdout


@pytest.mark.parametrize(("path", "sample"), CHECKED.items(), ids=CHECKED)
@pytest.mark.long
def test_copied_file_passes_its_check(
    path: str, sample: str | None, with_examples: Installed, tmp_path: Path
) -> None:
    file = copy_alone(path, tmp_path)
    data = ["--env.dataset_path", str(FOLDER / "data" / sample)] if sample else []

    done = with_examples.run("python", file, "check", *data, cwd=tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", EXTENDED)
@pytest.mark.long
def test_copy_without_the_file_it_extends_names_that_file(
    path: str, with_examples: Installed, tmp_path: Path
) -> None:
    shutil.copy(FOLDER / path, tmp_path)

    done = with_examples.run("python", Path(path).name, "--help", cwd=tmp_path)

    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert f"it extends {Path(EXTENDED[path]).name}" in done.stderr


@pytest.mark.long
def test_environment_of_the_clone_runs_from_another_folder(
    light: Installed, tmp_path: Path
) -> None:
    done = light.run("python", str(FOLDER / "number_guessing.py"), "check", cwd=tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_copied_file_without_its_sample_says_where_that_is(
    light: Installed, tmp_path: Path
) -> None:
    done = light.run("python", copy_alone("gsm8k_server.py", tmp_path), "check", cwd=tmp_path)

    assert done.returncode == 1
    assert "environments/data/gsm8k_sample" in " ".join(done.stdout.split())


@pytest.mark.long
def test_missing_extra_is_named(light: Installed, tmp_path: Path) -> None:
    file = copy_alone("game_environments/gymnasium/gym_taxi.py", tmp_path)

    done = light.run("python", file, "check", cwd=tmp_path)

    assert done.returncode == 1
    assert "pip install '.[examples]'" in " ".join(done.stdout.split())
