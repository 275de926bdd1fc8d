from pathlib import Path

import pytest
import yaml

from atroposlib.errors import ConfigError
from atroposlib.utils import ConfigHandler


@pytest.fixture
def handler(tmp_path: Path) -> ConfigHandler:
    files = {
        "envs/crosswords": {"group_size": 2, "total_steps": 5, "env_kwargs": {"size": 7}},
        "agents/nous_hermes": {"model": "m"},
        "agents/other": {"model": "o", "device": "cuda:3"},
        "datasets/squad": {"dataset": {"dataset_name": "squad", "split": "train"}},
        "envs/broken": ["not", "a", "mapping"],
    }
    for name, content in files.items():
        path = tmp_path / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml.safe_dump(content))
    return ConfigHandler(tmp_path)


def test_files_are_merged_and_players_named(handler):
    config = handler.load_config(handler.parser.parse_args([]))

    assert config == {
        "group_size": 2,
        "total_steps": 5,
        "env_kwargs": {"size": 7, "player_names": ["Player_0", "Player_1"]},
        "agent": {"model": "m", "device": "cpu"},
    }


def test_flags_override_files_and_zero_counts_as_not_given(handler):
    flags = "--group-size 3 --seed 9 --total-steps 0 --server-url http://x --agent other"

    config = handler.load_config(handler.parser.parse_args(flags.split()))

    assert (config["group_size"], config["initial_seed"], config["total_steps"]) == (3, 9, 5)
    assert config["rollout_server_url"] == "http://x"
    assert config["agent"]["device"] == "cuda:3"
    assert len(config["env_kwargs"]["player_names"]) == 3


def test_dataset_config_takes_its_section_and_overrides(handler, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    flags = "--config squad --dataset-split test --reward-funcs accuracy format"

    config = handler.load_dataset_config(handler.parser.parse_args(flags.split()))

    assert config["dataset"] == {
        "dataset_name": "squad",
        "split": "test",
        "reward_funcs": ["accuracy", "format"],
    }
    assert config["use_slurm"] is True
    assert "player_names" not in config["env_kwargs"]


def test_device_auto_is_resolved(handler):
    config = handler.load_config(handler.parser.parse_args(["--device", "auto"]))

    assert config["agent"]["device"] in ("cpu", "cuda", "mps")


@pytest.mark.parametrize(("env", "said"), [("missing", "missing.yaml"), ("broken", "a mapping")])
def test_unusable_file_is_named(handler, env, said):
    with pytest.raises(ConfigError, match=said):
        handler.load_config(handler.parser.parse_args(["--env", env]))
