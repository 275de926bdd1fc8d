"""The training loop: lease a batch, take one optimiser step, let the engine have the weights.

service --lease--> feed --> batch --> loss --> optimiser --> checkpoint, weight sync --> engine
   ^                                                                |
   +------------------------- acknowledge --------------------------+
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from atroposlib.api.client import LeasedBatch
from atroposlib.errors import ConfigError, GroupError
from atroposlib.utils.run_log import RunLog
from example_trainer.batch import Batch, Microbatch, build_batch
from example_trainer.batch_shares import split_batch
from example_trainer.config import TrainingConfig
from example_trainer.group_feed import GroupFeed
from example_trainer.grpo_loss import compute_grpo_loss
from example_trainer.loss import LossInputs, make_loss
from example_trainer.metrics import StepTimes, batch_metrics, part_counts, step_line
from example_trainer.model import autocast
from example_trainer.optimizer import learning_rate_at
from example_trainer.parallel import ONE_PROCESS, Parallel
from example_trainer.policy import Policy, prepare_policy
from example_trainer.publishing import Publisher, TrainingParts
from example_trainer.reference import Reference
from example_trainer.rows import RowRules
from example_trainer.scoring import TokenScores, at_sampling_temperature
from example_trainer.step_notes import StepNotes
from example_trainer.step_observer import StepObserver, StepView
from example_trainer.step_plan import log_step_plan
from example_trainer.step_stats import StepStats, sum_stats
from example_trainer.weight_sync import WeightSync

__all__ = ["GroupFeed", "Trainer", "compute_grpo_loss", "make_loss", "row_rules"]

logger = logging.getLogger(__name__)

_MOST_REFUSED_BATCHES = 3
"""Batches in a row without a group to train before the first step; then the settings are at fault.

