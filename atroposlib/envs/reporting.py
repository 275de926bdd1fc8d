"""What an environment reports: metrics, a table of rollouts, evaluations and checkpoints.

The scoring workers of an environment: made when first used, ended with the run.

Summarise an environment's buffers under their metric names; pure.

What a running environment has made lately: groups, tokens, scores and staleness.

Invariants: memory is bounded, whatever the length of the run; adding costs O(1).

Checkpoints of an environment: one JSON object per trainer step.

    <checkpoint_dir>/env_checkpoints/<prepend>/step-<step>.json

`prepend` is the name the service gave the environment, its own name and a number. A restarted
environment gets the next number, so loading also looks at the other numbers of the same name.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import random
import re
import string
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from atroposlib.envs import eval as eval_log
from atroposlib.envs.hooks import EnvHooks, settle
from atroposlib.envs.reward_parts import PartSums
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.errors import NoDataError
from atroposlib.scored_data import ScoredDataGroup
from atroposlib.type_definitions import Item
from atroposlib.utils.aio import decode_long
from atroposlib.utils.json_text import encode_mapping
from atroposlib.utils.metrics import get_std_min_max_avg
from atroposlib.utils.run_log import RunLog
from atroposlib.utils.score_pool import ScorePool
from atroposlib.utils.writable import unwritable

__all__ = [
    "ReportingEnv",
    "RunFigures",
    "ScoringEnv",
    "completion_length_metrics",
    "dated_run_name",
    "duration_metrics",
    "load_env_checkpoint",
    "save_env_checkpoint",
]


class ScoringEnv(EnvHooks):
    """The scoring half of an environment."""

    @cached_property
    def score_pool(self) -> ScorePool:
        """Workers for scoring functions, as the config asks for; may be assigned.

        `await self.score_pool.run(function, *args, timeout=5, default=0.0)` neither stalls other
        rollouts nor runs for ever; see `ScorePool`.
        """
        return ScorePool(
            num_workers=self.config.num_score_workers,
            timeout_s=self.config.score_timeout_s,
            backend=self.config.score_backend.value,
        )

    def _opened_score_pool(self) -> ScorePool | None:
        pool = vars(self).get("score_pool")  # asking for the attribute would make one
        return pool if isinstance(pool, ScorePool) else None

    def _score_metrics(self) -> dict[str, int]:
        """What became of the calls so far, `score_pool/<count>`; nothing before the first."""
        pool = self._opened_score_pool()
        if pool is None or not pool.counts:
            return {}
        names = ("calls", "timeouts", "crashes", "errors")
        return {f"score_pool/{name}": pool.counts[name] for name in names}

    async def _close_score_pool(self) -> None:
        pool = self._opened_score_pool()
        if pool is not None:
            await asyncio.to_thread(pool.close)


COUNT_NAMES = {
    "succeeded_task_duration": "train/items_sent_to_api",
    "failed_task_duration": "train/items_rejected",
}
"""Buffers whose length is a metric of its own."""


def completion_length_metrics(lengths: Sequence[int], *, max_token_len: int) -> dict[str, Any]:
    """Summarise completion lengths.

    Args:
        lengths: one count of trained tokens per trajectory.
        max_token_len: the trainer's limit; `_p95` is the fraction of lengths above 95% of it.
    """
    if not lengths:
        return {}
    metrics: dict[str, Any] = {}
    get_std_min_max_avg("train/completion_lengths", lengths, metrics)
    metrics["train/completion_lengths"] = metrics.pop("train/completion_lengths_mean")
    num_long = sum(1 for length in lengths if length > 0.95 * max_token_len)
    metrics["train/completion_lengths_p95"] = num_long / len(lengths)
    return metrics


def duration_metrics(name: str, values: Sequence[float]) -> dict[str, Any]:
    """Summarise one performance buffer as `train_perf/<name>_mean`, `_std`, `_max`, `_min`.

    Args:
        name: the buffer's name; those of `COUNT_NAMES` add their number of values.
        values: seconds, or counts.
    """
    metrics: dict[str, Any] = {}
    get_std_min_max_avg(f"train_perf/{name}", values, metrics)
    if name in COUNT_NAMES:
        metrics[COUNT_NAMES[name]] = len(values)
    return metrics


RATE_WINDOW_S = 60.0
FEWEST_IN_WINDOW = 8
NUM_RECENT_SCORES = 512
NUM_RECENT_STALENESS = 128


class RunFigures:
    """Recent figures of one environment.

    Args:
        now: clock, seconds.

    Attributes:
        begun_at: when rollouts began, None before.
        num_groups: groups made since then, dropped ones included.
        num_tokens: trained tokens in the well-formed ones of them.
        recent_scores: the latest scores, of dropped groups too.
        recent_staleness: trainer steps between the start of a rollout and its group.
        is_over: whether rollouts have ended.
    """

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self.begun_at: float | None = None
        self.is_over = False
        self.num_groups = 0
        self.num_tokens = 0
        self.recent_scores: deque[float] = deque(maxlen=NUM_RECENT_SCORES)
        self.recent_staleness: deque[int] = deque(maxlen=NUM_RECENT_STALENESS)
        self._now = now
        self._arrivals: deque[tuple[float, int]] = deque()  # when, tokens
        self._counted_from = 0.0
        self._items_begun_at: dict[int, float] = {}
        self._num_items_begun = 0

    def begin(self) -> None:
        """Start the clock: rollouts begin now."""
        if self.begun_at is None:
            self.begun_at = self._counted_from = self._now()

    def begin_item(self) -> int:
        """Note that the rollout of an item begins now; return what `end_item` takes."""
        self._num_items_begun += 1
        self._items_begun_at[self._num_items_begun] = self._now()
        return self._num_items_begun

    def end_item(self, number: int) -> None:
        """Note that the rollout of an item has ended."""
        self._items_begun_at.pop(number, None)

    def end(self) -> None:
        """Note that no rollout runs any more."""
        self.is_over = True

    def add_group(self, group: Any, *, num_tokens: int) -> None:
        """Count a finished group.

        Args:
            group: its scores are kept; whatever else a malformed one has there is ignored.
            num_tokens: trained tokens, 0 when they cannot be counted.
        """
        self.num_groups += 1
        self.num_tokens += num_tokens
        self._arrivals.append((self._now(), num_tokens))
        self._forget_old()
        if isinstance(group, Mapping):
            self.recent_scores.extend(_finite_numbers(group.get("scores")))

    def add_staleness(self, steps: int) -> None:
        """Note how many trainer steps went by while a group was made."""
        self.recent_staleness.append(steps)

    @property
    def elapsed_s(self) -> float:
        """Seconds since rollouts began."""
        return 0.0 if self.begun_at is None else self._now() - self.begun_at

    @property
    def num_items_running(self) -> int:
        """Items whose rollouts have begun and not ended."""
        return len(self._items_begun_at)

    @property
    def oldest_item_s(self) -> float | None:
        """Seconds the longest running item has taken; None when nothing runs."""
        begun_at = min(self._items_begun_at.values(), default=None)
        return None if begun_at is None else self._now() - begun_at

    def rates(self) -> tuple[float, float]:
        """Return groups and tokens per second of the last minute, or of the latest groups."""
        self._forget_old()
        span_s = max(self._now() - self._counted_from, 1e-9)
        return len(self._arrivals) / span_s, sum(n for _, n in self._arrivals) / span_s

    def _forget_old(self) -> None:
        """Keep what arrived in the window, and a few more where little arrives."""
        oldest = self._now() - RATE_WINDOW_S
        while len(self._arrivals) > FEWEST_IN_WINDOW and self._arrivals[0][0] < oldest:
            self._counted_from, _ = self._arrivals.popleft()


def _finite_numbers(values: Any) -> Iterable[float]:
    if not isinstance(values, list | tuple):
        return []
    return [float(v) for v in values if isinstance(v, int | float) and math.isfinite(v)]


UNNAMED = "env"
"""Folder of an environment that has no name."""

STEP_FILE = re.compile(r"step-(\d+)\.json")
NUMBER_SUFFIX = re.compile(r"_\d+$")


def save_env_checkpoint(
    checkpoint_dir: str | Path, prepend: str | None, step: int, data: Mapping[str, Any]
) -> Path:
    """Write the state of an environment at one step.

    The file appears whole or not at all, so a process killed while writing leaves the earlier one.

    Args:
        checkpoint_dir: the trainer's checkpoint folder; created when missing.
        prepend: registered name of the environment.
        step: trainer step.
        data: attribute name to JSON value; NumPy values are converted.

    Returns:
        The file written.

    Raises:
        ValueError: a value has no JSON form; the message names its key.
    """
    path = _folder(checkpoint_dir, prepend) / f"step-{step}.json"
    text = encode_mapping(data, allow_nan=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)
    return path


def load_env_checkpoint(
    checkpoint_dir: str | Path, prepend: str | None, step: int
) -> dict[str, Any] | None:
    """Read the checkpoint of this step, or the newest earlier one under the same name.

    Files of later steps are left alone: they belong to a run that went further than this one.
    A file that cannot be read is skipped with a warning.

    Args:
        checkpoint_dir: the trainer's checkpoint folder.
        prepend: registered name of the environment; other numbers of it count as the same name.
        step: trainer step the environment starts at.

    Returns:
        Attribute name to value, or None when nothing fits.
    """
    own = _folder(checkpoint_dir, prepend)
    exact = own / f"step-{step}.json"
    for path in [exact, *_earlier_checkpoints(own, step)]:
        data = _read(path)
        if data is not None:
            return data
    return None


def _folder(checkpoint_dir: str | Path, prepend: str | None) -> Path:
    return Path(checkpoint_dir) / "env_checkpoints" / (prepend or UNNAMED)


def _earlier_checkpoints(own: Path, step: int) -> list[Path]:
    """Files of all numbers of one name up to a step, the newest first."""
    base = NUMBER_SUFFIX.sub("", own.name)
    if not own.parent.is_dir():
        return []
    found = []
    for folder in own.parent.iterdir():
        if not folder.is_dir() or NUMBER_SUFFIX.sub("", folder.name) != base:
            continue
        for path in folder.iterdir():
            match = STEP_FILE.fullmatch(path.name)
            if match and int(match[1]) <= step:
                found.append((int(match[1]), path.stat().st_mtime, path))
    return [path for _, _, path in sorted(found, reverse=True)]


def _read(path: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("checkpoint %s cannot be read (%s); trying an older one", path, error)
        return None
    if not isinstance(data, dict):
        logger.warning("checkpoint %s holds no JSON object; trying an older one", path)
        return None
    logger.info("environment checkpoint read from %s", path)
    return data


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
            save_env_checkpoint(self.checkpoint_dir, self.wandb_prepend, step, data)

    def load_checkpoint(self) -> None:
        """Restore state; called after registering with a run that is past its first step.

        Sets only attributes the environment has already; others in the file are named in the log.
        """
        data = load_env_checkpoint(self.checkpoint_dir, self.wandb_prepend, self.curr_step)
        for key, value in (data or {}).items():
            # The file names attributes of the author's class, which only the instance knows.
            if hasattr(self, key) and not callable(getattr(self, key)):
                setattr(self, key, value)
            else:
                logger.warning("checkpoint key %r is no attribute of the environment", key)
