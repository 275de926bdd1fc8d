"""Model asynchronous runs from 8 to 16,384 GPUs, compared with points measured here.

The model (`scale_parts/model.py`) has engines with slots, prefill, KV cache and preemption, groups
that wait for their longest sequence, the off-policy bound of the environments, the service, and the
trainer with its weight updates. Its costs of the service are measured in the same run: processor
time of a replica per group, of a run on disk and of replicas with Redis.

    measured: environment + service + simulated engine ──┐ ratio model / measured
    model of the same run ───────────────────────────────┘
    model from 8 to 16,384 GPUs ──► load of one replica, replicas that are needed

Of eight GPUs, six generate, as three engines of two, and two train.

Usage: python benchmarks/scale.py [--seconds 15] [--slots 64 256] [--without-measured] [--json FILE]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from scale_parts.measured import (
    ServiceCost,
    cluster_of,
    measure_point,
    measure_redis,
    measure_service,
    scaled,
    scenario_of,
)
from scale_parts.model import Cluster, Figures, simulate
from scheduler_parts.word_tokenizer import write_tokenizer
from service_parts.workload import Shape

GPU_COUNTS = (8, 64, 512, 4_096, 16_384)
ENGINES_PER_GPU = 3 / 8
SEQUENCE = Shape(8, 4_096, has_logprobs=True)
"""Group with which the cost of the service is measured, of about the mean length below."""
ENGINE = Cluster(
    slots=192,
    slot_tokens_per_s=60.0,
    engine_tokens_per_s=6_000.0,
    prefill_tokens_per_s=30_000.0,
    kv_tokens=550_000.0,
    prompt_tokens=512,
    median_tokens=2_600.0,
    spread=0.8,
    most_tokens=32_768,
    batch_size=96,
    max_batches_offpolicy=5,
    trainer_sequences_per_s=2.0,
    update_s=5.0,
)
"""One engine of two GPUs with a model of some seven billion parameters, and its share of the run.
These are assumptions; replace them by figures of the engine in question."""
ASSUMED = ServiceCost(take_s=0.002, deliver_s=0.001)
"""Cost of the service with `--without-measured`."""
FULL = 0.7
"""Load of a replica above which groups would wait noticeably."""
WARM_UP_S, WINDOW_S = 400.0, 800.0


def predict(gpus: int, cost: ServiceCost) -> tuple[int, Figures]:
    """Return the engines of a run on a number of GPUs, and its figures."""
    engines = int(gpus * ENGINES_PER_GPU)
    cluster = scaled(ENGINE, engines, service_s_per_group=cost.group_s)
    return engines, simulate(cluster, warm_up_s=WARM_UP_S, window_s=WINDOW_S)


def compare(console: Console, slots: list[int], seconds: float) -> list[dict[str, float]]:
    """Print the measured points and the model of them; return their figures."""
    table = Table("slots", "figure", "measured", "model", "model / measured")
    found = []
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = write_tokenizer(Path(folder))
        for number in slots:
            scenario = scenario_of(number, window_s=seconds)
            measured = measure_point(scenario, tokenizer)
            cluster = cluster_of(scenario)
            model = simulate(cluster, warm_up_s=scenario.warm_up_s, window_s=10 * seconds)
            for name, real, ours in (
                ("slots busy", measured.slot_use, model.slot_use),
                (
                    "sequences trained on per second",
                    measured.sequences_per_s,
                    model.sequences_per_s,
                ),
            ):
                ratio = ours / real if real else math.nan
                table.add_row(str(number), name, f"{real:.3g}", f"{ours:.3g}", f"{ratio:.2f}")
                found.append({"slots": number, "measured": real, "model": ours, "ratio": ratio})
    console.print(table)
    return found


def measure_costs(console: Console, seconds: float) -> tuple[ServiceCost, ServiceCost | None]:
    """Print and return the cost of one replica on disk, and of two with Redis."""
    alone = measure_service(SEQUENCE, seconds)
    shared = measure_redis(SEQUENCE, 2, seconds)
    table = Table("service", "ms to take a group", "ms to deliver it", "ms of Redis", "groups/s")
    for name, cost in (("one replica, SQLite", alone), ("two replicas, Redis", shared)):
        if cost is None:
            table.add_row(name, "redis-server is not installed", "", "", "")
            continue
        times = [f"{1e3 * each:.2f}" for each in (cost.take_s, cost.deliver_s, cost.redis_s)]
        table.add_row(name, *times, f"{1 / cost.group_s:.0f} per replica and core")
    console.print(f"group of {SEQUENCE}, processor time measured here:")
    console.print(table)
    return alone, shared


def advice(groups_per_s: float, alone: ServiceCost, shared: ServiceCost | None) -> str:
    """Return what serves a rate of groups."""
    load = groups_per_s * alone.group_s
    if load <= FULL:
        return "one replica"
    if shared is None:
        return "replicas with Redis (not measured)"
    replicas = math.ceil(groups_per_s * shared.group_s / FULL)
    redis = groups_per_s * 2 * shared.redis_s  # a delivery costs Redis about the same
    if redis <= FULL:
        return f"{replicas} replicas, Redis {redis:.0%} busy"
    runs = math.ceil(redis / FULL)
    return f"{runs} runs of {math.ceil(replicas / runs)} replicas, each with its Redis"


def predict_all(
    console: Console, counts: list[int], alone: ServiceCost, shared: ServiceCost | None
) -> list[dict[str, object]]:
    """Print and return the prediction for each number of GPUs."""
    table = Table(
        "GPUs", "engines", "slots busy", "M tokens/s", "recomputed", "staleness", "groups/s",
        "load of one replica", "what serves it",
    )  # fmt: skip
    rows = []
    for gpus in counts:
        # The service is not the bottleneck here: its load is what the table shows.
        engines, figures = predict(gpus, ServiceCost(0.0, 0.0))
        load = figures.groups_per_s * alone.group_s
        served = advice(figures.groups_per_s, alone, shared)
        table.add_row(
            f"{gpus:,}",
            f"{engines:,}",
            f"{figures.slot_use:.1%}",
            f"{figures.tokens_per_s / 1e6:.3f}",
            f"{figures.recomputed_share:.1%}",
            f"{figures.staleness:.1f}",
            f"{figures.groups_per_s:.2f}",
            f"{load:.1%}",
            served,
        )
        rows.append({"gpus": gpus, **dataclasses.asdict(figures), "load": load, "served": served})
    console.print(table)
    last = rows[-1]
    per_gpu = float(str(last["groups_per_s"])) / int(str(last["gpus"]))
    ends = FULL / (per_gpu * alone.group_s)
    console.print(f"one replica is {FULL:.0%} busy at about {ends:,.0f} GPUs")
    if int(str(last["gpus"])) > ends:
        _, slow = predict(int(str(last["gpus"])), alone)
        console.print(
            f"with one replica only, {last['gpus']:,} GPUs would have {slow.slot_use:.0%} of the "
            f"slots busy, and the service {slow.service_load:.0%} of the time"
        )
    return rows


def main() -> None:
    """Measure, model and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=15.0, help="length of each measurement")
    parser.add_argument("--slots", type=int, nargs="+", default=[64, 256], help="measured sizes")
    parser.add_argument("--gpus", type=int, nargs="+", default=list(GPU_COUNTS))
    parser.add_argument("--without-measured", action="store_true", help="only the model")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()

    console = Console(width=150)
    points: list[dict[str, float]] = []
    alone, shared = ASSUMED, None
    if not arguments.without_measured:
        points = compare(console, arguments.slots, arguments.seconds)
        alone, shared = measure_costs(console, min(5.0, arguments.seconds))
    rows = predict_all(console, arguments.gpus, alone, shared)
    if arguments.json:
        written = {
            "points": points,
            "service": alone._asdict(),
            "redis": None if shared is None else shared._asdict(),
            "model": rows,
        }
        arguments.json.write_text(json.dumps(written, indent=2))


if __name__ == "__main__":
    main()
