"""Containers of workspaces as Jobs of a Kubernetes cluster, by `kubectl`.

    start    Job (template, deadline, TTL) ─► pod ─► attach: the keeper reads our input
    run      exec in the pod                            network: a bridge over exec, no route

The keeper ends with the connection of `attach` (`stdinOnce`), and its pod with it: also when this
process was killed. The Job is then removed after its TTL. Each process of environments holds a
Lease, and every other one removes Jobs whose Lease is gone or not renewed. At most `max_jobs` Jobs
exist at a time, made at most `per_minute` a minute. A policy forbids the pods any network.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import yaml

from atroposlib.errors import ConfigError
from atroposlib.sandbox.interface import SandboxLimits
from atroposlib.sandbox.streams import Finished, run_bounded
from atroposlib.utils.yaml_text import read_yaml
from atroposlib.workspaces import bridge
from atroposlib.workspaces.bridge import READY, Multiplexer, Streams
from atroposlib.workspaces.container_engine import (
    CAPABILITIES,
    KEEPER,
    LABEL,
    ChangeKind,
    Keeper,
    message_of,
)
from atroposlib.workspaces.interface import (
    Network,
    WorkspaceContentError,
    WorkspaceError,
    WorkspaceSpec,
)
from atroposlib.workspaces.network import MOUNTED, NetworkGate

__all__ = ["KUBERNETES", "JobEngine", "JobOptions", "as_job_options"]

logger = logging.getLogger(__name__)

KUBERNETES = "kubernetes"
OWNER_LABEL = "atropos.workspace/owner"
CONTAINER = "workspace"
FOLDER = "/run/atropos"
POLICY = "atropos-workspaces"
TIMEOUT_S = 60.0
MESSAGE_BYTES = 1_000_000
POLL_S = (0.1, 1.0)
BRIDGE_S = 30.0
MAX_TEMPLATE_BYTES = 2**18
HOST_FIELDS = ("hostNetwork", "hostPID", "hostIPC")
PRIVILEGE_FIELDS = ("privileged", "allowPrivilegeEscalation")
"""Fields of pods and of containers that a template may not set."""
VARIABLES = (
    *("HOME", "PATH", "USER", "TMPDIR", "KUBECONFIG", "KUBECACHEDIR"),
    *("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"),
)
"""Variables of this process that kubectl needs."""
HOPELESS = ("InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError")
LATER = ("ImagePullBackOff", "CreateContainerError")
"""Reasons of a waiting pod that the kubelet has tried several times."""
WAITING_KEEPER = f"read -r start\n{KEEPER}"
"""Its first line of output would be lost before the connection of `attach`."""
LISTING = """
cd /; find . -xdev \\( -path ./proc -o -path ./sys -o -path ./dev -o -path ./run/atropos \\) \
-prune -o -exec stat -c '%f %s %Y %n' {} +
"""
MAX_LISTING_BYTES = 64 * 2**20
SOME_UNREADABLE = 1


@dataclass(frozen=True)
class JobOptions:
    """Settings of workspaces on Kubernetes."""

    kubectl: tuple[str, ...] = ()
    """Options before each command, such as `--context=NAME` or `--namespace=NAME`."""
    template: Path | None = None
    """YAML file of a Job; what this page sets has precedence, the rest is kept: node selectors,
    tolerations, a runtime class, volumes. Its first container is that of the workspace."""
    max_jobs: int = 256
    per_minute: int = 120
    ttl_s: int = 300
    """Time until a Job that has ended is removed."""
    deadline_s: int = 21_600
    """Maximum life of a workspace."""
    lease_s: int = 120
    """Time without renewal after which the Jobs of an owner are removed."""
    start_s: int = 600
    """Maximum time until the pod runs, with the pull of its image."""


def as_job_options(options: JobOptions | Mapping[str, Sequence[str]] | None) -> JobOptions:
    """Return options from lists of strings, as configuration files have them.

    Raises:
        ConfigError: a name is unknown, or a value is not of its type.
    """
    if isinstance(options, JobOptions):
        return options
    known = {each.name: each.type for each in fields(JobOptions)}
    values: dict[str, Any] = {}
    for name, words in (options or {}).items():
        one = words[0] if len(words) == 1 else ""
        if name == "kubectl":
            values[name] = tuple(words)
        elif name == "template" and one:
            values[name] = Path(one)
        elif known.get(name) == "int" and re.fullmatch(r"[1-9][0-9]{0,8}", one):
            values[name] = int(one)
        else:
            raise ConfigError(
                f"options of workspaces on Kubernetes: expected lists of strings named "
                f"{', '.join(known)}, with one positive integer each for limits, got "
                f"{name}: {list(words)!r}"
            )
    return JobOptions(**values)


class JobEngine:
    """Runs a Job for each workspace; see `WorkspaceEngine`.

    Raises:
        ConfigError: the template cannot be used.
        WorkspaceError: kubectl is not installed here.
    """

    kind = KUBERNETES
    exit_notice = "command terminated with exit code {}\n"

    def __init__(self, options: JobOptions) -> None:
        if shutil.which("kubectl") is None:
            raise WorkspaceError(
                "kubectl is not installed; see kubernetes.io/docs/tasks/tools, or add it to the "
                "image of the environment"
            )
        self._options = options
        self._template = {} if options.template is None else _read_template(options.template)
        self._owner = f"atropos-owner-{secrets.token_hex(6)}"
        self._slots = asyncio.Semaphore(options.max_jobs)
        self._counted: set[str] = set()
        """Names of Jobs that have a slot."""
        self._jobs: dict[str, str] = {}
        """Pod by name of the Job, empty until it runs."""
        self._next_at = 0.0
        self._renewing: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Hold a Lease, forbid workspaces the network, and remove Jobs of dead owners."""
        await self._apply(_network_policy())
        await self._renew()
        await self.reconcile()
        self._renewing = asyncio.create_task(self._keep())

    async def close(self) -> None:
        renewing, self._renewing = self._renewing, None
        if renewing is None:
            return
        renewing.cancel()
        await asyncio.wait({renewing})
        await self._delete("leases.coordination.k8s.io", self._owner)

    async def image_for(self, spec: WorkspaceSpec) -> str:
        if spec.image is None:
            raise ConfigError(
                f"{spec.name}: workspaces of the kind kubernetes need an image of a registry; "
                "build the Dockerfile, push the image and name it in the task"
            )
        if spec.source is not None and spec.source.is_dir() and any(spec.source.iterdir()):
            raise ConfigError(
                f"{spec.name}: workspaces of the kind kubernetes do not add the files of "
                f"{spec.source} to the image {spec.image}; build an image that has them"
            )
        return spec.image

    async def workdir_of(self, image: str) -> str:
        return ""  # known to the nodes only; the spec names it

    @property
    def is_full(self) -> bool:
        return self._slots.locked()

    async def start(
        self,
        name: str,
        image: str,
        spec: WorkspaceSpec,
        workdir: str,
        *,
        is_counted: bool = True,
    ) -> Keeper:
        if is_counted:
            await self._take_slot()
            self._counted.add(name)
        self._jobs[name] = ""
        await self._take_turn()
        job = self._manifest(name, image, spec, workdir)
        made = await self._kubectl("create", "-f", "-", stdin=json.dumps(job).encode())
        if made.returncode != 0:
            raise WorkspaceError(f"the Job of a workspace was refused: {message_of(made)}")
        pod = self._jobs[name] = await self._running_pod(name)
        words = self._words("attach", "-i", "--quiet", pod, "-c", CONTAINER)
        return await Keeper.start(words, self.env(), first_line=b"start\n")

    async def remove(self, name: str) -> None:
        if self._jobs.pop(name, None) is None:
            return
        try:
            await self._delete("jobs.batch", name)
        finally:
            if name in self._counted:
                self._counted.discard(name)
                self._slots.release()

    def exec_words(
        self,
        name: str,
        words: Sequence[str],
        *,
        user: str | None = None,
        forwards: Sequence[tuple[str, str]] = (),
    ) -> list[str]:
        # The API has no user for exec: all commands have that of the image or the template.
        return self._words("exec", "-i", self._jobs.get(name, ""), "-c", CONTAINER, "--", *words)

    @contextlib.asynccontextmanager
    async def carried(
        self, name: str, network: Network, number: int
    ) -> AsyncIterator[tuple[NetworkGate, list[tuple[str, str]]]]:
        there = f"{MOUNTED}/{number}"
        async with NetworkGate(network, mounted=there) as gate:
            (here,) = gate.mounts.values()
            await self._send_programs(name, here, there)
            words = self.exec_words(
                name,
                ["python3", "-I", "-S", "-B", f"{there}/bridge.py", there, *map(str, gate.ports)],
            )
            async with _bridge(words, self.env(), here):
                yield gate, []

    async def changed(
        self, name: str, unchanged: Callable[[], Awaitable[str]]
    ) -> dict[str, ChangeKind]:
        """Compare modes, sizes and times with those in a pod of the same image."""
        old = await self._listing(await unchanged())
        new = await self._listing(name)
        changed: dict[str, ChangeKind] = dict.fromkeys(old.keys() - new.keys(), "removed")
        for path, state in new.items():
            if path not in old:
                changed[path] = "added"
            elif state != old[path]:
                changed[path] = "modified"
        return changed

    async def run(
        self,
        words: Sequence[str],
        *,
        stdin: bytes | int = b"",
        timeout_s: float = TIMEOUT_S,
        max_bytes: int = MESSAGE_BYTES,
    ) -> Finished:
        limits = SandboxLimits(wall_s=timeout_s, output_bytes=max_bytes)
        try:
            finished = await run_bounded(words, stdin=stdin, limits=limits, env=self.env())
        except OSError as error:
            raise WorkspaceError(f"kubectl cannot be started: {error}") from error
        if finished.stopped_for == "wall_time":
            raise WorkspaceError(f"kubectl did not end within {timeout_s:g} s")
        return finished

    def env(self) -> dict[str, str]:
        return {name: os.environ[name] for name in VARIABLES if name in os.environ}

    async def reconcile(self) -> int:
        """Remove the Jobs of owners whose Lease is gone or expired; return their number."""
        now = datetime.now(timezone.utc)
        leases = await self._listed("leases.coordination.k8s.io", f"{LABEL}=owner")
        live = {lease["metadata"]["name"] for lease in leases if not is_expired(lease, now)}
        live.add(self._owner)  # also where its renewal was late
        jobs = await self._listed("jobs.batch", f"{LABEL}=fork")
        dead = [job for job in jobs if job["metadata"]["labels"].get(OWNER_LABEL) not in live]
        for job in dead:
            await self._delete("jobs.batch", job["metadata"]["name"])
        for lease in leases:
            if lease["metadata"]["name"] not in live:
                await self._delete("leases.coordination.k8s.io", lease["metadata"]["name"])
        if dead:
            logger.info("%d Jobs of workspaces whose owner has ended were removed", len(dead))
        return len(dead)

    async def _keep(self) -> None:
        """Renew the Lease and remove Jobs of dead owners, until cancelled."""
        while True:
            await asyncio.sleep(self._options.lease_s / 4)
            try:
                await self._renew()
                await self.reconcile()
            except WorkspaceError as error:
                logger.warning("the Lease of workspaces was not renewed: %s", error)

    async def _renew(self) -> None:
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {"holderIdentity": self._owner, "leaseDurationSeconds": self._options.lease_s}
        metadata = {"name": self._owner, "labels": {LABEL: "owner"}}
        await self._apply(
            {
                **{"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"},
                **{"metadata": metadata, "spec": {**spec, "renewTime": now}},
            }
        )

    async def _take_slot(self) -> None:
        """Wait until fewer than `max_jobs` Jobs exist; at once if it is not full."""
        if not self.is_full:
            await self._slots.acquire()
            return
        try:
            await asyncio.wait_for(self._slots.acquire(), self._options.start_s)
        except asyncio.TimeoutError as error:
            raise WorkspaceError(
                f"no workspace was closed in {self._options.start_s} s, and max_jobs, "
                f"{self._options.max_jobs}, are open; raise max_jobs or run fewer at a time"
            ) from error

    async def _take_turn(self) -> None:
        """Wait until another Job may be made."""
        now = time.monotonic()
        at = max(now, self._next_at)
        self._next_at = at + 60.0 / self._options.per_minute
        await asyncio.sleep(at - now)

    async def _running_pod(self, name: str) -> str:
        """Return the pod of a Job once it runs.

        Raises:
            WorkspaceError: it cannot run, or not in time; the message has its state.
        """
        until = time.monotonic() + self._options.start_s
        pause_s, state = POLL_S[0], "no pod was made; see kubectl describe job"
        while time.monotonic() < until:
            for pod in await self._listed("pods", f"job-name={name}"):
                status = pod.get("status", {})
                seen: dict[str, Any] = next(
                    iter(status.get("containerStatuses", [])), {"state": {}}
                )
                if "running" in seen["state"]:
                    return str(pod["metadata"]["name"])
                waiting = seen["state"].get("waiting", {})
                state = waiting.get("reason") or status.get("phase", "Pending")
                detail = str(waiting.get("message", ""))[:500]
                if state in (*HOPELESS, *LATER, "Failed", "Succeeded"):
                    raise WorkspaceError(f"the pod of a workspace cannot run: {state} {detail}")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_S[1])
        raise WorkspaceError(f"no pod for a workspace in {self._options.start_s} s: {state}")

    def _manifest(self, name: str, image: str, spec: WorkspaceSpec, workdir: str) -> dict[str, Any]:
        limits = spec.limits
        job: dict[str, Any] = json.loads(json.dumps(self._template))
        labels = {LABEL: "fork", OWNER_LABEL: self._owner}
        pod = job.setdefault("spec", {}).setdefault("template", {})
        pod.setdefault("metadata", {}).setdefault("labels", {}).update(labels)
        job |= {"apiVersion": "batch/v1", "kind": "Job"}
        metadata = job.setdefault("metadata", {})
        metadata["name"] = name
        metadata.setdefault("labels", {}).update(labels)
        job["spec"] |= {
            **{"backoffLimit": 0, "completions": 1, "parallelism": 1},
            "activeDeadlineSeconds": self._options.deadline_s,
            "ttlSecondsAfterFinished": self._options.ttl_s,
        }
        inner = pod.setdefault("spec", {})
        inner |= {"restartPolicy": "Never", "automountServiceAccountToken": False}
        inner |= {"enableServiceLinks": False, "terminationGracePeriodSeconds": 1}
        inner.setdefault("volumes", []).append({"name": "atropos", "emptyDir": {}})
        container = inner.setdefault("containers", [{}])[0]
        security = {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"], "add": list(CAPABILITIES)},
        }
        resources = container.setdefault("resources", {})
        resources["limits"] = {
            "memory": str(limits.memory_bytes),
            "ephemeral-storage": str(limits.disk_bytes + 2**26),
            **resources.get("limits", {}),
        }
        container |= {
            **{"name": CONTAINER, "image": image, "stdin": True, "stdinOnce": True},
            "command": ["sh", "-c", WAITING_KEEPER, "sh", workdir],
            "securityContext": {**security, **container.get("securityContext", {})},
        }
        container.setdefault("volumeMounts", []).append({"name": "atropos", "mountPath": FOLDER})
        return job

    async def _send_programs(self, name: str, here: Path, there: str) -> None:
        """Copy relay and bridge into the container."""
        script = 'mkdir -p -m 755 "$1" && cat > "$1/$2" && chmod 644 "$1/$2"'
        for file in (here / "relay.py", Path(bridge.__file__)):
            content = await asyncio.to_thread(file.read_bytes)
            words = self.exec_words(name, ["sh", "-c", script, "sh", there, file.name])
            made = await self.run(words, stdin=content)
            if made.returncode != 0:
                raise WorkspaceError(f"the network cannot be set up: {message_of(made)}")

    async def _listing(self, name: str) -> dict[str, tuple[str, ...]]:
        """Return mode, size and time of the files in a container; of folders only the mode."""
        words = self.exec_words(name, ["sh", "-c", LISTING])
        finished = await self.run(words, max_bytes=MAX_LISTING_BYTES, timeout_s=300)
        if finished.returncode not in (0, SOME_UNREADABLE) or finished.stopped_for is not None:
            raise WorkspaceContentError(f"changes cannot be listed: {message_of(finished)}")
        found: dict[str, tuple[str, ...]] = {}
        for line in finished.stdout.decode("utf-8", "surrogateescape").splitlines():
            words_of = re.fullmatch(r"([0-9a-f]+) ([0-9]+) (-?[0-9]+) \.(/.+)", line)
            if words_of is not None:
                is_folder = int(words_of[1], 16) & 0o170000 == 0o040000
                found[words_of[4]] = words_of.groups()[: 1 if is_folder else 3]
        return found

    async def _listed(self, kind: str, selector: str) -> list[dict[str, Any]]:
        done = await self._kubectl("get", kind, "-l", selector, "-o", "json")
        if done.returncode != 0:
            raise WorkspaceError(f"kubectl get {kind} failed: {message_of(done)}")
        try:
            items: list[dict[str, Any]] = json.loads(done.stdout)["items"]
        except ValueError as error:  # cut at the limit of the output
            raise WorkspaceError(f"kubectl get {kind} gave no JSON: {error}") from error
        return items

    async def _delete(self, kind: str, name: str) -> None:
        done = await self._kubectl("delete", kind, name, "--ignore-not-found", "--wait=false")
        if done.returncode != 0:
            logger.warning("%s of a workspace was not removed: %s", kind, message_of(done))

    async def _apply(self, thing: Mapping[str, Any]) -> None:
        words = ("apply", "--server-side", "--field-manager=atropos", "--force-conflicts")
        done = await self._kubectl(*words, "-f", "-", stdin=json.dumps(thing).encode())
        if done.returncode != 0:
            raise WorkspaceError(f"kubectl apply of a {thing['kind']} failed: {message_of(done)}")

    async def _kubectl(self, *words: str, stdin: bytes = b"") -> Finished:
        return await self.run(self._words(*words), stdin=stdin, max_bytes=MAX_LISTING_BYTES)

    def _words(self, *words: str) -> list[str]:
        return ["kubectl", *self._options.kubectl, *words]


