"""One run of inference server, service and environment in separate processes, and a trainer."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import httpx
from prometheus_client.parser import text_string_to_metric_families

from atroposlib.wire import MEDIA_TYPES
from scheduler_parts.inference_server import Load
from scheduler_parts.loop_watch import IdleLoop
from service_parts.connection import Connection
from service_parts.server_process import run_api, run_server
from service_parts.workload import register_trainer

__all__ = ["Outcome", "Scenario", "run_scenario"]

_HERE = Path(__file__).parent
_START_S = 180.0
_STALLS = ("stall_p50_ms", "stall_p99_ms", "stall_max_ms", "own_stall_p99_ms")


@dataclasses.dataclass(frozen=True)
class Scenario:
    """Load and settings of one run."""

    load: Load
    trainer_pace: float
    """Sequences the trainer takes per second, as a fraction of the capacity of all slots."""
    kind: Literal["scheduler", "naive"] = "scheduler"
    group_size: int = 8
    batch_size: int = 128
    """Sequences per batch."""
    max_batches_offpolicy: int = 12
    straggler_batches: float = 0.0
    """Setting of the environment; above 0, the baseline has 0 here, not another loop."""
    max_workers: int = 128
    """Groups rolled out at once."""
    warm_up_s: float = 10.0
    window_s: float = 20.0
    grace_s: float = 60.0
    local_length: int = 0
    """Tokens per trajectory prepared in the environment; 0: the engine generates them."""
    local_s: float = 0.0
    """Mean duration of a rollout with prepared trajectories, in seconds."""

    @property
    def allowed_utilization(self) -> float:
        """Fraction of the slots that can stay busy, limited by the rate of the trainer."""
        return min(1.0, self.trainer_pace)

    @property
    def baseline(self) -> Scenario:
        """The run to compare with."""
        if self.straggler_batches:
            return dataclasses.replace(self, straggler_batches=0.0)
        return dataclasses.replace(self, kind="naive")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Results of one run; the *window* is the measured part after the warm-up."""

    utilization: float
    """Fraction of the slots that was busy in the window."""
    delivered_share: float
    """Fraction of the tokens generated in the whole run that is in accepted groups."""
    taken_per_s: float
    """Sequences the trainer received per second of the window."""
    mean_in_flight: float
    aborted_tokens: float
    """Generated tokens of requests that were cancelled in the window."""
    mean_staleness: float
    """Trainer steps from the start of a group to its batch, mean over the groups of the window."""
    share_within_bound: float
    """Fraction of these groups that were at most `max_batches_offpolicy` steps old."""
    cpu_us_per_token: float
    """Processor time of the environment per token delivered in the window, in microseconds."""
    sent_tokens: int
    """Tokens delivered in the window."""
    stall_p50_ms: float
    stall_p99_ms: float
    stall_max_ms: float
    own_stall_p99_ms: float
    """Delay during which the environment itself used the processor, in any thread."""
    idle_p99_ms: float
    """Stall of an idle process at the same time, which the machine itself causes."""
    failures: dict[str, int]


class PacedTrainer(threading.Thread):
    """Takes batches at a fixed rate; a late batch is taken as soon as it is available.

    Reports the number of its batches as the policy version.
    """

    def __init__(self, url: str, *, batch_size: int, sequences_per_s: float) -> None:
        super().__init__(daemon=True)
        self.num_sequences = 0
        self._url = url
        self._batch_size = batch_size
        self._period_s = batch_size / sequences_per_s
        self._stopping = threading.Event()

    def run(self) -> None:
        headers = {"Accept": MEDIA_TYPES["msgpack"], "Accept-Encoding": "identity"}
        due = time.monotonic()
        with httpx.Client(timeout=60) as client:
            while not self._stopping.wait(max(0.0, due - time.monotonic())):
                url = f"{self._url}/batch?wait=0.2"
                with client.stream("GET", url, headers=headers) as answer:
                    num_bytes = sum(len(piece) for piece in answer.iter_raw())
                if num_bytes > 200:
                    self.num_sequences += self._batch_size
                    version = self.num_sequences // self._batch_size
                    client.post(f"{self._url}/policy", json={"version": version})
                    due = max(due + self._period_s, time.monotonic() - self._period_s)

    def stop(self) -> None:
        self._stopping.set()
        self.join()


