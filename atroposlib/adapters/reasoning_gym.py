"""Tasks of reasoning-gym: one, a mixture, or all, with the package's curricula.

    index ─► task by weight ─► complexity ─► question ─► one turn ─► <answer> ─► scorer ─► [0, 1]
                                   ▲                                                │
                                   └──────── Curriculum ◄──── rewards of the group ─┘

NAME is a task, several joined by `+`, or `all`. Items are made by `atroposlib.tasks.reasoning_gym`,
whose checks of answers keep the package's scorers from running them as code. An item holds the
numbers from which its question is made again, since the package's entries are not all JSON.
"""

from __future__ import annotations

import asyncio
import functools
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from atroposlib.adapters.interface import Adapter, AdapterArgs, Episode, EpisodeThreads, Item
from atroposlib.envs.conversation import ChatMessage, Reply, Turn
from atroposlib.errors import ConfigError, EpisodeTimeoutError
from atroposlib.tasks import reasoning_gym as tasks
from atroposlib.tasks.reasoning_gym import Curriculum, ReasoningGymEnvConfig, TaskItem
from atroposlib.utils.score_pool import ScorePool
from atroposlib.utils.text import near_name

__all__ = ["ReasoningGymAdapter", "ReasoningGymArgs", "ReasoningGymEpisode"]

ALL = "all"
EVAL_SEED_OFFSET = 1_000_003


class ReasoningGymArgs(AdapterArgs):
    """The mixture of tasks, and their complexity."""

    weights: dict[str, float] = Field(
        default_factory=dict,
        description="Weight of each task in a mixture, by name; the default weight is 1.",
    )
    task_params: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="Generator parameters by task; they override those of the complexity.",
    )
    complexity: float | Literal["default", "random", "curriculum"] = Field(
        "default",
        description="Complexity of training items: the package's defaults, a number from 0 to 1, "
        "uniformly drawn (random), or by the accuracy of each task (curriculum).",
    )
    target_accuracy: float = Field(
        0.7, ge=0, le=1, description="Accuracy at which a curriculum does not move."
    )
    system_prompt: str | None = Field(
        None, description="System message; null is the default prompt, an empty text sends none."
    )
    eval_items_per_task: int = Field(
        5, ge=1, le=1000, description="Evaluation items of each task, not used for training."
    )
    score_workers: int = Field(
        2, ge=0, le=256, description="Processes of the scorers; 0: threads, without a hard limit."
    )
    score_timeout_s: float = Field(
        20.0, gt=0, le=3600, description="Time limit of a scorer; then the score is 0."
    )


class ReasoningGymEpisode(Episode):
    """One question and its answer."""

    def __init__(self, adapter: ReasoningGymAdapter, item: Item) -> None:
        super().__init__()
        self._adapter = adapter
        self._item = item
        self._made: TaskItem | None = None

    async def begin(self) -> Sequence[ChatMessage]:
        made = self._made = await self._adapter.made_item(self._item)
        return tasks.prompt_messages(made, self._adapter.config_of(made.task))

    async def reply(self, turn: Turn) -> Reply:
        made = self._made or self._adapter.task_item(self._item)
        score = await self._adapter.pool.run(tasks.score_completion, turn.text, made, default=0.0)
        self.metrics["correct"] = float(score >= tasks.CORRECT)
        return Reply(reward=score, is_done=True)


