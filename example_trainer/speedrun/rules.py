"""The rules of the speedrun: what is fixed, what an entry may change, and when a result counts.

    entry (YAML) --run--> result (JSON) --verify--> violations, or a row of the table

docs/speedrun.md explains them. A change that makes old results incomparable increases `RULES`.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from atroposlib.errors import ConfigError
from atroposlib.utils.text import inert_line, inert_markup, near_name
from atroposlib.utils.yaml_text import read_yaml
from example_trainer.config import ExtraLossFields, TrainingConfig
from example_trainer.demo.settings import DemoSettings, environment_settings
from example_trainer.loss_choice import GrpoFields

RULES = 1
"""Version of the rules; results of different versions are not compared."""
TARGET_ACCURACY = 0.8
"""Least share of right answers to the held-out problems, in every run."""
SEEDS = (0, 1, 2)
"""Seeds of the runs of an entry; the median of their seconds counts."""
NUM_CORES = 2
NUM_HELD_OUT = 512
HELD_OUT_SEED = 1_000_003
HELD_OUT_SHA256 = (
    "06b67c9b32d4cdd77684d4e2fd06d001a2bbd232c07eed191e09b9a94c265041"  # pragma: allowlist secret
)
"""Fingerprint of the held-out questions."""
START_SEED = 0
"""Seed of the starting model, the same for all entries and runs."""
START_ACCURACY = (0.3, 0.5)
"""Range of the starting model's accuracy; rounding differs between processors."""
AGREEMENT = 0.06
"""Largest difference between two measurements of one model that chance explains (3 deviations)."""
STEPS_LIMIT = 500
LONGEST_S = 1e6
"""Longest possible run, in seconds of the clock or of processors."""
MAX_FILE_BYTES = 2**20
"""Limit of an entry or a result."""
_MAX_REASON_CHARACTERS = 300

_ENVIRONMENT_SETTINGS = frozenset(
    {
        "ensure_scores_are_not_same", "mask_too_long_completions", "max_batches_offpolicy",
        "max_num_workers", "score_backend", "num_score_workers", "straggler_batches",
        "straggler_retries", "straggler_timeout_s", "temperature", "top_p",
    }
)  # fmt: skip
_TRAINER_SETTINGS = (
    frozenset(
        {
            "gradient_checkpointing", "logprob_chunk_tokens", "lr", "lr_schedule",
            "max_grad_norm", "max_token_staleness", "microbatch_tokens", "min_lr", "num_iterations",
            "on_bad_group", "optimizer", "packing", "pad_multiple", "shared_prefixes",
            "sync_pause_mode", "sync_transport", "train_dtype", "train_layer_indices",
            "vllm_restart_interval", "warmup_steps", "weight_decay",
        }
    )
    | set(GrpoFields.model_fields)
    | set(ExtraLossFields.model_fields)
) - {
    "reference_model", "loss_fn", "loss_fn_args", "advantage_fn", "advantage_fn_args",
}  # fmt: skip
_ENGINE_SETTINGS = frozenset({"dtype", "max_num_batched_tokens", "max_num_seqs"})


