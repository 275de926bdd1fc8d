"""Run files with the tiny model, a stand-in for the engine, and made-up groups."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.trainer.conftest import FAKE_ENGINE
from tests.trainer.tiny import save_tiny_model

ROOT = Path(__file__).parents[2]


def scripted_run(folder: Path, *, steps: int, **sections: Any) -> Path:
    """Write a run file; the settings of `sections` are added to those of the file."""
    model = save_tiny_model(folder / "model")
    content: dict[str, dict[str, Any]] = {
        "engines": {"kind": "vllm", "gpus": 0},
        "environments": {
            "name": "made-up",
            "program": str(Path(__file__).with_name("scripted_environment.py")),
            "flags": {"groups": steps},
        },
        "trainer": {
            "model": str(model),
            "steps": steps,
            "sequences_per_step": 4,
            "context_tokens": 64,
            "flags": {
                "device": "cpu",
                "lr": 0.01,
                "optimizer": "adamw",
                "dtype": "float32",
                "checkpoint-interval": 2,
            },
        },
        "restarts": {"first_backoff_s": 0.1, "longest_backoff_s": 1},
    }
    for name, section in sections.items():
        content[name] = {**content.get(name, {}), **section}
    run = {
        "name": "scripted",
        "output": str(folder / "run"),
        "folder": str(ROOT),
        "variables": {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(FAKE_ENGINE), str(ROOT)]),
        },
        **content,
        "engines": [content["engines"]],
        "environments": [content["environments"]],
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run, sort_keys=False), encoding="utf-8")
    return path


def losses_of(output: Path) -> dict[int, float]:
    """Return the loss of each step in the trainer's metrics."""
    lines = (output / "trainer_metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    return {line["step"]: line["train/loss"] for line in found if "train/loss" in line}


def losses_of_one_node(folder: Path, *, steps: int) -> dict[int, float]:
    """Run a file of as many steps to its end as local processes; return the loss of each step."""
    folder.mkdir()
    file = scripted_run(folder, steps=steps)
    done = subprocess.run(
        [sys.executable, "-m", "example_trainer.cluster.cli", str(file)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return losses_of(folder / "run")
