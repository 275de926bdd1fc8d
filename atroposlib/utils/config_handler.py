"""Settings of older example runners: YAML files by kind and name, overridden by flags."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from atroposlib.errors import ConfigError
from atroposlib.utils.command_parser import CommandParser
from atroposlib.utils.yaml_text import read_yaml

__all__ = ["ConfigHandler"]

_DATASET_FLAGS = {
    "dataset_name": "dataset_name",
    "dataset_split": "split",
    "prompt_field": "prompt_field",
    "answer_field": "answer_field",
    "system_prompt": "system_prompt",
    "max_generations": "max_generations_per_prompt",
    "reward_funcs": "reward_funcs",
}
"""Flag → key of the `dataset` section."""
_RUN_FLAGS = {
    "group_size": "group_size",
    "total_steps": "total_steps",
    "batch_size": "batch_size",
    "seed": "initial_seed",
    "server_url": "rollout_server_url",
}
"""Flag → top-level key."""


class ConfigHandler:
    """Loads `<config_dir>/envs/<env>.yaml` and the files of its agent and its dataset.

    Args:
        config_dir: folder with `envs/`, `agents/` and `datasets/`; None is `configs` in the
            package.
    """

    def __init__(self, config_dir: str | Path | None = None) -> None:
        default = Path(__file__).resolve().parents[1] / "configs"
        self.config_dir = default if config_dir is None else Path(config_dir)
        self.parser = _parser()

    def load_config(self, args: argparse.Namespace | None = None) -> dict[str, Any]:
        """Return the settings of an environment and its agent.

        Args:
            args: parsed flags; None parses the command line. Flags that are 0 or empty are
                ignored.

        Raises:
            ConfigError: a file is missing, or is not a mapping.
        """
        args = args if args is not None else self.parser.parse_args()
        config = self._load_env_and_agent(args)
        player_names = config.setdefault("env_kwargs", {}).setdefault("player_names", [])
        for number in range(len(player_names), config.get("group_size") or 0):
            player_names.append(f"Player_{number}")
        return config

    def load_dataset_config(self, args: argparse.Namespace | None = None) -> dict[str, Any]:
        """Return the settings of an environment that reads a dataset; see `load_config`."""
        args = args if args is not None else self.parser.parse_args()
        config = self._load_env_and_agent(args)
        if args.config:
            config.update(self._read("datasets", args.config))
        if isinstance(config.get("dataset"), dict):
            _override(config["dataset"], args, _DATASET_FLAGS)
        config["use_slurm"] = "SLURM_JOB_ID" in os.environ
        return config

    def _load_env_and_agent(self, args: argparse.Namespace) -> dict[str, Any]:
        config = self._read("envs", args.env)
        config["agent"] = self._read("agents", args.agent)
        _override(config, args, _RUN_FLAGS)
        if args.device:
            config["agent"]["device"] = args.device
        config["agent"]["device"] = _resolve_device(config["agent"].get("device", "cpu"))
        return config

    def _read(self, kind: str, name: str) -> dict[str, Any]:
        path = self.config_dir / kind / f"{name}.yaml"
        try:
            content = read_yaml(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} is not YAML: {error}") from error
        if not isinstance(content, dict):
            raise ConfigError(f"{path}: expected a mapping, found {type(content).__name__}")
        return content


def _override(section: dict[str, Any], args: argparse.Namespace, flags: Mapping[str, str]) -> None:
    section.update({key: getattr(args, flag) for flag, key in flags.items() if getattr(args, flag)})


def _resolve_device(device: str) -> str:
    if device != "auto":
        return device
    try:
        import torch
    except ImportError:
        return "cpu"
    if torch.backends.mps.is_available():
        return "mps"
    return "cuda" if torch.cuda.is_available() else "cpu"


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(description="Run an environment from its YAML files.")
    parser.add_argument("--env", default="crosswords", help="file under envs/")
    parser.add_argument("--agent", default="nous_hermes", help="file under agents/")
    parser.add_argument("--config", help="file under datasets/")
    for flag in ("group-size", "total-steps", "batch-size", "seed", "max-generations"):
        parser.add_argument(f"--{flag}", type=int, help="overrides the file")
    for flag in ("device", "server-url", "dataset-name", "dataset-split"):
        parser.add_argument(f"--{flag}", help="overrides the file")
    for flag in ("prompt-field", "answer-field", "system-prompt"):
        parser.add_argument(f"--{flag}", help="overrides the file")
    parser.add_argument("--reward-funcs", nargs="+", help="overrides the file")
    return parser
