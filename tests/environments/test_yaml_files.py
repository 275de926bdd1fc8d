"""Every YAML file of the repository is read by what it was written for."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from atroposlib.envs.commands import evaluate_command, load_yaml, process_command, serve_command
from environments.gsm8k_server import GSM8kEnv
from environments.word_sums import WordSumsEnv

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = "environments/configs/example.yaml"
READ_ELSEWHERE = {
    ".github/ISSUE_TEMPLATE": "tests/packaging/test_site.py",
    ".github/workflows": "tests/packaging/test_site.py",
    "atroposlib/adapters": "tests/adapters/test_gymnasium.py",
    "benchmarks/speedrun": "tests/speedrun/test_rules.py",
    "environments/agent_tasks/configs": "tests/environments/test_agent_tasks_server.py",
    "environments/configs": "tests/environments/test_verifiers_server.py",
    "environments/dataset_environment/configs": "tests/environments/test_dataset_env.py",
    "example_trainer/cluster/examples": "tests/cluster/test_run_file.py",
    "helpers/mutants": "tests/packaging/test_figures.py",
    ".": "read by pre-commit and mkdocs and, below, as YAML",
}


def tracked_yaml_files() -> list[str]:
    """YAML files that git knows; those of a source archive without git."""
    listed = subprocess.run(
        ["git", "ls-files", "*.yaml", "*.yml"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0:
        return listed.stdout.split()
    found = [*REPOSITORY.glob("environments/**/*.yaml"), *REPOSITORY.glob("*.yaml")]
    return [str(path.relative_to(REPOSITORY)) for path in found]


@pytest.mark.parametrize("make", [serve_command, process_command, evaluate_command])
@pytest.mark.parametrize("env_cls", [GSM8kEnv, WordSumsEnv])
def test_example_file_sets_every_command_of_an_environment(env_cls: Any, make: Any) -> None:
    content = load_yaml(str(REPOSITORY / EXAMPLE))

    settings = make(env_cls)().layered(content)

    set_here = {name: getattr(settings.env, name) for name in content["env"]}
    (server,) = settings.servers if isinstance(settings.servers, list) else [settings.servers]
    assert set_here == content["env"]
    assert {name: getattr(server, name) for name in content["openai"][0]} == content["openai"][0]
    assert settings.env.tokenizer_name == server.model_name


def test_every_yaml_file_is_read_by_a_test() -> None:
    for name in tracked_yaml_files():
        assert yaml.safe_load((REPOSITORY / name).read_text(encoding="utf-8")), name
        assert name == EXAMPLE or str(Path(name).parent) in READ_ELSEWHERE, (
            f"{name}: no test loads it"
        )
