"""The account of a run: groups acknowledged, trained, left in the queue, lost, and doubled."""

from __future__ import annotations

import re
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from tests.several_hosts.cluster import ClusterRun
from tests.several_hosts.keeping_trainer import KEPT, keep_records
from tests.several_hosts.lines import read_lines
from tests.several_hosts.plain_clients import PlainClusterRun

__all__ = ["RunAccount", "settle"]

_REPLAY_PORT = 8010


@dataclass(frozen=True)
class RunAccount:
    """What became of every group; complete once the run is drained."""

    acknowledged: dict[str, float]
    """Name → time of the acknowledgement."""
    trained: Counter[str]
    """Name → number of times it was in the batch of a step."""
    num_queued: int
    num_steps: int
    steps: list[int]
    """Step of each line of the trainer's metrics."""
    losses: Sequence[float] = ()
    replayed_losses: Sequence[float] = ()
    """Losses of an undisturbed trainer that was given the same batches."""

    @property
    def missing(self) -> list[str]:
        """Names that were acknowledged and not trained; the queue has that many at the end."""
        return [name for name in self.acknowledged if name not in self.trained]

    @property
    def doubled(self) -> list[str]:
        return [name for name, times in self.trained.items() if times > 1]

    @property
    def unrecorded(self) -> list[str]:
        """Trained names whose acknowledgement an environment did not live to record."""
        return [name for name in self.trained if name not in self.acknowledged]

    def findings(self, *, max_unrecorded: int) -> list[str]:
        """Return what does not add up."""
        return [
            text
            for text, is_wrong in (
                (f"lost: {self.missing}", len(self.missing) > self.num_queued),
                (f"trained twice: {self.doubled}", bool(self.doubled)),
                (f"not recorded: {self.unrecorded}", len(self.unrecorded) > max_unrecorded),
                ("steps are missing or doubled", self.steps != list(range(1, self.num_steps + 1))),
                ("losses differ from those of the replay", self.losses != self.replayed_losses),
            )
            if is_wrong
        ]


def settle(run: ClusterRun) -> RunAccount:
    """Let the trainer take what is queued, end the run, and return its account."""
    run.drain()
    status = run.status()
    lines = read_lines(run.metrics)
    num_steps = int(status["current_step"])
    found = RunAccount(
        acknowledged=run.acknowledged(),
        trained=Counter(name for line in lines for name in line.get("names", ())),
        num_queued=int(status["queue_size"]),
        num_steps=num_steps,
        steps=[line["step"] for line in lines],
    )
    if isinstance(run, PlainClusterRun):
        return found
    keep_records(run.saves / "journal")
    records = {
        int(re.findall(r"\d+", path.name)[0]): path for path in (run.saves / KEPT).glob("step_*")
    }
    return replace(
        found,
        trained=Counter(name for path in records.values() for name in _names(path)),
        losses=[line["train/loss"] for line in lines],
        replayed_losses=_replay(run, num_steps),
    )


def _names(path: Path) -> list[str]:
    groups = msgspec.msgpack.decode(path.read_bytes())["groups"]
    return [group["generation_params"]["name"] for group in groups]


def _replay(run: ClusterRun, num_steps: int) -> list[float]:
    """Train on the recorded batches with a service of its own; return the losses."""
    saves = run.folder / "replay"
    shutil.copytree(run.saves / KEPT, saves / "journal")
    shutil.copy(run.saves / "journal" / "run.json", saves / "journal")
    service = run.extra_part(
        "replay_service",
        [
            *(sys.executable, "-m", "atroposlib.cli.run_api"),
            *("--port", str(_REPLAY_PORT), "--store", "memory"),
        ],
    )
    service.start()
    changes = {
        "save-path": saves,
        "metrics-path": saves / "metrics.jsonl",
        "training-steps": num_steps,
        "weight-bridge-mode": "off",
        "atropos-url": f"http://127.0.0.1:{_REPLAY_PORT}",
    }
    flags = {**run.trainer_flags(), **changes}
    flags.pop("engine-urls")
    command = [sys.executable, "-m", "example_trainer.grpo", "--resume", "--quiet"]
    trainer = run.extra_part("replay", command + [f"--{k}={v}" for k, v in flags.items()])
    trainer.start()
    try:
        limit_s = 180.0 + 2.0 * num_steps
        run.wait_for(lambda: not trainer.is_alive, "end of the replay", limit_s=limit_s)
    finally:
        trainer.end(signal.SIGKILL)
        service.end(signal.SIGKILL)
    return [line["train/loss"] for line in read_lines(saves / "metrics.jsonl")]
