"""Answer format: state an answer in one of 132 demanded forms; only the form is scored.

    question, format -> [system, user] -> G completions -> the form, exactly once? -> 1 or 0

`atroposlib/tasks/answers.py` has the table of formats. The content of the answer is not
compared, so train it together with environments that do. Without the hub:

    python environments/answer_format_environment/answer_format_environment.py process \
        --env.dataset_path environments/data/answer_format_sample --env.total_steps 4
"""

from __future__ import annotations

import logging
import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, get_args

from pydantic import BaseModel, Field

from atroposlib.envs.base import APIServerConfig, Item, ScoredDataGroup
from atroposlib.envs.dataset_items import DatasetItems, LocalItemsConfig, hub_rows
from atroposlib.envs.single_turn_env import Trajectory
from atroposlib.errors import ConfigError
from atroposlib.tasks.answers import FORMATS, AnswerFormat, DatasetType, formats_for
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.single_turn_parts import (
    DEEP_THINKING,
    RolloutDump,
    SavedRolloutsConfig,
    ThinkingEnv,
    answer_after_thinking,
    deep_hermes_settings,
)
from atroposlib.utils.local_records import read_records
from atroposlib.utils.text import near_name

__all__ = [
    "AnswerFormatEnv",
    "AnswerFormatEnvConfig",
    "FormatBalance",
    "FormatDataset",
    "FormatItem",
    "has_format",
]

logger = logging.getLogger("environments.answer_format")

CARD = EnvironmentCard(
    task="state an answer in one of 132 demanded forms",
    turns="1",
    reward="1 for the form, exactly once; the content is not compared",
    data="AcademicMCQA and GSM8K from the hub, others by configuration, or `--env.dataset_path`",
    command="process --env.dataset_path environments/data/answer_format_sample --env.total_steps 4",
)

SAMPLE = Path(__file__).resolve().parent.parent / "data" / "answer_format_sample"
SIMPLE_PROBABILITY = 0.7
MANY_FORMATS = 10
"""Number of available formats above which simple ones are drawn with `SIMPLE_PROBABILITY`."""


class FormatDataset(BaseModel):
    """One data set of questions."""

    name: str = Field(description="Data set of the hub, or a local file.")
    subset: str | None = Field(None, description="Configuration of it, if it has several.")
    split: str = Field("train", description="Split of the data set.")
    sample_size: int | None = Field(None, ge=1, description="Maximum number of rows, drawn.")
    prompt_field: str = Field("prompt", description="Column of the question.")
    answer_field: str = Field("answer", description="Column of the answer.")
    metadata_fields: list[str] = Field(
        default_factory=list, description="Columns saved with dumped rollouts."
    )
    dataset_type: DatasetType = Field("generic", description="Kind of the answers.")


OPEN_HERMES = FormatDataset(
    name="teknium/OpenHermes-2.5", sample_size=1000, prompt_field="conversations",
    answer_field="conversations",
)  # fmt: skip
GSM8K = FormatDataset(
    name="gsm8k", subset="main", sample_size=2000, prompt_field="question",
    dataset_type="math_only",
)  # fmt: skip
ACADEMIC_MCQA = FormatDataset(
    name="NousResearch/AcademicMCQA", subset="default", sample_size=50000,
    answer_field="ground_truth",
)  # fmt: skip


class AnswerFormatEnvConfig(LocalItemsConfig, SavedRolloutsConfig):
    """Settings of the data sets and of the formats."""

    dataset_path: str | None = Field(  # type: ignore[assignment]
        None,
        description="File, or folder with a train and a test file, with the columns prompt, answer "
        "and optionally dataset_type; None takes dataset_configs.",
    )
    dataset_configs: list[FormatDataset] = Field(
        default_factory=lambda: [OPEN_HERMES, GSM8K],
        description="Data sets, each with name, split, sample_size, prompt_field, answer_field, "
        "metadata_fields and dataset_type.",
    )
    debug_logging: bool = Field(True, description="Whether every scored group is logged.")
    rollout_save_score_threshold: float = Field(
        0.0, ge=0, le=1, description="Score above which dump_rollouts saves a rollout."
    )
    eval_set_percentage: float = Field(
        0.1, gt=0, lt=1, description="Fraction of the rows of dataset_configs for evaluations."
    )
    supported_formats: list[str] | None = Field(
        None, description="Names of the demanded formats; None takes all that suit a data set."
    )
    ensure_equivalent_ratios: bool = Field(
        False,
        description="Whether a format with format_group_threshold groups pauses until the other "
        "formats have them as well.",
    )
    format_group_threshold: int = Field(
        50, ge=1, description="Number of groups after which a format pauses."
    )
    seed: int = Field(
        default_factory=lambda: random.randint(20, 9999),
        description="Seed of the order and of the demanded formats; random by default. A restarted "
        "run continues with the seed of its checkpoint.",
    )


class FormatItem(NamedTuple):
    """One question and the demanded format."""

    question: str
    answer: str
    format_name: str
    metadata: Mapping[str, Any]

    @property
    def format(self) -> AnswerFormat:
        return FORMATS[self.format_name]


