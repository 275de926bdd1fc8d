"""Runs of agents on tasks, in workspaces of this machine."""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from atroposlib.agent_tasks.folder import Artifact, Task, load_task
from atroposlib.agent_tasks.runner import (
    AgentCommand,
    TaskRun,
    TaskRunner,
    changed_sources,
    released_variables,
    task_reward,
)
from atroposlib.errors import ConfigError, TaskError
from atroposlib.workspaces.interface import FileChange
from atroposlib.workspaces.transfer import OutputRecord
from tests.agent_tasks.task_folders import write_task

pytestmark = pytest.mark.slow

LIMITS_S = (3, 30)
"""Time limits to try: within the first, a busy machine may not start a program."""


def shell(script: str, **options: object) -> AgentCommand:
    return AgentCommand(name="shell", command=("bash", "-c", script), **options)  # type: ignore[arg-type]


def changed(*paths: str) -> list[FileChange]:
    return [FileChange(path, "added", 1, None) for path in paths]


def output(run: TaskRun, stream: str) -> str:
    events = (event for event in run.events if event["kind"] == "output")
    return "".join(event["text"] for event in events if event["stream"] == stream)


@pytest.mark.parametrize(
    ("text", "is_json", "expected"),
    [
        ("1\n", False, (1.0, {})),
        (" -0.25 ", False, (-0.25, {})),
        ('{"reward": 0.5, "style": 1}', True, (0.5, {"style": 1.0})),
        ('{"a": 1, "b": 0, "c": true}', True, (2 / 3, {"a": 1.0, "b": 0.0, "c": 1.0})),
        ("0.75", True, (0.75, {})),
    ],
)
def test_reward_is_read(text: str, is_json: bool, expected: tuple[float, dict[str, float]]) -> None:
    assert task_reward(text, is_json=is_json) == expected


@pytest.mark.parametrize(
    ("text", "is_json"),
    [
        ("", False), ("yes", False), ("nan", False), ("inf", False), ("1e7", False), ("1 1", False),
        ("", True), ("{}", True), ("[]", True), ("null", True), ('{"reward": "1"}', True),
        ('{"reward": NaN}', True), ('{"reward": 1e999}', True), ('{"reward": -1000001}', True),
        ('{"reward": 1, "other": null}', True), ("[" * 100_000, True), ('{"a": [1]}', True),
        ("{" + ",".join(f'"{n}": 1' for n in range(101)) + "}", True),
    ],
)  # fmt: skip
def test_reward_that_is_not_a_finite_number_is_refused(text: str, is_json: bool) -> None:
    with pytest.raises(ValueError, match=r"reward\.(json|txt): expected"):
        task_reward(text, is_json=is_json)


def test_changes_in_system_folders_are_not_taken() -> None:
    paths = ("/app/x", "/usr/bin/sh", "/home/agent/.profile", "/tmp/x", "/logs/verifier/reward.txt")

    separate = changed_sources(changed(*paths), "/app", is_verifier_separate=True)
    shared = changed_sources(changed(*paths), "/app", is_verifier_separate=False)
    at_home = changed_sources(changed(*paths), "/home/agent", is_verifier_separate=True)

    assert [change.path for change in separate] == ["/app/x", "/tmp/x"]
    assert [change.path for change in shared] == list(paths[:4])
    assert [change.path for change in at_home] == ["/app/x", "/home/agent/.profile", "/tmp/x"]


def test_only_listed_variables_are_released() -> None:
    environ = {"A": "1", "B": "2", "ATROPOS_TASK_VARIABLES": "A, C"}

    assert released_variables(environ) == {"A": "1"}
    assert released_variables({"A": "1"}) == {}