class EntrySettings(BaseModel):
    """Settings that an entry may change; the defaults are those of `atropos-demo`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: Literal["torch", "vllm"] = Field("torch", description="Inference engine.")
    steps: int = Field(60, ge=1, le=STEPS_LIMIT, description="Optimizer steps.")
    groups_per_step: int = Field(16, ge=1, le=512, description="Problems of one step.")
    group_size: int = Field(8, ge=1, le=128, description="Completions of one problem.")
    max_tokens: int = Field(
        64, ge=32, le=256, description="Maximum tokens of prompt and completion in training."
    )
    starts: Literal["in_order", "together"] = Field(
        "in_order", description="Whether processes start one after the other or at the same time."
    )
    threads: int = Field(1, ge=1, le=NUM_CORES, description="Threads of torch in each process.")
    environment: dict[str, bool | int | float | str | None] = Field(
        default_factory=dict, description="Settings of the environment."
    )
    trainer: dict[str, bool | int | float | str | None] = Field(
        default_factory=dict, description="Settings of the trainer."
    )
    engine_flags: dict[str, bool | int | float | str] = Field(
        default_factory=dict, description="Settings of the engine."
    )

    @field_validator("environment")
    @classmethod
    def _refuse_other_environment_settings(cls, given: dict[str, Any]) -> dict[str, Any]:
        return _only(given, _ENVIRONMENT_SETTINGS)

    @field_validator("trainer")
    @classmethod
    def _refuse_other_trainer_settings(cls, given: dict[str, Any]) -> dict[str, Any]:
        lr = given.get("lr")
        if lr is not None and (isinstance(lr, bool | str) or not 0 < lr <= 1):
            raise ValueError(f"lr is {str(lr)[:40]!r}, expected a number in (0, 1]")
        return _only(given, _TRAINER_SETTINGS)

    @field_validator("engine_flags")
    @classmethod
    def _refuse_other_engine_settings(cls, given: dict[str, Any]) -> dict[str, Any]:
        return _only(given, _ENGINE_SETTINGS)


def _only(given: dict[str, Any], allowed: frozenset[str]) -> dict[str, Any]:
    for name, value in given.items():
        if name not in allowed:
            near = near_name(name[:100], sorted(allowed))
            raise ValueError(f"an entry may not set {name[:100]!r}{near}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} is {value}, expected a finite number")
    return given


class SpeedrunEntry(BaseModel):
    """One entry of the speedrun; a YAML file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(
        pattern=r"^[a-z0-9][a-z0-9-]{0,59}$", description="Name: lower case, digits and hyphens."
    )
    author: str = Field(
        pattern=r"^[\w.@-]{1,60}$", description="Handle of the author, without spaces."
    )
    date: datetime.date = Field(description="Day of the entry.")
    explanation: str = Field(
        min_length=1, max_length=2000, description="What it changes, and why that is faster."
    )
    settings: EntrySettings = Field(default_factory=EntrySettings)

    @property
    def digest(self) -> str:
        """SHA-256 of the settings; the same for all spellings of a file."""
        return digest_of(self.settings.model_dump(mode="json"))


def digest_of(value: Any) -> str:
    """Return the SHA-256 of a JSON value, with sorted keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_entry(path: Path) -> SpeedrunEntry:
    """Read an entry.

    Raises:
        ConfigError: The file cannot be read, or the rules do not allow one of its settings.
    """
    try:
        content = read_yaml(_text_of(path))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = inert_line(str(error), max_characters=_MAX_REASON_CHARACTERS)
        raise ConfigError(f"{path}: cannot be read: {reason}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected an entry with name, author, date, and explanation")
    entry: SpeedrunEntry = _validated(SpeedrunEntry, content, path)
    return entry


def _text_of(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"larger than {MAX_FILE_BYTES:,} bytes")
    return content.decode()


def _validated(kind: type[Any], content: Mapping[str, Any], path: Path) -> Any:
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = inert_line(".".join(map(str, first["loc"])), max_characters=100)
        reason = str(first["msg"]).removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            reason = "unknown setting"
        raise ConfigError(f"{path}: {where}: {reason}") from error


def demo_settings(entry: SpeedrunEntry, *, seed: int, start_model: Path) -> DemoSettings:
    """Return the settings of one run; the task and the held-out problems do not depend on it."""
    chosen = entry.settings
    environment = {**chosen.environment, "eval_seed": HELD_OUT_SEED}
    return replace(
        DemoSettings(),
        seed=seed,
        steps=chosen.steps,
        groups_per_step=chosen.groups_per_step,
        group_size=chosen.group_size,
        max_tokens=chosen.max_tokens,
        num_held_out=NUM_HELD_OUT,
        engine=chosen.engine,
        warmed_up_model=start_model,
        trainer_flags=tuple(_flags(chosen.trainer)),
        environment_sections={"env": environment},
    )


def engine_flags(entry: SpeedrunEntry) -> tuple[str, ...]:
    """Return the additional arguments of the engine."""
    flags = [
        [f"--{name.replace('_', '-')}", str(value)]
        for name, value in entry.settings.engine_flags.items()
    ]
    return tuple(word for flag in flags for word in flag)


def _flags(settings: Mapping[str, Any]) -> list[str]:
    flags = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            default = TrainingConfig.model_fields[name].default
            if value or default:
                flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            flags.append(f"--{flag}={value}")
    return flags


def task_settings() -> dict[str, Any]:
    """Return the settings of the environment that make the held-out and the training problems."""
    fixed = DemoSettings(seed=START_SEED, num_held_out=NUM_HELD_OUT)
    return {**environment_settings(fixed), "eval_seed": HELD_OUT_SEED}


def prompt_digest(text: str) -> str:
    """Return the fingerprint of a prompt's text, without white space at its ends."""
    return hashlib.sha256(text.strip().encode()).hexdigest()