class QuestionRow(NamedTuple):
    """One row of a data set."""

    question: str
    answer: str
    dataset_type: DatasetType
    metadata: Mapping[str, Any]


def has_format(completion: str, demanded: AnswerFormat) -> bool:
    """Whether the text after one block of thinking has the demanded format exactly once."""
    answer = answer_after_thinking(completion)
    return answer is not None and demanded.extract(answer) is not None


def text_of(value: Any, *, role: str) -> str | None:
    """Return a text, or the first message of a role (`user`, `assistant`) in a list of messages."""
    if isinstance(value, list):
        names = {"user": ("user", "human"), "assistant": ("assistant", "gpt")}[role]
        messages = [m for m in value if isinstance(m, Mapping)]
        found = [m for m in messages if (m.get("role") or m.get("from")) in names]
        value = (found[0].get("content") or found[0].get("value")) if found else None
    return str(value) if isinstance(value, str | int | float) and str(value).strip() else None


def read_question_row(row: Mapping[str, Any], source: FormatDataset) -> QuestionRow:
    """Return the question of a row.

    Raises:
        ConfigError: its question or answer is not a text, or its kind is unknown.
    """
    question = text_of(row.get(source.prompt_field), role="user")
    answer = text_of(row.get(source.answer_field), role="assistant")
    kind = row.get("dataset_type") or source.dataset_type
    if question is None or answer is None or kind not in get_args(DatasetType):
        raise ConfigError(
            f"{source.name}: expected texts in {source.prompt_field} and {source.answer_field} and "
            f"a dataset_type out of {', '.join(get_args(DatasetType))}, got {str(dict(row))[:200]}"
        )
    metadata = {name: row.get(name) for name in source.metadata_fields}
    return QuestionRow(question, answer, kind, metadata)


