#!/bin/bash
cd /app/inbox || exit 1
find . -type f -size +0 -exec sha256sum {} + | python3 -c '
import collections, json, sys
groups = collections.defaultdict(list)
for line in sys.stdin:
    digest, path = line.rstrip("\n").split("  ", 1)
    groups[digest].append(path.removeprefix("./"))
json.dump([sorted(g) for g in groups.values() if len(g) > 1], sys.stdout)
' > /app/duplicates.json
