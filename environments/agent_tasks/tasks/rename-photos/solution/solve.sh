#!/bin/bash
python3 - <<'PYTHON'
import re
import shutil
from pathlib import Path

target = Path("/app/renamed")
target.mkdir()
for path in sorted(Path("/app/photos").iterdir(), key=lambda p: p.name):
    found = re.fullmatch(r"IMG_(\d{4})(\d\d)(\d\d)_(\d{4})_(.+)\.[jJ][pP][gG]", path.name)
    if found:
        year, month, day, time, title = found.groups()
        stem = f"{year}-{month}-{day}_{time}_{re.sub('[ _]', '-', title.lower())}"
        if (target / f"{stem}.jpg").exists():
            stem += "-2"
        shutil.copy(path, target / f"{stem}.jpg")
PYTHON
