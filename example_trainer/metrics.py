"""Metrics of an optimizer step: what is measured, under which names, and what is worth a warning.

Diagnostics of a step are means over the tokens of the whole batch that the policy loss trains. They
depend neither on padding nor on the split into microbatches. docs/trainer_metrics.md lists all
names; `run_log` writes and displays them.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from atroposlib.scored_data import IGNORE_INDEX, MASKED_LOGPROB, is_demonstration
from example_trainer.batch import BatchSummary, Microbatch
from example_trainer.config import TrainingConfig
from example_trainer.loss import BatchTotals, LossTerms, log_ratio_BT
from example_trainer.model import layer_configs, layer_widths
from example_trainer.rows import is_truncated_by_engine, version_runs_of
from example_trainer.run_log import LiveDisplay
from example_trainer.scoring import TokenScores

logger = logging.getLogger(__name__)


class StepTimes(NamedTuple):
    """Durations of the parts of one step."""

    fetch_s: float
    """Waiting for the batch."""
    compute_s: float
    """Building tensors, forward, backward, optimizer."""
    sync_s: float
    """Saving and publishing weights."""

    def metrics(self, *, num_input_tokens: int) -> dict[str, float]:
        """Return the durations, and the tokens per second of `compute_s`."""
        return {
            "train/step_time": sum(self),
            "train/data_fetch_time": self.fetch_s,
            "train/compute_time": self.compute_s,
            "train/sync_time": self.sync_s,
            "train/input_tokens": float(num_input_tokens),
            "train/tokens_per_s": num_input_tokens / self.compute_s if self.compute_s else 0.0,
        }


def batch_metrics(summary: BatchSummary) -> dict[str, float]:
    """Return the metrics of a batch that are known before the forward pass."""
    return {
        "train/reward_mean": summary.score_mean,
        "train/reward_std": summary.score_std,
        "train/advantage_mean": summary.advantage_mean,
        "train/advantage_std": summary.advantage_std,
        "train/num_groups": summary.num_groups,
        "train/bad_groups": len(summary.bad_groups) + summary.num_refused_before,
        "train/zero_advantage_groups_fraction": summary.num_zero_gradient_groups
        / max(1, summary.num_groups),
        "train/truncated_rows": summary.num_truncated_rows,
        "train/rows_without_logprobs": summary.num_rows_without_logprobs,
        "train/cut_sampling_rows": summary.num_rows_of_partial_sampling,
        "train/padding_fraction": summary.padding_fraction,
        "train/shared_prefix_fraction": summary.shared_prefix_fraction,
    }


def part_counts(totals: BatchTotals) -> dict[str, float]:
    """Return the tokens trained by each loss term except the policy loss; zeros are omitted."""
    counts = {
        "sft/token_count": totals.num_sft_tokens,
        "distill/token_count": totals.num_distill_tokens,
    }
    return {name: float(count) for name, count in counts.items() if count}


def step_line(step: int, total: int, metrics: Mapping[str, float]) -> str:
    """Return the log line of a step."""
    loss = metrics["train/loss"]
    parts = [
        f"step {step}/{total}",
        f"reward {metrics['train/reward_mean']:.3f}",
        f"loss {loss:.6f}" if abs(loss) < 0.01 else f"loss {loss:.4f}",
        f"grad {metrics['train/grad_norm']:.3f}",
    ]
    if "grpo/mean_ratio" in metrics:
        parts.append(f"ratio {metrics['grpo/mean_ratio']:.3f}")
        parts.append(f"outside clip {metrics['grpo/clipped_fraction']:.1%}")
    if metrics.get("train/bad_groups"):
        parts.append(f"bad groups {metrics['train/bad_groups']:.0f}")
    parts.append(f"{metrics['train/tokens_per_s']:,.0f} tok/s")
    parts.append(
        f"fetch {metrics['train/data_fetch_time']:.2f} s, "
        f"train {metrics['train/compute_time']:.2f} s, sync {metrics['train/sync_time']:.2f} s"
    )
    return " | ".join(parts)


class StepStats:
    """Sums of the diagnostics of a step, added up by microbatch."""

    def __init__(self, *, clip_low: float, clip_high: float) -> None:
        self.loss = 0.0
        """Sum of the loss shares."""
        self._bounds = (1.0 - clip_low, 1.0 + clip_high)
        self._parts_sums: dict[str, float] = defaultdict(float)
        self._sums: dict[str, float] = defaultdict(float)
        self._largest_difference = 0.0
        self._is_tempered = False

    def add(
        self,
        microbatch: Microbatch,
        scores: TokenScores,
        terms: LossTerms,
        *,
        has_raw_logprobs: bool = False,
    ) -> None:
        """Add one microbatch, with its logprobs at the sampling temperatures."""
        trainer_logprobs_BT = scores.logprobs_BT.detach()
        self.loss += float(terms.loss.detach())
        mask_BT = terms.mask_BT
        trainer = trainer_logprobs_BT[mask_BT].double()
        positive = microbatch.advantages_BT[mask_BT] > 0
        self._count("tokens", trainer, one=True)
        self._count("logprob", trainer)
        self._count("logprob_squared", trainer**2)
        self._count("positive_tokens", positive)
        self._count("positive_logprob", trainer[positive])
        self._count("negative_logprob", trainer[~positive])
        self._count("bound", terms.bound_BT[mask_BT])
        if scores.entropy_BT is not None:
            self._count("entropy", scores.entropy_BT.detach()[mask_BT])
        if terms.weights is not None:
            self._count("weight", terms.weights.weight_BT[mask_BT])
            self._count("cut", terms.weights.cut_BT[mask_BT])
        if terms.kl_BT is not None:
            self._count("kl", terms.kl_BT[mask_BT])
        for name, part in terms.parts.items():
            self._parts_sums[name] += part
        proximal_BT = microbatch.proximal_logprobs_BT
        if proximal_BT is not None:
            log_BT = log_ratio_BT(trainer, proximal_BT[mask_BT].double())
            self._count("moved_k3", log_BT.exp() - 1.0 - log_BT)
        inference_BT = microbatch.inference_logprobs_BT
        known_BT = mask_BT & (inference_BT != MASKED_LOGPROB)
        self._compare(trainer_logprobs_BT, inference_BT, known_BT)
        # At temperature 1, both modes are the same.
        other = (trainer_logprobs_BT - inference_BT)[known_BT].double()
        if scores.untempered_BT is not None:
            self._is_tempered = True
            shift = (trainer_logprobs_BT - scores.untempered_BT)[known_BT].double()
            other = other + shift if has_raw_logprobs else other - shift
        self._count("other_mode_abs", other.abs())

    def add_up(self, other: StepStats) -> None:
        self.loss += other.loss
        self._largest_difference = max(self._largest_difference, other._largest_difference)
        self._is_tempered |= other._is_tempered
        for name, value in other._sums.items():
            self._sums[name] += value
        for name, value in other._parts_sums.items():
            self._parts_sums[name] += value

    def _compare(
        self, trainer_BT: torch.Tensor, inference_BT: torch.Tensor, known_BT: torch.Tensor
    ) -> None:
        trainer, inference = trainer_BT[known_BT].double(), inference_BT[known_BT].double()
        difference = trainer - inference
        ratio = log_ratio_BT(trainer, inference).exp()
        low, high = self._bounds
        self._count("known", trainer, one=True)
        self._count("inference", inference)
        self._count("inference_squared", inference**2)
        self._count("difference", difference)
        self._count("difference_abs", difference.abs())
        self._count("ratio", ratio)
        self._count("k3", ratio - 1.0 - ratio.log())
        self._count("outside", (ratio < low) | (ratio > high))
        if difference.numel():
            largest = float(difference.abs().max())
            self._largest_difference = max(self._largest_difference, largest)

    def _count(self, name: str, values: torch.Tensor, *, one: bool = False) -> None:
        self._sums[name] += float(values.numel() if one else values.sum())

    def metrics(self) -> dict[str, float]:
        """Return the step's metrics under their public names.

        `grpo/mean_ratio`, `grpo/clipped_fraction` and `alignment/*` compare the trainer's
        logprobs with the inference engine's and are omitted without the latter.
        `grpo/bound_fraction` is the share of tokens whose gradient the algorithm's own clip or
        mask changed, `grpo/truncated_fraction` of those whose importance weight was truncated.
        `grpo/policy_loss`, `sft/loss` and `distill/loss` are before their coefficients;
        `distill/kl`, the student's divergence from the teacher, is not in the loss. The entropy
        is that of the trainer's distribution, omitted if logits are computed as a whole; its
        estimate is minus the mean logprob of the sampled tokens.
        """
        sums = self._sums
        tokens = max(1.0, sums["tokens"])
        negatives = sums["tokens"] - sums["positive_tokens"]
        mean = sums["logprob"] / tokens
        result = {
            "train/loss": self.loss,
            "train/trained_tokens": sums["tokens"],
            "train/pos_logp": sums["positive_logprob"] / max(1.0, sums["positive_tokens"]),
            "train/neg_logp": sums["negative_logprob"] / max(1.0, negatives),
            "train/logp": mean,
            "train/entropy_estimate": -mean,
            "logprobs/training_mean": mean,
            "logprobs/training_std": _deviation(sums["logprob_squared"] / tokens, mean),
            "grpo/bound_fraction": sums["bound"] / tokens,
            "alignment/missing_fraction": 1.0 - sums["known"] / tokens,
            **self._parts(tokens),
        }
        return {**result, **self._alignment()} if sums["known"] else result

    def last_iteration_metrics(self) -> dict[str, float]:
        """Return the metrics of the last of several updates on one batch.

        `kl` estimates the KL divergence of the policy from that before the first update, in nats.
        """
        tokens = max(1.0, self._sums["tokens"])
        return {
            "grpo/last_iteration_loss": self.loss,
            "grpo/last_iteration_bound_fraction": self._sums["bound"] / tokens,
            "grpo/last_iteration_kl": self._sums["moved_k3"] / tokens,
        }

    def _parts(self, tokens: float) -> dict[str, float]:
        result = {}
        if "entropy" in self._sums:
            result["train/entropy"] = self._sums["entropy"] / tokens
        if "weight" in self._sums:
            result["grpo/mean_importance_weight"] = self._sums["weight"] / tokens
            result["grpo/truncated_fraction"] = self._sums["cut"] / tokens
        if "kl" in self._sums:
            result["grpo/mean_kl"] = self._sums["kl"] / tokens
        names = {"policy": "grpo/policy_loss", "kl_penalty": "grpo/kl_penalty"}
        names["entropy_bonus"] = "grpo/entropy_bonus"
        names |= {"sft": "sft/loss", "distill": "distill/loss", "divergence": "distill/kl"}
        return result | {names[name]: part for name, part in self._parts_sums.items()}

    def _alignment(self) -> dict[str, float]:
        known = self._sums["known"]
        inference_mean = self._sums["inference"] / known
        squares = self._sums["inference_squared"] / known
        other_mode = {}
        if self._is_tempered:
            other_mode["alignment/other_mode_diff_abs_mean"] = self._sums["other_mode_abs"] / known
        return {
            **other_mode,
            "grpo/mean_ratio": self._sums["ratio"] / known,
            "grpo/clipped_fraction": self._sums["outside"] / known,
            "logprobs/inference_mean": inference_mean,
            "logprobs/inference_std": _deviation(squares, inference_mean),
            "alignment/diff_mean": self._sums["difference"] / known,
            "alignment/diff_abs_mean": self._sums["difference_abs"] / known,
            "alignment/diff_max": self._largest_difference,
            "alignment/k3": self._sums["k3"] / known,
        }


def sum_stats(parts: Sequence[StepStats]) -> StepStats:
    """Add the statistics of all ranks to those of the first, and return it."""
    first, *others = parts
    for other in others:
        first.add_up(other)
    return first


def _deviation(mean_of_squares: float, mean: float) -> float:
    return math.sqrt(max(0.0, mean_of_squares - mean * mean))


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
    groups: Sequence[Mapping[str, Any]],
    *,
    step: int,
    seq_len: int,
    max_token_staleness: int | None = None,
) -> dict[str, float]:
    """Return staleness and truncation of a batch of [N] groups, as means over trajectories.

    `train/staleness_mean` and `train/staleness_max` are `step`, the completed optimizer steps,
    minus the group's `policy_version`. Groups without a version, or with one above `step`, are
    excluded; `train/staleness_unknown_fraction` is the share of their trajectories.
    `train/truncation_rate` is the share truncated by the engine's limit or `seq_len`. The metrics
    of `token_staleness_metrics` are added.
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
    return metrics | token_staleness_metrics(
        groups, step=step, seq_len=seq_len, max_staleness=max_token_staleness
    )


