"""The four processes of the loop: with which command, environment and settings each is started.

    environment --completions--> inference engine <--new weights-- trainer
        |                                                            ^
        +--------scored groups--> trajectory service --batches-------+

Everything here is a pure function of the settings; nothing is started.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from example_trainer.demo.repository import REPOSITORY
from example_trainer.demo.settings import DemoPaths, DemoSettings, TaskSettings
from example_trainer.processes import ManagedProcess

__all__ = ["Stack", "build_stack", "environment_settings", "repository_process", "write_yaml"]


@dataclass(frozen=True)
class Stack:
    """The processes of one run, not started yet, and where they answer."""

    engine: ManagedProcess
    service: ManagedProcess
    environment: ManagedProcess
    trainer: ManagedProcess
    engine_url: str
    service_url: str


def build_stack(
    settings: DemoSettings,
    paths: DemoPaths,
    *,
    model: str,
    ports: tuple[int, int],
    inherited: Mapping[str, str],
    on_gpu: bool,
) -> Stack:
    """Describe the four processes; writes the environment's YAML file.

    Args:
        settings: What the run does.
        paths: Where it writes.
        model: Folder or hub name of the model all of them use.
        ports: Free ports for the engine and for the service.
        inherited: Environment variables of this process.
        on_gpu: Whether engine and trainer run on a GPU.
    """
    engine_port, service_port = ports
    engine_url = f"http://127.0.0.1:{engine_port}"
    service_url = f"http://127.0.0.1:{service_port}"
    config = environment_settings(
        settings, paths, model=model, engine_url=engine_url, service_url=service_url
    )
    write_yaml(config, paths.environment_config)
    part = partial(repository_process, settings=settings, paths=paths, inherited=inherited)
    return Stack(
        engine=part(
            "inference engine",
            engine_arguments(settings, model=model, port=engine_port, on_gpu=on_gpu),
            variables=engine_variables(on_gpu=on_gpu),
        ),
        service=part(
            "trajectory service",
            [
                *("-m", "atroposlib.cli.run_api", "--port", str(service_port)),
                *("--data-dir", str(paths.service_data)),
            ],
        ),
        environment=part(
            "environment",
            [str(settings.environment_door), "serve", "--config", str(paths.environment_config)],
        ),
        trainer=part(
            "trainer",
            trainer_arguments(
                settings, paths, model=model, engine_port=engine_port, service_url=service_url
            ),
        ),
        engine_url=engine_url,
        service_url=service_url,
    )


def write_yaml(content: Mapping[str, Any], path: Path) -> None:
    """Write the settings of an environment to the file it is started with."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(dict(content), sort_keys=False), encoding="utf-8")


def repository_process(
    name: str,
    command: Sequence[str],
    *,
    settings: DemoSettings,
    paths: DemoPaths,
    inherited: Mapping[str, str],
    variables: Mapping[str, str] | None = None,
) -> ManagedProcess:
    """Describe a Python process of the run; it logs to a file of its name.

    Args:
        name: What it is.
        command: Arguments of Python, paths relative to the repository.
        settings: What the run does.
        paths: Where it writes.
        inherited: Environment variables of this process.
        variables: Its own.
    """
    return ManagedProcess(
        name,
        [sys.executable, *command],
        log_path=paths.logs / f"{name.replace(' ', '_')}.log",
        env={**common_variables(settings, inherited), **(variables or {})},
        cwd=REPOSITORY,
    )