class FormatBalance:
    """Draws formats, and pauses those that have had their share of groups.

    Args:
        threshold: number of groups after which a format pauses until the others have them too;
            None never pauses.
        counts: restored number of groups by format.
    """

    def __init__(self, *, threshold: int | None, counts: Mapping[str, int] | None = None) -> None:
        self.counts = Counter(counts or {})
        self._threshold = threshold

    def available(self, names: Sequence[str]) -> list[str]:
        """Return the formats that do not pause; never empty."""
        if self._threshold is None:
            return list(names)
        rounds = {name: self.counts[name] // self._threshold for name in names}
        return [name for name in names if rounds[name] == min(rounds.values())]

    def draw(self, names: Sequence[str], source: random.Random) -> str:
        """Return one of the names; of more than ten, a simple format in seven draws of ten."""
        open_names = self.available(names)
        simple = [name for name in open_names if not FORMATS[name].is_complex]
        rest = [name for name in open_names if FORMATS[name].is_complex]
        if len(open_names) > MANY_FORMATS and simple and rest:
            open_names = simple if source.random() < SIMPLE_PROBABILITY else rest
        return source.choice(open_names)


class AnswerFormatEnv(DatasetItems, ThinkingEnv):
    """Questions with a demanded format; an item is a `FormatItem`.

    Attributes:
        format_counts: restored number of groups by format.
        order_seed: seed of the order of the rows; kept in checkpoints.
    """

    env_config_cls = AnswerFormatEnvConfig
    config: AnswerFormatEnvConfig
    columns = ("prompt", "answer")
    optional_columns = ("dataset_type",)
    logs_percent_correct = True
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE), "seed": 20}

    def __init__(self, config: AnswerFormatEnvConfig, *args: Any, **kwargs: Any) -> None:
        config.dataset_seed = config.seed
        super().__init__(config, *args, **kwargs)
        self.order_seed = config.seed
        unknown = [name for name in config.supported_formats or () if name not in FORMATS]
        if unknown:
            hint = near_name(unknown[0], FORMATS) or f"; known: {', '.join(FORMATS)}"
            raise ConfigError(f"supported_formats: no format is called {unknown[0]!r}{hint}")
        self.format_counts: dict[str, int] = {}
        self.balance = self._new_balance()
        self.test_items: list[FormatItem] = []
        self.rollout_dump = RolloutDump(config, "answer_format")

    @classmethod
    def config_init(cls) -> tuple[AnswerFormatEnvConfig, APIServerConfig]:
        return deep_hermes_settings(
            AnswerFormatEnvConfig,
            group_size=16,
            total_steps=250,
            steps_per_eval=20,
            max_token_length=12288,
            ensure_scores_are_not_same=False,
            format_group_threshold=10,
            dataset_configs=[ACADEMIC_MCQA, GSM8K.model_copy(update={"sample_size": 20000})],
            wandb_name="answer_format",
        )

    async def setup(self) -> None:
        self.config.set_log_levels(logger)
        await super().setup()
        self._make_test_items()

    def _make_test_items(self) -> None:
        rows: list[Any] = [*self.train, *self.test]
        for kind in sorted({row.dataset_type for row in rows}):
            if not self._names(kind):
                raise ConfigError(f"supported_formats: no format suits data of the kind {kind}")
        balance = FormatBalance(threshold=None)
        self.test_items = [
            self._item(row, balance, f"evaluation {self.config.seed} {i}")
            for i, row in enumerate(rows[len(self.train) :])
        ]

    def _read(self) -> tuple[Any, Any]:
        """Return lists of `QuestionRow`."""
        if self.config.dataset_path is not None:
            own = FormatDataset(name=self.config.dataset_path)
            train, test = super()._read()
            return [read_question_row(r, own) for r in train], [
                read_question_row(r, own) for r in test
            ]
        rows = [row for source in self.config.dataset_configs for row in self._rows_in(source)]
        if not rows:
            raise ConfigError("dataset_configs names no data set")
        random.Random(self.config.seed).shuffle(rows)
        num_test = max(1, round(self.config.eval_set_percentage * len(rows)))
        return rows[num_test:] or rows, rows[:num_test]

    def _rows_in(self, source: FormatDataset) -> list[QuestionRow]:
        path = Path(source.name)
        if path.suffix or path.is_file():
            names = dict.fromkeys((source.prompt_field, source.answer_field))
            rows = read_records(path, list(names), optional=source.metadata_fields)
        else:
            rows = hub_rows(source.name, split=source.split, subset=source.subset)
        random.Random(self.config.seed).shuffle(rows)
        return [read_question_row(row, source) for row in rows[: source.sample_size]]

    async def get_next_item(self) -> FormatItem:  # type: ignore[override] # made from a row
        row: Any = await super().get_next_item()
        return self._item(row, self.balance, f"{self.config.seed} {self.iter}")

    def eval_items(self) -> Sequence[Any]:
        return self.test_items

    def prompt(self, item: FormatItem) -> list[dict[str, str]]:
        return [
            {"role": "system", "content": f"{DEEP_THINKING}\n\n{item.format.instruction()}"},
            {"role": "user", "content": item.question},
        ]

    async def score(self, item: FormatItem, answer: str) -> float:
        return float(has_format(self.opened_tag + answer, item.format))

    async def collect_trajectories(
        self, item: FormatItem
    ) -> tuple[ScoredDataGroup | None, list[Item]]:
        """Sample and score a group; None if all completions or none of them have the format."""
        group, backlog = await super().collect_trajectories(item)
        if group is None or min(group["scores"]) == max(group["scores"]):
            return None, backlog
        return group, backlog

    def note_group(
        self, item: FormatItem, trajectories: Sequence[Trajectory], scores: Sequence[float]
    ) -> None:
        logger.debug("%s: scores %s", item.format_name, scores)
        # Dropped groups count as well: otherwise a format that the policy masters never pauses.
        self.balance.counts[item.format_name] += 1
        details = {"format": item.format_name, "gold_answer": item.answer, **item.metadata}
        self.rollout_dump.save(details, self.prompt(item), trajectories, scores)

    async def evaluate_item(self, item: FormatItem) -> dict[str, Any]:
        record = await super().evaluate_item(item)
        return {**record, "format": item.format_name, "family": item.format.family}

    def evaluation_metrics(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        metrics = super().evaluation_metrics(samples)
        for family in sorted({sample["family"] for sample in samples}):
            scores = [sample["score"] for sample in samples if sample["family"] == family]
            metrics[f"eval/percent_correct_{family}"] = statistics.fmean(scores)
        return metrics

    def save_checkpoint(self, step: int, data: Mapping[str, Any] | None = None) -> None:
        own = {"format_counts": dict(self.balance.counts), "order_seed": self.order_seed}
        super().save_checkpoint(step, {**(data or {}), **own})

    def load_checkpoint(self) -> None:
        """Continue the run, in the order of its rows: `seed` is another one at each start."""
        super().load_checkpoint()
        self.balance = self._new_balance()
        if self.order_seed != self.config.seed:
            self.config.seed = self.config.dataset_seed = self.order_seed
            self.train, self.test = self._read()
            self._make_test_items()

    async def close(self) -> None:
        self.rollout_dump.close()
        await super().close()

    def check_gold_answer(self, item: FormatItem) -> str:
        fields = {**dict.fromkeys(item.format.fields, "I worked it out."), "answer": item.answer}
        gold = item.format.render(**fields)
        return f"<think>The form matters.</think>\n{gold}"

    def _names(self, kind: DatasetType) -> list[str]:
        supported = self.config.supported_formats
        return [name for name in formats_for(kind) if supported is None or name in supported]

    def _item(self, row: QuestionRow, balance: FormatBalance, seed: str) -> FormatItem:
        name = balance.draw(self._names(row.dataset_type), random.Random(seed))
        return FormatItem(row.question, row.answer, name, row.metadata)

    def _new_balance(self) -> FormatBalance:
        is_balanced = self.config.ensure_equivalent_ratios
        return FormatBalance(
            threshold=self.config.format_group_threshold if is_balanced else None,
            counts=self.format_counts,
        )


if __name__ == "__main__":
    AnswerFormatEnv.cli()
