"""Compare /app/renamed with the names and contents that follow from /app/photos."""

import json
import re
import stat
from pathlib import Path

MAX_BYTES = 10_000
PHOTO = re.compile(r"IMG_(\d{4})(\d\d)(\d\d)_(\d{4})_(.+)\.jpg", re.ASCII)


def expected_files(folder):
    found = {}
    for path in sorted(folder.iterdir(), key=lambda path: path.name):
        photo = PHOTO.fullmatch(re.sub(r"\.jpg$", ".jpg", path.name, flags=re.IGNORECASE))
        if photo is not None:
            year, month, day, time, title = photo.groups()
            title = title.lower().replace(" ", "-").replace("_", "-")
            name = f"{year}-{month}-{day}_{time}_{title}"
            found[f"{name}-2.jpg" if f"{name}.jpg" in found else f"{name}.jpg"] = path.read_bytes()
    return found


def present_files(folder):
    if folder.is_symlink() or not folder.is_dir():
        return {}
    found = {}
    for path in sorted(folder.iterdir())[:1000]:
        is_file = stat.S_ISREG(path.lstat().st_mode) and path.stat().st_size <= MAX_BYTES
        found[path.name] = path.read_bytes() if is_file else None
    return found


expected = expected_files(Path("/app/photos"))
present = present_files(Path("/app/renamed"))
num_right = sum(present.get(name) == content for name, content in expected.items())
num_wrong = len(present) - num_right
reward = max(0.0, (num_right - num_wrong) / len(expected))
print(f"{num_right} of {len(expected)} files are right, {num_wrong} are wrong")
Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": reward}))
