"""Metrics, rollout tables, saved groups, evaluation results and checkpoints of an environment.

`Reporter` is a member of every environment: it holds the public metric buffers and counters
(`completion_lengths`, `task_duration`, ...) and the metrics log. It calls `create_rollout_table`
and `perf_stats` on its environment, so that overrides apply.

    rollouts, drops, failures -> buffers -> wandb_log -> W&B, metrics.jsonl, TensorBoard

`RunFigures` holds recent groups, tokens, scores and staleness for the live view, in bounded memory.

A checkpoint is one JSON object per trainer step:

    <checkpoint_dir>/env_checkpoints/<prepend>/step-<step>.json

`prepend` is the registered name: the environment's name and a number. A restarted environment gets
the next number, so loading also searches the other numbers of the same name.

A reward may consist of named parts, which are weighted, summed and logged: `{"answer": 1.0,
"format": 0.5}` with the weights `{"format": 0.2}` is 1.1.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import re
import string
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, Protocol, TextIO, TypeAlias

from pydantic import Field

from atroposlib.envs import eval as eval_log
from atroposlib.envs.config import BaseEnvConfig
from atroposlib.envs.run_snapshot import RepeatedErrors
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.errors import ConfigError, GroupError, NoDataError
from atroposlib.scored_data import ScoredDataGroup
from atroposlib.utils.aio import decode_long, settle
from atroposlib.utils.json_text import encode_mapping, single_number
from atroposlib.utils.metrics import get_std_min_max_avg
from atroposlib.utils.run_log import MetricsLog
from atroposlib.utils.score_pool import ScorePool
from atroposlib.utils.text import near_name
from atroposlib.utils.writable import unwritable

__all__ = [
    "GroupWriter",
    "LengthBias",
    "PartSums",
    "Reporter",
    "Reward",
    "RewardWeights",
    "RunFigures",
    "WeighedReward",
    "check_weight_names",
    "complete_parts",
    "completion_length_metrics",
    "dated_run_name",
    "duration_metrics",
    "keep_latest",
    "load_env_checkpoint",
    "part_means",
    "restore_attributes",
    "save_env_checkpoint",
    "weigh",
]

logger = logging.getLogger(__name__)

Reward: TypeAlias = float | Mapping[str, float]
"""Return value of a scoring method: a number, or numbers by part name."""


def as_number(value: Any, source: str) -> float:
    """Return a value of an author's method as a float.

    Args:
        value: the value.
        source: start of the error message, such as `MyEnv.score returned`.

    Raises:
        TypeError: it is not a number; strings are rejected.
    """
    try:
        if not isinstance(value, str | bytes):
            return float(single_number(value))
    except (TypeError, ValueError, OverflowError):
        pass
    raise TypeError(f"{source} {value!r:.200}; expected a number")


RewardWeights: TypeAlias = dict[str, Annotated[float, Field(allow_inf_nan=False)]]


class WeighedReward(NamedTuple):
    """The weighted sum of a reward."""

    total: float
    parts: dict[str, float]
    """Unweighted parts by name; empty if the reward was a number."""


def weigh(reward: Any, weights: Mapping[str, float], source: str) -> WeighedReward:
    """Return the weighted sum of the parts of a reward.

    Args:
        reward: value of an author's method: a number, which has no parts, or numbers by name.
        weights: weight of each part; 1 by default.
        source: start of the error message, such as `MyEnv.score returned`.

    Raises:
        TypeError: the reward, or one of its parts, is not a number.
    """
    if not isinstance(reward, Mapping):
        return WeighedReward(as_number(reward, source), {})
    if not reward:
        raise TypeError(f"{source} an empty mapping; expected a number, or numbers by name")
    parts: dict[str, float] = {}
    for name, value in reward.items():
        if not isinstance(name, str):
            raise TypeError(f"{source} a part named {name!r}; expected a string as its name")
        parts[name] = as_number(value, f"{source} as the part {name!r}")
    return WeighedReward(sum(weights.get(n, 1.0) * value for n, value in parts.items()), parts)


def check_weight_names(
    weights: Mapping[str, float], parts: Iterable[Mapping[str, float]], method: str
) -> None:
    """Raise `ConfigError` if a weight has no part in any of the rewards.

    Args:
        weights: the setting `reward_weights`.
        parts: parts of each reward.
        method: method that returned the rewards, such as `MyEnv.score`.
    """
    known = sorted({name for row in parts for name in row}) if weights else []
    for name in sorted(weights):
        if name not in known:
            found = f"gave the parts {', '.join(known)}" if known else "gave numbers without parts"
            remedy = "correct the name, or give the part as 0.0 where nothing was earned"
            raise ConfigError(
                f"reward_weights names {name!r}, but {method} {found}"
                f"{near_name(name, known) or f'; {remedy}'}"
            )


def complete_parts(parts: Sequence[Mapping[str, float]]) -> list[dict[str, float]] | None:
    """Return [G] parts with the same names, 0.0 for missing ones; None if no reward has parts."""
    names = list(dict.fromkeys(name for row in parts for name in row))
    return [{name: row.get(name, 0.0) for name in names} for row in parts] if names else None


def part_means(parts: Sequence[Mapping[str, float]], area: str) -> dict[str, float]:
    """Return the mean of each part, with 0.0 for missing ones, as `<area>/reward/<part>`.

    Args:
        parts: parts of each reward.
        area: `train` or `eval`.
    """
    sums = PartSums()
    sums.add(complete_parts(parts) or ())
    return sums.means(area)


class PartSums:
    """Running means of the parts of rewards."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, parts: Any) -> None:
        """Add the parts of a group; values that are not finite numbers are skipped."""
        for row in parts if isinstance(parts, list | tuple) else ():
            for name, value in row.items() if isinstance(row, Mapping) else ():
                if isinstance(value, int | float) and math.isfinite(value):
                    total, count = self._sums.get(name, (0.0, 0))
                    self._sums[name] = total + value, count + 1

    def means(self, area: str) -> dict[str, float]:
        return {f"{area}/reward/{name}": total / n for name, (total, n) in self._sums.items()}


