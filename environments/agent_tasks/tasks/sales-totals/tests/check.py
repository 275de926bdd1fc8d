"""Compare /app/totals.csv with the totals of /app/sales.csv."""

import csv
import json
import stat
from collections import defaultdict
from decimal import Decimal
from pathlib import Path

ANSWER = Path("/app/totals.csv")
MAX_BYTES = 10_000


def expected_rows():
    totals = defaultdict(Decimal)
    with open("/app/sales.csv", newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            region = row["region"].strip().capitalize()
            totals[region] += int(row["quantity"]) * Decimal(row["unit_price"])
    return [[name, f"{totals[name]:.2f}"] for name in sorted(totals, key=totals.get, reverse=True)]


def listed_rows():
    try:
        if not stat.S_ISREG(ANSWER.lstat().st_mode) or ANSWER.stat().st_size > MAX_BYTES:
            return []
        return [row for row in csv.reader(ANSWER.read_text("utf-8").splitlines()) if row]
    except (OSError, ValueError, csv.Error) as error:
        print(f"{ANSWER} cannot be read: {error}")
        return []


expected, listed = expected_rows(), listed_rows()
parts = {
    "regions": sum(listed.count(row) == 1 for row in expected) / len(expected),
    "file": float(listed == [["region", "revenue"], *expected]),
}
if len(listed) > len(expected) + 1:
    parts["regions"] = 0.0  # several guesses per region
print(parts)
reward = round(0.8 * parts["regions"] + 0.2 * parts["file"], 6)
Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": reward, **parts}))
