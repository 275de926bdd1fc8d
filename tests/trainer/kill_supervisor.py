"""Runs the trainer as a process, kills it at random moments and starts it again until it is done.

The groups lie in the service before the trainer starts, so that two runs get the same batches. One
group per kill is posted after that kill: a trainer that is faster than the kill has to wait.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.api.soak.service_process import Replica
from tests.trainer.tiny import group, save_tiny_model

GROUP_SIZE = 4
_LIMIT_S = 240.0
_POLL_S = 0.005
_START_UP_S = 5.0


@dataclass
class Outcome:
    """Outcome of a run."""

    final_model: bytes
    """The file of the final weights."""
    kills: int = 0
    steps_at_kill: list[int] = field(default_factory=list)
    """Lines of metrics that were written when each kill came."""
    logged_steps: list[int] = field(default_factory=list)
    """Step of each line of metrics at the end."""
    service_step: int = 0
    queue_groups: int = 0


def save_model_with_dropout(directory: Path) -> None:
    """A tiny model whose steps depend on the random state."""
    save_tiny_model(directory)
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "attention_dropout": 0.1}))


def seeded_groups(count: int, *, seed: int = 0) -> list[dict]:
    """Groups that all differ, so that the order and the loss of one show in the weights."""
    rng = random.Random(seed)

    def completion() -> list[int]:
        return [rng.randrange(4, 32) for _ in range(rng.randint(1, 12))]

    return [
        group(
            [completion() for _ in range(GROUP_SIZE)],
            [rng.random() for _ in range(GROUP_SIZE)],
            logprob=-3.0 - rng.random(),
        )
        for _ in range(count)
    ]


class Supervisor:
    """One run of the trainer on a service of its own.

    Args:
        folder: Where everything of the run goes.
        model: Directory of the model.
        steps: Optimiser steps, and groups that are posted.
    """

    def __init__(self, folder: Path, model: Path, *, steps: int) -> None:
        folder.mkdir()
        self._steps = steps
        self._saves = folder / "saves"
        self._log = folder / "trainer.log"
        self._service = Replica(folder, "sqlite", run="kills")
        options = {
            "model": model,
            "device": "cpu",
            "training-steps": steps,
            "batch-size": 2,
            "gradient-accumulation-steps": 2,
            "seq-len": 64,
            "lr": 0.01,
            "optimizer": "adamw",
            "warmup-steps": steps // 2,
            "checkpoint-interval": 3,
            "keep-checkpoints": 2,
            "weight-bridge-mode": "off",
            "lease-s": 2,
            "save-path": self._saves,
            "atropos-url": self._service.url,
        }
        flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        self._command = [sys.executable, "-m", "example_trainer.grpo", *flags]

    def run(self, *, kills: int = 0, span_s: float = 1.0, seed: int = 0) -> Outcome:
        """Train to the end.

        Args:
            kills: How often the trainer is killed before it may finish.
            span_s: A kill comes at most so long after the first step of a life.
            seed: Of the moments.
        """
        rng = random.Random(seed)
        outcome = Outcome(b"")
        self._service.start()
        try:
            with httpx.Client(base_url=self._service.url) as http:
                groups = seeded_groups(self._steps)
                first, held_back = groups[: self._steps - kills], groups[self._steps - kills :]
                http.post("/scored_data_list", json=first).raise_for_status()
                while self._live(rng, outcome, kills=kills, span_s=span_s) != 0:
                    later = held_back[outcome.kills - 1]
                    http.post("/scored_data", json=later).raise_for_status()
                status = http.get("/status").json()
                outcome.service_step = status["current_step"]
                outcome.queue_groups = status["queue_size"]
        finally:
            self._service.stop()
        outcome.final_model = (self._saves / "final_model" / "model.safetensors").read_bytes()
        lines = (self._saves / "metrics.jsonl").read_text().splitlines()
        outcome.logged_steps = [json.loads(line)["step"] for line in lines]
        return outcome

    def _live(self, rng: random.Random, outcome: Outcome, *, kills: int, span_s: float) -> int:
        """One life of the trainer; returns its exit code."""
        resume = ["--resume"] if (self._saves / "journal" / "run.json").exists() else []
        with self._log.open("ab") as log:
            trainer = subprocess.Popen(
                [*self._command, *resume],
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        try:
            if outcome.kills < kills:
                self._wait_for_the_moment(trainer, rng, span_s)
                trainer.kill()
            code = trainer.wait(_LIMIT_S)
        finally:
            trainer.kill()
            trainer.wait()
        if code == 0:
            return 0
        assert code == -9, self._log.read_text()[-4000:]
        outcome.kills += 1
        outcome.steps_at_kill.append(self._num_lines())
        return code

    def _wait_for_the_moment(
        self, trainer: subprocess.Popen[bytes], rng: random.Random, span_s: float
    ) -> None:
        if rng.random() < 0.2:  # some of them while the trainer starts up or comes back
            time.sleep(rng.uniform(0, _START_UP_S))
            return
        fewest = self._num_lines()  # less, once the trainer has cut the file back
        deadline = time.monotonic() + _LIMIT_S
        while (lines := self._num_lines()) <= fewest and trainer.poll() is None:
            fewest = min(fewest, lines)
            assert time.monotonic() < deadline, self._log.read_text()[-4000:]
            time.sleep(_POLL_S)
        time.sleep(rng.uniform(0, span_s))

    def _num_lines(self) -> int:
        path = self._saves / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0
