#!/bin/bash
python3 - <<'PYTHON'
import json
import re
from datetime import datetime, timedelta
from pathlib import Path

logs = Path("/app/logs")
failures = []
for row in (logs / "zones.txt").read_text().splitlines():
    if row.startswith("#"):
        continue
    host, hours = row.split()
    for line in (logs / f"{host}.log").open():
        found = re.match(r"\[(.*)\] ERROR write failed (E\d+)$", line)
        if not found:
            continue
        shown = found[1]
        if shown.isdigit():
            moment = datetime.utcfromtimestamp(int(shown))
        else:
            form = "%d/%b/%Y %I:%M:%S %p" if "/" in shown else "%Y-%m-%d %H:%M:%S"
            moment = datetime.strptime(shown, form) - timedelta(hours=float(hours))
        failures.append((moment, host, found[2]))
moment, host, code = min(failures)
answer = {"host": host, "time": f"{moment:%Y-%m-%dT%H:%M:%SZ}", "code": code}
Path("/app/first_failure.json").write_text(json.dumps(answer))
PYTHON
