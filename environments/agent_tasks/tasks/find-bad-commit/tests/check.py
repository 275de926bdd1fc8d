"""Compare /app/bad_commit.txt with the commit that broke the fares."""

import json
import stat
from pathlib import Path

ANSWER = Path("/app/bad_commit.txt")
BAD_COMMIT = "8c2918c5ecbf688aa80e1179ca6e4e51a3ff69e2"  # pragma: allowlist secret

reward = 0.0
try:
    if stat.S_ISREG(ANSWER.lstat().st_mode) and ANSWER.stat().st_size <= 100:
        reward = float(ANSWER.read_text("utf-8").strip().lower() == BAD_COMMIT)
except (OSError, ValueError) as error:
    print(f"{ANSWER} cannot be read: {error}")
print("right" if reward else "wrong")
Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": reward}))
