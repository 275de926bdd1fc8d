"""Any data set as an environment: a file or a data set of the hub, streamed, without code.

    file ─┐                      ┌► training rows ─► shuffle buffer ─► item ─► chat ─► one turn
    hub  ─┴► IterableDataset ────┤                                                        │
                                 └► evaluation rows             reward functions ◄────────┘

NAME is a JSONL, JSON, YAML, Parquet or CSV file, a folder of one file per split, or a hub name.
Only the rows of the shuffle buffer are in memory. A restart skips to the row after the last one.
Which rows are for evaluations depends on their content, so that both sets stay apart in any order.

`TaskRows` is also the source of the rows of other kinds with a task file.
"""

from __future__ import annotations

import asyncio
import datetime
import decimal
import itertools
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import xxhash
from pydantic import Field

from atroposlib.adapters.interface import Adapter, AdapterArgs, Episode, Item
from atroposlib.envs.conversation import A_CHAT, ChatMessage, Reply, Turn, is_chat
from atroposlib.envs.dataset_items import hub_dataset
from atroposlib.envs.reward_fns import CombinedReward
from atroposlib.envs.reward_fns.accuracy_reward import AccuracyReward, AnswerTextReward
from atroposlib.errors import ConfigError, EpisodeConnectionError
from atroposlib.utils.local_records import SUFFIXES, iter_records, split_files
from atroposlib.utils.score_pool import ScorePool
from atroposlib.utils.text import is_milestone, near_name

__all__ = ["DatasetAdapter", "DatasetArgs", "RowEpisode", "TaskRows", "given", "score_text"]

logger = logging.getLogger(__name__)

ROWS_CHECKED = 10_000
"""Rows of a local file whose columns are checked before training."""
ROWS_FOR_EVALUATIONS = 100_000
"""Rows that are read at most in the search for evaluation rows."""
MAX_REWARDS = 64
"""Different rewards of rows that are kept."""
MAX_PROMPT_CHARACTERS = 1_000_000
COMPARING = (AccuracyReward, AnswerTextReward)
"""Reward functions that compare a completion with one right answer."""
CALL_FIELDS = ("name", "tool_calls", "tool_call_id")
"""Fields of a message that chat templates read, in addition to its role and content."""


class DatasetArgs(AdapterArgs):
    """Columns of the rows, their order, and the reward functions."""

    split: str = Field("train", description="Split of the training rows.")
    subset: str | None = Field(None, description="Configuration of a data set of the hub.")
    question_field: str = Field("question", description="Column of the question.")
    messages_field: str | None = Field(
        None,
        description="Column of a chat in place of the question; assistant messages at its end are "
        "removed.",
    )
    template: str | None = Field(
        None, description="User message with {column} for each value, in place of the question."
    )
    answer_field: str | None = Field(
        "answer",
        description="Column of the right answer, passed to reward functions as solution; null: "
        "there is none.",
    )
    ground_truth_field: str | None = Field(
        None, description="Column passed to reward functions as ground_truth."
    )
    item_fields: list[str] = Field(
        default_factory=list, description="Further columns, passed to reward functions in item."
    )
    system_prompt: str | None = Field(None, description="System message; null sends none.")
    reward_functions: list[str | dict[str, Any]] = Field(
        ["accuracy"],
        description="Names, or {type, weight, params}; several are combined to a weighted mean, "
        "and each is a named part of the reward.",
    )
    shuffle_buffer: int = Field(
        1000,
        ge=0,
        le=1_000_000,
        description="Rows from which the next one is drawn; 0 keeps the order of the data.",
    )
    eval_split: str | None = Field(
        None, description="Split for evaluations; null reserves one of eval_every rows."
    )
    eval_every: int = Field(
        20,
        ge=0,
        le=1_000_000,
        description="One of this many rows is reserved for evaluations, by its content; 0: none.",
    )
    score_workers: int = Field(
        2, ge=0, le=256, description="Processes of the reward functions; 0: threads."
    )
    score_timeout_s: float = Field(
        20.0, gt=0, le=3600, description="Time limit of the reward functions; then the reward is 0."
    )