Later ones are passed over: whoever sends them must not end a run that trains on others' groups.
"""


def row_rules(config: TrainingConfig) -> RowRules:
    """Return how the settings turn groups into rows."""
    return RowRules(
        seq_len=config.seq_len,
        advantage_std=config.loss_choice.advantage_std,
        advantage_eps=config.advantage_eps,
        unsupported_fields=config.unsupported_fields,
        allow_tokenized_from_text=config.allow_tokenized_from_text,
        overlong_max_tokens=config.overlong_max_tokens,
        overlong_buffer_tokens=config.overlong_buffer_tokens,
        truncated_completions=config.truncated_completions,
        uses_rewards=config.policy_coef > 0,
        uses_reference=config.kl_coef > 0,
        uses_teacher=config.distill_coef > 0,
    )


class Trainer:
    """One run: the model, its optimiser and everything a step needs.

    Args:
        config: Settings.
        model: A causal language model in training mode on `config.device`.
        tokenizer: Saved beside the model, not used otherwise.
        optimizer: Over the model's trainable parameters.
        feed: Where batches come from.
        weight_sync: How the engine gets new weights; started already.
        run_log: Where metrics go.
        steps_done: Optimiser steps of the run that is continued.
        processed_logprobs: Whether the engine's logprobs are after temperature scaling.
        policy: The model made ready for `parallel`; None: made ready here, for one process.
        reference: Scores the KL penalty's reference; None: groups carry `ref_logprobs`.
        parallel: The ranks that train together; feed, engine and log are those of rank 0.
        view: Shows the run while it goes on; None: nobody watches.
        clock: Seconds for the time split.
    """

    def __init__(
        self,
        config: TrainingConfig,
        *,
        model: Any,
        tokenizer: Any,
        optimizer: Any,
        feed: GroupFeed,
        weight_sync: WeightSync,
        run_log: RunLog,
        steps_done: int = 0,
        processed_logprobs: bool = False,
        policy: Policy | None = None,
        reference: Reference | None = None,
        parallel: Parallel = ONE_PROCESS,
        view: StepView | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config = config
        self.model = model
        self.steps_done = steps_done
        self._optimizer = optimizer
        self._feed = feed
        self._weight_sync = weight_sync
        self._run_log = run_log
        self._clock = clock
        self._loss = make_loss(config)
        self._notes = StepNotes(has_raw_logprobs=not processed_logprobs)
        self._parallel = parallel
        parts = TrainingParts(model, tokenizer, optimizer, feed, weight_sync, parallel)
        self._publisher = Publisher(config, parts)
        policy = policy or prepare_policy(model, config)
        self._scorer, self._packs = policy.scorer, policy.packs
        self._is_planned = False
        self._has_trained = False
        self._has_raw_logprobs = not processed_logprobs
        vocabulary = model.get_input_embeddings().weight.shape[0]
        self._reference = reference
        self._rules = replace(
            row_rules(config), vocabulary=vocabulary, scores_reference=reference is not None
        )
        self._observer = StepObserver(config, model, num_devices=parallel.world_size, view=view)

    def run(self) -> Path:
        """Train until `training_steps` are done; returns the directory of the final model."""
        while self.steps_done < self.config.training_steps:
            self._weight_sync.check_alive()
            self._run_step()
        self._observer.note("saving the model")
        final = self._publisher.finish(self.steps_done)
        logger.info("final model: %s", final)
        return final

    def _run_step(self) -> None:
        self._observer.note("waiting for a batch")
        started = self._clock()
        batch_id, shares = self._take_shares() if self._parallel.is_main else (None, None)
        batch = self._parallel.scatter(shares)
        fetched = self._clock()
        self._observer.note("training")
        if not self._is_planned:
            self._is_planned = True
            log_step_plan(
                batch,
                model=self.model,
                optimizer=self._optimizer,
                config=self.config,
                packs=self._packs,
                reference_bytes=0 if self._reference is None else self._reference.num_bytes,
            )
        self._publisher.before_step(self.steps_done + 1)
        metrics = self.train_on(batch)
        self.steps_done += 1
        self._has_trained = True
        computed = self._clock()
        self._observer.note("saving and publishing")
        self._publisher.after_step(self.steps_done, metrics)
        self._feed.acknowledge(batch_id, steps_done=self.steps_done)
        times = StepTimes(fetched - started, computed - fetched, self._clock() - computed)
        metrics.update(times.metrics(num_input_tokens=batch.summary.num_input_tokens))
        metrics.update(self._observer.metrics(metrics))
        if self._parallel.is_main:
            self._report(batch, metrics)

    def _report(self, batch: Batch, metrics: dict[str, float]) -> None:
        self._run_log.log(metrics, step=self.steps_done)
        self._observer.show(self.steps_done, metrics)
        logger.info("%s", step_line(self.steps_done, self.config.training_steps, metrics))
        self._notes.add(batch.summary, metrics)

    def _take_shares(self) -> tuple[str | None, list[Batch]]:
        """Lease the next batch; returns its token and each rank's share of it."""
        leased, batch = self._next_batch()
        bad_groups = batch.summary.bad_groups
        self._observer.take_groups(
            [group for i, group in enumerate(leased.groups) if i not in bad_groups],
            step=self.steps_done,
        )
        return leased.batch_id, split_batch(batch, self._parallel.world_size)

    def _next_batch(self) -> tuple[LeasedBatch, Batch]:
        """Lease and build the next batch; pass over some that hold no group to train.

        Raises:
            GroupError: a batch cannot be trained, or several in a row before the first step; each
                is refused.
            ConfigError: the groups of an environment are none that this run can train on.
        """
        num_batches = num_groups = 0
        while True:
            leased = self._feed.next_batch(self.steps_done)
            try:
                batch = self._build(leased)
            except (GroupError, ConfigError) as error:
                # Refused in any case: it must not be met again by a run that is resumed.
                self._feed.refuse(self.steps_done, leased.batch_id)
                num_batches += 1
                num_groups += len(leased.groups)
                is_at_start = not self._has_trained
                if self.config.on_bad_group == "stop":
                    raise
                if is_at_start and isinstance(error, ConfigError):
                    raise
                if is_at_start and num_batches == _MOST_REFUSED_BATCHES:
                    raise GroupError(
                        f"no group of {num_batches} batches in a row can be trained: {error}"
                    ) from error
                logger.warning("no group of batch %s can be trained: %s", leased.batch_id, error)
                continue
            summary = replace(batch.summary, num_refused_before=num_groups)
            return leased, replace(batch, summary=summary)

    def _build(self, leased: LeasedBatch) -> Batch:
        return build_batch(
            leased.groups,
            self._rules,
            microbatch_size=self.config.batch_size,
            pad_multiple=self.config.pad_multiple,
            packs=self._packs,
            max_tokens=self.config.microbatch_tokens,
            num_ranks=self._parallel.world_size,
            skips_bad_groups=self.config.on_bad_group == "skip",
        )

    def train_on(self, batch: Batch) -> dict[str, float]:
        """Take one optimiser step on a batch; returns its metrics.

        A step whose gradient is not finite is skipped and counted, so that one bad batch cannot
        poison the weights.
        """
        learning_rate = learning_rate_at(self.steps_done, self.config)
        for parameters in self._optimizer.param_groups:
            # Adafactor with relative_step finds its own rate and holds None here.
            if parameters["lr"] is not None:
                parameters["lr"] = learning_rate
        choice = self.config.loss_choice
        stats = StepStats(clip_low=choice.clip_low, clip_high=choice.clip_high)
        self._backward(batch, stats)
        with self._observer.measure("optimizer"):
            self._parallel.sum_gradients(self.model)
            grad_norm = self._parallel.clip_gradients(
                self.model, max_norm=self.config.max_grad_norm
            )
            is_finite = math.isfinite(grad_norm)
            if is_finite:
                self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        return {
            **sum_stats(self._parallel.gather(stats)).metrics(),
            **part_counts(batch.totals),
            **batch_metrics(batch.summary),
            **_memory_metrics(self.config.device),
            "train/lr": learning_rate,
            "train/grad_norm": grad_norm,
            "train/skipped_steps": float(not is_finite),
        }

    def _backward(self, batch: Batch, stats: StepStats) -> None:
        """Add the gradient of the batch to the parameters, one micro-batch at a time."""
        for cpu_microbatch in batch.microbatches:
            microbatch = cpu_microbatch.to(self.config.device)
            reference_BT = None
            if batch.needs_reference and self._reference is not None:
                with self._observer.measure("forward"):
                    reference_BT = self._reference.logprobs_BT(microbatch)
            with self._observer.measure("forward"), autocast(self.config):
                scores = self._scorer(microbatch)
            microbatch = at_sampling_temperature(
                microbatch, scores, has_raw_logprobs=self._has_raw_logprobs
            )
            if reference_BT is not None:
                microbatch = microbatch.with_reference(reference_BT)
            with self._observer.measure("backward"):
                terms = self._loss(_loss_inputs(microbatch, scores), batch.totals)
                (terms.loss * self._parallel.loss_factor).backward()
            stats.add(microbatch, scores, terms, has_raw_logprobs=self._has_raw_logprobs)


def _loss_inputs(microbatch: Microbatch, scores: TokenScores) -> LossInputs:
    return LossInputs(
        trainer_logprobs_BT=scores.logprobs_BT,
        labels_BT=microbatch.labels_BT,
        advantages_BT=microbatch.advantages_BT,
        inference_logprobs_BT=microbatch.inference_logprobs_BT,
        ref_logprobs_BT=microbatch.ref_logprobs_BT,
        is_sft_BT=microbatch.is_sft_BT,
        teacher=scores.teacher,
        sequence_ids_BT=microbatch.sequence_ids_BT,
    )


def _memory_metrics(device: str) -> dict[str, float]:
    if not device.startswith("cuda"):
        return {}
    return {
        "train/gpu_memory_gb": torch.cuda.memory_allocated(device) / 2**30,
        "train/gpu_memory_reserved_gb": torch.cuda.memory_reserved(device) / 2**30,
    }
