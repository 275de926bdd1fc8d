#!/bin/bash
cp -r /app/repo /tmp/repo
cd /tmp/repo || exit 1
first=$(git rev-list --max-parents=0 main)
git bisect start main "$first" > /dev/null
can_start='compile(open("fares.py").read(), "fares.py", "exec")'
git bisect run sh -c "python3 -c '$can_start' || exit 125; python3 selftest.py" > /dev/null 2>&1
git rev-parse refs/bisect/bad > /app/bad_commit.txt
