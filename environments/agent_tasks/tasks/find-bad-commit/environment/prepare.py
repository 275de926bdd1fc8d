"""Make /app/repo: 60 commits, one of which breaks the calculation of fares."""

import random
import subprocess
from pathlib import Path

REPO = Path("/app/repo")
NUM_COMMITS, BAD = 60, 37
UNTESTABLE = {21, 34, 35, 36, 44}
"""Commits whose program does not start."""
FARES = '''\
"""Fares of a tram line, in cents."""

ZONE_CENTS = 120
DAY_CENTS = 780
# revision {number}


def fare(zones, riders=1):
    """Return the cheaper of single tickets and of a day ticket for all riders."""
    single = ZONE_CENTS * zones * riders
    day = DAY_CENTS * {tickets}
    return min(single, day)
'''
CHECK = '''\
"""Exit with 0 if the fares are right, and with 1 if they are wrong."""

import sys

sys.dont_write_bytecode = True

from fares import fare

EXPECTED = {(1, 1): 120, (3, 2): 720, (5, 3): 780, (9, 5): 1560, (12, 6): 1560}
wrong = [key for key, cents in EXPECTED.items() if fare(*key) != cents]
sys.exit(1 if wrong else 0)
'''
SUBJECTS = [
    "Tidy the formatting", "Note a stop", "Update the list of stops", "Correct a name",
    "Describe the line", "Simplify", "Follow the new timetable", "Rewrite a sentence",
]  # fmt: skip


def program(number):
    tickets = "-(-riders // 3)" if number < BAD else "(riders // 3 + 1)"
    text = FARES.format(number=number // 5, tickets=tickets)
    return text.replace("):\n", ")\n", 1) if number in UNTESTABLE else text


def stream():
    """Return the history, as `git fast-import` reads it."""
    chance = random.Random(3)
    lines = ["reset refs/heads/main"]
    for number in range(1, NUM_COMMITS + 1):
        subject = f"{chance.choice(SUBJECTS)}\n"
        date = 1_700_000_000 + 3_600 * number
        stops = "".join(f"stop {n}\n" for n in range(1, number + 1))
        lines += ["commit refs/heads/main", f"committer Robin <robin@example.com> {date} +0000"]
        lines += [f"data {len(subject)}", subject]
        files = {"fares.py": program(number), "stops.txt": stops}
        for name, text in (files | {"selftest.py": CHECK}).items():
            lines += [f"M 100644 inline {name}", f"data {len(text)}", text]
    return "\n".join(lines) + "\n"


REPO.mkdir(parents=True)
env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/nonexistent"}
for words, stdin in (
    (["init", "-q", "-b", "main"], ""),
    (["fast-import", "--quiet"], stream()),
    (["reset", "-q", "--hard", "main"], ""),
):
    subprocess.run(["git", "-C", str(REPO), *words], input=stdin.encode(), check=True, env=env)
