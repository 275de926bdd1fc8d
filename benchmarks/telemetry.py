"""Processor time of tracing: environments, the service and the trainer with spans and without.

    GSM8K         mock engine ─► a request for 8 completions, scored ─► service
    environment   mock engine ─► 8 requests, nothing to score ─► service
    service       receives and delivers such groups over HTTP, in a thread of this process
    trainer       optimizer steps of a small model on 4 groups of 8 completions

Engine and service of the first two run in other processes. The second environment is the least that
one can do: its completions are not even decoded. Blocks without and with spans alternate within one
process, so that both see the same machine; each second pair begins with the spans, so that a slow
change of the process cancels out. A block with spans has a tracer of its own, which writes a file
and is closed at the end of the block: its time includes recording, encoding and writing. The ratio
is the median over pairs of blocks.

As in the programs, 200 spans per second are recorded, without the allowance of the first ten
seconds of a run. `--all` records all, as OTEL_TRACES_SAMPLER=always_on does.

Usage: python benchmarks/telemetry.py [--only trainer] [--pairs 12] [--all] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
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
from atroposlib.utils.tracing import SPANS_PER_SECOND, FileSink, SpanLimit, Tracer
from inference_parts.mock_engine import mock_engine
from inference_parts.paths import load_tokenizer
from service_parts.connection import Connection, request_bytes
from service_parts.server_process import end_process, run_api
from service_parts.workload import register_trainer

GROUP_SIZE = 8
PROMPT_TOKENS = 64
GROUPS_PER_BATCH = 4
GROUPS_PER_BLOCK = 40
POSTS_PER_BLOCK = 300
STEPS_PER_BLOCK = 2
DRAIN_PAUSE_S = 0.05


class Cost(NamedTuple):
    """Milliseconds of processor time per group or step, without and with spans."""

    off_ms: float
    on_ms: float

    @property
    def ratio(self) -> float:
        return self.on_ms / self.off_ms


class SteadyLimit(SpanLimit):
    """The limit of a program that has run for a while; its clock stands still while paused.

    Args:
        is_on: whether there is a limit; if not, all traces are recorded.

    Attributes:
        num_asked: traces so far.
        num_admitted: those of them that are recorded.
    """

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on
        self._elapsed_s = 0.0
        self._resumed: float | None = None
        self.num_asked = self.num_admitted = 0
        super().__init__(SPANS_PER_SECOND, clock=self._measured_s)
        while super().admits():
            self.spend()

    def _measured_s(self) -> float:
        now = time.monotonic()
        return self._elapsed_s + (0.0 if self._resumed is None else now - self._resumed)

    def pause(self, *, is_paused: bool) -> None:
        self._elapsed_s = self._measured_s()
        self._resumed = None if is_paused else time.monotonic()

    def admits(self) -> bool:
        if self._resumed is None:
            return False
        is_admitted = super().admits() or not self._is_on
        self.num_asked += 1
        self.num_admitted += is_admitted
        return is_admitted


class Options(NamedTuple):
    """Settings of a measurement.

    Attributes:
        folder: folder of all files.
        num_pairs: pairs of blocks.
        tokens: tokens of a completion.
        limit: limits the spans per second.
    """

    folder: Path
    num_pairs: int
    tokens: int
    limit: SteadyLimit


class Blocks:
    """Alternates blocks without and with spans; the first two are not measured.

    Args:
        set_tracer: called with the tracer of each block, None for one without spans.
        per_block: groups or steps of a block.
        options: the limit, and the folder of the files of spans.
    """

    def __init__(
        self, set_tracer: Callable[[Tracer | None], None], *, per_block: int, options: Options
    ) -> None:
        self.costs: list[Cost] = []
        self._limit = options.limit
        self._set_tracer = set_tracer
        self._per_block = per_block
        self._folder = options.folder
        self._times_ms: list[float] = []
        self._num_done = 0
        self._begin()

    def _begin(self) -> None:
        is_on = len(self._times_ms) % 4 in (1, 2)
        sink = FileSink(self._folder / "spans.jsonl")
        resource = {"service.name": "benchmark"}
        self._tracer = Tracer(sink, resource, limit=self._limit) if is_on else None
        self._limit.pause(is_paused=not is_on)
        self._set_tracer(self._tracer)
        self._started = time.process_time()

    def add(self) -> None:
        """Count a group or a step that is done."""
        self._num_done += 1
        if self._num_done % self._per_block:
            return
        if self._tracer is not None:
            self._tracer.close()
        self._times_ms.append((time.process_time() - self._started) / self._per_block * 1e3)
        num_blocks = len(self._times_ms)
        if num_blocks % 2 == 0 and num_blocks > 2:
            first, second = self._times_ms[-2:]
            self.costs.append(Cost(second, first) if num_blocks % 4 == 0 else Cost(first, second))
        self._begin()


async def _serve(env: Any, blocks: Blocks, num_pairs: int) -> None:
    serving = asyncio.create_task(env.env_manager())
    while len(blocks.costs) < num_pairs and not serving.done():  # noqa: ASYNC110 - no event
        await asyncio.sleep(0.05)
    serving.cancel()
    await asyncio.wait({serving})
    if not serving.cancelled():
        serving.result()


def measure_gsm8k(options: Options) -> list[Cost]:
    """Serve GSM8K, which renders a prompt and checks the number in each completion."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "environments"))
    from gsm8k_server import SAMPLE, GSM8kEnv

    settings = {"dataset_path": str(SAMPLE), "num_score_workers": 1}
    return _measure_served(GSM8kEnv, settings, options, choices=GROUP_SIZE)


