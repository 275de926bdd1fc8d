"""Pydantic schema following: write, or correct, an object that fits a pydantic model.

    row -> model source, syntax, container -> [system, user] -> G completions
        -> text in the container -> sandbox: parse and validate -> 1 or 0

A row has `prompt`, which describes the object, and `verification_info`, JSON text with
`pydantic_config` (the source) and `model_name`. With `--env.task_type editing`, an example object
is made from the model, errors are introduced, and the policy corrects it.

The source is executed in the sandbox only (`atroposlib/tasks/schemas.py`). Without the hub:

    python environments/pydantic_schema_following_environment/\
pydantic_schema_following_environment.py process \
        --env.dataset_path environments/data/pydantic_schema_sample --env.total_steps 4
"""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from atroposlib.envs.base import APIServerConfig, Item, ScoredDataGroup
from atroposlib.envs.dataset_items import DatasetItems, HubItemsConfig
from atroposlib.envs.single_turn_env import Trajectory
from atroposlib.errors import ConfigError
from atroposlib.sandbox import SandboxLimits, open_sandbox
from atroposlib.tasks.answers import only_tagged
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.schemas import (
    ERROR_TYPES,
    ErrorType,
    ModelSourceError,
    SchemaChecker,
    Syntax,
    example_of,
    possible_errors,
    spoiled,
    write_object,
)
from atroposlib.tasks.single_turn_parts import (
    DEEP_THINKING,
    RolloutDump,
    SavedRolloutsConfig,
    ThinkingEnv,
    answer_after_thinking,
    deep_hermes_settings,
)

__all__ = [
    "ModelRow",
    "PydanticEnvConfig",
    "PydanticSchemaFollowingEnv",
    "SchemaItem",
    "contained_text",
    "read_model_row",
]

logger = logging.getLogger("environments.pydantic_schema_following")

CARD = EnvironmentCard(
    task="write or correct an object that fits a pydantic model, in JSON, YAML, TOML or XML",
    turns="1",
    reward="1 when it validates, else 0",
    data="pydantic-adherance-test from the hub, or `--env.dataset_path`",
    needs="a sandbox: `apt-get install bubblewrap`; a virtual environment of the system Python",
    command="process --env.dataset_path environments/data/pydantic_schema_sample "
    "--env.total_steps 4",
)

SAMPLE = Path(__file__).resolve().parent.parent / "data" / "pydantic_schema_sample"
Container = Literal["tagged", "none", "markdown"]
SYNTAXES: tuple[Syntax, ...] = ("json", "yaml", "toml", "xml")
CONTAINERS: tuple[Container, ...] = ("tagged", "none", "markdown")
MAX_EVAL_ITEMS = 50
MAX_TRIES = 8
"""Choices of errors tried until an object is invalid."""
FENCE = "```"

XML_NOTE = (
    " Use one root element with a child element per field; a list is an element with one <item> "
    "element per entry."
)
PLACES: dict[Container, str] = {
    "tagged": "Put it between <{syntax}_output> and </{syntax}_output>, once.",
    "markdown": "Put it into one fenced code block that starts with ```{syntax}, and use no other.",
    "none": "Write nothing else after the thinking.",
}
EDITING = (
    "The following object was meant to fit the pydantic model {model_name}, but it contains "
    "errors. Correct them and give the whole object; keep everything that is right.\n\n"
    "Model:\n\n```python\n{source}\n```\n\nObject:\n\n```{syntax}\n{broken}\n```"
)


