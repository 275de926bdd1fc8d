"""Measure published weights: the size of deltas after real AdamW steps, and the time to apply them.

A random model takes optimizer steps of a policy gradient with float32 weights, as in training. Each
step is published from its checkpoint to a folder and followed, with all checks and flushes to disk.
`delta` is the mean size of a delta as a share of the weights, `xor` that of an exclusive or of the
bits, in byte planes and with the same compressor. `changed` is the share of elements that differ.
GB/s count the whole weights, per second of publishing and of following. The ratio is that of all
bytes that a follower fetches for the versions after the first one to whole copies.

Takes one to three minutes of one core.

Usage: python benchmarks/weights.py [--versions 6] [--hidden-size 512] [--layers 4] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from example_trainer.weights.following import Follower
from example_trainer.weights.format import pieces_of
from example_trainer.weights.local import WEIGHTS, LocalWeights, MappedWeights
from example_trainer.weights.publishing import PublishRules, WeightsPublisher
from example_trainer.weights.store import WeightStore
from example_trainer.weights.training_sync import stage_weights

_CASES = [
    ("bfloat16", 1e-6), ("bfloat16", 3e-6), ("bfloat16", 1e-5), ("bfloat16", 1e-4),
    ("float32", 1e-6), ("float32", 1e-5),
]  # fmt: skip
_TARGET = 0.10
_TARGET_LR = 1e-5


def random_model(*, hidden_size: int, layers: int, vocabulary: int = 4096) -> Any:
    """Return a Llama with the usual initialization."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=hidden_size // 128,
        max_position_embeddings=128,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def take_step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Take one step of a policy gradient on random tokens and advantages."""
    tokens_BT = torch.randint(0, model.config.vocab_size, (4, 32))
    advantages_B1 = torch.randn(4, 1)
    logprobs_BTV = model(input_ids=tokens_BT).logits[:, :-1].log_softmax(-1)
    chosen_BT = logprobs_BTV.gather(-1, tokens_BT[:, 1:, None]).squeeze(-1)
    (-(advantages_B1 * chosen_BT).mean()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def xor_bytes(before: Path, after: Path) -> int:
    """Return the compressed size of the exclusive or of two files of weights."""
    old, new = MappedWeights(before), MappedWeights(after)
    total = 0
    for piece in pieces_of(old.specs):
        bits = old.data(piece.start, piece.stop) ^ new.data(piece.start, piece.stop)
        for plane in range(piece.width):
            part = np.ascontiguousarray(bits[plane :: piece.width])
            total += len(zstandard.ZstdCompressor(level=1).compress(part.data))
    return total


def measure(folder: Path, *, dtype: str, lr: float, versions: int, shape: dict[str, int]) -> Any:
    """Publish and follow some versions; return the means."""
    model = random_model(**shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    for _ in range(2):  # the first steps of Adam are the largest
        take_step(model, optimizer)
    store = WeightStore(str(folder / "store"))
    local = LocalWeights(folder / "into")
    local.open()
    follower = Follower(store, local)
    rows: list[dict[str, float]] = []
    rules = PublishRules(anchor_share=100.0)
    with WeightsPublisher(store, folder / "mirror", rules=rules) as publisher:
        for version in range(versions + 1):
            staged = folder / f"step_{version}"
            stage_weights(model, staged, dtype=dtype, unties=False)
            report = publisher.publish(staged, version)
            before = local.current.resolve() / WEIGHTS
            started = time.perf_counter()
            follower.follow_once()
            follow_s = time.perf_counter() - started
            entry = report.entry
            if version:
                rows.append(
                    {
                        "changed": entry.changed_fraction or 0.0,
                        "delta_bytes": entry.delta.num_bytes if entry.delta else 0,
                        "xor_bytes": xor_bytes(before, local.current / WEIGHTS),
                        "publish_s": report.compare_s + report.upload_s,
                        "follow_s": follow_s,
                        "full_bytes": entry.weights_bytes,
                    }
                )
            take_step(model, optimizer)
    local.close()
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}


def show(results: list[dict[str, Any]]) -> None:
    """Print the table, and the ratio for bfloat16 at the learning rates of RL."""
    console = Console()
    table = Table(
        "type", "lr", "changed", "delta", "xor", "MB full", "MB delta",
        "publish s", "GB/s", "follow s", "GB/s",
    )  # fmt: skip
    for row in results:
        full = row["full_bytes"]
        table.add_row(
            row["dtype"],
            f"{row['lr']:g}",
            f"{row['changed']:.2%}",
            f"{row['delta_bytes'] / full:.2%}",
            f"{row['xor_bytes'] / full:.2%}",
            f"{full / 1e6:.1f}",
            f"{row['delta_bytes'] / 1e6:.2f}",
            f"{row['publish_s']:.3f}",
            f"{full / row['publish_s'] / 1e9:.2f}",
            f"{row['follow_s']:.3f}",
            f"{full / row['follow_s'] / 1e9:.2f}",
        )
    console.print(table)
    for row in results:
        if row["dtype"] == "bfloat16" and row["lr"] <= _TARGET_LR:
            ratio = row["delta_bytes"] / row["full_bytes"]
            verdict = "reached" if ratio <= _TARGET else "missed"
            console.print(f"lr {row['lr']:g}: {ratio:.2%} of whole copies, at most 10 %: {verdict}")


def main() -> None:
    """Run all cases."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--versions", type=int, default=6)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    disable_progress_bar()
    shape = {"hidden_size": args.hidden_size, "layers": args.layers}
    results = []
    for dtype, lr in _CASES:
        with tempfile.TemporaryDirectory() as folder:
            found = measure(Path(folder), dtype=dtype, lr=lr, versions=args.versions, shape=shape)
        results.append({"dtype": dtype, "lr": lr, **found})
    show(results)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
