"""Call make in a folder of its own with other chapters; the outcome is judged by this process."""

import json
import os
import shutil
import stat
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from isolated import run_command

APP = Path("/app")
REWARDS = Path("/logs/verifier")
MAX_BYTES = 100_000
CHAPTERS = {
    "01-start.txt": "Start\n\nHow to read this.\n",
    "02-tools.txt": "Tools & rules\n\nA pencil.\nA ruler.\n",
    "09-safety.txt": "Safety first\n\nNo ladders.\n",
    "11-end.txt": "The end\n",
}
CHANGED = {
    "02-tools.txt": "Tools, and where they are\n\nA pencil, in room 3.\n",
    "10-new.txt": "New: lamps\n\nSwitch them off.\n",
}


def copy_files(source, target):
    """Copy a file, or the regular files of a folder."""
    for path in [source] if source.is_file() else sorted(source.rglob("*"))[:100]:
        if stat.S_ISREG(path.lstat().st_mode) and path.stat().st_size <= MAX_BYTES:
            copied = target / path.relative_to(source.parent)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copied)


def write_chapters(folder, chapters, hours):
    """Write chapters, with times in the past and that long apart, since make compares times."""
    for name, text in chapters.items():
        path = folder / "chapters" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        moment = time.time() - 3600 * hours
        os.utime(path, (moment, moment))


def age(folder, hours):
    """Set the times of what make wrote."""
    moment = time.time() - 3600 * hours
    for path in (folder / "dist").rglob("*"):
        os.utime(path, (moment, moment), follow_symlinks=False)


def expected_files(chapters):
    texts = [chapters[name] for name in sorted(chapters)]
    titles = [text.splitlines()[0] for text in texts]
    return {
        "handbook.txt": "".join(f"{text}\n" for text in texts),
        "index.txt": "".join(f"{number}. {title}\n" for number, title in enumerate(titles, 1)),
    }


def right_files(folder, chapters):
    """Return the names of the files that are right."""
    right = []
    for name, text in expected_files(chapters).items():
        path = folder / "dist" / name
        try:
            is_small = stat.S_ISREG(path.lstat().st_mode) and path.stat().st_size <= MAX_BYTES
            if is_small and path.read_bytes() == text.encode():
                right.append(name)
        except OSError:
            continue
    return right


def score(folder):
    parts = dict.fromkeys(("handbook", "index", "changes", "repeat"), 0.0)
    write_chapters(folder, CHAPTERS, 9)
    for path in (folder / "Makefile", *(folder / "scripts").glob("*")):
        moment = time.time() - 3600 * 10
        os.utime(path, (moment, moment))
    print(run_command(["make"], folder)[1][-500:])
    right = right_files(folder, CHAPTERS)
    parts["handbook"] = float("handbook.txt" in right)
    parts["index"] = float("index.txt" in right)
    age(folder, 8)
    write_chapters(folder, CHANGED, 7)
    run_command(["make"], folder)
    if len(right) == 2 and len(right_files(folder, CHAPTERS | CHANGED)) == 2:
        parts["changes"] = 1.0
        before = [(folder / "dist" / name).stat().st_mtime_ns for name in expected_files(CHAPTERS)]
        code, printed = run_command(["make"], folder)
        after = [(folder / "dist" / name).stat().st_mtime_ns for name in expected_files(CHAPTERS)]
        is_idle = code == 0 and before == after and "Nothing to be done" in printed
        parts["repeat"] = float(is_idle)
    return parts


def write_reward(values):
    """Write the reward in place of anything that a program left there."""
    for path in REWARDS.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    (REWARDS / "reward.json").write_text(json.dumps(values))


folder = Path(tempfile.mkdtemp())
try:
    copy_files(APP / "Makefile", folder)
    copy_files(APP / "scripts", folder)
    parts = score(folder)
except OSError as error:
    print(f"the build cannot be judged: {error}")
    parts = {"handbook": 0.0}
print(parts)
weights = {"handbook": 0.3, "index": 0.3, "changes": 0.2, "repeat": 0.2}
reward = round(sum(weights[name] * value for name, value in parts.items()), 6)
write_reward({"reward": reward, **parts})
