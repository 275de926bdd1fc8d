"""Instruction following: prompts with an instruction that one of 25 programs verifies.

    prompt -> [system, user] -> G completions -> text after the thinking -> verifier -> 1 or 0
      ^                                                                        |
      '------------------ unsolved items return to the queue <-----------------'

`atroposlib/tasks/instructions.py` has the verifiers and the queue; `SingleTurnEnv` samples. A row
has `messages` (the first is the prompt) and `ground_truth`, the verifier and its arguments:

    {"func_name": "validate_word_constraint", "N": 50, "quantifier": "at most"}

Without the hub:

    python environments/instruction_following_algorithm_environment.py process \
        --env.dataset_path environments/data/instruction_following_sample --env.total_steps 4
"""

from __future__ import annotations

import asyncio
import json
import logging
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from atroposlib.envs.base import APIServerConfig, Item, ScoredDataGroup
from atroposlib.envs.dataset_items import DatasetItems, HubItemsConfig
from atroposlib.envs.single_turn_env import Trajectory
from atroposlib.errors import ConfigError
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.instructions import (
    Instruction,
    UnsolvedQueue,
    item_id,
    read_instruction,
    require_language_detector,
)
from atroposlib.tasks.single_turn_parts import (
    DEEP_THINKING,
    RolloutDump,
    SavedRolloutsConfig,
    ThinkingEnv,
    answer_after_thinking,
    deep_hermes_settings,
    rank_by_length,
)
from atroposlib.utils.local_records import read_records

__all__ = ["IFConfig", "InstructionFollowingEnv", "score_completion"]

logger = logging.getLogger("environments.instruction_following")

CARD = EnvironmentCard(
    task="follow one of 25 kinds of verifiable instructions",
    turns="1",
    reward="1 followed, 0 not; by length when all are",
    data="RLVR-IFeval from the hub, or `--env.dataset_path`",
    needs="core install; `pip install '.[instructions]'` for instructions about the language",
    command="process --env.dataset_path environments/data/instruction_following_sample "
    "--env.total_steps 4",
)

SAMPLE = Path(__file__).with_name("data") / "instruction_following_sample"
FREE_LENGTH_FRACTION = 0.75
DUMP_INTERVAL = 100
"""Groups between two writes of the unsolved items."""


class IFConfig(HubItemsConfig, SavedRolloutsConfig):
    """Settings of the data set, the curriculum and sampling."""

    dataset_name: str = Field(
        "allenai/RLVR-IFeval", description="Data set of the hub, unless dataset_path is given."
    )
    dataset_config_name: str | None = Field(
        None, description="Configuration of dataset_name; the same as dataset_subset."
    )
    test_set_ratio: float = Field(
        0.05, gt=0, lt=1, description="Fraction of a single split or file for evaluations."
    )
    dataset_shuffle_seed: int = Field(42, description="Seed of the order and of the test rows.")
    resume_from_unsolved_dataset: str | None = Field(
        None,
        description="JSON Lines file of unsolved items that an earlier run wrote; it replaces the "
        "training rows.",
    )
    unsolved_path: str | None = Field(
        "datasets/remaining_unsolved.jsonl",
        description="File to which the unsolved items are written every 100 groups; None writes "
        "none.",
    )
    max_group_average_for_training: float = Field(
        0.75,
        ge=0,
        le=1,
        description="Mean score of a group above which it is dropped and its item is solved.",
    )
    solve_on_single_correct: bool = Field(
        False, description="Whether one right answer solves an item."
    )
    skip_language_items: bool = Field(
        False,
        description="Whether instructions about the language of the answer are left out, so that "
        "the package langdetect is not needed.",
    )
    temperature: float = Field(0.8, ge=0, description="Sampling temperature of rollouts.")
    eval_temperature: float = Field(0.2, ge=0, description="Sampling temperature of evaluations.")


def score_completion(completion: str, instruction: Instruction) -> float:
    """Return 1.0 if the text after one block of thinking follows the instruction, else 0.0."""
    answer = answer_after_thinking(completion)
    return float(answer is not None and instruction.is_followed(answer.strip()))


def prompt_of(row: Mapping[str, Any]) -> str:
    """Return the prompt of a row.

    Raises:
        ConfigError: the row has none.
    """
    messages = row["messages"]
    first = messages[0] if isinstance(messages, list) and messages else None
    if not isinstance(first, Mapping) or not isinstance(first.get("content"), str):
        raise ConfigError(
            'messages: expected a list whose first entry is {"role": "user", "content": TEXT}, '
            f"got {str(messages)[:200]}"
        )
    return str(first["content"])


