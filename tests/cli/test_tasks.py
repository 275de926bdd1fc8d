"""`atropos-tasks`: a task written, shown, run and checked from the command line."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from atroposlib.cli.tasks import main
from atroposlib.workspaces import WorkspaceError, open_workspaces
from tests.agent_tasks.task_folders import write_task

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATROPOS_WORKSPACES_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def workspaces(tmp_path: Path) -> None:
    try:
        open_workspaces(cache=tmp_path / "cache")
    except WorkspaceError as error:
        pytest.skip(f"workspaces cannot be used on this machine: {error}")


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["atropos-tasks", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.usefixtures("workspaces")
def test_new_task_is_valid_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = call(monkeypatch, "new", "first", "--repeats", "1")

    out = capsys.readouterr().out
    assert code == 0
    assert out.splitlines()[3].split() == ["first", *["ok"] * 6]
    assert "atropos-tasks validate first" in out
    assert call(monkeypatch, "new", "first") == 2
    assert "first exists and is left as it is" in capsys.readouterr().err


@pytest.mark.usefixtures("workspaces")
def test_run_shows_output_changes_and_reward(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_task(tmp_path / "t")
    script = "printf 'a\\033[31m\\n'; echo 42 > sum.txt"

    code = call(monkeypatch, "run", "t", "--agent", script, "--json", "run.json")

    out = capsys.readouterr().out
    assert code == 0
    assert "| a\N{SYMBOL FOR ESCAPE}[31m" in out
    assert "added /app/sum.txt" in out
    assert "+42" in out
    assert out.endswith("done: reward 1\n")
    assert json.loads((tmp_path / "run.json").read_text())["reward"] == 1.0


@pytest.mark.usefixtures("workspaces")
def test_run_of_an_agent_that_fails_has_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_task(tmp_path / "t")

    assert call(monkeypatch, "run", "t", "--agent", "exit 3") == 1
    assert "error: the agent ended with exit code 3" in capsys.readouterr().out


def test_list_and_show_need_no_workspaces(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    toml = '[metadata]\ndifficulty = "hard"\n[agent]\nuser = "root"\n[environment.env]\nKEY = "v"\n'
    write_task(tmp_path / "tasks" / "t", {"task.toml": toml})

    assert call(monkeypatch, "list", "tasks") == 0
    listed = capsys.readouterr().out
    assert call(monkeypatch, "show", "tasks/t") == 0
    shown = capsys.readouterr().out

    assert listed.splitlines()[1].split()[:2] == ["t", "hard"]
    assert "agent 600 s, verifier 600 s, public network" in listed
    assert "variables: KEY\n" in shown
    assert "note: tasks/t/task.toml:4: agent.user: without effect" in shown
    assert shown.endswith("Write the sum of a.txt and b.txt to sum.txt.\n")


def test_full_disk_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fail)

    assert call(monkeypatch, "new", "first") == 1

    assert capsys.readouterr().err == (
        "atropos-tasks: error: [Errno 28] No space left on device: 'first/task.toml'\n"
    )
    assert not Path("first").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("tasks", "list", "many"),
        ("tasks", "show", "many/t"),
        ("env", "list"),
        ("new_env", "my_game"),
    ],
)
def test_reader_that_has_left_ends_the_output(words: tuple[str, ...], tmp_path: Path) -> None:
    write_task(tmp_path / "many" / "t")

    ended = without_a_reader(*words)

    assert (ended.returncode, ended.stderr) == (0, b"")


def without_a_reader(module: str, *words: str) -> subprocess.CompletedProcess[bytes]:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        command = [sys.executable, "-m", f"atroposlib.cli.{module}", *words]
        return subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, timeout=120)


@pytest.mark.usefixtures("workspaces")
@pytest.mark.parametrize("words", [("run",), ("validate", "--repeats", "1")])
def test_results_are_saved_although_the_reader_has_left(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    write_task(tmp_path / "t")

    ended = without_a_reader("tasks", *words, "t", "--json", "results.json")

    assert (ended.returncode, ended.stderr) == (0, b"")
    assert json.loads((tmp_path / "results.json").read_text())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["list", "none"], "there is no folder none"),
        (["show", "."], "is not a task: it has no task.toml"),
        (["validate", "tasks/t/tests"], "tests has no task"),
        (["validate", ".", "--repeats", "0"], "expected an integer from 1 to 1000"),
        (["validate", "tasks", "--workspaces", "vmware"], "vmware"),
        (["new", "a b"], "name 'a b': expected letters"),
        (["run", "tasks/t", "--json", "tasks"], "--json"),
        (["swe", "none.jsonl", "--repositories", ".", "--out", "out"], "no data file none.jsonl"),
        (["swe", "x.jsonl", "--out", "out"], "--repositories"),
    ],
)
def test_mistake_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    words: list[str],
    said: str,
) -> None:
    write_task(tmp_path / "tasks" / "t")

    assert call(monkeypatch, *words) == 2

    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_rows_are_written_as_tasks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from tests.agent_tasks.test_swe import make_repository

    row = make_repository(tmp_path / "repositories" / "org__maths")
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")

    code = call(
        monkeypatch, "swe", "rows.jsonl", "--repositories", "repositories", "--out", "out",
        "--setup-command", "true", "--image", "debian:12",
    )  # fmt: skip

    assert code == 0
    assert capsys.readouterr().out.startswith("1 tasks in out; now: atropos-tasks validate out")
    dockerfile = (tmp_path / "out" / "org__maths-1" / "environment" / "Dockerfile").read_text()
    assert dockerfile.splitlines() == [
        "FROM debian:12", "WORKDIR /testbed", "COPY repository /testbed", "RUN true",
    ]  # fmt: skip