def measure_environment(options: Options) -> list[Cost]:
    """Serve an environment that rolls out one item at a time."""
    from scheduler_parts.environment_process import BenchmarkEnv

    return _measure_served(BenchmarkEnv, {}, options)


def _measure_served(
    env_class: type[Any], settings: dict[str, Any], options: Options, *, choices: int = 1
) -> list[Cost]:
    from atroposlib.envs.base import APIServerConfig
    from atroposlib.envs.running import favour_event_loop

    class CountedEnv(env_class):  # type: ignore[misc]
        async def cleanup(self) -> None:  # called once an item is done
            blocks.add()

    folder, num_pairs, tokens, _ = options
    load_tokenizer(folder / "tokenizer").save_pretrained(folder / "tokenizer")
    engine = mock_engine(prompt_tokens=PROMPT_TOKENS, output_tokens=tokens, choices=choices)
    with engine as engine_url, drained_service() as service_url:
        config = env_class.env_config_cls(
            group_size=GROUP_SIZE,
            batch_size=GROUP_SIZE * GROUPS_PER_BATCH,
            max_num_workers=1,
            total_steps=num_pairs * GROUPS_PER_BLOCK,  # more than are served
            max_batches_offpolicy=100,
            max_token_length=PROMPT_TOKENS + 2 * tokens,
            steps_per_eval=0,
            tokenizer_name=str(folder / "tokenizer"),
            rollout_server_url=service_url,
            use_wandb=False,
            ensure_scores_are_not_same=False,
            metrics_path=str(folder / "metrics.jsonl"),
            **settings,
        )
        server = APIServerConfig(
            model_name="mock", base_url=f"{engine_url}/v1", server_type="vllm", api_key="x"
        )
        env = CountedEnv(config, [server])

        def set_tracer(tracer: Tracer | None) -> None:
            env._serving_loop._tracer = tracer

        favour_event_loop()  # as the commands of environments do
        blocks = Blocks(set_tracer, per_block=GROUPS_PER_BLOCK, options=options)
        asyncio.run(_serve(env, blocks, num_pairs))
    return blocks.costs


@contextmanager
def drained_service() -> Iterator[str]:
    """Run a service with a trainer that discards batches, in other processes; yields its URL."""
    with run_api("--store", "memory", core=None) as service:
        with Connection(service.port) as connection:
            register_trainer(connection, GROUP_SIZE * GROUPS_PER_BATCH)
        draining = subprocess.Popen([sys.executable, __file__, "--drain", str(service.port)])
        try:
            yield service.url
        finally:
            end_process(draining)


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


def measure_service(options: Options) -> list[Cost]:
    """Post traced groups to a service in a thread of this process, and take them again."""
    from atroposlib.api.settings import ApiSettings
    from atroposlib.api.spans import GroupSpans
    from atroposlib.cli.run_api import _server

    folder, num_pairs, tokens, _ = options
    settings = ApiSettings(store="sqlite", data_dir=folder, run_name="run")
    server = _server(settings, "127.0.0.1", 0, is_announced=False)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    while not server.started:
        thread.join(0.05)
    run = server.config.app.state.run

    def set_tracer(tracer: Tracer | None) -> None:
        spans = None if tracer is None else GroupSpans(tracer, run.state, replica=run.replica)
        run.on_applied = None if spans is None else spans.note

    request = request_bytes("POST", "/scored_data", _group(random.Random(0), tokens))
    try:
        with Connection(server.servers[0].sockets[0].getsockname()[1]) as connection:
            register_trainer(connection, GROUP_SIZE)
            blocks = Blocks(set_tracer, per_block=POSTS_PER_BLOCK, options=options)
            while len(blocks.costs) < num_pairs:
                connection.expect(request)
                connection.expect(request_bytes("GET", "/batch"))
                blocks.add()
    finally:
        server.should_exit = True
        thread.join()
    return blocks.costs