def common_variables(settings: DemoSettings, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables every part gets."""
    search_path = [str(REPOSITORY), inherited.get("PYTHONPATH", "")]
    variables = {
        **inherited,
        # The environment is a script in a folder of its own; it imports from the repository.
        "PYTHONPATH": os.pathsep.join(filter(None, search_path)),
        "WANDB_MODE": "disabled",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",  # a log is read while it is written
    }
    if settings.uses_tiny_model:
        # The parts share a few cores; more threads than cores only wait for one another.
        variables["OMP_NUM_THREADS"] = "1"
        # Nothing is downloaded, so nobody needs to wait for a network that may not be there.
        variables["HF_HUB_OFFLINE"] = "1"
        variables["HF_DATASETS_OFFLINE"] = "1"
    return variables


def engine_variables(*, on_gpu: bool) -> dict[str, str]:
    """Return the variables of vLLM: in-place weight updates, no usage report, CPU settings."""
    variables = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if not on_gpu:
        variables["VLLM_CPU_KVCACHE_SPACE"] = "1"
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return variables


def engine_arguments(settings: DemoSettings, *, model: str, port: int, on_gpu: bool) -> list[str]:
    """Return the arguments of a stock vLLM server on the loopback address."""
    arguments = ["-m", "vllm.entrypoints.openai.api_server", "--model", model]
    # Never to be bound elsewhere: in-place updates let whoever reaches the port load files.
    arguments += ["--host", "127.0.0.1", "--port", str(port)]
    arguments += ["--max-model-len", str(settings.max_tokens), "--seed", str(settings.seed)]
    if settings.uses_tiny_model or not on_gpu:
        arguments += ["--dtype", "float32", "--enforce-eager", "--max-num-seqs", "256"]
    arguments += ["--disable-uvicorn-access-log"]  # thousands of short requests a minute
    if on_gpu:
        arguments += ["--gpu-memory-utilization", "0.45"]
    return arguments


def trainer_arguments(
    settings: DemoSettings, paths: DemoPaths, *, model: str, engine_port: int, service_url: str
) -> list[str]:
    """Return the arguments of the GRPO trainer, which updates the running engine in place."""
    flags: dict[str, Any] = {
        "model": model,
        "lr": settings.lr,
        "warmup-steps": min(10, settings.steps),
        "weight-decay": 0.0,
        "training-steps": settings.steps,
        "batch-size": settings.sequences_per_pass,
        "gradient-accumulation-steps": settings.sequences_per_step // settings.sequences_per_pass,
        "seq-len": settings.max_tokens,
        "pad-multiple": 8 if settings.uses_tiny_model else 64,
        "optimizer": "adamw",
        "seed": settings.seed,
        "weight-bridge-mode": "in_place",
        "vllm-port": engine_port,
        "vllm-restart-interval": 1,
        "checkpoint-interval": 0,
        "save-path": paths.checkpoints,
        "metrics-path": paths.trainer_metrics,
        "atropos-url": service_url,
    }
    arguments = ["-m", "example_trainer.grpo"]
    arguments += [f"--{name}={value}" for name, value in flags.items()]
    if settings.uses_tiny_model:
        # So small that a GPU would not be faster, and memory is no concern.
        arguments += ["--device=cpu", "--no-gradient-checkpointing"]
    return [*arguments, *settings.trainer_flags]


def environment_settings(
    settings: DemoSettings, paths: DemoPaths, *, model: str, engine_url: str, service_url: str
) -> dict[str, Any]:
    """Return the content of the YAML file the environment is started with."""
    sections: dict[str, Any] = {
        "env": {
            **({} if settings.task is None else task_fields(settings, settings.task)),
            "temperature": 1.0,
            "group_size": settings.group_size,
            "batch_size": settings.sequences_per_step,
            "max_num_workers": 2 * settings.groups_per_step,
            "rollout_grace_s": 0.0,  # nobody takes the groups of a demo that is ended
            "max_batches_offpolicy": 1,
            "max_token_length": settings.max_tokens,
            "total_steps": settings.steps,
            "steps_per_eval": 0,
            "tokenizer_name": model,
            "rollout_server_url": service_url,
            "use_wandb": False,
            "include_messages": True,
            "data_path_to_save_groups": str(paths.groups),
            "metrics_path": str(paths.environment_metrics),
        },
        "openai": {
            "server_type": "vllm",
            "base_url": f"{engine_url}/v1",
            "model_name": model,
            "tokenizer_name": model,
            "api_key": "none",  # pragma: allowlist secret
            "num_max_requests_at_once": 4 * settings.groups_per_step,
        },
        "slurm": False,
        "testing": False,
    }
    for name, given in settings.environment_sections.items():
        sections[name] = {**sections.get(name, {}), **given}
    return sections


def task_fields(settings: DemoSettings, task: TaskSettings) -> dict[str, Any]:
    """Return the settings only the reasoning-gym environment has."""
    return {
        "task_names": [task.name],
        "task_params": {task.name: task.params},
        "system_prompt": task.system_prompt,
        "seed": settings.seed,
        "eval_seed": settings.eval_seed,
        "num_eval_samples_per_task": settings.num_held_out,
        "top_p": 1.0,
        # The checks of this task are two lines of arithmetic: no need for more processes.
        "num_score_workers": 0,
    }
