"""Where the weights go after a step: into checkpoints, and to the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from example_trainer.checkpointing import (
    drop_old_checkpoints,
    random_states,
    replace_directory,
    save_checkpoint,
)
from example_trainer.config import TrainingConfig
from example_trainer.feed import JOURNAL_DIRECTORY, GroupFeed
from example_trainer.parallel import Parallel
from example_trainer.weight_sync import WeightSync, is_sync_due

__all__ = ["Publisher", "TrainingParts"]


class TrainingParts(NamedTuple):
    """What a run trains and whom it deals with; the loop and the publisher share them."""

    model: Any
    """The trained model; each rank's part of it where weights are sharded."""
    tokenizer: Any
    """Saved beside the model."""
    optimizer: Any
    """Saved in checkpoints that can be resumed from."""
    feed: GroupFeed
    """Brings batches; is told which weights the engine serves and what is on disk."""
    weight_sync: WeightSync
    """How the engine gets new weights."""
    parallel: Parallel
    """The ranks that train together."""


class Publisher:
    """Saves and publishes what is due; every rank calls it, rank 0 writes and speaks.

    Args:
        config: Settings.
        parts: What is saved, and who is told.
        clock: Monotonic seconds, for checkpoints that go by minutes.
    """

    def __init__(
        self,
        config: TrainingConfig,
        parts: TrainingParts,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._model = parts.model
        self._tokenizer = parts.tokenizer
        self._optimizer = parts.optimizer
        self._feed = parts.feed
        self._weight_sync = parts.weight_sync
        self._parallel = parts.parallel
        self._step_metrics: Mapping[str, float] = {}
        self._clock = clock
        self._saved_at = clock()

    def before_step(self, step: int) -> None:
        """Let the engine make room for the optimiser step number `step`."""
        self._weight_sync.before_step(sync_follows=self._is_sync_due(step))

    def after_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write and publish what is due after a step; the final model is `finish`'s business.

        Args:
            step: Optimiser steps done.
            metrics: Of the step as far as they are known, kept with a checkpoint.
        """
        self._step_metrics = metrics
        publishes = self._is_sync_due(step) and step < self._config.training_steps
        # Clock and journal are those of rank 0, and saving takes all ranks.
        saves, cuts_journal = self._parallel.broadcast(
            (self._is_checkpoint_due(step), self._feed.wants_checkpoint())
        )
        cuts_journal = cuts_journal and not saves
        if not saves and not publishes and not cuts_journal:
            return
        model = self._parallel.whole_model(self._model)
        checkpoint: Path | None = None
        if saves:
            checkpoint = self._save(model, step, is_resumable=True)
            self._note_saved(step)
        if cuts_journal:
            self._save(model, step, is_resumable=True, folder=JOURNAL_DIRECTORY)
            self._feed.saved(step)
        if publishes:
            self._publish(model, step, checkpoint)

    def finish(self, step: int) -> Path:
        """Write the final model and publish it where somebody uses it; returns its directory."""
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
        # The final model follows the last step at once.
        waited_s = self._clock() - self._saved_at
        return step < self._config.training_steps and (
            waited_s >= 60 * self._config.checkpoint_minutes
        )

    def _is_sync_due(self, step: int) -> bool:
        return is_sync_due(step, self._config, publishes_final=self._weight_sync.publishes_final)

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
            feed_state=self._feed.state(),
            optimizer_state=optimizer_state,
            states_by_rank=states,
            step_metrics=self._step_metrics,
            writes=self._parallel.is_main,
        )

    def _note_saved(self, step: int) -> None:
        self._saved_at = self._clock()
        self._feed.saved(step)
        if self._parallel.is_main and self._config.keep_checkpoints is not None:
            drop_old_checkpoints(
                self._config.save_path,
                keep=self._config.keep_checkpoints,
                run_id=self._feed.state().get("run_id"),
            )

    def _publish(self, model: Any, step: int, checkpoint: Path | None) -> None:
        self._weight_sync.publish(model, checkpoint=checkpoint, step=step)
        self._feed.report_policy(step)
