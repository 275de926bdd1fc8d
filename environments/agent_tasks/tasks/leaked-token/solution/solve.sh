#!/bin/bash
python3 - <<'PYTHON'
import base64
import json
from pathlib import Path

logs = Path("/app/logs")
key = Path("/app/key.txt").read_text().strip()
leaks = set()
for path in logs.glob("bodies-*.log"):
    for line in path.open():
        body = json.loads(line)
        if body["kind"] == "response" and key.encode() in base64.b64decode(body["body"]):
            leaks.add(body["request"])
requests = [json.loads(line) for line in (logs / "requests.log").open()]
first = min((r for r in requests if r["request"] in leaks), key=lambda r: r["time"])
answer = {"request": first["request"], "user": first["user"], "count": len(leaks)}
Path("/app/leak.json").write_text(json.dumps(answer))
PYTHON
