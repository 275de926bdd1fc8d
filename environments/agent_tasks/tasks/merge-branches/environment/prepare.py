"""Make /app/repo with two branches that change the same lines."""

import subprocess
from pathlib import Path

REPO = Path("/app/repo")
SETTINGS = """\
[server]
host = 127.0.0.1
port = 8000
timeout = {timeout}
retries = {retries}
workers = {workers}
"""
CONVERT = '''\
"""Convert between units of length."""

FACTORS = {
    "m": 1.0,
    "km": 1000.0,
@FACTORS@}


def convert(value, source, target):
    """Return a length in another unit."""
@CHECK@    return value * FACTORS[source] / FACTORS[target]
'''


def source(factors="", check=""):
    return CONVERT.replace("@FACTORS@", factors).replace("@CHECK@", check)


CHECK = (
    '    if value < 0:\n        raise ValueError(f"expected a length of at least 0, got {value}")\n'
)
LOGS = "\n[logs]\nlevel = info\n"
CACHE = "\n[cache]\nsize = 512\n"
BASE = {
    "settings.ini": SETTINGS.format(timeout=30, retries=1, workers=2),
    "units.py": source(),
    "README.md": "Converts lengths.\n",
}
ON_MAIN = [
    (
        "Wait longer and log",
        {"settings.ini": SETTINGS.format(timeout=45, retries=1, workers=2) + LOGS},
    ),
    (
        "Add inches and reject negative lengths",
        {"units.py": source('    "inch": 0.0254,\n', CHECK)},
    ),
]
ON_FEATURE = [
    (
        "Try again and cache",
        {"settings.ini": SETTINGS.format(timeout=30, retries=5, workers=8) + CACHE},
    ),
    (
        "Add miles and feet",
        {
            "units.py": source('    "mile": 1609.344,\n    "foot": 0.3048,\n'),
            "README.md": "Converts lengths, miles and feet included.\n",
        },
    ),
]


def git(*words, day=1):
    date = f"2024-04-{day:02}T09:00:00+0000"
    names = {
        f"GIT_{who}_{key}": value
        for who in ("AUTHOR", "COMMITTER")
        for key, value in (("NAME", "Robin"), ("EMAIL", "robin@example.com"), ("DATE", date))
    }
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/nonexistent", **names}
    subprocess.run(["git", "-C", str(REPO), *words], check=True, env=env)


def commit(subject, files, day):
    for name, text in files.items():
        (REPO / name).write_text(text)
    git("add", "-A", day=day)
    git("commit", "-q", "-m", subject, day=day)


REPO.mkdir(parents=True)
git("init", "-q", "-b", "main")
git("config", "user.name", "Robin")
git("config", "user.email", "robin@example.com")
commit("Start", BASE, 1)
git("checkout", "-q", "-b", "feature")
for day, (subject, files) in enumerate(ON_FEATURE, 2):
    commit(subject, files, day)
git("checkout", "-q", "main")
for day, (subject, files) in enumerate(ON_MAIN, 5):
    commit(subject, files, day)
