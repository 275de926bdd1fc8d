"""The training loop: lease a batch, take one optimizer step, publish the weights.

service --lease--> batch --> loss --> optimizer --> checkpoint, weight sync --> engine
^                                                        |
+--------------------- acknowledge ----------------------+
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from atroposlib.api.client import LeasedBatch
from atroposlib.errors import ConfigError, GroupError
from atroposlib.scored_data import IGNORE_INDEX, MASKED_LOGPROB
from atroposlib.utils.run_log import MetricsLog
from example_trainer.api import JOURNAL_DIRECTORY, DurableFeed
from example_trainer.batch import Batch, BatchSummary, Microbatch, build_batch, split_batch
from example_trainer.checkpointing import (
    drop_old_checkpoints,
    random_states,
    replace_directory,
    save_checkpoint,
)
from example_trainer.config import TrainingConfig
from example_trainer.loss import (
    BatchTotals,
    Grpo,
    LossInputs,
    TrainingLoss,
    log_ratio_BT,
    make_loss,
)
from example_trainer.metrics import (
    LiveDisplay,
    StepStats,
    StepTimes,
    batch_metrics,
    part_counts,
    step_line,
    sum_stats,
)
from example_trainer.model import autocast
from example_trainer.parallel import ONE_PROCESS, Parallel
from example_trainer.policy import PreparedPolicy, Reference, log_step_plan, prepare_policy
from example_trainer.rows import RowRules, is_truncated_by_engine
from example_trainer.scoring import TokenScores, at_sampling_temperature, token_logprobs_BT
from example_trainer.weight_sync import WeightSync

__all__ = [
    "ModelShape",
    "PhaseClock",
    "Publisher",
    "StepNotes",
    "StepObserver",
    "Trainer",
    "compute_grpo_loss",
    "group_metrics",
    "is_sync_due",
    "learning_rate_at",
    "make_loss",
    "peak_flops_of",
    "row_rules",
]

logger = logging.getLogger(__name__)


def compute_grpo_loss(
    model: Any,
    tokens: torch.Tensor,
    labels: torch.Tensor,
    advantages: torch.Tensor,
    temperatures: torch.Tensor,
    gradient_accumulation_steps: int,
    inference_logprobs: torch.Tensor | None,
    clip_eps: float = 0.2,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Compute one microbatch's GRPO loss, anchored on the inference engine's logprobs.

    Formula: `max(-A r, -A clip(r, 1 - eps, 1 + eps))` with `r = exp(l - mu)`, the mean over each
    row's trained tokens, then over the rows, divided by `gradient_accumulation_steps`. Logits are
    divided by the row's temperature. Tokens without an inference logprob have ratio 1. The trainer
    itself uses `make_loss`, whose denominators count the whole batch.

    Args:
        model: Called as `model(input_ids=...)`, returns an object with `.logits`.
        tokens: (B, T) inputs, already shifted.
        labels: (B, T) ids or `IGNORE_INDEX`.
        advantages: (B, 1) or (B, T).
        temperatures: (B, 1, 1) or (B,); values of at most 0 count as 1.
        gradient_accumulation_steps: Microbatches of the step.
        inference_logprobs: (B, T), `MASKED_LOGPROB` where unknown.
        clip_eps: Both bounds of the clip.

    Returns:
        The loss, a zero with a gradient if no position is trained, and the metrics: numbers, and
        the flat tensors `training_logprobs` and `inference_logprobs` of the trained positions.

    Raises:
        ConfigError: `inference_logprobs` is None.
    """
    if inference_logprobs is None:
        raise ConfigError(
            "inference_logprobs: None, and the ratio needs them; run the environment with "
            "--openai.server_type vllm, whose completions have logprobs"
        )
    logits = model(input_ids=tokens).logits
    logprobs_BT = token_logprobs_BT(logits, labels, temperatures.flatten())
    advantages_BT = advantages.to(logprobs_BT.dtype).expand_as(labels)
    inputs = LossInputs(logprobs_BT, labels, advantages_BT, inference_logprobs)
    loss = TrainingLoss(Grpo(clip_eps, clip_eps), anchor="inference", reduction="sequence_mean")
    terms = loss(inputs, BatchTotals(num_tokens=0, num_sequences=len(tokens)))
    share = terms.loss / gradient_accumulation_steps
    metrics = _metrics(logprobs_BT.detach(), labels, advantages_BT, inference_logprobs, clip_eps)
    return share, metrics | {"interpretable_loss": float(terms.loss.detach())}


