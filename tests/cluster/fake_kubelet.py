"""Controllers and nodes of a fake Kubernetes: pods are local processes in bubblewrap.

    Deployment, StatefulSet, Job ─► pods ─► containers (bwrap) ─► probes ─► Services (TCP relays)

A container sees this machine's files read-only, or those of an image folder, and its volumes where
the pod mounts them. Each pod has a loopback address of its own, which replaces 0.0.0.0 in its
command, and an /etc/hosts with the Services. Restart policies, back-off, probes, deadlines, TTLs
and grace periods have the meaning of the API; back-off starts at 0.2 s in place of 10 s.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import copy
import itertools
import json
import os
import re
import shutil
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import yaml

if TYPE_CHECKING:
    from tests.cluster.fake_kubernetes import ObjectStore

ROOT = Path(__file__).parents[2]
PERIOD_S = 0.1
PROBE_S = 0.5
FIRST_BACKOFF_S = 0.2
WORKLOADS = ("Deployment", "StatefulSet", "Job")


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Return a word of a command as Kubernetes does: `$(NAME)` is replaced, `$$` is one `$`."""
    return re.sub(
        r"\$(?:\$|\((\w+)\))",
        lambda found: variables.get(found[1], found[0]) if found[1] else "$",
        text,
    )


class Container:
    """The processes of one container, and its output since the first start."""

    def __init__(
        self,
        pod: dict[str, Any],
        spec: dict[str, Any],
        folder: Path,
        words: list[str],
        env: dict[str, str],
    ) -> None:
        self.pod = pod
        self.spec = spec
        self.before: list[Container] = []
        """Init containers that have not succeeded."""
        self.env = env
        self.words = words
        self.log = folder / "log"
        self.process: asyncio.subprocess.Process | None = None
        self.init_pid = 0
        self.restarts = 0
        self.start_after = 0.0
        self.is_ready = False
        self.failures = 0
        self.probed_at = 0.0
        self.hook: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.returncode is None and self.init_pid > 0

    async def start(self) -> None:
        reading, writing = os.pipe()
        stdin = asyncio.subprocess.PIPE if self.spec.get("stdin") else asyncio.subprocess.DEVNULL
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                self.words[0],
                *("--info-fd", str(writing)),
                *self.words[1:],
                stdin=stdin,
                stdout=log,
                stderr=log,
                env=self.env,
                pass_fds=[writing],
                start_new_session=True,
            )
        os.close(writing)
        text = await asyncio.to_thread(_read_all, reading)
        found = re.search(r'"child-pid": ([0-9]+)', text)
        init_pid = int(found[1]) if found else 0
        # Its file systems are not mounted yet.
        while self.process.returncode is None and _is_bubblewrap(init_pid):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        self.init_pid = init_pid
        if "lifecycle" in self.spec:
            self.hook = asyncio.create_task(self._run_hook())

    async def _run_hook(self) -> None:
        """Run what follows the start; the container is not ready before, and ends if it fails."""
        words = self.spec["lifecycle"]["postStart"]["exec"]["command"]
        address = self.pod["status"]["podIP"]
        process = await self.execute([each.replace("localhost", address) for each in words])
        output = b"".join(await process.communicate())
        with self.log.open("ab") as log:
            log.write(b"postStart: " + output + b"\n" if output else b"")
        if process.returncode != 0:
            self.kill()

    async def execute(self, words: list[str]) -> asyncio.subprocess.Process:
        """Run a command in the namespaces of the container, in its working directory."""
        folder = self.spec.get("workingDir", "/")
        change = ["sh", "-c", 'cd "$0" && exec "$@"', folder, *words]
        return await asyncio.create_subprocess_exec(
            *("nsenter", "--target", str(self.init_pid), "--mount", "--pid", "--", *change),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self.env,
            start_new_session=True,
        )

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the first process of the container."""
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.init_pid, number)

    def log_bytes(self) -> bytes:
        return self.log.read_bytes() if self.log.exists() else b""

    async def follow(self) -> AsyncIterator[bytes]:
        """Yield output from now until the process ends."""
        process, position = self.process, len(self.log_bytes())
        while True:
            has_ended = process is None or process.returncode is not None
            with self.log.open("rb") as log:
                log.seek(position)
                piece = log.read()
            position += len(piece)
            if piece:
                yield piece
            if has_ended:
                return
            await asyncio.sleep(0.01)


def _is_bubblewrap(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/exe").readlink().name == "bwrap"
    except OSError:
        return False


def _read_all(descriptor: int) -> str:
    with os.fdopen(descriptor) as file:
        return file.read()


class Cluster:
    """Reconciles the objects of a store with processes of this machine."""

    def __init__(self, store: ObjectStore, folder: Path, *, images: Mapping[str, Path]) -> None:
        self.store = store
        self.containers: dict[str, Container] = {}
        """By uid of the pod."""
        self.failures: list[str] = []
        self._folder = folder
        self._images = images
        self._numbers = itertools.count(2)
        self._pods_address = f"127.{10 + os.getpid() % 100}.{uuid.uuid4().int % 256}"
        self._services: dict[str, tuple[str, list[asyncio.Server]]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._loop_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2))
        self._loop_task = asyncio.create_task(self._run())

    def kill(self, selector: str, number: int = signal.SIGKILL) -> list[str]:
        """Send a signal to the containers of the pods with these labels; return their names."""
        pods = self.store.list("Pod", None, selector)
        found = [c for pod in pods if (c := self.container_of(pod)) is not None and c.is_running]
        for container in found:
            container.kill(number)
        return [container.pod["metadata"]["name"] for container in found]

    async def stop(self) -> None:
        """End all processes."""
        assert self._loop_task is not None
        self._loop_task.cancel()
        await asyncio.wait({self._loop_task})
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for container in self.containers.values():
            await self._end(container, 0)
        for _, servers in self._services.values():
            for server in servers:
                server.close()
        await self._http.close()

    def container_of(self, pod: Mapping[str, Any]) -> Container | None:
        return self.containers.get(pod["metadata"]["uid"])

    def delete(self, thing: dict[str, Any], grace_s: float | None = None) -> None:
        """Delete an object and what it owns; pods end within their grace period."""
        if thing["kind"] != "Pod":
            self.store.remove(thing)
            self._collect_owned()
        elif "deletionTimestamp" not in thing["metadata"]:
            thing["metadata"]["deletionTimestamp"] = _now()
            own = thing["spec"].get("terminationGracePeriodSeconds", 30)
            self.store.touch(thing)
            self._spawn(f"end {thing['metadata']['uid']}", self._delete_pod(thing, grace_s or own))

    async def _run(self) -> None:
        while True:
            try:
                self._reconcile()
            except Exception as error:  # noqa: BLE001 - reported by the test
                self.failures.append(repr(error))
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.store.changed.wait(), PERIOD_S)
            await asyncio.sleep(0.01)

    def _spawn(self, name: str, work: Any) -> None:
        """Run one task of a name at a time."""
        task = self._tasks.get(name)
        if task is None or task.done():
            self._tasks[name] = asyncio.create_task(work)
            self._tasks[name].add_done_callback(self._note_failure)
        else:
            work.close()

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failures.append(repr(error))

    def _reconcile(self) -> None:
        for kind in WORKLOADS:
            for workload in self.store.list(kind):
                self._scale(workload)
        for service in self.store.list("Service"):
            self._spawn(f"service {service['metadata']['uid']}", self._serve(service))
        for pod in self.store.list("Pod"):
            self._spawn(f"pod {pod['metadata']['uid']}", self._look_at(pod))

    def _collect_owned(self) -> None:
        uids = {thing["metadata"]["uid"] for thing in self.store.objects.values()}
        for thing in list(self.store.objects.values()):
            owners = thing["metadata"].get("ownerReferences", [])
            if owners and not any(owner["uid"] in uids for owner in owners):
                self.delete(thing)

    def _scale(self, workload: dict[str, Any]) -> None:
        pods = self._pods_of(workload)
        spec = workload["spec"]
        if workload["kind"] == "Job":
            self._advance_job(workload, pods)
            return
        revision = json.dumps(spec["template"], sort_keys=True)
        for pod in pods:
            if pod["metadata"]["annotations"]["revision"] != revision:
                self.delete(pod)
        names = {pod["metadata"]["name"] for pod in pods}
        base = workload["metadata"]["name"]
        for number in range(spec.get("replicas", 1)):
            if workload["kind"] == "StatefulSet":
                if f"{base}-{number}" not in names:
                    self._make_pod(workload, f"{base}-{number}", {"revision": revision})
            elif number >= len(pods):
                name = f"{base}-{uuid.uuid4().hex[:9]}-{uuid.uuid4().hex[:5]}"
                self._make_pod(workload, name, {"revision": revision})
        ready = sum(1 for pod in pods if pod["status"].get("ready"))
        self._set_status(
            workload,
            {
                **{"replicas": len(pods), "updatedReplicas": len(pods)},
                **{"readyReplicas": ready, "availableReplicas": ready},
            },
        )

    def _advance_job(self, job: dict[str, Any], pods: list[dict[str, Any]]) -> None:
        spec, status = job["spec"], job.get("status", {})
        if any(each["type"] in ("Complete", "Failed") for each in status.get("conditions", [])):
            ended = datetime.fromisoformat(status["endedAt"].replace("Z", "+00:00"))
            age = (datetime.now(timezone.utc) - ended).total_seconds()
            if age >= spec.get("ttlSecondsAfterFinished", 1e9):
                self.delete(job)
            return
        phases = [pod["status"].get("phase") for pod in pods]
        failed = phases.count("Failed")
        started = datetime.fromisoformat(
            job["metadata"]["creationTimestamp"].replace("Z", "+00:00")
        )
        age = (datetime.now(timezone.utc) - started).total_seconds()
        new = {
            "active": len(pods) - phases.count("Failed") - phases.count("Succeeded"),
            "succeeded": phases.count("Succeeded"),
            "failed": failed,
        }
        wanted = spec.get("completions", 1)
        condition = ""
        codes = {pod["status"].get("exitCode") for pod in pods}
        if phases.count("Succeeded") >= wanted:
            condition = "Complete"
        elif codes & _fatal_codes(spec):
            condition = "Failed"
        elif failed > spec.get("backoffLimit", 6) or age > spec.get("activeDeadlineSeconds", 1e9):
            condition = "Failed"
            for pod in pods:
                if pod["status"].get("phase") not in ("Failed", "Succeeded"):
                    self.delete(pod)
        if condition:
            new["conditions"] = [{"type": condition, "status": "True"}]
            new["endedAt"] = _now()
        else:
            taken = {
                pod["metadata"]["annotations"]["index"]
                for pod in pods
                if pod["status"].get("phase") != "Failed"
            }
            for index in range(wanted):
                if str(index) not in taken:
                    name = job["metadata"]["name"]
                    if spec.get("completionMode") == "Indexed":
                        name += f"-{index}"
                    self._make_pod(job, f"{name}-{uuid.uuid4().hex[:5]}", {"index": str(index)})
        self._set_status(job, new)

    def _set_status(self, workload: dict[str, Any], status: dict[str, Any]) -> None:
        if workload.get("status") != status:
            workload["status"] = status
            self.store.touch(workload)

    def _pods_of(self, workload: Mapping[str, Any]) -> list[dict[str, Any]]:
        uid = workload["metadata"]["uid"]
        return [
            pod
            for pod in self.store.list("Pod", workload["metadata"]["namespace"])
            if any(owner["uid"] == uid for owner in pod["metadata"].get("ownerReferences", []))
        ]

    def _make_pod(self, workload: dict[str, Any], name: str, notes: dict[str, str]) -> None:
        template = copy.deepcopy(workload["spec"]["template"])
        metadata = template.get("metadata", {})
        labels = metadata.get("labels", {})
        if workload["kind"] == "Job":
            labels = {**labels, "job-name": workload["metadata"]["name"]}
        owner = {
            **{"apiVersion": workload["apiVersion"], "kind": workload["kind"]},
            **{"name": workload["metadata"]["name"], "uid": workload["metadata"]["uid"]},
        }
        pod = {
            **{"apiVersion": "v1", "kind": "Pod", "spec": template["spec"]},
            "metadata": {
                **{"name": name, "labels": labels, "annotations": notes},
                "ownerReferences": [{**owner, "controller": True}],
            },
            "status": {"phase": "Pending"},
        }
        self.store.create(pod, workload["metadata"]["namespace"])

    async def _look_at(self, pod: dict[str, Any]) -> None:
        """Start, restart, probe or finish one pod."""
        container = self.container_of(pod)
        if "deletionTimestamp" in pod["metadata"] or pod["status"]["phase"] in (
            *("Succeeded", "Failed"),
        ):
            return
        if container is None:
            await self._start_pod(pod)
        elif container.process is None:
            await self._initialize(pod, container)
        elif container.is_running:
            await self._probe(pod, container)
        elif container.process is not None and container.process.returncode is not None:
            await self._restart(pod, container)

    async def _start_pod(self, pod: dict[str, Any]) -> None:
        number = next(self._numbers)
        address = f"{self._pods_address}.{number % 250 + 2}"
        folder = self._folder / "pods" / pod["metadata"]["uid"]
        folder.mkdir(parents=True)
        pod["status"] |= {"podIP": address, "startTime": _now()}
        try:
            made = [
                Container(pod, spec, folder, *self._command(pod, spec, address, folder))
                for spec in [*pod["spec"].get("initContainers", []), pod["spec"]["containers"][0]]
            ]
        except LookupError as error:  # as CreateContainerConfigError; tried again
            shutil.rmtree(folder)
            pod["status"]["message"] = str(error)
            return
        *before, container = made
        container.before = before
        self.containers[pod["metadata"]["uid"]] = container
        if "subdomain" in pod["spec"]:
            self._write_hosts()

    async def _initialize(self, pod: dict[str, Any], container: Container) -> None:
        """Run the init containers one after the other, then start the container."""
        if not container.before:
            await container.start()
            self._report(pod, container)
            return
        first = container.before[0]
        if first.process is None or first.process.returncode not in (None, 0):
            await first.start()
        elif first.process.returncode == 0:
            container.before.pop(0)

    async def _restart(self, pod: dict[str, Any], container: Container) -> None:
        assert container.process is not None
        code = container.process.returncode
        policy = pod["spec"].get("restartPolicy", "Always")
        container.is_ready = False
        if policy == "Never" or (policy == "OnFailure" and code == 0):
            pod["status"]["phase"] = "Succeeded" if code == 0 else "Failed"
            pod["status"]["exitCode"] = code
            self._report(pod, container, {"terminated": {"exitCode": code}})
            return
        if container.start_after == 0.0:
            container.restarts += 1
            delay = FIRST_BACKOFF_S * 2 ** min(container.restarts, 5)
            container.start_after = time.monotonic() + delay
            self._report(pod, container, {"waiting": {"reason": "CrashLoopBackOff"}})
        elif time.monotonic() >= container.start_after:
            container.start_after, container.failures = 0.0, 0
            await container.start()
            self._report(pod, container)

    async def _probe(self, pod: dict[str, Any], container: Container) -> None:
        if time.monotonic() - container.probed_at < PROBE_S:
            return
        container.probed_at = time.monotonic()
        spec, was_ready = container.spec, container.is_ready
        probe = spec.get("readinessProbe")
        if container.hook is not None and not container.hook.done():
            return
        container.is_ready = probe is None or await self._answers(pod, probe)
        liveness = spec.get("livenessProbe")
        if liveness is not None and was_ready and not container.is_ready:
            is_alive = await self._answers(pod, liveness)
            container.failures = 0 if is_alive else container.failures + 1
            if container.failures > liveness.get("failureThreshold", 3):
                container.kill()
        if was_ready != container.is_ready:
            self._report(pod, container)

    async def _answers(self, pod: Mapping[str, Any], probe: Mapping[str, Any]) -> bool:
        get = probe["httpGet"]
        port = get["port"]
        if isinstance(port, str):
            ports = pod["spec"]["containers"][0]["ports"]
            port = next(each["containerPort"] for each in ports if each["name"] == port)
        try:
            url = f"http://{pod['status']['podIP']}:{port}{get['path']}"
            async with self._http.get(url) as answer:
                return answer.status < 400
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
            return False

    def _report(
        self, pod: dict[str, Any], container: Container, state: dict[str, Any] | None = None
    ) -> None:
        """Write the state of a container into its pod."""
        status = pod["status"]
        if status["phase"] == "Pending":
            status["phase"] = "Running"
        status["ready"] = container.is_ready
        word = "True" if container.is_ready else "False"
        status["conditions"] = [{"type": "Ready", "status": word}]
        status["containerStatuses"] = [
            {
                **{"name": pod["spec"]["containers"][0]["name"], "ready": container.is_ready},
                **{"restartCount": container.restarts, "image": "fake", "imageID": "fake"},
                "state": state or {"running": {"startedAt": _now()}},
            }
        ]
        self.store.touch(pod)

    async def _delete_pod(self, pod: dict[str, Any], grace_s: float) -> None:
        container = self.containers.get(pod["metadata"]["uid"])
        if container is not None:
            await self._end(container, grace_s)
            del self.containers[pod["metadata"]["uid"]]
        shutil.rmtree(self._folder / "roots" / pod["metadata"]["uid"], ignore_errors=True)
        self.store.remove(pod)

    async def _end(self, container: Container, grace_s: float) -> None:
        container.is_ready = False
        process = container.process
        if container.hook is not None:
            container.hook.cancel()
        if process is None:
            return
        if grace_s:
            container.kill(signal.SIGTERM)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(process.wait(), grace_s)
        container.kill()
        if process.returncode is None:
            process.kill()
        await process.wait()

    def _command(
        self, pod: dict[str, Any], spec: dict[str, Any], address: str, folder: Path
    ) -> tuple[list[str], dict[str, str]]:
        """Return the bwrap command of a container, and its environment."""
        security = {**pod["spec"].get("securityContext", {}), **spec.get("securityContext", {})}
        words = ["bwrap", "--unshare-pid", "--as-pid-1", "--die-with-parent"]
        image = self._images.get(spec["image"])
        if image is None:
            mounts = [each["mountPath"] for each in spec.get("volumeMounts", [])]
            missing = [path for path in mounts if not Path(path).is_dir()]
            words += [
                word for path in sorted(Path("/").iterdir()) for word in _shown(path, missing)
            ]
            user = str(security.get("runAsUser", 0))
            words += ["--unshare-user", "--uid", user, "--gid", user]
            words += ["--dir", "/run", "--tmpfs", "/dev/shm"]
        else:
            root = self._folder / "roots" / pod["metadata"]["uid"]
            shutil.copytree(image, root, symlinks=True)
            words += ["--bind", str(root), "/"]
        words += ["--dev", "/dev", "--proc", "/proc"]
        if image is None:
            words += self._mounts(pod, spec, folder)
            hosts = folder / "hosts"
            hosts.write_text(self._hosts(pod["metadata"]["uid"]))
            words += ["--ro-bind", str(hosts), "/etc/hosts"]
            if "subdomain" in pod["spec"]:
                words += ["--unshare-uts", "--hostname", _host_name(pod)]
        if security.get("readOnlyRootFilesystem") or image is None:
            words += ["--remount-ro", "/"]
        folder_of_image = str(ROOT) if image is None else "/"
        words += ["--chdir", spec.get("workingDir", folder_of_image), "--"]
        env = {"PATH": "/usr/bin:/bin", **self._variables(pod, spec, address)}
        if image is None:
            env["PATH"] = f"{Path(sys.executable).parent}:/usr/bin:/bin"
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [env.get("PYTHONPATH"), str(ROOT)]))
        given = [*spec.get("command", []), *spec.get("args", [])]
        expanded = [expand(each, env) for each in given]
        return [*words, *(each.replace("0.0.0.0", address) for each in expanded)], env

    def _mounts(self, pod: dict[str, Any], spec: dict[str, Any], folder: Path) -> list[str]:
        namespace = pod["metadata"]["namespace"]
        sources: dict[str, tuple[str, Path]] = {}
        for volume in pod["spec"].get("volumes", []):
            path = folder / "volumes" / volume["name"]
            option = "--bind"
            if "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                if ("PersistentVolumeClaim", namespace, claim) not in self.store.objects:
                    raise LookupError(f"no claim {claim}")
                path = self._folder / "claims" / f"{namespace}.{claim}"
            path.mkdir(parents=True, exist_ok=True)
            for kind, key, field in (
                ("ConfigMap", "configMap", "name"),
                ("Secret", "secret", "secretName"),
            ):
                if key in volume:
                    option = "--ro-bind"
                    for name, content in self._data(kind, namespace, volume[key][field]).items():
                        (path / name).write_bytes(content)
            sources[volume["name"]] = (option, path)
        for claim in self._claims_of(pod):
            path = self._folder / "claims" / f"{namespace}.{claim}"
            path.mkdir(parents=True, exist_ok=True)
            sources[claim.rpartition(f"-{pod['metadata']['name']}")[0]] = ("--bind", path)
        words: list[str] = []
        mounts = spec.get("volumeMounts", [])
        for mount in sorted(mounts, key=lambda each: each["mountPath"]):
            option, path = sources[mount["name"]]
            path = path / mount.get("subPath", "")
            words += [option, str(path), mount["mountPath"]]
        for path in (ROOT, Path(sys.prefix)):  # the "image", also where a volume hides it
            words += ["--ro-bind", str(path), str(path)]
        return words

    def _claims_of(self, pod: Mapping[str, Any]) -> list[str]:
        for owner in pod["metadata"].get("ownerReferences", []):
            key = (owner["kind"], pod["metadata"]["namespace"], owner["name"])
            templates = self.store.objects.get(key, {"spec": {}})["spec"].get(
                "volumeClaimTemplates", []
            )
            return [f"{each['metadata']['name']}-{pod['metadata']['name']}" for each in templates]
        return []

    def _data(self, kind: str, namespace: str, name: str) -> dict[str, bytes]:
        thing = self.store.objects.get((kind, namespace, name))
        if thing is None:
            raise LookupError(f"no {kind} {name}")
        found = {key: value.encode() for key, value in thing.get("data", {}).items()}
        if kind == "Secret":
            found = {key: base64.b64decode(value) for key, value in found.items()}
            found |= {key: text.encode() for key, text in thing.get("stringData", {}).items()}
        return found

    def _variables(
        self, pod: Mapping[str, Any], spec: Mapping[str, Any], address: str
    ) -> dict[str, str]:
        found = {}
        namespace = pod["metadata"]["namespace"]
        fields = {
            **{"status.podIP": address, "metadata.name": pod["metadata"]["name"]},
            "metadata.uid": pod["metadata"]["uid"],
            **{
                f"metadata.annotations['{name}']": value
                for name, value in pod["metadata"].get("annotations", {}).items()
            },
        }
        if "index" in pod["metadata"].get("annotations", {}):
            found["JOB_COMPLETION_INDEX"] = pod["metadata"]["annotations"]["index"]
        for each in spec.get("env", []):
            source = each.get("valueFrom", {})
            if "value" in each:
                found[each["name"]] = expand(each["value"], found)
            elif "fieldRef" in source:
                found[each["name"]] = fields[source["fieldRef"]["fieldPath"]]
            elif "secretKeyRef" in source:
                secret = source["secretKeyRef"]
                values = self._data("Secret", namespace, secret["name"])
                found[each["name"]] = values[secret["key"]].decode()
        return found

    def _hosts(self, uid: str) -> str:
        """Return /etc/hosts of a pod: Services, and the pods of headless ones."""
        lines = ["127.0.0.1 localhost"]
        for name, (address, _) in self._services.items():
            namespace, _, short = name.partition("/")
            lines.append(f"{address} {short} {short}.{namespace}.svc.cluster.local")
        for pod in self.store.list("Pod"):
            address, phase = pod["status"].get("podIP"), pod["status"].get("phase")
            if "subdomain" in pod["spec"] and address and phase not in ("Failed", "Succeeded"):
                metadata, host = pod["metadata"], _host_name(pod)
                name = f"{host}.{pod['spec']['subdomain']}"
                own = f" {host}" if metadata["uid"] == uid else ""
                full = f"{name}.{metadata['namespace']}.svc.cluster.local"
                lines.append(f"{address} {full} {name}{own}")
        return "\n".join(lines) + "\n"

    def _write_hosts(self) -> None:
        for hosts in (self._folder / "pods").glob("*/hosts"):
            hosts.write_text(self._hosts(hosts.parent.name))

    async def _serve(self, service: dict[str, Any]) -> None:
        """Relay the ports of a Service to its pods that are ready."""
        metadata = service["metadata"]
        key = f"{metadata['namespace']}/{metadata['name']}"
        if key in self._services or service["spec"].get("clusterIP") == "None":
            return
        address = f"{self._pods_address}.{250 - len(self._services)}"
        servers: list[asyncio.Server] = []
        self._services[key] = (address, servers)
        for port in service["spec"]["ports"]:
            target = port.get("targetPort", port["port"])

            async def relay(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: Any = target
            ) -> None:
                await self._relay(service, target, reader, writer)

            servers.append(await asyncio.start_server(relay, address, port["port"]))
        self._write_hosts()

    async def _relay(
        self,
        service: Mapping[str, Any],
        target: Any,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        selector = service["spec"]["selector"].items()
        pods = [
            pod
            for pod in self.store.list("Pod", service["metadata"]["namespace"])
            if selector <= pod["metadata"].get("labels", {}).items() and pod["status"].get("ready")
        ]
        try:
            if not pods:
                raise ConnectionRefusedError
            pod = pods[next(self._numbers) % len(pods)]
            ports = pod["spec"]["containers"][0].get("ports", [])
            number = next((e["containerPort"] for e in ports if e.get("name") == target), target)
            there = await asyncio.open_connection(pod["status"]["podIP"], number)
        except OSError:
            writer.transport.abort()
            return
        await asyncio.gather(_copy(reader, there[1]), _copy(there[0], writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while piece := await reader.read(65536):
            writer.write(piece)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


def _host_name(pod: Mapping[str, Any]) -> str:
    """Return the host name of a pod of an indexed Job."""
    metadata = pod["metadata"]
    return f"{metadata['ownerReferences'][0]['name']}-{metadata['annotations']['index']}"


def _fatal_codes(job_spec: Mapping[str, Any]) -> set[int]:
    """Return the exit codes that fail a Job at once."""
    rules = job_spec.get("podFailurePolicy", {}).get("rules", [])
    return {
        code
        for rule in rules
        if rule["action"] == "FailJob"
        for code in rule.get("onExitCodes", {}).get("values", [])
    }


def _shown(path: Path, missing: list[str]) -> list[str]:
    """Show a path read-only; folders in which mounts have to be made are made of their entries."""
    if str(path) in ("/proc", "/dev", "/run"):
        return []
    if path.is_symlink():
        return ["--symlink", str(path.readlink()), str(path)]
    if not any(each.startswith(f"{path}/") for each in missing):
        return ["--ro-bind", str(path), str(path)]
    inner = [word for each in sorted(path.iterdir()) for word in _shown(each, missing)]
    return ["--dir", str(path), *inner]


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def load_manifests(text: str) -> list[dict[str, Any]]:
    """Return the objects of a YAML stream."""
    return [each for each in yaml.safe_load_all(text) if each]