_STALENESS_CLASSES = (("0", 0), ("1", 1), ("2_to_3", 3), ("4_or_more", None))
"""Names, and the largest staleness of each class in steps."""


def token_staleness_metrics(
    groups: Iterable[Mapping[str, Any]], *, step: int, seq_len: int, max_staleness: int | None
) -> dict[str, float]:
    """Return the staleness of the sampled tokens of a batch, before any are masked.

    The staleness of a token is `step`, the completed optimizer steps, minus the policy version that
    sampled it. Tokens without a version, or with one above `step`, are unknown. If all are unknown,
    only the number of masked tokens is returned, which needs `max_staleness`.
    """
    counts: dict[int | None, int] = defaultdict(int)
    for group in groups:
        for i, masks in enumerate(group["masks"]):
            if is_demonstration(group, i):
                continue
            start = 0
            for version, length in version_runs_of(group, i):
                end = start + (length or 0)
                labels = masks[start : min(end, seq_len)]
                age = step - version if version is not None and version <= step else None
                counts[age] += len(labels) - labels.count(IGNORE_INDEX)
                start = end
    total = sum(counts.values())
    known = {age: count for age, count in counts.items() if age is not None and count}
    metrics: dict[str, float] = {}
    if max_staleness is not None:
        masked = sum(count for age, count in known.items() if age > max_staleness)
        metrics["train/stale_tokens_masked"] = float(masked)
    if not known:
        return metrics
    num_known = sum(known.values())
    metrics |= {
        "train/token_staleness_mean": sum(a * count for a, count in known.items()) / num_known,
        "train/token_staleness_max": float(max(known)),
        "train/token_staleness_unknown_fraction": 1.0 - num_known / total,
    }
    least = 0
    for name, most in _STALENESS_CLASSES:
        count = sum(c for a, c in known.items() if least <= a and (most is None or a <= most))
        metrics[f"train/token_staleness_{name}_fraction"] = count / total
        least = 0 if most is None else most + 1
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
    attention_width: int
    """Heads times their dimension, summed over the layers."""

    @classmethod
    def of(cls, model: Any) -> ModelShape | None:
        """Read the shape of a causal language model; None for a mixture of experts."""
        config = model.config
        layers = layer_configs(config) if hasattr(config, "num_hidden_layers") else []
        is_dense = all(getattr(layer, "num_attention_heads", None) for layer in layers) and not any(
            getattr(layer, name, None)
            for layer in layers
            for name in ("num_experts", "num_local_experts", "n_routed_experts")
        )
        head = model.get_output_embeddings()
        if not layers or not is_dense or head is None:
            return None
        ends = {id(p) for p in (head.weight, model.get_input_embeddings().weight)}
        body = sum(p.numel() for p in model.parameters() if id(p) not in ends)
        width = sum(each.query for each in layer_widths(config))
        return cls(body, head.weight.numel(), width)

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
        attention = 6.0 * self.attention_width * sum(n * n for n in counts)
        return computed_fraction * (body + attention) + head


