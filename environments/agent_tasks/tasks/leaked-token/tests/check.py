"""Compare /app/leak.json with what the logs say."""

import base64
import json
import stat
from pathlib import Path

ANSWER = Path("/app/leak.json")
LOGS = Path("/app/logs")
MAX_BYTES = 10_000


def expected_answer():
    key = Path("/app/key.txt").read_text().strip()
    bodies = [
        json.loads(line)
        for path in sorted(LOGS.glob("bodies-*.log"))
        for line in path.read_text().splitlines()
    ]
    leaks = {
        body["request"]
        for body in bodies
        if body["kind"] == "response" and key in base64.b64decode(body["body"]).decode()
    }
    requests = map(json.loads, (LOGS / "requests.log").read_text().splitlines())
    first = min((r for r in requests if r["request"] in leaks), key=lambda r: r["time"])
    return {"request": first["request"], "user": first["user"], "count": len(leaks)}


def read_answer():
    try:
        if stat.S_ISREG(ANSWER.lstat().st_mode) and ANSWER.stat().st_size <= MAX_BYTES:
            answer = json.loads(ANSWER.read_text("utf-8"))
            return answer if isinstance(answer, dict) else {}
    except (OSError, ValueError, RecursionError) as error:
        print(f"{ANSWER} cannot be read: {error}")
    return {}


expected, answer = expected_answer(), read_answer()
parts = {name: float(answer.get(name) == value) for name, value in expected.items()}
if not parts["request"]:
    parts = dict.fromkeys(parts, 0.0)
print(parts)
reward = round(0.6 * parts["request"] + 0.2 * parts["user"] + 0.2 * parts["count"], 6)
Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": reward, **parts}))