class TaskRows:
    """The rows of a data set as items, and their scores.

    Args:
        name: path, or name on the hub.
        args: columns, order and reward functions.
        seed: seed of the order.
        optional_fields: columns that become part of the item's `row` where they are given.
        needs_answer: Whether each row must have an answer.
        rewards_field: column with reward functions for single rows, if any.
        check: returns an item as it is used; raises `ConfigError` if its row cannot be used.

    Attributes:
        num_rows: training rows; None until all have been read once.
        num_skipped: rows that could not be used, counted with each pass.
    """

    def __init__(
        self,
        name: str,
        args: DatasetArgs,
        *,
        seed: int,
        optional_fields: Sequence[str] = (),
        needs_answer: bool = True,
        rewards_field: str | None = None,
        check: Callable[[Item], Item] | None = None,
    ) -> None:
        self.name = name
        self.args = args
        self.seed = seed
        self.num_rows: int | None = None
        self.num_skipped = 0
        self.reward = combined(args.reward_functions)
        self._optional_fields = tuple(optional_fields)
        self._needs_answer = needs_answer
        self._rewards_field = rewards_field
        self._check = check
        self._rewards_of_rows: dict[str, CombinedReward] = {}
        self._pool = ScorePool(num_workers=args.score_workers, timeout_s=args.score_timeout_s)
        self._train: Any = None  # an IterableDataset
        self._next_index = 0
        self._rows: Iterator[Mapping[str, Any]] | None = None
        self._turn = asyncio.Lock()

    async def open(self) -> None:
        """Open the data and check the columns of its first row; of many rows in a local file.

        Raises:
            ConfigError: the data, a split or a column is missing.
        """
        await asyncio.to_thread(self._open)

    def close(self) -> None:
        self._rows = None
        self._pool.close()

    async def item(self, index: int) -> Item:
        """Return training row `index` of the shuffled and repeated rows.

        Raises:
            EpisodeConnectionError: the hub cannot be reached.
            ConfigError: no row is left for training.
        """
        async with self._turn:
            return await asyncio.to_thread(self._item, index)

    async def eval_items(self, limit: int) -> list[Item]:
        return await asyncio.to_thread(self._eval_items, limit)

    def reward_of(self, item: Item) -> CombinedReward:
        """Return the reward of an item: that of its row if it has one.

        Raises:
            ConfigError: a reward function does not exist, or rejects its parameters.
        """
        entries = item.get("reward_functions")
        if entries is None:
            return self.reward
        key = json.dumps(entries)
        if key not in self._rewards_of_rows:
            if len(self._rewards_of_rows) >= MAX_REWARDS:
                self._rewards_of_rows.clear()
            self._rewards_of_rows[key] = combined(entries)
        return self._rewards_of_rows[key]

    async def parts_of(self, item: Item, text: str) -> dict[str, float]:
        """Return the weighted reward of each function for a completion."""
        reward = self.reward_of(item)
        zeros = {function.name: 0.0 for function in reward.reward_functions}
        keywords = {
            "solution": item.get("answer"),
            "ground_truth": item.get("ground_truth"),
            "item": item.get("row"),
        }
        return await self._pool.run(score_text, reward, text, keywords, default=zeros)

    def gold_text(self, item: Item) -> str | None:
        """Return a right answer if one is known and a function compares answers with it."""
        truth = item.get("ground_truth")
        answer = item.get("answer") if truth is None else truth
        functions = self.reward_of(item).reward_functions
        if answer is None or not any(isinstance(each, COMPARING) for each in functions):
            return None
        if isinstance(answer, list):
            [answer] = answer
        gold = str(answer).rsplit("####", 1)[-1].strip()
        return f"<answer>\\boxed{{{gold}}}</answer>"

    def metrics(self) -> dict[str, float]:
        counts = self._pool.counts
        scores = {f"score_{name}": counts[name] for name in ("timeouts", "crashes", "errors")}
        return {**scores, "rows_skipped": self.num_skipped}

    def _open(self) -> None:
        data = self._load(self.args.split)
        number = 0
        for number, row in enumerate(data.take(self._num_checked()), 1):
            try:
                self._as_item(row)
            except ConfigError as error:
                raise ConfigError(f"{error} (row {number})") from error
        if not number:
            raise ConfigError(f"{self.name} holds no rows")
        self._train = data.filter(
            lambda row: self._is_usable(row) and not self._is_for_evaluation(row)
        )
        if self.args.shuffle_buffer:
            self._train = self._train.shuffle(seed=self.seed, buffer_size=self.args.shuffle_buffer)

    def _num_checked(self) -> int:
        """Return how many rows are checked before training; those of the hub are downloaded."""
        return ROWS_CHECKED if Path(self.name).exists() else 1

    def _is_usable(self, row: Mapping[str, Any]) -> bool:
        """Whether a row has what an item needs; those after the checked ones may not."""
        try:
            self._read(row)
        except ConfigError as error:
            self.num_skipped += 1
            if is_milestone(self.num_skipped):
                logger.warning("a row is skipped (%d so far): %s", self.num_skipped, error)
            return False
        return True

    def _load(self, split: str) -> Any:
        path = Path(self.name)
        if path.is_file() and split != self.args.split:
            raise ConfigError(
                f"eval_split: {self.name} is one file, without splits; expected a folder with a "
                "file for each, or eval_every"
            )
        files = split_files(path, [split]) if path.is_dir() else [path]
        if not files[0].is_file():
            if path.suffix in SUFFIXES or path.is_absolute():
                raise ConfigError(f"no data file {self.name}")
            return hub_dataset(
                self.name,
                split=split,
                subset=self.args.subset,
                is_streamed=True,
                remedy="NAME can also be a local JSONL, JSON, YAML, Parquet or CSV file",
            )
        import datasets

        return datasets.IterableDataset.from_generator(
            _local_rows, gen_kwargs={"paths": tuple(map(str, files))}
        )

    def _item(self, index: int) -> Item:
        if self._rows is None or index != self._next_index:
            self._seek(index)
        row = self._next_row()
        if row is None and self.num_rows is None:  # the first pass has ended
            self.num_rows = self._count()
        if row is None:
            self._seek(index)
            row = self._next_row()
        if row is None:
            raise ConfigError(f"{self.name} has fewer rows than before")
        self._next_index = index + 1
        return self._as_item(row)

    def _seek(self, index: int) -> None:
        epoch, offset = divmod(index, self.num_rows) if self.num_rows else (0, index)
        self._train.set_epoch(epoch)
        # Not `skip`: it keeps the order of the first epoch.
        self._rows = itertools.islice(iter(self._train), offset, None)

    def _next_row(self) -> Mapping[str, Any] | None:
        assert self._rows is not None
        try:
            return next(self._rows, None)
        except OSError as error:
            self._rows = None  # the next call starts again at its index
            raise EpisodeConnectionError(f"{self.name} could not be read on: {error}") from error

    def _count(self) -> int:
        count = sum(1 for _ in self._train)
        if not count:
            raise ConfigError(
                f"{self.name}: no row is left for training; --args eval_every=0 keeps all"
            )
        return count

    def _eval_items(self, limit: int) -> list[Item]:
        if self.args.eval_split is not None:
            data = self._load(self.args.eval_split).filter(self._is_usable)
            return [self._as_item(row) for row in data.take(limit)]
        if not self.args.eval_every:
            return []
        found: list[Item] = []
        data = self._load(self.args.split).take(ROWS_FOR_EVALUATIONS)
        for row in data.filter(self._is_usable):
            if self._is_for_evaluation(row):
                found.append(self._as_item(row))
            if len(found) == limit:
                break
        return found

    def _is_for_evaluation(self, row: Mapping[str, Any]) -> bool:
        if self.args.eval_split is not None or not self.args.eval_every:
            return False
        text = json.dumps(self._chat(row), sort_keys=True, default=str)
        digest: int = xxhash.xxh64_intdigest(text.encode("utf-8", "replace"))
        return digest % self.args.eval_every == 0

    def _as_item(self, row: Mapping[str, Any]) -> Item:
        item = self._read(row)
        try:
            copied: Item = json.loads(json.dumps(item, default=_as_json))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self.name}: a row is not JSON: {error}") from error
        return copied

    def _read(self, row: Mapping[str, Any]) -> Item:
        """Return the item of a row, with its values as they are."""
        args = self.args
        answer = row.get(args.answer_field) if args.answer_field is not None else None
        if answer is None and args.answer_field is not None and self._needs_answer:
            answer = self._value(row, args.answer_field)
        if answer == "" and not self._needs_answer:
            answer = None  # an empty cell of a CSV file
        extra = {name: self._value(row, name) for name in args.item_fields}
        extra.update({n: row[n] for n in self._optional_fields if row.get(n) not in (None, "")})
        item = {"messages": self._chat(row), "answer": answer, "row": extra}
        if args.ground_truth_field is not None:
            item["ground_truth"] = self._value(row, args.ground_truth_field)
        if self._rewards_field is not None and row.get(self._rewards_field) not in (None, ""):
            item["reward_functions"] = given(_from_json(row[self._rewards_field]))
        self._check_gold(item)
        return item if self._check is None else self._check(item)

    def _check_gold(self, item: Item) -> None:
        """Refuse several right answers, of which a function would use the first, and empty ones."""
        answer, truth = item["answer"], item.get("ground_truth")
        gold = answer if truth is None else truth
        [one] = gold if isinstance(gold, list | tuple) and len(gold) == 1 else [gold]
        is_empty = one != one or (isinstance(one, str) and not one.strip())  # NaN is empty, too
        if not (is_empty or isinstance(one, Mapping | list | tuple)):
            return
        for function in self.reward_of(item).reward_functions:
            if isinstance(function, COMPARING):
                column = self.args.answer_field if truth is None else self.args.ground_truth_field
                raise ConfigError(
                    f"{self.name}: {column} is {gold!r:.100}; {function.name} compares with one "
                    "text or number. A reward function of your own gets the whole value"
                )

    def _chat(self, row: Mapping[str, Any]) -> list[ChatMessage]:
        args = self.args
        if args.messages_field is not None:
            chat = self._value(row, args.messages_field)
            if not is_chat(chat):
                raise ConfigError(
                    f"{self.name}: {args.messages_field} is {chat!r:.100}; expected {A_CHAT}"
                )
            messages = [self._message(message) for message in chat]
            while messages and messages[-1]["role"] == "assistant":
                messages.pop()
            if not messages:
                raise ConfigError(
                    f"{self.name}: {args.messages_field} has assistant messages only: {chat!r:.100}"
                )
        else:
            messages = [{"role": "user", "content": self._question(row)}]
        if args.system_prompt:
            first = messages[0]
            prompt = args.system_prompt
            if first["role"] == "system" and isinstance(first["content"], str):
                prompt = f"{prompt}\n\n{first['content']}"  # chat templates allow one
                messages = messages[1:]
            messages.insert(0, {"role": "system", "content": prompt})
        return list(messages)

    def _message(self, message: ChatMessage) -> dict[str, Any]:
        """Return a message of a row with the fields that chat templates read."""
        fields = {name: message[name] for name in CALL_FIELDS if message.get(name) is not None}
        role, content = message["role"], message.get("content")
        if content is None and fields.get("tool_calls"):
            content = ""
        if not isinstance(role, str) or not isinstance(content, str | list):
            raise ConfigError(
                f"{self.name}: {self.args.messages_field} has the message {message!r:.200}; "
                "expected a role and a text as its content"
            )
        return {"role": role, "content": content, **given(fields)}

    def _question(self, row: Mapping[str, Any]) -> str:
        if self.args.template is None:
            question = str(self._value(row, self.args.question_field))
            if not question.strip():
                raise ConfigError(f"{self.name}: the question is empty; the row is {row!r:.100}")
            return question
        columns = {column: value for column, value in row.items() if value is not None}
        try:
            return self.args.template.format_map(columns)[:MAX_PROMPT_CHARACTERS]
        except (KeyError, IndexError, AttributeError, ValueError, TypeError) as error:
            raise ConfigError(
                f"template does not fit the row {row!r:.200}: {error!r}; the columns with a value "
                f"are {', '.join(map(str, columns))}"
            ) from error

    def _value(self, row: Mapping[str, Any], column: str) -> Any:
        if isinstance(row, Mapping) and row.get(column) is not None:
            return row[column]
        if not isinstance(row, Mapping):
            raise ConfigError(f"{self.name}: a row is {row!r:.100}; expected columns by name")
        if column in row:
            raise ConfigError(
                f"{self.name}: the column {column!r} has no value; the row is {row!r:.100}"
            )
        hint = near_name(column, map(str, row)) or f"; the columns are {', '.join(map(str, row))}"
        raise ConfigError(
            f"{self.name}: a row has no column {column!r}{hint}; the row is {row!r:.100}"
        )


