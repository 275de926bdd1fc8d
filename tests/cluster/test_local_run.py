"""`atropos-up` on this machine: parts that are killed, and the commands of another shell.

Service, trainer and supervisor are real; engine and environment are stand-ins.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from atroposlib.errors import AtroposError
from example_trainer.cluster.cli import main
from example_trainer.cluster.local import LocalRun
from example_trainer.cluster.placement import PartStatus
from example_trainer.cluster.run_file import read_run_file
from tests.cluster.demo_run import (
    demo_run,
    held_out_accuracy,
    make_demo_student,
    steps_of,
)
from tests.cluster.scripted_run import ROOT, scripted_run
from tests.trainer.test_processes import is_running

pytestmark = pytest.mark.slow

LIMIT_S = 400.0
RUNNING, STOPPED, NONE = 3, 5, 4


class Shell:
    """Types commands about one run file, each in a process of its own."""

    def __init__(self, file: Path, *, steps: int) -> None:
        self.file = file
        self.output = file.parent / "run"
        self.steps = steps

    def up(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "example_trainer.cluster.cli", *words],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    def record(self) -> dict[str, Any]:
        return dict(json.loads((self.output / "up" / "record.json").read_text()))

    def parts(self) -> dict[str, PartStatus]:
        return {part["name"]: PartStatus(**part) for part in self.record()["status"]["parts"]}

    def pid(self, part: str) -> int:
        return int(self.parts()[part].detail.removeprefix("pid "))

    def kill(self, part: str) -> None:
        os.kill(self.pid(part), signal.SIGKILL)

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + LIMIT_S
        while (steps_of(self.output) or [0])[-1] < step:
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.1)

    def wait_for_end(self) -> subprocess.CompletedProcess[str]:
        deadline = time.monotonic() + LIMIT_S
        while self.record()["status"]["state"] == "running":
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.1)
        return self.up("status", str(self.file))

    def said(self) -> str:
        return (self.output / "up" / "supervisor.log").read_text()


@pytest.mark.long
def test_killed_parts_come_back_and_no_step_is_lost_or_doubled(tmp_path):
    steps = 12
    # Slow enough that the trainer has steps to do when it is killed.
    file = scripted_run(
        tmp_path, steps=steps, environments={"flags": {"groups": steps, "every-s": 1.0}}
    )
    shell = Shell(file, steps=steps)
    assert shell.up("status", str(file)).returncode == NONE

    submitted = shell.up(str(file), "--detach")
    assert submitted.returncode == 0, submitted.stderr
    again = shell.up(str(file), "--detach")
    shell.wait_for_step(2)
    shell.kill("service")
    shell.kill("trainer")
    ended = shell.wait_for_end()

    assert again.returncode == 2
    assert "is running (supervisor" in again.stderr
    assert (ended.returncode, ended.stdout.split()[0]) == (0, "finished"), shell.said()
    assert ended.stdout.splitlines()[-1] == f"step {steps} of {steps}"
    parts = shell.parts()
    assert parts["service"].restarts == 1
    assert parts["trainer"].restarts >= 1
    assert steps_of(shell.output) == list(range(1, steps + 1))


def test_supervisor_that_does_not_start_in_time_is_ended(tmp_path, monkeypatch):
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def note(*args: Any, **options: Any) -> Any:
        started.append(popen(*args, **options))
        return started[-1]

    monkeypatch.setattr("example_trainer.cluster.local._DETACH_LIMIT_S", 0.0)
    monkeypatch.setattr(subprocess, "Popen", note)
    file = scripted_run(tmp_path, steps=1)

    with pytest.raises(AtroposError, match="the supervisor did not start"):
        LocalRun(read_run_file(file), file).submit()

    assert [process.poll() is None for process in started] == [False]


@pytest.mark.long
def test_run_that_was_stopped_goes_on_and_its_supervisor_may_be_killed(tmp_path):
    steps = 60
    file = scripted_run(
        tmp_path, steps=steps, environments={"flags": {"groups": steps, "every-s": 0.3}}
    )
    shell = Shell(file, steps=steps)
    assert shell.up(str(file), "--detach").returncode == 0
    shell.wait_for_step(3)
    running = shell.up("status", str(file))
    pids = [shell.pid(name) for name in shell.parts()]

    down = shell.up("down", str(file))
    stopped = shell.up("status", str(file))

    assert (down.returncode, stopped.returncode) == (0, STOPPED), (down, stopped)
    assert not any(map(is_running, pids))

    assert shell.up(str(file), "--detach").returncode == 0
    shell.wait_for_step(steps_of(shell.output)[-1] + 5)
    pids = [shell.pid(name) for name in shell.parts()]
    os.kill(int(shell.record()["supervisor"][0]), signal.SIGKILL)
    deadline = time.monotonic() + LIMIT_S
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    lost = shell.up("status", str(file))
    nothing = shell.up("down", str(file))
    finished = shell.up(str(file))

    assert running.returncode == RUNNING
    assert (lost.returncode, lost.stdout.split(":")[0]) == (6, "lost")
    assert "is not running" in nothing.stdout
    assert finished.returncode == 0, finished.stdout
    assert steps_of(shell.output) == list(range(1, steps + 1))


@pytest.mark.long
def test_task_of_the_demo_is_learned_although_its_trainer_and_engine_are_killed(tmp_path):
    steps = 25
    student = tmp_path / "student"
    make_demo_student(student)
    before = held_out_accuracy(student)
    shell = Shell(demo_run(tmp_path, student, steps=steps), steps=steps)

    assert shell.up(str(shell.file), "--detach").returncode == 0
    shell.wait_for_step(6)
    shell.kill("trainer")
    shell.wait_for_step(12)
    shell.kill("engine-0")
    ended = shell.wait_for_end()

    assert ended.returncode == 0, shell.said()
    assert steps_of(shell.output) == list(range(1, steps + 1))
    after = held_out_accuracy(shell.output / "trainer" / "final_model")
    assert after > before + 0.1, (before, after)


def test_run_that_needs_other_hardware_is_refused_in_one_line(tmp_path):
    file = scripted_run(tmp_path, steps=1, trainer={"nodes": 2})

    done = Shell(file, steps=1).up(str(file))

    assert (done.returncode, done.stderr) == (
        2,
        "atropos-up: trainer needs 2 nodes; give --on slurm\n",
    )


def test_dry_run_prints_every_command_and_starts_nothing(tmp_path):
    file = scripted_run(tmp_path, steps=1)

    done = Shell(file, steps=1).up(str(file), "--dry-run")

    assert done.returncode == 0
    for module in ("atroposlib.cli.run_api", "vllm.entrypoints", "example_trainer.grpo"):
        assert f" -m {module}" in done.stdout
    assert "rollout_server_url: http://127.0.0.1:" in done.stdout
    assert not (tmp_path / "run").exists()


def test_reader_of_a_dry_run_may_leave(tmp_path):
    file = scripted_run(tmp_path, steps=1)
    reading, writing = os.pipe()
    os.close(reading)

    with os.fdopen(writing, "w") as output:
        done = subprocess.run(
            [sys.executable, "-m", "example_trainer.cluster.cli", str(file), "--dry-run"],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )

    assert (done.returncode, done.stderr) == (0, "")


def test_misspelled_command_and_log_that_is_not_there_are_answered(tmp_path):
    file = scripted_run(tmp_path, steps=1)
    shell = Shell(file, steps=1)

    misspelled = shell.up("statsu", str(file))
    logs = shell.up("logs", str(file))

    assert misspelled.returncode == 2
    assert "after statsu; did you mean status?" in misspelled.stderr
    assert logs.stderr == "trainer has not written a line yet\n"


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[object, str]:
    """Run `atropos-up` in this process; its exit code and its errors."""
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return ended.value.code, capsys.readouterr().err


def test_submission_that_failed_does_not_take_later_commands_elsewhere(
    tmp_path, monkeypatch, capsys
):
    file = scripted_run(tmp_path, steps=1)
    monkeypatch.setenv("PATH", str(tmp_path))

    code, said = refused(capsys, file, "--on", "slurm")

    assert (code, "sbatch is not installed" in said) == (2, True)
    assert (tmp_path / "run" / "up" / "placement").read_text() == "local\n"


def test_output_folder_that_is_a_file_is_one_line(tmp_path, capsys):
    file = scripted_run(tmp_path, steps=1)
    (tmp_path / "run").write_text("")

    assert refused(capsys, "logs", file) == (0, "trainer has not written a line yet\n")
    code, said = refused(capsys, file)

    assert (code, said.count("\n")) == (2, 1)
    assert "run/up cannot be written" in said


def test_damaged_note_of_the_placement_is_not_used(tmp_path, capsys):
    file = scripted_run(tmp_path, steps=1)
    folder = tmp_path / "run" / "up"
    folder.mkdir(parents=True)
    (folder / "placement").write_bytes(b"\xff\n")

    assert refused(capsys, "status", file) == (NONE, "")


def test_secret_that_is_not_set_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("NO_SUCH_TOKEN", raising=False)
    file = scripted_run(tmp_path, steps=1, service={"tokens": {"trainer": "NO_SUCH_TOKEN"}})

    done = Shell(file, steps=1).up(str(file))

    assert done.returncode == 2
    assert "service.tokens: the variable NO_SUCH_TOKEN is not set; export it" in done.stderr


def test_mistakes_that_need_no_engine_are_named_before_one_starts(tmp_path):
    missing = scripted_run(tmp_path, steps=1, environments={"program": "no/such.py"})
    done = Shell(missing, steps=1).up(str(missing))

    assert done.returncode == 2
    assert f"environments[0].program: there is no file {ROOT / 'no/such.py'};" in done.stderr

    unknown = scripted_run(tmp_path, steps=1, trainer={"flags": {"lrr": 0.01}})
    done = Shell(unknown, steps=1).up(str(unknown))

    assert done.returncode == 2
    assert "unrecognized argument --lrr=0.01; did you mean --lr?" in done.stderr
    assert "started" not in done.stdout + done.stderr

    own = scripted_run(tmp_path, steps=1, trainer={"program": "no/trainer.py"})
    done = Shell(own, steps=1).up(str(own))

    assert done.returncode == 2
    assert f"trainer.program: there is no file {ROOT / 'no/trainer.py'};" in done.stderr

    absent = scripted_run(tmp_path, steps=1, trainer={"program": "no_such.trainer"})
    done = Shell(absent, steps=1).up(str(absent))

    assert done.returncode == 2
    assert "trainer.program: there is no module no_such in" in done.stderr


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"trainer": {"flags": {"device": "cpu", "kl-coef": 0.1}}},
            "trainer: atropos-grpo: kl_coef=0.1 needs a reference",
        ),
        (
            {"trainer": {"flags": {"device": "cpu", "loss-fn": "no_such.py:loss"}}},
            "trainer: atropos-grpo: --loss-fn: there is no file",
        ),
        ({"trainer": {"model": "./no_such"}}, f"there is no folder {ROOT / 'no_such'}"),
        (
            {
                "environments": {
                    "program": "environments/word_sums.py",
                    "flags": {"env.group_size": 2},
                    "settings": {"env": {"num_digit": 3}},
                }
            },
            "environment-made-up: env.num_digit in the YAML file: no such setting; did you mean "
            "env.num_digits?",
        ),
    ],
)
def test_settings_are_checked_before_a_part_starts(sections, message, tmp_path):
    file = scripted_run(tmp_path, steps=1, **sections)

    done = Shell(file, steps=1).up(str(file))

    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "started" not in done.stdout


OWN_TRAINER = """
import sys
from pathlib import Path

from atroposlib.api.client import batches

url, num_steps, marker = [word.partition("=")[2] for word in sys.argv[1:]]
with batches(url, batch_size=4, num_steps=int(num_steps), max_token_len=64) as stream:
    for batch in stream:
        print("tokens", [group["tokens"] for group in batch.groups])
        if not Path(marker).exists():
            Path(marker).touch()
            sys.exit(3)
"""


def test_another_trainer_is_started_again_and_gets_the_batch_that_it_had_not_done(tmp_path):
    program = tmp_path / "own_trainer.py"
    program.write_text(OWN_TRAINER, encoding="utf-8")
    flags = {"url": "{service_url}", "steps": "{steps}", "marker": "{output}/failed"}
    trainer = {"program": str(program), "flags": flags}
    file = scripted_run(tmp_path, steps=3, trainer=trainer)

    done = Shell(file, steps=3).up(str(file))

    log = (tmp_path / "run" / "logs" / "trainer.log").read_text()
    assert "\nfinished\n" in done.stdout, done.stdout + log
    batches = [line for line in log.splitlines() if line.startswith("tokens")]
    assert len(batches) == 4
    assert batches[0] == batches[1]
    assert len(set(batches)) == 3
