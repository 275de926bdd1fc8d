"""Flags of the trainer on the command line of `atropos-train`: `--trainer.NAME VALUE`.

    typed words -> none of this command's own settings -> parsed -> flags of atropos-grpo

Settings that a run determines, or that have a flag of this command, are rejected by name.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from typing import Any

from atroposlib.utils.command_parser import CommandParser
from example_trainer.cli import create_full_parser

__all__ = [
    "TRAINER_PREFIX",
    "add_trainer_flags",
    "flags_here",
    "refuse_idle_settings",
    "refuse_own_settings",
    "typed_trainer_flags",
]

TRAINER_PREFIX = "--trainer."
_OWN_FLAGS = {
    "model_name": "--model",
    "training_steps": "--steps",
    "lr": "--lr",
    "seed": "--seed",
    "device": "--device",
    "resume": "--resume",
    "save_path": "--output",
    "seq_len": "--context-tokens",
    "batch_size": "--groups-per-step",
    "gradient_accumulation_steps": "--groups-per-step",
    "engine": "--engine",
    "engine_urls": "--engine-url",
    "gpu_memory_utilization": "--gpu-memory-utilization",
    "vllm_args": "--engine-args",
}
"""Settings of the trainer that are set by a flag of this command."""

_NAMES_OF_SETTINGS = {
    "model": "model_name",
    "vllm-gpu-memory-utilization": "gpu_memory_utilization",
}

_FIXED = {
    "metrics_path", "atropos_url", "vllm_host", "vllm_port", "vllm_gpu", "max_model_len", "dtype",
    "vllm_start_timeout_s", "engine_wait_s", "weight_bridge_mode", "vllm_config_path",
    "trainer_rank", "world_size", "parallel_mode", "init_method", "num_inference_nodes", "log_dir",
    "quiet", "lora_name", "help",
}  # fmt: skip
"""Settings of the trainer that the run determines."""


def add_trainer_flags(group: Any) -> None:
    """Add the flags of atropos-grpo that a run does not determine itself."""
    for action in create_full_parser()._actions:
        if action.dest not in _OWN_FLAGS and action.dest not in _FIXED:
            _add_trainer_flag(group, action)


def _add_trainer_flag(group: Any, action: argparse.Action) -> None:
    """Add a flag of the trainer under `--trainer.`, without a default."""
    names = [
        f"{TRAINER_PREFIX}{name.removeprefix('--')}"
        for name in action.option_strings
        if name.startswith("--") and not name.startswith("--no-")
    ]
    options: dict[str, Any] = {
        "dest": f"{TRAINER_PREFIX}{action.dest}",
        "default": argparse.SUPPRESS,
        "help": f"{action.help or ''} (default: {action.default})".replace(
            " (default: %(default)s)", ""
        ),
    }
    if isinstance(action, argparse.BooleanOptionalAction) or action.nargs == 0:
        options |= {"type": _boolean, "nargs": "?", "const": True, "metavar": "true|false"}
    else:
        options |= {
            "type": action.type,
            "choices": action.choices,
            "nargs": action.nargs,
            "metavar": action.metavar
            or ("|".join(map(str, action.choices)) if action.choices else "VALUE"),
        }
    group.add_argument(*names, **options)


def refuse_own_settings(parser: CommandParser, words: Sequence[str]) -> None:
    """Reject settings of the trainer that this command sets, naming its own flag."""
    for word in words:
        setting = word.removeprefix(TRAINER_PREFIX).partition("=")[0]
        name = _NAMES_OF_SETTINGS.get(setting, setting.replace("-", "_"))
        if word.startswith(TRAINER_PREFIX) and name in _OWN_FLAGS:
            parser.error(f"{TRAINER_PREFIX}{setting} is {_OWN_FLAGS[name]} here")
        if word.startswith(TRAINER_PREFIX) and name in _FIXED:
            parser.error(f"{TRAINER_PREFIX}{setting}: {parser.prog} sets this itself")


def refuse_idle_settings(parser: CommandParser, arguments: argparse.Namespace) -> None:
    """Reject settings of adapters in a run without them, and those of whole models with them."""
    given = {
        name.removeprefix(TRAINER_PREFIX): value
        for name, value in vars(arguments).items()
        if name.startswith(TRAINER_PREFIX)
    }
    has_adapters = given.get("lora", False)
    for name in given:
        is_idle = name == "train_layer_indices" if has_adapters else name.startswith("lora_")
        if is_idle:
            parser.error(
                f"{TRAINER_PREFIX}{name.replace('_', '-')} has no effect "
                f"{'with' if has_adapters else 'without'} {TRAINER_PREFIX}lora"
            )


def typed_trainer_flags(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the flags of atropos-grpo that were typed."""
    flags: list[str] = []
    by_destination = {action.dest: action for action in create_full_parser()._actions}
    for name, value in vars(arguments).items():
        if not name.startswith(TRAINER_PREFIX):
            continue
        action = by_destination[name.removeprefix(TRAINER_PREFIX)]
        flag = next(s for s in action.option_strings if s.startswith("--"))
        if isinstance(value, bool):
            if value != bool(action.default):
                flags.append(flag if value else f"--no-{flag.removeprefix('--')}")
        elif action.nargs == "+":
            flags += [flag, *map(str, value)]
        else:
            text = ",".join(map(str, value)) if isinstance(value, list) else value  # layers
            text = json.dumps(value) if isinstance(value, dict) else text
            flags.append(f"{flag}={text}")
    return tuple(flags)


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}")
    return text.lower() == "true"


def flags_here(text: str) -> str:
    """Return lines on the flags of atropos-grpo that have other names in this command.

    Only the last line that has any is searched, which is the cause if the trainer ended. Lines of
    its log that are no error are not.
    """
    names = {}
    for action in create_full_parser()._actions:
        for flag in action.option_strings:
            here = _OWN_FLAGS.get(action.dest, f"{TRAINER_PREFIX}{flag.removeprefix('--')}")
            if action.dest not in _FIXED and flag not in {"-h", "--help", here}:
                names[flag] = here
    for line in reversed([line for line in text.splitlines() if " INFO " not in line]):
        found = dict.fromkeys(re.findall(r"(?<![\w.-])--[a-z][a-z-]*", line))
        if renamed := [flag for flag in found if flag in names]:
            return "".join(f"\n{flag} of atropos-grpo is {names[flag]} here" for flag in renamed)
    return ""
