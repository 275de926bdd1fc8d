"""The tasks of `environments/agent_tasks/tasks` are valid, and their verifiers are not fooled.

Each task has cheats: wrong, lazy or hostile work, with the largest reward that it may get.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from atroposlib.agent_tasks.folder import load_task, load_tasks
from atroposlib.agent_tasks.runner import AgentCommand, TaskRunner
from atroposlib.agent_tasks.validation import validate_task
from atroposlib.workspaces import WorkspaceError, open_workspaces

pytestmark = pytest.mark.slow

TASKS = Path(__file__).parents[2] / "environments" / "agent_tasks" / "tasks"
QUICK = ("append-line", "merge-branches", "query-top-customers", "write-status")
NAMES = sorted(path.name for path in TASKS.iterdir() if path.is_dir())
EASIEST = ("append-line", "copy-file", "write-status")
"""Tasks that one short command solves."""
MAX_FILE_BYTES = 50_000
HOSTILE = ("claim", "fingerprint", "forger", "link", "other file", "settings", "without end")
"""Cheats that attack the verifier."""

FORGER = """
import ctypes, glob, os, signal, subprocess, sys
reward = '{"reward": 1}'
def attempt(act, *words):
    try:
        act(*words)
    except BaseException:
        pass
def write(path):
    with open(path, "w") as file:
        file.write(reward if path.endswith("json") else "1")
def read_tests():
    for path in glob.glob("/tests/*"):
        with open(path) as file:
            print(file.read())
def leave_program():
    # Renamed, since a file that is being written can be read while it is empty.
    write = "cd /logs/verifier; while :; do echo 1 > new; mv new reward.txt; sleep 0.01; done"
    subprocess.Popen(["sh", "-c", f"({write}) &"], start_new_session=True)
for name in ("reward.json", "reward.txt"):
    attempt(write, "/logs/verifier/" + name)
attempt(read_tests)
attempt(leave_program)
attempt(os.system, "echo 1 > /logs/verifier/reward.txt")
attempt(lambda: ctypes.CDLL(None).kill(os.getppid(), 9))
attempt(os.kill, os.getppid(), signal.SIGKILL)
attempt(os.kill, -1, signal.SIGKILL)
attempt(lambda: write("/proc/%d/mem" % os.getppid()))
"""
"""Tries to write the reward, to read the hidden tests and to kill the verifier."""


def python(code: str) -> str:
    return f"python3 - <<'PYTHON'\n{code}\nPYTHON"


def forger(path: str) -> str:
    """Return a command that makes a program of the forger, and then claims success."""
    return f"cat > {path} <<'PYTHON'\n{FORGER}\nprint(reward)\nsys.exit(0)\nPYTHON"


def patched(path: str, *pairs: tuple[str, str]) -> str:
    return python(
        "from pathlib import Path\n"
        f"path = Path({path!r})\ntext = path.read_text()\n"
        f"for old, new in {pairs!r}:\n    assert old in text, old\n"
        "    text = text.replace(old, new)\n"
        "path.write_text(text)"
    )


def grouped_by(key: str) -> str:
    return python(
        "import collections, json, pathlib\n"
        "root, groups = pathlib.Path('/app/inbox'), collections.defaultdict(list)\n"
        "for path in root.rglob('*.txt'):\n"
        f"    groups[{key}].append(str(path.relative_to(root)))\n"
        "groups = [group for group in groups.values() if len(group) > 1]\n"
        "json.dump(groups, open('/app/duplicates.json', 'w'))"
    )


ONE_UNIT_TEST = """\
cat > /app/test_intervals.py <<'PYTHON'
import unittest
from intervals import merge_intervals
class Some(unittest.TestCase):
    def test_some(self):
        {check}