async def test_solution_scores_1_and_nothing_scores_0(runner: TaskRunner, tmp_path: Path) -> None:
    task = load_task(write_task(tmp_path / "t"))

    oracle = await runner.run(task, "oracle")
    nothing = await runner.run(task, "nothing")

    assert (oracle.outcome, oracle.reward, oracle.agent_exit_code) == ("done", 1.0, 0)
    assert (nothing.outcome, nothing.reward, nothing.agent_exit_code) == ("done", 0.0, None)
    assert [(c.path, c.kind) for c in oracle.changes] == [("/app/sum.txt", "added")]
    assert nothing.changes == []
    phases = [event["text"] for event in oracle.events if event["kind"] == "phase"]
    assert phases == ["fork", "agent", "artifacts", "verifier"]
    assert set(oracle.metrics) == {"fork_ms", "agent_s", "verifier_s", "artifact_bytes"}


async def test_agent_has_its_files_variables_input_and_output(
    runner: TaskRunner, tmp_path: Path
) -> None:
    toml = '[environment.env]\nA = "${RELEASED}"\nB = "b"\n'
    task = load_task(write_task(tmp_path / "t", {"task.toml": toml}))
    (tmp_path / "software").mkdir()
    (tmp_path / "software" / "tool").write_text("a tool")
    agent = shell(
        'echo "$A $B $C"; cat - /app/given/x /opt/software/tool; pwd; echo e >&2',
        env={"C": "c"},
        stdin=b"input\n",
        files={"/app/given/x": "a file\n"},
        read_only={"/opt/software": tmp_path / "software"},
    )

    run = await runner.run(task, agent)

    assert output(run, "agent/stdout") == "of this machine b c\ninput\na file\na tool/app\n"
    assert output(run, "agent/stderr") == "e\n"


async def test_variable_of_the_machine_that_is_not_released_is_refused(
    runner: TaskRunner, tmp_path: Path
) -> None:
    toml = '[verifier.env]\nA = "${HOME}"\n'
    task = load_task(write_task(tmp_path / "t", {"task.toml": toml}))

    with pytest.raises(ConfigError, match="HOME of this machine"):
        await runner.run(task, "nothing")


async def test_removed_and_replaced_files_are_so_for_the_verifier(
    runner: TaskRunner, tmp_path: Path
) -> None:
    files = {
        "environment/folder/x": "x",
        "environment/file": "file",
        "tests/test.sh": "cat file/y\n[ ! -e a.txt ] && [ ! -e b.txt ] && [ -f folder ] && "
        "echo 1 > /logs/verifier/reward.txt\n",
    }
    task = load_task(write_task(tmp_path / "t", files))

    script = "rm a.txt; ln -sf x b.txt; rm -r folder; echo y > folder; rm file; mkdir file"
    run = await runner.run(task, shell(f"{script}; echo y > file/y"))

    assert (run.outcome, run.reward, run.verifier_output) == ("done", 1.0, "y\n")


async def test_changes_in_a_folder_that_its_owner_cannot_write_to_reach_the_verifier(
    runner: TaskRunner, tmp_path: Path
) -> None:
    files = {
        "environment/Dockerfile": "FROM x\nWORKDIR /app\nRUN mkdir -p m/n && cd m && "
        "touch a b n/c && ln -s / l && chmod 555 n . && mkdir /app/w && touch /app/w/e\n",
        "tests/test.sh": "cat m/a; ls m /app/w; stat -c %a m\necho 1 > /logs/verifier/reward.txt\n",
    }
    task = load_task(write_task(tmp_path / "t", files))

    script = "chmod 755 m m/n; echo new > m/a; rm -r m/b m/n/c m/l w/e; echo more > m/f"
    run = await runner.run(task, shell(script))

    assert (run.outcome, run.reward, run.error) == ("done", 1.0, "")
    assert run.verifier_output == "new\n/app/w:\n\nm:\na\nf\nn\n555\n"


