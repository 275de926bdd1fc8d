"""The task of the demo on a real Ray of this machine, with an actor of each kind killed on the way.

`python -m tests.on_ray.demo --steps 45` prints the accuracy on problems that were never trained on,
before and after, and takes minutes. Environments are scored on Ray too.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from example_trainer.cluster.placement import ENDED, RunStatus
from example_trainer.cluster.ray_cluster import RayRun
from example_trainer.cluster.run_file import read_run_file
from example_trainer.demo.settings import DemoSettings, settings_for
from tests.cluster.demo_run import demo_run, held_out_accuracy, make_demo_student, steps_of

KILLED = ("service", "engine-0", "environment-sums", "supervisor", "trainer")
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_worker_prestart": "0",  # idle workers cost a second of CPU each
    "RAY_prestart_worker_first_driver": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # other tests of this machine use its memory too
    "RAY_worker_niceness": "0",  # 15: on a busy machine, the programs of parts get little CPU
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(Path(__file__).parents[2]),
}
NODE = {"num_cpus": 4, "object_store_memory": 80 * 2**20}


class DemoOnRay(NamedTuple):
    """What a run did."""

    status: RunStatus
    steps: list[int]
    seconds: float
    final_model: Path


@contextlib.contextmanager
def local_ray() -> Iterator[Any]:
    """Context of a `ray.cluster_utils.Cluster` with one node, to which this process connects."""
    import ray
    from ray.cluster_utils import Cluster

    root = Path(tempfile.mkdtemp(prefix="ray"))  # the default of pytest is too long for a socket
    folder = root / "ray"
    folder.mkdir()
    before = dict(os.environ)
    # Ray also notes the address of the cluster there, otherwise in a folder that all users share.
    os.environ.update(SETTINGS, RAY_TMPDIR=str(root))
    cluster = Cluster()
    try:
        cluster.add_node(include_dashboard=False, temp_dir=str(folder), **NODE)
        os.environ["RAY_ADDRESS"] = cluster.address
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(root, ignore_errors=True)


def worker_pid(name: str) -> int:
    """Return the process id of a named actor's worker; the public API needs Ray's dashboard."""
    from ray._private.state import actors

    found = [each for each in actors().values() if each["Name"] == name]
    [pid] = [each["Pid"] for each in found if each["State"] == "ALIVE"]
    return int(pid)


def train_on_ray(
    folder: Path,
    student: Path,
    *,
    steps: int,
    settings: DemoSettings,
    say: Callable[[str], None],
) -> DemoOnRay:
    """Train on the cluster of this process; kill the actor of each of `KILLED` on the way."""
    file = demo_run(folder, student, steps=steps, settings=settings)
    run = read_run_file(file)
    scoring = {"score_backend": "RAY", "num_score_workers": 1}
    run.environments[0].settings["env"].update(scoring)
    placement = RayRun(run, file)
    # In the first half, so that each has time to come back before the last step.
    kills = [(steps * (i + 1) // (2 * len(KILLED)), name) for i, name in enumerate(KILLED)]
    began = time.monotonic()
    placement.submit()
    try:
        status = placement.status()
        while status.state not in ENDED:
            done = (steps_of(run.output) or [0])[-1]
            if kills and done >= kills[0][0]:
                _, name = kills.pop(0)
                os.kill(worker_pid(f"demo.{name}"), signal.SIGKILL)
                say(f"{time.monotonic() - began:.0f} s, step {done}: killed the actor of {name}")
            time.sleep(0.5)
            status = placement.status()
    finally:
        placement.down()
    final_model = run.output / "trainer" / "final_model"
    return DemoOnRay(status, steps_of(run.output), time.monotonic() - began, final_model)


def main(argv: Sequence[str] | None = None) -> int:
    """Print kills, steps and accuracy; exit code 1 unless each step was trained once."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--student", type=Path, help="folder of the student; made if missing")
    args = parser.parse_args(argv)
    settings = settings_for("full", engine="torch", seed=args.seed)

    def say(text: str) -> None:
        print(text, flush=True)

    with tempfile.TemporaryDirectory(prefix="demo") as name:
        folder = Path(name)
        student = args.student or folder / "student"
        if not student.exists():
            make_demo_student(student, settings)
        before = held_out_accuracy(student, settings)
        say(f"accuracy before {before:.3f}")
        with local_ray():
            done = train_on_ray(folder, student, steps=args.steps, settings=settings, say=say)
        is_exact = done.steps == list(range(1, args.steps + 1))
        for part in done.status.parts:
            say(f"{part.name}: {part.state}, {part.restarts} restarts {part.detail}")
        say(f"{done.status.state} after {done.seconds:.0f} s, each step once: {is_exact}")
        if done.status.state == "finished":
            after = held_out_accuracy(done.final_model, settings)
            say(f"accuracy {before:.3f} before, {after:.3f} after {args.steps} steps")
    return 0 if is_exact and done.status.state == "finished" else 1


if __name__ == "__main__":
    sys.exit(main())
