r"""Evaluations by table: the base of all, and mathematics in a box.

    EvalSource (data set, columns) ─► rows ─► read ─► EvalQuestion ─► prompt ─► one chat per sample
                                                                                    │
    metrics.json ◄─ evaluation_metrics ◄─ record ◄─ grade: EvalGrade ◄─ answer_part ┘

A data set is a row of a table: where it is, its columns, and how a row becomes a question. The
programs of `environments/eval_environments/` name one row each. `choice_evaluations` has the
questions with options, `text_evaluations` the answers in free text, `judged_evaluations` those that
a judge grades, and the page `ifeval_eval` the instructions that a program can verify.

`EvaluationEnv` is a `SingleTurnEnv`: `evaluate` is its purpose, and `process`, `serve` and `check`
work as well, with the grade as score.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import statistics
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from pydantic import Field

from atroposlib.envs.base import APIServerConfig, EvalHandlingEnum
from atroposlib.envs.dataset_items import hub_rows
from atroposlib.envs.server_handling.chat_rendering import text_of_content
from atroposlib.envs.single_turn_env import SingleTurnEnv, SingleTurnEnvConfig
from atroposlib.errors import ConfigError, ContextOverflowError, EngineSetupError, InferenceError
from atroposlib.tasks.eval_answers import (
    compare_math_strings,
    extract_boxed_answers,
    only_boxed_answer,
    validate_thinking_format,
)
from atroposlib.tasks.math_problems import math_verdict
from atroposlib.tasks.single_turn_parts import default_configs
from atroposlib.utils.local_records import find_split, read_split, require_data
from atroposlib.utils.score_pool import ScorePool

__all__ = [
    "BOXED_SOURCES",
    "TRAIN_SETTINGS",
    "BoxedEvalConfig",
    "BoxedEvalEnv",
    "EvalFamilyConfig",
    "EvalGrade",
    "EvalQuestion",
    "EvalReply",
    "EvalSource",
    "EvaluationEnv",
    "TrainableEvalConfig",
    "TrainableEvaluation",
    "boxed_grade",
    "create_system_content",
    "format_math_answer_instruction",
    "get_default_thinking_prompt",
    "metric_key",
]

logger = logging.getLogger(__name__)

MODEL = "NousResearch/Hermes-3-Llama-3.1-8B"
TEST_FILES = ("test", "validation", "valid", "val", "train")
TRAIN_FILES = ("train",)
EXAMPLE_FILES = ("dev", "validation", "valid", "val", "train")


def get_default_thinking_prompt(custom_prompt: str | None = None) -> str | None:
    """Return the prompt that asks for thinking: the given one; without one, none."""
    return custom_prompt


def create_system_content(
    thinking_mode: bool,
    custom_thinking_prompt: str | None = None,
    custom_system_prompt: str | None = None,
) -> str | None:
    """Return the system message of an evaluation; None if there is nothing to say.

    Args:
        thinking_mode: Whether the thinking prompt is used.
        custom_thinking_prompt: asks for thinking; may be None.
        custom_system_prompt: follows after a blank line; may be None.
    """
    thinking = get_default_thinking_prompt(custom_thinking_prompt) if thinking_mode else None
    return "\n\n".join(part for part in (thinking, custom_system_prompt) if part) or None


def format_math_answer_instruction(include_hope: bool = True) -> str:
    r"""Return the request for exactly one `\boxed{}`.

    Args:
        include_hope: Whether to ask for the closing sentence that many models were trained on.
    """
    if include_hope:
        return (
            "Close with this sentence, with your result in place of ANSWER, and use \\boxed "
            "nowhere else:\nTherefore, the final answer is: $\\boxed{ANSWER}$. "
            "I hope it is correct."
        )
    return "Give your final answer once, in the form \\boxed{ANSWER}, and use \\boxed nowhere else."


class EvalQuestion(NamedTuple):
    """One item of an evaluation."""

    question: str
    """The question as the data set has it."""
    gold: Any
    """The gold answer, in the form that the family grades."""
    choices: tuple[str, ...] = ()
    """The texts of the options, if any."""
    groups: tuple[tuple[str, str], ...] = ()
    """Name and value of what metrics are also given for, such as `("subject", "astronomy")`."""
    examples: tuple[tuple[str, str], ...] = ()
    """Solved questions before this one: prompt and answer."""
    reference: str | None = None
    """A completion that is correct, if the data set has one; for `check`."""


class EvalGrade(NamedTuple):
    """The result of one completion."""

    score: float
    """1.0 if correct, 0.0 if not."""
    answer: str | None
    """The answer as found in the completion."""
    method: str
    """The way it was found, such as `answer_tag` or `no_boxed`."""
    is_compliant: bool
    """Whether the answer was in the requested form."""
    values: Mapping[str, float] = {}
    """Further values whose means are metrics, by name of the metric."""


class EvalReply(NamedTuple):
    """One completion, as sampled for an evaluation."""

    text: str
    reasoning: str | None
    """Reasoning that the server returned in a field of its own."""
    finish_reason: str

    @property
    def has_thinking(self) -> bool:
        is_valid, rest = validate_thinking_format(self.text, True)
        return bool(self.reasoning) or (is_valid and len(rest) < len(self.text.strip()))


Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class EvalSource:
    """A data set of the hub and the metrics of its evaluation.

    Example:
        EvalSource(path="openai/gsm8k", subset="main", columns=("question", "answer"), read=...)
    """

    path: str
    """Name on the hub."""
    columns: tuple[str, ...]
    """Required columns, of local files as well."""
    read: Callable[[Row], EvalQuestion]
    """Converts a row; raises `ConfigError` for one that it cannot read."""
    subset: str | None = None
    subsets: tuple[str, ...] | None = None
    """All configurations to load; an empty tuple means all that the hub lists."""
    subset_column: str = "subset"
    """Column that is added with the name of the configuration, if there are several."""
    split: str = "test"
    optional: tuple[str, ...] = ()
    example_split: str | None = None
    """Split with the solved questions of few-shot prompts."""
    overall: str = "accuracy"
    """Name of the main metric; its first part, as in `eval/`, is that of all others."""
    group_metrics: Mapping[str, str] = field(default_factory=dict)
    """Group to the name of its metrics, such as `eval/subject_{}_accuracy`."""

    @property
    def prefix(self) -> str:
        area, slash, _ = self.overall.rpartition("/")
        return area + slash


class EvalFamilyConfig(SingleTurnEnvConfig):
    """Data, requests and prompts of an evaluation."""

    dataset_path: str | None = Field(
        None,
        description="JSONL, JSON or Parquet file, or folder with a test file, with the columns of "
        "the data set; None loads it from the hub.",
    )
    dataset_name: str | None = Field(
        None, description="Data set of the hub with the same columns; None uses the usual one."
    )
    dataset_subset: str | None = Field(
        None, description="Configuration of the data set; None uses the usual one, or all."
    )
    dataset_split: str | None = Field(
        None, description="Split of the data set; None uses the usual one."
    )
    thinking_mode: bool = Field(
        True,
        description="Whether to ask the inference server for reasoning and to send "
        "custom_thinking_prompt.",
    )
    custom_system_prompt: str | None = Field(
        None, description="Text of the system message after custom_thinking_prompt."
    )
    eval_temperature: float = Field(0.6, ge=0, description="Sampling temperature of evaluations.")
    eval_max_tokens: int = Field(
        0, ge=0, description="Token limit of a completion; 0 leaves it to the inference server."
    )
    max_retries: int = Field(
        3, ge=1, le=100, description="Tries for one sample, also if its completion is too short."
    )
    retry_delay: float = Field(1.0, ge=0, description="Seconds between two tries.")
    min_response_length: int = Field(
        1, ge=0, description="Characters below which a completion counts as a failed try."
    )
    full_debug: bool = Field(False, description="Whether to log every completion and its grade.")


class EvaluationEnv(SingleTurnEnv):
    """One data set of an evaluation; an item is an `EvalQuestion`.

    Implement `question_text` and `grade`.

    Attributes:
        source: row of the table of the family.
        iter: number of items handed out for training.
    """

    source: ClassVar[EvalSource]
    env_config_cls = EvalFamilyConfig
    config: EvalFamilyConfig
    scores_thinking = True  # `grade` removes it

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.iter = 0
        self.questions: list[EvalQuestion] = []

    @classmethod
    def config_init(cls) -> tuple[Any, APIServerConfig]:
        return default_configs(
            cls.env_config_cls,
            MODEL,
            port=9000,
            server={
                "api_key": os.environ.get("OPENAI_API_KEY"),
                "server_type": "openai",
                "num_requests_for_eval": 1024,
            },
            **{
                "group_size": 1,
                "total_steps": 1,
                "steps_per_eval": 1,
                "eval_handling": EvalHandlingEnum.STOP_TRAIN,
                "wandb_name": cls.name,
                **cls.default_settings,
            },
        )

    @classmethod
    def check_inputs(cls, config: Any) -> None:
        if config.dataset_path:
            path = _local_file(Path(config.dataset_path), TEST_FILES)
            require_data(path, cls.source.columns)

    async def setup(self) -> None:
        """Read the questions.

        Raises:
            ConfigError: the data set cannot be loaded, lacks a column or has an unreadable row.
        """
        self.questions = await asyncio.to_thread(self.load_questions)
        if not self.questions:
            raise ConfigError(f"{self.place_of_data} has no question for these settings")
        logger.info("%d questions from %s", len(self.questions), self.place_of_data)

    @property
    def place_of_data(self) -> str:
        return self.config.dataset_path or self.config.dataset_name or self.source.path

    @property
    def split(self) -> str:
        """The split of the data set of the hub."""
        return self.config.dataset_split or self.source.split

    def load_questions(self) -> list[EvalQuestion]:
        """Read all questions; called in a thread by `setup`."""
        return self.read_rows(self.rows(self.split, TEST_FILES))

    def read_rows(self, rows: Sequence[Row]) -> list[EvalQuestion]:
        """Convert the rows of the evaluation."""
        return self.questions_of(rows, place=self.place_of_data)

    def questions_of(self, rows: Sequence[Row], *, place: str) -> list[EvalQuestion]:
        """Convert rows; an error names the row, and their file or data set."""
        questions = []
        for number, row in enumerate(rows):
            try:
                questions.append(self.source.read(row))
            except (ConfigError, LookupError, TypeError, ValueError, AttributeError) as error:
                raise ConfigError(
                    f"{place}: row {number} is not a question of "
                    f"{type(self).__name__}: {error!r}; expected the columns "
                    f"{', '.join(self.source.columns or self.source.optional)}"
                ) from error
        return questions

    def rows(self, split: str, files: Sequence[str]) -> list[dict[str, Any]]:
        """Return the rows of a split, or of the first of `files` in a local folder."""
        source, config = self.source, self.config
        if config.dataset_path:
            path, optional = Path(config.dataset_path), (*source.optional, source.subset_column)
            return read_split(path, files, source.columns, optional=optional)
        name = config.dataset_name or source.path
        loaded: list[dict[str, Any]] = []
        for subset in self.subsets_of(name):
            rows = hub_rows(name, split=split, subset=subset)
            missing = sorted(set(source.columns) - set(rows[0] if rows else source.columns))
            if missing:
                raise ConfigError(f"{name} on the hub has no {', '.join(missing)}")
            loaded += [{source.subset_column: subset, **row} for row in rows]
        return loaded

    def subsets_of(self, name: str) -> Sequence[str | None]:
        """Return the configurations of a data set of the hub to load."""
        if self.config.dataset_subset:
            return [self.config.dataset_subset]
        if self.source.subsets is None or name != self.source.path:
            return [None if name != self.source.path else self.source.subset]
        return self.source.subsets or _all_subsets(name)

    @abstractmethod
    def question_text(self, item: EvalQuestion) -> str:
        """Return the question with its options and the request for the form of the answer."""

    @abstractmethod
    async def grade(self, item: EvalQuestion, completion: str) -> EvalGrade:
        """Grade a completion, which may contain thinking; empty if it was truncated."""

    def gold_text(self, item: EvalQuestion) -> str:
        """Return the gold answer for records."""
        return str(item.gold)

    async def get_next_item(self) -> EvalQuestion:
        item = self.questions[self.iter % len(self.questions)]
        self.iter += 1
        return item

    def eval_items(self) -> Sequence[EvalQuestion]:
        return self.questions

    def prompt(self, item: EvalQuestion) -> list[dict[str, str]]:
        """Return the system message, if there is one, the examples and the question."""
        config = self.config
        system = create_system_content(
            config.thinking_mode, config.custom_thinking_prompt, config.custom_system_prompt
        )
        messages = [{"role": "system", "content": system}] if system else []
        for question, answer in item.examples:
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": answer})
        return [*messages, {"role": "user", "content": self.question_text(item)}]

    async def score(self, item: EvalQuestion, answer: str) -> float:
        return (await self.grade(item, answer)).score

    async def evaluate_item(self, item: EvalQuestion) -> dict[str, Any]:
        """Sample and grade one answer; return its record."""
        messages = self.prompt(item)
        reply = await self.reply_to(messages)
        is_cut = reply.finish_reason == "length"
        grade = await self.grade(item, "" if is_cut else reply.text)
        record = {
            "messages": [*messages, {"role": "assistant", "content": reply.text}],
            "score": grade.score,
            "is_correct": grade.score > 0,
            "question": item.question,
            "gold_answer": self.gold_text(item),
            "model_answer": grade.answer,
            "extraction_method": grade.method,
            "format_compliant": grade.is_compliant and not is_cut,
            "has_thinking": reply.has_thinking,
            "finish_reason": reply.finish_reason,
            "groups": dict(item.groups),
            "values": dict(grade.values),
        }
        if reply.reasoning:
            record["reasoning"] = reply.reasoning
        if self.config.full_debug:
            logger.info("completion %r: %s", reply.text, grade)
        return record

    async def reply_to(self, messages: Sequence[Mapping[str, str]]) -> EvalReply:
        """Sample one completion, with up to `max_retries` tries.

        A prompt that does not fit the engine's context gives an empty, truncated reply.

        Raises:
            InferenceError: every try failed.
        """
        config = self.config
        limit = {"max_tokens": config.eval_max_tokens} if config.eval_max_tokens else {}
        failure: Exception | None = None
        reply: EvalReply | None = None
        for number in range(1, config.max_retries + 1):
            if number > 1:
                await asyncio.sleep(config.retry_delay)
            try:
                chat = await self.server.chat_completion(
                    messages=list(messages),
                    n=1,
                    temperature=config.eval_temperature,
                    split="eval",
                    **limit,
                )
                reply = _reply_of(chat)
            except ContextOverflowError:
                return EvalReply("", None, "length")
            except (EngineSetupError, asyncio.CancelledError):
                raise
            except Exception as error:
                failure = error
                logger.debug("try %d of %d failed", number, config.max_retries, exc_info=True)
                continue
            if len(reply.text.strip()) >= config.min_response_length:
                return reply
        if reply is not None:
            return reply
        raise InferenceError(
            f"no reply to a question after {config.max_retries} tries (--env.max_retries); the "
            f"last error: {failure!r}"
        ) from failure

    def evaluation_values(self, record: Mapping[str, Any]) -> dict[str, float]:
        values = {self.source.overall: float(record["score"]), **record["values"]}
        for group, name in self.source.group_metrics.items():
            if group in record["groups"]:
                metric = name.format(metric_key(record["groups"][group]))
                values[metric] = float(record["score"])
        return values

    def evaluation_metrics(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return accuracy, overall and by group, and the rates of formats and methods."""
        values: dict[str, list[float]] = {}
        for sample in samples:
            for name, value in self.evaluation_values(sample).items():
                values.setdefault(name, []).append(value)
        means = {name: statistics.fmean(found) for name, found in values.items()}
        prefix = self.source.prefix
        return {
            self.source.overall: means.pop(self.source.overall),
            f"{prefix}total_evaluated": len(samples),
            f"{prefix}total_correct": sum(sample["is_correct"] for sample in samples),
            **dict(sorted(means.items())),
            **{
                f"{prefix}{name}": statistics.fmean(bool(sample[key]) for sample in samples)
                for name, key in (
                    ("format_compliance_rate", "format_compliant"),
                    ("thinking_utilization_rate", "has_thinking"),
                )
            },
        }

    def evaluation_sampling(self) -> dict[str, Any]:
        """Return the settings of requests; a limit of None is that of the inference server."""
        limit = self.config.eval_max_tokens or None
        return {"temperature": self.config.eval_temperature, "max_new_tokens": limit}

    async def evaluate_log(self, metrics: Mapping[str, Any], *args: Any, **options: Any) -> None:
        """Write the result under the name of the evaluation; for the arguments see `BaseEnv`."""
        if not args:
            options.setdefault("task_name", self.name)
        await super().evaluate_log(metrics, *args, **options)

    def save_checkpoint(self, step: int, data: Mapping[str, Any] | None = None) -> None:
        super().save_checkpoint(step, {**(data or {}), "iter": self.iter})


