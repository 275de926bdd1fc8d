"""The training loop: lease a batch, take one optimizer step, publish the weights.

service --lease--> batch --> loss --> optimizer --> checkpoint, weight sync --> engine
^                                                        |
+--------------------- acknowledge ----------------------+

docs/one_step.md follows one batch through these pages, with the shape of every tensor.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from typing_extensions import assert_never

from atroposlib.api.client import LeasedBatch
from atroposlib.errors import ConfigError, GroupError
from atroposlib.utils.imports import import_function
from atroposlib.utils.run_log import MetricsLog
from example_trainer.api import JOURNAL_DIRECTORY, DurableFeed
from example_trainer.batch import Batch, Microbatch, build_batch, split_batch
from example_trainer.checkpointing import (
    drop_old_checkpoints,
    random_states,
    replace_directory,
    save_checkpoint,
    weights_checksum,
)
from example_trainer.config import TrainingConfig
from example_trainer.data import compute_grpo_loss, run_training_step
from example_trainer.images import TEXT_ONLY, ImageSupport
from example_trainer.loss import LossInputs, make_loss
from example_trainer.merging import MergedModel
from example_trainer.metrics import (
    StepNotes,
    StepObserver,
    StepStats,
    StepTimes,
    batch_metrics,
    memory_metrics,
    part_counts,
    step_line,
    sum_stats,
)
from example_trainer.model import autocast, usable_length, usable_pad_multiple
from example_trainer.parallel import ONE_PROCESS, Parallel
from example_trainer.policy import PreparedPolicy, Reference, log_step_plan, prepare_policy
from example_trainer.rows import RowRules
from example_trainer.run_log import LiveDisplay, StepSpans
from example_trainer.scoring import at_sampling_temperature
from example_trainer.weight_sync import WeightSync

__all__ = [
    "Publisher",
    "Trainer",
    "compute_grpo_loss",
    "is_sync_due",
    "learning_rate_at",
    "make_loss",
    "row_rules",
    "run_training_step",
]

logger = logging.getLogger(__name__)


def is_sync_due(step: int, config: TrainingConfig, *, publishes_final: bool) -> bool:
    """Return whether weights are published after optimizer step `step`, counted from 1.

    They are every `vllm_restart_interval` steps (0: never), and after the last step only if
    `publishes_final`.
    """
    interval = config.vllm_restart_interval
    if interval == 0:
        return False
    if step >= config.training_steps:
        return publishes_final
    return step % interval == 0


@dataclass
class Publisher:
    """Writes checkpoints and publishes weights on schedule; every rank calls it, rank 0 writes.

    The fields are those of `Trainer`; `_clock` is that of `checkpoint_minutes`.
    """

    config: TrainingConfig
    model: Any
    tokenizer: Any
    optimizer: Any
    feed: DurableFeed | None
    weight_sync: WeightSync | None
    parallel: Parallel
    _clock: Callable[[], float] = time.monotonic
    _step_metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._saved_at = self._clock()

    def before_step(self, step: int) -> None:
        """Let the engine free memory for optimizer step `step`."""
        if self.weight_sync is not None and self.parallel.is_main:
            self.weight_sync.before_step(sync_follows=self._publishes_after(step))

    def after_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write and publish what is due after a step, except the final model, see `finish`.

        `metrics` of the step, as far as they are known, are saved with a checkpoint.
        """
        self._step_metrics = metrics
        if self.config.record_run and self.feed is not None:
            self.feed.note_weights(step, weights_checksum(self.model))
        # Rank 0 has the clock and the journal; all ranks take part in saving.
        publishes = self._publishes_after(step) and step < self.config.training_steps
        is_full = self.feed is not None and self.feed.wants_checkpoint()
        saves, publishes, cuts_journal = self.parallel.broadcast(
            (self._is_checkpoint_due(step), publishes, is_full)
        )
        if not (saves or publishes or cuts_journal):
            return
        model = self.parallel.whole_model(self.model)
        checkpoint: Path | None = None
        if saves:
            checkpoint = self._save(model, step, is_resumable=True)
            self._saved_at = self._clock()
        elif cuts_journal:
            self._save(model, step, is_resumable=True, folder=JOURNAL_DIRECTORY)
        if self.feed is not None and (saves or cuts_journal):
            self.feed.saved(step)
        if self.feed is not None and saves and self.config.keep_checkpoints is not None:
            run_id = self.feed.state().get("run_id")
            drop_old_checkpoints(
                self.config.save_path, keep=self.config.keep_checkpoints, run_id=run_id
            )
        if publishes:
            self._publish(model, step, checkpoint)

    def finish(self, step: int) -> Path:
        """Write the final model, publish it if the engine keeps running; return its directory."""
        model = self.parallel.whole_model(self.model)
        final = self._save(model, step, is_final=True)
        if self.config.merges_adapters:
            final = self._save_merged(model, step)
        if self._is_sync_due(step):
            self._publish(model, step, final)
        if self.config.uses_lora and self.parallel.is_main:
            tokenizer = Path(self.config.save_path) / "tokenizer"
            replace_directory(tokenizer, self.tokenizer.save_pretrained)
        return final

    def _is_checkpoint_due(self, step: int) -> bool:
        interval = self.config.checkpoint_interval
        if interval is not None:
            return interval > 0 and step % interval == 0
        # After the last step, the final model is written.
        waited_s = self._clock() - self._saved_at
        is_last = step >= self.config.training_steps
        return not is_last and waited_s >= 60 * self.config.checkpoint_minutes

    def _publishes_after(self, step: int) -> bool:
        """Return whether weights are published after a step; only rank 0 knows.

        Of the steps that a resumed run repeats, that is the last one due: rollouts with the weights
        of earlier ones would be trained many steps later.
        """
        if self.feed is None or not self._is_sync_due(step):
            return False
        repeated = range(step + 1, self.feed.last_recorded_step + 1)
        return not any(map(self._is_sync_due, repeated))

    def _is_sync_due(self, step: int) -> bool:
        publishes_final = self.weight_sync is not None and self.weight_sync.publishes_final
        return is_sync_due(step, self.config, publishes_final=publishes_final)

    def _save(
        self,
        model: Any,
        step: int,
        *,
        is_final: bool = False,
        is_resumable: bool = False,
        folder: str = "",
    ) -> Path:
        optimizer_state, states = None, None
        if is_resumable:
            optimizer_state = self.parallel.whole_optimizer_state(self.optimizer)
            states = self.parallel.gather(random_states())
        return save_checkpoint(
            model,
            self.tokenizer,
            Path(self.config.save_path) / folder,
            step,
            is_final,
            final_name="final_adapter" if self.config.uses_lora else "final_model",
            optimizer=self.optimizer if is_resumable else None,
            feed_state=None if self.feed is None else self.feed.state(),
            optimizer_state=optimizer_state,
            states_by_rank=states,
            step_metrics=self._step_metrics,
            writes=self.parallel.is_main,
        )

    def _save_merged(self, model: Any, step: int) -> Path:
        """Write the final model of a run that trains adapters, next to `final_adapter`."""
        return save_checkpoint(
            MergedModel(model),
            self.tokenizer,
            self.config.save_path,
            step,
            is_final=True,
            writes=self.parallel.is_main,
        )

    def _publish(self, model: Any, step: int, checkpoint: Path | None) -> None:
        if self.feed is None:
            return
        if self.weight_sync is not None:
            self.weight_sync.publish(model, checkpoint=checkpoint, step=step)
        self.feed.report_policy(step)