def _read_template(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_TEMPLATE_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_TEMPLATE_BYTES} bytes; expected a Job")
        content = read_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: expected the YAML file of a Job: {error}") from error
    if not isinstance(content, dict) or content.get("kind", "Job") != "Job":
        raise ConfigError(f"{path}: expected one object with kind: Job, the template of workspaces")
    try:
        json.dumps(content)
        given = _privileges(content)
    except (TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"{path}: expected the fields of a Job: {error}") from error
    if given:
        raise ConfigError(
            f"{path}: {given[0]} would end the isolation of workspaces; expected a template "
            "without it"
        )
    return content


def _privileges(job: Mapping[str, Any]) -> list[str]:
    """Return what a template sets that gives its pods the rights or the network of their node."""
    pod = job.get("spec", {}).get("template", {}).get("spec", {})
    given = [name for name in HOST_FIELDS if pod.get(name)]
    containers = [*pod.get("containers", []), *pod.get("initContainers", [])]
    for security in (each.get("securityContext", {}) for each in containers):
        given += [name for name in PRIVILEGE_FIELDS if security.get(name)]
    return given


def _network_policy() -> dict[str, Any]:
    """Return the policy without any allowed connection; the cluster's network must enforce it."""
    spec = {
        "podSelector": {"matchLabels": {LABEL: "fork"}},
        "policyTypes": ["Ingress", "Egress"],
    }
    return {
        **{"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy"},
        **{"metadata": {"name": POLICY, "labels": {LABEL: "policy"}}, "spec": spec},
    }