class StepObserver:
    """Collects the metrics of one step outside the loss, and displays the step in a view.

    `train/mfu` needs a known GPU; `num_devices` devices share a step. Sequences are truncated to
    `seq_len`; None: that of the config.
    """

    def __init__(
        self,
        config: TrainingConfig,
        model: Any,
        *,
        num_devices: int = 1,
        seq_len: int | None = None,
        view: LiveDisplay | None = None,
    ) -> None:
        self._seq_len = seq_len or config.seq_len
        self._phases = PhaseClock(config.device)
        on_gpu = config.device.startswith("cuda")
        peak = peak_flops_of(torch.cuda.get_device_name(config.device)) if on_gpu else None
        self._peak_flops = None if peak is None else peak * num_devices
        self._shape = None if peak is None else ModelShape.of(model)
        self._view = view
        self._max_token_staleness = config.max_token_staleness
        self._num_iterations = config.num_iterations
        self._group_metrics: dict[str, float] = {}
        self._lengths: list[int] = []

    def note(self, activity: str) -> None:
        if self._view is not None:
            self._view.show_activity(activity)

    def take_groups(self, groups: Sequence[Mapping[str, Any]], *, step: int) -> None:
        """Record the groups of the step after `step` completed ones."""
        self._group_metrics = group_metrics(
            groups,
            step=step,
            seq_len=self._seq_len,
            max_token_staleness=self._max_token_staleness,
        )
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
            found["train/mfu"] = self._num_iterations * flops / seconds / self._peak_flops
        return found

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._view is not None:
            self._view.show_step(step, metrics)


