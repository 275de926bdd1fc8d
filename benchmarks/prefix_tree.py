"""Measure an optimizer step whose groups share a prompt: padded, packed, and as a prefix tree.

Each contender is a separate process with the same model, groups and settings of the trainer, except
`packing`, `shared_prefixes` and the number of sequences of a forward pass. Eight completions follow
one prompt. Two batches have completions of equal length: prompts of 384 tokens with completions of
512, and of 768 with 256. Their sequences have 1.60 and 2.91 times the tokens of the tree, which
bounds the ratio to packed rows. A part of the step does not depend on prompts, such as the output
layer. In the other two the lengths are log-normal with the same mean, as sampled completions have
different lengths: padded rows compute the padding as well.

Tokens per second count the tokens of all sequences for every contender. The median step counts and
is shown with its CPU time, since other processes may use the machine. Peak memory is the maximum
resident set during the steps, without what was used before them. FLOPs are those of forward and
backward pass as torch counts them, with the pairs of tokens that attention computes. The difference
of the first gradient is relative to that of the padded sequences.

The output layer has 8 % of the weights of the blocks, as in a model of 7B parameters. Takes about
six minutes of one core.

Usage: python benchmarks/prefix_tree.py [--threads 1] [--steps 2] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.flop_counter import FlopCounterMode

from trainer_parts import our_steps
from trainer_parts.models import ModelSize, write_model
from trainer_parts.step_log import gradient_gap
from trainer_parts.tasks import Measured, StepTask, run_in_process, write_measured
from trainer_parts.workload import Workload

_SAME_GRADIENT = 1e-4


_MODEL = ModelSize("qwen2", 384, 1152, 3, 6, 3, 64, 1152, 2048)


class Contender(NamedTuple):
    """Settings of the trainer that differ."""

    layout: str
    sequences_per_pass: int


_CONTENDERS = {
    "padded": Contender("padded", 8),
    "packed": Contender("packed", 8),
    "packed, 2 a pass": Contender("packed", 2),
    "tree": Contender("shared", 8),
}


class GroupShape(NamedTuple):
    """Lengths of a group, and how much faster the tree should be than the other layouts."""

    prompt_tokens: int
    completion_tokens: int
    """Mean length of a completion."""
    spread: float
    """Standard deviation of the logarithm of the length."""
    target: float


_BATCHES = {
    "P:R = 3:4, equal lengths": GroupShape(384, 512, 0.0, 1.6),
    "P:R = 3:4, log-normal lengths": GroupShape(384, 512, 0.5, 1.6),
    "P:R = 3:1, equal lengths": GroupShape(768, 256, 0.0, 2.5),
    "P:R = 3:1, log-normal lengths": GroupShape(768, 256, 0.5, 2.5),
}


def workload_of(shape: GroupShape, steps: int) -> Workload:
    """Return one group of eight completions."""
    return Workload(
        "one group",
        num_groups=1,
        prompt_tokens=shape.prompt_tokens,
        median_tokens=round(shape.completion_tokens * math.exp(-(shape.spread**2) / 2)),
        most_tokens=2 * shape.completion_tokens,
        spread=shape.spread,
        vocabulary=_MODEL.vocabulary,
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


def run_contender(text: str) -> None:
    """Run the steps of one contender in this process and write its results."""
    task = StepTask.from_json(text)
    with_flops = FlopCounterMode(display=False, custom_mapping=_COUNTED)
    found = our_steps.measure(task, first_step=with_flops)
    flops = {"gflops": with_flops.get_total_flops() / 1e9}
    write_measured(task, Measured(found.figures | flops, found.gradient))


def measure(folder: Path, workload: Workload, contender: Contender, threads: int) -> Measured:
    """Run a contender in another process; return its results and first gradient."""
    work = folder / "work"
    work.mkdir(exist_ok=True)
    task = StepTask(
        model=str(folder / "model"),
        folder=str(work),
        workload=workload._replace(pass_sequences=contender.sequences_per_pass),
        layout=contender.layout,
        checkpointing=False,
    )
    return run_in_process(task, [str(Path(__file__).resolve()), "--contender"], threads=threads)


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
        ("padded rows", [flat["padded"]]),
        ("the best layout, 8 a pass as the tree", [flat["padded"], flat["packed"]]),
        ("the best layout, any number a pass", list(flat.values())),
    ):
        best = max(rivals, key=lambda found: found["tokens_per_s"])
        console.print(
            f"tree: {tree['tokens_per_s'] / best['tokens_per_s']:.2f} x the tokens/s of "
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
        run_contender(arguments.contender)
        return
    everything = {}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "model", _MODEL)
        for name, shape in _BATCHES.items():
            workload = workload_of(shape, arguments.steps)
            results: dict[str, dict[str, Any]] = {}
            expected: dict[str, Any] = {}
            for contender, settings in _CONTENDERS.items():
                found = measure(Path(folder), workload, settings, arguments.threads)
                expected = expected or found.gradient
                gap = gradient_gap(found.gradient, expected)
                results[contender] = {**found.figures, "gradient_difference": gap.relative}
            print(workload.describe())
            show(name, shape.target, results)
            everything[name] = results
    if arguments.json:
        arguments.json.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
