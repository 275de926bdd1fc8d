"""Share of bfloat16 weights that an optimizer step changes, and the compressed size of the change.

Trainer weights are float32 and AdamW's updates are real; an engine receives them as bfloat16. Each
step is compared with the one before it: elements and bytes that differ, and the compressed size of
the exclusive or of both versions.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from atroposlib.utils.run_log import MetricsLog
from example_trainer.batch import build_batch
from example_trainer.config import TrainingConfig
from example_trainer.model import create_optimizer, load_model_and_tokenizer
from example_trainer.training import Trainer, row_rules
from h200_parts.records import PartTask, Records
from trainer_parts.models import MODEL_SIZES, write_model
from trainer_parts.workload import Workload, groups_of

LEARNING_RATES = (1e-6, 1e-5, 1e-4)
_STEPS = 4
_WORKLOAD = Workload(
    "weights", 4, prompt_tokens=256, median_tokens=512, spread=0.5, most_tokens=1024,
    pass_tokens=16384,
)  # fmt: skip


class Change(NamedTuple):
    """Difference of two versions of the weights."""

    changed_elements: float
    changed_bytes: float
    compressed: float
    """Compressed exclusive or, as a share of the bytes of the weights."""
    gb_per_s: float
    """Weights compressed per second."""


def part(task: PartTask, records: Records) -> None:
    """Train from the same weights with each learning rate."""
    size = MODEL_SIZES["tiny 0.6b" if task.is_tiny else "0.6b"]
    model = write_model(Path(task.folder) / "model", size, device=task.device, dtype="bfloat16")
    workload = _WORKLOAD._replace(vocabulary=size.vocabulary)
    if task.is_tiny:
        workload = workload._replace(
            num_groups=1, prompt_tokens=4, median_tokens=8, most_tokens=16, pass_tokens=256
        )
    name, compress = _compressor()
    records.figure("compression", name, "")
    for lr in LEARNING_RATES:
        with records.case(f"lr {lr:g}"):
            _measure(task, records, model, workload, lr=lr, compress=compress)


def _measure(
    task: PartTask,
    records: Records,
    folder: Path,
    workload: Workload,
    *,
    lr: float,
    compress: Callable[[bytes], bytes],
) -> None:
    config = _config(task, folder, workload, lr=lr)
    model, tokenizer = load_model_and_tokenizer(config)
    trainer = Trainer(
        config,
        model=model,
        tokenizer=tokenizer,
        optimizer=create_optimizer(model, config),
        feed=None,
        weight_sync=None,
        run_log=MetricsLog(use_wandb=False, metrics_path=None),
    )
    before = _bfloat16_bits(model)
    for step in range(1, _STEPS + 1):
        batch = build_batch(
            groups_of(workload._replace(seed=step)),
            row_rules(config),
            microbatch_size=config.batch_size,
            max_tokens=config.microbatch_tokens,
        )
        metrics = trainer.train_on(batch)
        after = _bfloat16_bits(model)
        change = change_of(before, after, compress)
        case = f"lr {lr:g} / step {step}"
        records.figure("changed elements", change.changed_elements, "of all", case=case)
        records.figure("changed bytes", change.changed_bytes, "of all", case=case)
        records.figure("compressed change", change.compressed, "of all bytes", case=case)
        records.figure("compression rate", change.gb_per_s, "GB/s", case=case)
        records.check(
            "the step trained",
            holds=metrics["train/grad_norm"] > 0 and not metrics["train/skipped_steps"],
            detail=f"gradient norm {metrics['train/grad_norm']:.3g}",
            case=case,
        )
        before = after


def _config(task: PartTask, model: Path, workload: Workload, *, lr: float) -> TrainingConfig:
    return TrainingConfig(
        model_name=str(model),
        device=task.device,
        optimizer="adamw",
        weight_decay=0.0,
        lr=lr,
        train_dtype="mixed" if task.on_gpu else "float32",
        batch_size=workload.pass_sequences,
        microbatch_tokens=workload.pass_tokens,
        seq_len=workload.prompt_tokens + workload.most_tokens,
        importance_correction="none",
        packing="off",
        weight_bridge_mode="off",
        save_path=task.folder,
    )


def _bfloat16_bits(model: Any) -> list[torch.Tensor]:
    """Return the weights as an engine gets them, as bits on the CPU."""
    return [
        parameter.detach().to(torch.bfloat16).view(torch.int16).flatten().cpu()
        for parameter in model.parameters()
    ]


def change_of(
    before: Iterable[torch.Tensor],
    after: Iterable[torch.Tensor],
    compress: Callable[[bytes], bytes],
) -> Change:
    """Compare two versions, tensor by tensor."""
    num_elements = num_changed = num_changed_bytes = compressed_bytes = 0
    seconds = 0.0
    for old, new in zip(before, after, strict=True):
        different = old.bitwise_xor(new)
        num_elements += different.numel()
        num_changed += int(different.count_nonzero())
        bits = different.view(torch.uint8)
        num_changed_bytes += int(bits.count_nonzero())
        started = time.perf_counter()
        compressed_bytes += len(compress(bits.numpy().tobytes()))
        seconds += time.perf_counter() - started
    num_bytes = 2 * num_elements
    return Change(
        num_changed / num_elements,
        num_changed_bytes / num_bytes,
        compressed_bytes / num_bytes,
        num_bytes / max(seconds, 1e-9) / 1e9,
    )


def _compressor() -> tuple[str, Callable[[bytes], bytes]]:
    try:
        import zstandard
    except ImportError:
        return "zlib, level 1", lambda data: zlib.compress(data, 1)
    return "zstd, level 1", zstandard.ZstdCompressor(level=1).compress