def measure_trainer(options: Options) -> list[Cost]:
    """Take steps of a small model."""
    from example_trainer.config import TrainingConfig
    from example_trainer.run_log import StepSpans
    from example_trainer.trainers import train
    from example_trainer.training import Trainer
    from trainer_parts.models import MODEL_SIZES, write_model

    folder, num_pairs, _, _ = options
    write_model(folder / "model", MODEL_SIZES["tiny 1.5b"])
    run_step = Trainer._run_step
    blocks: list[Blocks] = []

    def counted_step(trainer: Trainer) -> None:
        def set_tracer(tracer: Tracer | None) -> None:
            trainer._spans = None if tracer is None else StepSpans(tracer, run_id="benchmark")

        if not blocks:
            blocks.append(Blocks(set_tracer, per_block=STEPS_PER_BLOCK, options=options))
        run_step(trainer)
        blocks[0].add()

    num_steps = 2 * STEPS_PER_BLOCK * (num_pairs + 1)
    with run_api("--store", "memory", core=None) as service:
        config = TrainingConfig(
            model_name=str(folder / "model"),
            device="cpu",
            training_steps=num_steps,
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
        poster = threading.Thread(
            target=_post_groups, args=(service.port, GROUPS_PER_BATCH * num_steps), daemon=True
        )
        poster.start()
        Trainer._run_step = counted_step  # type: ignore[method-assign, assignment]
        try:
            train(config)
        finally:
            Trainer._run_step = run_step  # type: ignore[method-assign]
            poster.join()
    return blocks[0].costs


def _post_groups(port: int, num_groups: int) -> None:
    request = request_bytes("POST", "/scored_data", _group(random.Random(0), 150, prompt_tokens=50))
    with Connection(port) as connection:
        while json.loads(connection.call(request_bytes("GET", "/info")).body)["batch_size"] < 1:
            time.sleep(0.05)
        for _ in range(num_groups):
            connection.expect(request)


def _group(rng: random.Random, num_tokens: int, *, prompt_tokens: int = PROMPT_TOKENS) -> bytes:
    length = prompt_tokens + num_tokens
    tokens = [[rng.randrange(3, 300) for _ in range(length)] for _ in range(GROUP_SIZE)]
    masked, logprobs = [MASKED_LOGPROB] * prompt_tokens, [-rng.random() for _ in range(num_tokens)]
    group = {
        "tokens": tokens,
        "masks": [[IGNORE_INDEX] * prompt_tokens + row[prompt_tokens:] for row in tokens],
        "scores": [rng.random() for _ in tokens],
        "inference_logprobs": [masked + logprobs for _ in tokens],
        "traceparent": f"00-{rng.getrandbits(128):032x}-{rng.getrandbits(64):016x}-01",
    }
    return json.dumps(group).encode()


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


class Found(NamedTuple):
    """The pairs of blocks of one program, and the share of its traces that was recorded."""

    costs: list[Cost]
    recorded: float


def table_of(found: dict[str, Found], *, one_span_us: float) -> Table:
    """Return the medians of all pairs of blocks as a table."""
    columns = (
        "recorded",
        "off (ms)",
        "on (ms)",
        "ratio",
        "95 % interval of the ratio",
        "quartiles",
    )
    table = Table("program", "per", *columns)
    units = {"GSM8K": "group", "environment": "group", "service": "group", "trainer": "step"}
    for name, (costs, recorded) in found.items():
        off, on = (statistics.median(values) for values in zip(*costs, strict=True))
        ratios = sorted(cost.ratio for cost in costs)
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        table.add_row(
            name,
            units[name],
            f"{recorded:.0%}",
            f"{off:.3f}",
            f"{on:.3f}",
            f"{middle:.3f}",
            "{:.3f} to {:.3f}".format(*_interval_of_median(ratios)),
            f"{low:.3f} to {high:.3f}",
        )
    table.add_row("any", "span", "", "", f"{one_span_us / 1e3:.4f}", "", "", "")
    return table


def _interval_of_median(ordered: Sequence[float]) -> tuple[float, float]:
    """Return bounds of the median with 95 % confidence, whatever the distribution.

    The ranks are those of the binomial distribution, approximated by the normal one.
    """
    distance = 0.98 * math.sqrt(len(ordered))
    first = max(0, math.floor(len(ordered) / 2 - distance))
    return ordered[first], ordered[len(ordered) - 1 - first]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=("GSM8K", "environment", "service", "trainer"))
    parser.add_argument("--pairs", type=int, default=12, help="pairs of blocks")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a completion")
    parser.add_argument("--all", action="store_true", help="record all traces")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--drain", type=int, metavar="PORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.drain is not None:
        drain(arguments.drain)
        return
    logging.disable(logging.WARNING)
    measures = {
        "GSM8K": measure_gsm8k,
        "environment": measure_environment,
        "service": measure_service,
        "trainer": measure_trainer,
    }
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for program in [arguments.only] if arguments.only else list(measures):
            limit = SteadyLimit(is_on=not arguments.all)
            options = Options(folder, arguments.pairs, arguments.tokens, limit)
            costs = measures[program](options)
            found[program] = Found(costs, limit.num_admitted / limit.num_asked)
        one_span_us = span_us(folder)
    Console(width=120).print(table_of(found, one_span_us=one_span_us))
    if arguments.json:
        results = {
            program: {"recorded": recorded, "pairs": [cost._asdict() for cost in costs]}
            for program, (costs, recorded) in found.items()
        }
        text = json.dumps({**results, "span_us": one_span_us}, indent=2)
        arguments.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