async def test_folder_that_was_removed_is_missing_for_the_verifier(
    runner: TaskRunner, tmp_path: Path
) -> None:
    files = {
        "environment/folder/x": "x",
        "environment/folder/in/y": "y",
        "tests/test.sh": "[ -e /app/folder ] || echo 1 > /logs/verifier/reward.txt\n",
    }
    task = load_task(write_task(tmp_path / "t", files))

    run = await runner.run(task, shell("rm -r folder"))

    assert (run.reward, run.error) == (1.0, "")
    assert [change.path for change in run.changes] == [
        "/app/folder/",
        "/app/folder/in/y",
        "/app/folder/x",
    ]


async def test_more_changes_than_are_listed_still_reach_the_verifier(
    runner: TaskRunner, tmp_path: Path
) -> None:
    test = "ls many | wc -l\nls\n[ -e a.txt ] || echo 1 > /logs/verifier/reward.txt\n"
    task = load_task(write_task(tmp_path / "t", {"tests/test.sh": test}))

    run = await runner.run(task, shell("mkdir many; touch many/{1..1500}; rm a.txt"))

    assert run.reward == 1.0
    assert run.verifier_output == "1500\nb.txt\nmany\n"


async def test_declared_artifacts_are_all_that_the_verifier_sees(
    runner: TaskRunner, tmp_path: Path
) -> None:
    toml = 'artifacts = ["/app/one", { source = "/app/two", exclude = ["*.tmp", "cache"] }]\n'
    test = "find /app /logs/artifacts -type f | sort\necho 1 > /logs/verifier/reward.txt\n"
    task = load_task(write_task(tmp_path / "t", {"task.toml": toml, "tests/test.sh": test}))
    script = (
        "mkdir -p two/cache two/in; touch one other two/a two/a.tmp two/cache/b two/in/c.tmp "
        "/logs/artifacts/log"
    )

    run = await runner.run(task, shell(script))

    assert run.verifier_output.split() == [
        "/app/a.txt", "/app/b.txt", "/app/one", "/app/two/a", "/logs/artifacts/log",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("toml", "script"),
    [
        ("", "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt"),
        ("", "echo '{\"reward\": 1}' > /logs/verifier/reward.json"),
        ('artifacts = ["/logs"]\n', "echo '{\"reward\": 1}' > /logs/verifier/reward.json"),
        ("", "rm -r /logs/verifier; ln -s /app /logs/verifier; echo 1 > reward.json"),
        ("", "mkdir /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh"),
        ("", "ln -s /tests link; mkdir -p /home/agent/bin; printf 'echo 1' > /home/agent/bin/cat"),
        ("", "ln -sf /logs/verifier/reward.txt sum.txt; ln -sf /etc/passwd x"),
        (
            "",
            "(setsid bash -c 'while true; do echo 1 > /logs/verifier/reward.txt; done' &) ; exit 0",
        ),
    ],
)
async def test_agent_does_not_reach_the_reward(
    runner: TaskRunner, tmp_path: Path, toml: str, script: str
) -> None:
    task = load_task(write_task(tmp_path / "t", {"task.toml": toml}))

    run = await runner.run(task, shell(script))

    assert run.reward == 0.0


AT_HOME = "FROM debian\nWORKDIR {}\nCOPY a.txt b.txt .\n"
OWN_PROGRAMS = """
mkdir -p ~/.local/bin
for name in bash cat python3; do
  printf '#!/bin/sh\\necho 1 > /logs/verifier/reward.txt\\n' > ~/.local/bin/$name
  chmod +x ~/.local/bin/$name
done
"""


@pytest.mark.parametrize(
    ("toml", "workdir", "more"),
    [
        ("", "/home/agent", ""),
        ("", "/home", ""),
        ("", "/home/agent", "touch $(seq 1100)"),
        ('artifacts = ["/home/agent"]', "/app", ""),
        ('artifacts = ["/home/agent"]', "/home/agent", "touch $(seq 1100)"),
    ],
)
async def test_programs_of_an_agent_do_not_verify(
    runner: TaskRunner, tmp_path: Path, toml: str, workdir: str, more: str
) -> None:
    files = {
        "task.toml": toml,
        "environment/Dockerfile": AT_HOME.format(workdir)
        + "RUN mkdir -p ~/.local/bin && echo 'echo of the base' > ~/.local/bin/say"
        + " && chmod +x ~/.local/bin/say\n",
        "tests/test.sh": "say; cat sum.txt; echo 0 > /logs/verifier/reward.txt\n",
    }
    task = load_task(write_task(tmp_path / "t", files))

    run = await runner.run(task, shell(OWN_PROGRAMS + more))

    assert (run.outcome, run.reward) == ("done", 0.0)
    assert "of the base" in run.verifier_output


