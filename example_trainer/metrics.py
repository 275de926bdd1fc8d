"""What the trainer logs per step, under which names, and how it looks in the terminal."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from atroposlib.errors import ConfigError
from atroposlib.utils.run_log import RunLog
from example_trainer.batch import BatchSummary
from example_trainer.config import TrainingConfig
from example_trainer.losses.reductions import BatchTotals
from example_trainer.metrics_file import claim_metrics_file
from example_trainer.reporting.writing import REPORT_NAME, write_report, write_settings

__all__ = [
    "StepTimes",
    "batch_metrics",
    "metrics_path_of",
    "open_run_log",
    "part_counts",
    "step_line",
    "with_wandb_names",
    "write_run_report",
]

logger = logging.getLogger(__name__)


class StepTimes(NamedTuple):
    """Where the seconds of one step went."""

    fetch_s: float
    """Waiting for the batch."""
    compute_s: float
    """Building tensors, forward, backward, optimiser."""
    sync_s: float
    """Saving and publishing weights."""

    def metrics(self, *, num_input_tokens: int) -> dict[str, float]:
        """Return the times, and the tokens per second of the computing part."""
        return {
            "train/step_time": sum(self),
            "train/data_fetch_time": self.fetch_s,
            "train/compute_time": self.compute_s,
            "train/sync_time": self.sync_s,
            "train/input_tokens": float(num_input_tokens),
            "train/tokens_per_s": num_input_tokens / self.compute_s if self.compute_s else 0.0,
        }


def with_wandb_names(config: TrainingConfig, run_id: str) -> TrainingConfig:
    """Return the config with wandb settings that can work.

    Without a project wandb is switched off with a warning. A missing group becomes the first eight
    letters and digits of the run's id: random, and the same when the run is resumed.
    """
    if not config.use_wandb:
        return config
    if not config.wandb_project:
        logger.warning("use_wandb needs wandb_project; going on with the local metrics file only")
        return config.model_copy(update={"use_wandb": False})
    if config.wandb_group:
        return config
    return config.model_copy(update={"wandb_group": run_id[:8]})


def open_run_log(
    config: TrainingConfig,
    *,
    run_id: str,
    steps_done: int = 0,
    last_metrics: Mapping[str, float] | None = None,
) -> RunLog:
    """Open the run's log: always a JSONL file, others where the config asks for them.

    Args:
        config: Settings.
        run_id: Which run it is; one that is continued goes on in its own file.
        steps_done: Steps of it that stand; those after them will be logged again.
        last_metrics: Of the last of them; logged when the run was killed before it did.
    """
    path = metrics_path_of(config)
    lacks_last = claim_metrics_file(path, run_id=run_id, steps_done=steps_done)
    settings = config.model_dump(mode="json")
    changed = {name: settings[name] for name in config.model_dump(exclude_defaults=True)}
    write_settings(path, settings, changed, run_id=run_id)
    log = RunLog(
        use_wandb=config.use_wandb, metrics_path=path, use_tensorboard=config.use_tensorboard
    )
    log.start(
        project=config.wandb_project,
        group=config.wandb_group,
        name=None,
        config=config.model_dump(),
        run_id=run_id,
        steps_done=steps_done,
    )
    if lacks_last and last_metrics:
        log.log(dict(last_metrics), step=steps_done)
    return log


def write_run_report(config: TrainingConfig) -> None:
    """Write the report of a run beside its metrics; a run does not fail because of it."""
    path = metrics_path_of(config)
    if not path.is_file():
        return
    report = path.with_name(REPORT_NAME)
    try:
        num_steps = write_report(path, report)
    except (ConfigError, OSError) as error:
        logger.warning("the report could not be written: %s", error)
    else:
        logger.info("report of %d steps: %s", num_steps, report)


def metrics_path_of(config: TrainingConfig) -> Path:
    """Return the JSONL file of a run's metrics."""
    return Path(config.metrics_path or Path(config.save_path) / "metrics.jsonl")


def batch_metrics(summary: BatchSummary) -> dict[str, float]:
    """Return what is known of a batch before the forward pass."""
    return {
        "train/reward_mean": summary.score_mean,
        "train/reward_std": summary.score_std,
        "train/advantage_mean": summary.advantage_mean,
        "train/advantage_std": summary.advantage_std,
        "train/num_groups": summary.num_groups,
        "train/bad_groups": len(summary.bad_groups) + summary.num_refused_before,
        "train/zero_advantage_groups_fraction": summary.num_silent_groups
        / max(1, summary.num_groups),
        "train/truncated_rows": summary.num_truncated_rows,
        "train/rows_without_logprobs": summary.num_rows_without_logprobs,
        "train/cut_sampling_rows": summary.num_rows_of_cut_sampling,
        "train/padding_fraction": summary.padding_fraction,
    }


def part_counts(totals: BatchTotals) -> dict[str, float]:
    """Return how many tokens the parts beside the policy loss train, less the unused ones."""
    counts = {
        "sft/token_count": totals.num_sft_tokens,
        "distill/token_count": totals.num_distill_tokens,
    }
    return {name: float(count) for name, count in counts.items() if count}


def step_line(step: int, total: int, metrics: Mapping[str, float]) -> str:
    """Return the one line the terminal shows for a step."""
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