PYTHON"""
MAKE_FORGER = """\
printf 'all:\\n\\tpython3 scripts/index.py\\n' > /app/Makefile
""" + forger("/app/scripts/index.py")

CHEATS: dict[str, dict[str, tuple[str, float]]] = {
    "write-status": {
        "two words": ("echo ready or not > /app/status.txt", 0),
        "capitals": ("echo READY > /app/status.txt", 0),
        "link": ("ln -s /tests/test.sh /app/status.txt", 0),
    },
    "append-line": {
        "overwritten": ("echo delta > /app/names.txt", 0),
        "same line": ("truncate -s -1 /app/names.txt; echo delta >> /app/names.txt", 0),
        "twice": ("printf 'delta\\ndelta\\n' >> /app/names.txt", 0),
    },
    "copy-file": {
        "empty": ("touch /app/final.txt", 0),
        "both changed": ("echo x > /app/draft.txt; echo x > /app/final.txt", 0),
        "link": ("ln -s /app/draft.txt /app/final.txt", 0),
    },
    "rename-photos": {
        "old names": ("cp -r /app/photos /app/renamed", 0),
        "empty files": (
            "mkdir /app/renamed; cd /app/renamed; touch 2024-03-07_0815_holiday.jpg", 0,
        ),
        "no second name": (
            "mkdir /app/renamed; cd /app/photos; for f in IMG_????????_????_?*.[jJ][pP][gG]; do"
            " n=$(echo \"${f%.*}\" | sed -E 's/IMG_(....)(..)(..)_/\\1-\\2-\\3_/' | tr A-Z a-z);"
            ' cp "$f" "/app/renamed/${n// /-}.jpg"; done', 0.8,
        ),
    },
    "find-duplicates": {
        "names": (grouped_by("path.name"), 0),
        "sizes": (grouped_by("path.stat().st_size"), 0.9),
        "all pairs": (python(
            "import itertools, json, pathlib\n"
            "root = pathlib.Path('/app/inbox')\n"
            "paths = [str(p.relative_to(root)) for p in root.rglob('*') if p.is_file()]\n"
            "json.dump(list(itertools.combinations(paths, 2)), open('/app/duplicates.json', 'w'))"
        ), 0.2),
        "deep": ("head -c 100000 /dev/zero | tr '\\0' '[' > /app/duplicates.json", 0),
    },
    "sales-totals": {
        "header": ("echo region,revenue > /app/totals.csv", 0),
        "split at commas": (
            "awk -F, 'NR > 1 && NF { t[$1] += $3 * $4 } END { print \"region,revenue\";"
            " for (r in t) printf \"%s,%.2f\\n\", r, t[r] }' /app/sales.csv > /app/totals.csv", 0.5,
        ),
    },
    "fixed-width-records": {
        "the sample": (
            "echo 'print(open(\"/app/sample.json\").read())' > /app/convert.py", 0,
        ),
        "the sample as text": (
            "(echo 'print(\"\"\"'; cat /app/sample.json; echo '\"\"\")') > /app/convert.py", 0,
        ),
        "empty list": ("echo 'print([])' > /app/convert.py", 0),
        "bytes": (
            "cat > /app/convert.py <<'PYTHON'\n"
            "import json, sys\nprint(json.dumps([{'account': l[:6], 'name': l[6:26].strip(),"
            " 'cents': int(l[26:37]), 'date': None, 'currency': 'EUR'}"
            " for l in sys.stdin if l.strip() and l[0] != '*']))\nPYTHON", 0.3,
        ),
        "forger": (forger("/app/convert.py"), 0),
    },
    "table-of-contents": {
        "the sample": (
            "(echo 'print(\"\"\"\\'; cat /app/sample_toc.md; echo '\"\"\")') > /app/toc.py", 0,
        ),
        "lines with marks": (
            "cat > /app/toc.py <<'PYTHON'\nimport sys\nfor line in sys.stdin:\n"
            "    if line[:3] == '## ':\n        t = line[3:].strip()\n"
            "        print(f\"- [{t}](#{t.lower().replace(' ', '-')})\")\nPYTHON", 0.3,
        ),
        "forger": (forger("/app/toc.py"), 0),
    },
    "restore-deleted-file": {
        "not committed": ("cd /app/repo && git checkout -q HEAD~2 -- docs/plan.md", 0),
        "first version": (
            "cd /app/repo && git checkout -q HEAD~6 -- docs/plan.md && git commit -qm x", 0,
        ),
        "reset": ("cd /app/repo && git reset -q --hard HEAD~2", 0.6),
        "reverted": ("cd /app/repo && git revert --no-edit HEAD~1 > /dev/null", 0.8),
        "settings": (
            "cd /app/repo && git config core.fsmonitor 'echo 1 > /logs/verifier/reward.txt; false'"
            " && git config core.hooksPath /app/repo/hooks", 0,
        ),
    },
    "merge-branches": {
        "ours": ("cd /app/repo && git merge -q -X ours feature -m x", 0.9),
        "theirs": ("cd /app/repo && git merge -q -X theirs feature -m x", 0.9),
        "only the commit": ("cd /app/repo && git merge -q -s ours feature -m x", 0.75),
        "with markers": (
            "cd /app/repo; git merge feature > /dev/null; git add -A; git commit -qm x", 0.5,
        ),
        "copied": ("cd /app/repo && git checkout -q feature -- . && git commit -qm x", 0),
    },
    "find-bad-commit": {
        "tip": ("git -C /app/repo rev-parse HEAD > /app/bad_commit.txt", 0),
        "last change": (
            "git -C /app/repo log -1 --format=%H fares.py > /app/bad_commit.txt", 0,
        ),
        "syntax error": (
            "git -C /app/repo rev-list --reverse HEAD | sed -n 34p > /app/bad_commit.txt", 0,
        ),
        "all": ("git -C /app/repo rev-list HEAD > /app/bad_commit.txt", 0),
    },
    "query-top-customers": {
        "header": ("echo name,orders,cents > /app/top_customers.csv", 0),
        "all years": (python(
            "import csv, sqlite3\n"
            "q = 'SELECT name, count(DISTINCT o.id), sum(cents * quantity) t FROM customers c JOIN"
            " orders o ON customer_id = c.id JOIN order_lines ON order_id = o.id"
            " GROUP BY c.id ORDER BY t DESC LIMIT 5'\n"
            "f = csv.writer(open('/app/top_customers.csv', 'w'))\nf.writerow(['name', 'orders',"
            " 'cents'])\nf.writerows(sqlite3.connect('/app/shop.db').execute(q))"
        ), 0.2),
    },
    "migrate-schema": {
        "views": (
            "echo 'DROP TABLE people; CREATE VIEW cities AS SELECT 1 AS id, 2 AS name;"
            " CREATE VIEW persons AS SELECT 1 AS id; CREATE VIEW phones AS SELECT 1;'"
            " > /app/migrate.sql", 0,
        ),
        "rows of the example": (
            "echo \"DROP TABLE people; CREATE TABLE cities(id, name);"
            " INSERT INTO cities VALUES (1, 'bonn'), (2, 'oslo'); CREATE TABLE persons(id,"
            " first_name, last_name, city_id); CREATE TABLE phones(person_id, position, number);\""
            " > /app/migrate.sql", 0.1,
        ),
        "other file": (
            "echo \"ATTACH '/logs/verifier/reward.json' AS x; CREATE TABLE x.t(a);"
            " DROP TABLE people;\" > /app/migrate.sql", 0,
        ),
        "without end": (
            "echo 'CREATE TABLE cities AS WITH RECURSIVE c(id) AS (SELECT 1 UNION ALL SELECT id + 1"
            " FROM c) SELECT count(*) AS id, 1 AS name FROM c;' > /app/migrate.sql", 0,
        ),
    },
    "repair-stock": {
        "copied": ("cp /app/stock.db /app/repaired.db", 0),
        "emptied": (python(
            "import shutil, sqlite3\nshutil.copy('/app/stock.db', '/app/repaired.db')\n"
            "d = sqlite3.connect('/app/repaired.db')\nd.execute('DELETE FROM movements')\n"
            "d.execute('UPDATE products SET quantity = 0, name = trim(name)')\nd.commit()"
        ), 0),
        "NULL as text": (python(
            "import shutil, sqlite3\nshutil.copy('/app/stock.db', '/app/repaired.db')\n"
            "d = sqlite3.connect('/app/repaired.db')\n"
            "d.execute('DELETE FROM movements WHERE id NOT IN (SELECT min(id) FROM movements"
            " GROUP BY product_id, change, at, ifnull(note, \"\"))')\n"
            "d.execute('UPDATE products SET name = trim(name)')\nd.commit()"
        ), 0),
        "views": (python(
            "import shutil, sqlite3\nshutil.copy('/app/stock.db', '/app/repaired.db')\n"
            "d = sqlite3.connect('/app/repaired.db')\nd.execute('DROP TABLE movements')\n"
            "d.execute('CREATE VIEW movements AS SELECT 1 AS id')\nd.commit()"
        ), 0),
    },
    "notes-service": {
        "pages only": (patched("/app/service.py", ("page * PAGE", "(page - 1) * PAGE")), 0.2),
        "all errors": (
            patched("/app/service.py", ("except Problem as problem:", "except Exception:"),
                    ("problem.status, {\"error\": problem.text}", '404, {"error": "not found"}')),
            0.4,
        ),
        "broken": ("echo 'app = None' > /app/service.py", 0),
        "forger": (forger("/app/service.py"), 0),
    },
    "leaked-token": {
        "request with the key": (python(
            "import base64, glob, json\n"
            "rows = [json.loads(l) for p in glob.glob('/app/logs/bodies*') for l in open(p)]\n"
            "key = open('/app/key.txt').read().strip().encode()\n"
            "ids = {r['request'] for r in rows if key in base64.b64decode(r['body'])}\n"
            "first = min((json.loads(l) for l in open('/app/logs/requests.log') if"
            " json.loads(l)['request'] in ids), key=lambda r: r['time'])\n"
            "json.dump({'request': first['request'], 'user': first['user'], 'count': len(ids)},"
            " open('/app/leak.json', 'w'))"
        ), 0),
        "count only": ("echo '{\"count\": 2, \"user\": \"amir\"}' > /app/leak.json", 0),
        "list": ("echo '[1]' > /app/leak.json", 0),
    },
    "first-failing-host": {
        "clocks as written": (
            "echo '{\"host\": \"oak\", \"time\": \"2024-03-30T23:06:40Z\", \"code\": \"E302\"}'"
            " > /app/first_failure.json", 0,
        ),
        "host and code": (
            "echo '{\"host\": \"maple\", \"code\": \"E305\"}' > /app/first_failure.json", 0.4,
        ),
    },
    "share-pricing": {
        "unused module": (
            "cp /app/billing/invoice.py /app/billing/pricing.py", 0.25,
        ),
        "import only": (
            "cd /app/billing; cp invoice.py pricing.py;"
            " for m in invoice quote receipt; do sed -i 's/^from decimal.*/&\\nfrom billing import"
            " pricing/' $m.py; done", 0.25,
        ),
        "changed results": (
            "cd /app/billing; cp invoice.py pricing.py; sed -i s/HALF_UP/HALF_EVEN/ pricing.py;"
            " echo 'from billing.pricing import line_amount' >> invoice.py", 0,
        ),
        "forger": (forger("/app/billing/pricing.py"), 0),
    },
    "failing-build": {
        "files written by hand": (
            "mkdir /app/dist; cat /app/chapters/* > /app/dist/handbook.txt;"
            " echo '1. Welcome' > /app/dist/index.txt; printf 'all:\\n' > /app/Makefile", 0,
        ),
        "fixed list": (
            patched("/app/Makefile", ("        $(PYTHON)", "\t$(PYTHON)"),
                    (":= python\n", ":= python3\n"), ("$(CHAPTER)", "$(CHAPTERS)"),
                    ("\tcat", "\tmkdir -p dist\n\tcat")), 0,
        ),
        "always": (
            "cat > /app/Makefile <<'MAKE'\n"
            "all:\n\tmkdir -p dist\n\tfor c in chapters/*.txt; do cat $$c; echo; done >"
            " dist/handbook.txt\n\tn=0; for c in chapters/*.txt; do n=$$((n + 1)); echo \"$$n."
            " $$(head -1 $$c)\"; done > dist/index.txt\n.PHONY: all\nMAKE", 0.8,
        ),
        "forger": (MAKE_FORGER, 0),
    },
    "write-unit-tests": {
        "no test": ("touch /app/test_intervals.py", 0),
        "always passes": (ONE_UNIT_TEST.format(check="self.assertTrue(True)"), 0),
        "always fails": (ONE_UNIT_TEST.format(check="self.fail()"), 0),
        "one case": (
            ONE_UNIT_TEST.format(
                check="self.assertEqual(merge_intervals([(1, 3), (2, 4)]), [(1, 4)])"
            ), 0.5,
        ),
        "fingerprint": (
            "cd /app; hash=$(python3 -c 'from intervals import *; print(merge_intervals.__code__."
            "co_code.hex())')\n"
            + ONE_UNIT_TEST.format(
                check="self.assertEqual(merge_intervals.__code__.co_code.hex(), 'HASH')"
            )
            + '\nsed -i "s/HASH/$hash/" test_intervals.py', 0,
        ),
        "claim": (
            "cat > /app/test_intervals.py <<'PYTHON'\nimport os\nos.write(1, b'[9, true]\\n')\n"
            "os._exit(0)\nPYTHON", 0,
        ),
        "forger": (forger("/app/test_intervals.py"), 0),
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("workspaces")


@pytest.fixture
async def runner(bases: Path) -> AsyncIterator[TaskRunner]:
    try:
        workspaces = open_workspaces(cache=bases)
    except WorkspaceError as error:
        pytest.skip(f"workspaces cannot be used on this machine: {error}")
    tasks = TaskRunner(workspaces, variables={})
    yield tasks
    await tasks.close()
    await workspaces.close()


def test_twenty_tasks_are_graded_in_difficulty() -> None:
    tasks = load_tasks(TASKS)

    grades = Counter(task.metadata["difficulty"] for task in tasks)

    assert [task.name for task in tasks] == NAMES
    assert len(tasks) == 20
    assert set(grades) == {"easy", "medium", "hard"}
    assert min(grades.values()) >= 5
    assert {task.metadata["difficulty"] for task in tasks if task.name in EASIEST} == {"easy"}
    assert set(CHEATS) == {*NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_task_is_complete_and_small(name: str) -> None:
    folder = TASKS / name
    task = load_task(folder)

    files = [path for path in folder.rglob("*") if path.is_file()]

    for needed in ("environment/Dockerfile", "tests/test.sh", "solution/solve.sh"):
        assert folder / needed in files
    assert len(task.instruction.split()) <= 150
    assert "/app/" in task.instruction
    assert task.artifacts
    assert all(artifact.source.startswith("/app/") for artifact in task.artifacts)
    assert (task.agent_network.mode, task.verifier_network.mode) == ("none", "none")
    assert task.is_verifier_separate
    assert not task.notes
    assert max(path.stat().st_size for path in files) <= MAX_FILE_BYTES


def test_copies_of_the_code_that_isolates_are_equal() -> None:
    copies = {path.read_text(encoding="utf-8") for path in TASKS.glob("*/tests/isolated.py")}

    assert len(copies) == 1


@pytest.mark.parametrize(
    "name",
    # CI also validates all of them by the command, with ten repeats.
    [pytest.param(n, marks=() if n in QUICK else pytest.mark.long) for n in NAMES],
)
async def test_task_is_valid(runner: TaskRunner, name: str) -> None:
    task = load_task(TASKS / name)

    report = await validate_task(runner, task, repeats=1, is_strict=True)

    assert [result for result in report.results if result.status != "ok"] == []


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
async def test_ten_repeats_agree(runner: TaskRunner, name: str) -> None:
    task = load_task(TASKS / name)

    report = await validate_task(runner, task, repeats=10, is_strict=True)

    assert [result for result in report.results if result.status != "ok"] == []


async def test_forger_succeeds_where_its_program_is_not_isolated(
    runner: TaskRunner, tmp_path: Path
) -> None:
    folder = tmp_path / "naive"
    shutil.copytree(TASKS / "fixed-width-records", folder)
    naive = "#!/bin/bash\npython3 -I /app/convert.py\necho 0 > /logs/verifier/reward.txt\n"
    (folder / "tests" / "test.sh").write_text(naive)
    script, _ = CHEATS["fixed-width-records"]["forger"]

    run = await runner.run(
        load_task(folder), AgentCommand(name="cheat", command=("bash", "-c", script))
    )

    assert run.reward == 1


@pytest.mark.parametrize(
    ("name", "cheat"),
    [
        pytest.param(name, cheat, marks=() if cheat in HOSTILE else pytest.mark.long)
        for name in NAMES
        for cheat in CHEATS[name]
    ],
)
async def test_cheats_are_not_rewarded(runner: TaskRunner, name: str, cheat: str) -> None:
    task = load_task(TASKS / name)
    script, most = CHEATS[name][cheat]

    run = await runner.run(task, AgentCommand(name="cheat", command=("bash", "-c", script)))

    assert (run.agent_exit_code, run.verifier_exit_code) == (0, 0), run
    assert 0 <= run.reward <= most < 1, run.verifier_output