class TrainableEvalConfig(EvalFamilyConfig):
    """Settings of the evaluations that are environments for training as well."""

    train_path: str | None = Field(
        None,
        description="File, or folder with a train file, with the same columns: questions of "
        "`serve` and `process`; None takes those of the evaluation.",
    )


TRAIN_SETTINGS: Mapping[str, Any] = {
    "total_steps": 1000,
    "steps_per_eval": 50,
    "eval_handling": EvalHandlingEnum.LIMIT_TRAIN,
    "max_token_length": 8192,
}


class TrainableEvaluation(EvaluationEnv):
    """An evaluation that is an environment for training as well.

    Its default server takes chats only; for the token ids of an engine, its type must be `vllm`.

    Attributes:
        train_questions: questions of `serve` and `process`.
    """

    config: Any  # a TrainableEvalConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.train_questions: list[EvalQuestion] = []

    @classmethod
    def check_inputs(cls, config: Any) -> None:
        super().check_inputs(config)
        if config.train_path:
            require_data(_local_file(Path(config.train_path), TRAIN_FILES), cls.source.columns)

    async def setup(self) -> None:
        await super().setup()
        self.train_questions = await asyncio.to_thread(self.load_train_questions)

    def load_train_questions(self) -> list[EvalQuestion]:
        """Read the questions for training; called in a thread by `setup`."""
        if not self.config.train_path:
            return self.questions
        path = Path(self.config.train_path)
        optional = (*self.source.optional, self.source.subset_column)
        rows = read_split(path, TRAIN_FILES, self.source.columns, optional=optional)
        return self.questions_of(rows, place=str(path))

    async def get_next_item(self) -> EvalQuestion:
        if self.iter == 0 and self.train_questions is self.questions:
            logger.warning(
                "training uses the questions of the evaluation, whose metrics then say little; "
                "--env.train_path takes others"
            )
        item = self.train_questions[self.iter % len(self.train_questions)]
        self.iter += 1
        return item


