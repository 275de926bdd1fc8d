"""Measure an optimizer step whose groups share a prompt: padded, packed, and as a prefix tree.

Each contender is a separate process with the same model, groups and settings of the trainer, except
`packing`, `shared_prefixes` and the number of sequences of a forward pass. There are two batches:
prompts of 384 tokens with completions of 512, and of 768 with 256, eight of a prompt. The sequences
have 1.60 and 2.91 times the tokens of the tree, which bounds the ratio of the FLOPs. A part of the
step does not depend on prompts, such as the output layer.

Tokens per second count the tokens of all sequences for every contender. The fastest step counts and
is shown with its CPU time, since other processes may use the machine. Peak memory is the maximum
resident set during the steps, without what was used before them. FLOPs are those of forward and
backward pass as torch counts them, with the pairs of tokens that attention computes. The difference
of the first gradient is relative to that of the padded sequences.

The output layer has 8 % of the weights of the blocks, as in a model of 7B parameters. Takes about
four minutes of one core.

Usage: python benchmarks/prefix_tree.py [--threads 1] [--steps 2] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.flop_counter import FlopCounterMode
from trainer_parts.our_steps import config_of, groups_of
from trainer_parts.workload import StepLog, Workload, write_model

from atroposlib.utils.run_log import MetricsLog
from example_trainer.batch import build_batch
from example_trainer.model import create_optimizer, load_model_and_tokenizer
from example_trainer.training import Trainer, row_rules

_SAME_GRADIENT = 1e-4


class Contender(NamedTuple):
    """Settings of the trainer that differ."""

    packing: str
    shared_prefixes: str
    sequences_per_pass: int


_CONTENDERS = {
    "padded": Contender("off", "off", 8),
    "padded, 2 a pass": Contender("off", "off", 2),
    "packed": Contender("on", "off", 8),
    "packed, 2 a pass": Contender("on", "off", 2),
    "tree": Contender("on", "on", 8),
}
_BATCHES = {"P:R = 3:4": (384, 512, 1.6), "P:R = 3:1": (768, 256, 2.5)}
"""Tokens of prompts and completions, and the target of the speed."""


def workload_of(prompt_tokens: int, completion_tokens: int, steps: int) -> Workload:
    """Return one group of eight completions of equal length, and the model."""
    return Workload(
        num_groups=1,
        prompt_tokens=prompt_tokens,
        median_tokens=completion_tokens,
        most_tokens=completion_tokens,
        spread=0.0,
        vocabulary=2048,
        hidden=512,
        layers=4,
        steps=steps,
    )


def _attention_pairs(query: Any, key: Any, is_causal: bool) -> int:
    batch, heads, num_queries, size = query
    pairs = num_queries * key[2] - (num_queries * (num_queries - 1) // 2 if is_causal else 0)
    return batch * heads * size * pairs


def _forward_flops(
    query: Any, key: Any, value: Any, dropout: Any = 0.0, is_causal: bool = False, **_: Any
) -> int:
    return 4 * _attention_pairs(query, key, is_causal)


def _backward_flops(
    grad: Any, query: Any, key: Any, value: Any, out: Any, normalizer: Any, dropout: Any,
    is_causal: bool, **_: Any,
) -> int:  # fmt: skip
    return 10 * _attention_pairs(query, key, is_causal)


_COUNTED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _forward_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward_flops,
}
"""FLOPs of the kernels of attention on a CPU, which torch's counter does not know."""