class PydanticEnvConfig(HubItemsConfig, SavedRolloutsConfig):
    """Settings of the data set, of the formats and of the sandbox."""

    dataset_name: str = Field(
        "justus27/pydantic-adherance-test",
        description="Data set of the hub, unless dataset_path is given.",
    )
    eval_set_percentage: float = Field(
        0.1, gt=0, lt=1, description="Fraction of a single split or file for evaluations."
    )
    debug_logging: bool = Field(True, description="Whether every scored group is logged.")
    include_messages: bool = Field(True, description="Whether groups are sent with messages.")
    allowed_structured_formats: list[Syntax] | None = Field(
        None, description="Syntaxes that may be demanded: json, yaml, toml, xml; None allows all."
    )
    allowed_container_formats: list[Container] | None = Field(
        None,
        description="Places of the object that may be demanded: tagged, none, markdown; None "
        "allows all.",
    )
    task_type: Literal["generation", "editing"] = Field(
        "generation", description="Whether objects are written or corrected."
    )
    error_introduction_seed: int | None = Field(
        None, description="Seed of examples and errors; None takes dataset_seed."
    )
    error_types_enabled: list[ErrorType] = Field(
        default_factory=lambda: list(ERROR_TYPES),
        min_length=1,
        description="Kinds of errors that are introduced for the task editing.",
    )
    error_introduction_probability: float = Field(
        1.0, ge=0, le=1, description="Probability that an object to correct has errors."
    )
    max_errors_per_item: int = Field(
        1, ge=1, le=100, description="Maximum number of errors in an object."
    )
    sandbox: str | None = Field(
        None,
        description="Kind of sandbox: bubblewrap, container or gvisor; None takes the kind in "
        "ATROPOS_SANDBOX, or bubblewrap if it is not set.",
    )
    validation_timeout_s: float = Field(
        10.0, gt=0, description="Timeout in seconds of the validation of a group."
    )


class ModelRow(NamedTuple):
    """One row of the data set."""

    prompt: str
    source: str
    model_name: str
    problem_id: str


class SchemaItem(NamedTuple):
    """One task."""

    row: ModelRow
    syntax: Syntax
    container: Container
    schema: Mapping[str, Any]
    """JSON schema of the model."""
    example: Any
    """An object that fits the schema."""
    broken: str | None = None
    """For the task editing: text of the object with errors."""


def read_model_row(row: Mapping[str, Any]) -> ModelRow:
    """Return the prompt and the model of a row.

    Raises:
        ConfigError: `verification_info` has no source or no name of a model.
    """
    info = row["verification_info"]
    try:
        info = json.loads(info) if isinstance(info, str) else info
        source, name = info["pydantic_config"], info["model_name"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"verification_info cannot be read ({error!r}); expected JSON text such as "
            '{"pydantic_config": SOURCE, "model_name": NAME}'
        ) from error
    if not (isinstance(source, str) and isinstance(name, str) and name.isidentifier()):
        raise ConfigError(
            f"verification_info: expected pydantic_config to be source and model_name to be a "
            f"name, got {source!r:.80} and {name!r:.80}"
        )
    return ModelRow(str(row["prompt"]), source, name, str(row.get("problem_id") or ""))


def contained_text(completion: str, syntax: Syntax, container: Container) -> str | None:
    """Return the text in the demanded container after one block of thinking, None without it."""
    answer = answer_after_thinking(completion)
    if answer is None:
        return None
    if container == "tagged":
        return only_tagged(answer, f"{syntax}_output") or None
    if container == "none":
        return answer.strip() or None
    before, opened, rest = answer.partition(f"{FENCE}{syntax}\n")
    inside, closed, after = rest.partition(FENCE)
    if not (opened and closed) or FENCE in before or FENCE in after:
        return None
    return inside.strip() or None


def demand(syntax: Syntax, container: Container) -> str:
    """Return the part of the prompt that demands a syntax and a container."""
    note = XML_NOTE if syntax == "xml" else ""
    place = PLACES[container].format(syntax=syntax)
    return f"Give the object in {syntax.upper()}.{note} {place}"