def combined(entries: Any) -> CombinedReward:
    """Return the weighted mean of reward functions; each part has the name of its type.

    Raises:
        ConfigError: a name is unknown, or the list is not one of names and mappings.
    """
    listed = [entries] if isinstance(entries, str | Mapping) else entries
    if not isinstance(listed, list):
        raise ConfigError(f"reward_functions: expected a list of names, got {entries!r:.100}")
    configs = [{"type": entry} if isinstance(entry, str) else entry for entry in listed]
    try:
        named = [{"name": config.get("type"), **config} for config in configs]
        return CombinedReward(named, normalization="sum")
    except (AttributeError, TypeError) as error:
        raise ConfigError(f"reward_functions: {entries!r:.200} cannot be used: {error}") from error


def _local_rows(paths: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of files; the generator of an `IterableDataset`, which pickles it."""
    for path in paths:
        try:
            for number, row in enumerate(iter_records(Path(path)), 1):
                if not isinstance(row, Mapping):
                    raise ValueError(f"row {number} is {row!r:.100}; expected columns by name")
                yield row
        except (ValueError, OSError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error


def given(value: Any) -> Any:
    """Return JSON without null in objects, with which Parquet fills the keys of other rows."""
    if isinstance(value, dict):
        return {key: given(entry) for key, entry in value.items() if entry is not None}
    return [given(entry) for entry in value] if isinstance(value, list) else value


def _from_json(value: Any) -> Any:
    """Return the value of a text that is a list or an object, as in a CSV file."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{value!r:.100} is not JSON: {error}") from error


