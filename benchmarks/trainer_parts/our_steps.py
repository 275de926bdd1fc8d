"""Optimizer steps of our trainer: `python -m trainer_parts.our_steps TASK`."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from atroposlib.scored_data import IGNORE_INDEX
from atroposlib.utils.run_log import MetricsLog
from example_trainer.batch import build_batch
from example_trainer.config import TrainingConfig
from example_trainer.model import create_optimizer, load_model_and_tokenizer
from example_trainer.training import Trainer, row_rules
from trainer_parts.workload import StepLog, Workload, sequences


def config_of(task: dict[str, Any], workload: Workload) -> TrainingConfig:
    """Return settings with which both trainers compute the same gradient."""
    return TrainingConfig(
        model_name=task["model"],
        device="cpu",
        optimizer="adamw",
        weight_decay=0.0,
        lr=1e-6,
        batch_size=workload.microbatch,
        gradient_accumulation_steps=workload.num_sequences // workload.microbatch,
        seq_len=workload.prompt_tokens + workload.most_tokens,
        advantage_std="sample",
        advantage_eps=1e-4,
        importance_correction="none",
        packing=task["packing"],
        gradient_checkpointing=task["gradient_checkpointing"],
        weight_bridge_mode="off",
        save_path=task["folder"],
    )


def groups_of(workload: Workload) -> list[dict[str, Any]]:
    """Return the batch as delivered by the service."""
    flat, size = sequences(workload), workload.group_size
    return [
        {
            "tokens": [s["prompt"] + s["completion"] for s in members],
            "masks": [[IGNORE_INDEX] * len(s["prompt"]) + s["completion"] for s in members],
            "scores": [s["score"] for s in members],
        }
        for members in (flat[start : start + size] for start in range(0, len(flat), size))
    ]


def main() -> None:
    """Run the steps and write the results."""
    task = json.loads(sys.argv[1])
    workload = Workload(**task["workload"])
    config = config_of(task, workload)
    model, tokenizer = load_model_and_tokenizer(config)
    trainer = Trainer(
        config,
        model=model,
        tokenizer=tokenizer,
        optimizer=create_optimizer(model, config),
        feed=None,  # type: ignore[arg-type]  # batches are passed to `train_on`
        weight_sync=None,
        run_log=MetricsLog(use_wandb=False, metrics_path=None),
    )
    groups, rules = groups_of(workload), row_rules(config)
    log = StepLog()
    for _ in range(workload.steps + 1):
        started, cpu_started = time.perf_counter(), time.process_time()
        batch = build_batch(
            groups,
            rules,
            microbatch_size=config.batch_size,
            pad_multiple=config.pad_multiple,
            packs=task["packing"] == "on",
        )
        log.norms.append(trainer.train_on(batch)["train/grad_norm"])
        log.times.append(time.perf_counter() - started)
        log.cpu_times.append(time.process_time() - cpu_started)
    log.write(task["result"], workload)


if __name__ == "__main__":
    main()
