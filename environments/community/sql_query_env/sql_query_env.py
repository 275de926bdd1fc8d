r"""SQL queries: answer a question about a table with one SELECT statement.

    question, table -> [system, user] columns, no rows -> G completions -> \boxed{SELECT ...}
        -> worker: table in memory, read-only -> same result as the gold query? -> +1 or -1

Rows have the form of WikiSQL: `question`, `sql` with `sel`, `agg` and `conds`, and a `table`, or
the `table_id` of one in `<name>.tables.jsonl` next to the file. Without `--env.dataset_path` or
`--env.dataset_name` the questions are those in `sample/`:

    python environments/community/sql_query_env/sql_query_env.py process --env.total_steps 4
"""

from __future__ import annotations

import logging
import sqlite3
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from pydantic import Field

from atroposlib.envs.dataset_items import DatasetItems, HubItemsConfig
from atroposlib.envs.single_turn_env import SingleTurnEnv, SingleTurnEnvConfig, Trajectory
from atroposlib.errors import ConfigError
from atroposlib.tasks.answers import boxed_answer
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.single_turn_parts import DEEP_THINKING, rank_by_length
from atroposlib.utils.local_records import read_records, split_files

__all__ = [
    "SQLQueryConfig",
    "SQLQueryEnv",
    "column_names",
    "gold_query",
    "gold_rows",
    "score_query",
]

logger = logging.getLogger("environments.sql_query")

CARD = EnvironmentCard(
    task="answer a question about a table with an SQL query",
    turns="1",
    reward="+1 for the result of the gold query, else -1; by length when all are right",
    data="40 questions shipped; WikiSQL in `--env.dataset_path` or `--env.dataset_name`",
    command="process --env.total_steps 4",
)

SAMPLE = Path(__file__).with_name("sample")
TABLE = "records"
AGGREGATES = ("", "MAX", "MIN", "COUNT", "SUM", "AVG")
OPERATORS = ("=", ">", "<")
FUNCTIONS = frozenset(
    [
        *("abs", "avg", "coalesce", "count", "ifnull", "iif", "instr", "length", "like", "lower"),
        *("ltrim", "max", "min", "nullif", "round", "rtrim", "substr", "substring", "sum"),
        *("total", "trim", "upper", "rank", "dense_rank", "row_number"),
    ]
)
"""Functions that a query may call; none makes a text longer than its arguments."""
MAX_QUERY_CHARACTERS = 2_000
MAX_RESULT_CHARACTERS = 1_000_000
MAX_STEPS = 5_000_000
"""Instructions of SQLite's virtual machine."""
STEPS_PER_CALL = 1_000
REFUSED = (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, MemoryError)
"""Raised for queries that are malformed, forbidden or too large."""
QUESTION = (
    "A database of SQLite has one table:\n\n{schema}\n\n{question}\n\nAnswer with one SELECT "
    "statement that reads this table. Its result must be what is asked for, without further "
    "columns. Comparisons of texts ignore case. Write the statement on one line in \\boxed{{}}."
)
Question = Mapping[str, Any]
"""One row: `question`, `table` (`header`, `types` and `rows`) and `sql`."""


class SQLQueryConfig(HubItemsConfig, SingleTurnEnvConfig):
    """Source of the questions, and sampling."""

    dataset_path: str | None = Field(  # type: ignore[assignment]
        None,
        description="File in the form of WikiSQL, or folder with a train and a test file; None "
        "takes dataset_name, or the questions that are shipped.",
    )
    dataset_name: str | None = Field(
        None, description="Data set of the hub with the columns question, table and sql."
    )
    num_score_workers: int = Field(
        2, ge=1, description="Maximum number of concurrent queries; each has a time limit."
    )


def column_names(header: Sequence[Any]) -> list[str]:
    """Return the quoted names of the columns; equal names get a number."""
    names: list[str] = []
    for number, title in enumerate(header, start=1):
        name = str(title).strip().replace('"', "") or f"column {number}"
        while name.lower() in map(str.lower, names):
            name += f" {number}"
        names.append(name)
    return [f'"{name}"' for name in names]


