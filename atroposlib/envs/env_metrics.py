"""What an environment reports: metrics, a table of rollouts, evaluations and checkpoints."""

from __future__ import annotations

import logging
import math
import random
import string
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from atroposlib.envs import checkpoint, eval_log
from atroposlib.envs.env_hooks import settle
from atroposlib.envs.env_scoring import ScoringEnv
from atroposlib.envs.metric_summaries import completion_length_metrics, duration_metrics
from atroposlib.envs.reward_parts import PartSums
from atroposlib.envs.run_figures import RunFigures
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.errors import NoDataError
from atroposlib.scored_data import ScoredDataGroup
from atroposlib.type_definitions import Item
from atroposlib.utils.long_decode import decode_long
from atroposlib.utils.run_log import RunLog
from atroposlib.utils.writable import unwritable

__all__ = ["ReportingEnv", "dated_run_name"]

logger = logging.getLogger(__name__)

OTHER_CLIENTS = frozenset({"aiohttp", "anthropic", "httpx", "litellm", "openai", "requests"})
"""Packages by which an environment may ask models past its server manager."""


def dated_run_name(stem: str, *, now: float) -> str:
    """Return `<stem>-<YYYY-MM-DD>-<six random letters>`."""
    letters = "".join(random.choices(string.ascii_lowercase, k=6))
    return f"{stem}-{time.strftime('%Y-%m-%d', time.localtime(now))}-{letters}"


def _run_opened_elsewhere() -> Any:
    """The run an environment opened by calling `wandb.init` itself, or None."""
    wandb = sys.modules.get("wandb")
    return None if wandb is None else wandb.run


def _is_measured(value: Any) -> bool:
    """Whether a metric says that something was measured: any value but 0 and NaN."""
    return isinstance(value, int | float) and value != 0 and not math.isnan(value)