class ReasoningGymAdapter(Adapter):
    """A mixture of tasks.

    Attributes:
        names: the tasks, sorted; from `open` on.
        curriculum: complexity of each task under `complexity=curriculum`.
        pool: workers of the scorers.
    """

    args_cls = ReasoningGymArgs
    default_settings: ClassVar[Mapping[str, Any]] = {"max_turns": 1, "max_token_length": 4096}
    limits_replies = True
    args: ReasoningGymArgs

    def __init__(self, name: str, args: ReasoningGymArgs, **settings: Any) -> None:
        super().__init__(name, args, **settings)
        if not isinstance(args.complexity, str) and not 0 <= args.complexity <= 1:
            raise ConfigError(f"complexity is {args.complexity}; expected a number from 0 to 1")
        self.names: tuple[str, ...] = ()
        self.curriculum = Curriculum(target_accuracy=args.target_accuracy)
        self.pool = ScorePool(num_workers=args.score_workers, timeout_s=args.score_timeout_s)
        self.config_of = functools.lru_cache(maxsize=256)(self._config_of)
        self._made = functools.lru_cache(maxsize=256)(self._make)
        self._threads = EpisodeThreads(f"reasoning-gym:{name}")
        self._making: dict[tuple[Any, ...], asyncio.Future[TaskItem]] = {}

    async def open(self) -> None:
        await asyncio.to_thread(self._open)
        # A worker loads the package with its first call, which must not count as time of a turn.
        made = await asyncio.to_thread(tasks.train_item, self.config_of(self.names[0]), 0)
        await self.pool.run(tasks.score_completion, "", made, default=0.0)

    async def close(self) -> None:
        self.pool.close()

    async def item(self, index: int) -> Item:
        rng = random.Random(f"{self.seed}/{index}")
        weights = [self.args.weights.get(name, 1.0) for name in self.names]
        [task] = rng.choices(self.names, weights)
        return {"task": task, "index": index, "complexity": self._complexity(task, rng)}

    async def eval_items(self, limit: int) -> Sequence[Item]:
        per_task = self.args.eval_items_per_task
        places = [(task, n) for n in range(per_task) for task in self.names]
        counts = {
            task: len(await asyncio.to_thread(tasks.eval_items, self.config_of(task)))
            for task in dict.fromkeys(task for task, _ in places[:limit])
        }
        found = [(task, n) for task, n in places if n < counts.get(task, 0)]
        return [{"task": task, "eval_number": n} for task, n in found[:limit]]

    def start(self, item: Item) -> ReasoningGymEpisode:
        return ReasoningGymEpisode(self, item)

    def gold_answer(self, item: Item) -> str | None:
        answer = self.task_item(item).entry["answer"]
        return None if answer is None else f"<answer>{answer}</answer>"

    def note_rewards(self, item: Item, rewards: Sequence[float]) -> None:
        if self.args.complexity == "curriculum" and "index" in item:
            accuracy = statistics.fmean(reward >= tasks.CORRECT for reward in rewards)
            self.curriculum.record(item["task"], accuracy)

    def metrics(self) -> dict[str, float]:
        return {"score_timeouts": self.pool.num_timeouts, **self.curriculum.metrics()}

    def state(self) -> dict[str, Any]:
        return {"curriculum": self.curriculum.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.curriculum = Curriculum(
            target_accuracy=self.args.target_accuracy, **state.get("curriculum", {})
        )

    async def made_item(self, item: Item) -> TaskItem:
        """Make the question of an item in a thread, once for all rollouts that begin together.

        Some generators take minutes, and some make another question each time.

        Raises:
            EpisodeTimeoutError: it takes longer than a step may.
        """
        key = _numbers_of(item)
        if key not in self._making:
            making = asyncio.ensure_future(self._make_in_time(key))
            making.add_done_callback(lambda _: self._making.pop(key))
            self._making[key] = making
        return await asyncio.shield(self._making[key])

    async def _make_in_time(self, key: tuple[Any, ...]) -> TaskItem:
        thread = self._threads.open()
        try:
            return await asyncio.wait_for(thread.call(self._made, *key), self.step_timeout_s)
        except (TimeoutError, asyncio.TimeoutError) as error:
            raise EpisodeTimeoutError(
                f"{key[0]} made no question within {self.step_timeout_s:g} s; lower its complexity"
            ) from error
        finally:
            await thread.close()

    def task_item(self, item: Item) -> TaskItem:
        """Make the question of an item; those made last are kept."""
        return self._made(*_numbers_of(item))

    def _make(
        self, task: str, index: int | None, complexity: float | None, eval_number: int | None
    ) -> TaskItem:
        config = self.config_of(task)
        if eval_number is not None:
            return tasks.eval_items(config)[eval_number]
        assert index is not None
        return tasks.train_item(config, index, complexity)

    def _complexity(self, task: str, rng: random.Random) -> float | None:
        chosen = self.args.complexity
        if chosen == "curriculum":
            return self.curriculum.complexity(task)
        if chosen == "random":
            return rng.random()
        return None if isinstance(chosen, str) else chosen

    def _config_of(self, task: str) -> ReasoningGymEnvConfig:
        """Return the settings of one task."""
        params = {task: self.args.task_params[task]} if task in self.args.task_params else {}
        return ReasoningGymEnvConfig(
            task_names=[task],
            task_params=params,
            system_prompt=self.args.system_prompt,
            seed=abs(self.seed),
            eval_seed=abs(self.seed) + EVAL_SEED_OFFSET,
            num_eval_samples_per_task=self.args.eval_items_per_task,
        )

    def _open(self) -> None:
        wanted = [] if self.name == ALL else self.name.split("+")
        for name in (*self.args.weights, *self.args.task_params):
            if wanted and name not in wanted:
                raise ConfigError(
                    f"--args: {name!r} is not in the mixture{near_name(name, wanted)}; it has "
                    f"{', '.join(wanted)}"
                )
        self.names = tasks.task_names(
            ReasoningGymEnvConfig(task_names=wanted, task_params=self.args.task_params)
        )
        weights = [self.args.weights.get(name, 1.0) for name in self.names]
        if not (min(weights) >= 0 and 0 < sum(weights) < float("inf")):
            raise ConfigError("weights: expected finite numbers of at least 0, and one above 0")


def _numbers_of(item: Item) -> tuple[Any, ...]:
    """Return what determines the question of an item."""
    return item["task"], item.get("index"), item.get("complexity"), item.get("eval_number")