def metric_key(value: str) -> str:
    """Return a value as part of a metric's name: `High School` as `high_school`."""
    return re.sub(r"[^\w.+-]+", "_", value.strip().lower()).strip("_") or "unknown"


def _local_file(path: Path, names: Sequence[str]) -> Path:
    return find_split(path, names) if path.is_dir() else path


def _all_subsets(name: str) -> list[str]:
    import datasets

    try:
        return list(datasets.get_dataset_config_names(name))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{name} cannot be loaded from the hub ({error}); --env.dataset_path takes local files "
            "instead"
        ) from error


def _reply_of(chat: Any) -> EvalReply:
    choice = chat.choices[0]
    message = choice.message
    # Fields added by providers are not declared.
    fields = (getattr(message, name, None) for name in ("reasoning_content", "reasoning"))
    reasoning = next((text for text in fields if isinstance(text, str) and text.strip()), None)
    text = text_of_content(message.content)
    return EvalReply(text, reasoning, choice.finish_reason or "stop")


class BoxedEvalConfig(EvalFamilyConfig):
    """Settings of the evaluations with a boxed answer."""

    max_math_workers: int = Field(
        64,
        ge=1,
        le=1024,
        description="Maximum number of processes that check answers; at most one per core is used.",
    )
    include_hope_suffix: bool = Field(
        True,
        description="Whether to ask for a closing sentence that ends with 'I hope it is correct'.",
    )


