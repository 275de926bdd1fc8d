"""Compare /app/top_customers.csv with the result of a query."""

import csv
import json
import sqlite3
import stat
from pathlib import Path

ANSWER = Path("/app/top_customers.csv")
MAX_BYTES = 10_000
QUERY = """
SELECT name, count(DISTINCT orders.id), coalesce(sum(cents * quantity), 0) AS total
FROM customers
JOIN orders ON customer_id = customers.id
LEFT JOIN order_lines ON order_id = orders.id
WHERE status = 'paid' AND day BETWEEN '2023-01-01' AND '2023-12-31'
GROUP BY customers.id ORDER BY total DESC, name LIMIT 5
"""


def listed_rows():
    try:
        if not stat.S_ISREG(ANSWER.lstat().st_mode) or ANSWER.stat().st_size > MAX_BYTES:
            return []
        return [row for row in csv.reader(ANSWER.read_text("utf-8").splitlines()) if row]
    except (OSError, ValueError, csv.Error) as error:
        print(f"{ANSWER} cannot be read: {error}")
        return []


with sqlite3.connect("file:/app/shop.db?mode=ro&immutable=1", uri=True) as database:
    expected = [[name, str(count), str(total)] for name, count, total in database.execute(QUERY)]
listed = listed_rows()
rows = listed[1:6] if listed[:1] == [["name", "orders", "cents"]] and len(listed) <= 6 else []
num_right = sum(row == right for row, right in zip(rows, expected, strict=False))
print(f"{num_right} of {len(expected)} places are right")
Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": num_right / len(expected)}))