def run_contender(task: dict[str, Any]) -> None:
    """Run the steps of one contender in this process and write its results."""
    workload, contender = Workload(**task["workload"]), Contender(*task["contender"])
    size = contender.sequences_per_pass
    config = config_of(
        {**task, "packing": contender.packing, "gradient_checkpointing": False},
        workload._replace(microbatch=size),
    ).model_copy(update={"shared_prefixes": contender.shared_prefixes, "max_grad_norm": 1e9})
    model, tokenizer = load_model_and_tokenizer(config)
    optimizer = create_optimizer(model, config)
    trainer = Trainer(
        config,
        model=model,
        tokenizer=tokenizer,
        optimizer=optimizer,
        feed=None,
        weight_sync=None,
        run_log=MetricsLog(use_wandb=False, metrics_path=None),
    )
    groups, rules = groups_of(workload), row_rules(config)
    log, flops, num_computed = StepLog(), 0, 0
    for step in range(workload.steps + 1):
        started, cpu_started = time.perf_counter(), time.process_time()
        batch = build_batch(
            groups,
            rules,
            microbatch_size=size,
            packs=contender.packing == "on",
            min_shared_fraction=0.0 if contender.shared_prefixes == "on" else None,
        )
        if step == 0:
            apply = optimizer.step
            optimizer.step = lambda: torch.save(  # type: ignore[method-assign]
                torch.cat([p.grad.flatten() for p in model.parameters()]), task["gradient"]
            )
            with FlopCounterMode(display=False, custom_mapping=_COUNTED) as counter:
                log.norms.append(trainer.train_on(batch)["train/grad_norm"])
            flops, num_computed = counter.get_total_flops(), batch.summary.num_computed_tokens
            optimizer.step = apply  # type: ignore[method-assign]
        else:
            trainer.train_on(batch)
        log.times.append(time.perf_counter() - started)
        log.cpu_times.append(time.process_time() - cpu_started)
    log.write(task["result"], workload)
    found = json.loads(Path(task["result"]).read_text())
    found |= {"gflops": flops / 1e9, "computed_tokens": num_computed}
    Path(task["result"]).write_text(json.dumps(found))


def measure(
    folder: Path, workload: Workload, contender: Contender, threads: int
) -> tuple[dict[str, Any], torch.Tensor]:
    """Run a contender in another process; return its results and first gradient."""
    task = {
        "model": str(folder / "model"),
        "folder": str(folder / "work"),
        "workload": workload._asdict(),
        "contender": list(contender),
        "result": str(folder / "result.json"),
        "gradient": str(folder / "gradient.pt"),
    }
    done = subprocess.run(
        [sys.executable, __file__, "--contender", json.dumps(task)],
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{contender} failed:\n{done.stderr[-4000:]}")
    return json.loads(Path(task["result"]).read_text()), torch.load(task["gradient"])


def show(name: str, target: float, results: dict[str, dict[str, Any]]) -> None:
    """Print the table of one batch and the ratios to the flat contenders."""
    console = Console()
    columns = ("tokens/s", "step s", "CPU s", "peak MiB", "GFLOP", "tokens", "gradient differs by")
    table = Table(name, *columns)
    for contender, found in results.items():
        table.add_row(
            contender,
            f"{found['tokens_per_s']:,.0f}",
            f"{found['step_s']:.2f}",
            f"{found['step_cpu_s']:.2f}",
            f"{found['peak_above_model_mib']:,.0f}",
            f"{found['gflops']:,.0f}",
            f"{found['computed_tokens']:,}",
            f"{found['gradient_difference']:.1e}",
        )
    console.print(table)
    tree = results["tree"]
    flat = {key: value for key, value in results.items() if key != "tree"}
    for title, rivals in (
        ("flat, 8 a pass as the tree", [flat["padded"], flat["packed"]]),
        ("flat, any number a pass", list(flat.values())),
    ):
        best = max(rivals, key=lambda found: found["tokens_per_s"])
        console.print(
            f"tree: {tree['tokens_per_s'] / best['tokens_per_s']:.2f} x the tokens/s of the best "
            f"{title} (target {target}), "
            f"{min(f['step_cpu_s'] for f in rivals) / tree['step_cpu_s']:.2f} x by CPU time; "
            f"{min(f['gflops'] for f in rivals) / tree['gflops']:.2f} x fewer FLOPs, "
            f"{tree['peak_above_model_mib'] / best['peak_above_model_mib']:.2f} x its memory"
        )
    if not all(f["gradient_difference"] < _SAME_GRADIENT for f in results.values()):
        console.print("[red]the gradients differ; the results are not comparable")


def main() -> None:
    """Measure every contender on every batch and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2, help="timed optimizer steps")
    parser.add_argument("--threads", type=int, default=1, help="threads of each contender")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contender:
        run_contender(json.loads(arguments.contender))
        return
    everything = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (prompt_tokens, completion_tokens, target) in _BATCHES.items():
            workload = workload_of(prompt_tokens, completion_tokens, arguments.steps)
            write_model(Path(folder) / "model", workload)
            results, expected = {}, None
            for contender, settings in _CONTENDERS.items():
                found, gradient = measure(Path(folder), workload, settings, arguments.threads)
                expected = gradient if expected is None else expected
                found["gradient_difference"] = float((gradient - expected).norm() / expected.norm())
                results[contender] = found
            print(workload.describe())
            show(name, target, results)
            everything[name] = results
    if arguments.json:
        arguments.json.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
