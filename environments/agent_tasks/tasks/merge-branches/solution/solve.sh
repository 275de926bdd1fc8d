#!/bin/bash
cd /app/repo || exit 1
git merge feature > /dev/null
cat > settings.ini <<'TEXT'
[server]
host = 127.0.0.1
port = 8000
timeout = 45
retries = 5
workers = 8

[logs]
level = info

[cache]
size = 512
TEXT
git show main:units.py > units.py
sed -i 's/^    "inch": 0.0254,$/&\n    "mile": 1609.344,\n    "foot": 0.3048,/' units.py
git add -A
git commit -q -m "Merge the branch feature"