_MOST_REFUSED_BATCHES = 3
"""Consecutive batches without a trainable group that end a run before its first step.

This indicates wrong settings. After the first step such batches are skipped: an environment must
not end a run that trains on the groups of others.
"""

_ROW_SETTINGS = {
    "seq_len", "advantage_eps", "unsupported_fields", "allow_tokenized_from_text",
    "overlong_max_tokens", "overlong_buffer_tokens", "truncated_completions",
}  # fmt: skip


def row_rules(config: TrainingConfig) -> RowRules:
    """Return the settings of the conversion of groups to rows."""
    advantage_fn = None
    if config.advantage_fn is not None:
        advantage_fn = import_function(config.advantage_fn, config.advantage_fn_args)
    return RowRules(
        **config.model_dump(include=_ROW_SETTINGS),
        advantage_std=config.loss_choice.advantage_std,
        advantage_fn=advantage_fn,
        uses_rewards=config.policy_coef > 0,
        uses_reference=config.kl_coef > 0,
        uses_teacher=config.distill_coef > 0,
    )


def learning_rate_at(step: int, config: TrainingConfig) -> float:
    """Return the learning rate of the optimizer step after `step` completed ones.

    It rises linearly over `warmup_steps`, then follows `lr_schedule` from `lr` to `min_lr`, which
    it would reach one step after the last.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    num_steps = max(1, config.training_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / num_steps)
    if config.lr_schedule == "linear":
        left = 1.0 - progress
    elif config.lr_schedule == "cosine":
        left = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        assert_never(config.lr_schedule)
    return config.min_lr + (config.lr - config.min_lr) * left


class Trainer:
    """The training loop of one run.

    Args:
        config: Settings.
        model: A causal language model in training mode on `config.device`.
        tokenizer: Saved with the model, not used otherwise.
        optimizer: Of the model's trainable parameters.
        feed: Source of the batches; None on ranks other than 0.
        weight_sync: Updates the engine, on rank 0 only; already started. None: no engine.
        run_log: Log of the metrics.
        steps_done: Optimizer steps completed before this process.
        processed_logprobs: Whether the engine's logprobs are after temperature scaling.
        policy: The model prepared for `parallel`; None: prepared here, for one process.
        reference: Model of the KL penalty; None: groups have `ref_logprobs`.
        images: Whether and how the model reads images.
        parallel: The ranks that train together.
        view: Displays the run in progress.
        spans: Writes the spans of steps, on rank 0 only; None: no tracing.
        clock: Monotonic seconds, for durations.
    """

    def __init__(
        self,
        config: TrainingConfig,
        *,
        model: Any,
        tokenizer: Any,
        optimizer: Any,
        feed: DurableFeed | None,
        weight_sync: WeightSync | None,
        run_log: MetricsLog,
        steps_done: int = 0,
        processed_logprobs: bool = False,
        policy: PreparedPolicy | None = None,
        reference: Reference | None = None,
        images: ImageSupport = TEXT_ONLY,
        parallel: Parallel = ONE_PROCESS,
        view: LiveDisplay | None = None,
        spans: StepSpans | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config = config
        self.model = model
        self.steps_done = steps_done
        self._optimizer = optimizer
        self._feed = feed
        self._weight_sync = weight_sync
        self._run_log = run_log
        self._spans = spans
        self._clock = clock
        self._parallel = parallel
        self._reference = reference
        self._has_raw_logprobs = not processed_logprobs
        self._loss, self._choice = make_loss(config), config.loss_choice
        self._autocast = autocast(config)
        self._publisher = Publisher(
            config, model, tokenizer, optimizer, feed, weight_sync, parallel
        )
        policy = policy or prepare_policy(model, config)
        self._scorer, self._packs = policy.scorer, policy.packs
        self._min_shared_fraction = policy.min_shared_fraction
        self._rules = replace(
            row_rules(config),
            seq_len=usable_length(model, config),
            vocabulary=model.get_input_embeddings().weight.shape[0],
            scores_reference=reference is not None,
            images=images,
        )
        self._pad_multiple = usable_pad_multiple(model, config)
        self._observer = StepObserver(
            config,
            model,
            num_devices=parallel.world_size,
            seq_len=self._rules.seq_len,
            view=view,
        )
        self._notes = StepNotes(has_raw_logprobs=not processed_logprobs)
        self._has_trained = False
        self._num_input_tokens = self._num_computed_tokens = 0

    def run(self) -> Path:
        """Train up to `training_steps` and return the directory of the final model."""
        while self.steps_done < self.config.training_steps:
            if self._weight_sync is not None and self._parallel.is_main:
                self._weight_sync.check_alive()
            self._run_step()
        self._observer.note("saving the model")
        final = self._publisher.finish(self.steps_done)
        if self._min_shared_fraction is not None:
            logger.info(
                "equal prefixes computed once: %d of %d tokens of this run remained",
                self._num_computed_tokens,
                self._num_input_tokens,
            )
        logger.info("final model: %s", final)
        return final

    def _run_step(self) -> None:
        self._observer.note("waiting for a batch")
        started = self._clock()
        batch_id, shares = self._take_shares() if self._parallel.is_main else (None, None)
        batch = self._parallel.scatter(shares)
        fetched = self._clock()
        self._observer.note("training")
        if not self._has_trained:
            log_step_plan(
                batch,
                model=self.model,
                optimizer=self._optimizer,
                config=self.config,
                packs=self._packs,
                fuses=self._scorer.fuses,
                reference_bytes=0 if self._reference is None else self._reference.num_bytes,
            )
        self._publisher.before_step(self.steps_done + 1)
        metrics = self.train_on(batch)
        self.steps_done += 1
        self._has_trained = True
        computed = self._clock()
        self._observer.note("saving and publishing")
        self._publisher.after_step(self.steps_done, metrics)
        if self._feed is not None:
            self._feed.acknowledge(batch_id, steps_done=self.steps_done)
        times = StepTimes(fetched - started, computed - fetched, self._clock() - computed)
        metrics.update(times.metrics(num_input_tokens=batch.summary.num_input_tokens))
        metrics.update(self._observer.metrics(metrics))
        if self._spans is not None:
            self._spans.write(self.steps_done, batch_id=batch_id, metrics=metrics)
        if self._parallel.is_main:
            self._report(batch, metrics)

    def _report(self, batch: Batch, metrics: dict[str, float]) -> None:
        self._num_input_tokens += batch.summary.num_input_tokens
        self._num_computed_tokens += batch.summary.num_computed_tokens
        self._run_log.log(metrics, step=self.steps_done)
        self._observer.show(self.steps_done, metrics)
        logger.info("%s", step_line(self.steps_done, self.config.training_steps, metrics))
        self._notes.add(batch.summary, metrics)

    def _take_shares(self) -> tuple[str | None, list[Batch]]:
        """Lease the next batch; return its lease token and each rank's share."""
        leased, batch = self._next_batch()
        bad_groups = batch.summary.bad_groups
        groups = [group for i, group in enumerate(leased.groups) if i not in bad_groups]
        self._observer.take_groups(groups, step=self.steps_done)
        if self._spans is not None:
            self._spans.take_groups(groups)
        return leased.batch_id, split_batch(batch, self._parallel.world_size)

    def _next_batch(self) -> tuple[LeasedBatch, Batch]:
        """Lease and build the next batch, skipping those without a trainable group.

        Raises:
            GroupError: a batch with `on_bad_group="stop"`, or several in a row before the first
                step, cannot be trained; each is rejected.
            ConfigError: this run cannot train on the groups of an environment.
        """
        assert self._feed is not None  # only rank 0 leases batches
        num_groups = 0
        for num_batches in itertools.count(1):
            leased = self._feed.next_batch(self.steps_done)
            try:
                batch = self._build(leased)
                break
            except (GroupError, ConfigError) as error:
                # Rejected in any case, so that a resumed run does not receive it again.
                self._feed.refuse(self.steps_done, leased.batch_id)
                num_groups += len(leased.groups)
                is_wrong = isinstance(error, ConfigError) and not self._has_trained
                if self.config.on_bad_group == "stop" or is_wrong:
                    raise
                if num_batches == _MOST_REFUSED_BATCHES and not self._has_trained:
                    raise GroupError(
                        f"no group of {num_batches} batches in a row can be trained: {error}"
                    ) from error
                logger.warning("no group of batch %s can be trained: %s", leased.batch_id, error)
        return leased, replace(batch, summary=replace(batch.summary, num_refused_before=num_groups))

    def _build(self, leased: LeasedBatch) -> Batch:
        limit = self.config.max_token_staleness
        oldest_version = None if limit is None else self.steps_done - limit
        return build_batch(
            leased.groups,
            replace(self._rules, oldest_version=oldest_version),
            microbatch_size=self.config.batch_size,
            pad_multiple=self._pad_multiple,
            packs=self._packs,
            max_tokens=self.config.microbatch_tokens,
            num_ranks=self._parallel.world_size,
            skips_bad_groups=self.config.on_bad_group == "skip",
            min_shared_fraction=self._min_shared_fraction,
        )

    def train_on(self, batch: Batch) -> dict[str, float]:
        """Take one step on a batch, with `num_iterations` updates, and return its metrics.

        They are those of the first update, except `grpo/last_iteration_*`. If a gradient is not
        finite, its update and those after it are skipped, to protect the weights.
        """
        rates: dict[str, float] = {}
        for parameters in self._optimizer.param_groups:
            # None with Adafactor's relative_step, which computes the rate itself.
            if parameters["lr"] is not None:
                parameters["lr"] = learning_rate_at(self.steps_done, self.config)
                rates["train/lr"] = parameters["lr"]
        num_iterations = self.config.num_iterations
        microbatches, updates = list(batch.microbatches), []
        for _ in range(num_iterations):
            stats = StepStats(clip_low=self._choice.clip_low, clip_high=self._choice.clip_high)
            for i, microbatch in enumerate(microbatches):
                scored = self._backward(microbatch.to(self.config.device), batch, stats)
                if num_iterations > 1:
                    microbatches[i] = scored
            updates.append((stats, self._update()))
            if not math.isfinite(updates[-1][1]):
                break
        (first, grad_norm), (last, last_norm) = updates[0], updates[-1]
        metrics = sum_stats(self._parallel.gather(first)).metrics()
        if num_iterations > 1:
            metrics |= sum_stats(self._parallel.gather(last)).last_iteration_metrics()
        return {
            **metrics,
            **part_counts(batch.totals),
            **batch_metrics(batch.summary),
            **memory_metrics(self.config.device),
            **rates,
            "train/grad_norm": grad_norm,
            "train/skipped_steps": float(not math.isfinite(last_norm)),
        }

    def _update(self) -> float:
        """Take one optimizer step if the gradient is finite; return its norm."""
        with self._observer.measure("optimizer"):
            self._parallel.sum_gradients(self.model)
            grad_norm = self._parallel.clip_gradients(
                self.model, max_norm=self.config.max_grad_norm
            )
            if math.isfinite(grad_norm):
                self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        return grad_norm

    def _backward(self, microbatch: Microbatch, batch: Batch, stats: StepStats) -> Microbatch:
        """Add the gradient of one microbatch's share of the loss.

        Returns the microbatch with what is computed in the first iteration only: the reference,
        logprobs at the sampling temperature, and the proximal logprobs.
        """
        is_first, reference_BT = microbatch.proximal_logprobs_BT is None, None
        if is_first and batch.needs_reference and self._reference is not None:
            with self._observer.measure("forward"):
                reference_BT = self._reference.logprobs_BT(microbatch)
        with self._observer.measure("forward"), self._autocast:
            scores = self._scorer(microbatch)
        if is_first:
            microbatch = at_sampling_temperature(
                microbatch, scores, has_raw_logprobs=self._has_raw_logprobs
            )
        if reference_BT is not None:
            microbatch = microbatch.with_reference(reference_BT)
        inputs = LossInputs(
            trainer_logprobs_BT=scores.logprobs_BT,
            labels_BT=microbatch.labels_BT,
            advantages_BT=microbatch.advantages_BT,
            inference_logprobs_BT=microbatch.inference_logprobs_BT,
            proximal_logprobs_BT=microbatch.proximal_logprobs_BT,
            ref_logprobs_BT=microbatch.ref_logprobs_BT,
            is_sft_BT=microbatch.is_sft_BT,
            teacher=scores.teacher,
            sequence_ids_BT=microbatch.sequence_ids_BT,
            entropy_BT=scores.entropy_BT,
        )
        with self._observer.measure("backward"):
            terms = self._loss(inputs, batch.totals)
            (terms.loss * self._parallel.loss_factor).backward()
        stats.add(microbatch, scores, terms, has_raw_logprobs=self._has_raw_logprobs)
        if not is_first:
            return microbatch
        return replace(microbatch, proximal_logprobs_BT=scores.logprobs_BT.detach())
