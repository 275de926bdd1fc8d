"""Runs of a run file on Kubernetes: submitted, looked at and removed with `kubectl`.

    submit   manifests ─► output/kubernetes/ ─► kubectl apply --server-side -k
    status   kubectl get -l atropos/run=NAME
    logs     kubectl logs POD
    down     kubectl delete -l atropos/run=NAME

Only objects with the label of the run are read or deleted. Claims of volumes are kept by `down`:
the journal and the checkpoints are on them, and the next `submit` continues the run.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from atroposlib.errors import ConfigError
from atroposlib.utils.text import inert_block
from example_trainer.cluster.manifests import PART_LABEL, RUN_LABEL, TRAINER, render_manifests
from example_trainer.cluster.parts import engine_names, environment_names
from example_trainer.cluster.placement import PartState, PartStatus, RunState, RunStatus
from example_trainer.cluster.run_file import RunFile

WORKLOADS = "deployments.apps,statefulsets.apps,jobs.batch"
DELETED = (
    f"{WORKLOADS},services,configmaps,poddisruptionbudgets.policy,serviceaccounts,"
    "roles.rbac.authorization.k8s.io,rolebindings.rbac.authorization.k8s.io"
)
"""Everything of a run except its claims."""
MANAGER = "atropos-up"
TIMEOUT_S = 120.0
MAX_MESSAGE = 2000
CONFLICTS = ("conflict", "immutable", "Forbidden: updates to statefulset")


class KubernetesRun:
    """A run of a run file on Kubernetes."""

    def __init__(self, run: RunFile, file: Path) -> None:
        self._run = run
        self._file = file

    def render(self) -> Mapping[str, str]:
        """Return the files of the kustomize base by name."""
        return render_manifests(self._run)

    def submit(self) -> str:
        """Create or update the objects of the run; a trainer that failed is started again."""
        files = self.render()
        folder = self._run.output / "kubernetes"
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.yaml"):
            old.unlink()
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        trainer = self._trainer()
        if trainer is not None and _condition(trainer, "Failed"):
            self._kubectl("delete", "job", trainer["metadata"]["name"], "--cascade=foreground")
        words = ["apply", "--server-side", f"--field-manager={MANAGER}", "-k", str(folder)]
        done = self._start(*words)
        if done.returncode != 0:
            hint = ""
            if any(word in done.stderr for word in CONFLICTS):
                hint = f"; end the run first: atropos-up down {self._file} --on kubernetes"
            raise ConfigError(f"{self._file}: kubectl apply failed: {_message(done.stderr)}{hint}")
        return f"{self._run.name} was submitted to the namespace {self._run.kubernetes.namespace}"

    def status(self) -> RunStatus:
        """Return the state of the run, by the conditions of its objects and pods."""
        found = _items(self._kubectl("get", f"{WORKLOADS},pods", *self._selector, "-o", "json"))
        pods = [each for each in found if each["kind"] == "Pod"]
        workloads = [each for each in found if each["kind"] != "Pod"]
        parts = tuple(_status_of(each, pods) for each in sorted(workloads, key=_start_order))
        trainers = [each for each in workloads if _part_of(each) == TRAINER]
        if not workloads:
            return RunStatus("none")
        if not trainers:
            return RunStatus("stopped", parts, "the Job of the trainer was removed")
        return RunStatus(_state_of_run(trainers[0], parts), parts, _reason(trainers[0]))

    def logs(self, part: str, *, lines: int) -> Iterable[str]:
        """Return the last lines that the newest pod of a part wrote."""
        known = ["service", *engine_names(self._run), *environment_names(self._run), TRAINER]
        if part not in known:
            raise ConfigError(f"there is no part {part!r}; expected one of {', '.join(known)}")
        selector = f"{RUN_LABEL}={self._run.name},{PART_LABEL}={part}"
        pods = _items(self._kubectl("get", "pods", "-l", selector, "-o", "json"))
        if not pods:
            raise ConfigError(f"{part} of {self._run.name} has no pod; see atropos-up status")
        newest = max(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))
        name = newest["metadata"]["name"]
        return self._kubectl("logs", name, f"--tail={lines}").splitlines()

    def down(self) -> str:
        """Delete what carries the label of the run, except its claims, and wait for the pods."""
        self._kubectl(
            "delete", DELETED, *self._selector, "--cascade=foreground", timeout_s=self._grace_s
        )
        self._kubectl(
            *("wait", "--for=delete", "pods", *self._selector),
            *(f"--timeout={self._grace_s:g}s",),
            timeout_s=self._grace_s + TIMEOUT_S,
        )
        claims = _items(
            self._kubectl("get", "persistentvolumeclaims", *self._selector, "-o", "json")
        )
        names = ", ".join(claim["metadata"]["name"] for claim in claims)
        kept = f"; kept with journal and checkpoints: {names}" if names else ""
        return f"{self._run.name} was removed{kept}"

    @property
    def _selector(self) -> tuple[str, str]:
        return ("-l", f"{RUN_LABEL}={self._run.name}")

    @property
    def _grace_s(self) -> float:
        return self._run.kubernetes.grace_s + TIMEOUT_S

    def _trainer(self) -> dict[str, Any] | None:
        jobs = _items(self._kubectl("get", "jobs.batch", *self._selector, "-o", "json"))
        return next((job for job in jobs if _part_of(job) == TRAINER), None)

    def _kubectl(self, *words: str, timeout_s: float = TIMEOUT_S) -> str:
        """Run kubectl and return its output.

        Raises:
            ConfigError: It failed; the message has its reason.
        """
        done = self._start(*words, timeout_s=timeout_s)
        if done.returncode != 0:
            raise ConfigError(f"kubectl {words[0]} failed: {_message(done.stderr)}")
        return done.stdout

    def _start(self, *words: str, timeout_s: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
        place = self._run.kubernetes
        if shutil.which("kubectl") is None:
            raise ConfigError(
                "kubectl is not installed; see kubernetes.io/docs/tasks/tools, or print the "
                "objects with --dry-run"
            )
        context = [] if place.context is None else [f"--context={place.context}"]
        command = ["kubectl", *context, f"--namespace={place.namespace}", *words]
        try:
            return subprocess.run(
                command,
                capture_output=True,
                encoding="utf-8",
                errors="replace",  # a log may contain any bytes
                check=False,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired as error:
            raise ConfigError(
                f"kubectl {words[0]} did not end within {timeout_s:g} s; is the API server of the "
                "current context reachable"
            ) from error


def _message(stderr: str) -> str:
    return inert_block(stderr.strip())[:MAX_MESSAGE] or "no reason given"


def _items(text: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = json.loads(text)["items"]
    return items


def _part_of(thing: Mapping[str, Any]) -> str:
    return str(thing["metadata"].get("labels", {}).get(PART_LABEL, ""))


def _condition(job: Mapping[str, Any], kind: str) -> dict[str, Any] | None:
    """Return a condition of a Job that holds."""
    conditions = job.get("status", {}).get("conditions", [])
    return next((e for e in conditions if e["type"] == kind and e["status"] == "True"), None)


def _reason(job: Mapping[str, Any]) -> str:
    failed = _condition(job, "Failed")
    return "" if failed is None else str(failed.get("message") or failed.get("reason") or "")


def _start_order(workload: Mapping[str, Any]) -> tuple[int, str]:
    roles = {"StatefulSet": 0, "Deployment": 1, "Job": 2}
    return roles[workload["kind"]], workload["metadata"]["name"]


def _state_of_run(trainer: Mapping[str, Any], parts: Iterable[PartStatus]) -> RunState:
    if _condition(trainer, "Complete"):
        return "finished"
    if _condition(trainer, "Failed"):
        return "failed"
    is_waiting = all(part.state == "waiting" for part in parts)
    return "waiting" if is_waiting else "running"


def _status_of(workload: Mapping[str, Any], pods: Iterable[Mapping[str, Any]]) -> PartStatus:
    """Return the status of a part from its workload and the pods with its label."""
    name = _part_of(workload)
    own = [pod for pod in pods if _part_of(pod) == name]
    seen = [_seen(pod) for pod in own]
    restarts = sum(each.restarts for each in seen)
    if workload["kind"] == "Job":
        restarts += sum(1 for each in seen if each.state == "failed")
        if _condition(workload, "Complete"):
            return PartStatus(name, "finished", restarts)
        if _condition(workload, "Failed"):
            return PartStatus(name, "failed", restarts, _reason(workload))
    live = [each for each in seen if each.state not in ("failed", "finished")]
    if not live:
        return PartStatus(name, "restarting" if seen else "waiting", restarts)
    worst = min(live, key=lambda each: _BY_PROGRESS.index(each.state))
    return PartStatus(name, worst.state, restarts, worst.detail)


_BY_PROGRESS: tuple[PartState, ...] = ("restarting", "waiting", "starting", "running")


class SeenPod(NamedTuple):
    """State of one pod."""

    state: PartState
    restarts: int
    detail: str
    """Its node, or the reason why it waits."""


def _seen(pod: Mapping[str, Any]) -> SeenPod:
    status = pod.get("status", {})
    container: dict[str, Any] = next(iter(status.get("containerStatuses", [])), {})
    restarts = int(container.get("restartCount", 0))
    node = str(pod["spec"].get("nodeName", ""))
    phase = status.get("phase")
    if phase in ("Failed", "Succeeded"):
        return SeenPod("failed" if phase == "Failed" else "finished", restarts, node)
    state = container.get("state", {})
    reason = str(state.get("waiting", {}).get("reason", ""))
    if reason == "CrashLoopBackOff" or "terminated" in state:
        return SeenPod("restarting", restarts, reason)
    if "running" not in state:
        return SeenPod("waiting", restarts, reason)
    return SeenPod("running" if container.get("ready") else "starting", restarts, node)
