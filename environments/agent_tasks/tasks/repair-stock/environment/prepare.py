"""Make /app/stock.db with faults of four kinds."""

import random
import sqlite3

SCHEMA = """
CREATE TABLE products (id INTEGER PRIMARY KEY, name TEXT NOT NULL, quantity INTEGER NOT NULL);
CREATE TABLE movements (
    id INTEGER PRIMARY KEY, product_id INTEGER, change INTEGER NOT NULL, at TEXT NOT NULL,
    note TEXT
);
"""

chance = random.Random(21)
database = sqlite3.connect("/app/stock.db")
database.executescript(SCHEMA)
names = ["bolt", " nut", "washer  ", "M4 screw", "hinge\t", "bracket", "anchor", "rivet", "clip"]
sums = [0] * len(names)
rows = []
for number in range(1, 121):
    product = chance.randrange(len(names))
    change = chance.choice([50, 20, 10, -1, -2, -5])
    note = chance.choice([None, "", "order", "count"])
    at = f"2024-0{chance.randrange(1, 7)}-{chance.randrange(1, 29):02} 10:00"
    rows.append([number, product + 1, change, at, note])
    sums[product] += change
for number in range(121, 133):  # the same movement once more, or nearly the same
    unset = [row for row in rows[:100] if not row[4]]
    _, product, change, at, note = chance.choice(unset if number % 4 == 0 else rows[:100])
    if number % 4 == 0:
        note = "" if note is None else None
    rows.append([number, product, change, at, note])
for number, product in ((133, 99), (134, 0), (135, None)):
    rows.append([number, product, 7, "2024-06-30 10:00", "order"])
chance.shuffle(rows)
database.executemany("INSERT INTO movements VALUES (?, ?, ?, ?, ?)", rows)
for number, name in enumerate(names, 1):
    quantity = sums[number - 1] + (number % 3 == 0) * 4
    database.execute("INSERT INTO products VALUES (?, ?, ?)", (number, name, quantity))
database.execute("INSERT INTO products VALUES (10, 'spring', 12)")  # without movements
database.commit()
