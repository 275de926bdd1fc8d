#!/bin/bash
cat > /app/convert.py <<'PYTHON'
import json
import sys


def date_of(text):
    return f"{text[:4]}-{text[4:6]}-{text[6:8]}" if text.strip() else None


def cents_of(text):
    text = text.strip()
    return -int(text[:-1]) if text.endswith("-") else int(text)


records = []
for line in sys.stdin.read().split("\n"):
    line = line.rstrip("\r")
    if line.startswith("*") or not line.strip():
        continue
    line = line.ljust(48)
    records.append(
        {
            "account": line[0:6].strip(),
            "name": line[6:26].strip(),
            "cents": cents_of(line[26:37]),
            "date": date_of(line[37:45]),
            "currency": line[45:48].strip() or "EUR",
        }
    )
json.dump(records, sys.stdout)
PYTHON
