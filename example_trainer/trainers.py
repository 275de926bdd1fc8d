"""Complete runs: train a model from a config, and end every process that was started."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from atroposlib.utils.run_log import MetricsLog
from atroposlib.utils.text import mask_secrets
from atroposlib.utils.writable import (
    lock_file,
    require_writable_file,
    require_writable_folder,
)
from example_trainer.api import (
    SMALLEST_LIMIT_BYTES,
    BatchJournal,
    BatchService,
    DurableFeed,
    TrainingRecord,
    TrajectoryFeed,
    checkpoint_bytes,
    open_client,
)
from example_trainer.checkpointing import (
    find_intact_checkpoint,
    load_feed_state,
    load_step_metrics,
    load_training_state,
    move_training_state,
    weights_checksum,
)
from example_trainer.config import TrainingConfig, require_reference
from example_trainer.custom import require_custom_functions
from example_trainer.images import (
    IMAGE_MODELS,
    ImageSupport,
    TokenizerWithProcessor,
    image_support,
    vision_encoder,
)
from example_trainer.merging import with_merged_adapters
from example_trainer.model import (
    create_optimizer,
    load_model_and_tokenizer,
    require_device,
    require_model,
)
from example_trainer.parallel import Parallel, open_parallel
from example_trainer.policy import (
    PreparedPolicy,
    Reference,
    open_reference,
    prepare_policy,
    setup_line,
)
from example_trainer.run_log import (
    LiveDisplay,
    StepSpans,
    metrics_path_of,
    open_run_log,
    open_step_spans,
    with_wandb_names,
    write_run_report,
)
from example_trainer.training import Trainer
from example_trainer.weight_sync import WeightSync, make_weight_sync, wait_for_engine
from example_trainer.weights.training_sync import with_published_weights

__all__ = ["train", "train_legacy", "train_lora", "train_lora_restart", "train_shared_vllm"]

logger = logging.getLogger(__name__)

_EARLIER_MODE_NAMES = {"none": "legacy"}


def train(
    config: TrainingConfig,
    *,
    view: LiveDisplay | None = None,
    recorded: BatchService | None = None,
) -> Path:
    """Run one training and return the directory of the final model.

    Waits for the service and for the engine. Every process that it started has ended when it
    returns or raises. `view` displays the run in progress. With the batches of a `recorded` run,
    there is neither a service nor an engine.

    Raises:
        AtroposError: a setting is invalid, the engine died, or the service rejected a request or is
            unreachable.
    """
    _seed(config.seed)
    require_reference(config)
    require_custom_functions(config)
    require_device(config.device)
    if config.resume_or_start and BatchJournal.exists(config.save_path):
        config = config.model_copy(update={"resume": True})
    with contextlib.ExitStack() as stack:
        parallel = stack.enter_context(open_parallel(config))
        weight_sync = None
        if recorded is None:
            weight_sync = with_published_weights(config, make_weight_sync(config))
            weight_sync = with_merged_adapters(config, weight_sync)
        if weight_sync is not None:
            stack.callback(weight_sync.close)
        if not parallel.is_main:
            return _follow(config, parallel, weight_sync)
        return _lead(config, parallel, weight_sync, stack, view, recorded)


def _lead(
    config: TrainingConfig,
    parallel: Parallel,
    weight_sync: WeightSync | None,
    stack: contextlib.ExitStack,
    view: LiveDisplay | None,
    recorded: BatchService | None,
) -> Path:
    """Train as rank 0, with the service, the engine, the checkpoints and the log."""
    waits_for_engine = config.engine_wait_s > 0
    if weight_sync is not None and not waits_for_engine:
        weight_sync.check_before_load()
    require_writable_folder(config.save_path, "--save-path")
    require_writable_file(metrics_path_of(config), "--metrics-path")
    stack.enter_context(_only_trainer_of(config.save_path))
    if not config.resume:  # before an earlier run's journal is emptied
        require_model(config.model_name)
    journal = BatchJournal.open(config.save_path, resume=config.resume)
    config = with_wandb_names(config, journal.run_id)
    service = recorded or _open_service(config, stack, run_id=journal.run_id)
    service.connect()  # before the model is loaded, which takes long
    checkpoint = parallel.broadcast(_checkpoint_to_continue(config, journal))
    loaded = _load(config, parallel, checkpoint)
    if weight_sync is not None and waits_for_engine:
        wait_for_engine(config)
        weight_sync.check_before_load()
    run_log = open_run_log(
        config,
        run_id=journal.run_id,
        steps_done=loaded.steps_done,
        last_metrics=load_step_metrics(checkpoint) if checkpoint is not None else None,
    )
    stack.callback(write_run_report, config)
    stack.callback(run_log.finish)
    spans = open_step_spans(journal.run_id)
    if spans is not None:
        stack.callback(spans.close)
    last_recorded = loaded.steps_done + journal.count_after(loaded.steps_done)
    service.register(last_recorded)
    record = TrainingRecord(config.save_path, journal.run_id) if config.record_run else None
    feed = _open_feed(
        config, service, journal, checkpoint, loaded.model, record, last_recorded_step=last_recorded
    )
    feed.settle(loaded.steps_done)
    # All ranks gather sharded weights together; `_follow` calls this too.
    model = parallel.whole_model(loaded.model)
    if weight_sync is not None:
        weight_sync.start(model, loaded.tokenizer, source=loaded.source, step=loaded.steps_done)
    feed.report_policy(loaded.steps_done)
    processed = parallel.broadcast(_has_processed_logprobs(config, weight_sync))
    if record is not None:
        _note_start(record, config, loaded, processed_logprobs=processed)
    trainer = _make_trainer(
        config,
        parallel,
        loaded,
        feed,
        weight_sync,
        run_log,
        processed_logprobs=processed,
        view=view,
        spans=spans,
    )
    started = time.perf_counter()
    final = trainer.run()
    if config.benchmark:
        run_log.log(
            _benchmark_metrics(
                config, weight_sync.mode if weight_sync else "off", time.perf_counter() - started
            ),
            step=config.training_steps,
        )
    return final


@contextlib.contextmanager
def _only_trainer_of(folder: str) -> Iterator[None]:
    """Lock the folder of a run, whose records a second trainer would delete.

    Raises:
        ConfigError: another process has locked it.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        lock_file(
            handle,
            folder,
            refusal=f"another trainer is running in {folder}; stop it, or choose another folder "
            "with --save-path",
        )
        yield
    finally:
        os.close(handle)