def _metrics(
    logprobs_BT: torch.Tensor,
    labels_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    inference_BT: torch.Tensor,
    clip_eps: float,
) -> dict[str, Any]:
    mask_BT = labels_BT != IGNORE_INDEX
    trained = logprobs_BT[mask_BT]
    positive = advantages_BT[mask_BT] > 0
    inference = inference_BT[mask_BT].to(trained.dtype)
    is_known = inference != MASKED_LOGPROB
    difference = torch.where(is_known, trained - inference, 0.0)
    ratio = torch.where(is_known, log_ratio_BT(trained, inference).exp(), 1.0)
    outside = (ratio < 1.0 - clip_eps) | (ratio > 1.0 + clip_eps)
    return {
        "pos_logp": _mean(trained[positive]),
        "neg_logp": _mean(trained[~positive]),
        "avg_logp": _mean(trained),
        "pos_count": float((advantages_BT[:, 0] > 0).sum()),
        "neg_count": float((advantages_BT[:, 0] <= 0).sum()),
        "training_logprobs": trained,
        "inference_logprobs": inference,
        "mean_ratio": _mean(ratio),
        "clipped_fraction": _mean(outside.to(trained.dtype)),
        "logprob_diff_mean": _mean(difference),
        "logprob_diff_abs_mean": _mean(difference.abs()),
        "logprob_diff_max": float(difference.abs().max()) if difference.numel() else 0.0,
    }


def _mean(values: torch.Tensor) -> float:
    return float(values.mean()) if values.numel() else 0.0


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