_MISALIGNED_LOGPROB = 0.5
"""Mean of the sampler's logprobs at trained tokens, with the placeholders among them."""
_SUSPICIOUS_GAP = 2.0
_WRONG_MODE_GAP = 0.05
"""Mean difference of sampler and trainer, in nats, above which `--logprobs-mode` may be wrong;
rounding causes less."""


_TERMS_OF_ALL_GROUPS = ("grpo/kl_penalty", "grpo/entropy_bonus")
_TRAINED_TOKENS = ("train/trained_tokens", "sft/token_count", "distill/token_count")


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
            logger.warning("the gradient was not finite; its update of the weights was skipped")
        if summary.num_zero_gradient_groups == summary.num_groups:
            has_others = any(name in metrics for name in _TERMS_OF_ALL_GROUPS)
            logger.warning(
                "no group had an advantage, a demonstration or teacher logprobs: this batch had %s",
                "only the gradient of the other terms of the loss" if has_others else "no gradient",
            )
        if not any(metrics.get(name) for name in _TRAINED_TOKENS):
            logger.warning(
                "no token of this batch is trained: its groups mask all tokens, or seq_len cut off "
                "those that they train"
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
        if metrics["train/trained_tokens"] and not summary.num_rows_without_logprobs:
            missing = metrics["alignment/missing_fraction"]
            mean = missing * MASKED_LOGPROB + (1.0 - missing) * (inference_mean or 0.0)
            if mean > _MISALIGNED_LOGPROB:
                logger.warning("mean inference logprob %.2f: masks and logprobs disagree", mean)
        if inference_mean is None:
            return
        self._note_wrong_mode(metrics)
        gap = abs(inference_mean - metrics["logprobs/training_mean"])
        if gap > _SUSPICIOUS_GAP:
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


def memory_metrics(device: str) -> dict[str, float]:
    """Return the memory of a CUDA device in GiB; empty on other devices."""
    if not device.startswith("cuda"):
        return {}
    return {
        "train/gpu_memory_gb": torch.cuda.memory_allocated(device) / 2**30,
        "train/gpu_memory_reserved_gb": torch.cuda.memory_reserved(device) / 2**30,
    }