class LengthBias:
    """Mean lengths of kept and of dropped rollouts, in tokens and in seconds.

    If dropped rollouts are longer than kept ones, training sees too few long answers. Tokens are
    those of groups, by whether they were sent. Seconds are those of rollouts, by whether their
    result was used: the tokens of a cancelled rollout are unknown.
    """

    def __init__(self) -> None:
        self._tokens: dict[str, tuple[float, int]] = {}
        self._seconds: dict[str, tuple[float, int]] = {}

    def add_group(self, lengths: Sequence[int], *, reason: str | None) -> None:
        """Add [G] numbers of trained tokens and the reason why the group was dropped, if it was."""
        for name in ["kept"] if reason is None else ["dropped", f"dropped_{reason}"]:
            _add_to_sum(self._tokens, name, lengths)

    def add_durations(self, used: Sequence[float], lost: Sequence[float]) -> None:
        """Add the seconds of rollouts whose results are used, and of those that were lost."""
        _add_to_sum(self._seconds, "used", used)
        _add_to_sum(self._seconds, "lost", lost)

    def metrics(self) -> dict[str, float]:
        found = {f"lengths/{name}_mean_tokens": t / n for name, (t, n) in self._tokens.items()}
        found |= {f"lengths/{name}_mean_s": t / n for name, (t, n) in self._seconds.items()}
        for unit, dropped, kept in (("tokens", "dropped", "kept"), ("s", "lost", "used")):
            above = found.get(f"lengths/{dropped}_mean_{unit}")
            below = found.get(f"lengths/{kept}_mean_{unit}")
            if above is not None and below:
                found[f"lengths/{dropped}_to_{kept}_ratio"] = above / below
        return found

    def clear(self) -> None:
        self._tokens.clear()
        self._seconds.clear()


def _add_to_sum(sums: dict[str, tuple[float, int]], name: str, values: Sequence[float]) -> None:
    if values:
        total, count = sums.get(name, (0.0, 0))
        sums[name] = total + sum(values), count + len(values)


COUNT_NAMES = {
    "succeeded_task_duration": "train/items_sent_to_api",
    "failed_task_duration": "train/items_rejected",
}
"""Buffers whose length is a metric, and its name."""