class Publisher:
    """Writes checkpoints and publishes weights on schedule; every rank calls it, rank 0 writes.

    The arguments are those of `Trainer`; `clock` is that of `checkpoint_minutes`.
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
        parallel: Parallel,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._model = model
        self._tokenizer = tokenizer
        self._optimizer = optimizer
        self._feed = feed
        self._weight_sync = weight_sync
        self._parallel = parallel
        self._step_metrics: Mapping[str, float] = {}
        self._clock = clock
        self._saved_at = clock()

    def before_step(self, step: int) -> None:
        """Let the engine free memory for optimizer step `step`."""
        if self._weight_sync is not None and self._parallel.is_main:
            self._weight_sync.before_step(sync_follows=self._is_sync_due(step))

    def after_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write and publish what is due after a step, except the final model, see `finish`.

        `metrics` of the step, as far as they are known, are saved with a checkpoint.
        """
        self._step_metrics = metrics
        publishes = self._is_sync_due(step) and step < self._config.training_steps
        # Rank 0 has the clock and the journal; all ranks take part in saving.
        is_full = self._feed is not None and self._feed.wants_checkpoint()
        saves, cuts_journal = self._parallel.broadcast((self._is_checkpoint_due(step), is_full))
        cuts_journal = cuts_journal and not saves
        if not saves and not publishes and not cuts_journal:
            return
        model = self._parallel.whole_model(self._model)
        checkpoint: Path | None = None
        if saves:
            checkpoint = self._save(model, step, is_resumable=True)
            self._drop_covered(step)
        if cuts_journal:
            self._save(model, step, is_resumable=True, folder=JOURNAL_DIRECTORY)
            if self._feed is not None:
                self._feed.saved(step)
        if publishes:
            self._publish(model, step, checkpoint)

    def finish(self, step: int) -> Path:
        """Write the final model, publish it if the engine keeps running; return its directory."""
        model = self._parallel.whole_model(self._model)
        final = self._save(model, step, is_final=True)
        if self._is_sync_due(step):
            self._publish(model, step, final)
        if self._config.uses_lora and self._parallel.is_main:
            replace_directory(
                Path(self._config.save_path) / "tokenizer", self._tokenizer.save_pretrained
            )
        return final

    def _is_checkpoint_due(self, step: int) -> bool:
        interval = self._config.checkpoint_interval
        if interval is not None:
            return interval > 0 and step % interval == 0
        # After the last step, the final model is written.
        waited_s = self._clock() - self._saved_at
        return step < self._config.training_steps and (
            waited_s >= 60 * self._config.checkpoint_minutes
        )

    def _is_sync_due(self, step: int) -> bool:
        publishes_final = self._weight_sync is not None and self._weight_sync.publishes_final
        return is_sync_due(step, self._config, publishes_final=publishes_final)

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
            optimizer_state = self._parallel.whole_optimizer_state(self._optimizer)
            states = self._parallel.gather(random_states())
        return save_checkpoint(
            model,
            self._tokenizer,
            Path(self._config.save_path) / folder,
            step,
            is_final,
            final_name="final_adapter" if self._config.uses_lora else "final_model",
            optimizer=self._optimizer if is_resumable else None,
            feed_state=None if self._feed is None else self._feed.state(),
            optimizer_state=optimizer_state,
            states_by_rank=states,
            step_metrics=self._step_metrics,
            writes=self._parallel.is_main,
        )

    def _drop_covered(self, step: int) -> None:
        """Delete the records and checkpoints that a new checkpoint replaces."""
        self._saved_at = self._clock()
        if self._feed is None:
            return
        self._feed.saved(step)
        if self._config.keep_checkpoints is not None:
            drop_old_checkpoints(
                self._config.save_path,
                keep=self._config.keep_checkpoints,
                run_id=self._feed.state().get("run_id"),
            )

    def _publish(self, model: Any, step: int, checkpoint: Path | None) -> None:
        if self._feed is None:
            return
        if self._weight_sync is not None:
            self._weight_sync.publish(model, checkpoint=checkpoint, step=step)
        self._feed.report_policy(step)