def is_expired(lease: Mapping[str, Any], now: datetime) -> bool:
    spec = lease.get("spec", {})
    text = str(spec.get("renewTime", "1970-01-01T00:00:00Z")).replace("Z", "+00:00")
    try:
        renewed = datetime.fromisoformat(text)
        return renewed + timedelta(seconds=int(spec.get("leaseDurationSeconds", 0))) < now
    except (ValueError, TypeError, OverflowError):
        return True  # not of ours, which would be renewed by now


@contextlib.asynccontextmanager
async def _bridge(
    words: Sequence[str], env: Mapping[str, str], folder: Path
) -> AsyncIterator[None]:
    """Run the bridge in a container; its connections lead to the sockets in a folder here."""
    process = await asyncio.create_subprocess_exec(
        *words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=env,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None

    async def connect(port: int) -> Streams:
        return await asyncio.open_unix_connection(folder / str(port))

    carrying: asyncio.Task[None] | None = None
    try:
        first = await asyncio.wait_for(process.stdout.readline(), BRIDGE_S)
        if first != READY:
            raise WorkspaceError("the bridge of a workspace's network did not start")
        ends = Multiplexer(process.stdout, process.stdin, connect)
        carrying = asyncio.create_task(ends.run())
        yield
    except asyncio.TimeoutError as error:
        raise WorkspaceError("the bridge of a workspace's network did not start") from error
    finally:
        if carrying is not None:
            carrying.cancel()
            await asyncio.wait({carrying})
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), BRIDGE_S)
        except asyncio.TimeoutError:
            process.kill()
            await process.wait()
