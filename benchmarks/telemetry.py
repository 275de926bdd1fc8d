"""Processor time of tracing: an environment, the service and the trainer with spans and without.

    environment   engine (mock) ─► groups of 8 completions ─► service, in this process
    service       receives those groups, stores them in memory and delivers them, in another process
    trainer       optimizer steps on 4 groups of 8 completions

Each is measured without and with `ATROPOS_TRACING=file:...` in alternating rounds, by the processor
time of its process per group or per step: recording, encoding and writing of the spans included.
The ratio of a row is the median of the ratios of its rounds. Another row is the time of one span.

Usage: python benchmarks/telemetry.py [--rounds 5] [--tokens 512] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from atroposlib.scored_data import IGNORE_INDEX, MASKED_LOGPROB
from atroposlib.utils.tracing import VARIABLE, FileSink, Tracer
from inference_parts.mock_engine import mock_engine
from inference_parts.paths import load_tokenizer
from service_parts.connection import Connection, request_bytes
from service_parts.server_process import end_process, run_api
from service_parts.workload import register_trainer

GROUP_SIZE = 8
PROMPT_TOKENS = 64
GROUPS_PER_ROUND = 150
WARM_UP_GROUPS = 20
GROUPS_PER_BATCH = 4
STEPS_PER_ROUND = 10
DRAIN_PAUSE_S = 0.05


class Cost(NamedTuple):
    """Milliseconds of processor time per group or step, without and with spans."""

    off_ms: float
    on_ms: float

    @property
    def ratio(self) -> float:
        return self.on_ms / self.off_ms


@contextmanager
def tracing(path: Path | None) -> Iterator[None]:
    """Turn tracing on in this process and in those it starts; None turns it off."""
    before = os.environ.pop(VARIABLE, None)
    if path is not None:
        os.environ[VARIABLE] = f"file:{path}"
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        if before is not None:
            os.environ[VARIABLE] = before


async def serve_groups(service: Any, engine_url: str, folder: Path) -> tuple[float, float]:
    """Serve an environment; return the processor seconds per group of it and of the service."""
    from atroposlib.envs.base import APIServerConfig, BaseEnvConfig
    from scheduler_parts.environment_process import BenchmarkEnv

    all_sent = asyncio.Event()
    started: list[float] = []

    class CountedEnv(BenchmarkEnv):
        num_sent = 0

        async def _send_scored_data_to_api(self, scored_data: Any) -> None:
            await super()._send_scored_data_to_api(scored_data)
            self.num_sent += 1
            if self.num_sent == WARM_UP_GROUPS:
                started.extend((time.process_time(), service.cpu_s))
            if self.num_sent == WARM_UP_GROUPS + GROUPS_PER_ROUND:
                all_sent.set()

    config = BaseEnvConfig(
        group_size=GROUP_SIZE,
        batch_size=GROUP_SIZE * GROUPS_PER_BATCH,
        max_num_workers=4,
        max_batches_offpolicy=100,
        tokenizer_name=str(folder / "tokenizer"),
        rollout_server_url=service.url,
        use_wandb=False,
        ensure_scores_are_not_same=False,
        metrics_path=str(folder / "metrics.jsonl"),
    )
    server = APIServerConfig(
        model_name="mock", base_url=f"{engine_url}/v1", server_type="vllm", api_key="x"
    )
    serving = asyncio.create_task(CountedEnv(config, [server]).env_manager())
    waiting = asyncio.create_task(all_sent.wait())
    await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
    own_s, service_s = time.process_time() - started[0], service.cpu_s - started[1]
    serving.cancel()
    waiting.cancel()
    await asyncio.wait({serving, waiting})
    return own_s / GROUPS_PER_ROUND, service_s / GROUPS_PER_ROUND


def drain(port: int) -> None:
    """Take batches until the service ends."""
    request = request_bytes("GET", "/batch")
    try:
        with Connection(port) as connection:
            while True:
                connection.call(request)
                time.sleep(DRAIN_PAUSE_S)
    except OSError:
        return


def run_environment(folder: Path, engine_url: str) -> tuple[float, float]:
    """Run a service and an environment; return their processor seconds per group."""
    with run_api("--store", "memory", core=None) as service:
        with Connection(service.port) as connection:
            register_trainer(connection, GROUP_SIZE * GROUPS_PER_BATCH)
        draining = subprocess.Popen([sys.executable, __file__, "--drain", str(service.port)])
        try:
            return asyncio.run(serve_groups(service, engine_url, folder))
        finally:
            end_process(draining)


def run_trainer(folder: Path) -> float:
    """Take steps of a small model; return the processor seconds of one."""
    from example_trainer.config import TrainingConfig
    from example_trainer.trainers import train
    from example_trainer.training import Trainer

    run_step = Trainer._run_step
    times: list[float] = []

    def timed_step(trainer: Trainer) -> None:
        started = time.process_time()
        run_step(trainer)
        times.append(time.process_time() - started)

    with run_api("--store", "memory", core=None) as service:
        config = TrainingConfig(
            model_name=str(folder / "model"),
            device="cpu",
            training_steps=STEPS_PER_ROUND + 2,
            batch_size=GROUP_SIZE,
            gradient_accumulation_steps=GROUPS_PER_BATCH,
            seq_len=256,
            checkpoint_interval=0,
            weight_bridge_mode="off",
            save_path=str(folder / "checkpoints"),
            atropos_url=service.url,
            use_wandb=False,
            quiet=True,
        )
        poster = threading.Thread(target=_post_groups, args=(service.port,), daemon=True)
        poster.start()
        Trainer._run_step = timed_step  # type: ignore[method-assign, assignment]
        try:
            train(config)
        finally:
            Trainer._run_step = run_step  # type: ignore[method-assign]
            poster.join()
    return statistics.fmean(times[2:])


def _post_groups(port: int) -> None:
    rng = random.Random(0)
    groups_left = GROUPS_PER_BATCH * (STEPS_PER_ROUND + 2)
    with Connection(port) as connection:
        while json.loads(connection.call(request_bytes("GET", "/info")).body)["batch_size"] < 1:
            time.sleep(0.05)
        while groups_left:
            tokens = [[rng.randrange(3, 300) for _ in range(200)] for _ in range(GROUP_SIZE)]
            group = {
                "tokens": tokens,
                "masks": [[IGNORE_INDEX] * 50 + row[50:] for row in tokens],
                "scores": [rng.random() for _ in tokens],
                "inference_logprobs": [[MASKED_LOGPROB] * 50 + [-5.0] * 150 for _ in tokens],
                "traceparent": f"00-{rng.getrandbits(128):032x}-{rng.getrandbits(64):016x}-01",
            }
            body = json.dumps(group).encode()
            connection.expect(request_bytes("POST", "/scored_data", body))
            groups_left -= 1


def span_us(folder: Path) -> float:
    """Return the microseconds of processor time of one span, from its start to the file."""
    tracer = Tracer(FileSink(folder / "many.jsonl"), {"service.name": "benchmark"})
    attributes = {"rl.group.id": 1, "rl.reward": 0.5, "gen_ai.request.model": "mock"}
    started = time.process_time()
    for _ in range(20):
        for _ in range(500):
            tracer.begin("rl.group", attributes).end()
        time.sleep(0.05)  # the thread keeps up
    tracer.close()
    return (time.process_time() - started) / 10_000 * 1e6


def measure(folder: Path, *, rounds: int, tokens: int) -> dict[str, list[Cost]]:
    """Return the costs of each program, one per round."""
    from trainer_parts.models import MODEL_SIZES, write_model

    load_tokenizer(folder / "tokenizer")
    write_model(folder / "model", MODEL_SIZES["tiny 1.5b"])
    found: dict[str, list[Cost]] = {"environment": [], "service": [], "trainer": []}

    def both(run: Callable[[], Any]) -> list[Any]:
        results = []
        for path in (None, folder / "spans.jsonl"):
            with tracing(path):
                results.append(run())
        return results

    with mock_engine(prompt_tokens=PROMPT_TOKENS, output_tokens=tokens) as engine_url:
        for _ in range(rounds):
            off, on = both(lambda: run_environment(folder, engine_url))
            found["environment"].append(Cost(off[0] * 1e3, on[0] * 1e3))
            found["service"].append(Cost(off[1] * 1e3, on[1] * 1e3))
            found["trainer"].append(Cost(*(1e3 * s for s in both(lambda: run_trainer(folder)))))
    return found


def table_of(found: dict[str, list[Cost]], *, one_span_us: float) -> Table:
    """Return the medians of all rounds as a table."""
    table = Table("program", "per", "off (ms)", "on (ms)", "ratio", "all ratios")
    units = {"environment": "group", "service": "group", "trainer": "step"}
    for name, costs in found.items():
        off, on = (statistics.median(values) for values in zip(*costs, strict=True))
        ratios = " ".join(f"{cost.ratio:.3f}" for cost in costs)
        table.add_row(
            name, units[name], f"{off:.2f}", f"{on:.2f}", f"{median_ratio(costs):.3f}", ratios
        )
    table.add_row("any", "span", "", f"{one_span_us / 1e3:.4f}", "", "")
    return table


def median_ratio(costs: Sequence[Cost]) -> float:
    """Return the median of the rounds' ratios."""
    return statistics.median(cost.ratio for cost in costs)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a completion")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--drain", type=int, metavar="PORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.drain is not None:
        drain(arguments.drain)
        return
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as name:
        found = measure(Path(name), rounds=arguments.rounds, tokens=arguments.tokens)
        one_span_us = span_us(Path(name))
    Console(width=120).print(table_of(found, one_span_us=one_span_us))
    if arguments.json:
        results = {name: [cost._asdict() for cost in costs] for name, costs in found.items()}
        text = json.dumps({**results, "span_us": one_span_us}, indent=2)
        arguments.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