class PhaseClock:
    """Adds up seconds by phase; on CUDA, the end of a phase synchronizes with the device."""

    def __init__(
        self, device: str = "cpu", *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._waits = device.startswith("cuda")
        self._device = device
        self._clock = clock
        self._seconds: dict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        started = self._clock()
        yield
        if self._waits:
            torch.cuda.synchronize(self._device)
        self._seconds[phase] += self._clock() - started

    def take_metrics(self) -> dict[str, float]:
        """Return `train/<phase>_time` in seconds for each phase since the last call."""
        metrics = {f"train/{phase}_time": seconds for phase, seconds in self._seconds.items()}
        self._seconds.clear()
        return metrics


def group_metrics(
    groups: Sequence[Mapping[str, Any]], *, step: int, seq_len: int
) -> dict[str, float]:
    """Return staleness and truncation of a batch of [N] groups, as means over trajectories.

    `train/staleness_mean` and `train/staleness_max` are `step`, the completed optimizer steps,
    minus the group's `policy_version`. Groups without a version, or with one above `step`, are
    excluded; `train/staleness_unknown_fraction` is the share of their trajectories.
    `train/truncation_rate` is the share truncated by the engine's limit or `seq_len`.
    """
    sizes = [len(group["tokens"]) for group in groups]
    versions = [group.get("policy_version") for group in groups]
    ages = [
        (step - version, size)
        for version, size in zip(versions, sizes, strict=True)
        if version is not None and version <= step
    ]
    known = sum(size for _, size in ages)
    total = max(1, sum(sizes))
    num_truncated = sum(
        len(tokens) > seq_len or is_truncated_by_engine(group, i)
        for group in groups
        for i, tokens in enumerate(group["tokens"])
    )
    metrics = {
        "train/staleness_unknown_fraction": 1.0 - known / total,
        "train/truncation_rate": num_truncated / total,
    }
    if known:
        metrics["train/staleness_mean"] = sum(age * size for age, size in ages) / known
        metrics["train/staleness_max"] = float(max(age for age, _ in ages))
    return metrics


_PEAKS = (
    ("B200", 2250e12),
    ("H200", 989.4e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989.4e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("RTX 4090", 165.2e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("L4", 121e12),
)
"""Dense bfloat16 FLOPs per second from data sheets, by a part of the device's name; the first
match counts."""


def peak_flops_of(device_name: str) -> float | None:
    """Return the bfloat16 peak of a device in FLOPs per second, None if unknown."""
    return next((peak for part, peak in _PEAKS if part in device_name), None)


class ModelShape(NamedTuple):
    """Sizes of a model that determine its FLOPs."""

    num_body_parameters: int
    """Parameters outside the embeddings and the output layer."""
    num_head_parameters: int
    """Parameters of the output layer, tied or not."""
    num_layers: int
    attention_width: int
    """Heads times their dimension."""

    @classmethod
    def of(cls, model: Any) -> ModelShape | None:
        """Read the shape of a causal language model; None for a mixture of experts."""
        config = model.config
        layers, heads = (
            getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads")
        )
        is_sparse = any(
            getattr(config, name, None)
            for name in ("num_experts", "num_local_experts", "n_routed_experts")
        )
        head = model.get_output_embeddings()
        if is_sparse or head is None or not layers or not heads:
            return None
        ends = {id(p) for p in (head.weight, model.get_input_embeddings().weight)}
        body = sum(p.numel() for p in model.parameters() if id(p) not in ends)
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(body, head.weight.numel(), layers, heads * width)

    def step_flops(
        self, lengths: Iterable[int], *, num_trained_tokens: float, computed_fraction: float = 1.0
    ) -> float:
        """Return the FLOPs of forward and backward passes, without recomputation.

        Forward: 2 per parameter and token, plus `2 L^2` times the width of causal attention per
        layer. Backward: twice that. The output layer is applied to trained tokens only. Shared
        prefixes reduce the tokens to `computed_fraction`; those of the attention, of which they
        save less, are reduced alike.

        Source: Kaplan et al. 2020, arXiv:2001.08361.
        """
        counts = list(lengths)
        body = 6.0 * self.num_body_parameters * sum(counts)
        head = 6.0 * self.num_head_parameters * num_trained_tokens
        attention = 6.0 * self.num_layers * self.attention_width * sum(n * n for n in counts)
        return computed_fraction * (body + attention) + head


class StepObserver:
    """Collects the metrics of one step outside the loss, and displays the step in a view.

    `train/mfu` needs a known GPU; `num_devices` devices share a step.
    """

    def __init__(
        self,
        config: TrainingConfig,
        model: Any,
        *,
        num_devices: int = 1,
        view: LiveDisplay | None = None,
    ) -> None:
        self._seq_len = config.seq_len
        self._phases = PhaseClock(config.device)
        on_gpu = config.device.startswith("cuda")
        peak = peak_flops_of(torch.cuda.get_device_name(config.device)) if on_gpu else None
        self._peak_flops = None if peak is None else peak * num_devices
        self._shape = None if peak is None else ModelShape.of(model)
        self._view = view
        self._group_metrics: dict[str, float] = {}
        self._lengths: list[int] = []

    def note(self, activity: str) -> None:
        if self._view is not None:
            self._view.show_activity(activity)

    def take_groups(self, groups: Sequence[Mapping[str, Any]], *, step: int) -> None:
        """Record the groups of the step after `step` completed ones."""
        self._group_metrics = group_metrics(groups, step=step, seq_len=self._seq_len)
        self._lengths = [
            max(0, min(len(tokens), self._seq_len) - 1)
            for group in groups
            for tokens in group["tokens"]
        ]

    def measure(self, phase: str) -> contextlib.AbstractContextManager[None]:
        return self._phases.measure(phase)

    def metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics that complement those of a step, and reset."""
        found = {**self._group_metrics, **self._phases.take_metrics()}
        seconds = metrics["train/compute_time"]
        if self._peak_flops is not None and self._shape is not None and seconds > 0:
            flops = self._shape.step_flops(
                self._lengths,
                num_trained_tokens=metrics["train/trained_tokens"],
                computed_fraction=1.0 - metrics["train/shared_prefix_fraction"],
            )
            found["train/mfu"] = flops / seconds / self._peak_flops
        return found

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._view is not None:
            self._view.show_step(step, metrics)


_MISALIGNED_LOGPROB = 0.5
_SUSPICIOUS_GAP = 2.0
_WRONG_MODE_GAP = 0.05
"""Mean difference of sampler and trainer, in nats, above which `--logprobs-mode` may be wrong;
rounding causes less."""


class StepNotes:
    """Logs warnings about suspicious batches and metrics."""

    def __init__(self, *, has_raw_logprobs: bool = False) -> None:
        self._noted_fields: frozenset[str] = frozenset()
        self._has_raw_logprobs = has_raw_logprobs
        self._is_mode_noted = False

    def add(self, summary: BatchSummary, metrics: Mapping[str, float]) -> None:
        """Log the warnings of one step; an unknown field is logged once in a run."""
        for name in sorted(summary.unknown_fields - self._noted_fields):
            logger.warning("groups have a field %r, which this trainer does not read", name)
        self._noted_fields |= summary.unknown_fields
        if summary.bad_groups:
            logger.warning(
                "%d of %d groups were left out (--on-bad-group stop ends the run instead): %s",
                len(summary.bad_groups),
                len(summary.bad_groups) + summary.num_groups,
                next(iter(summary.bad_groups.values())),
            )
        if metrics["train/skipped_steps"]:
            logger.warning("the gradient was not finite; this step did not change the weights")
        if summary.num_zero_gradient_groups == summary.num_groups:
            logger.warning(
                "no group had an advantage, a demonstration or teacher logprobs: this batch had no "
                "gradient"
            )
        if summary.num_truncated_rows:
            logger.warning("%d sequences were truncated to seq_len", summary.num_truncated_rows)
        if summary.num_rows_of_partial_sampling:
            logger.warning(
                "%d sequences were sampled with top-p, top-k or min-p: their logprobs and the "
                "trainer's are not of the same distribution",
                summary.num_rows_of_partial_sampling,
            )
        inference_mean = metrics.get("logprobs/inference_mean")
        if inference_mean is None:
            return
        self._note_wrong_mode(metrics)
        gap = abs(inference_mean - metrics["logprobs/training_mean"])
        if inference_mean > _MISALIGNED_LOGPROB:
            logger.warning(
                "mean inference logprob %.2f: masks and logprobs disagree", inference_mean
            )
        elif gap > _SUSPICIOUS_GAP:
            logger.warning("trainer and engine logprobs differ by %.2f in the mean", gap)

    def _note_wrong_mode(self, metrics: Mapping[str, float]) -> None:
        """Log once if the engine's logprobs look like those of the other `--logprobs-mode`."""
        difference = metrics["alignment/diff_abs_mean"]
        other = metrics.get("alignment/other_mode_diff_abs_mean")
        if other is None or self._is_mode_noted:
            return
        if difference > _WRONG_MODE_GAP and other < 0.5 * difference:
            self._is_mode_noted = True
            present, right = (
                ("raw", "processed") if self._has_raw_logprobs else ("processed", "raw")
            )
            logger.warning(
                "the engine's logprobs, assumed to be %s, differ from the trainer's by %.2f on "
                "average, and by %.2f if they are %s: set --logprobs-mode %s",
                present,
                difference,
                other,
                right,
                right,
            )


_MOST_REFUSED_BATCHES = 3
"""Consecutive batches without a trainable group that end a run before its first step.

This indicates wrong settings. After the first step such batches are skipped: an environment must
not end a run that trains on the groups of others.
"""


def row_rules(config: TrainingConfig) -> RowRules:
    """Return the settings of the conversion of groups to rows."""
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
    left = 1.0 - progress
    if config.lr_schedule == "cosine":
        left = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.min_lr + (config.lr - config.min_lr) * left


class Trainer:
    """The training loop of one run.

    Args:
        config: Settings.
        model: A causal language model in training mode on `config.device`.
        tokenizer: Saved with the model, not used otherwise.
        optimizer: Optimizer of the model's trainable parameters.
        feed: Source of the batches; None on ranks other than 0.
        weight_sync: Updates the engine, on rank 0 only; already started. None: no engine.
        run_log: Log of the metrics.
        steps_done: Optimizer steps completed before this process.
        processed_logprobs: Whether the engine's logprobs are after temperature scaling.
        policy: The model prepared for `parallel`; None: prepared here, for one process.
        reference: Model of the KL penalty; None: groups have `ref_logprobs`.
        parallel: The ranks that train together.
        view: Displays the run in progress.
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
        parallel: Parallel = ONE_PROCESS,
        view: LiveDisplay | None = None,
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
        self._choice = config.loss_choice
        self._autocast = autocast(config)
        self._notes = StepNotes(has_raw_logprobs=not processed_logprobs)
        self._parallel = parallel
        self._publisher = Publisher(
            config,
            model=model,
            tokenizer=tokenizer,
            optimizer=optimizer,
            feed=feed,
            weight_sync=weight_sync,
            parallel=parallel,
        )
        policy = policy or prepare_policy(model, config)
        self._scorer, self._packs = policy.scorer, policy.packs
        self._min_shared_fraction = policy.min_shared_fraction
        self._num_input_tokens = self._num_computed_tokens = 0
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
        if self._feed is not None:
            self._feed.acknowledge(batch_id, steps_done=self.steps_done)
        times = StepTimes(fetched - started, computed - fetched, self._clock() - computed)
        metrics.update(times.metrics(num_input_tokens=batch.summary.num_input_tokens))
        metrics.update(self._observer.metrics(metrics))
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
        self._observer.take_groups(
            [group for i, group in enumerate(leased.groups) if i not in bad_groups],
            step=self.steps_done,
        )
        return leased.batch_id, split_batch(batch, self._parallel.world_size)

    def _next_batch(self) -> tuple[LeasedBatch, Batch]:
        """Lease and build the next batch, skipping those without a trainable group.

        Raises:
            GroupError: a batch with `on_bad_group="stop"`, or several in a row before the first
                step, cannot be trained; each is rejected.
            ConfigError: this run cannot train on the groups of an environment.
        """
        assert self._feed is not None  # only rank 0 leases batches
        num_batches = num_groups = 0
        while True:
            leased = self._feed.next_batch(self.steps_done)
            try:
                batch = self._build(leased)
            except (GroupError, ConfigError) as error:
                # Rejected in any case, so that a resumed run does not receive it again.
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
            min_shared_fraction=self._min_shared_fraction,
        )

    def train_on(self, batch: Batch) -> dict[str, float]:
        """Take one optimizer step on a batch and return its metrics.

        A step whose gradient is not finite is skipped and counted, to protect the weights.
        """
        learning_rate = learning_rate_at(self.steps_done, self.config)
        for parameters in self._optimizer.param_groups:
            # None with Adafactor's relative_step, which computes the rate itself.
            if parameters["lr"] is not None:
                parameters["lr"] = learning_rate
        stats = StepStats(clip_low=self._choice.clip_low, clip_high=self._choice.clip_high)
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
        for cpu_microbatch in batch.microbatches:
            microbatch = cpu_microbatch.to(self.config.device)
            reference_BT = None
            if batch.needs_reference and self._reference is not None:
                with self._observer.measure("forward"):
                    reference_BT = self._reference.logprobs_BT(microbatch)
            with self._observer.measure("forward"), self._autocast:
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
