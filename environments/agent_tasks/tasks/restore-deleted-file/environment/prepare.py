"""Make /app/repo, whose history has a file that a later commit deleted."""

import subprocess
from pathlib import Path

REPO = Path("/app/repo")
PLAN = "# Plan for the move\n\n1. Measure the doors of the new rooms.\n2. Order the boxes.\n"
COMMITS = [
    ("Start the notes", {"README.md": "Notes of the office.\n"}),
    ("Write a plan for the move", {"docs/plan.md": PLAN}),
    ("List the rooms", {"docs/rooms.md": "- 12: two desks\n- 14: keys, printer\n"}),
    ("Add the movers", {"docs/plan.md": f"{PLAN}3. Call the movers on 555-0134.\n"}),
    ("Describe the folder", {"README.md": "Notes of the office.\n\n`docs/` has one page each.\n"}),
    (
        "Ask for the keys earlier",
        {
            "docs/plan.md": f"{PLAN}3. Call the movers on 555-0134.\n4. Fetch the keys on 3 June, "
            "before noon.\n",
        },
    ),
    ("Tidy up", {"docs/plan.md": None, "docs/rooms.md": "- 12: two desks\n- 14: printer\n"}),
    ("Add the phone list", {"docs/phones.md": "front desk 10\nkitchen 11\n"}),
]


def git(*words, date="2024-05-01T12:00:00+0000"):
    names = {
        f"GIT_{who}_{key}": value
        for who in ("AUTHOR", "COMMITTER")
        for key, value in (("NAME", "Robin"), ("EMAIL", "robin@example.com"), ("DATE", date))
    }
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/nonexistent", **names}
    subprocess.run(["git", "-C", str(REPO), *words], check=True, env=env)


REPO.mkdir(parents=True)
git("init", "-q", "-b", "main")
git("config", "user.name", "Robin")
git("config", "user.email", "robin@example.com")
for day, (subject, files) in enumerate(COMMITS, 1):
    for name, text in files.items():
        path = REPO / name
        path.parent.mkdir(exist_ok=True)
        if text is None:
            path.unlink()
        else:
            path.write_text(text)
    git("add", "-A")
    git("commit", "-q", "-m", subject, date=f"2024-05-{day:02}T12:00:00+0000")
