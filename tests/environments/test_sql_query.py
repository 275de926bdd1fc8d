"""The SQL environment: equal results, refused statements, the shipped questions."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from atroposlib.errors import ConfigError
from environments.community.sql_query_env.sql_query_env import (
    SQLQueryEnv,
    column_names,
    gold_query,
    gold_rows,
    score_query,
)
from tests.environments.offline import group_scores_at_100, ready_env

TABLE = {
    "id": "1",
    "header": ["Town", "People", "People", ""],
    "types": ["text", "real", "text", "text"],
    "rows": [["Oak's", "1,200", "x", "a"], ["Elm", 300, "y", "a"], ["Elm", 50, "z", "b"]],
}


def question(sel: int, agg: int = 0, conds: Any = (), table: Any = TABLE) -> dict[str, Any]:
    sql = {"sel": sel, "agg": agg, "conds": conds}
    return {"question": "?", "table": table, "sql": sql}


PEOPLE_OF_ELM = question(1, 4, [[0, 0, "elm"]])  # 300 + 50
TOWNS = question(0, 0, [[1, 1, 100]])  # Oak's, Elm


@pytest.mark.parametrize(
    ("item", "query", "rows"),
    [
        (PEOPLE_OF_ELM, """SELECT SUM("People") FROM records WHERE "Town" = 'elm'""", [(350,)]),
        (TOWNS, 'SELECT "Town" FROM records WHERE "People" > 100', [("Oak's",), ("Elm",)]),
        (
            question(2, 0, [[0, 0, "Oak's"]]),
            """SELECT "People 3" FROM records WHERE "Town" = 'Oak''s'""",
            [("x",)],
        ),
        (
            question(3, 3, {"column_index": [1], "operator_index": [2], "condition": ["1,000"]}),
            'SELECT COUNT("column 4") FROM records WHERE "People" < 1000.0',
            [(2,)],
        ),
        (question(1, 1, [[0, 0, "Ash"]]), None, []),  # MAX of nothing is NULL
        (question(0, 0, [[0, 0, "Ash"]]), None, []),
    ],
)
def test_gold_query(item: Mapping[str, Any], query: str | None, rows: list[Any]) -> None:
    assert query is None or gold_query(item) == query
    assert gold_rows(item) == rows


def test_equal_names_of_columns_become_different() -> None:
    names = column_names(["A", "a 3", "a", '"', ""])

    assert names == ['"A"', '"a 3"', '"a 3 3"', '"column 4"', '"column 5"']


@pytest.mark.parametrize(
    ("item", "query", "score"),
    [
        (PEOPLE_OF_ELM, "SELECT SUM(People) FROM records WHERE Town = 'Elm'", 1),
        (PEOPLE_OF_ELM, "select sum(people) from records where town like 'e%';", 1),
        (PEOPLE_OF_ELM, "WITH e AS (SELECT * FROM records) SELECT SUM(e.People) - 1200 FROM e", 1),
        (PEOPLE_OF_ELM, "SELECT SUM(People) FROM records", -1),
        (PEOPLE_OF_ELM, "SELECT SUM(People), 1 FROM records WHERE Town = 'Elm'", -1),
        (PEOPLE_OF_ELM, "SELECT CAST(SUM(People) AS TEXT) FROM records WHERE Town = 'Elm'", -1),
        (PEOPLE_OF_ELM, "SELECT 350", -1),
        (PEOPLE_OF_ELM, "VALUES (350)", -1),
        (PEOPLE_OF_ELM, "SELECT 350 FROM records", -1),
        (PEOPLE_OF_ELM, "WITH records(x) AS (SELECT 350) SELECT x FROM records", -1),
        (PEOPLE_OF_ELM, "SELECT x FROM (SELECT 350 AS x) AS records", -1),
        (TOWNS, "SELECT Town FROM records WHERE People > 100 ORDER BY People", 1),
        (TOWNS, "SELECT DISTINCT Town FROM records", 1),
        (TOWNS, "SELECT Town FROM records", -1),
        (TOWNS, "SELECT upper(Town) FROM records WHERE People > 100", -1),
        (TOWNS, "SELECT Town FROM records WHERE People > 100; SELECT 1", -1),
        (TOWNS, "SELECT Town FROM records WHERE People > ?", -1),
        (TOWNS, "SELECT Town FROM towns", -1),
        (TOWNS, "Town", -1),
        (TOWNS, "", -1),
    ],
)
def test_score(item: Mapping[str, Any], query: str, score: float) -> None:
    assert score_query(f"So: \\boxed{{{query}}}", item) == score


GOLD = gold_query(TOWNS)


@pytest.mark.parametrize(
    "query",
    [
        "ATTACH 'other.db' AS other",
        "PRAGMA table_info(records)",
        "SELECT name FROM pragma_table_info('records')",
        "SELECT name FROM sqlite_master",
        f"EXPLAIN {GOLD}",
        "DELETE FROM records WHERE People < 100 RETURNING Town",
        "UPDATE records SET Town = 'x'",
        "INSERT INTO records SELECT * FROM records",
        "CREATE TABLE other AS SELECT * FROM records",
        "DROP TABLE records",
        "VACUUM INTO 'copy.db'",
        f"{GOLD} AND load_extension('x') IS NULL",
        f"{GOLD} AND length(randomblob(9)) = 9",
        f"{GOLD} AND length(zeroblob(1000000000)) > 1",
        f"{GOLD} AND length(printf('%1000000000d', 1)) > 1",
        f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) {GOLD} "
        "AND (SELECT max(i) FROM n) > 0",
        GOLD + " AND (SELECT count(*) FROM " + ", ".join(f"records r{i}" for i in range(20)) + ")",
        f"{GOLD} -- {'x' * 2000}",
        f"{GOLD}\x00",
        f"{GOLD} AND '\ud800' = ''",
    ],
)
def test_what_a_statement_may_not_do_is_wrong(
    query: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert score_query(f"\\boxed{{{query}}}", TOWNS) == -1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.version_info < (3, 11), reason="only the worker's memory is limited")
def test_texts_do_not_grow_beyond_a_limit() -> None:
    query = "SELECT Town t FROM records WHERE People > 100"
    for _ in range(40):
        query = f"SELECT t || t t FROM ({query})"

    assert score_query(f"\\boxed{{SELECT substr(t, 1, 3) FROM ({query})}}", TOWNS) == -1


@pytest.mark.parametrize("answer", ["", GOLD, f"\\boxed{{{GOLD}", "\\boxed{}"])
def test_answer_without_a_box_is_wrong(answer: str) -> None:
    assert score_query(answer, TOWNS) == -1


async def test_trivial_statements_answer_no_shipped_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = await ready_env(SQLQueryEnv, monkeypatch)
    questions = [*env.train, *env.test]

    assert len(questions) == 40
    for item in questions:
        names = [f'"{title}"' for title in item["table"]["header"]]
        trivial = ["SELECT 1", "SELECT 1 FROM records LIMIT 1", "SELECT count(*) FROM records"]
        for name in names:
            trivial += [f"SELECT {name} FROM records {end}" for end in ("", "WHERE 0", "LIMIT 1")]
            if item["sql"]["conds"]:
                trivial += [f"SELECT {f}({name}) FROM records" for f in ("max", "min", "avg")]
        assert score_query(env.check_gold_answer(item), item) == 1
        assert all(score_query(f"\\boxed{{{query}}}", item) == -1 for query in trivial), item


def write(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


async def test_files_of_the_archive_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    row = {"phase": 1, "table_id": "1", **{k: v for k, v in TOWNS.items() if k != "table"}}
    nothing = {**row, "sql": {"sel": 0, "agg": 0, "conds": [[0, 0, "Ash"]]}}
    for split in ("train", "dev"):
        write(tmp_path / f"{split}.jsonl", [row, nothing])
        write(tmp_path / f"{split}.tables.jsonl", [TABLE])

    env = await ready_env(SQLQueryEnv, monkeypatch, dataset_path=str(tmp_path))

    assert [gold_query(item) for item in env.train] == [GOLD]
    assert len(env.test) == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "?", "sql": {}, "table_id": "9"}, "no table '9'"),
        ({"question": "?", "sql": {"sel": 9, "agg": 0, "conds": []}, "table_id": "1"}, "WikiSQL"),
        ({"question": "?", "sql": {"sel": 0, "agg": 0}, "table_id": "1"}, "WikiSQL: KeyError"),
        (question(0, 0, [[0, 0, "Ash"]]), "has no result"),
        (question(0, 0, [], {**TABLE, "rows": [["Oak's"]]}), "WikiSQL: ValueError"),
    ],
)
async def test_questions_that_cannot_be_scored_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    write(tmp_path / "rows.jsonl", [row])
    write(tmp_path / "rows.tables.jsonl", [TABLE])

    with pytest.raises(ConfigError, match=message):
        await ready_env(SQLQueryEnv, monkeypatch, dataset_path=str(tmp_path / "rows.jsonl"))


def test_right_answers_are_ranked_by_length() -> None:
    # of 100 tokens, 50 are free; 75 are halfway to the limit
    assert group_scores_at_100(SQLQueryEnv, [1.0, 1.0], [50, 75]) == [1.0, 0.5]
    assert group_scores_at_100(SQLQueryEnv, [1.0, -1.0], [50, 75]) == [1.0, -1.0]
