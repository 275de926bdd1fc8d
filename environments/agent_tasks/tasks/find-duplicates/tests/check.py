"""Compare the groups of /app/duplicates.json with those of the files below /app/inbox."""

import json
import stat
from collections import defaultdict
from pathlib import Path

MAX_BYTES = 200_000
INBOX, ANSWER = Path("/app/inbox"), Path("/app/duplicates.json")


def expected_groups():
    by_content = defaultdict(set)
    for path in INBOX.rglob("*"):
        if path.is_file() and path.stat().st_size:
            by_content[path.read_bytes()].add(str(path.relative_to(INBOX)))
    return {frozenset(paths) for paths in by_content.values() if len(paths) > 1}


def listed_groups():
    try:
        is_file = stat.S_ISREG(ANSWER.lstat().st_mode) and ANSWER.stat().st_size <= MAX_BYTES
        groups = json.loads(ANSWER.read_text("utf-8")) if is_file else []
        return {frozenset(group) for group in groups if isinstance(group, list)}
    except (OSError, ValueError, TypeError, RecursionError) as error:
        print(f"{ANSWER} cannot be read: {error}")
        return set()


expected, listed = expected_groups(), listed_groups()
num_right = len(expected & listed)
reward = num_right / len(expected | listed)
print(f"{num_right} of {len(expected)} groups are right, {len(listed)} are listed")
Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": reward}))
