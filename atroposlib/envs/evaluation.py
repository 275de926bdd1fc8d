"""The samples of one evaluation: which items, how often, and those that an earlier start finished.

    eval_items ─► eval_limit ─► K samples each ─► record ─► progress.jsonl ─► metrics, samples.jsonl
                                     ▲                          │
                                     └── found: not asked again ┘

`progress.jsonl` is in `data_dir_to_save_evals`, next to the results, while an evaluation runs. Its
first line identifies the evaluation: model, settings and code. Each further line is one finished
sample. When the results are written, it is removed. An evaluation that was killed and is started
again with the same model, settings and code reads the finished samples and asks for the others. If
one of these differs, the file is renamed, its name is logged, and the evaluation starts from zero.

Under `serve` the weights change between evaluations, so nothing is resumed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import hashlib
import inspect
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Protocol, TextIO, TypeVar

from pydantic import BaseModel, Field

from atroposlib.envs.config import BaseEnvConfig
from atroposlib.errors import ConfigError
from atroposlib.type_definitions import Item
from atroposlib.utils.json_text import decode_line, to_plain

__all__ = [
    "PROGRESS_FILE",
    "EvalSample",
    "EvaluationConfig",
    "EvaluationRun",
    "digest_of",
    "item_ids_of",
    "stable_form",
    "take_evenly",
]

logger = logging.getLogger(__name__)

PROGRESS_FILE = "progress.jsonl"
DIGEST_CHARACTERS = 16
UNSTABLE = "position-"
"""Start of the id of an item without a stable form."""
NEUTRAL_SETTINGS = frozenset(
    {
        "batch_size", "data_dir_to_save_evals", "data_path_to_save_groups", "end_with_trainer",
        "engine_timeout", "ensure_scores_are_not_same", "eval_handling", "eval_limit",
        "eval_limit_ratio", "eval_resume", "eval_samples_per_item", "full_debug", "group_size",
        "include_messages", "inference_weight", "max_batches_offpolicy", "max_eval_workers",
        "max_num_workers", "max_num_workers_per_node", "max_retries", "metrics_path",
        "min_batch_allocation", "min_group_size", "min_items_sent_before_logging",
        "num_rollouts_per_group_for_logging", "num_rollouts_to_keep", "num_score_workers",
        "retry_delay", "rollout_grace_s", "rollout_server_url", "score_backend", "steps_per_eval",
        "straggler_batches", "straggler_policy", "straggler_retries", "straggler_timeout_s",
        "total_steps", "turn_journal", "turn_journal_mib", "use_tensorboard", "use_wandb",
        "wandb_name", "worker_timeout",
    }
)  # fmt: skip
"""Settings that do not change the answer to an item or its score. More items or samples of an
unfinished evaluation use those that are finished."""

Record = TypeVar("Record")


class EvaluationConfig(BaseEnvConfig):
    """Items, samples and sampling of evaluations."""

    eval_temperature: float = Field(0.0, ge=0, description="Sampling temperature of evaluations.")
    eval_limit: int | None = Field(
        None,
        ge=1,
        description="Maximum number of items of an evaluation, evenly spaced; None: all items.",
    )
    eval_samples_per_item: int = Field(
        1,
        ge=1,
        le=1024,
        description="Samples of each evaluation item; with two or more, pass@k is reported.",
    )
    eval_resume: bool = Field(
        True,
        description="Whether `evaluate` continues an evaluation that was interrupted, if model, "
        "settings and code are the same; needs data_dir_to_save_evals.",
    )


@dataclasses.dataclass(frozen=True)
class EvalSample(Generic[Record]):
    """One sample of one item."""

    item: Any
    """As returned by `eval_items`."""
    item_id: str
    """Digest of the item, the same in every evaluation of these items."""
    sample_index: int
    """0 to K - 1."""
    record: Record


class EvaluatedEnv(Protocol):
    """Attributes of an environment that decide whether two evaluations are the same."""

    name: str | None
    config: Any  # an EvaluationConfig
    service_session: Any
    server_configs: list[Any]


class EvaluationRun(Generic[Record]):
    """The samples of one evaluation; a context manager around sampling and writing the results.

    Args:
        env: the environment.
        encode: converts a record to JSON values for the progress file.
        decode: awaited with an item and the encoded record; returns the record, or None if it
            cannot be restored and the item is asked again.
    """

    def __init__(
        self,
        env: EvaluatedEnv,
        *,
        encode: Callable[[Record], Mapping[str, Any]],
        decode: Callable[[Any, dict[str, Any]], Awaitable[Record | None]],
    ) -> None:
        self._env = env
        self._config: EvaluationConfig = env.config
        self._encode = encode
        self._decode = decode
        self._progress: ProgressFile | None = None

    def __enter__(self) -> EvaluationRun[Record]:
        folder = self._config.data_dir_to_save_evals
        if folder is None or not self._config.eval_resume or self._env.service_session is not None:
            return self
        self._progress = ProgressFile(Path(folder) / PROGRESS_FILE, identity_of(self._env))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.close(is_finished=error is None)

    async def sample(
        self, items: Sequence[Item], ask: Callable[[Any], Awaitable[Record]]
    ) -> list[EvalSample[Record]]:
        """Return [N * K] samples, those of one item next to each other.

        Waits for all samples, also after the first has failed. Cancelling is safe.

        Args:
            items: the evaluation items.
            ask: samples and scores one answer to an item.

        Raises:
            Exception: that of the first failed sample; the finished ones remain in the file.
        """
        if self._config.eval_samples_per_item > 1 and self._config.eval_temperature == 0:
            logger.warning(
                "eval_temperature is 0, so the %d samples of an item are about equal; set it with "
                "--env.eval_temperature",
                self._config.eval_samples_per_item,
            )
        chosen = take_evenly(items, self._config.eval_limit)
        item_ids, num_unstable = item_ids_of(chosen)
        if num_unstable and self._progress is not None:
            logger.info(
                "%d items have no JSON form; they are asked again if this evaluation is resumed",
                num_unstable,
            )
        pairs = [
            (item, item_id, index)
            for item, item_id in zip(chosen, item_ids, strict=True)
            for index in range(self._config.eval_samples_per_item)
        ]
        outcomes = await asyncio.gather(
            *(self._one(ask, *pair) for pair in pairs), return_exceptions=True
        )
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if failures:
            if not isinstance(failures[0], ConfigError):  # a wrong setting fails all of them
                counts = Counter(type(failure).__name__ for failure in failures)
                logger.error(
                    "%d of %d samples of the evaluation failed: %s",
                    len(failures),
                    len(pairs),
                    ", ".join(f"{name} ({count})" for name, count in counts.most_common()),
                )
            raise failures[0]
        return [
            EvalSample(*pair, record=outcome)
            for pair, outcome in zip(pairs, outcomes, strict=True)
            if not isinstance(outcome, BaseException)
        ]

    def sampling(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return sampling settings for the result, with the number of samples if above 1."""
        count = self._config.eval_samples_per_item
        return {**settings, **({"samples_per_item": count} if count > 1 else {})}

    async def _one(
        self, ask: Callable[[Any], Awaitable[Record]], item: Any, item_id: str, index: int
    ) -> Record:
        progress = None if item_id.startswith(UNSTABLE) else self._progress
        saved = progress.find(item_id, index) if progress is not None else None
        if saved is not None:
            restored = await self._decode(item, saved)
            if restored is not None:
                return restored
        record = await ask(item)
        if progress is not None:
            progress.add(item_id, index, self._encode(record))
        return record