async def test_packages_of_the_base_are_there_for_the_verifier(
    runner: TaskRunner, tmp_path: Path
) -> None:
    files = {
        "environment/Dockerfile": AT_HOME.format("/home/agent")
        + 'RUN d=$(python3 -m site --user-site); mkdir -p "$d" && echo "value = 1" > "$d/own.py"\n',
        "tests/test.sh": (
            'python3 -c "import own; print(own.value)" > /logs/verifier/reward.txt\n'
        ),
    }
    task = load_task(write_task(tmp_path / "t", files))

    run = await runner.run(
        task, shell('echo "value = 7" > "$(python3 -m site --user-site)/own.py"')
    )

    assert run.reward == 1.0


@pytest.mark.parametrize(
    ("script", "outcome"),
    [("echo 1 > /app", "agent_failed"), ("ln -s /logs /app", "done"), ("true", "done")],
)
async def test_agent_without_working_directory_is_verified(
    runner: TaskRunner, tmp_path: Path, script: str, outcome: str
) -> None:
    task = load_task(write_task(tmp_path / "t"))

    run = await runner.run(task, shell(f"cd /; rm -r /app; {script}"))

    assert (run.outcome, run.reward) == (outcome, 0.0)


async def test_deep_folders_of_an_agent_are_left_out(runner: TaskRunner, tmp_path: Path) -> None:
    files = {"task.toml": 'artifacts = [{source = "/app", exclude = ["*.pyc", "x/*"]}]\n'}
    task = load_task(write_task(tmp_path / "t", files))
    dig = "import os\nfor _ in range(1900): os.mkdir('d'); os.chdir('d')\n"

    run = await runner.run(task, shell(f'echo 42 > sum.txt; python3 -c "{dig}"'))

    assert (run.outcome, run.reward) == ("done", 1.0)


async def test_agent_finds_no_file_of_tests_and_solution(
    runner: TaskRunner, tmp_path: Path
) -> None:
    task = load_task(write_task(tmp_path / "t"))

    run = await runner.run(
        task,
        shell(
            "find / -name solve.sh -o -name test.sh -path '*tests*' 2>/dev/null | grep -v ^/usr\n"
            "ls /tests /solution; grep -r 'the solution' / --exclude-dir=proc --exclude-dir=sys"
            " --exclude-dir=usr 2>/dev/null; cat /proc/[0-9]*/environ | tr '\\0' '\\n'\n"
        ),
    )

    seen = output(run, "agent/stdout")
    assert "solve.sh" not in seen
    assert str(tmp_path) not in seen
    assert run.changes == []


async def test_software_whose_folder_has_the_tests_is_refused(
    runner: TaskRunner, tmp_path: Path
) -> None:
    task = load_task(write_task(tmp_path / "t"))

    for folder in (tmp_path, task.tests_folder):
        with pytest.raises(ConfigError, match="would show tests/ of t to the agent"):
            await runner.run(task, shell("true", read_only={"/opt/software": folder}))


async def test_agent_that_runs_out_of_time_is_verified(runner: TaskRunner, tmp_path: Path) -> None:
    for limit_s in LIMITS_S:
        toml = f"[agent]\ntimeout_sec = {limit_s}\n"
        task = load_task(write_task(tmp_path / f"t{limit_s}", {"task.toml": toml}))
        run = await runner.run(task, shell("echo 42 > sum.txt; sleep 600"))
        if run.reward:
            break

    assert (run.outcome, run.reward, run.agent_exit_code) == ("agent_timeout", 1.0, None)
    assert run.error == f"the agent was ended after {limit_s} s"


