"""Checks of tasks: each fault is found by the check that is for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from atroposlib.agent_tasks.folder import load_task, load_tasks
from atroposlib.agent_tasks.runner import TaskRunner
from atroposlib.agent_tasks.swe import SweSettings, write_swe_task
from atroposlib.agent_tasks.validation import (
    CHECKS,
    TaskReport,
    _search_script,
    validate_task,
    validate_tasks,
)
from tests.agent_tasks.task_folders import ADDITION, write_task
from tests.agent_tasks.test_swe import make_repository

pytestmark = pytest.mark.slow

TEST = ADDITION["tests/test.sh"]
PARTS = '{"reward": 0.5, "style": 1}'


def faults(report: TaskReport) -> dict[str, str]:
    return {result.name: result.reason for result in report.results if result.status != "ok"}


async def test_good_task_is_valid(runner: TaskRunner, tmp_path: Path) -> None:
    task = load_task(write_task(tmp_path / "good"))

    report = await validate_task(runner, task, repeats=3, is_strict=True)

    assert report.is_valid
    assert [(result.name, result.status) for result in report.results] == [
        (name, "ok") for name in CHECKS
    ]


@pytest.mark.parametrize(
    ("files", "check", "said"),
    [
        ({"environment/Dockerfile": "FROM x\nRUN exit 3\n"}, "builds", "Dockerfile:2"),
        ({"solution/solve.sh": "echo 1 > sum.txt\n"}, "oracle", "solution scores 0, expected 1"),
        ({"solution/solve.sh": None}, "oracle", "has no"),
        (
            {"solution/solve.sh": "echo 42 > sum.txt; echo no awk >&2; exit 1\n"},
            "oracle",
            "solution/solve.sh ended with exit code 1; solve.sh printed: no awk",
        ),
        (
            {"task.toml": f'artifacts = ["/app/total.txt"]\n{ADDITION["task.toml"]}'},
            "oracle",
            "scores 0, expected 1; it did not write /app/total.txt, listed in `artifacts`",
        ),
        (
            {"tests/test.sh": f"echo '{PARTS}' > /logs/verifier/reward.json\n"},
            "oracle",
            "the solution scores 0.5, style 1, expected 1",
        ),
        (
            {"tests/test.sh": "echo looked; echo 1 > /logs/verifier/reward.txt\n"},
            "nothing",
            "doing nothing scores 1, expected 0; the verifier printed: looked",
        ),
        ({"tests/test.sh": "echo x\n"}, "nothing", "verifier failed: there is no"),
        (
            {"tests/test.sh": TEST.replace("reward:-0", "reward:-0.$RANDOM$RANDOM")},
            "repeats",
            "run 1 of the verifier gives reward 0.",
        ),
        ({"environment/copy": TEST}, "hidden", "the agent can read tests/test.sh as /app/copy"),
        (
            {"environment/x/test.py": ADDITION["solution/solve.sh"]},
            "hidden",
            "solution/solve.sh as /app/x/test.py",
        ),
        (
            {"environment/Dockerfile": "FROM x\nWORKDIR /app\nRUN touch test.sh\nCOPY *.txt .\n"},
            "hidden",
            "the agent can read /app/test.sh",
        ),
    ],
)  # fmt: skip
async def test_fault_is_found(
    runner: TaskRunner, tmp_path: Path, files: dict[str, str | None], check: str, said: str
) -> None:
    task = load_task(write_task(tmp_path / "bad", files))

    report = await validate_task(runner, task, repeats=3)

    assert not report.is_valid
    assert said in faults(report)[check]


@pytest.mark.parametrize(
    ("files", "not_run"),
    [
        ({"tests/test.sh": "echo abc > /logs/verifier/reward.txt\n"}, {"repeats", "forgery"}),
        ({"tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n"}, {"forgery"}),
        ({"solution/solve.sh": None}, {"repeats"}),
    ],
)
async def test_check_without_anything_to_compare_is_not_run(
    runner: TaskRunner, tmp_path: Path, files: dict[str, str | None], not_run: set[str]
) -> None:
    task = load_task(write_task(tmp_path / "bad", files))

    report = await validate_task(runner, task, repeats=2)

    assert {name for name in CHECKS if report.status(name) == "not run"} == not_run
    assert not report.is_valid


async def test_input_of_both_sides_may_be_seen(runner: TaskRunner, tmp_path: Path) -> None:
    data = "data of at least sixteen bytes\n"
    files = {"environment/input.txt": data, "tests/input.txt": data}
    task = load_task(write_task(tmp_path / "t", files))

    report = await validate_task(runner, task, repeats=1)

    assert report.status("hidden") == "ok"


@pytest.mark.parametrize("position", [0, 59_999])
def test_one_of_very_many_hidden_names_is_found(position: int, tmp_path: Path) -> None:
    names = [f"expected_case_{i:06d}.json" for i in range(60_000)]
    (tmp_path / names[position]).write_text("{}")
    script = _search_script(names, []).replace("find / ", f"find {tmp_path} ")

    done = subprocess.run(["sh", "-s"], input=script, capture_output=True, text=True, check=True)

    assert f"found {tmp_path / names[position]}\n" in done.stdout
    assert done.stdout.endswith("searched\n")


async def test_link_to_a_missing_file_is_not_read(runner: TaskRunner, tmp_path: Path) -> None:
    folder = write_task(tmp_path / "t")
    for part in ("environment", "tests"):
        (folder / part / "link").symlink_to("missing")

    report = await validate_task(runner, load_task(folder), repeats=1)

    assert report.is_valid, faults(report)


@pytest.mark.long
@pytest.mark.parametrize(
    ("test", "is_strict"),
    [
        ("python3 -m unittest -q 2>/dev/null && [ -e sitecustomize.py ] && reward=1\n", True),
        ("cp /tests/check.py /app/check.py; python3 /app/check.py && reward=1\n", False),
        ("git status > /dev/null 2>&1; [ -e /logs/verifier/reward.txt ] && exit\n", True),
    ],
)
async def test_success_that_an_agent_can_forge_is_found(
    runner: TaskRunner, tmp_path: Path, test: str, is_strict: bool
) -> None:
    files = {
        "tests/test.sh": f"{test}{TEST}",
        "tests/check.py": "import json, csv, sys\nsys.exit(1)\n",
        "environment/Dockerfile": "FROM x\nWORKDIR /app\nCOPY *.txt .\nRUN git init -q .\n",
    }
    task = load_task(write_task(tmp_path / "t", files))

    report = await validate_task(runner, task, repeats=1, is_strict=is_strict)

    assert report.status("forgery") == ("failed" if is_strict else "warning")
    assert report.is_valid is not is_strict


async def test_several_tasks_are_reported_in_their_order(
    runner: TaskRunner, tmp_path: Path
) -> None:
    for name in "cab":
        write_task(tmp_path / "tasks" / name)
    seen: list[str] = []

    reports = await validate_tasks(
        runner,
        load_tasks(tmp_path / "tasks"),
        repeats=1,
        jobs=3,
        on_report=lambda report: seen.append(report.name),
    )

    assert [report.name for report in reports] == ["a", "b", "c"]
    assert sorted(seen) == ["a", "b", "c"]
    assert all(report.is_valid for report in reports)


async def test_tasks_from_rows_of_repositories_are_valid(
    runner: TaskRunner, tmp_path: Path
) -> None:
    row = make_repository(tmp_path / "repositories" / "org__maths")
    settings = SweSettings(
        repositories=tmp_path / "repositories",
        test_command="python3 -m unittest -v {tests}",
        log_format="unittest",
    )
    task = load_task(write_swe_task(row, settings, tmp_path / "tasks"))

    report = await validate_task(runner, task, repeats=2)
    run = await runner.run(task, "nothing")

    assert {**faults(report), "forgery": ""} == {"forgery": ""}
    assert run.reward_parts == {"fail_to_pass": 0.0, "pass_to_pass": 1.0}
    assert "fail_to_pass: test_two (test_maths.DoubleTest) did not pass" in run.verifier_output


def test_validation_from_the_command_line(tmp_path: Path) -> None:
    write_task(tmp_path / "tasks" / "good")
    write_task(tmp_path / "tasks" / "bad", {"solution/solve.sh": "true\n"})
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "atroposlib.cli.tasks", "validate", str(tmp_path / "tasks"),
               "--repeats", "1", "--json", str(report)]  # fmt: skip

    done = subprocess.run(command, capture_output=True, text=True, check=False)

    if "cannot be used" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[:3] == [
        "task  builds  oracle  nothing  repeats  hidden  forgery",
        "bad   ok      failed  ok       ok       ok      ok",
        "good  ok      ok      ok       ok       ok      ok",
    ]
    assert "1 of 2 tasks are valid" in done.stdout
    assert '"is_valid": false' in report.read_text()
