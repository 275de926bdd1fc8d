"""Run /app/toc.py on pages that the agent has not seen."""

import json
import stat
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from isolated import run_script

PROGRAM = Path("/app/toc.py")
MAX_BYTES = 100_000

CASES = {
    "levels": (
        "# A\n## B\n### C\n#### D\n##### E\n###### F\n####### G\n## H\n",
        "- [B](#b)\n  - [C](#c)\n- [H](#h)",
    ),
    "no space after the marks": ("##No\n## Yes\n###No\n##\tTab\n", "- [Yes](#yes)\n- [Tab](#tab)"),
    "fence of backticks": (
        "## One\n```python\n## Two\n~~~\n```\n## Three\n", "- [One](#one)\n- [Three](#three)",
    ),
    "fence of tildes": (
        "## One\n~~~~\n~~~\n## Two\n```\n~~~~\n## Three\n", "- [One](#one)\n- [Three](#three)",
    ),
    "longer fence, with text in the block": (
        "````\n```\n## a\n```` text\n## b\n`````  \n## c\n", "- [c](#c)",
    ),
    "fence without end": ("## One\n   ```\n## Two\n", "- [One](#one)"),
    "closing marks": (
        "## Install ##\n## C#\n## Issue #\n## a ## b ###   \n",
        "- [Install](#install)\n- [C#](#c)\n- [Issue](#issue)\n- [a ## b](#a--b)",
    ),
    "indented": (
        "   ## Three\n    ## Four\n ### One  \n", "- [Three](#three)\n  - [One](#one)",
    ),
    "repeated anchors": (
        "# Notes\n## Notes\n### notes\n## Other\n## Notes!\n",
        "- [Notes](#notes-1)\n  - [notes](#notes-2)\n- [Other](#other)\n- [Notes!](#notes-3)",
    ),
    "signs": (
        "## What's new in 2.0?\n## `run_all` -- fast\n## Q & A\n",
        "- [What's new in 2.0?](#whats-new-in-20)\n- [`run_all` -- fast](#run_all----fast)\n"
        "- [Q & A](#q--a)",
    ),
    "letters of other scripts": (
        "## Über uns\n### 日本語 (beta)\n",
        "- [Über uns](#über-uns)\n  - [日本語 (beta)](#日本語-beta)",
    ),
    "deeper levels count for anchors": (
        "#### Setup\n## Setup\n###### Setup\n### Setup\n",
        "- [Setup](#setup-1)\n  - [Setup](#setup-3)",
    ),
}  # fmt: skip


def is_right(source, page, expected):
    printed = run_script(source, page)
    if printed is None:
        return False
    return [line.rstrip() for line in printed.rstrip().split("\n")] == expected.split("\n")


def read_program():
    try:
        if stat.S_ISREG(PROGRAM.lstat().st_mode) and PROGRAM.stat().st_size <= MAX_BYTES:
            return PROGRAM.read_text("utf-8")
    except (OSError, ValueError) as error:
        print(f"{PROGRAM} cannot be read: {error}")
    return None


program = read_program()
passed = [name for name, case in CASES.items() if program is not None and is_right(program, *case)]
print(f"passed: {', '.join(passed) or 'no case'}")
Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": len(passed) / len(CASES)}))