def _open_service(
    config: TrainingConfig, stack: contextlib.ExitStack, *, run_id: str
) -> TrajectoryFeed:
    client = open_client(config.atropos_url, patience_s=config.service_timeout_s)
    return TrajectoryFeed(stack.enter_context(client), config, run_id=run_id)


def _note_start(
    record: TrainingRecord, config: TrainingConfig, loaded: _Loaded, *, processed_logprobs: bool
) -> None:
    settings = {
        "settings": mask_secrets(config.model_dump(mode="json")),
        "processed_logprobs": processed_logprobs,
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
    }
    record.note_start(loaded.steps_done, settings, weights=weights_checksum(loaded.model))


def _open_feed(
    config: TrainingConfig,
    service: BatchService,
    journal: BatchJournal,
    checkpoint: Path | None,
    model: Any,
    record: TrainingRecord | None,
    *,
    last_recorded_step: int,
) -> DurableFeed:
    limit_bytes = max(SMALLEST_LIMIT_BYTES, checkpoint_bytes(model, trained_only=config.uses_lora))
    if config.checkpoint_interval == 0:
        logger.info(
            "checkpoint_interval=0: a resumed run repeats all its steps with the batches in %s; "
            "when they take %.1f GiB, a checkpoint replaces them",
            journal.directory,
            limit_bytes / 2**30,
        )
    state = load_feed_state(checkpoint) if checkpoint else None
    return DurableFeed(
        service,
        journal,
        state,
        journal_limit_bytes=limit_bytes,
        record=record,
        last_recorded_step=last_recorded_step,
    )


def _follow(config: TrainingConfig, parallel: Parallel, weight_sync: WeightSync | None) -> Path:
    loaded = _load(config, parallel, parallel.broadcast(None))
    parallel.whole_model(loaded.model)
    trainer = _make_trainer(
        config,
        parallel,
        loaded,
        None,
        weight_sync,
        MetricsLog(use_wandb=False, metrics_path=None),
        processed_logprobs=bool(parallel.broadcast(None)),
    )
    return trainer.run()


class _Loaded(NamedTuple):
    """Model and optimizer of a run, restored from its checkpoint."""

    model: Any
    tokenizer: Any
    policy: PreparedPolicy
    reference: Reference | None
    optimizer: Any
    images: ImageSupport
    source: str
    """Directory or name of the loaded weights."""
    steps_done: int


