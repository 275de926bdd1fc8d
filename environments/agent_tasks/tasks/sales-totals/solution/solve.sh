#!/bin/bash
python3 - <<'PYTHON'
import csv
from collections import Counter
from decimal import Decimal

totals = Counter()
for row in csv.DictReader(open("/app/sales.csv", newline="")):
    totals[row["region"].strip().capitalize()] += int(row["quantity"]) * Decimal(row["unit_price"])
with open("/app/totals.csv", "w", newline="") as file:
    writer = csv.writer(file)
    writer.writerow(["region", "revenue"])
    writer.writerows([region, f"{total:.2f}"] for region, total in totals.most_common())
PYTHON