async def boxed_grade(pool: ScorePool, gold: str, completion: str) -> EvalGrade:
    """Compare the one boxed answer of a completion, in a worker; as text if it is unreadable."""
    boxed = only_boxed_answer(completion)
    if boxed.text is None:
        return EvalGrade(0.0, None, boxed.method, False)
    verdict = await math_verdict(pool, f"\\boxed{{{boxed.text}}}", gold, skip_thinking=False)
    is_compared = verdict.is_gold_readable and bool(verdict.answer_parsed)
    is_correct = verdict.is_correct
    if not is_compared:
        is_correct = compare_math_strings(boxed.text, gold)
    method = "math_verify" if is_compared else "string_compare"
    return EvalGrade(float(is_correct), boxed.text, method, True)


class BoxedEvalEnv(EvaluationEnv):
    r"""Mathematics with the answer in exactly one `\boxed{}`; `gold` is the answer as text."""

    env_config_cls: type[Any] = BoxedEvalConfig
    config: BoxedEvalConfig

    @cached_property
    def score_pool(self) -> ScorePool:
        """Workers for the check, at most `max_math_workers` and one per core."""
        most = min(self.config.max_math_workers, os.cpu_count() or 1)
        return ScorePool(
            num_workers=most if self.config.num_score_workers else 0,
            timeout_s=self.config.score_timeout_s,
            backend=self.config.score_backend.value,
        )

    def question_text(self, item: EvalQuestion) -> str:
        instruction = format_math_answer_instruction(self.config.include_hope_suffix)
        return f"{item.question}\n\n{instruction}"

    async def grade(self, item: EvalQuestion, completion: str) -> EvalGrade:
        return await boxed_grade(self.score_pool, item.gold, completion)

    def evaluation_metrics(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        methods = Counter(sample["extraction_method"] for sample in samples)
        prefix, total = self.source.prefix, len(samples)
        return {
            **super().evaluation_metrics(samples),
            f"{prefix}has_boxed_rate": 1 - methods["no_boxed"] / total,
            f"{prefix}multiple_boxed_rate": methods["multiple_boxed"] / total,
            f"{prefix}verification_methods": dict(methods),
        }

    def check_gold_answer(self, item: EvalQuestion) -> str:
        return f"<think>Step by step.</think>The answer is $\\boxed{{{item.gold}}}$."


def _boxed_reader(
    question: str, answer: Callable[[Row], str], groups: Sequence[str] = ()
) -> Callable[[Row], EvalQuestion]:
    def read(row: Row) -> EvalQuestion:
        gold = answer(row).strip()
        if not gold:
            raise ConfigError("its gold answer is empty")
        values = tuple((name, str(row[name])) for name in groups if row.get(name) is not None)
        return EvalQuestion(str(row[question]), gold, groups=values)

    return read


_OPEN_BOX = re.compile(r"\\boxed\s{1,5}([^\s$]+)")
"""A box without braces around its one symbol."""


def _box_of_solution(row: Row) -> str:
    """Return the last box of a solution."""
    solution = str(row["solution"]).replace("\\fbox", "\\boxed")
    return (extract_boxed_answers(solution) or _OPEN_BOX.findall(solution) or [""])[-1]


def _read_olympiad(row: Row) -> EvalQuestion:
    """Convert a row whose gold answer is one text or several, and may have a unit."""
    golds = [row["final_answer"]] if isinstance(row["final_answer"], str) else row["final_answer"]
    gold = ", ".join(str(text).strip().strip("$").strip() for text in golds)
    if not gold:
        raise ConfigError("its gold answer is empty")
    parts = [str(row["question"])]
    if row.get("is_multiple_answer"):
        parts.append("The answer has several parts. Separate them by commas within the one box.")
    if row.get("unit"):
        parts.append(f"The unit of the answer is {row['unit']}; leave it out of the box.")
    return EvalQuestion("\n\n".join(parts), gold)


BOXED_SOURCES: Mapping[str, EvalSource] = {
    "gsm8k": EvalSource(
        path="openai/gsm8k",
        subset="main",
        columns=("question", "answer"),
        read=_boxed_reader(
            "question", lambda row: row["answer"].rsplit("####", 1)[-1].replace(",", "")
        ),
    ),
    "aime": EvalSource(
        path="HuggingFaceH4/aime_2024",
        split="train",
        columns=("problem", "answer"),
        optional=("year",),
        read=_boxed_reader("problem", lambda row: str(row["answer"]), ("year",)),
        group_metrics={"year": "aime_{}_accuracy"},
    ),
    "math500": EvalSource(
        path="HuggingFaceH4/MATH-500",
        columns=("problem", "answer"),
        optional=("subject", "level"),
        read=_boxed_reader("problem", lambda row: str(row["answer"]), ("subject", "level")),
        group_metrics={"subject": "subject_{}_accuracy", "level": "level_{}_accuracy"},
    ),
    "math": EvalSource(
        path="DigitalLearningGmbH/MATH-lighteval",
        subsets=(
            "algebra",
            "counting_and_probability",
            "geometry",
            "intermediate_algebra",
            "number_theory",
            "prealgebra",
            "precalculus",
        ),
        columns=("problem", "solution"),
        optional=("level", "type"),
        read=_boxed_reader("problem", _box_of_solution, ("type", "level")),
        group_metrics={"type": "subject_{}_accuracy", "level": "{}_accuracy"},
    ),
    "aimo": EvalSource(
        path="lighteval/aimo_progress_prize_1",
        split="train",
        columns=("problem", "answer"),
        read=_boxed_reader("problem", lambda row: str(row["answer"])),
    ),
    "olympiadbench": EvalSource(
        path="Hothan/OlympiadBench",
        subset="OE_TO_maths_en_COMP",
        split="train",
        columns=("question", "final_answer"),
        optional=("answer_type", "unit", "is_multiple_answer"),
        read=_read_olympiad,
    ),
    "phybench": EvalSource(
        path="Eureka-Lab/PHYBench",
        split="train",
        columns=("content", "answer"),
        optional=("tag", "id"),
        read=_boxed_reader("content", lambda row: str(row["answer"]).strip().strip("$"), ("tag",)),
        group_metrics={"tag": "tag_{}_accuracy"},
    ),
}
"""Data sets of mathematics."""
