"""The task of the demo as a run file: its student, its settings, and the measured accuracy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from example_trainer.demo.cli import measure_held_out
from example_trainer.demo.settings import (
    ENVIRONMENT_DOOR,
    REPOSITORY,
    DemoSettings,
    environment_settings,
    settings_for,
)
from example_trainer.demo.student import make_student, teach_student
from example_trainer.demo.task import held_out_problems
from tests.trainer.torch_engine.conftest import serve_locally

SETTINGS = settings_for("full", engine="torch")


def make_demo_student(folder: Path, settings: DemoSettings = SETTINGS) -> None:
    """Create the student of the demo after its supervised learning; takes minutes."""
    env = environment_settings(settings)
    student = make_student(env, shape=settings.shape, seed=settings.seed, folder=folder)
    teach_student(
        student,
        env,
        measured=held_out_problems(env)[:256],
        settings=settings.warm_up,
        seed=settings.seed,
        on_check=lambda step, loss, accuracy: None,
    )


def demo_run(
    folder: Path, model: Path, *, steps: int, settings: DemoSettings = SETTINGS, **sections: Any
) -> Path:
    """Write the run file of the demo's task; `sections` replace those of the file."""
    content = {
        "name": "demo",
        "output": str(folder / "run"),
        "folder": str(REPOSITORY),
        "engines": [
            {
                "kind": "torch",
                "flags": {"dtype": "float32", "device": "cpu", "max-num-seqs": 256},
            }
        ],
        "environments": [
            {
                "name": "sums",
                "program": str(ENVIRONMENT_DOOR),
                "settings": {
                    "env": environment_settings(settings),
                    "openai": {"num_max_requests_at_once": 4 * settings.groups_per_step},
                },
            }
        ],
        "trainer": {
            "model": str(model),
            "steps": steps,
            "sequences_per_step": settings.sequences_per_step,
            "context_tokens": settings.max_tokens,
            "flags": {
                "lr": settings.lr,
                "warmup-steps": min(10, steps),
                "weight-decay": 0.0,
                "optimizer": "adamw",
                "pad-multiple": 8,
                "checkpoint-interval": 5,
                "device": "cpu",
                "gradient-checkpointing": False,
            },
        },
        "variables": {
            "OMP_NUM_THREADS": "1",
            "WANDB_MODE": "disabled",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "PYTHONPATH": str(REPOSITORY),
        },
        "restarts": {"first_backoff_s": 0.5, "longest_backoff_s": 5},
        **sections,
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return path


def steps_of(output: Path) -> list[int]:
    """Return the step of each line of the trainer's metrics."""
    path = output / "trainer_metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines]
    return [line["step"] for line in found if "train/loss" in line]


def held_out_accuracy(model: Path, settings: DemoSettings = SETTINGS) -> float:
    """Return the share of right answers to problems never trained on, as the demo measures it."""
    with serve_locally(model, dtype="float32", max_model_len=settings.max_tokens) as engine:
        return measure_held_out(
            f"{engine.url}/v1",
            model_name="tiny",
            problems=held_out_problems(environment_settings(settings)),
            max_tokens=settings.max_tokens // 2,
            on_tick=lambda num_answered: None,
        ).accuracy