class ProgressFile:
    """The finished samples of an unfinished evaluation.

    Args:
        path: the file; it is created with the first sample.
        identity: name to digest of everything that must be the same.
    """

    def __init__(self, path: Path, identity: Mapping[str, str]) -> None:
        self.path = path
        self._identity = dict(identity)
        self._found: dict[tuple[str, int], dict[str, Any]] = {}
        self._num_added = 0
        self._file: TextIO | None = None
        if path.exists():
            self._read()

    def find(self, item_id: str, index: int) -> dict[str, Any] | None:
        """Return the encoded record of a sample that an earlier start finished."""
        return self._found.get((item_id, index))

    def add(self, item_id: str, index: int, record: Mapping[str, Any]) -> None:
        """Append a finished sample; a kill after this call does not lose it."""
        if self._file is None:
            is_new = not self.path.exists()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8")
            if is_new:
                self._write({"identity": self._identity})
        self._write({"item_id": item_id, "sample_index": index, "record": record})
        self._num_added += 1

    def close(self, *, is_finished: bool) -> None:
        """Remove the file of a finished evaluation; keep that of an interrupted one."""
        if self._file is not None:
            self._file.close()
        if is_finished:
            self.path.unlink(missing_ok=True)
        elif num_kept := len(self._found) + self._num_added:
            logger.warning(
                "%d finished samples are kept in %s; the same command continues from there",
                num_kept,
                self.path,
            )

    def _write(self, line: Mapping[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(line, default=_as_text) + "\n")
        self._file.flush()

    def _read(self) -> None:
        content = self.path.read_bytes()
        # A kill may have cut the last line.
        complete = content[: content.rfind(b"\n") + 1]
        lines = complete.splitlines()
        try:
            found: dict[str, str] = decode_line(lines[0])["identity"]
            samples = [decode_line(line) for line in lines[1:]]
            self._found = {(s["item_id"], s["sample_index"]): s["record"] for s in samples}
        except (ValueError, KeyError, TypeError, IndexError, RecursionError):
            self._set_aside("it is not readable")
            return
        names = sorted(self._identity.keys() | found.keys())
        differing = [name for name in names if self._identity.get(name) != found.get(name)]
        if differing:
            self._set_aside(f"another {', '.join(differing)}")
            return
        if len(complete) < len(content):
            with self.path.open("r+b") as file:
                file.truncate(len(complete))
        if self._found:
            logger.info("resuming: %d finished samples in %s", len(self._found), self.path)

    def _set_aside(self, reason: str) -> None:
        num_found, self._found = len(self._found), {}
        number = 1
        while (kept := self.path.with_name(f"progress-{number}.jsonl")).exists():
            number += 1
        self.path.rename(kept)
        logger.warning(
            "the unfinished evaluation in %s cannot be resumed (%s); starting from zero. Its %d "
            "samples are kept in %s",
            self.path,
            reason,
            num_found,
            kept.name,
        )


def identity_of(env: EvaluatedEnv) -> dict[str, str]:
    """Return name to digest of everything that the samples of an evaluation depend on."""
    models = [getattr(config, "model_name", None) for config in env.server_configs]
    settings = {
        f"setting {name}": digest_of(stable_form(value) if _is_stable(value) else repr(value))
        for name, value in dict(env.config).items()
        if name not in NEUTRAL_SETTINGS
    }
    return {
        "environment": f"{type(env).__module__.rpartition('.')[2]}.{type(env).__qualname__}",
        "model": digest_of(sorted({str(model) for model in models})),
        "code": _code_digest(type(env)),
        **settings,
    }


def _code_digest(env_cls: type[Any]) -> str:
    """Return a digest of the files of a class and its base classes."""
    digest = hashlib.sha256()
    for each in env_cls.__mro__[:-1]:
        try:
            digest.update(Path(inspect.getfile(each)).read_bytes())
        except (OSError, TypeError):
            digest.update(each.__qualname__.encode())
    return digest.hexdigest()[:DIGEST_CHARACTERS]


def take_evenly(items: Sequence[Item], limit: int | None) -> Sequence[Item]:
    """Return at most `limit` items, evenly spaced, in their order."""
    if limit is None or limit >= len(items):
        return items
    return [items[i * len(items) // limit] for i in range(limit)]


def item_ids_of(items: Sequence[Any]) -> tuple[list[str], int]:
    """Return a digest of each item, and the number of items whose content has no stable form.

    Equal items get a number. An item without a stable form is identified by its position.
    """
    ids: list[str] = []
    counts: Counter[str] = Counter()
    num_unstable = 0
    for position, item in enumerate(items):
        if _is_stable(item):
            digest = digest_of(stable_form(item))
            counts[digest] += 1
            ids.append(digest if counts[digest] == 1 else f"{digest}-{counts[digest]}")
        else:
            num_unstable += 1
            ids.append(f"{UNSTABLE}{position}")
    return ids, num_unstable


def digest_of(value: Any) -> str:
    """Return a digest of a JSON value."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARACTERS]


def stable_form(value: Any) -> Any:
    """Return JSON values that are the same in every process.

    Raises:
        TypeError: the value has no such form.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, enum.Enum):
        return stable_form(value.value)
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    if isinstance(value, BaseModel):
        return stable_form(dict(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: stable_form(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): stable_form(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [stable_form(entry) for entry in value]
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(stable_form(entry), sort_keys=True) for entry in value)
    if isinstance(value, Path):
        return str(value)
    return stable_form(to_plain(value))


def _is_stable(value: Any) -> bool:
    try:
        stable_form(value)
    except (TypeError, RecursionError):
        return False
    return True


def _as_text(value: Any) -> Any:
    try:
        return stable_form(value)
    except TypeError:
        return str(value)
