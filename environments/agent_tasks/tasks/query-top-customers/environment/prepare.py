"""Make /app/shop.db: customers, orders and their lines."""

import random
import sqlite3

SCHEMA = """
CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT NOT NULL, city TEXT);
CREATE TABLE orders (
    id INTEGER PRIMARY KEY, customer_id INTEGER REFERENCES customers, status TEXT, day TEXT
);
CREATE TABLE order_lines (order_id INTEGER REFERENCES orders, cents INTEGER, quantity INTEGER);
"""
NAMES = [
    "Abel", "Bo", "Cleo", "Dana", "Eda", "Finn", "Gus", "Hana", "Ivo", "Jo", "Kim", "Lou", "Mara",
    "Nick, Jr.", "Oona",
]  # fmt: skip

chance = random.Random(8)
database = sqlite3.connect("/app/shop.db")
database.executescript(SCHEMA)
for number, name in enumerate(NAMES, 1):
    city = chance.choice(["Bergen", "Cork", None])
    database.execute("INSERT INTO customers VALUES (?, ?, ?)", (number, name, city))
days = ["2022-12-31", "2023-01-01", "2023-05-17", "2023-09-30", "2023-12-31", "2024-01-01"]
for number in range(1, 181):
    status = chance.choice(["paid", "paid", "paid", "open", "cancelled", "Paid"])
    order = (number, chance.randrange(1, len(NAMES) + 1), status, chance.choice(days))
    database.execute("INSERT INTO orders VALUES (?, ?, ?, ?)", order)
    for _ in range(chance.randrange(0, 4)):
        line = (number, 5 * chance.randrange(20, 900), chance.randrange(1, 5))
        database.execute("INSERT INTO order_lines VALUES (?, ?, ?)", line)
# Two customers with the same sum, which the names put in order.
for number, customer in ((900, 14), (901, 3)):
    database.execute("INSERT INTO orders VALUES (?, ?, 'paid', '2023-07-07')", (number, customer))
    paid = database.execute(
        "SELECT sum(cents * quantity) FROM orders JOIN order_lines ON order_id = id WHERE "
        "customer_id = ? AND status = 'paid' AND day BETWEEN '2023-01-01' AND '2023-12-31'",
        (customer,),
    ).fetchone()[0]
    database.execute("INSERT INTO order_lines VALUES (?, ?, 1)", (number, 500_000 - (paid or 0)))
database.commit()