def fingerprint(texts: Sequence[str]) -> str:
    """Return one fingerprint of many texts, in any order."""
    return digest_of(sorted(map(prompt_digest, texts)))


class Consumption(BaseModel):
    """Batches that the trainer took from the service in one run, read from its journal."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: int
    groups: int
    sequences: int
    tokens: int
    """Of prompts and completions."""
    completion_tokens: int
    held_out_prompts: int
    """Groups whose prompt is a held-out problem."""
    prompts_sha256: str
    """Fingerprint of the prompts, in any order."""


class SeedResult(BaseModel):
    """The result of one run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seed: int
    seconds: float = Field(gt=0, le=LONGEST_S)
    """From the start of the first process to the end of the evaluation."""
    cpu_seconds: float = Field(gt=0, le=LONGEST_S)
    """User and system time of all processes of the run."""
    num_correct: int = Field(ge=0, le=NUM_HELD_OUT)
    num_problems: int = Field(ge=0, le=NUM_HELD_OUT)
    seconds_by_phase: dict[str, Annotated[float, Field(ge=0, le=LONGEST_S)]]
    consumed: Consumption

    @property
    def accuracy(self) -> float:
        return self.num_correct / max(1, self.num_problems)


class StartingModel(BaseModel):
    """The model that all runs start from."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: str
    accuracy: float


class Result(BaseModel):
    """The result of an entry on one machine; a JSON file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rules: int
    name: str
    author: str
    date: datetime.date
    settings: dict[str, Any]
    entry_sha256: str
    held_out_sha256: str
    start: StartingModel
    runs: list[SeedResult]
    machine: dict[str, str | int | float | None]
    versions: dict[str, str]

    @property
    def seconds(self) -> float:
        """Median of the runs."""
        return statistics.median(run.seconds for run in self.runs)

    @property
    def cpu_seconds(self) -> float:
        return statistics.median(run.cpu_seconds for run in self.runs)