def _load(config: TrainingConfig, parallel: Parallel, checkpoint: Path | None) -> _Loaded:
    source = str(checkpoint or config.model_name)
    model, tokenizer = load_model_and_tokenizer(config, source=source)
    policy = prepare_policy(model, config, parallel)
    reference = open_reference(config, model, policy, parallel)
    optimizer = create_optimizer(model, config)
    # A checkpoint of adapters has the files of the image processor as well.
    images = image_support(model, source, is_sharded=parallel.is_sharded)
    if images.reader is not None:
        parameters = vision_encoder(model).parameters()
        is_trained = any(parameter.requires_grad for parameter in parameters)
        logger.info("vision encoder: %s", "trained" if is_trained else "frozen")
    if model.config.model_type in IMAGE_MODELS:
        tokenizer = TokenizerWithProcessor(tokenizer, source)
    steps_done = 0
    if checkpoint is not None:
        steps_done = load_training_state(checkpoint, optimizer, rank=parallel.rank, model=model)
    logger.info("%s", setup_line(model, config, policy))
    logger.info("starting after step %d from %s", steps_done, source)
    return _Loaded(model, tokenizer, policy, reference, optimizer, images, source, steps_done)


def _make_trainer(
    config: TrainingConfig,
    parallel: Parallel,
    loaded: _Loaded,
    feed: DurableFeed | None,
    weight_sync: WeightSync | None,
    run_log: MetricsLog,
    *,
    processed_logprobs: bool,
    view: LiveDisplay | None = None,
    spans: StepSpans | None = None,
) -> Trainer:
    return Trainer(
        config,
        model=loaded.model,
        tokenizer=loaded.tokenizer,
        optimizer=loaded.optimizer,
        feed=feed,
        weight_sync=weight_sync,
        run_log=run_log,
        steps_done=loaded.steps_done,
        processed_logprobs=processed_logprobs,
        policy=loaded.policy,
        reference=loaded.reference,
        images=loaded.images,
        parallel=parallel,
        view=view,
        spans=spans,
    )


def train_legacy(config: TrainingConfig) -> Path:
    """Run the mode `none`: the trainer launches the engine and restarts it on new weights."""
    return _train_in_mode(config, "none")


def train_lora(config: TrainingConfig) -> Path:
    """Run the mode `lora_only`: adapters are swapped in a running engine."""
    return _train_in_mode(config, "lora_only")


def train_lora_restart(config: TrainingConfig) -> Path:
    """Run the mode `lora_restart`: the trainer launches an engine, restarted on new adapters."""
    return _train_in_mode(config, "lora_restart")


def train_shared_vllm(config: TrainingConfig) -> Path:
    """Raise `ConfigError`: the mode `shared_vllm` is not built; use `in_place`."""
    return _train_in_mode(config, "shared_vllm")


def _train_in_mode(config: TrainingConfig, mode: str) -> Path:
    return train(config.model_copy(update={"weight_bridge_mode": mode}))


def _checkpoint_to_continue(config: TrainingConfig, journal: BatchJournal) -> Path | None:
    if not config.resume:
        return None
    found = find_intact_checkpoint(config.save_path, journal.directory, run_id=journal.run_id)
    if found is not None and move_training_state(found):
        logger.info("moved the trainer's state of %s into %s", found, found / "trainer")
    return found


def _has_processed_logprobs(config: TrainingConfig, weight_sync: WeightSync | None) -> bool:
    if config.logprobs_mode == "auto" and weight_sync is not None:
        return weight_sync.returns_processed_logprobs()
    return config.logprobs_mode == "processed"


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _benchmark_metrics(config: TrainingConfig, mode: str, total_s: float) -> dict[str, Any]:
    metrics: dict[str, Any] = {
        "benchmark/total_time_seconds": total_s,
        "benchmark/total_time_minutes": total_s / 60.0,
        "benchmark/mode": _EARLIER_MODE_NAMES.get(mode, mode),
        "benchmark/total_steps": config.training_steps,
        "benchmark/avg_step_time_seconds": total_s / config.training_steps,
    }
    if config.device.startswith("cuda"):
        metrics["benchmark/peak_gpu_memory_gb"] = torch.cuda.max_memory_allocated() / 2**30
    return metrics