async def test_agent_that_fails_is_verified(runner: TaskRunner, tmp_path: Path) -> None:
    task = load_task(write_task(tmp_path / "t"))

    run = await runner.run(task, shell("echo 42 > sum.txt; exit 3"))

    assert (run.outcome, run.reward, run.agent_exit_code) == ("agent_failed", 1.0, 3)


@pytest.mark.parametrize(
    ("test", "error"),
    [
        ("exit 7", "there is no /logs/verifier/reward.txt or reward.json; tests/test.sh ended with "
         "exit code 7"),
        ("echo nan > /logs/verifier/reward.txt", "reward.txt: expected finite numbers"),
        ("echo yes > /logs/verifier/reward.txt", "reward.txt: expected a number, got 'yes'"),
        ("ln -s /etc/hostname /logs/verifier/reward.txt", "there is no /logs/verifier/reward.txt"),
        ("head -c 1000000 /dev/zero > /logs/verifier/reward.txt", ""),
        ("echo 0 > /logs/verifier/reward.txt; echo 1 > /logs/verifier/reward.json",
         "reward.json says 1, reward.txt 0"),
    ],
)  # fmt: skip
async def test_verifier_without_a_usable_reward_fails(
    runner: TaskRunner, tmp_path: Path, test: str, error: str
) -> None:
    task = load_task(write_task(tmp_path / "t", {"tests/test.sh": test}))

    run = await runner.run(task, "nothing")

    assert (run.outcome, run.reward, run.reward_parts) == ("verifier_failed", 0.0, {})
    assert error in run.error
    assert run.events[-1]["kind"] == "error"


async def test_verifier_that_runs_out_of_time_is_ended(runner: TaskRunner, tmp_path: Path) -> None:
    for limit_s in LIMITS_S:
        files = {
            "task.toml": f"[verifier]\ntimeout_sec = {limit_s}\n",
            "tests/test.sh": "echo 1 > /logs/verifier/reward.txt; echo begun; sleep 600",
        }
        task = load_task(write_task(tmp_path / f"t{limit_s}", files))
        run = await runner.run(task, "nothing")
        if run.verifier_output:
            break

    assert (run.outcome, run.reward) == ("verifier_timeout", 0.0)
    assert run.verifier_output == "begun\n"


async def test_artifacts_beyond_the_disk_limit_fail_the_agent(
    runner: TaskRunner, tmp_path: Path
) -> None:
    toml = "[environment]\nstorage_mb = 2\n"
    task = load_task(write_task(tmp_path / "t", {"task.toml": toml}))

    run = await runner.run(task, shell("truncate -s 1900K 1 2 3; echo 42 > sum.txt"))

    assert (run.outcome, run.reward, run.verifier_exit_code) == ("agent_failed", 0.0, None)
    assert "artifacts cannot be read" in run.error
    assert (run.events[-1]["kind"], run.events[-1]["text"]) == ("error", run.error)


async def test_output_beyond_the_limit_is_cut(runner: TaskRunner, tmp_path: Path) -> None:
    task = load_task(write_task(tmp_path / "t"))
    small = TaskRunner(runner._workspaces, max_output_bytes=1000)

    run = await small.run(task, shell("yes | head -c 100000; echo 42 > sum.txt"))

    kept = output(run, "agent/stdout")
    assert len(kept) < 1100
    assert kept.endswith("[output beyond 1000 bytes is left out]\n")
    assert run.reward == 1.0
    await small.close()


async def test_repeated_verification_runs_the_agent_once(
    runner: TaskRunner, tmp_path: Path
) -> None:
    task = load_task(write_task(tmp_path / "t"))

    runs = await runner.run_repeatedly(task, shell("echo $RANDOM$RANDOM > x; cat x"), repeats=3)

    assert len(runs) == 3
    assert len({output(run, "agent/stdout") for run in runs}) == 1
    assert [len([e for e in run.events if e["text"] == "verifier"]) for run in runs] == [1, 1, 1]