class InstructionFollowingEnv(DatasetItems, ThinkingEnv):
    """Prompts with a verifiable instruction; an item is a row of the data set.

    Attributes:
        queue: the curriculum.
        curriculum_state: restored state of the curriculum.
    """

    env_config_cls = IFConfig
    config: IFConfig
    hub_dataset = "allenai/RLVR-IFeval"
    columns = ("messages", "ground_truth")
    optional_columns = ("constraint", "example")
    logs_percent_correct = True
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE), "unsolved_path": None}

    def __init__(self, config: IFConfig, *args: Any, **kwargs: Any) -> None:
        config.dataset_seed = config.dataset_shuffle_seed
        config.dataset_subset = config.dataset_subset or config.dataset_config_name
        super().__init__(config, *args, **kwargs)
        self.curriculum_state: dict[str, Any] = {}
        self.rows: dict[str, dict[str, Any]] = {}
        self.queue = self._new_queue()
        self.rollout_dump = RolloutDump(config, "instruction_following")

    @classmethod
    def config_init(cls) -> tuple[IFConfig, APIServerConfig]:
        return deep_hermes_settings(
            IFConfig,
            group_size=32,
            total_steps=500,
            steps_per_eval=20,
            max_token_length=15360,
            wandb_name="instruction_following",
        )

    @property
    def test_fraction(self) -> float:  # type: ignore[override] # a setting here
        return self.config.test_set_ratio

    async def setup(self) -> None:
        """Read the rows, and check the instruction of each.

        Raises:
            ConfigError: a row is malformed; the message has the beginning of its prompt.
            MissingExtraError: an instruction needs langdetect, which is not installed.
        """
        self.config.set_log_levels(logger)
        await super().setup()
        self.train, self.test = self._usable(self.train), self._usable(self.test)
        instructions = [read_instruction(row["ground_truth"]) for row in (*self.train, *self.test)]
        require_language_detector(instructions)
        language = next((i for i in instructions if i.needs_language_detector), None)
        if language is not None:
            await asyncio.to_thread(language.is_followed, "Load the profiles.")
        self.rows = {item_id(prompt_of(row), row["ground_truth"]): row for row in self.train}
        self.queue = self._new_queue()

    def _read(self) -> tuple[Any, Any]:
        train, test = super()._read()
        path = self.config.resume_from_unsolved_dataset
        if path is not None:
            train = read_records(Path(path), self.columns, optional=self.optional_columns)
        return train, test

    def _usable(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows, without those about the language under `skip_language_items`."""
        found, num_skipped = [], 0
        for number, row in enumerate(rows):
            try:
                prompt_of(row)
                needs_detector = read_instruction(row["ground_truth"]).needs_language_detector
            except ConfigError as error:
                raise ConfigError(f"row {number}: {error}") from error
            if needs_detector and self.config.skip_language_items:
                num_skipped += 1
            else:
                found.append(row)
        if num_skipped:
            logger.warning(
                "%d of %d rows are about the language and are left out (skip_language_items)",
                num_skipped,
                len(rows),
            )
        if not found:
            raise ConfigError("no rows are left; expected instructions other than the language")
        return found

    async def get_next_item(self) -> dict[str, Any]:
        self.iter += 1
        if self.iter % DUMP_INTERVAL == 0 and self.config.unsolved_path is not None:
            await asyncio.to_thread(self._write_unsolved, Path(self.config.unsolved_path))
        return self.rows[self.queue.next()]

    def prompt(self, item: Mapping[str, Any]) -> list[dict[str, str]]:
        return [
            {"role": "system", "content": DEEP_THINKING},
            {"role": "user", "content": prompt_of(item)},
        ]

    async def score(self, item: Mapping[str, Any], answer: str) -> float:
        instruction = read_instruction(item["ground_truth"])
        completion = self.opened_tag + answer
        if instruction.needs_language_detector:
            return await asyncio.to_thread(score_completion, completion, instruction)
        return score_completion(completion, instruction)

    async def collect_trajectories(
        self, item: dict[str, Any]
    ) -> tuple[ScoredDataGroup | None, list[Item]]:
        """Sample and score a group; None for an item that is too easy."""
        group, backlog = await super().collect_trajectories(item)
        if group is None:
            return None, backlog
        rewards = [float(score > 0) for score in group["scores"]]
        self.queue.record(item_id(prompt_of(item), item["ground_truth"]), rewards)
        if statistics.fmean(rewards) > self.config.max_group_average_for_training:
            return None, backlog
        return group, backlog

    def note_group(
        self, item: dict[str, Any], trajectories: Sequence[Trajectory], scores: Sequence[float]
    ) -> None:
        logger.debug("%s: scores %s", item["ground_truth"], scores)
        details = {key: item[key] for key in ("ground_truth", "constraint")}
        self.rollout_dump.save(details, self.prompt(item), trajectories, scores)

    def group_scores(
        self, scores: Sequence[float], trajectories: Sequence[Trajectory]
    ) -> list[float]:
        return rank_by_length(
            scores,
            trajectories,
            max_tokens=self.config.max_token_length,
            free_fraction=FREE_LENGTH_FRACTION,
        )

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        metrics = {} if wandb_metrics is None else wandb_metrics
        metrics.update(self.queue.metrics())
        await super().wandb_log(metrics)

    def save_checkpoint(self, step: int, data: Mapping[str, Any] | None = None) -> None:
        own = {"curriculum_state": self.queue.state()}
        super().save_checkpoint(step, {**(data or {}), **own})

    def load_checkpoint(self) -> None:
        super().load_checkpoint()
        if self.curriculum_state:
            self.queue.restore(self.curriculum_state)

    async def close(self) -> None:
        self.rollout_dump.close()
        await super().close()

    def check_gold_answer(self, item: Mapping[str, Any]) -> str | None:
        """Return the row's example after a thought; None without one."""
        example = item["example"]
        return None if example is None else f"<think>I mind the wording.</think>\n{example}"

    def _new_queue(self) -> UnsolvedQueue:
        return UnsolvedQueue(
            self.rows,
            max_average=self.config.max_group_average_for_training,
            solve_on_single_correct=self.config.solve_on_single_correct,
        )

    def _write_unsolved(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(self.rows[item], ensure_ascii=False) for item in self.queue.active]
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    InstructionFollowingEnv.cli()
