"""The demo's task as a run: what `atropos-train` would be told of it, written down."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from example_trainer.demo.repository import REPOSITORY
from example_trainer.demo.settings import DemoPaths, DemoSettings, TaskSettings
from example_trainer.launch.plan import EnvironmentPlan, RunPlan

__all__ = ["demo_plan", "environment_settings"]


def demo_plan(settings: DemoSettings, paths: DemoPaths, *, model: str, on_gpu: bool) -> RunPlan:
    """Return the run of the demo, or of a benchmark with settings of its own.

    Args:
        settings: What the run does.
        paths: Where it writes.
        model: Folder or hub name of the model all processes use.
        on_gpu: Whether engine and trainer run on a GPU.
    """
    environment = EnvironmentPlan(
        script=settings.environment_door,
        folder=paths.output,
        settings=environment_settings(settings),
        sections={
            **settings.environment_sections,
            "openai": {
                "num_max_requests_at_once": 4 * settings.groups_per_step,
                **settings.environment_sections.get("openai", {}),
            },
        },
    )
    return RunPlan(
        model=model,
        environments=(environment,),
        steps=settings.steps,
        sequences_per_step=settings.sequences_per_step,
        context_tokens=settings.max_tokens,
        work=f"{settings.groups_per_step} problems x {settings.group_size} tries",
        expected="a few minutes" if settings.uses_tiny_model else "as long as the model needs",
        seed=settings.seed,
        on_gpu=on_gpu,
        engine_flags=_engine_flags(settings, on_gpu=on_gpu),
        trainer_flags=_trainer_flags(settings),
        variables=_variables(settings),
        import_folder=REPOSITORY,
        working_folder=REPOSITORY,
        stall_limit_s=settings.stall_limit_s,
        start_limit_s=settings.start_limit_s,
    )


def environment_settings(settings: DemoSettings) -> dict[str, Any]:
    """Return the settings of the environment that the demo chooses, by field of its config."""
    return {
        **({} if settings.task is None else _task_fields(settings, settings.task)),
        "temperature": 1.0,
        "group_size": settings.group_size,
        "max_num_workers": 2 * settings.groups_per_step,
        "max_batches_offpolicy": 1,
        "max_token_length": settings.max_tokens,
        "steps_per_eval": 0,
    }


def _task_fields(settings: DemoSettings, task: TaskSettings) -> dict[str, Any]:
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


def _engine_flags(settings: DemoSettings, *, on_gpu: bool) -> tuple[str, ...]:
    flags: tuple[str, ...] = ()
    if settings.uses_tiny_model or not on_gpu:
        flags += ("--dtype", "float32", "--enforce-eager", "--max-num-seqs", "256")
    if on_gpu:
        flags += ("--gpu-memory-utilization", "0.45")
    return flags


def _trainer_flags(settings: DemoSettings) -> tuple[str, ...]:
    flags: dict[str, Any] = {
        "lr": settings.lr,
        "warmup-steps": min(10, settings.steps),
        "weight-decay": 0.0,
        "batch-size": settings.sequences_per_pass,
        "gradient-accumulation-steps": settings.sequences_per_step // settings.sequences_per_pass,
        "pad-multiple": 8 if settings.uses_tiny_model else 64,
        "optimizer": "adamw",
        "checkpoint-interval": 0,
    }
    arguments = tuple(f"--{name}={value}" for name, value in flags.items())
    if settings.uses_tiny_model:
        # So small that a GPU would not be faster, and memory is no concern.
        arguments += ("--device=cpu", "--no-gradient-checkpointing")
    return arguments + settings.trainer_flags


def _variables(settings: DemoSettings) -> Mapping[str, str]:
    variables = {"WANDB_MODE": "disabled"}
    if settings.uses_tiny_model:
        # The processes share a few cores; more threads than cores only wait for one another.
        variables["OMP_NUM_THREADS"] = "1"
        # Nothing is downloaded, so no process waits for a network that may not be there.
        variables["HF_HUB_OFFLINE"] = "1"
        variables["HF_DATASETS_OFFLINE"] = "1"
    return variables
