"""Measured points of the model: a run with a simulated engine, and the service under full load."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from atroposlib.api.schemas import MAX_BATCH_SIZE
from atroposlib.wire import MEDIA_TYPES
from scale_parts.model import Cluster
from scheduler_parts.inference_server import Load
from scheduler_parts.scenario import Scenario, run_scenario
from service_parts.connection import Connection, post_for, request_bytes
from service_parts.server_process import ServerProcess, end_process, run_api
from service_parts.workload import Shape, post_requests, register_trainer

__all__ = [
    "Point",
    "ServiceCost",
    "cluster_of",
    "measure_point",
    "measure_redis",
    "measure_service",
]

_START_S = 30.0


class Point(NamedTuple):
    """Measured figures of a run with a simulated engine."""

    slot_use: float
    sequences_per_s: float


class ServiceCost(NamedTuple):
    """Processor time of one replica, and of Redis if there is one, in seconds per group."""

    take_s: float
    """To take a group from an environment."""
    deliver_s: float
    """To deliver a group to the trainer."""
    redis_s: float = 0.0

    @property
    def group_s(self) -> float:
        return self.take_s + self.deliver_s


def scenario_of(slots: int, *, window_s: float) -> Scenario:
    """Return the run that is measured: the trainer is a tenth slower than the engine."""
    load = Load(slots=slots, most_tokens=2_400)
    return Scenario(
        load,
        trainer_pace=0.9,
        batch_size=max(16, slots // 2),
        max_batches_offpolicy=6,
        max_workers=2 * slots // 8,
        warm_up_s=10.0,
        window_s=window_s,
        grace_s=20.0,
    )


def cluster_of(scenario: Scenario) -> Cluster:
    """Return the model of a measured run."""
    load = scenario.load
    return Cluster(
        slots=load.slots,
        slot_tokens_per_s=load.tokens_per_s,
        engine_tokens_per_s=math.inf,
        prefill_tokens_per_s=math.inf,
        kv_tokens=math.inf,
        prompt_tokens=0,
        median_tokens=load.median_tokens,
        spread=load.spread,
        most_tokens=load.most_tokens,
        group_size=scenario.group_size,
        batch_size=scenario.batch_size,
        max_batches_offpolicy=scenario.max_batches_offpolicy,
        max_groups=scenario.max_workers,
        trainer_sequences_per_s=load.completions_per_s * scenario.trainer_pace,
        update_s=0.0,
    )


def measure_point(scenario: Scenario, tokenizer: Path) -> Point:
    """Run the real environment and service against a simulated engine."""
    outcome = run_scenario(scenario, tokenizer)
    return Point(outcome.utilization, outcome.taken_per_s)


def measure_service(shape: Shape, seconds: float) -> ServiceCost:
    """Measure one replica with a run on disk."""
    with (
        tempfile.TemporaryDirectory() as folder,
        run_api("--store", "sqlite", "--data-dir", folder) as server,
    ):
        take_s = _take_s([server], shape, seconds)
        return ServiceCost(take_s, _deliver_s(server, shape, seconds))


def measure_redis(shape: Shape, num_replicas: int, seconds: float) -> ServiceCost | None:
    """Measure replicas that share a run in Redis; None without `redis-server`."""
    if shutil.which("redis-server") is None:
        return None
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(_redis())
        url = f"redis://127.0.0.1:{redis.port}/0"
        flags = ("--store", url, "--run", "scale", "--new-run")
        replicas = [stack.enter_context(run_api(*flags, core=None)) for _ in range(num_replicas)]
        before = redis.cpu_s
        take_s = _take_s(replicas, shape, seconds)
        num_groups = _num_groups(replicas[0])
        redis_s = (redis.cpu_s - before) / max(1, num_groups)
        return ServiceCost(take_s, _deliver_s(replicas[0], shape, seconds), redis_s)


def _take_s(replicas: list[ServerProcess], shape: Shape, seconds: float) -> float:
    """Post to all replicas at once; return their processor time per group."""
    requests = post_requests(shape, "msgpack")
    with Connection(replicas[0].port) as connection:
        register_trainer(connection, MAX_BATCH_SIZE)
    counts: list[int] = []
    before = sum(replica.cpu_s for replica in replicas)
    threads = [
        threading.Thread(
            target=lambda port=r.port: counts.append(post_for(port, requests, seconds)[0])
        )
        for r in replicas
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    used = sum(replica.cpu_s for replica in replicas) - before
    return used / max(1, sum(counts))


def _num_groups(replica: ServerProcess) -> int:
    with Connection(replica.port) as connection:
        reply = connection.expect(request_bytes("GET", "/health/ready"))
    return int(json.loads(reply.body)["counters"]["groups/received"])


def _deliver_s(server: ServerProcess, shape: Shape, seconds: float) -> float:
    """Take batches of 16 groups for some seconds; return the processor time per group."""
    request = request_bytes(
        "GET", "/batch", Accept=MEDIA_TYPES["msgpack"], Accept_Encoding="identity"
    )
    with Connection(server.port) as connection:
        register_trainer(connection, 16 * shape.trajectories)
        before, num_groups = server.cpu_s, 0
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline and len(connection.expect(request).body) > 100:
            num_groups += 16
        return (server.cpu_s - before) / max(1, num_groups)


@contextlib.contextmanager
def _redis() -> Iterator[ServerProcess]:
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
        free.close()
        process = subprocess.Popen(
            ["redis-server", "--port", str(port), "--dir", folder, "--appendonly", "yes"],
            stdout=subprocess.DEVNULL,
        )
        try:
            _await_port(port)
            yield ServerProcess(port, process.pid)
        finally:
            end_process(process)


def _await_port(port: int) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def scaled(cluster: Cluster, engines: int, **changes: float) -> Cluster:
    """Return a cluster with more engines, and with batch and trainer in proportion."""
    return dataclasses.replace(
        cluster,
        engines=engines,
        batch_size=cluster.batch_size * engines,
        trainer_sequences_per_s=cluster.trainer_sequences_per_s * engines,
        **changes,
    )
