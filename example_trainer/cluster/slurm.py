"""A run as one Slurm job: a batch script whose supervisor starts the parts with `srun`.

    submit ── sbatch ──► first node: RunSupervisor ── srun ──► trainer, environment, engine nodes

The nodes of a job in order: the trainer's (the service is on the first of them), those of the
environments (without any, they are on the first node), and those of the engines. An engine node
serves on ports from 9000, one engine per `tensor_parallel` of its GPUs, as environments with
`--slurm true` expect (NUM_TRAINING_NODES is the number of nodes before the engines').

A preempted job, or one that lost a node, is queued again by Slurm (`--requeue`). Its new supervisor
starts the same commands: the service has its run, the trainer its checkpoints. The output folder
has to be on a disk that every node shares.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from atroposlib.errors import AtroposError, ConfigError
from atroposlib.utils.command_parser import end_command, exit_code_of
from atroposlib.utils.proxies import exempt_hosts
from atroposlib.utils.text import inert_line
from example_trainer.cluster.local import (
    SupervisorRecord,
    find_secrets,
    hider,
    local_process,
    part_log,
    restore_weights,
    write_settings,
)
from example_trainer.cluster.parts import (
    Addresses,
    Part,
    engine_names,
    environment_names,
    plan_parts,
    service_names,
)
from example_trainer.cluster.placement import EXIT_CODES, RunState, RunStatus
from example_trainer.cluster.run_file import RunFile, read_run_file
from example_trainer.cluster.supervision import RunSupervisor
from example_trainer.launch.stack import ending_signals

FIRST_ENGINE_PORT = 9000
SERVICE_PORT = 8000
_COMMAND_LIMIT_S = 60.0
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "SUSPENDED")
_RUNNING = ("RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING", "STOPPED", "RESIZING")


@dataclass(frozen=True)
class Layout:
    """The nodes of a job; pure."""

    num_trainer: int
    num_environment: int
    num_engine: int
    engines_per_node: int
    engine_gpus: int
    """GPUs of the largest engine: INFER_TP of the port layout."""

    @classmethod
    def of(cls, run: RunFile) -> Layout:
        """Return the layout of a run.

        Raises:
            ConfigError: An engine, or the engines together, need more GPUs than the nodes have.
        """
        slurm = run.slurm
        sections = [section for section in run.engines if section.kind != "url"]
        num_engines = sum(section.count for section in sections)
        largest = max((section.num_gpus for section in sections), default=0)
        if largest > slurm.gpus_per_node:
            raise ConfigError(
                f"engines: one needs {largest} GPUs, but slurm.gpus_per_node is "
                f"{slurm.gpus_per_node}; lower tensor_parallel"
            )
        if run.trainer.gpus > slurm.gpus_per_node:
            raise ConfigError(
                f"trainer.gpus is {run.trainer.gpus}, but slurm.gpus_per_node is "
                f"{slurm.gpus_per_node}; raise trainer.nodes instead"
            )
        fitting = slurm.gpus_per_node // largest if largest else 0
        least = -(-num_engines // fitting) if fitting else min(1, num_engines)
        nodes = slurm.inference_nodes if slurm.inference_nodes is not None else least
        if num_engines == 0:
            nodes = 0
        if nodes < least:
            raise ConfigError(
                f"slurm.inference_nodes is {nodes}; {num_engines} engines of {largest} GPUs need "
                f"at least {least}"
            )
        if any(section.gpus for section in run.environments) and not slurm.environment_nodes:
            raise ConfigError("environments with gpus need slurm.environment_nodes of at least 1")
        per_node = -(-num_engines // nodes) if nodes else 0
        return cls(run.trainer.nodes, slurm.environment_nodes, nodes, per_node, largest)

    @property
    def num_training(self) -> int:
        """Nodes before those of the engines: NUM_TRAINING_NODES of the port layout."""
        return self.num_trainer + self.num_environment

    @property
    def num_nodes(self) -> int:
        return self.num_training + self.num_engine

    def addresses(self, run: RunFile, hosts: Sequence[str]) -> Addresses:
        """Return the address of every part, given the hosts of the job in order."""
        services = service_names(run)
        ports = {name: (run.service.port or SERVICE_PORT) + i for i, name in enumerate(services)}
        places = dict.fromkeys([*services, "trainer"], hosts[0])
        for number, name in enumerate(environment_names(run)):
            first = self.num_trainer if self.num_environment else 0
            places[name] = hosts[first + number % max(1, self.num_environment)]
        for number, name in enumerate(engine_names(run)):
            node, slot = divmod(number, self.engines_per_node)
            places[name] = hosts[self.num_training + node]
            ports[name] = FIRST_ENGINE_PORT + slot
        return Addresses(
            hosts=places,
            ports=ports,
            output=run.output,
            settings=run.output / "settings",
            bind="0.0.0.0",  # parts on other nodes reach it
            python=sys.executable,
        )


def step_command(
    part: Part, layout: Layout, addresses: Addresses, hosts: Sequence[str]
) -> list[str]:
    """Return the `srun` command that starts a part on its nodes; pure.

    Several steps share a node, so that GPUs are chosen by CUDA_VISIBLE_DEVICES within the step.
    """
    num_nodes = part.resources.nodes
    nodes = hosts[:num_nodes] if part.role == "trainer" else [addresses.hosts[part.name]]
    words = ["srun", "--overlap", f"--nodes={num_nodes}", f"--ntasks={num_nodes}"]
    # Without it, srun would use the number of tasks of the whole job.
    words += ["--ntasks-per-node=1", f"--nodelist={','.join(nodes)}", "--kill-on-bad-exit=1"]
    if part.resources.cpus:
        words.append(f"--cpus-per-task={max(1, round(part.resources.cpus))}")
    devices = _devices(part, layout, addresses)
    own = [f"{name}={value}" for name, value in part.variables.items()]
    return [*words, "env", *own, *devices, *part.command]


def _devices(part: Part, layout: Layout, addresses: Addresses) -> list[str]:
    gpus = part.resources.gpus
    first = 0
    if part.role == "engine":
        first = (addresses.ports[part.name] - FIRST_ENGINE_PORT) * layout.engine_gpus
    return [f"CUDA_VISIBLE_DEVICES={','.join(map(str, range(first, first + gpus)))}"]


class SlurmRun:
    """One run as a Slurm job; a placement.

    Args:
        run: The run file's content.
        file: The run file, which the job reads again.
    """

    def __init__(self, run: RunFile, file: Path) -> None:
        self._run = run
        self._file = file.resolve()
        self._layout = Layout.of(run)
        self._record = SupervisorRecord(run.output)
        self._job_file = self._record.folder / "job"
        self._script_file = self._record.folder / "job.sbatch"

    def render(self) -> Mapping[str, str]:
        hosts = [f"node-{number}" for number in range(self._layout.num_nodes)]
        addresses = self._layout.addresses(self._run, hosts)
        parts = plan_parts(self._run, addresses)
        steps = [
            f"# {part.name}\n{shlex.join(step_command(part, self._layout, addresses, hosts))}\n"
            for part in parts
        ]
        texts = {"job.sbatch": self._script(), "steps.sh": "\n".join(steps)}
        for part in parts:
            texts |= {f"settings/{name}": text for name, text in part.files.items()}
        return texts

    def submit(self) -> str:
        state = self.status().state
        if state in ("waiting", "running"):
            raise ConfigError(f"{self._run.name} is {state} as job {self._job()}; see status")
        self._record.folder.mkdir(parents=True, exist_ok=True)
        self._script_file.write_text(self._script(), encoding="utf-8")
        said = _slurm("sbatch", "--parsable", str(self._script_file))
        job = said.strip().partition(";")[0]
        if not job.isdecimal():
            raise AtroposError(f"sbatch answered {said[:200]!r}; expected the number of a job")
        self._job_file.write_text(f"{job}\n", encoding="utf-8")
        return f"{self._run.name} is job {job}"

    def status(self) -> RunStatus:
        job = self._job()
        if job is None:
            return RunStatus("none")
        state, reason = self._job_state(job)
        record = self._record.read()
        if state in _WAITING:
            return RunStatus("waiting", detail=f"job {job}: {state}, {reason}")
        if state in _RUNNING:
            return record._replace(state="running", detail=f"job {job}")
        return record._replace(state=_end_of(record, state), detail=_reason(record, job, state))

    def logs(self, part: str, *, lines: int) -> list[str]:
        return part_log(self._run, part, lines=lines)

    def down(self) -> str:
        job = self._job()
        if job is None or self._job_state(job)[0] not in (*_WAITING, *_RUNNING):
            return f"{self._run.name} has no job that waits or runs"
        _slurm("scancel", job)
        return f"job {job} was cancelled; the same command continues the run"

    def _job(self) -> str | None:
        try:
            return self._job_file.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return None

    def _job_state(self, job: str) -> tuple[str, str]:
        """Return state and reason of a job of this run; UNKNOWN if Slurm has forgotten it."""
        words = ["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T|%j|%r"]
        for line in _slurm(*words, tolerated="Invalid job id").splitlines():
            state, name, reason = line.split("|", 2)
            if name == self._job_name:  # numbers of jobs are reused after years
                return state, reason
        return "UNKNOWN", ""

    @property
    def _job_name(self) -> str:
        return f"atropos-{self._run.name}"

    def _script(self) -> str:
        run, slurm = self._run, self._run.slurm
        options = [
            f"--job-name={self._job_name}",
            f"--nodes={self._layout.num_nodes}",
            "--ntasks-per-node=1",
            "--requeue",
            "--open-mode=append",
            f"--output={shlex.quote(str(self._record.folder / 'job.log'))}",
            f"--chdir={shlex.quote(str(run.folder))}",
        ]
        if slurm.gpus_per_node:
            options += ["--exclusive", f"--gpus-per-node={slurm.gpus_per_node}"]
        for name in ("partition", "account", "time"):
            value = getattr(slurm, name)
            options += [f"--{name}={value}"] if value else []
        options += slurm.options
        for option in options:
            if not option.isprintable():  # a line break would begin a line of the shell
                shown = inert_line(option, max_characters=80)
                raise ConfigError(f"slurm: {shown}: expected one line of printable characters")
        variables = {
            "NUM_TRAINING_NODES": self._layout.num_training,
            "GPUS_PER_NODE": slurm.gpus_per_node,
            "INFER_TP": max(1, self._layout.engine_gpus),
        }
        command = [sys.executable, "-m", "example_trainer.cluster.slurm", str(self._file)]
        return "\n".join(
            [
                "#!/usr/bin/env bash",
                *(f"#SBATCH {option}" for option in options),
                "set -euo pipefail",
                *(f"export {name}={value}" for name, value in variables.items()),
                *([slurm.setup.rstrip()] if slurm.setup else []),
                f"exec {shlex.join(command)}\n",
            ]
        )


def _end_of(record: RunStatus, job_state: str) -> RunState:
    """Return the end of a run from the supervisor's last record and the state of its job."""
    if record.state in ("finished", "failed"):
        return record.state
    return "lost" if job_state in ("NODE_FAIL", "TIMEOUT", "BOOT_FAIL", "UNKNOWN") else "stopped"