def _as_json(value: Any) -> Any:
    """Return a date, a time or an exact number, which JSON lacks, as text."""
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta | decimal.Decimal):
        return str(value)
    raise TypeError(f"a column has the type {type(value).__name__}; expected text or numbers")


def score_text(reward: CombinedReward, text: str, keywords: Mapping[str, Any]) -> dict[str, float]:
    """Return the parts of the reward of one completion; runs in a worker."""
    [parts] = reward.parts([[{"role": "assistant", "content": text}]], **keywords)
    return parts


class RowEpisode(Episode):
    """One question and its answer."""

    def __init__(self, rows: TaskRows, item: Item) -> None:
        super().__init__()
        self._rows = rows
        self._item = item

    async def begin(self) -> Sequence[ChatMessage]:
        chat: Sequence[ChatMessage] = self._item["messages"]
        return chat

    async def reply(self, turn: Turn) -> Reply:
        parts = await self._rows.parts_of(self._item, turn.text)
        return Reply(reward=parts or 0.0, is_done=True)


class DatasetAdapter(Adapter):
    """The rows of a data set; an item is a row."""

    args_cls = DatasetArgs
    default_settings: ClassVar[Mapping[str, Any]] = {"max_turns": 1, "max_token_length": 4096}
    limits_replies = True
    args: DatasetArgs

    def __init__(self, name: str, args: DatasetArgs, **settings: Any) -> None:
        super().__init__(name, args, **settings)
        if not args.reward_functions:
            raise ConfigError("reward_functions: expected at least one, such as accuracy")
        self.rows = TaskRows(name, args, seed=self.seed)

    async def open(self) -> None:
        await self.rows.open()

    async def close(self) -> None:
        self.rows.close()

    async def item(self, index: int) -> Item:
        return await self.rows.item(index)

    async def eval_items(self, limit: int) -> Sequence[Item]:
        return await self.rows.eval_items(limit)

    def start(self, item: Item) -> RowEpisode:
        return RowEpisode(self.rows, item)

    def gold_answer(self, item: Item) -> str | None:
        return self.rows.gold_text(item)

    def metrics(self) -> dict[str, float]:
        return self.rows.metrics()

    def state(self) -> dict[str, Any]:
        return {"num_rows": self.rows.num_rows}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.rows.num_rows = state.get("num_rows")