def schema(table: Mapping[str, Any]) -> str:
    """Return the statement that makes the table."""
    types = ("REAL" if kind == "real" else "TEXT COLLATE NOCASE" for kind in table["types"])
    columns = zip(column_names(table["header"]), types, strict=True)
    return f"CREATE TABLE {TABLE} ({', '.join(map(' '.join, columns))})"


def gold_query(item: Question) -> str:
    """Return the gold query as SQL."""
    sql, table = item["sql"], item["table"]
    names = column_names(table["header"])
    conditions = sql["conds"]
    if isinstance(conditions, Mapping):  # as columns, on the hub
        conditions = zip(
            *(conditions[key] for key in ("column_index", "operator_index", "condition")),
            strict=True,
        )
    selected, aggregate = names[sql["sel"]], AGGREGATES[sql["agg"]]
    query = f"SELECT {aggregate}({selected})" if aggregate else f"SELECT {selected}"
    tests = [
        f"{names[column]} {OPERATORS[operator]} {_literal(value, table['types'][column])}"
        for column, operator, value in conditions
    ]
    return f"{query} FROM {TABLE}" + (f" WHERE {' AND '.join(tests)}" if tests else "")


def gold_rows(item: Question) -> list[tuple[Any, ...]]:
    """Return the result of the gold query; empty if it says nothing, as with only NULL."""
    database = _database(item["table"])
    try:
        rows = database.execute(gold_query(item)).fetchall()
    finally:
        database.close()
    return rows if any(value is not None for row in rows for value in row) else []


def score_query(answer: str, item: Question) -> float:
    """Return 1.0 if the boxed query reads the table and has the gold result, else -1.0.

    The order of rows does not count.
    """
    query = boxed_answer(answer)
    if not query or len(query) > MAX_QUERY_CHARACTERS:
        return -1.0
    gold = gold_rows(item)
    database = _database(item["table"])
    try:
        rows = _untrusted_rows(database, query, max_rows=len(gold))
    except REFUSED:
        return -1.0
    finally:
        database.close()
    return 1.0 if gold and _ordered(rows) == _ordered(gold) else -1.0


def _database(table: Mapping[str, Any]) -> sqlite3.Connection:
    database = sqlite3.connect(":memory:")
    database.execute(schema(table))
    rows = (
        [_number(v) if kind == "real" else v for v, kind in zip(row, table["types"], strict=True)]
        for row in table["rows"]
    )
    places = ", ".join("?" * len(table["header"]))
    database.executemany(f"INSERT INTO {TABLE} VALUES ({places})", rows)
    database.commit()
    return database


