"""Run /app/migrate.sql on databases in memory, with rows that the agent has not seen."""

import json
import resource
import sqlite3
import stat
import sys
from contextlib import closing
from pathlib import Path

SCRIPT = Path("/app/migrate.sql")
MAX_BYTES = 100_000
MAX_STEPS = 2000
"""In units of 10,000 instructions of SQLite's machine."""
QUERIES = {
    "cities": "SELECT id, name FROM cities ORDER BY id LIMIT 1000",
    "persons": "SELECT id, first_name, last_name, city_id FROM persons ORDER BY id LIMIT 1000",
    "phones": "SELECT person_id, position, number FROM phones ORDER BY 1, 2 LIMIT 1000",
}
FORBIDDEN = {sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH, sqlite3.SQLITE_PRAGMA}
DATABASES = [
    [
        (1, "Berg, Eva", "1; 2;3 ;4", "Turku"), (2, "Chan, Bo", "9", "turku"),
        (3, "Abbot, Cy", "5", "Espoo"), (7, "Dahl", "6;7", "ESPOO"), (9, "Ek, Al", None, "Vaasa"),
    ],
    [
        (10, " Nuñez ,  José María ", "; ;030-1;; +49 (0)30 ; 030-1", "Ávila"),
        (4, "Solo", ";", None), (11, "Van der Berg, Jan", "", "ZUG"), (12, "Li, Na", "8", "zug"),
    ],
    [(n, f"Name{n}, First{n}", ";".join(map(str, range(n))), f"City{n % 7}") for n in range(1, 40)],
    [(6, "Only, One", " 77 ", " Lima"), (5, "Two", " ; ", "Lima"), (3, "Three, ", "0", "lima ")],
    [],
]  # fmt: skip


def lower(text):
    return "".join(chr(ord(c) + 32) if "A" <= c <= "Z" else c for c in text)


def expected_rows(people):
    names = sorted({lower(row[3]) for row in people if row[3] is not None})
    cities = {name: number for number, name in enumerate(names, 1)}
    persons, phones = [], []
    for number, name, text, city in sorted(people):
        last, comma, first = (part.strip(" ") for part in name.partition(","))
        city_id = None if city is None else cities[lower(city)]
        persons.append((number, first if comma else None, last, city_id))
        numbers = [part.strip(" ") for part in (text or "").split(";") if part.strip(" ")]
        phones += [(number, position, each) for position, each in enumerate(numbers, 1)]
    return {
        "cities": [(number, name) for name, number in cities.items()],
        "persons": persons,
        "phones": phones,
    }


def migrated_rows(script, people):
    """Return the rows of each table, None for one that is not there or not a table."""
    steps = iter(range(MAX_STEPS))
    with closing(sqlite3.connect(":memory:")) as database:
        database.execute(
            "CREATE TABLE people (id INTEGER PRIMARY KEY, name TEXT, phones TEXT, city TEXT)"
        )
        database.executemany("INSERT INTO people VALUES (?, ?, ?, ?)", people)
        database.commit()
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1_000_000)
        database.set_authorizer(
            lambda action, *_: sqlite3.SQLITE_DENY if action in FORBIDDEN else sqlite3.SQLITE_OK
        )
        database.set_progress_handler(lambda: next(steps, None) is None, 10_000)
        database.executescript(script)
        kinds = dict(database.execute("SELECT name, type FROM sqlite_schema LIMIT 100"))
        if "people" in kinds:
            raise sqlite3.DatabaseError("the table people is still there")
        return {
            name: database.execute(query).fetchall() if kinds.get(name) == "table" else None
            for name, query in QUERIES.items()
        }


def score(script):
    right = []
    for people in DATABASES:
        try:
            found = migrated_rows(script, people)
        except (sqlite3.Error, sqlite3.Warning, MemoryError, ValueError) as error:
            print(f"the script fails: {error}")
            found = {}
        # A database without people needs no rows, so it counts only with all others right.
        if people or all(right):
            expected = expected_rows(people)
            right += [found.get(name) == expected[name] for name in QUERIES]
        else:
            right += [False] * len(QUERIES)
    return sum(right) / len(right)


resource.setrlimit(resource.RLIMIT_AS, (500_000_000, 500_000_000))
sys.setrecursionlimit(1000)
reward = 0.0
try:
    if stat.S_ISREG(SCRIPT.lstat().st_mode) and SCRIPT.stat().st_size <= MAX_BYTES:
        reward = score(SCRIPT.read_text("utf-8"))
except (OSError, ValueError) as error:
    print(f"{SCRIPT} cannot be read: {error}")
print(f"reward {reward:.3f}")
Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": reward}))