def _reason(record: RunStatus, job: str, job_state: str) -> str:
    return record.detail if record.state == "failed" else f"job {job}: {job_state}"


def _slurm(*words: str, tolerated: str | None = None) -> str:
    """Run a command of Slurm and return its output; a `tolerated` error is ignored."""
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=_COMMAND_LIMIT_S, check=False
        )
    except FileNotFoundError:
        raise ConfigError(f"{words[0]} is not installed; submit from a login node") from None
    except subprocess.TimeoutExpired:
        raise AtroposError(f"{words[0]} did not answer in {_COMMAND_LIMIT_S:g} s") from None
    if done.returncode != 0 and (tolerated is None or tolerated not in done.stderr):
        raise AtroposError(f"{words[0]} failed: {done.stderr.strip()[:500]}")
    return done.stdout


def main(argv: Sequence[str] | None = None) -> None:
    """Supervise a run inside its job; exit as `atropos-up` does."""
    [file] = sys.argv[1:] if argv is None else argv
    try:
        with ending_signals():
            run = read_run_file(Path(file))
            status = _supervise(run).masked(hider(run))
    except AtroposError as error:
        end_command("atropos-up", error, code=exit_code_of(error))
    if status.detail:
        end_command("atropos-up", status.detail, code=EXIT_CODES[status.state])
    sys.exit(EXIT_CODES[status.state])


def _supervise(run: RunFile) -> RunStatus:
    layout = Layout.of(run)
    hosts = _slurm("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split()
    if len(hosts) != layout.num_nodes:
        raise ConfigError(f"the job has {len(hosts)} nodes; expected {layout.num_nodes}")
    exempt_hosts(hosts)  # the parts reach each other without a proxy of the cluster
    addresses = layout.addresses(run, hosts)
    parts = plan_parts(run, addresses)
    record = SupervisorRecord(run.output)
    write_settings(parts, run.output)
    hide = hider(run)
    with record.held():
        return RunSupervisor(
            parts,
            lambda part: local_process(
                part, run, step_command(part, layout, addresses, hosts), find_secrets(part)
            ),
            start_limit_s=run.start_limit_s,
            on_event=lambda text: _log(hide(text)),
            on_change=lambda status: record.write(status.masked(hide)),
            on_return=lambda part: restore_weights(part, run),
        ).run()


def _log(text: str) -> None:
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
