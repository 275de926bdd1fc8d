"""A teacher: a vLLM of its own, the accuracy of its model, and what the environment is told."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from example_trainer.demo.cli import measure_held_out
from example_trainer.demo.settings import (
    REPOSITORY,
    DemoPaths,
    DemoSettings,
    demo_plan,
    environment_settings,
)
from example_trainer.demo.task import held_out_problems
from example_trainer.launch.stack import common_variables, engine_arguments, engine_variables
from example_trainer.processes import ManagedProcess, find_free_port, wait_until_ready

__all__ = ["ENVIRONMENT", "Teacher", "serve_teacher"]

ENVIRONMENT = Path("environments/reasoning_gym_environment/reasoning_gym_teacher_distill.py")
"""Script of the environment that asks a teacher, relative to the repository."""


@dataclass(frozen=True)
class Teacher:
    """A served model that does not change."""

    process: ManagedProcess
    model: Path
    base_url: str

    def sections(self, *, top_k: int) -> dict[str, dict[str, Any]]:
        """Return what stands in the environment's YAML file for this teacher.

        Args:
            top_k: Likeliest tokens per position that the environment asks for.
        """
        return {
            "env": {
                "teacher_enabled": True,
                "teacher_top_k": top_k,
                # A group whose tries are all right or all wrong teaches as much as any other.
                "ensure_scores_are_not_same": False,
            },
            "teacher": {
                "server_type": "vllm",
                "base_url": self.base_url,
                "model_name": str(self.model),
                "tokenizer_name": str(self.model),
                "api_key": "none",  # pragma: allowlist secret
            },
        }

    def accuracy(self, settings: DemoSettings) -> float:
        """Measure it on the problems, and in the way, the student is measured."""
        env = environment_settings(settings)
        return measure_held_out(
            self.base_url,
            model_name=str(self.model),
            problems=held_out_problems(env),
            max_tokens=settings.max_tokens // 2,
            on_tick=lambda num_answered: None,
        ).accuracy


@contextmanager
def serve_teacher(settings: DemoSettings, model: Path, *, log_path: Path) -> Iterator[Teacher]:
    """Serve a model, where the demo would serve its own, as long as the context lasts.

    Raises:
        ProcessFailedError: vLLM ended, or was not ready in time.
    """
    import torch

    port, on_gpu = find_free_port(), torch.cuda.is_available()
    # A teacher reads whole trajectories and is asked for one token after them.
    room = replace(settings, max_tokens=settings.max_tokens + 1)
    plan = demo_plan(room, DemoPaths(Path()), model=str(model), on_gpu=on_gpu)
    process = ManagedProcess(
        "teacher",
        [sys.executable, *engine_arguments(plan, port=port)],
        log_path=log_path,
        env={**common_variables(plan, os.environ), **engine_variables(plan, os.environ)},
        cwd=REPOSITORY,
    )

    def is_healthy() -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    with process:
        wait_until_ready(process, is_healthy, timeout_s=settings.start_limit_s)
        yield Teacher(process, model, f"http://127.0.0.1:{port}/v1")