class PydanticSchemaFollowingEnv(DatasetItems, ThinkingEnv):
    """Objects that must fit a model; an item is a `SchemaItem`."""

    env_config_cls = PydanticEnvConfig
    config: PydanticEnvConfig
    columns = ("prompt", "verification_info")
    optional_columns = ("problem_id",)
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}

    def __init__(self, config: PydanticEnvConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.rows: list[ModelRow] = []
        self.test_items: list[SchemaItem] = []
        self.rollout_dump = RolloutDump(config, "pydantic_schema")

    @classmethod
    def config_init(cls) -> tuple[PydanticEnvConfig, APIServerConfig]:
        return deep_hermes_settings(
            PydanticEnvConfig,
            group_size=16,
            max_num_workers=16,
            total_steps=250,
            steps_per_eval=20,
            max_token_length=12288,
            allowed_structured_formats=["json", "yaml", "toml"],
            allowed_container_formats=list(CONTAINERS),
            eval_set_percentage=0.005,
            debug_logging=False,
            wandb_name="pydantic_schema_following",
        )

    @property
    def test_fraction(self) -> float:  # type: ignore[override] # a setting here
        return self.config.eval_set_percentage

    async def setup(self) -> None:
        """Read the rows, and try pydantic in the sandbox.

        Raises:
            ConfigError: a row is malformed; the message has its number.
            SandboxUnavailableError: there is no sandbox, or its Python cannot load pydantic.
        """
        self.config.set_log_levels(logger)
        seconds = self.config.validation_timeout_s
        limits = SandboxLimits(wall_s=seconds + 1, cpu_s=max(1, round(seconds)), memory_bytes=2**30)
        self.checker = SchemaChecker(open_sandbox(self.config.sandbox), limits)
        await super().setup()
        rows: list[ModelRow] = []
        for number, row in enumerate((*self.train, *self.test)):
            try:
                rows.append(read_model_row(row))
            except ConfigError as error:
                raise ConfigError(f"row {number}: {error}") from error
        self.rows = rows[: len(self.train)]
        await self.checker.open()
        candidates = rows[len(self.train) :][:MAX_EVAL_ITEMS]
        items = [await self._item(row, f"evaluation {i}") for i, row in enumerate(candidates)]
        self.test_items = [item for item in items if item is not None]

    async def get_next_item(self) -> Any:
        """Return the task of the next row whose model can be used.

        Raises:
            ConfigError: no row has such a model.
        """
        for _ in self.rows:
            row, number = self.rows[self.iter % len(self.rows)], self.iter
            self.iter += 1
            item = await self._item(row, str(number))
            if item is not None:
                return item
        raise ConfigError(
            "no row has a model that can be used; the log has the reason for each of them"
        )

    def eval_items(self) -> Sequence[Any]:
        return self.test_items

    async def _item(self, row: ModelRow, name: str) -> SchemaItem | None:
        """Return the task of a row; None, counted, if its model cannot be used."""
        draw = Random(f"{self.config.dataset_seed} {name}")
        syntax = draw.choice(self.config.allowed_structured_formats or SYNTAXES)
        container = draw.choice(self.config.allowed_container_formats or CONTAINERS)
        seed = self.config.error_introduction_seed
        source = Random(f"{self.config.dataset_seed if seed is None else seed} {name}")
        try:
            schema = await self.checker.schema(row.source, row.model_name)
            example = example_of(schema, source)
            item = SchemaItem(row, syntax, container, schema, example)
            if self.config.task_type == "generation":
                return item
            broken = await self._broken(item, source)
        except (ModelSourceError, ConfigError) as error:
            self.count_failure("bad_model")
            logger.warning("row skipped (%s): %s", row.problem_id or row.prompt[:60], error)
            return None
        if broken is None:
            self.count_failure("no_error_introduced")
            logger.warning(
                "row skipped (%s): no error of the enabled types can be introduced in its object",
                row.problem_id or row.prompt[:60],
            )
            return None
        return item._replace(broken=broken)

    async def _broken(self, item: SchemaItem, source: Random) -> str | None:
        """Return the text of the object with errors; None if no choice of errors makes it invalid.

        Raises:
            ModelSourceError: the example does not fit the model, so there is nothing to correct.
        """
        gold = write_object(item.example, item.syntax)
        enabled = self.config.error_types_enabled
        errors = [e for e in possible_errors(item.example, item.schema) if e.kind in enabled]
        texts = [gold]
        for _ in range(MAX_TRIES if errors else 0):
            number = min(len(errors), source.randint(1, self.config.max_errors_per_item))
            chosen = source.sample(errors, number)
            texts.append(write_object(spoiled(item.example, chosen), item.syntax))
        is_valid = await self._validate(item, texts)
        if not is_valid[0]:
            raise ModelSourceError(
                f"{item.row.model_name}: the example made from its schema is not valid; it has "
                "patterns or validators of its own"
            )
        if source.random() >= self.config.error_introduction_probability:
            return gold
        return next((t for t, valid in zip(texts, is_valid, strict=True) if not valid), None)

    def prompt(self, item: SchemaItem) -> list[dict[str, str]]:
        task = item.row.prompt
        if item.broken is not None:
            task = EDITING.format(
                model_name=item.row.model_name,
                source=item.row.source.strip(),
                syntax=item.syntax,
                broken=item.broken,
            )
        return [
            {"role": "system", "content": DEEP_THINKING},
            {"role": "user", "content": f"{task}\n\n{demand(item.syntax, item.container)}"},
        ]

    async def score(self, item: SchemaItem, answer: str) -> float:
        [score] = await self.score_all(item, [answer])
        return score

    async def score_all(self, item: SchemaItem, answers: Sequence[str]) -> list[float]:
        texts = [
            contained_text(self.opened_tag + answer, item.syntax, item.container)
            for answer in answers
        ]
        valid = iter(await self._validate(item, [text for text in texts if text is not None]))
        return [0.0 if text is None else float(next(valid)) for text in texts]

    async def _validate(self, item: SchemaItem, texts: Sequence[str]) -> list[bool]:
        if not texts:
            return []
        row = item.row
        return await self.checker.validate(row.source, row.model_name, item.syntax, texts)

    async def collect_trajectories(
        self, item: SchemaItem
    ) -> tuple[ScoredDataGroup | None, list[Item]]:
        """Sample and score a group; None if all scores are equal."""
        group, backlog = await super().collect_trajectories(item)
        if group is None or min(group["scores"]) == max(group["scores"]):
            return None, backlog
        return group, backlog

    def note_group(
        self, item: SchemaItem, trajectories: Sequence[Trajectory], scores: Sequence[float]
    ) -> None:
        logger.debug("%s in %s: scores %s", item.row.model_name, item.syntax, scores)
        details = {
            "problem_id": item.row.problem_id,
            "model_name": item.row.model_name,
            "syntax": item.syntax,
            "container": item.container,
        }
        self.rollout_dump.save(details, self.prompt(item), trajectories, scores)

    def train_metrics(self, scores: Sequence[float]) -> dict[str, float]:
        return {"train/percent_perfect": statistics.fmean(score >= 1.0 for score in scores)}

    def evaluation_metrics(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        scores = [sample["score"] for sample in samples]
        return {
            "eval/avg_score": statistics.fmean(scores),
            "eval/percent_perfect": statistics.fmean(score >= 1.0 for score in scores),
        }

    async def close(self) -> None:
        self.rollout_dump.close()
        await super().close()

    def check_gold_answer(self, item: SchemaItem) -> str:
        text = write_object(item.example, item.syntax)
        if item.container == "tagged":
            text = f"<{item.syntax}_output>\n{text}\n</{item.syntax}_output>"
        elif item.container == "markdown":
            text = f"{FENCE}{item.syntax}\n{text}\n{FENCE}"
        return f"<think>I go through the fields.</think>\n{text}"


if __name__ == "__main__":
    PydanticSchemaFollowingEnv.cli()