async def test_oracle_without_a_solution_is_an_error(runner: TaskRunner, tmp_path: Path) -> None:
    task = load_task(write_task(tmp_path / "t", {"solution/solve.sh": None}))

    with pytest.raises(TaskError, match=r"solve\.sh to run"):
        await runner.run(task, "oracle")


@pytest.mark.skipif(os.geteuid() != 0, reason="other users run the programs of root only")
async def test_tests_that_other_users_cannot_read_are_refused(
    runner: TaskRunner, tmp_path: Path
) -> None:
    task = load_task(write_task(tmp_path / "t"))
    (task.tests_folder / "test.sh").chmod(0o600)

    with pytest.raises(ConfigError, match=r"test\.sh is not readable for other users.*chmod -R"):
        await runner.run(task, "nothing")


async def test_cancelled_run_leaves_no_process(runner: TaskRunner, tmp_path: Path) -> None:
    task = load_task(write_task(tmp_path / "t"))
    marker = f"86400.{hash(str(tmp_path)) % 10**9}"
    running = asyncio.create_task(runner.run(task, shell(f"sleep {marker}")))
    while not _processes(marker):  # noqa: ASYNC110 - of another program
        await asyncio.sleep(0.01)

    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    assert not _processes(marker)


def _processes(word: str) -> Sequence[Path]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if f"sleep\0{word}".encode() in path.read_bytes():
                found.append(path)
        except OSError:
            continue
    return found


async def test_runs_at_the_same_time_have_files_of_their_own(
    runner: TaskRunner, tmp_path: Path
) -> None:
    task = load_task(write_task(tmp_path / "t"))

    runs = await asyncio.gather(
        *(runner.run(task, shell(f"echo {n} > sum.txt; sleep 0.1; ls")) for n in (41, 42, 43))
    )

    assert [run.reward for run in runs] == [0.0, 1.0, 0.0]
    assert {output(run, "agent/stdout") for run in runs} == {"a.txt\nb.txt\nsum.txt\n"}


def test_patterns_of_an_artifact_exclude_files_and_folders(tmp_path: Path) -> None:
    from atroposlib.agent_tasks.runner import _without_hidden

    names = ("app/a.py", "app/a.pyc", "app/in/b.pyc", "app/node_modules/x", "other/a.pyc",
             "logs/verifier/reward.txt", "tests/test.sh")  # fmt: skip
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in names:
            tar.addfile(tarfile.TarInfo(name))

    task = Task("t", tmp_path, "Do.", artifacts=(Artifact("/app", ("*.pyc", "node_modules")),))
    kept = _without_hidden(buffer.getvalue(), task, "/app")

    with tarfile.open(fileobj=io.BytesIO(kept)) as tar:
        assert tar.getnames() == ["app/a.py", "other/a.pyc"]


async def test_many_pieces_of_output_are_bounded_and_hide_no_verifier(
    runner: TaskRunner, tmp_path: Path
) -> None:
    task = load_task(write_task(tmp_path / "t", {"tests/test.sh": "echo seen\n"}))
    script = "import os\nfor _ in range(60_000): os.write(1, b'a'); os.write(2, b'b')"

    run = await runner.run(task, shell(f'python3 -c "{script}"'))

    assert len(run.events) < 20_010
    assert run.verifier_output == "seen\n"


def test_output_in_many_pieces_is_kept_in_few() -> None:
    record = OutputRecord(None)
    for number in range(100_000):
        record.add(1 + number % 2, b"%d" % (number % 2), number / 1000)

    pieces = record.output()

    assert len(pieces) <= 20_001
    for stream, byte in (("stdout", b"0"), ("stderr", b"1")):
        assert b"".join(p.data for p in pieces if p.stream == stream) == byte * 50_000