def _untrusted_rows(
    database: sqlite3.Connection, query: str, *, max_rows: int
) -> list[tuple[Any, ...]]:
    """Run one SELECT of a model; raises one of `REFUSED` for all that it may not do."""
    tables_read: set[str | None] = set()

    def authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
        if action == sqlite3.SQLITE_READ and first == TABLE:
            tables_read.add(first)
            return sqlite3.SQLITE_OK
        is_known = action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in FUNCTIONS
        is_allowed = is_known or action == sqlite3.SQLITE_SELECT
        return sqlite3.SQLITE_OK if is_allowed else sqlite3.SQLITE_DENY

    steps = iter(range(MAX_STEPS // STEPS_PER_CALL))
    database.set_authorizer(authorize)
    database.set_progress_handler(lambda: next(steps, None) is None, STEPS_PER_CALL)
    if sys.version_info >= (3, 11):
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_RESULT_CHARACTERS)
    rows: list[tuple[Any, ...]] = []
    num_characters = 0
    for row in database.execute(query):
        num_characters += sum(len(value) for value in row if isinstance(value, str | bytes))
        rows.append(row)
        if len(rows) > max_rows or num_characters > MAX_RESULT_CHARACTERS:
            raise ValueError("the result is larger than the gold one")
    if not tables_read:
        raise ValueError("the query does not read the table")
    return rows


def _ordered(rows: Sequence[tuple[Any, ...]]) -> list[tuple[str, ...]]:
    """Return rows in a fixed order, as texts in which 2 and 2.0 are equal."""
    return sorted(
        tuple(f"{v:.9g}" if isinstance(v, int | float) else repr(v) for v in row) for row in rows
    )


def _number(value: Any) -> Any:
    """Return a number with thousands separators as such, and any other value as it is."""
    try:
        return float(value.replace(",", "")) if isinstance(value, str) else value
    except ValueError:
        return value


def _literal(value: Any, kind: str) -> str:
    number = _number(value) if kind == "real" else value
    if isinstance(number, int | float):
        return repr(number)
    return "'" + str(value).replace("'", "''") + "'"


class SQLQueryEnv(DatasetItems, SingleTurnEnv):
    """Questions about tables; an item is a `Question`."""

    name = "sql_query"
    env_config_cls = SQLQueryConfig
    config: SQLQueryConfig
    columns = ("question", "table", "sql")
    logs_percent_correct = True
    default_model = "Qwen/Qwen3-1.7B"
    default_settings: ClassVar[dict[str, Any]] = {
        "group_size": 8,
        "max_token_length": 4096,
        "score_timeout_s": 5.0,
        "wandb_name": "sql_query",
    }

    def _read(self) -> tuple[list[Question], list[Question]]:
        path = self.config.dataset_path
        if path is None and self.config.dataset_name:
            splits = self._read_hub()
        else:
            splits = _read_local(Path(path or SAMPLE), seed=self.config.dataset_seed)
        train, test = map(_with_results, splits)
        return train, test

    def prompt(self, item: Question) -> list[dict[str, str]]:
        shown = QUESTION.format(schema=schema(item["table"]), question=item["question"])
        return [
            {"role": "system", "content": DEEP_THINKING},
            {"role": "user", "content": shown},
        ]

    async def score(self, item: Question, answer: str) -> float:
        """Run the query in a worker; one over the time limit is wrong."""
        return await self.score_pool.run(score_query, answer, item, default=-1.0)

    def group_scores(
        self, scores: Sequence[float], trajectories: Sequence[Trajectory]
    ) -> list[float]:
        return rank_by_length(scores, trajectories, max_tokens=self.config.max_token_length)

    def check_gold_answer(self, item: Question) -> str:
        return f"\\boxed{{{gold_query(item)}}}"


def _read_local(path: Path, *, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    if path.is_dir():
        train, test = (
            [row for file in split_files(path, names) for row in _read_file(file)]
            for names in (["train"], ["test", "validation", "dev"])
        )
    else:
        rows = _read_file(path)
        Random(seed).shuffle(rows)
        num_test = max(1, len(rows) // 50)
        train, test = rows[num_test:] or rows, rows[:num_test]
    Random(seed).shuffle(train)
    Random(seed).shuffle(test)
    return train, test


def _read_file(path: Path) -> list[dict[str, Any]]:
    rows = read_records(path, ("question", "sql"), optional=("table", "table_id"))
    if all(row["table"] for row in rows):
        return rows
    columns = ("id", "header", "types", "rows")
    tables = {
        table["id"]: table for table in read_records(path.with_suffix(".tables.jsonl"), columns)
    }
    for row in rows:
        row["table"] = row["table"] or tables.get(row["table_id"])
        if not row["table"]:
            raise ConfigError(f"{path}: there is no table {row['table_id']!r} of a question")
    return rows


def _with_results(rows: Sequence[Question]) -> list[Question]:
    """Return the questions whose gold query has a result; all wrong queries equal an empty one."""
    kept: list[Question] = []
    reasons: list[str] = []
    for row in rows:
        try:
            if gold_rows(row):
                kept.append(row)
            else:
                reasons.append(f"{row['question']!r:.80} has no result")
        except (LookupError, TypeError, ValueError, sqlite3.Error) as error:
            reasons.append(f"{row['question']!r:.80} is not in the form of WikiSQL: {error!r}")
    if reasons:
        logger.warning("%d questions are left out, such as: %s", len(reasons), reasons[0])
    if rows and not kept:
        raise ConfigError(f"no question has a gold query with a result: {reasons[0]}")
    return kept


if __name__ == "__main__":
    SQLQueryEnv.cli()
