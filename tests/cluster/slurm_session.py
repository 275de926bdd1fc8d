"""What a user of the cluster types: submit a run, lose its job in the middle, follow it to the end.

`python -m tests.cluster.slurm_session RUN.yaml REQUEUE_AFTER_STEP`
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from example_trainer.cluster.run_file import read_run_file
from tests.cluster.demo_run import steps_of

LIMIT_S = 500.0
FILE, REQUEUE_AFTER_STEP = sys.argv[1], int(sys.argv[2])


def up(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "example_trainer.cluster.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)


def has_step(step: int) -> bool:
    return (steps_of(output) or [0])[-1] >= step


def job_is(*states: str) -> bool:
    said = subprocess.run(
        ["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T"],
        capture_output=True,
        text=True,
        check=True,
    )
    return said.stdout.strip() in states


output = read_run_file(Path(FILE)).output
log = output / "up" / "job.log"
deadline = time.monotonic() + LIMIT_S
submitted = up(FILE, "--on", "slurm", "--detach")
assert submitted.returncode == 0, submitted.stderr
job = submitted.stdout.split()[-1]
wait_until(lambda: has_step(REQUEUE_AFTER_STEP) or job_is("FAILED", "COMPLETED"))
running = up("status", FILE)
again = up(FILE)
steps_at_requeue = steps_of(output)
subprocess.run(["scontrol", "requeue", job], check=True)
wait_until(lambda: job_is("PENDING"))
waiting = up("status", FILE)
# Slurm would wait for two minutes.
subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], check=True)
wait_until(lambda: job_is("FAILED", "COMPLETED", "CANCELLED"))
status = up("status", FILE)
down = up("down", FILE)
print(
    json.dumps(
        {
            "running": [running.returncode, running.stdout],
            "again": [again.returncode, again.stderr],
            "steps_at_requeue": steps_at_requeue,
            "waiting": waiting.stdout,
            "end": [status.returncode, status.stdout],
            "down": [down.returncode, down.stdout],
        }
    )
)
