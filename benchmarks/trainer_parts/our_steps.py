"""Optimizer steps of our trainer: `python -m trainer_parts.our_steps TASK`."""

from __future__ import annotations

import contextlib
from typing import Any

from atroposlib.utils.run_log import MetricsLog
from example_trainer.batch import Microbatch, build_batch
from example_trainer.config import TrainingConfig
from example_trainer.memory_plan import plan_memory
from example_trainer.model import create_optimizer, load_model_and_tokenizer
from example_trainer.policy import PreparedPolicy, prepare_policy, sizes_of, step_setup
from example_trainer.training import Trainer, row_rules
from trainer_parts.step_log import StepLog
from trainer_parts.tasks import Measured, StepTask, main_of
from trainer_parts.workload import groups_of

_LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {"packing": "off", "torch_compile": "off"},
    "packed": {"packing": "on", "shared_prefixes": "off", "torch_compile": "off"},
    "shared": {"packing": "on", "shared_prefixes": "on", "torch_compile": "off"},
    "compiled": {"packing": "on", "shared_prefixes": "off", "torch_compile": "on"},
    "default": {},
}

_METRICS = ("train/forward_time", "train/backward_time", "train/optimizer_time", "train/mfu")
"""Metrics of the last step that the trainer reports, `mfu` on GPUs whose peak is known."""


def config_of(task: StepTask) -> TrainingConfig:
    """Return settings with which both trainers compute the same gradient."""
    workload = task.workload
    return TrainingConfig(
        model_name=task.model,
        device=task.device,
        optimizer="adamw",
        weight_decay=0.0,
        lr=1e-6,
        batch_size=workload.pass_sequences,
        gradient_accumulation_steps=workload.num_sequences // workload.pass_sequences,
        microbatch_tokens=workload.pass_tokens,
        seq_len=workload.prompt_tokens + workload.most_tokens,
        max_grad_norm=1e9,
        advantage_std="sample",
        advantage_eps=1e-4,
        importance_correction="none",
        gradient_checkpointing=task.checkpointing,
        weight_bridge_mode="off",
        save_path=task.folder,
        **_LAYOUTS[task.layout],
    )


def measure(
    task: StepTask, *, first_step: contextlib.AbstractContextManager[Any] | None = None
) -> Measured:
    """Take the steps of a task; the first one, which warms up, runs in `first_step`."""
    config, workload = config_of(task), task.workload
    model, tokenizer = load_model_and_tokenizer(config)
    policy = prepare_policy(model, config)
    optimizer = create_optimizer(model, config)
    trainer = Trainer(
        config,
        model=model,
        tokenizer=tokenizer,
        optimizer=optimizer,
        feed=None,
        weight_sync=None,
        policy=policy,
        run_log=MetricsLog(use_wandb=False, metrics_path=None),
    )
    groups, rules = groups_of(workload), row_rules(config)
    log = StepLog(config.device)
    optimizer.register_step_pre_hook(lambda *_: log.keep_first_gradient(model))
    for step in range(workload.steps + 1):
        log.start()
        batch = build_batch(
            groups,
            rules,
            microbatch_size=config.batch_size,
            pad_multiple=config.pad_multiple,
            packs=policy.packs,
            max_tokens=config.microbatch_tokens,
            min_shared_fraction=policy.min_shared_fraction,
        )
        trainer._observer.take_groups(groups, step=0)
        with (first_step if step == 0 else None) or contextlib.nullcontext():
            metrics = trainer.train_on(batch)
        log.stop()
        metrics |= trainer._observer.metrics(metrics | {"train/compute_time": log.times[-1]})
    found = log.results(num_tokens=workload.num_tokens)
    largest = max(_computed_tokens(microbatch) for microbatch in batch.microbatches)
    return Measured(
        found
        | {
            "passes": len(batch.microbatches),
            "computed_tokens": batch.summary.num_computed_tokens,
            "padding": batch.summary.padding_fraction,
            "layout": policy.layout,
            "planned_mib": _planned_bytes(model, optimizer, policy, config, largest) / 2**20,
        }
        | {name.removeprefix("train/"): metrics[name] for name in _METRICS if name in metrics},
        log.gradient,
    )


def _computed_tokens(microbatch: Microbatch) -> int:
    tree = microbatch.tree
    return int(microbatch.tokens_BT.numel() if tree is None else tree.tokens_1M.numel())


def _planned_bytes(
    model: Any, optimizer: Any, policy: PreparedPolicy, config: TrainingConfig, pass_tokens: int
) -> float:
    """Return the memory that the trainer predicts for its largest pass."""
    sizes = sizes_of(model)
    setup = step_setup(
        config, sizes, optimizer=optimizer, packs=policy.packs, fuses=policy.scorer.fuses
    )
    return plan_memory(sizes, setup._replace(pass_tokens=pass_tokens)).total


if __name__ == "__main__":
    main_of(measure)
