#!/bin/bash
cat > /app/toc.py <<'PYTHON'
import re
import sys
from collections import Counter

fence = None
seen = Counter()
for line in sys.stdin.read().split("\n"):
    mark = re.match(r" {0,3}(`{3,}|~{3,})(.*)$", line)
    if fence is not None:
        if (
            mark
            and mark[1][0] == fence[0]
            and len(mark[1]) >= len(fence)
            and not mark[2].strip(" ")
        ):
            fence = None
        continue
    if mark:
        fence = mark[1]
        continue
    heading = re.match(r" {0,3}(#{1,6})[ \t]+(\S.*)$", line)
    if not heading:
        continue
    text = re.sub(r"[ \t]+#+[ \t]*$", "", heading[2]).strip()
    kept = "".join(c for c in text.lower() if c.isalnum() or c in " -_")
    anchor = kept.replace(" ", "-")
    number = seen[anchor]
    seen[anchor] += 1
    if number:
        anchor = f"{anchor}-{number}"
    if len(heading[1]) in (2, 3):
        print("  " * (len(heading[1]) - 2) + f"- [{text}](#{anchor})")
PYTHON