def run_scenario(scenario: Scenario, tokenizer: Path) -> Outcome:
    """Run a scenario: the warm-up, the window, and at most the grace period."""
    load = scenario.load
    engine_command = [
        sys.executable,
        str(_HERE / "inference_server.py"),
        json.dumps(dataclasses.asdict(load)),
    ]
    with (
        tempfile.TemporaryDirectory() as folder,
        run_server(engine_command) as engine,
        run_api("--store", "sqlite", "--data-dir", folder, core=None) as service,
    ):
        with Connection(service.port) as connection:
            register_trainer(connection, scenario.batch_size)
        pace = load.completions_per_s * scenario.trainer_pace
        trainer = PacedTrainer(service.url, batch_size=scenario.batch_size, sequences_per_s=pace)
        settings = _settings(scenario, engine.url, service.url, tokenizer, folder)
        script = str(_HERE / "environment_process.py")
        environment = subprocess.Popen(
            [sys.executable, script, json.dumps(settings)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
        )
        try:
            return _measure(scenario, environment, trainer, engine.url, service.url)
        finally:
            environment.kill()
            environment.wait()


def _measure(
    scenario: Scenario,
    environment: Any,
    trainer: PacedTrainer,
    inference_url: str,
    service_url: str,
) -> Outcome:
    deadline = time.monotonic() + _START_S
    environment.stdout.readline()
    while not scenario.local_length and _figures(inference_url)["in_flight"] == 0:
        if time.monotonic() > deadline or environment.poll() is not None:
            raise SystemExit("the environment did not start")
        time.sleep(0.05)
    trainer.start()
    time.sleep(scenario.warm_up_s)
    environment.send_signal(signal.SIGUSR1)
    idle_loop = IdleLoop()
    before, taken = _figures(inference_url), trainer.num_sequences
    ages_before = _ages(service_url)
    in_flight = []
    until = time.monotonic() + scenario.window_s
    while time.monotonic() < until:
        time.sleep(min(0.5, max(0.0, until - time.monotonic())))
        in_flight.append(_figures(inference_url)["in_flight"])
    after, taken = _figures(inference_url), trainer.num_sequences - taken
    ages = _ages(service_url) - ages_before
    environment.send_signal(signal.SIGUSR2)
    time.sleep(0.2)
    environment.send_signal(signal.SIGTERM)
    output, _ = environment.communicate(timeout=scenario.grace_s + 60)
    trainer.stop()
    own = json.loads(output.splitlines()[-1])
    if own["ticks"] == 0:  # the loop was blocked during the whole window
        own.update(dict.fromkeys(_STALLS, 1e3 * scenario.window_s))
    total, idle = _figures(inference_url), idle_loop.stop()
    elapsed = after["at_s"] - before["at_s"]
    return Outcome(
        utilization=(after["busy_slot_s"] - before["busy_slot_s"]) / elapsed / scenario.load.slots,
        delivered_share=own["total_sent_tokens"]
        / max(1, total["finished_tokens"] + total["wasted_tokens"]),
        taken_per_s=taken / elapsed,
        mean_in_flight=sum(in_flight) / len(in_flight),
        aborted_tokens=after["wasted_tokens"] - before["wasted_tokens"],
        mean_staleness=ages["sum"] / max(1, ages["count"]),
        share_within_bound=ages[f"{scenario.max_batches_offpolicy}.0"] / max(1, ages["count"]),
        cpu_us_per_token=1e6 * own["cpu_s"] / max(1, own["sent_tokens"]),
        sent_tokens=own["sent_tokens"],
        **{name: own[name] for name in _STALLS},
        idle_p99_ms=idle["stall_p99_ms"],
        failures={**own["failures"], **own["drops"]},
    )


def _settings(
    scenario: Scenario, inference_url: str, service_url: str, tokenizer: Path, folder: str
) -> dict[str, Any]:
    config = {
        "group_size": scenario.group_size,
        "max_num_workers": scenario.max_workers,
        "max_batches_offpolicy": scenario.max_batches_offpolicy,
        "straggler_batches": scenario.straggler_batches,
        "tokenizer_name": str(tokenizer),
        "use_wandb": False,
        "rollout_server_url": service_url,
        "total_steps": 1_000_000,
        "steps_per_eval": 0,
        "rollout_grace_s": scenario.grace_s,
        "max_token_length": 1 << 20,
        "num_rollouts_to_keep": 32,
        "metrics_path": str(Path(folder) / "metrics.jsonl"),
    }
    return {
        "kind": scenario.kind,
        "config": config,
        "inference_url": inference_url,
        "local_length": scenario.local_length,
        "local_s": scenario.local_s,
        "requests_at_once": scenario.max_workers * scenario.group_size,
    }


def _figures(url: str) -> dict[str, float]:
    figures: dict[str, float] = httpx.get(url + "/figures", timeout=30).json()
    return figures


def _ages(url: str) -> Counter[str]:
    """Return the service's histogram of staleness: groups up to each bound, `sum` and `count`."""
    name = "atropos_handed_out_staleness_steps"
    families = text_string_to_metric_families(httpx.get(url + "/metrics", timeout=30).text)
    samples = [s for family in families if family.name == name for s in family.samples]
    return Counter(
        {s.labels.get("le", s.name.removeprefix(f"{name}_")): int(s.value) for s in samples}
    )
