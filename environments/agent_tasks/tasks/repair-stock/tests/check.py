"""Compare /app/repaired.db with the rows that the rules leave of /app/stock.db."""

import json
import sqlite3
import stat
from contextlib import closing
from pathlib import Path

REPAIRED = Path("/app/repaired.db")
MAX_BYTES = 1_000_000
MOVEMENTS = "SELECT id, product_id, change, at, note FROM movements ORDER BY id LIMIT 10000"
PRODUCTS = "SELECT id, name, quantity FROM products ORDER BY id LIMIT 10000"


def rows_of(path):
    """Return movements and products; the tables must be tables, since a view can compute."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)) as database:
        database.execute("PRAGMA trusted_schema = OFF")
        kinds = dict(database.execute("SELECT name, type FROM sqlite_schema LIMIT 100"))
        if kinds.get("movements") != "table" or kinds.get("products") != "table":
            raise sqlite3.DatabaseError("expected the tables movements and products")
        return database.execute(MOVEMENTS).fetchall(), database.execute(PRODUCTS).fetchall()


def repaired(movements, products):
    """Return the rows after rule 1, after rule 2, and the products."""
    numbers = {number for number, _, _ in products}
    known = [row for row in movements if row[1] in numbers]
    first = {}
    for row in known:
        first.setdefault(row[1:], row)
    kept = sorted(first.values())
    sums = dict.fromkeys(numbers, 0)
    for _, product, change, *_ in kept:
        sums[product] += change
    return known, kept, [(number, name.strip(), sums[number]) for number, name, _ in products]


movements, products = rows_of("/app/stock.db")
known, kept, right_products = repaired(movements, products)
parts = dict.fromkeys(("references", "duplicates", "names", "quantities"), 0.0)
try:
    if not stat.S_ISREG(REPAIRED.lstat().st_mode) or REPAIRED.stat().st_size > MAX_BYTES:
        raise OSError("expected a file of at most 1 MB")
    found_movements, found_products = rows_of(REPAIRED)
    unknown = {row[0] for row in movements} - {row[0] for row in known}
    ids = {row[0] for row in found_movements}
    is_subset = set(found_movements) <= set(movements) and len(ids) == len(found_movements)
    parts["references"] = float(is_subset and ids >= {r[0] for r in kept} and not ids & unknown)
    parts["duplicates"] = float(is_subset and ids - unknown == {row[0] for row in kept})
    if found_movements == kept:
        for part, column in (("names", 1), ("quantities", 2)):
            pairs = [[(row[0], row[column]) for row in p] for p in (found_products, right_products)]
            parts[part] = float(pairs[0] == pairs[1])
except (OSError, sqlite3.Error, OverflowError) as error:
    print(f"{REPAIRED} cannot be read: {error}")
print(parts)
reward = sum(parts.values()) / len(parts)
Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": reward, **parts}))
