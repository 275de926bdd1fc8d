"""What a user of the cluster types: submit a run, lose its job in the middle, follow it to the end.

`python -m tests.cluster.slurm_session RUN.yaml REQUEUE_AFTER_STEP`
"""

import json
import subprocess
import sys
import time
from pathlib import Path

from example_trainer.cluster.run_file import read_run_file
from tests.cluster.demo_run import steps_of

LIMIT_S = 400.0
FILE, REQUEUE_AFTER_STEP = sys.argv[1], int(sys.argv[2])


def up(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "example_trainer.cluster.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


output = read_run_file(Path(FILE)).output
submitted = up(FILE, "--on", "slurm", "--detach")
assert submitted.returncode == 0, submitted.stderr
job = submitted.stdout.split()[-1]
again = up(FILE)
deadline = time.monotonic() + LIMIT_S
while (steps_of(output) or [0])[-1] < REQUEUE_AFTER_STEP:
    status = up("status", FILE)
    assert status.returncode == 3, (status.stdout, (output / "up" / "job.log").read_text())
    assert time.monotonic() < deadline, status.stdout
    time.sleep(0.2)
subprocess.run(["scontrol", "requeue", job], check=True)
steps_at_requeue = steps_of(output)
# Slurm would wait for two minutes.
while "PENDING" not in (waiting := up("status", FILE)).stdout:
    assert time.monotonic() < deadline, waiting.stdout
    time.sleep(0.2)
subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], check=True)
while (status := up("status", FILE)).returncode == 3:
    assert time.monotonic() < deadline, status.stdout
    time.sleep(0.5)
down = up("down", FILE)
print(
    json.dumps(
        {
            "job": job,
            "again": [again.returncode, again.stderr],
            "steps_at_requeue": steps_at_requeue,
            "waiting": waiting.stdout,
            "end": [status.returncode, status.stdout],
            "down": [down.returncode, down.stdout],
        }
    )
)