class ReportingEnv(ScoringEnv):
    """The reporting half of an environment.

    Buffers are emptied when they are logged; the counters run for the whole life of the
    environment. Authors may replace a buffer by a fresh list at any time.

    Attributes:
        drop_counts: groups not sent, by reason; `drops/<reason>` in the metrics.
        failure_counts: failed rollouts and hooks, by exception name; `failures/<name>`.
        note_counts: admitted groups with a note, by its name; `groups/tokenized_from_text`.
        straggler_counts: rollouts that took too long, by what became of them;
            `stragglers/retried`, `stragglers/left_out`, `stragglers/given_up`.
        reward_parts_since_log: means of the `reward_parts` of groups; `train/reward/<part>`.
        run_log: where the metrics go.
        settings_yaml: effective settings of the command, to be saved; None when they are, or there
            is no command.
        run_figures: what was made lately, for the view in the terminal.
    """

    run_log: RunLog
    settings_yaml: str | None = None
    run_figures: RunFigures
    drop_counts: Counter[str]
    failure_counts: Counter[str]
    note_counts: Counter[str]
    straggler_counts: Counter[str]
    completion_lengths: list[int]
    reward_parts_since_log: PartSums
    rollouts_for_wandb: list[Any]
    task_duration: list[float]
    succeeded_task_duration: list[float]
    failed_task_duration: list[float]
    task_successful: list[int]
    mainloop_timings: list[float]
    workers_added_list: list[int]
    curr_step: int
    max_token_len: int
    wandb_project: str | None
    wandb_group: str | None
    wandb_prepend: str | None
    checkpoint_dir: str
    testing: bool
    _num_answered_before: int | None = None

    @property
    def desired_name(self) -> str:
        """The name to register under: `wandb_name`, the class's `name`, or the class name."""
        return self.config.wandb_name or self.name or type(self).__name__

    @property
    def wandb_run(self) -> Any:
        """The open Weights & Biases run, or None; assign a run to log to it."""
        return self.run_log.wandb_run

    @wandb_run.setter
    def wandb_run(self, run: Any) -> None:
        self.run_log.wandb_run = run

    def count_failure(self, name: str) -> None:
        """Count a failed rollout, evaluation or hook under a name."""
        self.failure_counts[name] += 1

    def count_straggler(self, name: str) -> None:
        """Count a straggling rollout under what became of it."""
        self.straggler_counts[name] += 1

    def _name_metrics_file(self, registered_name: str) -> None:
        if self.run_log.metrics_path is None:
            self.run_log.metrics_path = Path("logs", registered_name, "metrics.jsonl")
            logger.info("metrics go to %s", self.run_log.metrics_path)
        self._save_settings(self.run_log.metrics_path)

    def _save_settings(self, metrics_path: Path) -> None:
        """Write the effective settings beside the metrics, once; `--config` reads them."""
        text, self.settings_yaml = self.settings_yaml, None
        if text is None:
            return
        path = metrics_path.with_suffix(".settings.yaml")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            logger.warning("the settings are not saved: %s", unwritable(path, error, None))
        else:
            logger.info("all settings are in %s", path)

    def _start_run_log(self, *, name: str | None) -> None:
        self.run_log.start(
            project=self.wandb_project or None,
            group=self.wandb_group or None,
            name=name,
            config=self.config.model_dump(mode="json", fallback=str),
        )

    def _start_local_run(self) -> None:
        """Open the metrics of a run without a service, as `process` and `evaluate` need them."""
        self._name_metrics_file(self.desired_name)
        self._start_run_log(name=dated_run_name(self.desired_name, now=time.time()))

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Log the metrics since the last call.

        Called when the trainer's step changes and enough groups were sent. Override it to add
        keys, then await this one. Keys get the registered name as a prefix, except those of the
        inference servers.

        Args:
            wandb_metrics: metrics to log along; changed in place.
        """
        metrics = {} if wandb_metrics is None else wandb_metrics
        limit = self.max_token_len if self.max_token_len > 0 else self.config.max_token_length
        metrics.update(completion_length_metrics(self.completion_lengths, max_token_len=limit))
        metrics.update(self.reward_parts_since_log.means("train"))
        self.reward_parts_since_log = PartSums()
        metrics = await settle(self.create_rollout_table(metrics)) or metrics
        metrics = self.perf_stats(metrics) or metrics
        metrics.update({f"drops/{reason}": n for reason, n in self.drop_counts.items()})
        metrics.update({f"failures/{name}": n for name, n in self.failure_counts.items()})
        metrics.update({f"groups/{note}": n for note, n in self.note_counts.items()})
        metrics.update({f"stragglers/{name}": n for name, n in self.straggler_counts.items()})
        metrics.update(self._score_metrics())
        self.rollouts_for_wandb = []
        self.completion_lengths = []
        prefix = f"{self.wandb_prepend}_" if self.wandb_prepend is not None else ""
        metrics = {f"{prefix}{key}": value for key, value in metrics.items()}
        for i, server in enumerate(self.server.servers):
            metrics.update(await settle(server.wandb_metrics({}, f"server_{i}")) or {})
        if self.config.use_wandb and self.wandb_run is None:
            self.wandb_run = _run_opened_elsewhere()
        self.run_log.log(metrics, step=self.curr_step)

    async def create_rollout_table(self, wandb_metrics: dict[str, Any]) -> dict[str, Any]:
        """Add the kept rollouts as table `train/rollouts`; called by `wandb_log`.

        Environments may keep more than text and score of a rollout; the rest is for tables of
        their own.
        """
        rows = [row[:2] for group in self.rollouts_for_wandb for row in group]
        if rows:
            wandb_metrics["train/rollouts"] = self.run_log.table(["text", "score"], rows)
        return wandb_metrics

    async def add_rollouts_for_wandb(
        self, scored_data: ScoredDataGroup, item: Item | None = None
    ) -> None:
        """Keep the first trajectories of a group for the table; called for each admitted group.

        Keeps `(decoded text, score)` of `num_rollouts_per_group_for_logging` trajectories, and
        the latest `num_rollouts_to_keep` groups.
        """
        wanted = self.config.num_rollouts_per_group_for_logging
        if wanted == -1:
            wanted = self.config.group_size
        pairs = zip(scored_data["tokens"], scored_data["scores"], strict=True)
        rows = [(tokens, score) for tokens, score in pairs][:wanted]
        self.rollouts_for_wandb.append(
            [(await decode_long(self.tokenizer, tokens), score) for tokens, score in rows]
        )
        excess = len(self.rollouts_for_wandb) - self.config.num_rollouts_to_keep
        if excess > 0:
            self.rollouts_for_wandb = self.rollouts_for_wandb[excess:]

    def perf_stats(self, metrics_dict: dict[str, Any]) -> dict[str, Any]:
        """Add durations of rollouts and of the loop; a buffer counts with two or more values."""
        buffers: dict[str, list[Any]] = {
            "task_duration": self.task_duration,
            "succeeded_task_duration": self.succeeded_task_duration,
            "failed_task_duration": self.failed_task_duration,
            "mainloop_timings": self.mainloop_timings,
            "workers_added_per_attempt": self.workers_added_list,
        }
        for name, values in buffers.items():
            if len(values) > 1:
                metrics_dict.update(duration_metrics(name, values))
                values.clear()
        self.task_successful.clear()
        return metrics_dict

    async def evaluate_log(
        self,
        metrics: Mapping[str, Any],
        task_name: str | None = None,
        model_name: str | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
        generation_parameters: Mapping[str, Any] | None = None,
        samples: Sequence[Mapping[str, Any]] | None = None,
        verbose: bool = True,
    ) -> None:
        """Write an evaluation's result to `data_dir_to_save_evals`; without one, only warn.

        Args:
            metrics: name to value.
            task_name: defaults to `<name>_eval`.
            model_name: defaults to the config's, then to the first inference server's.
            start_time: seconds since the epoch, now when None.
            end_time: seconds since the epoch, now when None.
            generation_parameters: laid over `{"max_new_tokens": max_token_length}`.
            samples: one record per question.
            verbose: print a table.

        Raises:
            NoDataError: no request had an answer since the evaluation began, and every metric is 0:
                that says nothing about the model.
        """
        if model_name is None:
            model_name = getattr(self.config, "model_name", None)  # a field subclasses may add
        if model_name is None and self.server.servers:
            model_name = self.server.servers[0].config.model_name
        self._require_answers(metrics)
        parameters = {"max_new_tokens": self.config.max_token_length}
        eval_log.evaluate_log(
            metrics,
            eval_dir=self.config.data_dir_to_save_evals,
            task_name=task_name or f"{self.name or type(self).__name__}_eval",
            model_name=model_name,
            start_time=start_time,
            end_time=end_time,
            generation_parameters={**parameters, **(generation_parameters or {})},
            samples=samples,
            verbose=verbose,
        )

    def _begin_evaluation(self) -> None:
        """Note that what is answered from now on is the evaluation's."""
        self._num_answered_before = self._num_answered()

    def _num_answered(self) -> int:
        return self.server.num_answered if isinstance(self.server, ServerManager) else 0

    def _require_answers(self, metrics: Mapping[str, Any] | None) -> None:
        """Refuse the result of an evaluation that had no answer from a model.

        Args:
            metrics: the result; None: there is none.
        """
        before = self._num_answered_before
        if before is None or not isinstance(self.server, ServerManager) or self.testing:
            return
        if self._num_answered() > before:
            return
        if metrics is not None and any(_is_measured(value) for value in metrics.values()):
            self._num_answered_before = None  # asked through a client of its own
            return
        if self.server.setup_error is not None:
            raise self.server.setup_error
        if metrics is None and self._has_own_client():
            return
        how = self.server.failures_text()
        text = "the evaluation made no request to a model, so nothing was measured"
        if how:
            text = f"the evaluation had no answer from a model: of its requests {how}"
        if metrics is None and not how:
            logger.warning("%s; are there items to evaluate?", text)
            return
        raise NoDataError(f"{text}; no result is reported")

    def _has_own_client(self) -> bool:
        """Whether requests may have gone by a way that is not counted here."""
        return any(
            isinstance(value, ServerManager)
            or type(value).__module__.partition(".")[0] in OTHER_CLIENTS
            for name, value in vars(self).items()
            if name != "server"
        )

    def save_checkpoint(self, step: int, data: Mapping[str, Any] | None = None) -> None:
        """Save state; called at each multiple of the trainer's checkpoint interval.

        The default writes nothing. Override it and pass what to keep to this one.

        Args:
            step: the multiple that was reached.
            data: attribute name to JSON value, restored by `load_checkpoint`.
        """
        if data is not None:
            checkpoint.save_env_checkpoint(self.checkpoint_dir, self.wandb_prepend, step, data)

    def load_checkpoint(self) -> None:
        """Restore state; called after registering with a run that is past its first step.

        Sets only attributes the environment has already; others in the file are named in the log.
        """
        data = checkpoint.load_env_checkpoint(
            self.checkpoint_dir, self.wandb_prepend, self.curr_step
        )
        for key, value in (data or {}).items():
            # The file names attributes of the author's class, which only the instance knows.
            if hasattr(self, key) and not callable(getattr(self, key)):
                setattr(self, key, value)
            else:
                logger.warning("checkpoint key %r is no attribute of the environment", key)