def completion_length_metrics(lengths: Sequence[int], *, max_token_len: int) -> dict[str, Any]:
    """Summarize completion lengths.

    Args:
        lengths: number of trained tokens of each trajectory.
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
    """Summarize a buffer as `train_perf/<name>_mean`, `_std`, `_max`, `_min`.

    Args:
        name: name of the buffer; those of `COUNT_NAMES` add the number of values.
        values: seconds, or counts.
    """
    metrics: dict[str, Any] = {}
    get_std_min_max_avg(f"train_perf/{name}", values, metrics)
    if name in COUNT_NAMES:
        metrics[COUNT_NAMES[name]] = len(values)
    return metrics


MAX_LOOP_VALUES = 10_000
"""Values kept of each buffer of the main loop, which fills while the trainer's step is the same."""


def keep_latest(values: list[Any], value: Any) -> None:
    """Append a value to a buffer of the main loop."""
    values.append(value)
    del values[:-MAX_LOOP_VALUES]


RATE_WINDOW_S = 60.0
FEWEST_IN_WINDOW = 8
NUM_RECENT_SCORES = 512
NUM_RECENT_STALENESS = 128


class RunFigures:
    """Recent measurements of one environment.

    Args:
        now: clock, seconds.

    Attributes:
        begun_at: time of the first rollout, None before it.
        num_groups: groups made since then, including dropped ones.
        num_tokens: trained tokens in the well-formed ones of them.
        recent_scores: latest scores, including those of dropped groups.
        recent_staleness: trainer steps between the start of a rollout and its group.
        is_over: Whether all rollouts have ended.
    """

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self.begun_at: float | None = None
        self.is_over = False
        self.num_groups = 0
        self.num_tokens = 0
        self.recent_scores: deque[float] = deque(maxlen=NUM_RECENT_SCORES)
        self.recent_staleness: deque[int] = deque(maxlen=NUM_RECENT_STALENESS)
        self._now = now
        self._arrivals: deque[tuple[float, int]] = deque()  # time, tokens
        self._counted_from = 0.0
        self._items_begun_at: dict[int, float] = {}
        self._num_items_begun = 0

    def begin(self) -> None:
        """Start the clock, before the first rollout."""
        if self.begun_at is None:
            self.begun_at = self._counted_from = self._now()

    def begin_item(self) -> int:
        """Record the start of an item's rollout; return a number for `end_item`."""
        self._num_items_begun += 1
        self._items_begun_at[self._num_items_begun] = self._now()
        return self._num_items_begun

    def end_item(self, number: int) -> None:
        self._items_begun_at.pop(number, None)

    def end(self) -> None:
        self.is_over = True

    def add_group(self, group: Any, *, num_tokens: int) -> None:
        """Count a finished group, which may be malformed, with its number of trained tokens."""
        self.num_groups += 1
        self.num_tokens += num_tokens
        self._arrivals.append((self._now(), num_tokens))
        self._forget_old()
        if isinstance(group, Mapping):
            self.recent_scores.extend(_finite_numbers(group.get("scores")))

    def add_staleness(self, steps: int) -> None:
        self.recent_staleness.append(steps)

    @property
    def elapsed_s(self) -> float:
        """Seconds since rollouts began."""
        return 0.0 if self.begun_at is None else self._now() - self.begun_at

    @property
    def num_items_running(self) -> int:
        return len(self._items_begun_at)

    @property
    def oldest_item_s(self) -> float | None:
        """Seconds since the start of the oldest running item; None if nothing runs."""
        begun_at = min(self._items_begun_at.values(), default=None)
        return None if begun_at is None else self._now() - begun_at

    def rates(self) -> tuple[float, float]:
        """Return groups and tokens per second in the last minute, or of the latest groups."""
        self._forget_old()
        span_s = max(self._now() - self._counted_from, 1e-9)
        return len(self._arrivals) / span_s, sum(n for _, n in self._arrivals) / span_s

    def _forget_old(self) -> None:
        """Keep the arrivals of the last minute, and at least a few."""
        oldest = self._now() - RATE_WINDOW_S
        while len(self._arrivals) > FEWEST_IN_WINDOW and self._arrivals[0][0] < oldest:
            self._counted_from, _ = self._arrivals.popleft()


