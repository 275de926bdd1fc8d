"""Compare /app/first_failure.json with what the logs say."""

import json
import re
import stat
from datetime import datetime, timedelta, timezone
from pathlib import Path

ANSWER = Path("/app/first_failure.json")
LOGS = Path("/app/logs")
MAX_BYTES = 10_000
FAILURE = re.compile(r"\[(.+)\] ERROR write failed (E\d+)")


def moment_of(text, hours):
    if text.isdigit():
        return datetime.fromtimestamp(int(text), timezone.utc)
    form = "%d/%b/%Y %I:%M:%S %p" if hours < 0 else "%Y-%m-%d %H:%M:%S"
    local = datetime.strptime(text, form).replace(tzinfo=timezone(timedelta(hours=hours)))
    return local.astimezone(timezone.utc)


def expected_answer():
    failures = []
    for row in (LOGS / "zones.txt").read_text().splitlines()[1:]:
        host, hours = row.split()
        for line in (LOGS / f"{host}.log").read_text().splitlines():
            found = FAILURE.fullmatch(line)
            if found is not None:
                failures.append((moment_of(found[1], float(hours)), host, found[2]))
    moment, host, code = min(failures)
    return {"host": host, "code": code, "time": f"{moment:%Y-%m-%dT%H:%M:%SZ}"}


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
print(parts)
reward = 0.0
if parts["host"] and parts["code"]:
    reward = 1.0 if parts["time"] else 0.4
Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": reward, **parts}))