def read_result(path: Path) -> Result:
    """Read a result; raise `ConfigError` if the file is not one."""
    try:
        content = json.loads(_text_of(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a result of atropos-speedrun")
    result: Result = _validated(Result, content, path)
    if not result.runs:
        raise ConfigError(f"{path}: the result has no runs")
    return result


def violations(result: Result, entry: SpeedrunEntry) -> list[str]:
    """Return why a result does not count, in words; empty if it does."""
    found = []
    if result.rules != RULES:
        found.append(f"it follows version {result.rules} of the rules, not {RULES}")
    if result.entry_sha256 != entry.digest or result.name != entry.name:
        found.append("the settings of the entry are not those of the result")
    if digest_of(result.settings) != result.entry_sha256:
        found.append("the settings in the result do not have its fingerprint")
    if result.held_out_sha256 != HELD_OUT_SHA256:
        found.append("the held-out problems are not those of the rules")
    lowest, highest = START_ACCURACY
    if not lowest <= result.start.accuracy <= highest:
        found.append(
            f"the starting model answers {result.start.accuracy:.1%} right, expected "
            f"{lowest:.0%} to {highest:.0%}"
        )
    if result.machine.get("cores") != NUM_CORES:
        found.append(f"the processes were not restricted to {NUM_CORES} cores")
    seeds = sorted(run.seed for run in result.runs)
    if seeds != sorted(SEEDS):
        found.append(f"it has runs of the seeds {seeds}, expected {sorted(SEEDS)}")
    for run in result.runs:
        found += [f"seed {run.seed}: {reason}" for reason in _run_violations(run, entry)]
    return found


def _run_violations(run: SeedResult, entry: SpeedrunEntry) -> list[str]:
    found = []
    consumed, chosen = run.consumed, entry.settings
    if run.num_problems != NUM_HELD_OUT:
        found.append(f"{run.num_problems} problems were measured, expected {NUM_HELD_OUT}")
    if run.accuracy < TARGET_ACCURACY:
        found.append(f"{run.accuracy:.1%} is below {TARGET_ACCURACY:.0%}")
    if consumed.held_out_prompts:
        found.append(f"{consumed.held_out_prompts} trained groups have a held-out problem")
    if consumed.steps != chosen.steps:
        found.append(f"the trainer took {consumed.steps} batches, expected {chosen.steps}")
    if consumed.sequences != consumed.steps * chosen.groups_per_step * chosen.group_size:
        found.append("the batches do not have the sequences of the entry")
    return found


_ROW = "| {place} | {seconds} | {cpu} | {change} | {accuracy} | {steps} | {name} | {who} | {why} |"
PHASES = {
    "start": "engine and service start",
    "reinforce": "from there until the trainer has ended",
    "measure": "evaluation",
    "first_batch": "trainer waits for its first batch",
    "waiting": "trainer waits for the others",
    "training": "trainer computes",
    "updating": "engine gets new weights",
}
"""Keys of `SeedResult.seconds_by_phase`; the last four are parts of the second, except that a
trainer which starts with the engine may have waited before."""
_SENTENCE = re.compile(r"(.+?[.!?])(?:\s|$)", re.DOTALL)


def table(results: Sequence[tuple[Result, SpeedrunEntry]]) -> str:
    """Return the record table in Markdown, fastest first.

    The change is relative to the slowest entry, which the others are compared with.
    """
    lines = [
        _ROW.format(
            place="#", seconds="seconds", cpu="CPU seconds", change="speed", accuracy="held-out",
            steps="steps", name="entry", who="author, date", why="in short",
        ),
        "|--:|--:|--:|--:|--:|--:|---|---|---|",
    ]  # fmt: skip
    ordered = sorted(results, key=lambda pair: pair[0].seconds)
    for place, (result, entry) in enumerate(ordered, start=1):
        change = ordered[-1][0].seconds / result.seconds
        each = ", ".join(f"{run.accuracy:.1%}" for run in result.runs)
        lines.append(
            _ROW.format(
                place=place,
                seconds=f"**{result.seconds:.1f}**",
                cpu=f"{result.cpu_seconds:.1f}",
                change=f"{change:.2f}x",
                accuracy=each,
                steps=entry.settings.steps,
                name=f"`{entry.name}`",
                who=f"{_escaped_author(entry.author)}, {entry.date.isoformat()}",
                why=short_explanation(entry.explanation),
            )
        )
    return "\n".join(lines)


def phases_table(results: Sequence[tuple[Result, SpeedrunEntry]]) -> str:
    """Return where the seconds of each entry went in Markdown, as medians of its runs."""
    ordered = sorted(results, key=lambda pair: pair[0].seconds)
    lines = [f"| seconds | {' | '.join(f'`{entry.name}`' for _, entry in ordered)} |"]
    lines.append(f"|---|{'--:|' * len(ordered)}")
    for key, words in PHASES.items():
        medians = [
            statistics.median(run.seconds_by_phase.get(key, 0.0) for run in result.runs)
            for result, _ in ordered
        ]
        lines.append(f"| {words} | {' | '.join(f'{median:.1f}' for median in medians)} |")
    return "\n".join(lines)


def tables(results: Sequence[tuple[Result, SpeedrunEntry]]) -> str:
    """Return both tables of the page."""
    return f"{table(results)}\n\n{phases_table(results)}"


def _escaped_author(author: str) -> str:
    return author.replace("_", "\\_")


def short_explanation(text: str) -> str:
    """Return the first sentence as text of a table cell: without HTML, and with inert links."""
    flat = inert_markup(inert_line(text, max_characters=len(text)))
    match = _SENTENCE.match(flat)
    return re.sub(r"([\\|\[\]])", r"\\\1", match[1] if match else flat)


TABLE_START = "<!-- speedrun table: atropos-speedrun table --write -->"
TABLE_END = "<!-- end of the speedrun table -->"


def with_table(page: str, new_table: str) -> str:
    """Return a page with its table replaced; raise `ConfigError` without the two marks."""
    before, start, rest = page.partition(TABLE_START)
    _, end, after = rest.partition(TABLE_END)
    if not start or not end:
        raise ConfigError(f"the page has no lines {TABLE_START} and {TABLE_END}")
    return f"{before}{start}\n\n{new_table}\n\n{end}{after}"