def _finite_numbers(values: Any) -> Iterable[float]:
    if not isinstance(values, list | tuple):
        return []
    return [float(v) for v in values if isinstance(v, int | float) and math.isfinite(v)]


UNNAMED = "env"
"""Folder of an environment without a name."""

STEP_FILE = re.compile(r"step-(\d+)\.json")
NUMBER_SUFFIX = re.compile(r"_\d+$")


def save_env_checkpoint(
    checkpoint_dir: str | Path, prepend: str | None, step: int, data: Mapping[str, Any]
) -> Path:
    """Write the state of an environment at one step, atomically, and return the path of the file.

    Args:
        checkpoint_dir: the trainer's checkpoint folder; created if missing.
        prepend: registered name of the environment.
        step: trainer step.
        data: attribute name to JSON value; NumPy values are converted.

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
    """Read the checkpoint of this step, or the latest earlier one under the same name.

    Files of later steps belong to another run and are ignored. Unreadable files are skipped with a
    warning.

    Args:
        checkpoint_dir: the trainer's checkpoint folder.
        prepend: registered name of the environment; its number may differ.
        step: trainer step at which the environment starts.

    Returns:
        Attribute name to value, or None without a checkpoint.
    """
    own = _folder(checkpoint_dir, prepend)
    for path in [own / f"step-{step}.json", *_earlier_checkpoints(own, step)]:
        data = _read(path)
        if data is not None:
            return data
    return None


def restore_attributes(env: object, data: Mapping[str, Any] | None) -> None:
    """Set the attributes of `data` that exist; log the names of the others."""
    for key, value in (data or {}).items():
        # The attributes are those of the author's class.
        if hasattr(env, key) and not callable(getattr(env, key)):
            setattr(env, key, value)
        else:
            logger.warning("checkpoint key %r is not an attribute of the environment", key)


def _folder(checkpoint_dir: str | Path, prepend: str | None) -> Path:
    return Path(checkpoint_dir) / "env_checkpoints" / (prepend or UNNAMED)


def _earlier_checkpoints(own: Path, step: int) -> list[Path]:
    """Return the files of all numbers of one name up to a step, latest first."""
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


OTHER_CLIENTS = frozenset({"aiohttp", "anthropic", "httpx", "litellm", "openai", "requests"})
"""Packages through which an environment may send requests without its server manager."""


def dated_run_name(stem: str, *, now: float) -> str:
    """Return `<stem>-<YYYY-MM-DD>-<six random letters>`."""
    letters = "".join(random.choices(string.ascii_lowercase, k=6))
    return f"{stem}-{time.strftime('%Y-%m-%d', time.localtime(now))}-{letters}"


def _run_opened_elsewhere() -> Any:
    """Return the run that an environment opened with `wandb.init`, or None."""
    wandb = sys.modules.get("wandb")
    return None if wandb is None else wandb.run


def _is_measured(value: Any) -> bool:
    return isinstance(value, int | float) and value != 0 and not math.isnan(value)


class ReportedEnv(Protocol):
    """Attributes and methods of an environment that `Reporter` uses."""

    name: str | None
    config: BaseEnvConfig
    rollout_columns: ClassVar[Sequence[str]]
    server: Any
    tokenizer: Any
    testing: bool
    curr_step: int
    max_token_len: int
    wandb_project: str | None
    wandb_group: str | None
    wandb_prepend: str | None

    @property
    def wandb(self) -> Any: ...
    @property
    def desired_name(self) -> str: ...
    async def create_rollout_table(self, wandb_metrics: dict[str, Any], /) -> Any: ...
    def rollout_cells(self, item: Any, /) -> Sequence[Any]: ...
    def perf_stats(self, metrics_dict: dict[str, Any], /) -> Any: ...
    def count_failure(self, name: str, /) -> None: ...
    def _opened_score_pool(self) -> ScorePool | None: ...


class Reporter:
    """Collects and logs the metrics of one environment.

    Buffers are emptied when they are logged; counters are never reset. Authors may replace a buffer
    by a new list at any time.

    Attributes:
        run_log: Log of the metrics.
        run_figures: Recent measurements, for the live view.
        errors: Logs each distinct error with its traceback once.
        drop_counts: Dropped groups, by reason; `drops/<reason>` in the metrics.
        failure_counts: Failed rollouts and hooks, by exception name; `failures/<name>`.
        note_counts: Admitted groups with a note, by its name; `groups/tokenized_from_text`.
        straggler_counts: Rollouts that took too long, by outcome; `stragglers/retried`,
            `stragglers/left_out`, `stragglers/given_up`.
        reward_parts_since_log: Means of the `reward_parts` of groups; `train/reward/<part>`.
        length_bias: Lengths of kept and dropped rollouts since the last log; `lengths/...`.
        settings_yaml: Effective settings, to be written next to the metrics; None once written.
    """

    def __init__(self, env: ReportedEnv) -> None:
        config = env.config
        self.run_log = MetricsLog(
            use_wandb=config.use_wandb,
            metrics_path=None if config.metrics_path is None else Path(config.metrics_path),
            use_tensorboard=config.use_tensorboard,
        )
        self.run_figures = RunFigures()
        self.errors = RepeatedErrors(logger)
        self.settings_yaml: str | None = None
        self.drop_counts: Counter[str] = Counter()
        self.failure_counts: Counter[str] = Counter()
        self.straggler_counts: Counter[str] = Counter()
        self.note_counts: Counter[str] = Counter()
        self.completion_lengths: list[int] = []
        self.reward_parts_since_log = PartSums()
        self.length_bias = LengthBias()
        self.rollouts_for_wandb: list[Any] = []
        self.task_duration: list[float] = []
        self.succeeded_task_duration: list[float] = []
        self.failed_task_duration: list[float] = []
        self.task_successful: list[int] = []
        self.mainloop_timings: list[float] = []
        self.workers_added_list: list[int] = []
        self._env = env
        self._num_answered_before: int | None = None

    @property
    def wandb_run(self) -> Any:
        """The open Weights & Biases run, or None; assign a run to log to it."""
        return self.run_log.wandb_run

    @wandb_run.setter
    def wandb_run(self, run: Any) -> None:
        self.run_log.wandb_run = run

    async def tolerate(self, result: Any, hook: str) -> bool:
        """Await the result of a hook; count and log its exception instead of raising it.

        Returns:
            Whether there was no exception.
        """
        try:
            await settle(result)
        except Exception as error:  # noqa: BLE001 - counted and logged
            self._env.count_failure(type(error).__name__)
            self.errors.log(f"{hook} failed", error)
            return False
        return True

    def add_rollout(self, *, duration_s: float, has_data: bool) -> None:
        self.task_duration.append(duration_s)
        self.task_successful.append(int(has_data))
        durations = self.succeeded_task_duration if has_data else self.failed_task_duration
        durations.append(duration_s)

    def name_metrics_file(self, registered_name: str) -> None:
        """Set the path of the metrics, if not configured, and save the settings next to it once."""
        if self.run_log.metrics_path is None:
            self.run_log.metrics_path = Path("logs", registered_name, "metrics.jsonl")
            logger.info("metrics go to %s", self.run_log.metrics_path)
        text, self.settings_yaml = self.settings_yaml, None
        if text is None:
            return
        path = self.run_log.metrics_path.with_suffix(".settings.yaml")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            logger.warning("the settings are not saved: %s", unwritable(path, error, None))
        else:
            logger.info("all settings are in %s", path)

    def start_run_log(self, *, name: str | None) -> None:
        self.run_log.start(
            project=self._env.wandb_project or None,
            group=self._env.wandb_group or None,
            name=name,
            config=self._env.config.model_dump(mode="json", fallback=str),
        )

    def start_local_run(self) -> None:
        """Open the metrics log of a run without a service."""
        self.name_metrics_file(self._env.desired_name)
        self.start_run_log(name=dated_run_name(self._env.desired_name, now=time.time()))

    async def log(self, metrics: dict[str, Any]) -> None:
        """Implement `BaseEnv.wandb_log`."""
        env = self._env
        limit = env.max_token_len if env.max_token_len > 0 else env.config.max_token_length
        metrics.update(completion_length_metrics(self.completion_lengths, max_token_len=limit))
        metrics.update(self.reward_parts_since_log.means("train"))
        self.reward_parts_since_log = PartSums()
        metrics = await settle(env.create_rollout_table(metrics)) or metrics
        metrics = env.perf_stats(metrics) or metrics
        metrics.update({f"drops/{reason}": n for reason, n in self.drop_counts.items()})
        metrics.update({f"failures/{name}": n for name, n in self.failure_counts.items()})
        metrics.update({f"groups/{note}": n for note, n in self.note_counts.items()})
        metrics.update({f"stragglers/{name}": n for name, n in self.straggler_counts.items()})
        metrics.update(self.length_bias.metrics())
        self.length_bias.clear()
        metrics.update(_score_pool_metrics(env._opened_score_pool()))
        self.rollouts_for_wandb = []
        self.completion_lengths = []
        prefix = f"{env.wandb_prepend}_" if env.wandb_prepend is not None else ""
        metrics = {f"{prefix}{key}": value for key, value in metrics.items()}
        for i, server in enumerate(env.server.servers):
            metrics.update(await settle(server.wandb_metrics({}, f"server_{i}")) or {})
        if env.config.use_wandb and self.run_log.wandb_run is None:
            self.run_log.wandb_run = _run_opened_elsewhere()
            if self.run_log.wandb_run is None:
                self._log_without_run(metrics)
        self.run_log.log(metrics, step=env.curr_step)

    def _log_without_run(self, metrics: Mapping[str, Any]) -> None:
        """Call `wandb.log`, which authors replace in tests; without a run it refuses."""
        try:
            wandb = self._env.wandb
        except ImportError:  # logged when no run could be opened
            wandb = None
        if wandb is None:
            return
        try:
            wandb.log(dict(metrics), step=self._env.curr_step)
        except wandb.Error as error:
            logger.debug("wandb did not log the metrics: %s", error)

    def add_rollout_table(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Implement `BaseEnv.create_rollout_table`."""
        names = ["text", "score", *self._env.rollout_columns]
        # Environments may keep more columns, for their own tables, or fewer.
        padding = (None,) * len(names)
        rows = [
            (*row, *padding)[: len(names)] for group in self.rollouts_for_wandb for row in group
        ]
        if rows:
            metrics["train/rollouts"] = self.run_log.table(names, rows)
        return metrics

    async def add_rollouts(self, scored_data: ScoredDataGroup, item: Any) -> None:
        """Implement `BaseEnv.add_rollouts_for_wandb`."""
        wanted = self._env.config.num_rollouts_per_group_for_logging
        if wanted == -1:
            wanted = self._env.config.group_size
        pairs = zip(scored_data["tokens"], scored_data["scores"], strict=True)
        rows = [(tokens, score) for tokens, score in pairs][:wanted]
        cells = () if item is None else self._env.rollout_cells(item)
        self.rollouts_for_wandb.append(
            [
                (await decode_long(self._env.tokenizer, tokens), score, *cells)
                for tokens, score in rows
            ]
        )
        excess = len(self.rollouts_for_wandb) - self._env.config.num_rollouts_to_keep
        if excess > 0:
            self.rollouts_for_wandb = self.rollouts_for_wandb[excess:]

    def add_durations(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Add statistics of each buffer that has two or more values."""
        buffers: dict[str, list[Any]] = {
            "task_duration": self.task_duration,
            "succeeded_task_duration": self.succeeded_task_duration,
            "failed_task_duration": self.failed_task_duration,
            "mainloop_timings": self.mainloop_timings,
            "workers_added_per_attempt": self.workers_added_list,
        }
        for name, values in buffers.items():
            if len(values) > 1:
                metrics.update(duration_metrics(name, values))
                values.clear()
        self.task_successful.clear()
        return metrics

    def write_evaluation(
        self,
        metrics: Mapping[str, Any],
        *,
        task_name: str | None,
        model_name: str | None,
        generation_parameters: Mapping[str, Any] | None,
        **options: Any,
    ) -> None:
        """Implement `BaseEnv.evaluate_log`; `options` are passed on to `envs.eval.evaluate_log`."""
        env = self._env
        if model_name is None:
            model_name = getattr(env.config, "model_name", None)  # a field subclasses may add
        if model_name is None and env.server.servers:
            model_name = env.server.servers[0].config.model_name
        self.require_answers(metrics)
        parameters = {"max_new_tokens": env.config.max_token_length}
        eval_log.evaluate_log(
            metrics,
            eval_dir=env.config.data_dir_to_save_evals,
            task_name=task_name or f"{env.name or type(env).__name__}_eval",
            model_name=model_name,
            generation_parameters={**parameters, **(generation_parameters or {})},
            **options,
        )

    def close(self, error: BaseException | None, *, step: int) -> None:
        """Close the metrics log and log the counts of the run.

        Args:
            error: Error that ended the run, counted if no other failure was; or None.
            step: Last trainer step of the run.
        """
        if isinstance(error, Exception) and not self.failure_counts:
            self._env.count_failure(type(error).__name__)
        self.run_log.finish()
        logger.info(
            "environment closed at step %d; groups dropped: %s; failures: %s",
            step,
            dict(self.drop_counts) or "none",
            dict(self.failure_counts) or "none",
        )

    def begin_evaluation(self) -> None:
        """Count the answered requests of an evaluation from now on."""
        self._num_answered_before = self._num_answered()

    def _num_answered(self) -> int:
        return self._env.server.num_answered if isinstance(self._env.server, ServerManager) else 0

    def require_answers(self, metrics: Mapping[str, Any] | None) -> None:
        """Raise `NoDataError` if an evaluation had no answer from a model.

        Args:
            metrics: its result; None if it has not reported one.
        """
        before, server = self._num_answered_before, self._env.server
        if before is None or not isinstance(server, ServerManager) or self._env.testing:
            return
        if self._num_answered() > before:
            return
        if metrics is not None and any(_is_measured(value) for value in metrics.values()):
            self._num_answered_before = None  # requests were sent through another client
            return
        if server.setup_error is not None:
            raise server.setup_error
        if metrics is None and _has_own_client(self._env):
            return
        failures = server.failures_text()
        text = "the evaluation made no request to a model, so nothing was measured"
        if failures:
            text = f"the evaluation had no answer from a model: of its requests {failures}"
        if metrics is None and not failures:
            logger.warning("%s; are there items to evaluate?", text)
            return
        raise NoDataError(f"{text}; no result is reported")


def _has_own_client(env: ReportedEnv) -> bool:
    """Whether an attribute of the environment may have sent requests that are not counted."""
    return any(
        isinstance(value, ServerManager)
        or type(value).__module__.partition(".")[0] in OTHER_CLIENTS
        for name, value in vars(env).items()
        if name != "server"
    )


def _score_pool_metrics(pool: ScorePool | None) -> dict[str, int]:
    if pool is None or not pool.counts:
        return {}
    names = ("calls", "timeouts", "crashes", "errors")
    return {f"score_pool/{name}": pool.counts[name] for name in names}


class GroupWriter:
    """Appends groups to a new JSON Lines file, one flushed line each; thread-safe.

    An existing file is never overwritten: `_1`, `_2`, ... is added to the stem of the path. Missing
    parent folders are created.

    Attributes:
        path: the file that is written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path, self._file = _create_free(Path(path))
        self._lock = threading.Lock()

    def write(self, group: Mapping[str, Any]) -> None:
        """Write a group, with NumPy values converted.

        Raises:
            GroupError: a value has no JSON form or is not finite; the message names its key, and
                nothing is written.
            OSError: the file cannot be written, as on a full disk; the error has its path.
        """
        try:
            line = encode_mapping(group)
        except ValueError as error:
            raise GroupError(f"the group cannot be written to {self.path}: {error}") from error
        with self._lock:
            try:
                self._file.write(line + "\n")
                self._file.flush()
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self.path)) from error

    def close(self) -> None:
        """Close the file; may be called more than once."""
        self._file.close()


def _create_free(wanted: Path) -> tuple[Path, TextIO]:
    wanted.parent.mkdir(parents=True, exist_ok=True)
    path, attempt = wanted, 0
    while True:
        try:
            # Mode "x" chooses the name atomically among processes.
            return path, path.open("x", encoding="utf-8")
        except FileExistsError:
            attempt += 1
            path = wanted.with_name(f"{wanted.stem}_{attempt}{wanted.suffix}")
